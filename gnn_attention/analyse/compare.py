"""Say how two graphs differ, in numbers and in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.analyse._walks import is_square
from gnn_attention.analyse.structure import SELF_LOOP_RULE, replace_rule
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.rules import Rule

# If more edges than this differ, their distances are not computed.
MAX_DISTANCE_EDGES = 2**20


@dataclass(frozen=True)
class Difference:
    """The difference between two graphs in numbers; ``str()`` describes it in words.

    ``only_first``, ``only_second`` and ``common`` count edges. ``example`` is the first differing
    edge ``(src, dst)``, sorted by receiver, then by sender. ``example_in`` is 1 if the first graph
    has that edge, and 2 if the second graph has it. ``remarks`` are sentences that explain the
    difference by a likely mistake (for example, a transposed graph), or else describe it.
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
        """True if the graphs have the same edges."""
        return not self.only_first and not self.only_second

    def __str__(self) -> str:
        lines = [f"{self.first} and {self.second}: {self._verdict()}"]
        if self.example is not None:
            text = f"{self.only_first} edges only in the first, {self.only_second} only in the second"
            lines.append(f"{text}, {self.common} in both")
            src, dst = self.example
            has, lacks = ("first", "second") if self.example_in == 1 else ("second", "first")
            edge = f"receiver {dst} attends to sender {src} in the {has}, not in the {lacks}"
            lines.append(f"first difference: {edge}")
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
    """Compare two graphs: count the edges that only one of them has, and describe the difference in words.

    TypeError unless both are graphs. ValueError if their tokens differ (compare the same rows of
    both), or if one of them varies by head or sample (compare one ``select(batch, head)`` of each).

    >>> from gnn_attention import patterns
    >>> print(diff(patterns.window(9, 3), patterns.window(9, 4)))
    window(9, 3) and window(9, 4): the second contains the first
      0 edges only in the first, 6 only in the second, 24 in both
      first difference: receiver 3 attends to sender 0 in the second, not in the first
      the second has 1 more sender per receiver from receiver 3 on
      all differing edges have dst - src = 3
    """
    for name, graph in (("first", first), ("second", second)):
        checks.instance(name, graph, TokenGraph)
        if graph.varying_axes:
            raise ValueError(f"{name} {graph!r} varies by {graph.varying_axes}: use select(batch, head)")
    if first.frame != second.frame:
        raise ValueError(f"first and second must have the same tokens, got {first!r} and {second!r}")
    only_first, only_second = first - second, second - first
    examples = list[tuple[int, int, int]]()
    for graph_number, graph in ((1, only_first), (2, only_second)):
        if graph.num_edges:
            dst = int(graph.in_degree().nonzero()[0])
            examples.append((dst, int(graph.rows(dst, dst + 1).edge_index[0].min()), graph_number))
    example_dst, example_src, example_in = min(examples, default=(0, 0, None))
    remarks: list[str] = []
    if only_first.num_edges or only_second.num_edges:
        graphs = (("first", first), ("second", second))
        remarks = [f"the {name} has no edges" for name, graph in graphs if not graph.num_edges]
        remarks = remarks or list(_explain_by_mistakes(first, second, only_first, only_second))
        remarks = remarks or list(_describe_edges(first, second, only_first, only_second))
    return Difference(
        first=first.name,
        second=second.name,
        only_first=only_first.num_edges,
        only_second=only_second.num_edges,
        common=(first & second).num_edges,
        example=(example_src, example_dst) if examples else None,
        example_in=example_in,
        remarks=tuple(remarks),
    )


def _explain_by_mistakes(
    first: TokenGraph, second: TokenGraph, only_first: TokenGraph, only_second: TokenGraph
) -> Iterator[str]:
    """Yield sentences about common mistakes, each of which explains the whole difference."""
    self_loops, causal = replace_rule(first, SELF_LOOP_RULE), replace_rule(first, rules.causal)
    if not ((only_first | only_second) - self_loops).num_edges:
        for name, missing in (("second", only_first), ("first", only_second)):
            if missing.num_edges:
                yield f"they differ only in self loops: the {name} lacks {missing.num_edges}"
    if second == ~first:
        yield "the second is the complement of the first: True may mean 'masked' in one of them"
    for step, direction in ((1, "later"), (-1, "earlier")):
        if second == replace_rule(first, partial(_shift, first.edges.contains, first.num_src, step)):
            yield f"the second is the first with every sender one token {direction}: off by one"
    if is_square(first):
        if second == first.T:
            yield "the second is the first transposed: senders and receivers are exchanged"
        if second == first & causal:
            yield "the second is the first without its edges from later tokens (src > dst)"
        if first == second & causal:
            yield "the first is the second without its edges from later tokens (src > dst)"


def _shift(inner: Rule, num_src: int, step: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    shifted_src = (src - step).clamp(0, max(num_src - 1, 0))
    return inner(b, h, dst, shifted_src) & (src - step >= 0) & (src - step < num_src)


def _describe_edges(
    first: TokenGraph, second: TokenGraph, only_first: TokenGraph, only_second: TokenGraph
) -> Iterator[str]:
    """Say which graph is causal, which has more senders per receiver, and how far edges reach."""
    causal_graph = replace_rule(first, rules.causal)
    first_is_causal, second_is_causal = (not (graph - causal_graph).num_edges for graph in (first, second))
    if first_is_causal != second_is_causal and is_square(first):
        causal, acausal = ("first", "second") if first_is_causal else ("second", "first")
        yield f"the {causal} is causal, the {acausal} has edges from later tokens (src > dst)"
    for name, extra_edges in (("first", only_first), ("second", only_second)):
        degrees = extra_edges.in_degree()
        first_receiver = int((degrees > 0).int().argmax())
        num_extra = int(degrees[-1])
        if num_extra and bool((degrees[first_receiver:] == num_extra).all()):
            senders = "senders" if num_extra > 1 else "sender"
            receivers = f"from receiver {first_receiver} on" if first_receiver else "everywhere"
            yield f"the {name} has {num_extra} more {senders} per receiver {receivers}"
    difference = only_first | only_second
    if difference.num_edges <= MAX_DISTANCE_EDGES:
        src, dst = difference.edge_index
        distance = dst + difference.dst_offset - src - difference.src_offset
        low, high = int(distance.min()), int(distance.max())
        remark = f"all differing edges have dst - src = {low}"
        yield remark if low == high else f"their dst - src is in {low} .. {high}"
