"""How two graphs differ, in numbers and in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.analyse._walks import is_square
from gnn_attention.analyse.structure import SAME_TOKEN, graph_like
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
    return list(_kinds(first, second, less, more)) or list(_details(first, second, less, more))


def _kinds(first: TokenGraph, second: TokenGraph, less: TokenGraph, more: TokenGraph) -> Iterator[str]:
    """The usual mistakes that explain the whole difference."""
    loops, past = graph_like(first, SAME_TOKEN), graph_like(first, rules.causal)
    if not ((less | more) - loops).num_edges:
        for word, graph in (("second", less), ("first", more)):
            if graph.num_edges:
                yield f"they differ in self loops alone: the {word} lacks {graph.num_edges}"
    if second == ~first:
        yield "the second is the complement of the first: True may mean 'masked' in one of them"
    for step, word in ((1, "later"), (-1, "earlier")):
        if second == graph_like(first, partial(_shift, first.edges.contains, first.num_src, step)):
            yield f"the second is the first with every sender one token {word}: off by one"
    if is_square(first):
        if second == first.T:
            yield "the second is the first transposed: senders and receivers are exchanged"
        if second == first & past:
            yield "the second is the first with the edges src <= dst alone"
        if first == second & past:
            yield "the first is the second with the edges src <= dst alone"


def _details(first: TokenGraph, second: TokenGraph, less: TokenGraph, more: TokenGraph) -> Iterator[str]:
    """Which of two square graphs is causal, how many more senders receivers have, and how far away."""
    past = graph_like(first, rules.causal)
    first_is_causal, second_is_causal = (not (graph - past).num_edges for graph in (first, second))
    if first_is_causal != second_is_causal and is_square(first):
        one, other = ("first", "second") if first_is_causal else ("second", "first")
        yield f"the {one} is causal, the {other} has edges from later tokens (src > dst)"
    for word, further in (("first", less), ("second", more)):
        extra = further.in_degree()
        start = int((extra > 0).int().argmax())
        count = int(extra[-1])
        if count and bool((extra[start:] == count).all()):
            where = f"from receiver {start} on" if start else "everywhere"
            yield f"the {word} has {count} more sender{'s' if count > 1 else ''} per receiver {where}"
    differing = less | more
    if differing.num_edges <= MOST_LISTED:
        src, dst = differing.edge_index
        distance = dst + differing.dst_offset - src - differing.src_offset
        low, high = int(distance.min()), int(distance.max())
        one_distance = f"all differing edges have dst - src = {low}"
        yield one_distance if low == high else f"their dst - src is in {low} .. {high}"
