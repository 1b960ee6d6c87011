"""A graph divided into disjoint parts that different kernels do best: full boxes, known shapes, the rest.

A part is a graph over a range of receivers and a range of senders. First the few tokens that many attend to,
or that attend to many (sinks, prefixes, global tokens), become boxes; what remains is cut down to the tokens
that have edges, and is often a plain window, causal or packed again. A union ``a | b`` is taken term by term,
each without the edges of those before it. A list of edges is divided into well filled tiles and the others.
"""

import operator
from dataclasses import replace
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch.nn import functional

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.backends.plan.tile_density import divided, left_over
from gnn_attention.graph import TokenGraph, memoized, rules
from gnn_attention.graph.kernel_formats import Varlen, to_varlen
from gnn_attention.graph.neighbours import keys_of
from gnn_attention.graph.rules import Rule

BLOCK = 64  # tokens on the side of a tile of a list of edges
LEAST_FILL = {"list": 0.25, "rule": 1 / 32}  # of a tile that is not left to a list of edges
LEAST_SHARE = 1 / 64  # of the edges: what must be on either side, for two kernels to be better than one
MOST_PARTS = 8
MOST_HUBS = 4  # ranges of tokens, on either side
HUB = 2  # times the usual degree
MOST_EDGES = 2**28  # that are listed to be set apart

WHOLE = "the whole graph"

Range = tuple[int, int]


class Part(NamedTuple):
    """Some edges of a graph: ``graph`` over the receivers ``dst`` and the senders ``src`` of the whole."""

    graph: TokenGraph
    dst: Range
    src: Range
    what: str


def parts(graph: TokenGraph) -> tuple[Part, ...]:
    """Disjoint parts whose union is a plain graph, none of them empty; cached.

    >>> from gnn_attention import patterns
    >>> for part in parts(patterns.window(1000, 50) | patterns.sinks(1000, 4)):
    ...     print(part.dst, part.src, part.what, part.graph.num_edges)
    (0, 1000) (0, 4) senders of many 3994
    (4, 1000) (4, 1000) the rest 48575
    """
    numbers = memoized(_ranges, graph)
    if [what for _, _, what in numbers] == [WHOLE]:
        return (Part(graph, *numbers[0]),)
    return tuple(Part(part, *number) for part, number in zip(graph._parts[0], numbers, strict=True))


def shifted(graph: TokenGraph) -> Part | None:
    """The edges as one full or causal graph over fewer tokens, or None; cached.

    >>> from gnn_attention import patterns
    >>> shifted(patterns.strict_causal(9))[1:3]
    ((1, 9), (0, 8))
    """
    numbers = memoized(_shifted, graph)
    return None if numbers is None else Part(graph._parts[1][0], *numbers)


def positions(part: Part, whole: TokenGraph, device: torch.device) -> Int[Tensor, " edges"]:
    return memoized(_positions, whole, part.graph, part.dst[0], part.src[0], device)


def packing(graph: TokenGraph) -> Varlen | None:
    """The graph as packed documents with one window, for variable-length kernels, or None; cached."""
    return memoized(_packing, graph)


def _ranges(graph: TokenGraph) -> tuple[tuple[Range, Range, str], ...]:
    found = _divided(graph)
    # there a compiled program reads them; a graph that refers to itself would stay in memory with its cache
    graph._parts[:] = [[part.graph for part in found if part.graph is not graph]]
    return tuple((part.dst, part.src, part.what) for part in found)


def _shifted(graph: TokenGraph) -> tuple[Range, Range, str] | None:
    memoized(_ranges, graph)
    divisible = graph._listed is None and graph.num_edges > 0 and not _has_kernel(graph)
    part = _trimmed(Part(graph, (0, graph.num_dst), (0, graph.num_src), "shifted")) if divisible else None
    if part is None or part.graph is graph or not (part.graph.is_full() or part.graph.is_causal()):
        return None
    graph._parts.append([part.graph])
    return part.dst, part.src, part.what


def _positions(whole: TokenGraph, part: TokenGraph, dst: int, src: int, device: torch.device) -> Tensor:
    return whole.positions_of(part.edge_index + torch.tensor([[src], [dst]], device="cpu")).to(device)


def _packing(graph: TokenGraph) -> Varlen | None:
    square = graph.num_dst == graph.num_src > 0
    if graph._listed is not None or not square or graph.has_empty_rows:
        return None
    try:
        return to_varlen(graph)
    except ValueError:
        return None


def _divided(graph: TokenGraph) -> list[Part]:
    whole = Part(graph, (0, graph.num_dst), (0, graph.num_src), WHOLE)
    if not graph.num_dst or not graph.num_src or not graph.num_edges:
        return []
    if _has_kernel(graph):
        return [whole]
    boxes, rest = _boxes(whole)
    found = boxes + ([] if rest is None else _by_term(rest))
    return found if len(found) > 1 else [whole]


def _has_kernel(graph: TokenGraph) -> bool:
    """True for what one kernel does as well as can be."""
    return graph.is_full() or graph.is_causal() or packing(graph) is not None


def _cut(part: Part, dst: Range, src: Range, what: str) -> Part:
    """The edges of a part among some of its receivers and senders, numbered as in the part."""
    graph = part.graph
    if (dst, src) != ((0, graph.num_dst), (0, graph.num_src)):
        graph = replace(graph.rows(*dst).T.rows(*src).T, name=part.graph.name)
    (top, _), (left, _) = part.dst, part.src
    return Part(graph, (top + dst[0], top + dst[1]), (left + src[0], left + src[1]), what)


def _trimmed(part: Part) -> Part | None:
    """Without the tokens at both ends that have no edges; None if none has."""
    ranges = []
    for degree in (part.graph.in_degree(), part.graph.T.in_degree()):
        busy = degree.nonzero()
        if not len(busy):
            return None
        ranges.append((int(busy[0]), int(busy[-1]) + 1))
    return _cut(part, ranges[0], ranges[1], part.what)


def _without(part: Part, dst: Range, src: Range) -> Part:
    inside = TokenGraph.from_rule(partial(_in_box, dst, src), part.graph.num_dst, part.graph.num_src)
    rest = part.graph - replace(inside, dst_offset=part.graph.dst_offset, src_offset=part.graph.src_offset)
    return part._replace(graph=replace(rest, name=part.graph.name))


def _in_box(rows: Range, columns: Range, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst >= rows[0]) & (dst < rows[1]) & (src >= columns[0]) & (src < columns[1])


def _boxes(whole: Part) -> tuple[list[Part], Part | None]:
    """Boxes around senders of many receivers, then around receivers of many senders; and what is left."""
    found: list[Part] = []
    rest: Part | None = whole
    for what in ("senders of many", "receivers of many"):
        if rest is not None and not _has_kernel(rest.graph):
            new, rest = _boxes_of(rest, what)
            found += new
    return found, rest


def _boxes_of(part: Part, what: str) -> tuple[list[Part], Part | None]:
    graph, found, rest = part.graph, [], part
    senders = what.startswith("senders")
    for hub in _hubs(graph.T if senders else graph):
        ranges = ((0, graph.num_dst), hub) if senders else (hub, (0, graph.num_src))
        box = _trimmed(_cut(rest, *ranges, what))
        if box is not None and 2 * box.graph.num_edges >= box.graph.num_dst * box.graph.num_src:
            found.append(box)
            rest = _without(rest, *ranges)
    return found, _trimmed(rest._replace(what="the rest")) if found else part


def _hubs(graph: TokenGraph) -> list[Range]:
    """The few short ranges of receivers of far more senders than usual, or neighbours that attend to all."""
    degree = graph.in_degree()
    many = (degree > HUB * degree[degree > 0].median()) | _with_neighbour(degree == graph.num_src)
    values, lengths = torch.unique_consecutive(many, return_counts=True)
    if int(values.sum()) > MOST_HUBS:
        return []
    ends = lengths.cumsum(0)
    ranges = torch.stack([ends - lengths, ends], 1)[values].tolist()
    return [(start, stop) for start, stop in ranges if 8 * (stop - start) <= graph.num_dst]


def _with_neighbour(chosen: Bool[Tensor, " tokens"]) -> Bool[Tensor, " tokens"]:
    """Those of which the next or the last is chosen too: the last row of a causal graph is no hub."""
    both = chosen[1:] & chosen[:-1]
    return functional.pad(both, (0, 1)) | functional.pad(both, (1, 0))


def _by_term(part: Part) -> list[Part]:
    """The terms of a union, those first that a kernel does whole, each without the edges before it."""
    terms = [] if part.graph._listed is not None or _has_kernel(part.graph) else _terms(part.graph.rule)
    if len(terms) <= 1:
        return _by_fill(part)
    graphs = [_of_term(part.graph, term) for term in terms]
    graphs.sort(key=lambda graph: not _is_whole(part, graph))
    if len(graphs) > MOST_PARTS:
        graphs[MOST_PARTS - 1 :] = [reduce(operator.or_, graphs[MOST_PARTS - 1 :])]
    found: list[Part] = []
    before: TokenGraph | None = None
    for graph in graphs:
        new = _trimmed(part._replace(graph=graph if before is None else graph - before, what=graph.name))
        before = graph if before is None else before | graph
        found += [] if new is None else _by_fill(new)
    return found


def _is_whole(part: Part, graph: TokenGraph) -> bool:
    trimmed = _trimmed(part._replace(graph=graph))
    return trimmed is not None and trimmed.graph._listed is None and _has_kernel(trimmed.graph)


def _terms(rule: Rule) -> list[Rule]:
    """What a rule is the union of: ``|`` itself, and all that distributes over it."""
    if not isinstance(rule, partial):
        return [rule]
    if rule.func is rules.or_:
        return [*_terms(rule.args[0]), *_terms(rule.args[1])]
    if rule.func is rules.and_:
        return [partial(rule.func, a, b) for a in _terms(rule.args[0]) for b in _terms(rule.args[1])]
    if rule.func in (rules.minus, rules.shifted, rules.pinned, rules.transposed):
        return [partial(rule.func, term, *rule.args[1:]) for term in _terms(rule.args[0])]
    return [rule]


def _of_term(graph: TokenGraph, term: Rule) -> TokenGraph:
    """The graph of one term; of a list of edges as a list."""
    if (listed := keys_of(term)) is not None:
        keys, num_src = listed
        return _listed(graph, torch.stack([keys % num_src, keys // num_src]), "edges")
    return replace(graph, rule=term, name=_name_of(term), _listed=None)


def _listed(graph: TokenGraph, edges: Int[Tensor, "2 edges"], name: str) -> TokenGraph:
    listed = TokenGraph.from_distinct_edges(edges, graph.num_dst, graph.num_src, name)
    return replace(listed, dst_offset=graph.dst_offset, src_offset=graph.src_offset)


def _name_of(term: Rule) -> str:
    """The builder's own word, if it can be read off the function's name."""
    while isinstance(term, partial):
        inner = [part for part in term.args if callable(part) and not isinstance(part, Tensor)]
        term = inner[0] if inner and term.func.__module__ == rules.__name__ else term.func
    return str(getattr(term, "__name__", "rule")).strip("_")


def _by_fill(part: Part) -> list[Part]:
    if part.graph._listed is None and _has_kernel(part.graph):
        return [part]
    _, sparse = divided(part.graph, BLOCK, LEAST_FILL["rule" if part.graph._listed is None else "list"])
    few, total = int(sparse.edges.sum()), part.graph.num_edges
    if few > MOST_EDGES or not LEAST_SHARE * total <= few <= (1 - LEAST_SHARE) * total:
        return [part]
    rest = _listed(part.graph, left_over(part.graph, sparse), part.graph.name)
    filled = replace(part.graph - rest, name=part.graph.name)
    halves = (filled, "well filled tiles"), (rest, "edges between them")
    found = (_trimmed(part._replace(graph=graph, what=what)) for graph, what in halves)
    return [half for half in found if half is not None]
