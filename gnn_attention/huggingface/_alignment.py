"""Align a user's graph with the query and key slots of one attention call.

The graph is of a whole sequence from its first token on. A call has slots: a few receivers of a decoding
step, senders of which a sliding cache has dropped some, padding on either side. Graphs of equal rules
(:func:`recipe`) count as the same, so that the plan of one forward pass serves the next.
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

CACHED = 64  # graphs of forward passes: each layer may have its own
TRUSTED = ("transformers", "gnn_attention")  # packages whose rules depend on their arguments alone


@dataclass(frozen=True, eq=False)
class Place:
    """The slots of an attention call in its sequence, with the model's ``own`` graph over them.

    ``own.dst_offset`` and ``own.src_offset`` are the first positions of the slots. ``padding`` is True at the
    senders that are tokens, ``left`` counts a sample's slots of padding before its first token; None: no
    padding. ``cached``: without padding, the own graph is the same object in the next forward pass.
    """

    own: TokenGraph
    batch: int
    padding: Bool[Tensor, "samples src"] | None = None
    left: Int[Tensor, " samples"] | None = None
    cached: bool = False
    _made: dict[Any, Place] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the longest sample up to the last receiver, padding on the left not counted."""
        return self.own.dst_offset + self.own.num_dst - (0 if self.left is None else int(self.left.min()))

    def under(self, graph: TokenGraph, instead: bool, who: str) -> Place:
        """The place with the own edges that ``graph`` has too, or ``instead`` with those of ``graph`` alone.

        A sample's positions count from its first token. ValueError, which names the caller ``who``, for a
        graph that is too short, does not begin at 0, or attends to senders that a cache has dropped.
        """
        key = (Known.of(graph), instead)
        if key not in self._made:
            _check(self, graph, instead, who)
            joined = _cached_join(Known.of(self.own), *key) if self.cached else _join(self, graph, instead)
            self._made[key] = self.along(joined, self.cached)
        return self._made[key]

    def by_head(self, places: Sequence[Place]) -> Place:
        """The place with the edges of one of these places for each head."""
        key = tuple(map(id, places))
        if len(set(key)) == 1:
            return places[0]
        if key not in self._made:
            self._made[key] = self.along(per_head(*(place.own for place in places)))
        return self._made[key]

    def along(self, own: TokenGraph, cached: bool = False) -> Place:
        """The same slots with other edges."""
        return replace(self, own=own, cached=cached, _made={})


def sends_token(padding: Bool[Tensor, "samples src"]) -> Any:
    """The rule of all pairs whose sender is a token."""
    return symbols.look_up(padding[0] if len(padding) == 1 else padding.unsqueeze(1), symbols.src)


def _check(place: Place, graph: TokenGraph, instead: bool, who: str) -> None:
    own = place.own
    if own.dst_offset + own.num_dst > own.src_offset + own.num_src:
        raise ValueError(f"{who}: the receivers of {own!r} are not among its senders, so no graph fits")
    if graph.dst_offset or graph.src_offset:
        raise ValueError(f"{who}: the graph must be that of whole sequences, from position 0, got {graph!r}")
    if min(graph.num_dst, graph.num_src) < place.length:
        reason = f"{graph!r} is too short for a sequence of {place.length} tokens"
        raise ValueError(f"{who}: {reason}: give a longer one, or a function (layer, head, length) -> graph")
    if not instead or not own.src_offset:
        return
    gone = replace(own, num_src=own.src_offset, src_offset=0)
    if _at_slots(place.along(gone), graph).num_edges:
        raise ValueError(
            f"{who}: its cache has dropped the senders before {own.src_offset}, which {graph!r} needs at "
            f"{own.dst_offset} and later: generate with use_cache=False, or with a cache of all tokens"
        )


@lru_cache(maxsize=CACHED)
def _cached_join(own: Known, known: Known, instead: bool) -> TokenGraph:
    return _join(Place(own.thing, 1), known.thing, instead)


@not_compiled
def _join(place: Place, graph: TokenGraph, instead: bool) -> TokenGraph:
    own, at_slots = place.own, _at_slots(place, graph)
    if not instead:
        return replace(own & at_slots, name=f"{graph.name}, within the model's mask")
    # All senders that are tokens: neither padding, nor slots of a static cache still to be filled.
    rule = symbols.src < own.dst_offset + own.num_dst - own.src_offset
    rule = rule if place.padding is None else rule & sends_token(place.padding)
    samples = None if place.padding is None or len(place.padding) == 1 else place.batch
    tokens = replace(own, edges=RuleEdges(rule), heads=None, batch=samples)
    return replace(tokens & at_slots, name=f"{graph.name}, without padding")


def _at_slots(place: Place, graph: TokenGraph) -> TokenGraph:
    """The graph at the slots of the place; no edges where an end is no token of it."""
    own, left = place.own, place.left
    stop = own.src_offset + own.num_src
    if left is None and stop <= graph.num_src:
        rows = graph.rows(own.dst_offset, own.dst_offset + own.num_dst)
        return rows if (own.src_offset, stop) == (0, graph.num_src) else rows.T.rows(own.src_offset, stop).T
    by_sample = left is not None and len(left) > 1
    pads = 0 if left is None else left if by_sample else int(left)
    rule = partial(_inside, graph.edges.contains, (own.dst_offset, own.src_offset), graph.num_src, pads)
    samples = graph.batch or (place.batch if by_sample else None)
    return replace(own, edges=RuleEdges(rule), heads=graph.heads, batch=samples)


def _inside(
    rule: Rule, at: tuple[int, int], num_src: int, pads: Tensor | int, b: Any, h: Any, dst: Any, src: Any
) -> Tensor:
    pad: Any = pads.to(b.device)[b] if isinstance(pads, Tensor) else pads
    dst, src = dst + at[0] - pad, src + at[1] - pad
    known = (dst >= 0) & (src >= 0) & (src < num_src)
    edge: Tensor = known & rule(b, h, dst.clamp(min=0), src.clamp(min=0, max=num_src - 1))
    return edge


def recipe(value: object) -> Hashable | None:
    """A key that is equal for equal rules: their code and the constants bound to it; None where unknown.

    Only code of this library and transformers is trusted to read nothing else; rules with tensors have none.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value), value)
    # The rules of builders are made of Python's own operators.
    if getattr(operator, getattr(value, "__name__", ""), None) is value:
        return ("operator", value)
    kind: Any = type(value)
    if isinstance(value, tuple):
        parts = value
    elif isinstance(value, MethodType) and isinstance(value.__self__, EdgeSet):
        return recipe(value.__self__.rule)
    elif isinstance(value, partial):
        parts = (value.func, value.args, tuple(sorted(value.keywords.items())))
    elif isinstance(value, FunctionType) and value.__module__.split(".")[0] in TRUSTED:
        kind = value.__module__, value.__code__
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        parts = (value.__defaults__, *(value.__kwdefaults__ or {}).items(), *cells)
    else:
        return None
    recipes = [recipe(part) for part in parts]
    return None if None in recipes else (kind, *recipes)


@dataclass(frozen=True)
class Known:
    """A rule or a graph as a key, equal to others of the same recipe; without a recipe, to itself alone."""

    key: Hashable
    thing: Any = field(compare=False)

    @classmethod
    def of(cls, thing: Any) -> Known:
        if not isinstance(thing, TokenGraph):
            return cls(recipe(thing) or id(thing), thing)
        rule = recipe(thing.rule)
        return cls(id(thing) if rule is None else (rule, thing.frame), thing)
