"""Exact counts of a graph: its edges, the senders that decoding caches, the tiles that a kernel visits."""

from dataclasses import dataclass

import torch

from gnn_attention._support import checks
from gnn_attention.graph import TokenGraph, memoized, tiling
from gnn_attention.graph.liveness import last_receivers, last_senders


@dataclass(frozen=True)
class GraphCost:
    """Counts of a graph over all samples and heads, with those of the causal and full graph of its tokens.

    ``cached``: the most senders in the cache while decoding, each until its last receiver has come; of a
    graph between two sequences, the senders with an edge. ``cells``: the pairs in the ``block x block`` tiles
    that hold an edge, which a block-sparse kernel visits.
    """

    name: str
    num_dst: int
    num_src: int
    edges: int
    causal: int
    full: int
    cached: int
    block: int
    cells: int

    @property
    def of_causal(self) -> float:
        """Edges as a share of those of the causal graph; what is missing to 1 is saved."""
        return _share(self.edges, self.causal)

    @property
    def of_full(self) -> float:
        """Edges as a share of all pairs."""
        return _share(self.edges, self.full)

    @property
    def fill(self) -> float:
        """Edges as a share of the cells that a block-sparse kernel visits."""
        return _share(self.edges, self.cells)


def of_graph(graph: TokenGraph, block: int = 128) -> GraphCost:
    """Counts of a graph, without listing the pairs of a structured one.

    ``block``: the side of the tiles. Raises TypeError for no graph, ValueError for a ``block`` below 1.

    >>> from gnn_attention import patterns
    >>> cost = of_graph(patterns.window(100_000, 4096) | patterns.sinks(100_000, 4))
    >>> cost.edges, round(1 / cost.of_causal), cost.cached
    (401597050, 12, 4100)
    """
    checks.instance("graph", graph, TokenGraph)
    block, copies = checks.size("block", block, 1), (graph.batch or 1) * (graph.heads or 1)
    first = graph.dst_offset - graph.src_offset + 1  # how many senders the first receiver attends to
    counts = torch.arange(first, first + graph.num_dst, device="cpu")
    return GraphCost(
        name=graph.name,
        num_dst=graph.num_dst,
        num_src=graph.num_src,
        edges=graph.num_edges,
        causal=copies * int(counts.clamp(0, graph.num_src).sum()),
        full=copies * graph.num_dst * graph.num_src,
        cached=most_cached(graph),
        block=block,
        cells=_cells(graph, block),
    )


def most_cached(graph: TokenGraph) -> int:
    """The most senders in a cache when each token comes as soon as all its senders have come."""
    last = memoized(last_receivers, graph)
    if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
        return int((last >= 0).sum())
    if not graph.num_src:
        return 0
    place = torch.arange(graph.num_src, device="cpu")
    # closed: all senders of the tokens so far have come; a chunk comes at once, a token in a causal graph
    closed = memoized(last_senders, graph).cummax(0).values <= place
    chunk = closed.cumsum(0) - closed.long()
    comes, leaves = chunk[last >= 0], chunk[last[last >= 0]] + 1
    change = torch.zeros(graph.num_src + 1, dtype=torch.int64, device="cpu")
    change.index_add_(0, comes, torch.ones_like(comes)).index_add_(0, leaves, -torch.ones_like(leaves))
    return int(change.cumsum(0).max())


def _cells(graph: TokenGraph, block: int) -> int:
    found = tiling.tiles(graph, block)
    height = (graph.num_dst - found.row % max(found.rows, 1) * block).clamp(max=block)
    width = (found.stop * block).clamp(max=graph.num_src) - found.first * block
    return int((height * width).sum())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
