"""The token graph: who may hear whom.

Words used everywhere in this library:

========================  ==============================================================================================
token = node              ``src`` is the sender, ``dst`` the receiver; the edge ``src -> dst`` lets dst listen to src
``edge_index``            int64 ``[2, E]``; row 0 holds src, row 1 dst (torch_geometric's ``source_to_target``)
``mask[dst, src]``        True = edge = attend (SDPA's convention): PyG's ``adj_t``, the transpose of networkx's adjacency
rule                      ``rule(b, h, dst, src) -> bool tensor``: FlexAttention's ``mask_mod``, written with broadcasting
                          operators only
========================  ==============================================================================================

A graph is a *set* of edges. It is a rule plus sizes and may also carry its edges as a list; nothing is materialised before
somebody asks for it, and what was materialised is kept, because a graph never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support import checks, memory
from gnn_attention._support.checks import quoted
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.memo import Sealed, kept
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import edge_list, rules, text
from gnn_attention.graph.regions import counting, enumerate_pairs
from gnn_attention.graph.rules import Rule

__all__ = ["Rule", "TokenGraph", "kept"]

LARGEST_PICTURE = 32  # nodes up to which str(graph) draws
LISTING = 48  # bytes for each edge while a list is made: its keys, their order, and the list
LONGEST_NAME = 120  # characters of a name that repr(graph), and so every message, shows


@dataclass(eq=False, repr=False)
class TokenGraph(Sealed):
    """A set of edges ``src -> dst`` from ``num_src`` senders to ``num_dst`` receivers.

    Made by :meth:`from_rule`, :meth:`from_edges`, the builders of ``gnn_attention.patterns`` or ``gnn_attention.convert``;
    combined by ``| & - ^ ~`` (set algebra), ``.T`` (reversed edges), ``@`` (two hops) and ``** k`` (k hops).

    ``heads`` / ``batch`` are sizes where the graph differs by head / by sample, else None: the same for all.
    ``dst_offset`` / ``src_offset`` are the absolute positions of the first receiver and the first sender (not 0 after
    :meth:`rows`); score_mods are told absolute positions.

    >>> print(TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 3, name="causal(3)"))
    causal(3): mask[dst, src] and who hears whom
    0 ■ · ·   0 <- 0
    1 ■ ■ ·   1 <- 0 1
    2 ■ ■ ■   2 <- 0 1 2
    """

    rule: Rule
    num_dst: int
    num_src: int
    heads: int | None = None
    batch: int | None = None
    name: str = "graph"
    dst_offset: int = 0
    src_offset: int = 0
    _listed: Tensor | None = None
    _memo: MutableMapping[Any, Any] = field(default_factory=dict, init=False)
    _parts: list[list[TokenGraph]] = field(default_factory=list, init=False)  # by sample and head, once anyone asked

    # -- construction -------------------------------------------------------------------------------------------------

    @classmethod
    @not_compiled
    def from_rule(
        cls,
        rule: Rule,
        num_dst: int,
        num_src: int | None = None,
        heads: int | None = None,
        batch: int | None = None,
        name: str | None = None,
    ) -> TokenGraph:
        """The graph of all ``(src, dst)`` for which ``rule(b, h, dst, src)`` holds.

        ``rule`` is evaluated on broadcastable int64 tensors and returns a bool tensor; FlexAttention's ``mask_mod``
        functions are rules. ``num_src=None`` means as many senders as receivers. ``heads`` / ``batch`` must be given if
        the rule looks at ``h`` / ``b``.

        Raises TypeError for a rule of another signature or result, ValueError for negative sizes.

        >>> TokenGraph.from_rule(lambda b, h, dst, src: dst != src, 4, name="no_self").num_edges
        12
        """
        num_dst = checks.size("num_dst", num_dst)
        num_src = num_dst if num_src is None else checks.size("num_src", num_src)
        heads = None if heads is None else checks.size("heads", heads, 1)
        batch = None if batch is None else checks.size("batch", batch, 1)
        rules.check_signature(rule)
        graph = cls(rule, num_dst, num_src, heads, batch, name or str(getattr(rule, "__name__", "rule")))
        if num_dst and num_src:
            zeros = (torch.zeros(shape, dtype=torch.int64) for shape in ((1, 1), (1, 1), (3, 1), (7,)))
            enumerate_pairs.evaluate(rule, repr(graph), *zeros)
        return graph

    @classmethod
    @not_compiled
    def from_edges(
        cls, edge_index: Tensor, num_dst: int, num_src: int | None = None, coalesce: bool = False, name: str = "edges"
    ) -> TokenGraph:
        """The graph of the listed edges, which keeps their order.

        ``edge_index`` is ``[2, E]``, row 0 senders, row 1 receivers. Sizes come from the caller, never from the largest
        index. A duplicate edge is refused by name; ``coalesce=True`` drops all but the first of each.

        Raises TypeError (not an integer tensor), ValueError (shape, duplicates), IndexError (index out of range).

        >>> TokenGraph.from_edges(torch.tensor([[0, 2, 1], [1, 1, 2]]), 3).in_degree().tolist()
        [0, 2, 1]
        """
        num_dst = checks.size("num_dst", num_dst)
        num_src = num_dst if num_src is None else checks.size("num_src", num_src)
        edges = edge_list.checked(edge_index, num_dst, num_src)
        key = edges[1] * num_src + edges[0]
        if len(key) != len(order := edge_list.first_of_each(key)):
            if not coalesce:
                raise ValueError(edge_list.duplicate_message(edges, key))
            edges = edges[:, order]
        return cls._of_distinct(edges, num_dst, num_src, name)

    @classmethod
    def _of_distinct(cls, edges: Tensor, num_dst: int, num_src: int, name: str) -> TokenGraph:
        keys = (edges[1] * num_src + edges[0]).sort().values
        last = keys.new_tensor([torch.iinfo(torch.int64).max])  # so that every search ends inside the table
        rule = partial(rules.is_listed, torch.cat([keys, last]), num_src)
        return cls(rule, num_dst, num_src, name=name, _listed=edges)

    # -- what is in it ------------------------------------------------------------------------------------------------

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """int64 ``[2, E]`` on the CPU: row 0 senders, row 1 receivers; the caller's order, else by receiver, then sender.

        Kept after the first call: do not write into it. Raises ValueError for a graph that differs by head or sample:
        take one with :meth:`select`; and, with the estimate, for more edges than there is memory for.
        """
        return self.edges_on(torch.device("cpu"))

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        """:attr:`edge_index` on a device, copied there once."""
        if self.heads is not None or self.batch is not None:
            raise ValueError(
                f"edge_index of {self!r}: a graph that differs by {self._varies()} has no single edge list; "
                "use mask(), or select(batch, head) for one of them"
            )
        edges: Tensor = _once(self, "_enumerate", device)
        return edges

    def positions_of(self, edges: Tensor) -> Int[Tensor, " edges"]:
        """Where the given edges ``[2, K]`` stand in :attr:`edge_index`; ValueError names the first that is none of them."""
        wanted = edge_list.checked(edges, self.num_dst, self.num_src)
        return edge_list.positions(self.edge_index, wanted, self.num_src, repr(self))

    def mask(self, device: torch.device | str | None = None) -> Bool[Tensor, "..."]:
        """Bool ``[dst, src]``, True where there is an edge.

        Where the graph varies: ``[heads, dst, src]``, or ``[batch, heads or 1, dst, src]``. Kept: do not write into it.
        Raises ValueError, with the estimate, for more pairs than there are bytes of memory left.
        """
        if not isinstance(device, (str, torch.device, type(None))):
            raise TypeError(f"device must be a torch.device or the name of one, got {quoted(device)}")
        mask: Tensor = _once(self, "_dense", torch.device(device or "cpu"))
        return mask

    @property
    def num_edges(self) -> int:
        """Number of edges, over all heads and samples where the graph differs by them."""
        return int(_once(self, "_count_edges"))

    def positions(self, side: str, count: int, device: torch.device) -> Int[Tensor, " tokens"]:
        """The absolute positions of the ``count`` receivers (side "dst") or senders ("src"), for rotations.

        >>> causal = TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 6)
        >>> causal.rows(4, 6).positions("dst", 2, torch.device("cpu")).tolist()
        [4, 5]
        """
        offset = self.dst_offset if side == "dst" else self.src_offset
        return torch.arange(offset, offset + count, device=device)

    def runner(self, backend: Any) -> Callable[[Any], Any] | None:
        """What runs a call along this graph, ``call -> (out, lse)``, where a backend alone does not; None: the backend."""
        return None

    def in_degree(self) -> Int[Tensor, "..."]:
        """How many senders each receiver hears: int64 ``[dst]``, led by the axes of :meth:`mask`. Kept: do not write into it."""
        degree: Tensor = _once(self, "_count_in_edges")
        return degree

    @property
    def max_in_degree(self) -> int:
        """The most senders that any receiver hears, 0 without receivers."""
        return int(_once(self, "_largest_in_degree"))

    @property
    def has_deaf_rows(self) -> bool:
        """True if some receiver hears nobody."""
        return bool(_once(self, "_any_deaf"))

    def is_full(self) -> bool:
        """True if every pair is an edge; worked out once."""
        return bool(_once(self, "_everyone"))

    def is_causal(self) -> bool:
        """True if the graph is square and its edges are exactly ``src <= dst``; worked out once."""
        return bool(_once(self, "_causal"))

    @not_compiled
    def rows(self, start: int, stop: int) -> TokenGraph:
        """The receivers ``start .. stop - 1`` over all senders: the graph of a decoding step.

        IndexError outside ``0 .. num_dst``.

        >>> causal = TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 4)
        >>> causal.rows(2, 4).mask().int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
        """
        start, stop = checks.size("start", start), checks.size("stop", stop)
        if not start <= stop <= self.num_dst:
            raise IndexError(f"rows({start}, {stop}): expected 0 <= start <= stop <= num_dst = {self.num_dst}")
        name = f"{text.bracketed(self.name)}.rows({start}, {stop})"
        if self._listed is not None:
            src, dst = self._listed[:, (self._listed[1] >= start) & (self._listed[1] < stop)]
            part = self._of_distinct(torch.stack([src, dst - start]), stop - start, self.num_src, name)
        else:
            part = replace(self, rule=partial(rules.shifted, self.rule, start), num_dst=stop - start, name=name)
        return replace(part, dst_offset=self.dst_offset + start, src_offset=self.src_offset)

    @not_compiled
    def select(self, batch: int = 0, head: int = 0) -> TokenGraph:
        """The graph of one sample and one head, as a plain graph. IndexError where there is no such sample or head."""
        for word, index, count in (("batch", batch, self.batch), ("head", head, self.heads)):
            if isinstance(index, bool) or not isinstance(index, int):
                raise TypeError(f"{word} must be an integer, got {quoted(index)} of type {type(index).__name__}")
            if count is not None and not 0 <= index < count:
                raise IndexError(f"{word} must be in 0 .. {count - 1}, got {index}")
        if self.heads is None and self.batch is None:
            return self
        name = f"{text.bracketed(self.name)}.select({batch}, {head})"
        rule = partial(rules.pinned, self.rule, batch, head)
        return replace(self, rule=rule, heads=None, batch=None, name=name)

    # -- algebra ------------------------------------------------------------------------------------------------------

    def __or__(self, other: TokenGraph) -> TokenGraph:
        """Edges of either graph."""
        return self._combine(other, "|", rules.or_)

    def __and__(self, other: TokenGraph) -> TokenGraph:
        """Edges of both graphs."""
        return self._combine(other, "&", rules.and_)

    def __sub__(self, other: TokenGraph) -> TokenGraph:
        """Edges of this graph that the other lacks."""
        return self._combine(other, "-", rules.minus)

    def __xor__(self, other: TokenGraph) -> TokenGraph:
        """Edges of exactly one of the two graphs."""
        return self._combine(other, "^", rules.xor)

    @not_compiled
    def __invert__(self) -> TokenGraph:
        """All pairs that are not edges."""
        return replace(self, rule=partial(rules.not_, self.rule), name=f"~{text.bracketed(self.name)}", _listed=None)

    @property
    @not_compiled
    def T(self) -> TokenGraph:
        """Every edge turned round: senders become receivers."""
        flipped = replace(
            self,
            rule=partial(rules.transposed, self.rule),
            num_dst=self.num_src,
            num_src=self.num_dst,
            dst_offset=self.src_offset,
            src_offset=self.dst_offset,
            name=f"{text.bracketed(self.name)}.T",
        )
        return flipped if self._listed is None else replace(flipped, _listed=self._listed.flip(0))

    def __matmul__(self, other: TokenGraph) -> TokenGraph:
        """Two hops: dst hears, in ``self``, a token that hears src in ``other`` (the boolean matrix product of the masks).

        The result carries its edges. ValueError if the middle sizes differ or a graph differs by head or sample.
        """
        if not isinstance(other, TokenGraph):
            return NotImplemented
        if (self.num_src, self.src_offset) != (other.num_dst, other.dst_offset):
            raise ValueError(
                f"graphs joined by @ must meet: the left hears {self.num_src} senders from {self.src_offset} on "
                f"({self.name}), the right has {other.num_dst} receivers from {other.dst_offset} on ({other.name})"
            )
        product = edge_list.composed(self.edge_index, other.edge_index, self.num_dst, self.num_src, other.num_src)
        name = f"{text.bracketed(self.name)} @ {text.bracketed(other.name)}"
        graph = self._of_distinct(product, self.num_dst, other.num_src, name)
        return replace(graph, dst_offset=self.dst_offset, src_offset=other.src_offset)

    def __pow__(self, hops: int) -> TokenGraph:
        """Exactly ``hops`` hops: ``g ** 2 == g @ g``, ``g ** 0`` holds the self loops alone. ValueError unless square."""
        hops = checks.size("the power of a graph", hops)
        if (self.num_dst, self.dst_offset) != (self.num_src, self.src_offset):
            raise ValueError(f"only a square graph has powers, of the same tokens on both sides, got {self!r}")
        loops = torch.arange(self.num_dst, device="cpu")
        result = self._of_distinct(torch.stack([loops, loops]), self.num_dst, self.num_src, "loops")
        result = replace(result, dst_offset=self.dst_offset, src_offset=self.src_offset)
        for _ in range(hops):
            result = result @ self
        base = text.bracketed(self.name)
        return replace(result, name=f"({base}) ** {hops}" if base.startswith("~") else f"{base} ** {hops}")

    def __eq__(self, other: object) -> bool:
        """True if sizes, offsets and edge sets are the same; names and edge order do not matter."""
        if not isinstance(other, TokenGraph):
            return NotImplemented
        if self._frame() != other._frame():
            return False
        return self._is(other.rule)

    def __hash__(self) -> int:
        """Equal graphs have equal hashes: the sizes alone decide."""
        return hash(self._frame())

    # -- text ---------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Name and sizes on one line."""
        varies = "".join(f", {word} {n}" for word, n in (("batch", self.batch), ("heads", self.heads)) if n)
        varies += "".join(f", {word} from {n}" for word, n in (("src", self.src_offset), ("dst", self.dst_offset)) if n)
        name = self.name if len(self.name) <= LONGEST_NAME else f"{self.name[: LONGEST_NAME - 3]}..."
        return f"TokenGraph({name}: {self.num_src} src -> {self.num_dst} dst{varies})"

    def __str__(self) -> str:
        """The mask beside the lists of who hears whom, for small graphs that are the same for all heads and samples."""
        if self.heads or self.batch or max(self.num_dst, self.num_src) > LARGEST_PICTURE:
            return repr(self)
        return text.picture(self.name, self.mask())

    def __getstate__(self) -> dict[str, Any]:
        """What was materialised is not pickled."""
        return {**super().__getstate__(), "_parts": []}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _frame(self) -> tuple[object, ...]:
        return (self.num_dst, self.num_src, self.heads, self.batch, self.dst_offset, self.src_offset)

    def _varies(self) -> str:
        return " and ".join(word for word, n in (("sample", self.batch), ("head", self.heads)) if n is not None)

    @property
    def _shape(self) -> enumerate_pairs.Shape:
        return (self.batch or 1, self.heads or 1, self.num_dst, self.num_src)

    def _is(self, rule: Rule) -> bool:
        """True if every sample and head has the edges of ``rule``."""
        return counting.same(self.rule, rule, repr(self), self._shape)

    def _dense(self, device: torch.device) -> Tensor:
        if device.type == "cpu":
            cells = math.prod(self._shape)
            memory.check(f"mask() of {self!r}", cells, "take some rows(start, stop), or attend along the graph without its mask")
        if self._listed is not None:
            return edge_list.mask(self._listed.to(device), self.num_dst, self.num_src)
        return self._squeeze(enumerate_pairs.dense(self.rule, repr(self), self._shape, device))

    def _squeeze(self, per_head: Tensor) -> Tensor:
        """Drop the leading axes that do not vary: [batch or 1, heads or 1, ...] to the form of :meth:`mask`."""
        if self.batch is not None:
            return per_head
        return per_head[0] if self.heads is not None else per_head[0, 0]

    def _enumerate(self, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return self.edge_index.to(device)
        if self._listed is not None:
            return self._listed.clone()  # a tensor for training, wherever the list was made
        if memory.shortage(LISTING * self.num_dst * self.num_src):  # not even every pair would do: how many are there?
            what = f"the list of the {self.num_edges:,} edges of {self!r}"
            memory.check(
                what, LISTING * self.num_edges, "take some rows(start, stop), or attend along the graph without its list"
            )
        return counting.edge_list(self.rule, repr(self), self._shape)

    def _count_in_edges(self) -> Tensor:
        counted = 24 * math.prod(self._shape[:3])
        memory.check(f"the in-degrees of {self!r}", counted, "take some rows(start, stop)")
        if self._listed is not None:
            return torch.bincount(self._listed[1], minlength=self.num_dst)
        return self._squeeze(counting.in_degree(self.rule, repr(self), self._shape))

    def _count_edges(self) -> int:
        return int(self.in_degree().sum()) if self._listed is None else self._listed.shape[1]

    def _largest_in_degree(self) -> int:
        return int(self.in_degree().max()) if self.in_degree().numel() else 0

    def _any_deaf(self) -> bool:
        return bool((self.in_degree() == 0).any())

    def _everyone(self) -> bool:
        return self._is(rules.everyone)

    def _causal(self) -> bool:
        return self.num_dst == self.num_src and self._is(rules.causal)

    @not_compiled
    def _combine(self, other: TokenGraph, sign: str, join: Callable[..., Tensor]) -> TokenGraph:
        if not isinstance(other, TokenGraph):
            return NotImplemented
        self._check_same_nodes(other, sign)
        name = f"{text.bracketed(self.name)} {sign} {text.bracketed(other.name)}"
        heads, batch = self.heads or other.heads, self.batch or other.batch
        rule = partial(join, self.rule, other.rule)
        result = replace(self, rule=rule, heads=heads, batch=batch, name=name, _listed=None)
        candidates = None if heads or batch else edge_list.candidates(self._listed, other._listed, sign)
        if candidates is None:
            return result
        src, dst = candidates
        kept = candidates[:, rule(torch.zeros_like(dst), torch.zeros_like(dst), dst, src)]
        listed = self._of_distinct(kept, self.num_dst, self.num_src, name)
        return replace(listed, dst_offset=self.dst_offset, src_offset=self.src_offset)

    def _check_same_nodes(self, other: TokenGraph, sign: str) -> None:
        nodes = ("num_dst", "num_src", "dst_offset", "src_offset")
        sizes = ((self.heads, other.heads), (self.batch, other.batch))
        same = all(getattr(self, name) == getattr(other, name) for name in nodes)
        if not same or any(None not in pair and pair[0] != pair[1] for pair in sizes):
            raise ValueError(
                f"graphs joined by {sign} must have the same nodes (number and position), heads and batch, "
                f"got {self!r} and {other!r}"
            )


def _once(graph: TokenGraph, what: str, *arguments: Any) -> Any:
    """What a method of the graph returns, worked out once: a graph never changes, so to a compiler too it is a constant."""
    return kept(_asked, graph, what, *arguments)


def _asked(graph: TokenGraph, what: str, *arguments: Any) -> Any:
    return getattr(graph, what)(*arguments)
