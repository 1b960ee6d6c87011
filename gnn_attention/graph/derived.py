"""Properties that are computed once for each graph, such as its mask, its edge list and its counts.

They are functions of a module, not methods, as ``memo.memoized`` requires.
"""

import math
from typing import Any, cast

import torch

from gnn_attention._support import memory
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import edge_list, rules
from gnn_attention.graph.edges import EdgeSet, ListedEdges, RuleEdges, log_count
from gnn_attention.graph.regions import counting, enumerate_pairs

# A TokenGraph, which cannot be imported here because its module imports this one.
Graph = Any

# A new list takes this many bytes per edge: its key, its index in the sorted keys, and its ends.
BYTES_PER_EDGE = 48
ALL_PAIRS = RuleEdges(rules.all_pairs)
CAUSAL = RuleEdges(rules.causal)


def mask(graph: Graph, device: torch.device) -> Tensor:
    num_pairs = math.prod(graph.shape4)
    if device.type == "cpu" and memory.shortage(num_pairs):
        remedy = "use some rows(start, stop), or attend on the graph without its mask"
        memory.check(f"mask() of {graph!r}", num_pairs, remedy)
    keys = graph.edges.keys()
    if keys is not None:
        return _squeeze(graph, edge_list.mask_from_keys(keys.to(device), graph.shape4))
    mask = enumerate_pairs.dense_mask(graph.edges.contains, repr(graph), graph.shape4, device)
    return _squeeze(graph, mask)


def edge_index(graph: Graph, device: torch.device) -> Tensor:
    stored_edges = cast("Tensor | None", graph.edges.listed())
    if device.type != "cpu":
        return cast("Tensor", graph.edge_index if stored_edges is None else stored_edges).to(device)
    if stored_edges is not None:
        # Autograd can save a clone made outside of inference mode, but not an inference tensor.
        return stored_edges.clone() if stored_edges.is_inference() else stored_edges.cpu()
    # Counting the edges takes time, so it is skipped if memory suffices for a list of all pairs.
    if memory.shortage(BYTES_PER_EDGE * graph.num_dst * graph.num_src):
        operation = f"the list of the {graph.num_edges:,} edges of {graph!r}"
        remedy = "use some rows(start, stop), or attend on the graph without its list"
        memory.check(operation, BYTES_PER_EDGE * graph.num_edges, remedy)
    return counting.edge_list(graph.edges, repr(graph), graph.shape4)


def receiver_order(graph: Graph) -> tuple[Tensor | None]:
    """Return the permutation that sorts the edges by receiver, then sender; None if they are sorted."""
    if isinstance(graph.edges, ListedEdges):
        return (graph.edges.order,)
    return (edge_list.sort_by_receiver(graph.edge_index, graph.num_src)[1],)


def in_degree(graph: Graph) -> Tensor:
    # Counting takes up to three int64 values per receiver.
    num_bytes = 24 * math.prod(graph.shape4[:3])
    memory.check(f"the in-degrees of {graph!r}", num_bytes, "use some rows(start, stop)")
    degrees = graph.edges.in_degree()
    if degrees is None and graph.edges.has_slices:
        degrees = torch.stack([graph.select(b, h).in_degree() for b, h in slices(graph)])
    if degrees is None:
        degrees = counting.in_degree(graph.edges, repr(graph), graph.shape4)
    return _squeeze(graph, degrees.view(*graph.shape4[:3]))


def num_edges(graph: Graph) -> int:
    num_stored = graph.edges.count()
    return int(graph.in_degree().sum()) if num_stored is None else cast("int", num_stored)


def max_in_degree(graph: Graph) -> int:
    return int(graph.in_degree().max()) if graph.in_degree().numel() else 0


def has_empty_rows(graph: Graph) -> bool:
    degrees = graph.in_degree()
    return bool(degrees.numel()) and int(degrees.min()) == 0


def is_full(graph: Graph) -> bool:
    num_pairs = math.prod(graph.shape4)
    num_stored = graph.edges.count()
    if num_stored is not None:
        return bool(num_stored >= num_pairs and len(graph.edges.keys()) == num_pairs)
    return has_edges_of(graph, ALL_PAIRS)


def is_causal(graph: Graph) -> bool:
    if graph.num_dst != graph.num_src:
        return False
    num_stored = graph.edges.count()
    num_causal_edges = math.prod(graph.shape4[:2]) * graph.num_dst * (graph.num_dst + 1) // 2
    # Nearly every list has fewer edges than a causal graph, and needs no comparison.
    if num_stored is not None and num_stored < num_causal_edges:
        return False
    return has_edges_of(graph, CAUSAL)


def merge_parallel_edges(graph: Graph) -> tuple[Graph, Any]:
    """Merge parallel edges; return the graph and the score_mod that adds log m for m copies."""
    # A score_mod receives absolute positions.
    src, dst = graph.edge_index
    num_src = graph.src_offset + graph.num_src
    keys = ((dst + graph.dst_offset) * num_src + src + graph.src_offset).sort().values
    return graph.coalesce(), log_count.from_keys(keys, (1, 1, graph.dst_offset + graph.num_dst, num_src))


def has_edges_of(graph: Graph, edges: EdgeSet) -> bool:
    """Return True if every sample and head of the graph has exactly these edges."""
    keys, other_keys = graph.edges.keys(), edges.keys()
    if keys is not None and other_keys is not None:
        return torch.equal(keys, other_keys.to(keys.device))
    if keys is not None and not graph.varying_axes:
        # Most unequal sets already differ at a stored pair.
        dst, src = keys // max(graph.num_src, 1), keys % max(graph.num_src, 1)
        if not edges.contains(torch.zeros_like(dst), torch.zeros_like(dst), dst, src).all():
            return False
    if graph.varying_axes and (graph.edges.has_slices or edges.has_slices):
        return all(has_edges_of(graph.select(b, h), edges.select(b, h)) for b, h in slices(graph))
    return counting.has_same_pairs(graph.edges, edges, repr(graph), graph.shape4)


def slices(graph: Graph) -> list[tuple[int, int]]:
    """Return ``(batch, head)`` of each slice of the graph."""
    return [(b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1)]


def _squeeze(graph: Graph, values: Tensor) -> Tensor:
    """Drop the sample axis unless samples differ, and then the head axis unless heads differ."""
    if graph.batch is not None:
        return values
    return values[0] if graph.heads is not None else values[0, 0]
