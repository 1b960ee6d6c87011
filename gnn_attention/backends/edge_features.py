"""Features of edges that add to keys and values, computed at the width of the features.

With features ``a_e`` the key of an edge is ``k_src + a_e W_k`` and its value ``v_src + a_e W_v``.
Two identities avoid a row of head channels at each edge:

    ``q . (k + a W_k) = q . k + (q W_k^T) . a``  and  ``sum of w (v + a W_v) = sum of w v + (sum of w a) W_v``

So an edge is also an edge from the sender ``a_e`` to a receiver that has one row for each type of edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support import checks, edge_checks
from gnn_attention._support.dynamo import eager_mode
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.edge_ops import edge_lists, operators
from gnn_attention.edge_softmax import per_query_head
from gnn_attention.graph import TokenGraph, memoized

LAYOUT = "[Hkv, F, {0}], or [types, Hkv, F, {0}] with edge_type"
# Results that depend on the types of edges, which are the keys.
_cached_results: Any = WeakIdKeyDictionary()
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class EdgeFeatures:
    """Features and their maps to keys and values; a map is None if it is 0."""

    attr: Float[Tensor, "edges features"]
    key: Float[Tensor, "types kv_heads features dim"] | None
    value: Float[Tensor, "types kv_heads features value_dim"] | None
    edge_type: Int[Tensor, " edges"] | None = None

    @classmethod
    def from_arguments(
        cls,
        edge_attr: Tensor,
        edge_key: Tensor | None,
        edge_value: Tensor | None,
        edge_type: Tensor | None,
        graph: TokenGraph,
        k: Tensor,
        v: Tensor,
    ) -> EdgeFeatures:
        """Check the arguments of ``attend``; raise TypeError or ValueError."""
        num_edges = graph.edges_on(k.device).shape[1]
        edge_checks.floats_like("edge_attr", edge_attr, "[E, F]", k)
        if edge_attr.dim() != 2 or len(edge_attr) != num_edges:
            raise ValueError(f"edge_attr must be [E, F] with E = {num_edges}, got {list(edge_attr.shape)}")
        first_map = edge_key if edge_value is None else edge_value
        if first_map is None:
            raise ValueError("edge_attr needs edge_key, edge_value or both, got neither")
        num_types = None if edge_type is None else _check_types(edge_type, first_map, num_edges)
        maps: list[Tensor | None] = []
        for name, weight, rows in (("edge_key", edge_key, k), ("edge_value", edge_value, v)):
            if weight is not None:
                edge_checks.floats_like(name, weight, "[Hkv, F, D]", k)
                shape = [rows.shape[1], edge_attr.shape[1], rows.shape[3]]
                shape = shape if num_types is None else [num_types, *shape]
                if list(weight.shape) != shape:
                    layout = LAYOUT.format("Dv" if name == "edge_value" else "D")
                    raise ValueError(f"{name} must be {layout}, here {shape}, got {list(weight.shape)}")
                weight = weight.unsqueeze(0) if num_types is None else weight
            maps.append(weight)
        return cls(edge_attr, maps[0], maps[1], edge_type)

    @property
    def num_types(self) -> int:
        weight = self.value if self.key is None else self.key
        assert weight is not None
        return weight.shape[0]

    def select_heads(self, kv_heads: slice) -> EdgeFeatures:
        """Return the features with the maps of some key/value heads."""
        key = None if self.key is None else self.key[:, kv_heads]
        value = None if self.value is None else self.value[:, kv_heads]
        return replace(self, key=key, value=value)

    def edge_rows(
        self, num_heads: int, dtype: torch.dtype, index: Tensor | None = None
    ) -> list[Float[Tensor, "edges heads _"]]:
        """Return ``a W_k`` and ``a W_v`` of all edges, or of the edges ``index``; 0 without a map."""
        attr, edge_type = self.attr.to(dtype), self.edge_type
        if index is not None:
            attr = attr.index_select(0, index)
            edge_type = None if edge_type is None else edge_type.index_select(0, index)
        if edge_type is not None:
            # Each type has its own features, which are 0 at edges of other types.
            is_type = edge_type.unsqueeze(1) == torch.arange(self.num_types, device=attr.device)
            attr = (attr.unsqueeze(1) * is_type.unsqueeze(2)).flatten(1)
        maps = [None if x is None else per_query_head(x, num_heads).to(dtype) for x in (self.key, self.value)]
        zero = attr.new_zeros(1, 1, 1)
        return [
            zero if x is None else torch.tensordot(attr, x.transpose(1, 2).flatten(0, 1), 1) for x in maps
        ]

    def logits(
        self, r: Float[Tensor, "batch heads dst types_features"], graph: TokenGraph
    ) -> Float[Tensor, "batch heads edges"]:
        """Compute ``r_dst . a_e`` for the edges in the order of EdgeRows."""
        r = r.reshape(*r.shape[:2], r.shape[2] * self.num_types, self.attr.shape[1])
        edges, orders = self._edges(graph)
        products = operators.products(r, self._rows(r, orders, graph), edges, 1.0)
        return products if orders is None else operators.permute(products, orders[::-1])

    def query_map(self, like: Tensor) -> Float[Tensor, "heads dim types_features"] | None:
        """Return the map W from queries to ``r = q W``, or None if the features do not add to keys."""
        if self.key is None:
            return None
        return per_query_head(self.key, like.shape[1]).to(like.dtype).permute(1, 3, 0, 2).flatten(2)

    def kernel_inputs(self, q: Tensor, graph: TokenGraph) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return r, without rows if there is no map, and sorted features ``[batch, 1, E, F]`` and types."""
        edge_type, weight = self.edge_type, self.query_map(q)
        if edge_type is not None:
            edge_type = edge_type.index_select(0, edge_lists.edge_order(graph, q.device)).int()
        empty = q.new_empty(*q.shape[:2], 0, self.num_types * self.attr.shape[1])
        return empty if weight is None else q @ weight, self._rows(q, None, graph), edge_type

    def add_values(
        self,
        out: Float[Tensor, "batch heads dst value_dim"],
        weights: Float[Tensor, "batch heads edges"],
        graph: TokenGraph,
    ) -> Float[Tensor, "batch heads dst value_dim"]:
        """Add ``sum of w_e a_e W_v`` over the in-edges of each receiver to ``out``, in place if possible."""
        if self.value is None:
            return out
        edges, orders = self._edges(graph)
        weights = weights if orders is None else operators.permute(weights, orders)
        sums = operators.incoming(weights, self._rows(weights, orders, graph), edges)
        return self.add_sums(out, sums.reshape(*out.shape[:3], self.num_types * self.attr.shape[1]))

    def add_sums(
        self,
        out: Float[Tensor, "batch heads dst value_dim"],
        sums: Float[Tensor, "batch heads dst types_features"],
    ) -> Float[Tensor, "batch heads dst value_dim"]:
        """Add ``sums W_v`` to ``out``, in place if possible."""
        if self.value is None:
            return out
        weight = per_query_head(self.value, out.shape[1]).to(sums.dtype).transpose(0, 1).flatten(1, 2)
        rows, sums = out.flatten(0, 1), sums.flatten(0, 1)
        weight = weight.expand(len(out), *weight.shape).flatten(0, 1)
        # New memory pages for the sum would take as long as the product.
        add = rows.baddbmm if torch._C._are_functorch_transforms_active() else rows.baddbmm_
        return add(sums, weight).view(out.shape)

    def _rows(self, like: Tensor, orders: list[Tensor] | None, graph: TokenGraph) -> Tensor:
        """Return the features as rows of senders ``[batch, 1, edges, features]``."""
        rows, permutation = self.attr.to(like.dtype), edge_lists.edge_permutation(graph, self.attr.device)
        for order in (*permutation[:1], *(orders or ())[:1]):
            rows = rows.index_select(0, order)
        return rows.view(1, 1, *rows.shape) if len(like) == 1 else rows.expand(len(like), 1, -1, -1)

    def _edges(self, graph: TokenGraph) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return edges from features to receivers by type, and their order among EdgeRows and its inverse."""
        device = self.attr.device
        if self.edge_type is None:
            return list(memoized(_feature_edges, graph, device)), None
        return _cache(_sort_by_type, graph, self.edge_type, self.num_types)


def _feature_edges(graph: TokenGraph, device: torch.device) -> tuple[Tensor, ...]:
    rows = edge_lists.edge_rows(graph, device)
    # Results for a list are cached under its ptr, so two lists must not share it.
    return tuple(edge_lists.with_own_senders(rows.ptr.clone(), rows.dst))


def _cache(function: Callable[..., T], graph: TokenGraph, edge_type: Tensor, num_types: int) -> T:
    """Return ``function(graph, edge_type, num_types)``, cached for the last graph and values of the types."""
    if torch.compiler.is_compiling():
        return function(graph, edge_type, num_types)
    key = graph._id, edge_type._version, num_types
    results = _cached_results.setdefault(edge_type, {})
    cached_key, result = results.get(function, (None, None))
    if cached_key != key:
        with eager_mode():
            result = function(graph, edge_type, num_types)
        results[function] = key, result
    return result  # type: ignore[no-any-return]


def _sort_by_type(graph: TokenGraph, edge_type: Tensor, num_types: int) -> tuple[list[Tensor], list[Tensor]]:
    dst = edge_lists.edge_rows(graph, edge_type.device).dst.long()
    sorted_type = edge_type.index_select(0, edge_lists.edge_order(graph, edge_type.device))
    return edge_lists.sort_by_row(dst * num_types + sorted_type, graph.num_dst * num_types)


def _add_senders(graph: TokenGraph, edge_type: Tensor, num_types: int) -> TokenGraph:
    """Return the graph whose sender ``type * num_src + src`` has the edges of one type."""
    src, dst = graph.edges_on(edge_type.device)
    edge_index = torch.stack([edge_type * graph.num_src + src, dst])
    return TokenGraph.from_edges(edge_index, graph.num_dst, graph.num_src * num_types, parallel="keep")


def map_by_type(
    edge_key: Tensor | None,
    edge_value: Tensor | None,
    edge_type: Tensor,
    graph: TokenGraph,
    k: Tensor,
    v: Tensor,
) -> tuple[TokenGraph, Tensor, Tensor]:
    """Return a graph with a sender for each type and sender, their keys ``k W_k`` and values ``v W_v``."""
    weight = edge_key if edge_value is None else edge_value
    if weight is None:
        raise ValueError("edge_type needs edge_key, edge_value or both, got neither")
    num_types = _check_types(edge_type, weight, graph.edges_on(k.device).shape[1])
    rows = []
    for name, weight, x in (("edge_key", edge_key, k), ("edge_value", edge_value, v)):
        if weight is None:
            mapped = x.unsqueeze(2).expand(-1, -1, num_types, -1, -1)
        else:
            edge_checks.floats_like(name, weight, "[types, Hkv, D, D]", k)
            shape = num_types, x.shape[1], x.shape[3]
            if weight.dim() != 4 or weight.shape[:3] != shape:
                raise ValueError(
                    f"{name} must be [types, Hkv, D, D] without edge_attr, here {list(shape)} and the new "
                    f"width, got {list(weight.shape)}"
                )
            mapped = x.unsqueeze(2) @ weight.to(x.dtype).transpose(0, 1)
        rows.append(mapped.flatten(2, 3))
    return _cache(_add_senders, graph, edge_type, num_types), rows[0], rows[1]


def _check_types(edge_type: Tensor, weight: Tensor, num_edges: int) -> int:
    """Return the number of types, the length of the first axis of ``weight``."""
    if not isinstance(edge_type, Tensor) or edge_type.dtype != torch.int64 or edge_type.shape != (num_edges,):
        raise ValueError(
            f"edge_type must be an int64 tensor [E] with E = {num_edges}, "
            f"got {checks.describe_type(edge_type)}"
        )
    if weight.dim() != 4:
        raise ValueError(f"with edge_type, maps must be [types, Hkv, F, D], got {list(weight.shape)}")
    num_types = weight.shape[0]
    if type(edge_type) is Tensor and edge_type.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(x) for x in edge_type.aminmax()) if num_edges else (0, 0)
        if low < 0 or high >= num_types:
            raise IndexError(f"edge_type must be in 0 .. {num_types - 1}, got {low} .. {high}")
    return num_types
