"""Graphs made of graphs: rows, one head, the set operators, two hops and powers of :class:`TokenGraph`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import edge_list, neighbours, rules, text

# A TokenGraph, whose module imports this one.
Graph = Any


@not_compiled
def rows(graph: Graph, start: int, stop: int) -> Graph:
    """``graph.rows(start, stop)``."""
    start, stop = checks.size("start", start), checks.size("stop", stop)
    if not start <= stop <= graph.num_dst:
        expected = f"0 <= start <= stop <= num_dst = {graph.num_dst}"
        raise IndexError(f"rows({start}, {stop}): expected {expected}")
    name = f"{text.bracketed(graph.name)}.rows({start}, {stop})"
    chosen, listed = neighbours.neighbours_of(graph.rule), graph.listed_edges
    if listed is not None:
        src, dst = listed[:, (listed[1] >= start) & (listed[1] < stop)]
        edges = torch.stack([src, dst - start])
        part = graph.from_distinct_edges(edges, stop - start, graph.num_src, name)
    elif chosen is not None:
        fields = neighbours.fields_of(chosen.between(start, stop), graph.batch, graph.heads)
        part = replace(graph, **fields, name=name)
    else:
        rule = partial(rules.shifted, graph.rule, start)
        part = replace(graph, rule=rule, num_dst=stop - start, name=name)
    return replace(part, dst_offset=graph.dst_offset + start, src_offset=graph.src_offset)


@not_compiled
def select(graph: Graph, batch: int, head: int) -> Graph:
    """``graph.select(batch, head)``."""
    for word, index, count in (("batch", batch, graph.batch), ("head", head, graph.heads)):
        checks.position(word, index)
        if count is not None and not 0 <= index < count:
            raise IndexError(f"{word} must be in 0 .. {count - 1}, got {index}")
    if graph.heads is None and graph.batch is None:
        return graph
    name = f"{text.bracketed(graph.name)}.select({batch}, {head})"
    rule = neighbours.pinned_at(graph.rule, batch if graph.batch else 0, head if graph.heads else 0)
    found = neighbours.neighbours_of(rule)
    listed = None if found is None else found.edges()
    return replace(graph, rule=rule, heads=None, batch=None, name=name, _listed=listed)


@not_compiled
def combined(left: Graph, right: Graph, sign: str, join: Callable[..., Tensor]) -> Graph:
    """The graph whose rule is the rules of both, joined; it carries its edges where that takes few pairs."""
    if not isinstance(right, type(left)) and not isinstance(left, type(right)):
        return NotImplemented
    _check_same_nodes(left, right, sign)
    name = f"{text.bracketed(left.name)} {sign} {text.bracketed(right.name)}"
    heads, batch = left.heads or right.heads, left.batch or right.batch
    rule = partial(join, left.rule, right.rule)
    result = replace(left, rule=rule, heads=heads, batch=batch, name=name, _listed=None)
    lists = left.listed_edges, right.listed_edges
    candidates = None if heads or batch else edge_list.candidates(*lists, sign)
    if candidates is None:
        return result
    src, dst = candidates
    edges = candidates[:, rule(torch.zeros_like(dst), torch.zeros_like(dst), dst, src)]
    listed = left.from_distinct_edges(edges, left.num_dst, left.num_src, name)
    return replace(listed, dst_offset=left.dst_offset, src_offset=left.src_offset)


@not_compiled
def complement(graph: Graph) -> Graph:
    """``~graph``."""
    name = f"~{text.bracketed(graph.name)}"
    return replace(graph, rule=partial(rules.not_, graph.rule), name=name, _listed=None)


@not_compiled
def transposed(graph: Graph) -> Graph:
    """``graph.T``."""
    return replace(
        graph,
        rule=partial(rules.transposed, graph.rule),
        num_dst=graph.num_src,
        num_src=graph.num_dst,
        dst_offset=graph.src_offset,
        src_offset=graph.dst_offset,
        name=f"{text.bracketed(graph.name)}.T",
        _listed=None if graph.listed_edges is None else graph.listed_edges.flip(0),
    )


def _check_same_nodes(left: Graph, right: Graph, sign: str) -> None:
    nodes = ("num_dst", "num_src", "dst_offset", "src_offset")
    sizes = ((left.heads, right.heads), (left.batch, right.batch))
    same = all(getattr(left, name) == getattr(right, name) for name in nodes)
    if not same or any(None not in pair and pair[0] != pair[1] for pair in sizes):
        expected = f"graphs joined by {sign} must have the same nodes (number and position), heads and batch"
        raise ValueError(f"{expected}, got {left!r} and {right!r}")


def product(left: Graph, right: Graph) -> Graph:
    """``left @ right``."""
    if (left.num_src, left.src_offset) != (right.num_dst, right.dst_offset):
        wanted = f"{left.num_src} receivers from {left.src_offset} on, the senders of {left.name}"
        got = f"{right.num_dst} receivers of {right!r}"
        raise ValueError(f"graphs joined by @ must meet: expected {wanted}, got {got}")
    sizes = left.num_dst, left.num_src, right.num_src
    edges = edge_list.product(left.edge_index, right.edge_index, *sizes)
    name = f"{text.bracketed(left.name)} @ {text.bracketed(right.name)}"
    graph = left.from_distinct_edges(edges, left.num_dst, right.num_src, name)
    return replace(graph, dst_offset=left.dst_offset, src_offset=right.src_offset)


def power(graph: Graph, hops: int) -> Graph:
    """``graph ** hops``."""
    hops = checks.size("the power of a graph", hops)
    if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
        raise ValueError(f"only a square graph has powers, with the same tokens twice, got {graph!r}")
    loops = torch.arange(graph.num_dst, device="cpu").expand(2, -1)
    result = graph.from_distinct_edges(loops, graph.num_dst, graph.num_src, "loops")
    result = replace(result, dst_offset=graph.dst_offset, src_offset=graph.src_offset)
    for _ in range(hops):
        result = result @ graph
    base = text.bracketed(graph.name)
    return replace(result, name=f"({base}) ** {hops}" if base.startswith("~") else f"{base} ** {hops}")
