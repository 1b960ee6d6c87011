"""Soak: five minutes of mixed work in one process do not let its memory grow.

Each round of a child process compares a random case of F1 on every backend with the formula, combines graphs by
set operations, and decodes with a cache. The graphs of each round are new and of bounded size. The resident
memory is sampled after the C library has returned its free memory. The median of the last quarter of samples may
be at most 2 % above that of the second quarter; caches fill during the first. No round after the first ten
leaves a file in the temporary folder.
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
from tests.guarantees.families import draw_family
from tests.guarantees.guarantee import Guarantee, Tell, Verdict

ALLOWED = 0.02  # growth as a share of the memory in the second quarter
SAMPLES = 1000  # the most samples of the memory; there are at least 8
WARM = 10  # rounds before the first sample
DRAWS = range(8)  # the cases of F1, which are repeated
ROOT = Path(__file__).parents[2]
Work = Callable[[random.Random], str | None]  # returns a fault or None


def _draw_graph(rng: random.Random, max_tokens: int) -> TokenGraph:
    """Draw a graph of a family whose edges are the same in all samples and heads."""
    return draw_family(rng, rng.randint(2, max_tokens), 0, 4)[0]


def _check_equality(rng: random.Random) -> str | None:
    failures = equality.compare([Draw(rng.choice(DRAWS))], lambda text: None).failures
    return failures[0] if failures else None


def _check_algebra(rng: random.Random) -> str | None:
    a = _draw_graph(rng, 80)
    b = patterns.window(a.num_dst, rng.randint(1, 9))
    is_equal = ((a | b) - b) ^ (a & b) == a
    return None if is_equal and a == a.T.T else "((a | b) - b) ^ (a & b) is not a"


def _check_decoding(rng: random.Random) -> str | None:
    """Check that greedy tokens generated with a cache maximize the logits of the full pass."""
    n = rng.randint(10, 24)
    graph = patterns.window(n, rng.randint(2, n)) | patterns.sinks(n, 2)
    prompt = torch.tensor([rng.randrange(20) for _ in range(4)])
    with torch.no_grad():
        cache = KeyValueCache(graph, MODEL.config.num_layers)
        tokens = generate(MODEL, prompt, n - 4, 0.0, cache=cache)
        logits = MODEL(tokens[None], graph)[0, 3:-1]
    deficit = logits.amax(1) - logits.gather(1, tokens[4:, None])[:, 0]
    return None if bool((deficit < 1e-9).all()) else "decoding differs from the full pass"


with torch.random.fork_rng(devices=[]):
    SIZES = Config(vocabulary_size=20, width=16, num_layers=2, num_heads=4, head_dim=4, mlp_width=16)
    MODEL = LanguageModel(SIZES).double().eval()
WORKS: dict[str, Work] = {
    "equality": _check_equality,
    "algebra": _check_algebra,
    "decoding": _check_decoding,
}


def soak(seconds: float, works: dict[str, Work]) -> dict[str, Any]:
    """Run rounds of all works for some seconds; return their number, the faults and samples of the memory."""
    outcome: dict[str, Any] = {"rounds": 0, "wrong": [], "memory": []}
    for _ in range(WARM):
        _work_once(works, outcome)
    folder = Path(tempfile.gettempdir())
    files, start = set(folder.iterdir()), time.monotonic()
    while (now := time.monotonic() - start) < seconds or len(outcome["memory"]) < 8:
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
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if malloc_trim is not None:
        malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def quarters(memory: list[float]) -> tuple[float, float]:
    """Return the medians of the second and of the last quarter of the samples.

    >>> quarters([9.0, 1.0, 2.0, 3.0])
    (1.0, 3.0)
    """
    size = len(memory) // 4
    return statistics.median(memory[size : 2 * size]), statistics.median(memory[-size:])


def judge(outcome: dict[str, Any]) -> tuple[str, ...]:
    """Return the faults of a soak, of which growth of memory is one."""
    second, last = quarters(outcome["memory"])
    growth = [] if last <= (1 + ALLOWED) * second else [f"memory grew from {second:.1f} to {last:.1f} MB"]
    return (*outcome["wrong"], *growth)


def _measure(seconds: int, tell: Tell) -> Verdict:
    """Soak in a child process with its own temporary folder."""
    if not Path("/proc/self/statm").exists():
        return Verdict("nothing measured", ("resident memory is read from /proc, as in Linux",))
    if seconds <= 0:
        return Verdict("nothing measured", ("0 seconds",))
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
        message = child.stderr.strip().splitlines()[-1:]
        return Verdict("nothing measured", (f"exit code {child.returncode}: {message}",))
    outcome = json.loads(child.stdout)
    second, last = quarters(outcome["memory"])
    value = (
        f"{outcome['rounds'] * len(WORKS):,} operations in {seconds:,} s; memory {second:.1f} MB in the second "
        f"quarter, {last:.1f} MB in the last ({100 * (last / second - 1):+.2f} %)"
    )
    return Verdict(value, judge(outcome))


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
