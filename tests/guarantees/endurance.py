"""Soak: five minutes of everything at once, in one process whose memory stays as it is.

A child process works in rounds: a random case of F1 on every backend against the formula, graphs and their
algebra, and decoding with caches. All graphs are new in every round, of bounded size. Its resident memory is sampled after the C library has given back what it keeps free for later.
The median of the last quarter of the samples may be at most 2 % above that of the second; the first is for
what is cached once. No later round leaves a file in the temporary folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention.cache import KeyValueCache
from gnn_attention.graph import TokenGraph
from gnn_attention.model import Config, LanguageModel, generate
from tests.guarantees import equality
from tests.guarantees.draws import Draw
from tests.guarantees.families import any_family
from tests.guarantees.guarantee import Guarantee, Measured, Tell

ALLOWED = 0.02  # of the memory in the second quarter
SAMPLES = 1000  # of the memory at most, and 8 at least
WARM = 10  # rounds before the first sample
DRAWS = range(8)  # the cases of F1 that come again and again
ROOT = Path(__file__).parents[2]
Work = Callable[[random.Random], str | None]  # what is wrong, or None


def _graph(chance: random.Random, most: int) -> TokenGraph:
    """Any family whose edges are the same in all samples and heads."""
    return any_family(chance, chance.randint(2, most), 0, 4)[0]


def _equality(chance: random.Random) -> str | None:
    failures = equality.compare([Draw(chance.choice(DRAWS))], lambda text: None).failures
    return failures[0] if failures else None


def _algebra(chance: random.Random) -> str | None:
    one = _graph(chance, 80)
    other = patterns.window(one.num_dst, chance.randint(1, 9))
    both = ((one | other) - other) ^ (one & other)
    return None if both == one and one == one.T.T else "((a | b) - b) ^ (a & b) is not a"


def _decoding(chance: random.Random) -> str | None:
    """Greedy tokens with a cache are those without."""
    n = chance.randint(10, 24)
    graph = patterns.window(n, chance.randint(2, n)) | patterns.sinks(n, 2)
    prompt = torch.tensor([chance.randrange(20) for _ in range(4)])
    with torch.no_grad():
        cache = KeyValueCache(graph, MODEL.config.num_layers)
        tokens = generate(MODEL, prompt, n - 4, 0.0, cache=cache)
        logits = MODEL(tokens[None], graph)[0, 3:-1]
    behind = logits.amax(1) - logits.gather(1, tokens[4:, None])[:, 0]
    return None if bool((behind < 1e-9).all()) else "decoding differs from the full pass"


with torch.random.fork_rng(devices=[]):
    SIZES = Config(vocabulary_size=20, width=16, num_layers=2, num_heads=4, head_dim=4, mlp_width=16)
    MODEL = LanguageModel(SIZES).double().eval()
WORKS: dict[str, Work] = {
    "equality": _equality,
    "algebra": _algebra,
    "decoding": _decoding,
}


def soak(seconds: float, works: dict[str, Work]) -> dict[str, Any]:
    """Rounds of all works: how many, what was wrong, and samples of the memory for so many seconds."""
    outcome: dict[str, Any] = {"rounds": 0, "wrong": [], "memory": []}
    for _ in range(WARM):
        _work_once(works, outcome)
    folder = Path(tempfile.gettempdir())
    files, began = set(folder.iterdir()), time.monotonic()
    while (now := time.monotonic() - began) < seconds or len(outcome["memory"]) < 8:
        _work_once(works, outcome)
        if now >= len(outcome["memory"]) * seconds / SAMPLES:
            outcome["memory"].append(_resident_megabytes())
    outcome["wrong"] += [f"a file was left: {path.name}" for path in set(folder.iterdir()) - files]
    return outcome


def _work_once(works: dict[str, Work], outcome: dict[str, Any]) -> None:
    for name, work in works.items():
        try:
            fault = work(random.Random(f"{name} {outcome['rounds']}"))
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None and len(outcome["wrong"]) < 20:
            outcome["wrong"].append(f"round {outcome['rounds']}, {name}: {fault}"[:300])
    outcome["rounds"] += 1


def _resident_megabytes() -> float:
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if give_back is not None:
        give_back(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def quarters(memory: list[float]) -> tuple[float, float]:
    """The medians of the second and of the last quarter of the samples.

    >>> quarters([9.0, 1.0, 2.0, 3.0])
    (1.0, 3.0)
    """
    size = len(memory) // 4
    return statistics.median(memory[size : 2 * size]), statistics.median(memory[-size:])


def judge(outcome: dict[str, Any]) -> tuple[str, ...]:
    """What is wrong with the outcome of a soak."""
    second, last = quarters(outcome["memory"])
    grew = [] if last <= (1 + ALLOWED) * second else [f"memory grew from {second:.1f} to {last:.1f} MB"]
    return (*outcome["wrong"], *grew)


def _measure(seconds: int, tell: Tell) -> Measured:
    """Soak in a process of its own, with a temporary folder of its own."""
    if not Path("/proc/self/statm").exists():
        return Measured("nothing measured", ("resident memory is read from /proc, as in Linux",))
    if seconds <= 0:
        return Measured("nothing measured", ("0 seconds",))
    tell(f"{seconds} s of mixed work")
    program = (
        "import json; from tests.guarantees import endurance; "
        f"print(json.dumps(endurance.soak({seconds}, endurance.WORKS)))"
    )
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-c", program]
        child = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if child.returncode:
        said = child.stderr.strip().splitlines()[-1:]
        return Measured("nothing measured", (f"exit code {child.returncode}: {said}",))
    outcome = json.loads(child.stdout)
    second, last = quarters(outcome["memory"])
    value = (
        f"{outcome['rounds'] * len(WORKS):,} operations in {seconds:,} s; memory {second:.1f} MB in the second "
        f"quarter, {last:.1f} MB in the last ({100 * (last / second - 1):+.2f} %)"
    )
    return Measured(value, judge(outcome))


GUARANTEE = Guarantee(
    name="soak",
    promise="memory stays as it is however long the work goes on, and nothing is left in temporary folders",
    bar=(
        "five minutes of mixed work: resident memory, but for what the C library keeps free, flat within "
        f"{ALLOWED:.0%}, no file left after the first rounds, every result right"
    ),
    quick=3,
    full=300,
    measure=_measure,
)
