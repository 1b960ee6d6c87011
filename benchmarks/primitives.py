"""Time edge features, biases, derivatives and edge primitives: ``python -m benchmarks primitives`` (3 minutes).

All rows have 8 heads of 64 channels in float32 on two threads. Each workload runs in a fresh process, and the two
sides of a row take turns. Memory is the peak of the process. The rows are the ``targets`` of the record: ``value``
is the median ratio of a round and ``least`` the least one, ``ours`` and ``peer`` are the ``least`` and the ``median``
number of seconds or MB, and ``limit`` says what bounds our side. Words in which a size occurs are for scale 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_geometric.nn import TransformerConv

from benchmarks import process, table
from benchmarks.gpu.workloads import random_senders
from benchmarks.records import Record, describe_machine
from benchmarks.targets import target_row
from gnn_attention import TokenGraph, attend, edge_ops, patterns

__all__ = ["TARGETS", "add_options", "measure", "run", "text"]

HEADS, DIM, FEATURES, THREADS = 8, 64, 16, 2
FASTER, SMALLER = "times faster than TransformerConv", "times less memory than TransformerConv"
PLAIN = "times the time of plain rows"
GATHERS = "It gathers {} rows for each edge and head from memory."
TARGETS: list[tuple[str, str, float | None, str, str]] = [  # the last is what bounds our side
    ("edge_features", "forward", 6.0, FASTER, GATHERS.format("2 wide and 2 narrow")),
    ("edge_features", "both", 5.0, FASTER, GATHERS.format("6 wide and 4 narrow")),
    ("edge_features", "forward", 8.0, SMALLER, "1 tensor has the size of q, and the allocator keeps freed memory."),
    ("edge_features", "both", 8.0, SMALLER, "4 tensors have the size of q, and the allocator keeps freed memory."),
    ("bias", "both", 1.5, PLAIN, GATHERS.format("6") + " Plain rows gather 7, because they save no weights."),
    ("bias", "weights()", 0.5, "times the time of the forward pass", GATHERS.format("only k's") + " It copies each head of q and k."),
    ("jvp", "jvp", 4.0, "times the time of the forward pass", "5 products and exponentials of each tile follow the forward pass."),
    ("jvp", "jvp", None, "times the memory of the forward pass", "Dense logits, weights and their tangents would need 4 x 2,048 MB."),
    ("second_derivatives", "second", 4.0, "times the time of the backward pass", GATHERS.format("10") + " The backward pass gathers 5."),
    ("second_derivatives", "all three", 2.2, "times the memory of half of the nodes", "It keeps rows of tokens and values of edges."),
    ("second_derivatives", "second, dense", None, "times the time of SDPA for 2,048 tokens", GATHERS.format("10")),
    ("layer_of_edge_ops", "forward", 1.5, PLAIN, GATHERS.format("2")),
    ("layer_of_edge_ops", "both", 1.5, PLAIN, GATHERS.format("6")),
]  # fmt: skip
Sides = dict[str, Callable[[], Callable[[], object]]]  # by pass, functions that prepare what is measured


def passes(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Sides:
    """Return the passes of a call; each first computes all that precedes it."""
    forward, grad = torch.no_grad()(call), torch.autograd.grad
    gradient = torch.randn(forward().shape, generator=torch.Generator().manual_seed(0))

    def backward(create_graph: bool = False) -> Callable[[], tuple[Tensor, ...]]:
        return partial(grad, call(), leaves, gradient, create_graph=create_graph)

    def second() -> Callable[[], object]:
        gradients = backward(create_graph=True)()
        return partial(grad, gradients, leaves, [torch.ones_like(x) for x in gradients])

    sides: Sides = {"forward": lambda: forward, "backward": backward, "both": lambda: lambda: backward()()}
    return sides | {"second": second, "all three": lambda: lambda: second()()}


def plain(graph: TokenGraph, backend: str = "rows") -> tuple[list[Tensor], Sides]:
    """Return q, k and v in the layout of projections, and the passes of ``attend``."""
    qkv = [torch.randn(1, graph.num_dst, HEADS, DIM).transpose(1, 2).requires_grad_() for _ in range(3)]
    return qkv, passes(lambda: attend(qkv[0], qkv[1], qkv[2], graph, backend=backend), qkv)


def edge_features(scale: float) -> tuple[TokenGraph, Sides, Sides]:
    """Compare features of edges with PyG's TransformerConv, which has a key and a value of each edge."""
    graph = random_senders(int(50_000 * scale), 8)
    conv = TransformerConv(HEADS * DIM, DIM, HEADS, edge_dim=FEATURES, root_weight=False)
    (q, k, v), _ = plain(graph)
    attr, weight = torch.randn(graph.num_edges, FEATURES).requires_grad_(), conv.lin_edge.weight
    maps = weight.detach().view(HEADS, DIM, FEATURES).mT
    options = {"edge_attr": attr} | {f"edge_{x}": maps.clone().requires_grad_() for x in ("key", "value")}

    def propagate() -> Tensor:
        inputs = dict(zip(("query", "key", "value"), (x[0].transpose(0, 1) for x in (q, k, v)), strict=True))
        out: Tensor = conv.propagate(graph.edge_index, **inputs, edge_attr=attr, size=None)
        return out.transpose(0, 1).unsqueeze(0)

    ours = passes(lambda: attend(q, k, v, graph, backend="rows", **options), [q, k, v, *options.values()])
    return graph, ours, passes(propagate, [q, k, v, attr, weight])


def bias(scale: float) -> tuple[TokenGraph, Sides, Sides]:
    """Compare a bias that needs a gradient, and the weights of all edges, with plain rows."""
    graph = random_senders(int(50_000 * scale), 8)
    (q, k, v), rows = plain(graph)
    bias = torch.randn(1, HEADS, graph.num_edges).requires_grad_()
    ours = passes(lambda: attend(q, k, v, graph, backend="rows", bias=bias), [q, k, v, bias])
    _, info = attend(q.detach(), k.detach(), v.detach(), graph, backend="rows", return_info=True)
    return graph, ours | {"weights()": lambda: info.weights}, rows | {"weights()": rows["forward"]}


def jvp(scale: float) -> tuple[TokenGraph, Sides, Sides]:
    """Compare the derivative along tangents of q, k and v with the forward pass."""
    graph = patterns.window(int(8192 * scale), int(256 * scale))
    leaves, auto = plain(graph, "auto")
    qkv, tangents = (tuple(map(make, leaves)) for make in (Tensor.detach, torch.randn_like))
    work = partial(torch.func.jvp, lambda q, k, v: attend(q, k, v, graph), qkv, tangents)
    return graph, {"jvp": lambda: work}, {"jvp": auto["forward"]}


def second_derivatives(scale: float) -> tuple[TokenGraph, Sides, Sides]:
    """Compare the derivative of the gradients with the backward pass, and with dense attention."""
    graph, smaller = (random_senders(int(n * scale), 32) for n in (16_384, 8192))
    rows, half = plain(graph)[1], plain(smaller)[1]
    q, k, v = (torch.randn(1, HEADS, int(2048 * scale), DIM).requires_grad_() for _ in range(3))
    dense = passes(sdpa_kernel(SDPBackend.MATH)(lambda: sdpa(q, k, v)), [q, k, v])["second"]
    peer = {"second": rows["backward"], "second, dense": dense, "all three": half["all three"]}
    return graph, rows | {"second, dense": rows["second"]}, peer


def layer_of_edge_ops(scale: float) -> tuple[TokenGraph, Sides, Sides]:
    """Compare attention by three primitives with plain rows."""
    graph = random_senders(int(16_384 * scale), 32)
    (q, k, v), rows = plain(graph)
    logits = partial(edge_ops.gather_products, q, k, graph)
    layer = lambda: edge_ops.aggregate(edge_ops.softmax(logits() / DIM**0.5, graph), v, graph)  # noqa: E731
    return graph, passes(layer, [q, k, v]), rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each row (default: 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the sizes (default: 1)")


def run(args: argparse.Namespace) -> Record:
    """Measure every workload in a fresh process and return one record."""
    rows, options = [], {"rounds": args.rounds, "scale": args.scale}
    for name in dict.fromkeys(target[0] for target in TARGETS):
        print(name, file=sys.stderr, flush=True)
        rows += process.run_in_process(__name__, "measure", {"name": name, **options}, process.BOUND_THREADS)
    about = {"bench": "primitives", "schema": 1, **describe_machine(), "threads": THREADS, **options}
    return {**about, "targets": rows}


def measure(name: str, rounds: int, scale: float) -> list[Record]:
    """Measure the rows of a workload after a round of warm-up, memory in a single round; 0 MB count as 1."""
    torch.set_num_threads(THREADS)
    (graph, *sides), rows = globals()[name](scale), []
    title = f"{name.replace('_', ' ')}, {graph.num_dst:,} tokens, {graph.num_edges:,} edges"
    for _, which, bound, words, limit in (target for target in TARGETS if target[0] == name):
        cost, count = (process.peak_memory, 1) if "memory" in words else (process.seconds, rounds)
        costs = [[cost(side[which]()) or 1.0 for side in sides] for _ in range(1 + count)][1:]
        sense = "at least" if words in (FASTER, SMALLER) else "at most"
        ratios = [peer / ours if sense == "at least" else ours / peer for ours, peer in costs]
        row = target_row(title, which, sense, bound, words, statistics.median(ratios))
        ours, peer = ({"least": min(x), "median": statistics.median(x)} for x in zip(*costs, strict=True))
        rows.append({**row, "least": min(ratios), "ours": ours, "peer": peer, "limit": limit})
    return rows


def text(record: Record) -> str:
    """Format the record as a table."""
    about = f"{record['rounds']} rounds on {record['processor']} with {record['threads']} threads"
    head, rows = [*table.TARGET_HEAD, "least ratio", "ours", "peer", "limit"], []
    for row in record["targets"]:
        costs = (f"{row[side]['least']:.4g} / {row[side]['median']:.4g}" for side in ("ours", "peer"))
        rows.append([*table.target_cells(row), f"{row['least']:.3g}", *costs, row["limit"]])
    return f"Costs are the least / median of {about}, in seconds or MB.\n\n{table.markdown(head, rows)}"
