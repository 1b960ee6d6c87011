"""Fit the cost model of ``backend="auto"`` to this machine: ``python -m benchmarks calibrate`` (half a minute).

Each backend attends over graphs that differ in their work (calls, rectangles, cells, edges, nodes, pairs), which is
known. The constants of :mod:`gnn_attention.backends.cost_model` are then chosen to minimize the squared relative
errors of the predicted times.
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

# The cost model counts nanoseconds for a head of 64 channels.
HEADS, DIM = 8, 64
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
# The field of `Work` that counts visits -> the constant of `Costs` that one visit costs.
CONSTANTS = ("call", "rectangle", "cell", "edge", "node", "masked_pair", "plain_pair")
PARTS = {"weighted_cells" if name == "cell" else f"{name}s": name for name in CONSTANTS}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no option."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the cases, fit the constants, save them in the file that ``auto`` reads, and return a record.

    Raises OSError before anything is measured if the file cannot be written, as with a read-only HOME.
    """
    path = path_of_costs()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror}): set GNN_ATTENTION_COSTS to a file that can"
        ) from None
    seconds, works = {}, {}
    for name, (backend, build) in CASES.items():
        graph = build()
        works[name] = WORK[backend](graph) if backend in WORK else Work(calls=1) + dense_work(graph)
        seconds[name] = _measure(graph, backend)
    costs = fit(list(works.values()), list(seconds.values()))
    predictions = {name: costs.seconds(work, HEADS) for name, work in works.items()}
    cases = [{"case": name, "seconds": seconds[name], "predicted": predictions[name]} for name in CASES]
    about = {"bench": "calibrate", "torch": torch.__version__, "costs": asdict(costs)}
    return {**about, "cases": cases, "file": str(save(costs, path))}


def fit(works: Sequence[Work], seconds: Sequence[float], heads: int = HEADS) -> Costs:
    """Fit the constants of :meth:`Costs.seconds` to measured times; a constant that no case uses keeps its default.

    >>> work = [Work(calls=1, edges=1000), Work(calls=1, edges=9000)]
    >>> costs = fit(work, [Costs(call=7e4, edge=5.0).seconds(w, 8) for w in work])
    >>> round(costs.call), round(costs.edge, 3), costs.cell == Costs().cell
    (70000, 5.0, True)
    """
    names = [name for name in PARTS if any(getattr(work, name) for work in works)]
    scale = torch.tensor([1 if name == "calls" else heads for name in names], dtype=torch.float64)
    counts = [[getattr(work, name) for name in names] for work in works]
    nanoseconds = torch.tensor(seconds, dtype=torch.float64) * 1e9
    default = torch.tensor([getattr(Costs(), PARTS[name]) for name in names], dtype=torch.float64)
    shares = torch.tensor(counts, dtype=torch.float64) * scale / nanoseconds.unsqueeze(1)
    constants = _least_squares(shares, default).tolist()
    return replace(Costs(), **dict(zip((PARTS[name] for name in names), constants, strict=True)))


def _least_squares(shares: Tensor, default: Tensor) -> Tensor:
    """Find constants for which each row of ``shares`` sums nearest to 1."""
    free = torch.ones_like(default, dtype=torch.bool)
    constants = default.clone()
    while free.any():
        residual = 1.0 - shares[:, ~free] @ default[~free]
        factors = torch.linalg.lstsq(shares[:, free] * default[free], residual, driver="gelsd").solution
        constants[free] = factors * default[free]
        # A constant below a hundredth of its default is not credible and keeps the default.
        is_absurd = free & (constants < 0.01 * default)
        if not is_absurd.any():
            break
        constants[is_absurd] = default[is_absurd]
        free &= ~is_absurd
    return constants


def _measure(graph: TokenGraph, backend: str) -> float:
    """Return the median time of a forward pass."""
    sizes = graph.num_dst, graph.num_src, graph.num_src
    q, k, v = (torch.randn(1, n, HEADS, DIM).transpose(1, 2) for n in sizes)
    call = partial(attend, q, k, v, graph, backend=backend)
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    with torch.no_grad():
        # The first call makes the plan, which is not part of the time.
        call()
        return float(timer.adaptive_autorange(max_run_time=2.0).median)


def text(record: dict[str, Any]) -> str:
    """Format the constants next to their defaults, and the times next to their predictions."""
    lines = [f"{'constant (ns)':<24}{'here':>12}{'default':>12}"]
    for name, default in asdict(Costs()).items():
        lines.append(f"{name:<24}{record['costs'][name]:>12.2f}{default:>12.2f}")
    lines += ["", f"{'case':<24}{'ms':>12}{'predicted':>12}"]
    for case in record["cases"]:
        lines.append(f"{case['case']:<24}{case['seconds'] * 1e3:>12.3f}{case['predicted'] * 1e3:>12.3f}")
    note = f"saved in {record['file']}, which backend='auto' reads in processes that start from now on"
    return "\n".join([*lines, "", note])
