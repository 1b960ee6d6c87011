"""What is computed once for each graph: its mask, its edge list, its counts.

Functions of a module, not methods: ``memo.memoized`` finds them by name, in compiled programs too.
"""

import math
from typing import Any, cast

import torch

from gnn_attention._support import memory
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import edge_list, rules
from gnn_attention.graph.neighbours import has_neighbours, neighbours_of, pinned_at
from gnn_attention.graph.regions import counting, enumerate_pairs
from gnn_attention.graph.rules import Rule

# a TokenGraph, whose module imports this one
Graph = Any

# bytes for each edge while a list is made: its keys, their order, and the list
LISTING_BYTES = 48
TAKE_ROWS = "take some rows(start, stop)"


def mask(graph: Graph, device: torch.device) -> Tensor:
    if device.type == "cpu" and memory.shortage(needed := math.prod(graph.shape4)):
        instead = f"{TAKE_ROWS}, or attend along the graph without its mask"
        memory.check(f"mask() of {graph!r}", needed, instead)
    if (chosen := neighbours_of(graph.rule)) is not None:
        return _squeeze(graph, edge_list.mask(chosen.keys[:-1].to(device), graph.shape4))
    if (listed := graph.listed_edges) is not None:
        keys = edge_list.keys_of(listed, graph.num_src)
        return edge_list.mask(keys.to(device), (graph.num_dst, graph.num_src))
    return _squeeze(graph, enumerate_pairs.dense(graph.rule, repr(graph), graph.shape4, device))


def edge_index(graph: Graph, device: torch.device) -> Tensor:
    if device.type != "cpu":
        chosen = neighbours_of(graph.rule)
        listed = None if chosen is None else chosen.listed
        return cast("Tensor", (graph.edge_index if listed is None else listed).to(device))
    if graph.listed_edges is not None:
        # a clone is no inference tensor, so that it can be used in training
        listed = graph.listed_edges
        return cast("Tensor", listed.clone() if listed.is_inference() else listed)
    chosen = neighbours_of(graph.rule)
    if chosen is not None and chosen.slices == 1:
        return chosen.edges()
    # edges are counted only where there is no memory for every pair
    if memory.shortage(LISTING_BYTES * graph.num_dst * graph.num_src):
        what = f"the list of the {graph.num_edges:,} edges of {graph!r}"
        instead = f"{TAKE_ROWS}, or attend along the graph without its list"
        memory.check(what, LISTING_BYTES * graph.num_edges, instead)
    return counting.edge_list(graph.rule, repr(graph), graph.shape4)


def receiver_order(graph: Graph) -> tuple[Tensor | None]:
    """The order of a graph's list by receiver, then sender, on the CPU; None where it stands in it."""
    return (edge_list.order_by_receiver(graph.edge_index, graph.num_src),)


def in_degree(graph: Graph) -> Tensor:
    if memory.shortage(needed := 24 * math.prod(graph.shape4[:3])):
        memory.check(f"the in-degrees of {graph!r}", needed, TAKE_ROWS)
    if (chosen := neighbours_of(graph.rule)) is not None:
        return _squeeze(graph, chosen.degrees())
    if graph.listed_edges is not None:
        return torch.bincount(graph.listed_edges[1], minlength=graph.num_dst)
    if graph.varying_axes and has_neighbours(graph.rule):
        return _squeeze(
            graph,
            torch.stack([graph.select(b, h).in_degree() for b, h in slices(graph)]).view(*graph.shape4[:3]),
        )
    return _squeeze(graph, counting.in_degree(graph.rule, repr(graph), graph.shape4))


def num_edges(graph: Graph) -> int:
    listed = graph.listed_edges
    if listed is not None:
        return int(listed.shape[1])
    chosen = neighbours_of(graph.rule)
    # the number of chosen senders is known without a look at a device
    return int(graph.in_degree().sum()) if chosen is None else chosen.src.numel()


def max_in_degree(graph: Graph) -> int:
    return int(graph.in_degree().max()) if graph.in_degree().numel() else 0


def has_empty_rows(graph: Graph) -> bool:
    degrees = graph.in_degree()
    return bool(degrees.numel()) and int(degrees.min()) == 0


def is_full(graph: Graph) -> bool:
    if graph.listed_edges is not None or neighbours_of(graph.rule) is not None:
        return bool(graph.num_edges == math.prod(graph.shape4))
    return bool(graph.has_edges_of(rules.everyone))


def is_causal(graph: Graph) -> bool:
    if graph.num_dst != graph.num_src:
        return False
    if (listed := graph.listed_edges) is not None or neighbours_of(graph.rule) is not None:
        # a list is of another length nearly always
        slices = (graph.batch or 1) * (graph.heads or 1)
        if graph.num_edges != slices * graph.num_dst * (graph.num_dst + 1) // 2:
            return False
        if listed is not None:
            return bool((listed[0] <= listed[1]).all())
    return bool(graph.has_edges_of(rules.causal))


def has_edges_of(graph: Graph, rule: Rule) -> bool:
    if not graph.varying_axes or not (has_neighbours(graph.rule) or has_neighbours(rule)):
        return counting.same(graph.rule, rule, repr(graph), graph.shape4)
    parts = ((graph.select(*at), pinned_at(rule, *at)) for at in slices(graph))
    return all(part.has_edges_of(of_part) for part, of_part in parts)


def slices(graph: Graph) -> list[tuple[int, int]]:
    """``(batch, head)`` of all samples and heads by which the graph differs, heads first."""
    return [(b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1)]


def _squeeze(graph: Graph, per_head: Tensor) -> Tensor:
    """``[batch or 1, heads or 1, ...]`` without the leading axes by which the graph does not vary."""
    if graph.batch is not None:
        return per_head
    return per_head[0] if graph.heads is not None else per_head[0, 0]
