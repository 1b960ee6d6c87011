"""Align a user's graph with the query and key slots of one attention call.

The graph is of a whole sequence from its first token on. A call has slots: a few receivers of a decoding
step, senders of which a sliding cache has dropped some, padding on either side. Graphs of equal rules
(:func:`recipe`) count as the same, so that the plan of one forward pass serves the next.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from types import FunctionType
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.algebra.stacks import all_of
from gnn_attention.graph import TokenGraph
from gnn_attention.graph import rules as graph_rules
from gnn_attention.graph.intervals.arithmetic import evaluate
from gnn_attention.graph.intervals.values import Interval
from gnn_attention.graph.neighbours import Neighbours, fields_of, neighbours_of
from gnn_attention.graph.regions import counting
from gnn_attention.graph.rules import Rule

Origin = tuple[int, int]  # the first dst and src
CACHED = 64  # graphs of forward passes: each layer may have its own
WITHIN = "within the model's mask"
TRUSTED = ("transformers", "gnn_attention")  # packages whose rules depend on their arguments alone


@dataclass(frozen=True, eq=False)
class Place:
    """The slots of an attention call in its sequence, with the model's ``own`` graph over them.

    ``own.dst_offset`` and ``own.src_offset`` are the first positions of the slots. ``padding`` is True at the
    senders that are tokens, ``left`` counts a sample's slots of padding before its first token; None: no
    padding. ``cached``: the own graph is the same object in the next forward pass.
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
            _check_length(self, graph, who)
            if instead:
                _check_senders_resident(self, graph, who)
            cacheable = self.cached and self.left is None
            joined = _cached_join(Known.of(self.own), *key) if cacheable else _join(self, graph, instead)
            self._made[key] = replace(self, own=joined, _made={})
        return self._made[key]

    def within_documents(self, lengths: tuple[int, ...]) -> Place:
        """The place with the edges inside of documents of these lengths, which fill the slots."""
        own = _cached_join(Known.of(self.own), Known.of(_documents(lengths)), False)
        return replace(self, own=own, _made={})

    def by_head(self, places: Sequence[Place]) -> Place:
        key = tuple(id(place) for place in places)
        if key not in self._made:
            own = _by_head([place.own for place in places])
            self._made[key] = replace(self, own=own, cached=self.cached and len(set(key)) == 1, _made={})
        return self._made[key]


def framed(
    rule: Rule, num_dst: int, num_src: int, at: Origin, name: str = "the model's mask", **axes: int | None
) -> TokenGraph:
    graph = TokenGraph.from_rule(rule, num_dst, num_src, name=name, **axes)
    return replace(graph, dst_offset=at[0], src_offset=at[1])


def shifted(rule: Rule, first: int, start: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return evaluate(rule, b, h, dst + first, src + start)


def is_token(padding: Bool[Tensor, "samples src"], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    padding = padding if isinstance(src, Interval) else padding.to(src.device)
    return padding[0][src] if len(padding) == 1 else padding[b, src]


def _check_length(place: Place, graph: TokenGraph, who: str) -> None:
    own = place.own
    if own.dst_offset + own.num_dst > own.src_offset + own.num_src:
        raise ValueError(f"{who}: the receivers of {own!r} are not among its senders, so no graph fits")
    if graph.dst_offset or graph.src_offset:
        raise ValueError(f"{who}: the graph must be that of whole sequences, from position 0, got {graph!r}")
    if min(graph.num_dst, graph.num_src) < place.length:
        advice = "a longer one (what is beyond is cut), a function (layer, head, length) -> graph, or a part"
        reason = f"{graph!r} is too short for a sequence of {place.length} tokens"
        raise ValueError(f"{who}: {reason}: give {advice} of the model that it fits")


def _check_senders_resident(place: Place, graph: TokenGraph, who: str) -> None:
    own = place.own
    if not own.src_offset:
        return
    gone = framed(graph_rules.everyone, own.num_dst, own.src_offset, (own.dst_offset, 0))
    samples = 1 if place.left is None and graph.batch is None else place.batch
    sizes = (samples, graph.heads or 1, own.num_dst, own.src_offset)
    if counting.any_edge(_placed(replace(place, own=gone), graph), sizes):
        dropped = f"its cache has dropped the senders before {own.src_offset}, which {graph!r} needs"
        advice = "generate with use_cache=False, or with a cache of all tokens"
        raise ValueError(f"{who}: {dropped} at {own.dst_offset} and later: {advice}")


@lru_cache(maxsize=CACHED)
def _cached_join(own: Known, known: Known, instead: bool) -> TokenGraph:
    return _join(Place(own.thing, 1), known.thing, instead)


@lru_cache(maxsize=CACHED)
def _documents(lengths: tuple[int, ...]) -> TokenGraph:
    return patterns.documents(lengths, causal=False)


@not_compiled
def _join(place: Place, graph: TokenGraph, instead: bool) -> TokenGraph:
    own, left = place.own, place.left
    chosen = None if instead or left is not None else _chosen_within(own, graph)
    if chosen is not None:
        return chosen
    name = f"{graph.name}, {'without padding' if instead else WITHIN}"
    if graph._listed is not None and left is None and not instead:
        return replace(own & _placed_list(place, graph), name=name)
    rules = [_placed(place, graph), *(_slots_with_tokens(place) if instead else [own.rule])]
    tables = (left, place.padding if instead else None)
    by_sample = any(table is not None and len(table) > 1 for table in tables)
    samples = graph.batch or (None if instead else own.batch) or (place.batch if by_sample else None)
    heads = graph.heads or (None if instead else own.heads)
    return framed(partial(all_of, tuple(rules)), *_frame(own), name, heads=heads, batch=samples)


def _chosen_within(own: TokenGraph, graph: TokenGraph) -> TokenGraph | None:
    """The senders that a graph chose among the own ones, still as rows; None for another graph, or slots."""
    of = neighbours_of(graph.rule)
    if of is None or own.varying_axes or _frame(own) != _frame(graph):
        return None
    row, src = torch.repeat_interleave(of.ptr.diff()), of.src.long()
    nothing = torch.zeros_like(row)
    inside = own.rule(nothing, nothing, row % own.num_dst, src).expand_as(row)
    if bool(inside.all()):
        return graph
    rows = Neighbours.of_edges(row[inside], src[inside], of.shape)
    fields = fields_of(rows, graph.batch, graph.heads)
    return replace(graph, **fields, name=f"{graph.name}, {WITHIN}", _listed=None)


def _frame(graph: TokenGraph) -> tuple[int, int, Origin]:
    return graph.num_dst, graph.num_src, (graph.dst_offset, graph.src_offset)


def _slots_with_tokens(place: Place) -> list[Rule]:
    """Neither padding, nor after the last receiver, where a static cache is still empty."""
    last = place.own.dst_offset + place.own.num_dst - place.own.src_offset
    rules: list[Rule] = [partial(_below, last)] if last < place.own.num_src else []
    return rules if place.padding is None else [*rules, partial(is_token, place.padding)]


def _below(slots: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return src < slots


def _placed(place: Place, graph: TokenGraph) -> Rule:
    """The rule of the graph at the slots of the place; no edges where an end is no token of it."""
    own, left = place.own, place.left
    pad = 0 if left is None or len(left) > 1 else int(left)
    origin, left = (
        (own.dst_offset - pad, own.src_offset - pad),
        None if left is None or len(left) == 1 else left,
    )
    if left is None and min(origin) >= 0 and origin[1] + own.num_src <= graph.num_src:
        return partial(shifted, graph.rule, *origin) if any(origin) else graph.rule
    return partial(_inside, graph.rule, origin, graph.num_src, left)


def _inside(
    rule: Rule, at: Origin, num_src: int, left: Tensor | None, b: Any, h: Any, dst: Any, src: Any
) -> Tensor:
    pad: Any = 0
    if left is not None:
        pad = left[b] if isinstance(b, Interval) else left.to(b.device)[b]
    dst, src = dst + at[0] - pad, src + at[1] - pad
    known = (dst >= 0) & (src >= 0) & (src < num_src)
    edge: Tensor = known & evaluate(rule, b, h, dst.clamp(min=0), src.clamp(min=0, max=num_src - 1))
    return edge


def _placed_list(place: Place, graph: TokenGraph) -> TokenGraph:
    own = place.own
    src, dst = graph.edge_index
    src, dst = src - own.src_offset, dst - own.dst_offset
    inside = (dst >= 0) & (dst < own.num_dst) & (src >= 0) & (src < own.num_src)
    edges = torch.stack([src, dst])[:, inside]
    listed = TokenGraph.from_edges(edges, own.num_dst, own.num_src)
    return replace(listed, dst_offset=own.dst_offset, src_offset=own.src_offset)


@not_compiled
def _by_head(graphs: list[TokenGraph]) -> TokenGraph:
    distinct = list({id(graph): graph for graph in graphs}.values())
    if len(distinct) == 1:
        return distinct[0]
    if by_head := [graph for graph in distinct if graph.heads is not None]:
        got = f"{by_head[0]!r}; select(batch, head) takes one"
        raise ValueError(f"the graph of one head must not differ by head, got {got}")
    group = list(map(id, distinct))
    of_head = torch.tensor([group.index(id(graph)) for graph in graphs], device="cpu")
    rule = partial(_of_head, of_head, tuple(graph.rule for graph in distinct))
    batch = next((graph.batch for graph in distinct if graph.batch), None)
    return framed(rule, *_frame(distinct[0]), f"{len(distinct)} by head", heads=len(graphs), batch=batch)


def _of_head(of_head: Tensor, rules: Sequence[Rule], b: Tensor, h: Tensor, dst: Any, src: Any) -> Tensor:
    mine = of_head[h] if isinstance(h, Interval) else of_head.to(h.device)[h]
    edges = ((mine == number) & evaluate(rule, b, h, dst, src) for number, rule in enumerate(rules))
    found: Tensor = reduce(operator.or_, edges)
    return found


def recipe(value: object) -> Hashable | None:
    """A key that is equal for equal rules: their code and the constants bound to it; None where unknown.

    Only code of this library and transformers is trusted to read nothing else; rules with tensors have none.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value), value)
    if isinstance(value, tuple):
        return _all_of(tuple, *value)
    if isinstance(value, partial):
        return _all_of(partial, value.func, value.args, tuple(sorted(value.keywords.items())))
    # an operator of Python's own, of which the rules of builders are made
    if getattr(operator, getattr(value, "__name__", ""), None) is value:
        return ("operator", value)
    if not isinstance(value, FunctionType) or value.__kwdefaults__:
        return None
    if value.__module__.split(".")[0] not in TRUSTED:
        return None
    cells = (cell.cell_contents for cell in value.__closure__ or ())
    bound = _all_of(FunctionType, value.__defaults__, *cells)
    return None if bound is None else (value.__module__, value.__code__, bound)


def _all_of(kind: type, *values: object) -> Hashable | None:
    parts = [recipe(value) for value in values]
    return None if None in parts else (kind, *parts)


@dataclass(frozen=True)
class Known:
    """A rule or a graph as a key, equal to others of the same recipe; without a recipe, to itself alone."""

    key: Hashable
    thing: Any = field(compare=False)

    @classmethod
    def of(cls, thing: Any) -> Known:
        if not isinstance(thing, TokenGraph):
            return cls(recipe(thing) or id(thing), thing)
        rule = None if thing._listed is not None else recipe(thing.rule)
        return cls(id(thing) if rule is None else (rule, thing.frame), thing)
