"""Graphs on more tokens than their operands have: the disjoint sum, and the product on pairs of tokens.

In a product the pair (i, j) is token ``i * n2 + j``: j runs fastest, as in a picture read row by row. A
product of a graph of the rows and a graph of the columns is a graph on the grid.
"""

from collections.abc import Sequence
from functools import partial

import torch

from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.algebra.stacks import any_of
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.rules import Rule, embed_rule, no_pair

__all__ = ["cartesian_product", "disjoint_sum"]


@not_compiled
def disjoint_sum(*graphs: TokenGraph) -> TokenGraph:
    """The graphs side by side, without edges between them.

    The masks are the blocks of a block diagonal matrix. Packing: graph k's tokens follow those of the graphs
    before it. Lists follow one another; one rule evaluates all the graphs on every pair. networkx's
    ``disjoint_union``; torch_geometric's batches.

    >>> from gnn_attention import patterns
    >>> disjoint_sum(patterns.causal(2), patterns.full(2)).edge_index.tolist()
    [[0, 0, 1, 2, 3, 2, 3], [0, 1, 1, 2, 2, 3, 3]]
    """
    sizes = _operands.from_zero("disjoint_sum", *graphs)
    parts, num_dst, num_src = [], 0, 0
    for graph in graphs:
        parts.append((graph, num_dst, num_src))
        num_dst, num_src = num_dst + graph.num_dst, num_src + graph.num_src
    name = _operands.name("disjoint_sum", graphs)
    if _operands.edge_lists(graphs) is not None:
        return TokenGraph.from_edges(block_edges(parts), num_dst, num_src, name=name)
    return TokenGraph.from_rule(block_rule(parts), num_dst, num_src, **sizes, name=name)


@not_compiled
def cartesian_product(g1: TokenGraph, g2: TokenGraph) -> TokenGraph:
    """One step along one axis.

    ``i = k and l -> j in g2, or j = l and k -> i in g1``, for receiver (i, j) and sender (k, l).
    ``n2 * E1 + n1 * E2`` edges where at most one of the two has self loops. The product of two paths is the
    grid of the rook's single steps. networkx's ``cartesian_product``. Lists: edges along g1, then along g2.

    >>> from gnn_attention import patterns
    >>> cartesian_product(patterns.strict_causal(2), patterns.full(2)).in_degree().tolist()
    [2, 2, 3, 3]
    """
    sizes = _operands.from_zero("cartesian_product", g1, g2)
    for graph in (g1, g2):
        _operands.square("cartesian_product", graph, "a step along one axis stays on the other")
    n, name = g1.num_dst * g2.num_dst, _operands.name("cartesian_product", (g1, g2))
    if (lists := _operands.edge_lists((g1, g2))) is not None:
        edges = _along_one(lists[0], lists[1], g1.num_dst, g2.num_dst)
        return TokenGraph.from_edges(edges, n, coalesce=True, name=name)
    rule = partial(_cartesian, g1.edges.contains, g2.edges.contains, g2.num_dst)
    return TokenGraph.from_rule(rule, n, **sizes, name=name)


def _cartesian(left: Rule, right: Rule, n: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    i, j, k, l = dst // n, dst % n, src // n, src % n  # noqa: E741
    return ((i == k) & right(b, h, j, l)) | ((j == l) & left(b, h, i, k))


Part = tuple[TokenGraph, int, int]  # a block of the mask: its graph, its first receiver, its first sender


def block_rule(parts: Sequence[Part]) -> Rule:
    """The rule of a mask made of blocks, empty elsewhere."""
    blocks = [
        partial(embed_rule, graph.edges.contains, (row, column, graph.num_dst, graph.num_src))
        for graph, row, column in parts
        if graph.num_dst and graph.num_src
    ]
    return partial(any_of, tuple(blocks)) if blocks else no_pair


def block_edges(parts: Sequence[Part]) -> Tensor:
    """The edges of the same mask, block by block."""
    lists = [
        graph.coalesce().edge_index + torch.tensor([[column], [row]], device="cpu")
        for graph, row, column in parts
    ]
    return torch.cat(lists, dim=1)


def _along_one(left: Tensor, right: Tensor, n1: int, n2: int) -> Tensor:
    """The edges of the first graph at every token of the second, then the other way."""
    stay1, stay2 = (torch.arange(n, device="cpu").expand(2, -1) for n in (n1, n2))
    pairs = ((left, stay2), (stay1, right))
    return torch.cat([(a[:, :, None] * n2 + b[:, None, :]).flatten(1) for a, b in pairs], dim=1)
