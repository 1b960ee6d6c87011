"""What is computed once for each graph: its mask, its edge list, its counts.

Functions of a module, not methods: ``memo.memoized`` finds them by name, in compiled programs too.
"""

import math
from typing import Any, cast

import torch

from gnn_attention._support import memory
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import edge_list, rules
from gnn_attention.graph.edges import EdgeSet, ListedEdges, RuleEdges, log_count
from gnn_attention.graph.regions import counting, enumerate_pairs

# a TokenGraph, whose module imports this one
Graph = Any

# bytes for each edge while a list is made: its keys, their order, and the list
LISTING_BYTES = 48
TAKE_ROWS = "take some rows(start, stop)"
EVERY_PAIR, PAST = RuleEdges(rules.all_pairs), RuleEdges(rules.causal)


def mask(graph: Graph, device: torch.device) -> Tensor:
    if device.type == "cpu" and memory.shortage(needed := math.prod(graph.shape4)):
        instead = f"{TAKE_ROWS}, or attend along the graph without its mask"
        memory.check(f"mask() of {graph!r}", needed, instead)
    keys = graph.edges.keys()
    if keys is not None:
        return _squeeze(graph, edge_list.mask(keys.to(device), graph.shape4))
    return _squeeze(graph, enumerate_pairs.dense(graph.edges.contains, repr(graph), graph.shape4, device))


def edge_index(graph: Graph, device: torch.device) -> Tensor:
    listed = cast("Tensor | None", graph.edges.listed())
    if device.type != "cpu":
        return cast("Tensor", graph.edge_index if listed is None else listed).to(device)
    if listed is not None:
        # A clone is no inference tensor, so that it can be used in training.
        return listed.clone() if listed.is_inference() else listed.cpu()
    # edges are counted only where there is no memory for every pair
    if memory.shortage(LISTING_BYTES * graph.num_dst * graph.num_src):
        what = f"the list of the {graph.num_edges:,} edges of {graph!r}"
        instead = f"{TAKE_ROWS}, or attend along the graph without its list"
        memory.check(what, LISTING_BYTES * graph.num_edges, instead)
    return counting.edge_list(graph.edges, repr(graph), graph.shape4)


def receiver_order(graph: Graph) -> tuple[Tensor | None]:
    """The order of a graph's list by receiver, then sender, on the CPU; None where it stands in it."""
    if isinstance(graph.edges, ListedEdges):
        return (graph.edges.order,)
    return (edge_list.sort_by_receiver(graph.edge_index, graph.num_src)[1],)


def in_degree(graph: Graph) -> Tensor:
    if memory.shortage(needed := 24 * math.prod(graph.shape4[:3])):
        memory.check(f"the in-degrees of {graph!r}", needed, TAKE_ROWS)
    degrees = graph.edges.in_degree()
    if degrees is None and graph.edges.has_slices:
        degrees = torch.stack([graph.select(b, h).in_degree() for b, h in slices(graph)])
    if degrees is None:
        degrees = counting.in_degree(graph.edges, repr(graph), graph.shape4)
    return _squeeze(graph, degrees.view(*graph.shape4[:3]))


def num_edges(graph: Graph) -> int:
    # The number of chosen senders is known without a look at a device.
    count = graph.edges.count()
    return int(graph.in_degree().sum()) if count is None else cast("int", count)


def max_in_degree(graph: Graph) -> int:
    return int(graph.in_degree().max()) if graph.in_degree().numel() else 0


def has_empty_rows(graph: Graph) -> bool:
    degrees = graph.in_degree()
    return bool(degrees.numel()) and int(degrees.min()) == 0


def is_full(graph: Graph) -> bool:
    pairs = math.prod(graph.shape4)
    count = graph.edges.count()
    if count is not None:
        return bool(count >= pairs and len(graph.edges.keys()) == pairs)
    return has_edges_of(graph, EVERY_PAIR)


def is_causal(graph: Graph) -> bool:
    if graph.num_dst != graph.num_src:
        return False
    slices, count = (graph.batch or 1) * (graph.heads or 1), graph.edges.count()
    # The length of a list is another one nearly always.
    if count is not None and count < slices * graph.num_dst * (graph.num_dst + 1) // 2:
        return False
    return has_edges_of(graph, PAST)


def merge_parallel_edges(graph: Graph) -> tuple[Graph, Any]:
    """The graph without parallel edges, and the score_mod that counts each edge as often as it stood."""
    width = graph.src_offset + graph.num_src
    dst, src = graph.edge_index[1] + graph.dst_offset, graph.edge_index[0] + graph.src_offset
    keys = (dst * width + src).sort().values
    return graph.coalesce(), log_count.of(keys, (1, 1, graph.dst_offset + graph.num_dst, width))


def has_edges_of(graph: Graph, edges: EdgeSet) -> bool:
    """Whether every sample and head of the graph has exactly these edges."""
    keys, other = graph.edges.keys(), edges.keys()
    if keys is not None and other is not None:
        return torch.equal(keys, other.to(keys.device))
    if keys is not None and not graph.varying_axes:
        # A stored pair that is none of the edges tells most sets apart.
        dst, src = keys // max(graph.num_src, 1), keys % max(graph.num_src, 1)
        if not edges.contains(torch.zeros_like(dst), torch.zeros_like(dst), dst, src).all():
            return False
    if graph.varying_axes and (graph.edges.has_slices or edges.has_slices):
        parts = ((graph.select(*at), edges.select(*at)) for at in slices(graph))
        return all(has_edges_of(part, edges_of_part) for part, edges_of_part in parts)
    return counting.same(graph.edges, edges, repr(graph), graph.shape4)


def slices(graph: Graph) -> list[tuple[int, int]]:
    """``(batch, head)`` of all samples and heads by which the graph differs, heads first."""
    return [(b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1)]


def _squeeze(graph: Graph, per_head: Tensor) -> Tensor:
    """``[batch or 1, heads or 1, ...]`` without the leading axes by which the graph does not vary."""
    if graph.batch is not None:
        return per_head
    return per_head[0] if graph.heads is not None else per_head[0, 0]
