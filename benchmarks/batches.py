"""A new list of edges in every step, as graph learning trains: ``python -m benchmarks batches``.

One layer, forward and backward, on one thread: torch_geometric's ``TransformerConv`` and ours, both given a
fresh ``edge_index``; ours along a graph that is kept; and four linear maps of these sizes, which bound both.
Times are taken in turns, and a ratio is that of two least times of this run. The record, as ``--json``:

- ``bench``: "batches"; ``schema`` 1; date, commit, processor, threads, versions, ...
- ``cases``: one for each ``workload`` and ``method``: ``seconds``, the least time, ``median``, ``samples``
- ``targets``: the ratio to TransformerConv, and from 10,000 edges on that to the kept graph, met or not
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import networkx as nx
import torch
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv

from benchmarks import table
from benchmarks.records import Record, circumstances
from benchmarks.targets import Measure, Target, judge
from gnn_attention import MessagePassingAttention, StandardHeads, TokenGraph

__all__ = ["WORKLOADS", "add_options", "run", "text"]

NEW, PYG, KEPT, MAPS = "auto, a new list", "PyG TransformerConv", "auto, a graph that is kept", "linear maps"


@dataclass(frozen=True)
class Workload:
    """Edges, the number of nodes, and the width and heads of the layer."""

    edges: Callable[[], Tensor]
    nodes: int
    width: int
    heads: int


def molecules(number: int, atoms: int, bonds: int) -> Tensor:
    """Random graphs of ``atoms`` nodes side by side with ``bonds`` undirected edges in all, as a batch."""
    counts = [bonds // number + (index < bonds % number) for index in range(number)]
    parts = [nx.gnm_random_graph(atoms, count, seed=seed) for seed, count in enumerate(counts)]
    batch = nx.disjoint_union_all(parts).to_directed()
    return torch.tensor(sorted(batch.edges)).t().contiguous()


def karate_club() -> Tensor:
    """The 156 edges of Zachary's karate club, both directions."""
    return torch.tensor(sorted(nx.karate_club_graph().to_directed().edges)).t().contiguous()


def random_in_degree(nodes: int, degree: int) -> Tensor:
    """``degree`` random senders for each node."""
    generator = torch.Generator().manual_seed(0)
    names = torch.randperm(nodes, generator=generator)
    steps = torch.randperm(nodes, generator=generator)[:degree]
    # different steps from a node end at different nodes, so that no edge stands twice
    src = names[(torch.arange(nodes).unsqueeze(1) + steps) % nodes]
    return torch.stack([src.flatten(), torch.arange(nodes).repeat_interleave(degree)])


WORKLOADS = {
    "32 molecules": Workload(partial(molecules, 32, 20, 908), 640, 64, 4),
    "256 molecules": Workload(partial(molecules, 256, 20, 7316), 5120, 128, 8),
    "karate club": Workload(karate_club, 34, 16, 4),
    "in-degree 4": Workload(partial(random_in_degree, 20_000, 4), 20_000, 64, 4),
}


def _ratio(record: Record, target: Target) -> float | None:
    seconds = {case["method"]: case["seconds"] for case in _cases(record, target.workload)}
    return float(seconds[target.method] / seconds[target.against]) if seconds else None


MEASURES = {"ratio": Measure(False, "times the time of {against}", _ratio)}
TARGETS = [Target(name, "both", "ratio", 1.05, PYG, NEW) for name in WORKLOADS]
TARGETS += [Target(name, "both", "ratio", 1.15, KEPT, NEW) for name in ("256 molecules", "in-degree 4")]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    parser.add_argument("--rounds", type=int, default=40, help="samples of each method (default: 40)")


def run(args: argparse.Namespace) -> Record:
    """Time every method on every workload in turns, as one record."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = [
            {"workload": name, **case}
            for name, workload in WORKLOADS.items()
            for case in measure(workload, args.rounds)
        ]
        record = {"bench": "batches", "schema": 1, **circumstances(), "cases": cases}
    finally:
        torch.set_num_threads(threads)
    return {**record, "targets": judge(record, TARGETS, MEASURES)}


def measure(workload: Workload, rounds: int) -> Iterator[Record]:
    """The least and the median time of a step of each method."""
    steps = _steps(workload)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 3):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    for name, taken in times.items():
        # the first three rounds warm up: the kept graph is planned at its third call
        taken = taken[3:]
        median = statistics.median(taken)
        yield {"method": name, "seconds": min(taken), "median": median, "samples": rounds}


def _steps(workload: Workload) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    edges, width, heads = workload.edges(), workload.width, workload.heads
    x, kept = torch.randn(workload.nodes, width), TokenGraph.from_edges(edges, workload.nodes)
    layer = MessagePassingAttention(StandardHeads(width=width, num_heads=heads))
    conv = TransformerConv(width, width // heads, heads)
    maps = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def step(function: Callable[[], Tensor]) -> None:
        function().sum().backward()  # type: ignore[no-untyped-call]

    return {
        PYG: lambda: step(lambda: conv(x, edges.clone())),
        NEW: lambda: step(lambda: layer(x, edges.clone())),
        KEPT: lambda: step(lambda: layer(x, kept)),
        MAPS: lambda: step(lambda: torch.stack([linear(x) for linear in maps])),
    }


def text(record: Record) -> str:
    """The record as two tables."""
    methods = [PYG, NEW, KEPT, MAPS]
    rows = []
    for name in WORKLOADS:
        seconds = {case["method"]: case["seconds"] for case in _cases(record, name)}
        rows.append([name, *(f"{seconds[method] * 1e3:.2f}" for method in methods)])
    title = (
        f"Milliseconds of a step, least of {record['cases'][0]['samples']}, {record['processor']}, one thread"
    )
    head = ["batch", *methods]
    return "\n\n".join([title, table.markdown(head, rows), *table.targets_table(record)])


def _cases(record: Record, workload: str) -> list[Record]:
    return [case for case in record["cases"] if case["workload"] == workload]
