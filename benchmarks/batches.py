"""Time a layer with a new edge list in every step, as in graph learning: ``python -m benchmarks batches``.

One layer runs forward and backward on one thread: torch_geometric's ``TransformerConv`` and ours, each with a new
``edge_index`` in every step, and ours with one graph for all steps.
The methods take turns, and a ratio compares the least times of one run. The record that ``--json`` writes has the keys

- ``bench``: "batches"; ``schema`` 1; date, commit, processor, threads, versions, ...
- ``cases``: one for each ``workload`` and ``method``: ``seconds``, the least time, ``median``, ``samples``
- ``targets``: the ratio to TransformerConv and, from 5,000 nodes on, the ratio to the reused graph
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import networkx as nx
import torch
from torch import Tensor
from torch_geometric.nn import TransformerConv

from benchmarks import process, table
from benchmarks.gpu.workloads import random_senders
from benchmarks.records import Record, describe_machine
from benchmarks.targets import target_row
from gnn_attention import MessagePassingAttention, StandardHeads, TokenGraph

__all__ = ["WORKLOADS", "add_options", "run", "text"]

NEW, PYG, REUSED = "auto, a new list", "PyG TransformerConv", "auto, a graph that is kept"


def edges_of(graph: nx.Graph) -> Tensor:
    """Return the edges of an undirected graph in both directions."""
    return torch.tensor(sorted(graph.to_directed().edges)).t().contiguous()


def molecules(number: int, atoms: int, bonds: int) -> Tensor:
    """Batch ``number`` random graphs of ``atoms`` nodes that share ``bonds`` undirected edges evenly."""
    counts = [bonds // number + (index < bonds % number) for index in range(number)]
    graphs = [nx.gnm_random_graph(atoms, count, seed=seed) for seed, count in enumerate(counts)]
    return edges_of(nx.disjoint_union_all(graphs))


# A function that builds the edges, the number of nodes, and the width and number of heads of the layer.
Workload = tuple[Callable[[], Tensor], int, int, int]
WORKLOADS: dict[str, Workload] = {
    "32 molecules": (partial(molecules, 32, 20, 908), 640, 64, 4),
    "256 molecules": (partial(molecules, 256, 20, 7316), 5120, 128, 8),
    "karate club": (lambda: edges_of(nx.karate_club_graph()), 34, 16, 4),
    "in-degree 4": (lambda: random_senders(20_000, 4).edge_index, 20_000, 64, 4),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    parser.add_argument("--rounds", type=int, default=40, help="samples of each method (default: 40)")


def run(args: argparse.Namespace) -> Record:
    """Time every method on every workload and return one record."""
    threads = torch.get_num_threads()
    cases, targets = [], []
    torch.set_num_threads(1)
    for name, workload in WORKLOADS.items():
        times = measure(workload, args.rounds)
        for method, samples in times.items():
            figures = {"seconds": min(samples), "median": statistics.median(samples), "samples": len(samples)}
            cases.append({"workload": name, "method": method, **figures})
        for against, bound in ((PYG, 1.05), (REUSED, 1.15)):
            # On a small graph the fixed cost of a call hides what a reused graph saves.
            if against == PYG or workload[1] >= 5000:
                ratio, words = min(times[NEW]) / min(times[against]), f"times the time of {against}"
                targets.append(target_row(name, "both", "at most", bound, words, ratio))
    torch.set_num_threads(threads)
    return {"bench": "batches", "schema": 1, **describe_machine(), "cases": cases, "targets": targets}


def measure(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step for each method and round, after three rounds of warm-up.

    The warm-up takes three rounds because a reused graph is planned at its third call.
    """
    steps = _steps(workload)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 3):
        for name, step in steps.items():
            times[name].append(process.seconds(step))
    return {name: samples[3:] for name, samples in times.items()}


def _steps(workload: Workload) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    build, nodes, width, heads = workload
    edges, x = build(), torch.randn(nodes, width)
    graph = TokenGraph.from_edges(edges, nodes)
    layer = MessagePassingAttention(StandardHeads(width=width, num_heads=heads))
    conv = TransformerConv(width, width // heads, heads)

    def step(function: Callable[[], Tensor]) -> None:
        function().sum().backward()  # type: ignore[no-untyped-call]

    return {
        PYG: lambda: step(lambda: conv(x, edges.clone())),
        NEW: lambda: step(lambda: layer(x, edges.clone())),
        REUSED: lambda: step(lambda: layer(x, graph)),
    }


def text(record: Record) -> str:
    """Format the record as two tables."""
    rows: dict[str, list[str]] = {}
    for case in record["cases"]:
        rows.setdefault(case["workload"], []).append(f"{case['seconds'] * 1e3:.2f}")
    samples = record["cases"][0]["samples"]
    title = f"Milliseconds of a step, least of {samples}, {record['processor']}, one thread"
    head = ["batch", *dict.fromkeys(case["method"] for case in record["cases"])]
    times = table.markdown(head, ([name, *cells] for name, cells in rows.items()))
    return "\n\n".join([title, times, *table.targets_table(record)])
