"""Join graphs on the same nodes into one: each becomes a head, or a sample, of the result."""

import operator
from dataclasses import replace
from functools import partial, reduce

from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.rules import Rule

__all__ = ["per_head", "per_sample"]

NODE_ATTRIBUTES = ("num_dst", "num_src", "dst_offset", "src_offset")


@not_compiled
def per_head(*graphs: TokenGraph) -> TokenGraph:
    """Return one graph with ``heads = len(graphs)``, whose ``select(head=k)`` is graph k.

    The graphs may vary by sample, not by head. All rules are evaluated for every pair of tokens.

    >>> from gnn_attention import patterns
    >>> per_head(patterns.window(4, 2), patterns.causal(4)).in_degree().tolist()
    [[1, 2, 2, 2], [1, 2, 3, 4]]
    """
    return _stack_graphs("per_head", graphs, "heads")


@not_compiled
def per_sample(*graphs: TokenGraph) -> TokenGraph:
    """Return one graph with ``batch = len(graphs)``, whose ``select(batch=k)`` is graph k.

    The graphs may vary by head, not by sample. All rules are evaluated for every pair of tokens.

    >>> from gnn_attention import patterns
    >>> per_sample(patterns.documents([1, 3]), patterns.documents([2, 2])).in_degree().tolist()
    [[[1, 1, 2, 3]], [[1, 2, 1, 2]]]
    """
    return _stack_graphs("per_sample", graphs, "batch")


def any_of(rules: tuple[Rule, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return reduce(operator.or_, (rule(b, h, dst, src) for rule in rules))


def _restrict_to_slices(
    axis: str, indices: tuple[int, ...], rule: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    slice_index = b if axis == "batch" else h
    return reduce(operator.or_, (slice_index == index for index in indices)) & rule(b, h, dst, src)


def _stack_graphs(function: str, graphs: tuple[TokenGraph, ...], axis: str) -> TokenGraph:
    sizes = _operands.get_sizes(function, *graphs)
    template = graphs[0]
    for graph in graphs:
        if any(getattr(graph, name) != getattr(template, name) for name in NODE_ATTRIBUTES):
            raise ValueError(
                f"{function} needs graphs of the same nodes and positions, got {template!r} and {graph!r}; "
                "extend or restrict one of them first"
            )
        if getattr(graph, axis) is not None:
            kind = function.removeprefix("per_")
            raise ValueError(
                f"{function} needs graphs that are the same for every {kind}, got {graph!r}; "
                "select(batch, head) returns one slice of a graph"
            )
    # Graphs with the same edge set share one rule, which is then evaluated once.
    indices_by_edges: dict[int, list[int]] = {}
    for index, graph in enumerate(graphs):
        indices_by_edges.setdefault(id(graph.edges), []).append(index)
    rules = [
        partial(_restrict_to_slices, axis, tuple(indices), graphs[indices[0]].edges.contains)
        for indices in indices_by_edges.values()
    ]
    sizes = {**sizes, axis: len(graphs)}
    name = _operands.format_call(function, graphs)
    rule = partial(any_of, tuple(rules))
    graph = TokenGraph.from_rule(rule, template.num_dst, template.num_src, **sizes, name=name)
    return copy_offsets(template, graph)


def copy_offsets(template: TokenGraph, graph: TokenGraph) -> TokenGraph:
    return replace(graph, dst_offset=template.dst_offset, src_offset=template.src_offset)
