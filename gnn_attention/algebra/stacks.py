"""Many graphs of the same nodes as one: union, intersection, one for each head, one for each sample."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

import torch

from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.intervals.arithmetic import evaluate
from gnn_attention.graph.rules import Rule

__all__ = ["intersection", "per_head", "per_sample", "union"]


@not_compiled
def union(*graphs: TokenGraph) -> TokenGraph:
    """The edges of any of the graphs: ``g1 | g2 | ...`` in one flat rule.

    Where all carry lists: one after the other, each edge where it first stands.

    >>> from gnn_attention import patterns
    >>> union(patterns.window(4, 1), patterns.sinks(4, 1), patterns.dilated(4, 2, 2)).edge_index.tolist()
    [[0, 0, 1, 0, 2, 0, 1, 3], [0, 1, 1, 2, 2, 3, 3, 3]]
    """
    sizes = _operands.same_nodes("union", *graphs)
    first, name = graphs[0], _operands.name("union", graphs)
    if (lists := _operands.edge_lists(graphs)) is not None:
        edges = torch.cat(lists, dim=1)
        listed = TokenGraph.from_edges(edges, first.num_dst, first.num_src, coalesce=True, name=name)
        return at_positions_of(first, listed)
    return _on_nodes_of(first, partial(any_of, tuple(graph.rule for graph in graphs)), sizes, name)


@not_compiled
def intersection(*graphs: TokenGraph) -> TokenGraph:
    """The edges that all of the graphs have: ``g1 & g2 & ...`` in one flat rule.

    Where one carries a list and none differs by head or sample: in the order of the first such list.

    >>> from gnn_attention import patterns
    >>> packed, near = patterns.documents([4, 5]), patterns.window(9, 2)
    >>> intersection(patterns.causal(9), packed, near) == packed & near
    True
    """
    sizes = _operands.same_nodes("intersection", *graphs)
    first, name = graphs[0], _operands.name("intersection", graphs)
    rule = partial(all_of, tuple(graph.rule for graph in graphs))
    lists = [graph.listed_edges for graph in graphs if graph.listed_edges is not None]
    if lists and sizes == {"heads": None, "batch": None}:
        src, dst = lists[0]
        chosen = lists[0][:, rule(torch.zeros_like(dst), torch.zeros_like(dst), dst, src)]
        return at_positions_of(first, TokenGraph.from_edges(chosen, first.num_dst, first.num_src, name=name))
    return _on_nodes_of(first, rule, sizes, name)


@not_compiled
def per_head(*graphs: TokenGraph) -> TokenGraph:
    """Graph k for head k: one graph that differs by head, ``heads = len(graphs)``.

    ``select(head=k)`` gives graph k back. They may differ by sample, not by head; pairs evaluate all rules.

    >>> from gnn_attention import patterns
    >>> per_head(patterns.window(4, 2), patterns.causal(4)).in_degree().tolist()
    [[1, 2, 2, 2], [1, 2, 3, 4]]
    """
    return _stacked("per_head", graphs, "heads")


@not_compiled
def per_sample(*graphs: TokenGraph) -> TokenGraph:
    """Graph k for sample k of the batch: ``batch = len(graphs)``; ``select(batch=k)`` gives graph k back.

    The graphs may differ by head, not by sample. Every pair evaluates all of the rules.

    >>> from gnn_attention import patterns
    >>> per_sample(patterns.documents([1, 3]), patterns.documents([2, 2])).in_degree().tolist()
    [[[1, 1, 2, 3]], [[1, 2, 1, 2]]]
    """
    return _stacked("per_sample", graphs, "batch")


def any_of(rules: tuple[Rule, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return reduce(operator.or_, (evaluate(rule, b, h, dst, src) for rule in rules))


def all_of(rules: tuple[Rule, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return reduce(operator.and_, (evaluate(rule, b, h, dst, src) for rule in rules))


def _if_in(sample: bool, number: int, rule: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return ((b if sample else h) == number) & evaluate(rule, b, h, dst, src)


def _stacked(function: str, graphs: tuple[TokenGraph, ...], axis: str) -> TokenGraph:
    sizes = _operands.same_nodes(function, *graphs)
    if sizes[axis] is not None:
        first, word = next(g for g in graphs if getattr(g, axis) is not None), function.removeprefix("per_")
        hint = f"select(batch, head) takes one of its {word}s"
        raise ValueError(f"{function} takes a graph for each {word}, got {first!r}; {hint}")
    parts = (partial(_if_in, axis == "batch", number, graph.rule) for number, graph in enumerate(graphs))
    rule = partial(any_of, tuple(parts))
    return _on_nodes_of(graphs[0], rule, {**sizes, axis: len(graphs)}, _operands.name(function, graphs))


def _on_nodes_of(first: TokenGraph, rule: Rule, sizes: dict[str, int | None], name: str) -> TokenGraph:
    graph = TokenGraph.from_rule(rule, first.num_dst, first.num_src, **sizes, name=name)
    return at_positions_of(first, graph)


def at_positions_of(first: TokenGraph, graph: TokenGraph) -> TokenGraph:
    """The graph with the offsets of another."""
    return replace(graph, dst_offset=first.dst_offset, src_offset=first.src_offset)


def each_alone(change: Callable[[TokenGraph], TokenGraph], graph: TokenGraph, name: str) -> TokenGraph:
    """A change of plain graphs, made to every sample and head by itself."""
    samples = []
    for batch in range(graph.batch or 1):
        heads = [change(graph.select(batch, head)) for head in range(graph.heads or 1)]
        samples.append(heads[0] if graph.heads is None else per_head(*heads))
    return replace(samples[0] if graph.batch is None else per_sample(*samples), name=name)
