"""Align a user's graph with the query and key slots of one attention call.

The graph describes whole sequences from their first token. But a call may have slots for only the
newest receivers, for only the senders that a sliding cache keeps, and for padding on either side.
Graphs with equal rules (:func:`structural_key`) share a cache entry, and so forward passes share
plans.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.algebra import per_head
from gnn_attention.graph import TokenGraph, symbols
from gnn_attention.graph.edges import EdgeSet, RuleEdges
from gnn_attention.graph.rules import Rule

CACHE_SIZE = 64
TRUSTED_PACKAGES = ("transformers", "gnn_attention")


@dataclass(frozen=True, eq=False)
class CallLayout:
    """The graph of an attention call over its slots, and the padding among them.

    ``graph.dst_offset`` and ``graph.src_offset`` are the positions of the first slots.
    ``is_token`` is False at senders that are padding, or None if no sender is. ``left_padding`` has
    the number of slots before the first token of each sample, or is None if all are 0.
    ``is_cached`` is True if the next forward pass gets the same graph object.
    """

    graph: TokenGraph
    batch: int
    is_token: Bool[Tensor, "samples src"] | None = None
    left_padding: Int[Tensor, " samples"] | None = None
    is_cached: bool = False
    _layouts: dict[Any, CallLayout] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of tokens of the longest sample, up to the last receiver."""
        padding = 0 if self.left_padding is None else int(self.left_padding.min())
        return self.graph.dst_offset + self.graph.num_dst - padding

    def restrict(self, graph: TokenGraph, is_replacement: bool, caller: str) -> CallLayout:
        """Return the layout with its edges that are also in ``graph``, or with the edges of ``graph``.

        ``is_replacement`` selects the second. In ``graph`` positions count from the first token.
        Raises ValueError, which names the ``caller``, if ``graph`` does not begin at 0, is too
        short, or is a replacement and needs senders that a cache has dropped.
        """
        key = (CacheKey.of(graph), is_replacement)
        if key not in self._layouts:
            _check_graph(self, graph, is_replacement, caller)
            if self.is_cached:
                graph = _restrict_cached(CacheKey.of(self.graph), *key)
            else:
                graph = _restrict(self, graph, is_replacement)
            self._layouts[key] = self.with_graph(graph, self.is_cached)
        return self._layouts[key]

    def combine_heads(self, layouts: Sequence[CallLayout]) -> CallLayout:
        """Return the layout in which head h has the edges of ``layouts[h]``."""
        key = tuple(map(id, layouts))
        if len(set(key)) == 1:
            return layouts[0]
        if key not in self._layouts:
            self._layouts[key] = self.with_graph(per_head(*(layout.graph for layout in layouts)))
        return self._layouts[key]

    def with_graph(self, graph: TokenGraph, is_cached: bool = False) -> CallLayout:
        return replace(self, graph=graph, is_cached=is_cached, _layouts={})


def token_sender_rule(is_token: Bool[Tensor, "samples src"]) -> Any:
    return symbols.look_up(is_token[0] if len(is_token) == 1 else is_token.unsqueeze(1), symbols.src)


def _check_graph(layout: CallLayout, graph: TokenGraph, is_replacement: bool, caller: str) -> None:
    slots = layout.graph
    if slots.dst_offset + slots.num_dst > slots.src_offset + slots.num_src:
        raise ValueError(f"{caller}: the receivers of {slots!r} are not among its senders, so no graph fits")
    if graph.dst_offset or graph.src_offset:
        raise ValueError(f"{caller}: the graph must describe sequences from position 0, got {graph!r}")
    if min(graph.num_dst, graph.num_src) < layout.length:
        raise ValueError(
            f"{caller}: {graph!r} is too short for a sequence of {layout.length} tokens: pass a "
            "longer graph, or a function (layer, head, length)"
        )
    if not is_replacement or not slots.src_offset:
        return
    dropped_slots = replace(slots, num_src=slots.src_offset, src_offset=0)
    if _graph_at_slots(layout.with_graph(dropped_slots), graph).num_edges:
        raise ValueError(
            f"{caller}: its cache has dropped the senders before {slots.src_offset}, which {graph!r} needs: "
            "generate with use_cache=False, or with a cache of all tokens"
        )


@lru_cache(maxsize=CACHE_SIZE)
def _restrict_cached(slots_key: CacheKey, graph_key: CacheKey, is_replacement: bool) -> TokenGraph:
    return _restrict(CallLayout(slots_key.value, 1), graph_key.value, is_replacement)


@not_compiled
def _restrict(layout: CallLayout, graph: TokenGraph, is_replacement: bool) -> TokenGraph:
    slots = layout.graph
    graph_at_slots = _graph_at_slots(layout, graph)
    if not is_replacement:
        return replace(slots & graph_at_slots, name=f"{graph.name}, within the model's mask")
    # Padding and the empty slots of a static cache must not send, even if the graph has such edges.
    rule = symbols.src < slots.dst_offset + slots.num_dst - slots.src_offset
    rule = rule if layout.is_token is None else rule & token_sender_rule(layout.is_token)
    batch = None if layout.is_token is None or len(layout.is_token) == 1 else layout.batch
    token_graph = replace(slots, edges=RuleEdges(rule), heads=None, batch=batch)
    return replace(token_graph & graph_at_slots, name=f"{graph.name}, without padding")


def _graph_at_slots(layout: CallLayout, graph: TokenGraph) -> TokenGraph:
    """Return a user's graph shifted to the slots of a layout; slots of left padding have no edges."""
    slots, padding = layout.graph, layout.left_padding
    src_stop = slots.src_offset + slots.num_src
    if padding is None and src_stop <= graph.num_src:
        rows = graph.rows(slots.dst_offset, slots.dst_offset + slots.num_dst)
        has_all_senders = (slots.src_offset, src_stop) == (0, graph.num_src)
        return rows if has_all_senders else rows.T.rows(slots.src_offset, src_stop).T
    varies_by_sample = padding is not None and len(padding) > 1
    pad = 0 if padding is None else padding if varies_by_sample else int(padding)
    offsets = (slots.dst_offset, slots.src_offset)
    rule = partial(_is_edge_at_slots, graph.edges.contains, offsets, graph.num_src, pad)
    batch = graph.batch or (layout.batch if varies_by_sample else None)
    return replace(slots, edges=RuleEdges(rule), heads=graph.heads, batch=batch)


def _is_edge_at_slots(
    rule: Rule, offsets: tuple[int, int], num_src: int, pad: Tensor | int, b: Any, h: Any, dst: Any, src: Any
) -> Tensor:
    padding: Any = pad.to(b.device)[b] if isinstance(pad, Tensor) else pad
    dst, src = dst + offsets[0] - padding, src + offsets[1] - padding
    are_tokens = (dst >= 0) & (src >= 0) & (src < num_src)
    is_edge: Tensor = are_tokens & rule(b, h, dst.clamp(min=0), src.clamp(min=0, max=num_src - 1))
    return is_edge


def structural_key(value: object) -> Hashable | None:
    """Return a key that rules with equal code and constants share, or None for untrusted code.

    Only functions of this library and of transformers are trusted not to read mutable global state.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value), value)
    # Builders combine rules with functions of the module `operator`.
    if getattr(operator, getattr(value, "__name__", ""), None) is value:
        return ("operator", value)
    kind: Any = type(value)
    if isinstance(value, tuple):
        parts = value
    elif isinstance(value, MethodType) and isinstance(value.__self__, EdgeSet):
        return structural_key(value.__self__.rule)
    elif isinstance(value, partial):
        parts = (value.func, value.args, tuple(sorted(value.keywords.items())))
    elif isinstance(value, FunctionType) and value.__module__.split(".")[0] in TRUSTED_PACKAGES:
        kind = (value.__module__, value.__code__)
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        parts = (value.__defaults__, *(value.__kwdefaults__ or {}).items(), *cells)
    else:
        return None
    keys = [structural_key(part) for part in parts]
    return None if None in keys else (kind, *keys)


@dataclass(frozen=True)
class CacheKey:
    """A key for a rule or graph: its :func:`structural_key`, or else its identity."""

    key: Hashable
    value: Any = field(compare=False)

    @classmethod
    def of(cls, value: Any) -> CacheKey:
        if not isinstance(value, TokenGraph):
            return cls(structural_key(value) or id(value), value)
        rule_key = structural_key(value.rule)
        return cls(id(value) if rule_key is None else (rule_key, value.frame), value)
