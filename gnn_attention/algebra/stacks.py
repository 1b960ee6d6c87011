"""Many graphs of the same nodes as one: one for each head, one for each sample."""

import operator
from dataclasses import replace
from functools import partial, reduce

from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.rules import Rule

__all__ = ["per_head", "per_sample"]

NODES = ("num_dst", "num_src", "dst_offset", "src_offset")


@not_compiled
def per_head(*graphs: TokenGraph) -> TokenGraph:
    """Graph k for head k: one graph that differs by head, ``heads = len(graphs)``.

    ``select(head=k)`` gives graph k back. They may differ by sample, not by head; pairs evaluate each rule.

    >>> from gnn_attention import patterns
    >>> per_head(patterns.window(4, 2), patterns.causal(4)).in_degree().tolist()
    [[1, 2, 2, 2], [1, 2, 3, 4]]
    """
    return _stack_graphs("per_head", graphs, "heads")


@not_compiled
def per_sample(*graphs: TokenGraph) -> TokenGraph:
    """Graph k for sample k of the batch: ``batch = len(graphs)``; ``select(batch=k)`` gives graph k back.

    The graphs may differ by head, not by sample. Every pair evaluates each of the rules.

    >>> from gnn_attention import patterns
    >>> per_sample(patterns.documents([1, 3]), patterns.documents([2, 2])).in_degree().tolist()
    [[[1, 1, 2, 3]], [[1, 2, 1, 2]]]
    """
    return _stack_graphs("per_sample", graphs, "batch")


def any_of(rules: tuple[Rule, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return reduce(operator.or_, (rule(b, h, dst, src) for rule in rules))


def _if_in(
    axis: str, numbers: tuple[int, ...], rule: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    """The rule for the samples or heads of these numbers alone."""
    number = b if axis == "batch" else h
    return reduce(operator.or_, (number == one for one in numbers)) & rule(b, h, dst, src)


def _stack_graphs(function: str, graphs: tuple[TokenGraph, ...], axis: str) -> TokenGraph:
    sizes = _operands.varies(function, *graphs)
    first = graphs[0]
    for graph in graphs:
        if any(getattr(graph, word) != getattr(first, word) for word in NODES):
            got = f"got {first!r} and {graph!r}; extend or restrict one of them first"
            raise ValueError(f"{function} needs graphs of the same nodes (number and position), {got}")
    if sizes[axis] is not None:
        varied, word = next(g for g in graphs if getattr(g, axis) is not None), function.removeprefix("per_")
        hint = f"select(batch, head) takes one of its {word}s"
        raise ValueError(f"{function} takes a graph for each {word}, got {varied!r}; {hint}")
    # Graphs that share their edges evaluate them once.
    numbers_of: dict[int, tuple[int, ...]] = {}
    for number, graph in enumerate(graphs):
        numbers_of[id(graph.edges)] = (*numbers_of.get(id(graph.edges), ()), number)
    parts = (
        partial(_if_in, axis, numbers, graphs[numbers[0]].edges.contains) for numbers in numbers_of.values()
    )
    sizes = {**sizes, axis: len(graphs)}
    rule, name = partial(any_of, tuple(parts)), _operands.name(function, graphs)
    return at_positions_of(
        first, TokenGraph.from_rule(rule, first.num_dst, first.num_src, **sizes, name=name)
    )


def at_positions_of(first: TokenGraph, graph: TokenGraph) -> TokenGraph:
    """The graph with the offsets of another."""
    return replace(graph, dst_offset=first.dst_offset, src_offset=first.src_offset)
