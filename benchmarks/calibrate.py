"""``python -m benchmarks calibrate``: the cost model behind ``backend="auto"``, fitted to a few calls.

Each backend attends over graphs whose work (calls, rectangles, cells, edges, nodes, pairs) is known and
differs; the constants of :mod:`gnn_attention.backends.cost_model` are those that come nearest to the measured
times, each relative to itself, in half a minute.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch.utils.benchmark import Timer

from gnn_attention import patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends.cost_model import Costs, Work, path_of_costs, save
from gnn_attention.backends.plan.work import WORK, dense_work
from gnn_attention.graph import TokenGraph

HEADS, DIM = 8, 64  # the model counts nanoseconds for a head of 64 channels
CASES: dict[str, tuple[str, Callable[[], TokenGraph]]] = {
    "few pairs": ("dense", lambda: patterns.window(256, 32)),
    "many pairs": ("dense", lambda: patterns.window(2048, 32)),
    "few causal pairs": ("dense", lambda: patterns.causal(512)),
    "many causal pairs": ("dense", lambda: patterns.causal(4096)),
    "few low tiles": ("tiles", lambda: patterns.window(512, 64)),
    "many low tiles": ("tiles", lambda: patterns.window(8192, 64)),
    "wide tiles": ("tiles", lambda: patterns.window(4096, 512)),
    "short documents": ("tiles", lambda: patterns.documents([16] * 512)),
    "few edges": ("rows", lambda: patterns.random_senders(1024, 4)),
    "many nodes": ("rows", lambda: patterns.random_senders(16384, 4)),
    "many edges": ("rows", lambda: patterns.random_senders(8192, 48)),
}
# what is visited -> its constant
CONSTANTS = ("call", "rectangle", "cell", "edge", "node", "masked_pair", "plain_pair")
PARTS = {"weighted_cells" if name == "cell" else f"{name}s": name for name in CONSTANTS}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no option."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, fit, save the constants in the file that ``auto`` reads, and record it.

    OSError, before anything is measured, where they cannot be written: a read-only HOME.
    """
    path = path_of_costs()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        advice = "set GNN_ATTENTION_COSTS to a file that can"
        raise OSError(f"{path} cannot be written ({error.strerror}): {advice}") from None
    seconds, works = {}, {}
    for name, (backend, make) in CASES.items():
        graph = make()
        works[name] = WORK[backend](graph) if backend in WORK else Work(calls=1) + dense_work(graph)
        seconds[name] = _measured(graph, backend)
    found = fit(list(works.values()), list(seconds.values()))
    predicted = {name: found.seconds(work, HEADS) for name, work in works.items()}
    cases = [{"case": name, "seconds": seconds[name], "predicted": predicted[name]} for name in CASES]
    about = {"bench": "calibrate", "torch": torch.__version__, "costs": asdict(found)}
    return {**about, "cases": cases, "file": str(save(found, path))}


def fit(works: Sequence[Work], seconds: Sequence[float], heads: int = HEADS) -> Costs:
    """The constants by which :meth:`Costs.seconds` is nearest to the times; defaults where no case measures.

    >>> work = [Work(calls=1, edges=1000), Work(calls=1, edges=9000)]
    >>> found = fit(work, [Costs(call=7e4, edge=5.0).seconds(w, 8) for w in work])
    >>> round(found.call), round(found.edge, 3), found.cell == Costs().cell
    (70000, 5.0, True)
    """
    names = [name for name in PARTS if any(getattr(work, name) for work in works)]
    scale = torch.tensor([1 if name == "calls" else heads for name in names], dtype=torch.float64)
    counts = [[getattr(work, name) for name in names] for work in works]
    wanted = torch.tensor(seconds, dtype=torch.float64) * 1e9
    default = torch.tensor([getattr(Costs(), PARTS[name]) for name in names], dtype=torch.float64)
    shares = torch.tensor(counts, dtype=torch.float64) * scale / wanted.unsqueeze(1)
    constants = _least_squares(shares, default).tolist()
    return replace(Costs(), **dict(zip((PARTS[name] for name in names), constants, strict=True)))


def _least_squares(shares: Tensor, default: Tensor) -> Tensor:
    """Constants for which each row of ``shares`` sums nearest to 1; the default where one costs nothing."""
    free = torch.ones_like(default, dtype=torch.bool)
    constants = default.clone()
    while free.any():
        rest = 1.0 - shares[:, ~free] @ default[~free]
        found = torch.linalg.lstsq(shares[:, free] * default[free], rest, driver="gelsd").solution
        constants[free] = found * default[free]
        absurd = free & (constants < 0.01 * default)
        if not absurd.any():
            break
        constants[absurd] = default[absurd]
        free &= ~absurd
    return constants


def _measured(graph: TokenGraph, backend: str) -> float:
    """The median time of a forward pass."""
    sizes = graph.num_dst, graph.num_src, graph.num_src
    q, k, v = (torch.randn(1, n, HEADS, DIM).transpose(1, 2) for n in sizes)
    return _median(partial(attend, q, k, v, graph, backend=backend))


def _median(call: Callable[[], Tensor]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    with torch.no_grad():
        call()  # its plan is made once
        return float(timer.adaptive_autorange(max_run_time=2.0).median)


def text(record: dict[str, Any]) -> str:
    """The constants next to their defaults, and the times next to what they predict."""
    lines = [f"{'constant (ns)':<24}{'here':>12}{'default':>12}"]
    for name, default in asdict(Costs()).items():
        lines.append(f"{name:<24}{record['costs'][name]:>12.2f}{default:>12.2f}")
    lines += ["", f"{'case':<24}{'ms':>12}{'predicted':>12}"]
    for case in record["cases"]:
        lines.append(f"{case['case']:<24}{case['seconds'] * 1e3:>12.3f}{case['predicted'] * 1e3:>12.3f}")
    saved = f"saved in {record['file']}, which backend='auto' reads in processes to come"
    return "\n".join([*lines, "", saved])
