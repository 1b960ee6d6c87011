"""The workloads of a GPU. Irregular graphs come first, because the library has its own kernel for them.

Each workload names the peers that could run it. The time of an ideal kernel follows from rates of the device that are
measured in the same run: the rate of products, or that of gathers along the graph (:func:`bytes_of`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.methods import AUTO
from benchmarks.targets import Target
from benchmarks.workloads import CAUSAL, FLEX, PYG, SPARSE, Problem, Workload, documents
from gnn_attention import TokenGraph, convert, patterns

__all__ = ["PASSES", "TARGETS", "WORKLOADS", "bytes_of", "new_selection"]

PASSES = ("forward", "backward")
AGAIN = "auto again"  # a second measurement of auto, which shows the noise
VARLEN, PYG_COMPILED, ANEMOI = "torch varlen", "PyG compiled", "anemoi graph transformer"
CHOSEN, TILE = 64, 128  # selected senders of each receiver, and side of a tile in tokens


def bytes_of(problem: Problem, which: str) -> float:
    """Return the bytes that a kernel must read and write: inputs, results, and key, value and index of each edge.

    A backward pass gathers keys and values for each receiver, then queries and gradients for each sender.
    """
    tensors = [*problem.inputs, problem.grad_out]
    streams = float(sum(x.numel() * x.element_size() for x in tensors))
    row = 2 * problem.heads * problem.dim * problem.grad_out.element_size() + 4.0
    gathered = len(problem.grad_out) * problem.graph.num_edges * row
    return (streams + gathered) * (1.0 if which == "forward" else 2.0)


def random_senders(n: int, degree: int) -> TokenGraph:
    """Build a graph with ``degree`` distinct random senders for each receiver, sorted by receiver, then sender."""
    degree = min(degree, n)
    src = _draw_from_ranges(n, degree, n, torch.Generator().manual_seed(0)).flatten().long()
    edges = torch.stack([src, torch.arange(n).repeat_interleave(degree)])
    return TokenGraph.from_distinct_edges(edges, n, n, f"{degree} random senders")


def clusters(n: int, degree: int = 492, size: int = 2048) -> TokenGraph:
    """Build communities of ``size`` tokens with the size of the Reddit graph: 233 k nodes, 115 M edges.

    Nine tenths of the senders of a receiver lie in its own community, the others anywhere else. Each is drawn from
    its own range of equal length, so the senders are distinct and come sorted.
    """
    size, degree = min(size, n // 2), min(degree, n // 4)
    near = 9 * degree // 10
    far = degree - near
    rng = torch.Generator().manual_seed(0)
    first = (torch.arange(n) // size * size).clamp(max=n - size).int().unsqueeze(1)
    inside = _draw_from_ranges(n, near, size, rng)
    outside = _draw_from_ranges(n, far, n - size, rng)
    outside += torch.where(outside >= first, size, 0).int()
    # Sorting each row makes the whole list sorted.
    src = torch.cat([inside + first, outside], 1).sort(1).values.flatten().long()
    edges = torch.stack([src, torch.arange(n).repeat_interleave(degree)])
    return TokenGraph.from_distinct_edges(edges, n, n, f"communities of {size}")


def _draw_from_ranges(rows: int, count: int, total: int, rng: torch.Generator) -> Tensor:
    """Split ``0 ... total - 1`` into ``count`` ranges and draw, for each row, a number from each range."""
    ends = torch.arange(count + 1) * total // count
    width = ends.diff().int()
    offset = (torch.rand(rows, count, generator=rng) * width).int()
    return torch.minimum(offset, width - 1) + ends[:-1].int()


def mesh(n: int) -> TokenGraph:
    """Build a bipartite mesh like the era-to-h mesh of weather models, from a fine grid to a coarse one.

    With 40,320 receivers (the points of an O96 grid, laid out as 192 x 210) the senders are 640 x 847, the 542,080
    points of an N320 grid. Each receiver attends to the 5 x 5 senders around it, so neighbours share senders.
    """
    rows = max(1, round((n * 192 / 210) ** 0.5))
    columns = n // rows
    width, height = max(5, columns * 847 // 210), max(5, rows * 640 // 192)
    offset = torch.arange(-2, 3)
    y = (torch.arange(rows) * height // rows).clamp(2, height - 3).unsqueeze(1) + offset
    x = (torch.arange(columns) * width // columns).clamp(2, width - 3).unsqueeze(1) + offset
    src = (y.view(rows, 1, 5, 1) * width + x.view(1, columns, 1, 5)).flatten()
    dst = torch.arange(rows * columns).repeat_interleave(25)
    return TokenGraph.from_distinct_edges(torch.stack([src, dst]), rows * columns, width * height, "mesh")


def filled_tiles(n: int, one_in: int) -> TokenGraph:
    """Build four random tiles of 128 in each row of tiles, in which one in ``one_in`` pairs is an edge."""
    rng = torch.Generator().manual_seed(0)
    side = min(TILE, n // 2)
    count = n // side
    tiles = torch.rand(count, count, generator=rng).topk(min(4, count)).indices
    dst = torch.arange(count * side).view(count, 1, side, 1)
    src = (tiles.unsqueeze(-1) * side + torch.arange(side)).unsqueeze(2)
    dst, src = torch.broadcast_tensors(dst, src)  # type: ignore[no-untyped-call]
    is_edge = torch.rand(dst.shape, generator=rng) * one_in < 1
    edges = torch.stack([src[is_edge], dst[is_edge]])
    return convert.from_edge_index(edges, n, n)


def new_selection(n: int, seed: int, device: torch.device) -> TokenGraph:
    """Select ``CHOSEN`` random senders of each receiver on the device, as a model does in each step."""
    rng = torch.Generator(device).manual_seed(seed)
    count = min(CHOSEN, n // 2)
    step = torch.randint(1, n // count + 1, (n, count), generator=rng, device=device)
    return TokenGraph.from_indices(step.cumsum(1) - 1, n)


def _rows() -> Iterator[Workload]:
    row = partial(Workload, dtype=torch.bfloat16)
    irregular = partial(row, peers=(ANEMOI, PYG_COMPILED, PYG, SPARSE), kind="gathers")
    degree32, degree8 = (partial(random_senders, degree=degree) for degree in (32, 8))
    yield irregular("random1m", "in-degree 32, 1M", 1_000_000, degree32)
    yield irregular("narrow1m", "in-degree 8, heads of 16, 1M", 1_000_000, degree8, dim=16)
    yield irregular("clusters", "communities, in-degree 492, 233k", 232_965, clusters)
    yield irregular("mesh", "bipartite mesh, 542k to 40k", 40_320, mesh)
    bigbird = lambda n: patterns.bigbird_etc(n - 128, 64, 128, num_random=3)  # noqa: E731
    yield row("bigbird131k", "BigBird of blocks, 131k", 131_072, bigbird, (FLEX,))
    for one_in in (8, 16):
        yield _filled(one_in)
    selection = lambda n: new_selection(n, 0, torch.device("cpu"))  # noqa: E731
    yield row("chosen32k", "a new top-64 graph in every step, 32k", 32_768, selection, (), kind="gathers")
    window = lambda n: patterns.window(n, 256)  # noqa: E731
    yield row("window131k", "window of 256, 131k", 131_072, window, (VARLEN, FLEX))
    packed = partial(documents, number=67)
    yield row("documents131k", "67 packed documents, 131k", 131_072, packed, (VARLEN, FLEX))
    yield row("causal8k", "causal, 8k", 8192, patterns.causal, (CAUSAL, FLEX))
    for one_in in (4, 32):
        yield _filled(one_in)


def _filled(one_in: int) -> Workload:
    build, title = partial(filled_tiles, one_in=one_in), f"tiles filled to 1/{one_in}, 32k"
    return Workload(f"fill{one_in}", title, 32_768, build, (), kind="gathers", dtype=torch.bfloat16)


TARGETS: list[Target] = [
    ("random1m", "share", AUTO, 0.75, 0.75),
    ("random1m", "ratio", ANEMOI, 1.0, 1.0),
    ("random1m", "ratio", f"{PYG}|{PYG_COMPILED}", 5.0, 5.0),
    ("random1m", "ratio", SPARSE, 1.0, 1.0),
    ("narrow1m", "share", AUTO, 0.5, 0.5),
    ("narrow1m", "ratio", ANEMOI, 1.0, 1.0),
    ("narrow1m", "ratio", f"{PYG}|{PYG_COMPILED}", 5.0, 5.0),
    ("clusters", "share", AUTO, 0.5, 0.5),
    ("clusters", "ratio", ANEMOI, 1.0, 1.0),
    ("mesh", "ratio", ANEMOI, 1.0, 1.0),
    ("mesh", "ratio", f"{PYG}|{PYG_COMPILED}", 5.0, 5.0),
    ("bigbird131k", "ratio", FLEX, 0.9, 0.9),
    ("window131k", "ratio", VARLEN, 0.95, 0.95),
    ("documents131k", "ratio", VARLEN, 0.95, 0.95),
    ("causal8k", "ratio", CAUSAL, 0.98, 0.98),
]
WORKLOADS = {workload.name: workload for workload in _rows()}
