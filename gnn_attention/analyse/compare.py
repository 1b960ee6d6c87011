"""How two graphs differ, in numbers and in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.analyse._walks import is_square
from gnn_attention.analyse.structure import graph_like, same_token
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.rules import Rule

MOST_LISTED = 2**20  # differing edges up to which their distances are looked at


@dataclass(frozen=True)
class Difference:
    """What one graph has and the other lacks, in numbers; ``str()`` says it in words.

    ``only_first``, ``only_second`` and ``common`` count edges. ``example`` is the first differing
    ``(src, dst)`` by receiver, then sender, ``example_in`` says which graph has it (1 or 2). ``remarks`` are
    sentences about what kind of difference it is, the likely mistakes first: transposed, complemented,
    shifted, self loops.
    """

    first: str
    second: str
    only_first: int
    only_second: int
    common: int
    example: tuple[int, int] | None
    example_in: int | None
    remarks: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if the graphs are the same set of edges."""
        return not self.only_first and not self.only_second

    def __str__(self) -> str:
        lines = [f"{self.first} and {self.second}: {self._verdict()}"]
        if self.example is not None:
            only = f"{self.only_first} edges only in the first, {self.only_second} only in the second"
            lines.append(f"{only}, {self.common} in both")
            has, lacks = ("first", "second") if self.example_in == 1 else ("second", "first")
            edge = "receiver {1} attends to sender {0}".format(*self.example)
            lines.append(f"first difference: {edge} in the {has}, not in the {lacks}")
        return "\n  ".join([*lines, *self.remarks])

    def _verdict(self) -> str:
        if self.equal:
            return "the same graph"
        if not self.common:
            return "no edge in common"
        if not self.only_first:
            return "the second contains the first"
        return "the first contains the second" if not self.only_second else "neither contains the other"


def diff(first: TokenGraph, second: TokenGraph) -> Difference:
    """How two graphs differ: the edges of one only, and the kind of difference, in words.

    TypeError unless graphs; ValueError for graphs of other tokens, or that differ by head or sample: compare
    the same rows of both, or one ``select(batch, head)`` with another.

    >>> from gnn_attention import patterns
    >>> print(diff(patterns.window(9, 3), patterns.window(9, 4)))
    window(9, 3) and window(9, 4): the second contains the first
      0 edges only in the first, 6 only in the second, 24 in both
      first difference: receiver 3 attends to sender 0 in the second, not in the first
      the second has 1 more sender per receiver from receiver 3 on
      all differing edges have dst - src = 3
    """
    for word, graph in (("first", first), ("second", second)):
        checks.instance(word, graph, TokenGraph)
        if graph.varying_axes:
            hint = "compare one of them, select(batch, head)"
            raise ValueError(f"{word} must be plain, but {graph!r} differs by {graph.varying_axes}: {hint}")
    if first.frame != second.frame:
        raise ValueError(f"first and second must have the same tokens, got {first!r} and {second!r}")
    less, more = first - second, second - first
    counts = (less.num_edges, more.num_edges, (first & second).num_edges)
    remarks = tuple(_remarks(first, second, less, more))
    return Difference(first.name, second.name, *counts, *_example(less, more), remarks)


def _shift(inner: Rule, count: int, step: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    before = (src - step).clamp(0, max(count - 1, 0))
    return inner(b, h, dst, before) & (src - step >= 0) & (src - step < count)


def _example(less: TokenGraph, more: TokenGraph) -> tuple[tuple[int, int] | None, int | None]:
    candidates = []
    for side, graph in ((1, less), (2, more)):
        rows = graph.in_degree().nonzero().flatten()
        if len(rows):
            dst = int(rows[0])
            candidates.append((dst, int(graph.rows(dst, dst + 1).edge_index[0].min()), side))
    dst, src, side = min(candidates, default=(0, 0, 0))
    return ((src, dst), side) if side else (None, None)


def _remarks(first: TokenGraph, second: TokenGraph, less: TokenGraph, more: TokenGraph) -> list[str]:
    if not less.num_edges and not more.num_edges:
        return []
    sides = (("first", first), ("second", second))
    if empty := [f"the {word} has no edges" for word, graph in sides if not graph.num_edges]:
        return empty
    kinds = [*_about_loops(less, more), *(remark for holds, remark in _kinds(first, second) if holds)]
    if kinds:
        return kinds
    receivers = [text for text in (_more_senders("first", less), _more_senders("second", more)) if text]
    return _about_causality(first, second) + receivers + _about_distances(less | more)


def _kinds(first: TokenGraph, second: TokenGraph) -> Iterator[tuple[bool, str]]:
    yield second == ~first, "the second is the complement of the first: True may mean 'masked' in one of them"
    for step, word in ((1, "later"), (-1, "earlier")):
        moved = graph_like(first, partial(_shift, first.edges.contains, first.num_src, step))
        yield second == moved, f"the second is the first with every sender one token {word}: off by one"
    if is_square(first):
        yield second == first.T, "the second is the first transposed: senders and receivers are exchanged"
        past = graph_like(first, rules.causal)
        yield second == first & past, "the second is the first with the edges src <= dst alone"
        yield first == second & past, "the first is the second with the edges src <= dst alone"


def _about_loops(less: TokenGraph, more: TokenGraph) -> list[str]:
    if any((graph - graph_like(graph, same_token)).num_edges for graph in (less, more)):
        return []
    words = "they differ in self loops alone: the {} lacks {}"
    sides = (("second", less), ("first", more))
    return [words.format(word, graph.num_edges) for word, graph in sides if graph.num_edges]


def _about_causality(first: TokenGraph, second: TokenGraph) -> list[str]:
    causal = [not (graph - graph_like(graph, rules.causal)).num_edges for graph in (first, second)]
    if causal[0] == causal[1] or not is_square(first):
        return []
    one, other = ("first", "second") if causal[0] else ("second", "first")
    return [f"the {one} is causal, the {other} has edges from later tokens (src > dst)"]


def _more_senders(word: str, further: TokenGraph) -> str:
    """Empty unless all receivers from the first one on that has further senders have equally many."""
    extra = further.in_degree()
    concerned = extra.nonzero().flatten()
    if not len(concerned) or bool((extra[concerned[0] :] != extra[-1]).any()):
        return ""
    count, where = int(extra[-1]), f"from receiver {int(concerned[0])} on" if concerned[0] else "everywhere"
    return f"the {word} has {count} more sender{'s' if count > 1 else ''} per receiver {where}"


def _about_distances(differing: TokenGraph) -> list[str]:
    if differing.num_edges > MOST_LISTED:
        return []
    src, dst = differing.edge_index
    distance = dst + differing.dst_offset - src - differing.src_offset
    low, high = int(distance.min()), int(distance.max())
    one = f"all differing edges have dst - src = {low}"
    return [one if low == high else f"their dst - src is in {low} .. {high}"]
