"""The disjoint sum and the Cartesian product of graphs, whose tokens combine those of the operands.

In a product the pair (i, j) is token ``i * n2 + j``: j varies fastest, as in an image that is read
row by row. The product of a graph on the rows and a graph on the columns is a graph on the grid.
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
    """Return the graphs side by side, without edges between them.

    The mask is block diagonal: the tokens of each graph follow those of the graphs before it, as in
    packing. If all graphs store edge lists, these are concatenated. Otherwise the rules of all
    graphs are evaluated for every pair. This is networkx's ``disjoint_union`` and torch_geometric's
    batch.

    >>> from gnn_attention import patterns
    >>> disjoint_sum(patterns.causal(2), patterns.full(2)).edge_index.tolist()
    [[0, 0, 1, 2, 3, 2, 3], [0, 1, 1, 2, 2, 3, 3]]
    """
    sizes = _operands.get_sizes("disjoint_sum", *graphs)
    _operands.check_no_offsets("disjoint_sum", *graphs)
    name = _operands.format_call("disjoint_sum", graphs)
    blocks = []
    num_dst = num_src = 0
    for graph in graphs:
        blocks.append((graph, num_dst, num_src))
        num_dst += graph.num_dst
        num_src += graph.num_src
    if _operands.collect_edge_lists(graphs) is not None:
        return TokenGraph.from_edges(block_edges(blocks), num_dst, num_src, name=name)
    return TokenGraph.from_rule(block_rule(blocks), num_dst, num_src, **sizes, name=name)


@not_compiled
def cartesian_product(g1: TokenGraph, g2: TokenGraph) -> TokenGraph:
    """Return the graph on pairs of tokens in which every edge is a step along one axis.

    For receiver (i, j) and sender (k, l) the edges are
    ``i = k and l -> j in g2, or j = l and k -> i in g1``. Their number is ``n2 * E1 + n1 * E2``
    if at most one of the graphs has self loops. The product of two paths is the grid. This is
    networkx's ``cartesian_product``. An edge list holds the edges along g1, then those along g2.

    >>> from gnn_attention import patterns
    >>> cartesian_product(patterns.strict_causal(2), patterns.full(2)).in_degree().tolist()
    [2, 2, 3, 3]
    """
    sizes = _operands.get_sizes("cartesian_product", g1, g2)
    _operands.check_no_offsets("cartesian_product", g1, g2)
    for graph in (g1, g2):
        _operands.check_square("cartesian_product", graph, "a step changes the token of one axis only")
    num_tokens = g1.num_dst * g2.num_dst
    name = _operands.format_call("cartesian_product", (g1, g2))
    if (lists := _operands.collect_edge_lists((g1, g2))) is not None:
        # The edges of each graph are repeated at every token of the other.
        loops1, loops2 = (torch.arange(g.num_dst, device="cpu").expand(2, -1) for g in (g1, g2))
        pairs = ((lists[0], loops2), (loops1, lists[1]))
        steps = [(i[:, :, None] * g2.num_dst + j[:, None, :]).flatten(1) for i, j in pairs]
        return TokenGraph.from_edges(torch.cat(steps, dim=1), num_tokens, coalesce=True, name=name)
    rule = partial(_is_step, g1.edges.contains, g2.edges.contains, g2.num_dst)
    return TokenGraph.from_rule(rule, num_tokens, **sizes, name=name)


def _is_step(rule1: Rule, rule2: Rule, n2: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    i, j, k, l = dst // n2, dst % n2, src // n2, src % n2  # noqa: E741
    return ((i == k) & rule2(b, h, j, l)) | ((j == l) & rule1(b, h, i, k))


# A block of the mask: its graph, its first receiver and its first sender.
Block = tuple[TokenGraph, int, int]


def block_rule(blocks: Sequence[Block]) -> Rule:
    """Return the rule of a mask that consists of blocks and is empty elsewhere."""
    rules = [
        partial(embed_rule, graph.edges.contains, (row, column, graph.num_dst, graph.num_src))
        for graph, row, column in blocks
        if graph.num_dst and graph.num_src
    ]
    return partial(any_of, tuple(rules)) if rules else no_pair


def block_edges(blocks: Sequence[Block]) -> Tensor:
    """Return the edges of the mask that :func:`block_rule` describes, block by block."""
    lists = [
        graph.coalesce().edge_index + torch.tensor([[column], [row]], device="cpu")
        for graph, row, column in blocks
    ]
    return torch.cat(lists, dim=1)
