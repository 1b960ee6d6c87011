"""Soak: an hour of everything at once, in one process whose memory stays as it is.

A child process works through rounds of changing graphs: random ones through the backends, forward and
backward, algebra, layers, decoding with caches, and wrong input that must raise. Its resident memory is
sampled all the while, without asking Python to collect, but after the C library has given back what is not
used (``malloc_trim``): what glibc keeps free for later is its own affair, here 3 to 35 MB from one moment to
the next, while what is in use stays as it is to 0.1 MB. The median of the last quarter of the samples may be
at most 2 % above that of the second; the first is for what is cached once. The largest problems, random cases
of the guarantee F1 on all backends, compared with the float64 formula, are some that come again and again; all
other graphs are new in every round, of bounded size. Afterwards every memo of the package is counted, and
what is in the temporary folder.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gnn_attention import algebra, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.cache import KeyValueCache
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model import Config, LanguageModel, generate
from gnn_attention.verify.measure import EXACT
from tests.guarantees import equality, memos
from tests.guarantees.draws import Draw
from tests.guarantees.families import any_family
from tests.guarantees.guarantee import Guarantee, Measured, Tell

ALLOWED = 0.02  # of the memory in the second quarter
FEWEST = 4  # samples of the memory: one for each quarter
EVERY = 0.02  # seconds between two samples at most, of a short soak; a thousandth of a long one
HEADS = 4
Work = Callable[[random.Random], str | None]  # what is wrong, if anything is


def measure(count: int, tell: Tell) -> Measured:
    """Soak for ``count`` seconds, in a process of its own with a temporary folder of its own."""
    if not Path("/proc/self/statm").exists():
        return Measured(
            "nothing measured", skipped=("resident memory is read from /proc, which only Linux has",)
        )
    if count <= 0:
        return Measured("nothing measured", skipped=("0 seconds",))
    with tempfile.TemporaryDirectory() as folder:
        said = _in_a_child(count, folder, tell)
        files = sorted(path.name for path in Path(folder).rglob("*"))
    if "error" in said:
        return Measured("nothing measured", (f"the process died: {said['error']}",))
    failures = [*said["wrong"], *(f"a file was left: {name}" for name in files), *_growth(said["memory"])]
    second, last = quarters(said["memory"])
    value = (
        f"{said['operations']:,} operations in {said['seconds']:,.0f} s, {said['judged']:,} of them matched "
        f"against the formula; memory {second:.1f} MB in the second quarter, {last:.1f} MB in the last "
        f"({100 * (last / second - 1):+.2f} %); {len(files)} files left; {said['memos']} memos bounded"
    )
    return Measured(value, tuple(failures))


def quarters(memory: list[float]) -> tuple[float, float]:
    """The medians of the second and of the last quarter of the samples.

    >>> quarters([9.0, 1.0, 2.0, 3.0])
    (1.0, 3.0)
    """
    size = max(len(memory) // 4, 1)
    return statistics.median(memory[size : 2 * size] or memory), statistics.median(memory[-size:])


def _growth(memory: list[float]) -> list[str]:
    if len(memory) < FEWEST:
        return [f"only {len(memory)} samples of the memory"]
    second, last = quarters(memory)
    return [f"memory grew from {second:.1f} to {last:.1f} MB"] if not last <= (1 + ALLOWED) * second else []


def _in_a_child(seconds: float, folder: str, tell: Tell) -> dict[str, Any]:
    program = f"from tests.guarantees import endurance; endurance.child({seconds!r})"
    paths = os.pathsep.join(str(Path(path or ".").absolute()) for path in sys.path)
    variables = {**os.environ, "TMPDIR": folder, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    assert child.stdout is not None
    assert child.stderr is not None
    with child:
        found: dict[str, Any] = {}
        for line in child.stdout:
            found = json.loads(line)
            tell(
                f"{found['seconds']:.0f} s, {found['operations']:,} operations, {found['memory'][-1]:.0f} MB"
            )
        error = child.stderr.read().strip().splitlines()[-1:] or ["no word of it"]
    return (
        found
        if found.get("ended") and child.returncode == 0
        else {"error": f"exit code {child.returncode}, {error[0]}"}
    )


def child(seconds: float) -> None:
    """What the process does: a line of JSON every ten seconds, and at the end."""
    reported = 0.0
    for state in soak(seconds):
        if state["ended"] or state["seconds"] > reported + 10:
            reported = state["seconds"]
            print(json.dumps(state), flush=True)


def soak(seconds: float, works: dict[str, Work] | None = None) -> Iterator[dict[str, Any]]:
    """Rounds of all works until the time is over and there are the FEWEST samples, with what is known after
    each.

    Everything is loaded and run once before.
    """
    draws = _draws(min(LARGEST_POOL, int(seconds) // 10 + 2))
    works = {"equality": partial(_equality, draws), **WORKS} if works is None else works
    state: dict[str, Any] = {"operations": 0, "judged": 0, "memory": [], "wrong": []}
    state |= {"ended": False, "seconds": 0.0}
    number = 0
    for number in range(WARM + 2 * len(draws)):
        _round(works, number, state)
    began, sampled, every = time.monotonic(), 0.0, max(EVERY, seconds / 1000)
    while (now := time.monotonic() - began) < seconds or len(state["memory"]) < FEWEST:
        number += 1
        _round(works, number, state)
        if now >= sampled + every or not state["memory"]:
            sampled = now
            state["memory"].append(_resident())
        state["seconds"] = time.monotonic() - began
        yield state
    bound, unbounded = memos.counted()
    state["wrong"] += unbounded
    yield {**state, "memos": bound, "ended": True}


def _round(works: dict[str, Work], number: int, state: dict[str, Any]) -> None:
    for name, work in works.items():
        state["operations"] += 1
        state["judged"] += name == "equality"
        try:
            wrong = work(random.Random(f"{name} {number}"))
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None and len(state["wrong"]) < 20:
            state["wrong"].append(f"round {number}, {name}: {wrong}"[:300])


def _resident() -> float:
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if give_back is not None:
        give_back(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _graph(rng: random.Random, most: int = 200) -> Any:
    while True:
        graph = any_family(rng, rng.randint(2, most), 0, HEADS)[0]
        if graph.heads is None and graph.batch is None:
            return graph


def _normal(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))


def _finite(*found: Tensor | None) -> str | None:
    return None if all(x is None or bool(x.isfinite().all()) for x in found) else "not finite"


def _draws(count: int) -> list[int]:
    """The first cases of F1 that are of a moderate size."""
    sizes = ((number, Draw(number).graph) for number in itertools.count())
    return [
        number
        for number, graph in itertools.islice(((n, g) for n, g in sizes if 0 < g.num_dst <= MODERATE), count)
    ]


def _equality(draws: list[int], rng: random.Random) -> str | None:
    found = equality.run([rng.choice(draws)])
    return found.mismatches[0].message if found.mismatches else None


def _attention(rng: random.Random) -> str | None:
    graph = _graph(rng)
    q = _normal(rng, 1, HEADS, graph.num_dst, 8).requires_grad_()
    k, v = (_normal(rng, 1, 2, graph.num_src, 8).requires_grad_() for _ in range(2))
    out, info = attend(
        q, k, v, graph, backend=rng.choice(["auto", "tiles", "rows", "dense", "mixed"]), return_info=True
    )
    return _finite(out, info.weights(), *torch.autograd.grad(out.sum(), [q, k, v], allow_unused=True))


def _algebra(rng: random.Random) -> str | None:
    one = _graph(rng, 80)
    other = patterns.window(one.num_dst, rng.randint(1, 9))
    joined = ((one | other) - other) ^ (one & other)
    if joined != one:
        return "((a | b) - b) ^ (a & b) is not a"
    part = algebra.restrict(one, range(rng.randint(1, one.num_dst)))
    return (
        None if (one @ other).num_edges >= 0 and part.num_edges <= one.num_edges else "a part has more edges"
    )


def _layer(rng: random.Random) -> str | None:
    graph, layer = (
        _graph(rng, 80),
        MessagePassingAttention(StandardHeads(16, HEADS), backend=rng.choice(["message_passing", "auto"])),
    )
    x = _normal(rng, graph.num_src, 16).requires_grad_()
    out = layer(x, graph if rng.random() < 0.7 else graph.edge_index)
    return _finite(*torch.autograd.grad(out.sum(), [x, *layer.parameters()]))


def _decoding(rng: random.Random) -> str | None:
    """Greedy tokens with a cache are those without."""
    model, n = _MODEL, rng.randint(10, 24)
    graph = patterns.window(n, rng.randint(2, n)) | patterns.sinks(n, 2)
    tokens = torch.tensor([rng.randrange(20) for _ in range(4)])
    with torch.no_grad():
        found = generate(model, tokens, n - 4, 0.0, cache=KeyValueCache(graph, model.config.num_layers))
        whole = model(found[None], graph)[0]
    chosen = whole[3:-1].gather(1, found[4:, None])[:, 0]
    behind, allowed = (
        float((whole[3:-1].amax(1) - chosen).max()),
        2 * EXACT * float(whole.abs().max()),
    )  # both passes are off
    return None if behind <= allowed else "decoding differs from the full pass"


def _errors(rng: random.Random) -> str | None:
    graph, x = _graph(rng, 40), _normal(rng, 1, 1, 5, 4)
    wrong: list[Callable[[], object]] = [
        lambda: attend(x, x, x, patterns.causal(7)),
        lambda: attend(x, x, x, patterns.causal(5), backend="nothing"),
        lambda: graph.rows(3, graph.num_dst + 1),
        lambda: graph | patterns.causal(graph.num_dst + 1),
        lambda: TokenGraph.from_edges(torch.tensor([[0, 9], [1, 1]]), 3),
    ]
    try:
        rng.choice(wrong)()
    except (ValueError, IndexError):
        return None
    return "nothing was raised"


with torch.random.fork_rng(devices=[]):
    _SIZES = Config(vocabulary_size=20, width=16, num_layers=2, num_heads=HEADS, head_dim=4, mlp_width=16)
    _MODEL = LanguageModel(_SIZES).double().eval()
WARM = 10  # rounds before the first sample
LARGEST_POOL, MODERATE = 64, 100
WORKS: dict[str, Work] = {
    "attend": _attention,
    "algebra": _algebra,
    "layer": _layer,
    "decoding": _decoding,
    "errors": _errors,
}
GUARANTEE = Guarantee(
    name="soak",
    promise=(
        "memory stays as it is however long the work goes on, nothing is left in temporary folders, every "
        "memo is bounded"
    ),
    bar=(
        "an hour of mixed work: resident memory, but for what the C library keeps free, flat within "
        f"{ALLOWED:.0%}, 0 files "
        "left, 0 unbounded memos, every result right"
    ),
    quick=3,
    full=3600,
    measure=measure,
)
