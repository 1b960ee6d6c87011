"""The token graph: which token may attend to which.

======================  =====================================================================================
token = node            ``src`` is the sender, ``dst`` the receiver; ``src -> dst`` lets dst attend to src
``edge_index``          int64 ``[2, E]``; row 0 holds src, row 1 dst (PyG's ``source_to_target``)
``mask[dst, src]``      True = edge = attend (SDPA): PyG's ``adj_t``, the transpose of networkx's adjacency
rule                    ``rule(b, h, dst, src) -> bool tensor``: FlexAttention's ``mask_mod``
======================  =====================================================================================

A graph is a *set* of edges: a rule plus sizes, and sometimes a list. Nothing is materialised before it is
needed, and what was materialised is cached, because a graph never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args, overload

import torch

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.memo import memoized
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import derived, edge_list, indices, rules, text
from gnn_attention.graph.edges import EdgeSet, ListedEdges, Parallel, RuleEdges, log_count
from gnn_attention.graph.operators import GraphOperators
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.rules import Rule

# calls of attend along a list before its edges are looked at
FIRST_CALLS = 2


@dataclass(eq=False, repr=False)
class TokenGraph(GraphOperators):
    """A set of edges ``src -> dst`` from ``num_src`` senders to ``num_dst`` receivers.

    Made by :meth:`from_rule`, :meth:`from_edges`, the builders of ``gnn_attention.patterns`` or
    ``gnn_attention.convert``; combined by ``| & - ^ ~``, ``.T`` (reversed edges), ``@`` (two hops), ``** k``.

    ``heads`` / ``batch`` are sizes where the graph differs by head / by sample, else None: the same for all.
    ``dst_offset`` / ``src_offset`` are the absolute positions of the first receiver and the first sender (not
    0 after :meth:`rows`); score_mods are given absolute positions.

    >>> print(TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 3, name="causal(3)"))
    causal(3): mask[dst, src] and in-edges
    0 ■ · ·   0 <- 0
    1 ■ ■ ·   1 <- 0 1
    2 ■ ■ ■   2 <- 0 1 2
    """

    # from_indices and from_block_indices in a traced program, by gnn_attention.backends
    traced_indices: ClassVar[Callable[..., TokenGraph]]
    traced_blocks: ClassVar[Callable[..., TokenGraph]]

    # by sample and head, or by kernel: written by gnn_attention.backends
    _parts: list[list[TokenGraph]] = field(default_factory=list, init=False)

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

        ``rule`` is evaluated on broadcastable int64 tensors and returns a bool tensor. FlexAttention's
        ``mask_mod`` functions are rules: one that needs single numbers, as one pair shows, is mapped over the
        pairs by ``torch.vmap``. ``num_src=None`` means ``num_dst``. ``heads`` / ``batch`` must be given
        if they are used. TypeError for another signature or result, ValueError for negative sizes.

        >>> TokenGraph.from_rule(lambda b, h, dst, src: dst != src, 4, name="no_self").num_edges
        12
        """
        num_dst = checks.size("num_dst", num_dst)
        num_src = num_dst if num_src is None else checks.size("num_src", num_src)
        heads = None if heads is None else checks.size("heads", heads, 1)
        batch = None if batch is None else checks.size("batch", batch, 1)
        rules.check_signature(rule)
        name = name or str(getattr(rule, "__name__", "rule"))
        graph = cls(RuleEdges(rule), num_dst, num_src, heads, batch, name)
        if num_dst and num_src:
            fit = enumerate_pairs.fit_rule(rule, repr(graph))
            graph = graph if fit is rule else replace(graph, edges=RuleEdges(fit))
        return graph

    @classmethod
    @not_compiled
    def from_edges(
        cls,
        edge_index: Tensor,
        num_dst: int,
        num_src: int | None = None,
        coalesce: bool = False,
        name: str = "edges",
        parallel: Parallel = "error",
    ) -> TokenGraph:
        """The graph of ``edge_index [2, E]``, row 0 senders, row 1 receivers, in that order.

        Sizes come from the caller, never from the largest index. ``parallel`` says what happens to an edge
        that stands several times: "error" refuses it by name, "merge" keeps the first of each
        (``coalesce=True`` is the same), "keep" makes a multigraph. There each copy is an edge with a place of
        its own in a bias and in weights, as in torch_geometric, while :meth:`mask`, the set operators and
        ``==`` see it once. Raises TypeError (no integer tensor), ValueError (shape, parallel edges, another
        ``parallel``), IndexError (range).

        >>> edges = torch.tensor([[0, 2, 2], [1, 1, 1]])
        >>> graph = TokenGraph.from_edges(edges, 3, parallel="keep")
        >>> graph.num_edges, graph.in_degree().tolist(), graph.coalesce().num_edges
        (3, [0, 3, 0], 2)
        """
        num_dst = checks.size("num_dst", num_dst)
        num_src = num_dst if num_src is None else checks.size("num_src", num_src)
        kind = checks.choice("parallel", "merge" if coalesce else parallel, get_args(Parallel))
        listed = edge_list.check_edge_index(edge_index, num_dst, num_src)
        edges = ListedEdges(listed, num_dst, num_src, "keep")
        if kind == "error" and edges.has_parallel_edges:
            raise ValueError(edge_list.duplicate_message(listed, edge_list.keys_of(listed, num_src)))
        return cls(edges if kind == "keep" else edges.distinct, num_dst, num_src, name=name)

    @classmethod
    def from_distinct_edges(cls, edges: Tensor, num_dst: int, num_src: int, name: str) -> TokenGraph:
        """The graph of a list without parallel edges, which is not checked."""
        return cls(ListedEdges(edges, num_dst, num_src), num_dst, num_src, name=name)

    @overload
    @classmethod
    def from_indices(
        cls,
        index: Tensor,
        num_src: int,
        count: Tensor | None = ...,
        coalesce: bool = ...,
        causal: bool = ...,
        name: str = ...,
    ) -> TokenGraph: ...

    @overload
    @classmethod
    def from_indices(
        cls,
        index: Tensor,
        num_src: int,
        count: Tensor | None = ...,
        *,
        coalesce: Literal["count"],
        causal: bool = ...,
        name: str = ...,
    ) -> tuple[TokenGraph, log_count]: ...

    @classmethod
    def from_indices(
        cls,
        index: Tensor,
        num_src: int,
        count: Tensor | None = None,
        coalesce: bool | Literal["count"] = False,
        causal: bool = False,
        name: str = "indices",
    ) -> TokenGraph | tuple[TokenGraph, log_count]:
        """The graph of the senders that each receiver chose: ``src -> dst`` for ``src in index[..., dst]``.

        ``index`` int ``[dst, K]``, ``[heads, dst, K]`` or ``[batch, heads or 1, dst, K]``, -1 = none; or the
        first ``count [..., dst]`` of each K are valid. ``coalesce=True`` takes a sender that stands twice for
        a receiver once; ``coalesce="count"`` returns ``(graph, score_mod)``, and ``attend(q, k, v, graph,
        score_mod=score_mod)`` weighs each sender by how often it stands, ``score + log m`` (not on flex).
        ``causal=True`` checks ``src <= dst``. O(E log K) time, O(E) memory for E = heads dst K: nothing of
        dst x src. :attr:`edge_index` is by receiver, then as in the index. In a program of ``torch.compile``
        or ``torch.export`` the index may be another one at every call, or be computed there. Raises TypeError
        (no integers), ValueError (shape, duplicates, not causal, another ``coalesce``), IndexError (range).

        >>> TokenGraph.from_indices(torch.tensor([[0, -1], [1, 0], [0, 2]]), 3).edge_index.tolist()
        [[0, 1, 0, 0, 2], [0, 1, 1, 2, 2]]
        """
        given = index, num_src, count, coalesce, causal
        if torch.compiler.is_compiling():
            return cls.traced_indices(*given, name)
        edges, score_mod = indices.read_senders(*given)
        batch, heads = indices.varying_sizes(index)
        graph = cls(edges, index.shape[-2], num_src, heads, batch, name)
        return graph if score_mod is None else (graph, score_mod)

    @classmethod
    def from_block_indices(
        cls,
        index: Tensor,
        block_size: int,
        num_dst: int,
        num_src: int,
        causal: bool = False,
        name: str = "block_indices",
    ) -> TokenGraph:
        """Every receiver of a block attends to all tokens of the blocks of senders that its block chose.

        ``src // block_size in index[..., dst // block_size]``, and ``src <= dst`` if ``causal``; ``index``
        as in :meth:`from_indices`, of blocks of receivers and senders, -1 = none. The graph is a table of
        blocks, not a list of edges. Compiled programs and errors are as for :meth:`from_indices`.

        >>> blocks = torch.tensor([[0, -1], [0, 1]])
        >>> TokenGraph.from_block_indices(blocks, 2, 4, 4, causal=True).in_degree().tolist()
        [1, 2, 3, 4]
        """
        given = index, block_size, num_dst, num_src, causal
        if torch.compiler.is_compiling():
            return cls.traced_blocks(*given, name)
        batch, heads = indices.varying_sizes(index)
        return cls(indices.read_blocks(*given), num_dst, num_src, heads, batch, name)

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """int64 ``[2, E]`` on the CPU, row 0 senders, row 1 receivers; as given or by receiver, then sender.

        Cached: do not write into it. Raises ValueError for a graph that differs by head or sample (take one
        with :meth:`select`) and for more edges than there is memory for.
        """
        return self.edges_on(torch.device("cpu"))

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        """:attr:`edge_index` on a device, copied there once."""
        if self.heads is not None or self.batch is not None:
            reason = f"a graph that differs by {self.varying_axes} has no single edge list"
            advice = "use mask(), or select(batch, head) for one of them"
            raise ValueError(f"edge_index of {self!r}: {reason}; {advice}")
        return memoized(derived.edge_index, self, device)

    def positions_of(self, edges: Tensor) -> Int[Tensor, " edges"]:
        """The places of edges ``[2, K]`` in :attr:`edge_index`; ValueError names one that is none."""
        wanted = edge_list.check_edge_index(edges, self.num_dst, self.num_src)
        return edge_list.positions(self.edge_index, wanted, self.num_src, repr(self))

    def mask(self, device: torch.device | str | None = None) -> Bool[Tensor, "..."]:
        """Bool ``[dst, src]``, True where there is an edge; ``[heads, dst, src]`` or ``[batch, heads or 1,
        dst, src]`` where the graph varies.

        Cached: do not write into it. Raises ValueError for more pairs than there are bytes of memory left.
        """
        if not isinstance(device, (str, torch.device, type(None))):
            raise TypeError(f"device must be a torch.device or the name of one, got {checks.quote(device)}")
        return memoized(derived.mask, self, torch.device(device or "cpu"))

    @property
    def rule(self) -> Rule:
        """``rule(b, h, dst, src) -> bool tensor``, True where there is an edge: FlexAttention's mask_mod."""
        return self.edges.rule

    @property
    def has_parallel_edges(self) -> bool:
        """Whether an edge stands several times in :attr:`edge_index`; see :meth:`from_edges`."""
        return self.edges.has_parallel_edges

    @property
    def num_edges(self) -> int:
        """Number of edges, over all heads and samples where the graph differs by them."""
        return int(memoized(derived.num_edges, self))

    def positions(self, side: str, count: int, device: torch.device) -> Int[Tensor, " tokens"]:
        """The absolute positions of the ``count`` receivers (side "dst") or senders ("src")."""
        offset = self.dst_offset if side == "dst" else self.src_offset
        return torch.arange(offset, offset + count, device=device)

    def runner(self, backend: Any) -> Callable[[Any], Any] | None:
        """What runs a call along this graph, ``call -> (out, lse)``; None: the backend."""
        return None

    def in_degree(self) -> Int[Tensor, "..."]:
        """How many senders each receiver has: int64 ``[dst]``, led by the axes of :meth:`mask`. Read-only."""
        return memoized(derived.in_degree, self)

    @property
    def max_in_degree(self) -> int:
        """The most senders that any receiver attends to, 0 without receivers."""
        return int(memoized(derived.max_in_degree, self))

    @property
    def has_empty_rows(self) -> bool:
        """True if some receiver has no in-edges."""
        return bool(memoized(derived.has_empty_rows, self))

    def is_full(self) -> bool:
        """True if every pair is an edge."""
        return bool(memoized(derived.is_full, self))

    def is_causal(self) -> bool:
        """True if the graph is square and its edges are exactly ``src <= dst``."""
        return bool(memoized(derived.is_causal, self))

    def prepare(self) -> TokenGraph:
        """Return the graph, marked as one that will be used many times.

        A list of edges may be another one in every step, so that ``attend(backend="auto")`` chooses by its
        length alone, and looks at the edges to count and plan at the third call along the same graph; after
        ``prepare`` at the first. A rule is counted and planned at the first call in any case.

        >>> TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3).prepare().num_edges
        2
        """
        self._memo["calls"] = FIRST_CALLS
        return self

    @property
    def is_prepared(self) -> bool:
        """Whether the edges are worth a look before a call: True unless it is one of the first on a list."""
        return self.edges.listed() is None or self._memo.data.get("calls", 0) >= FIRST_CALLS

    def count_call(self) -> None:
        """Count a call along the graph, until :attr:`is_prepared`."""
        self._memo["calls"] = self._memo.data.get("calls", 0) + 1

    def __eq__(self, other: object) -> bool:
        """True if sizes, offsets and edge sets are the same; names and edge order do not matter."""
        if not isinstance(other, TokenGraph):
            return NotImplemented
        return self.frame == other.frame and self.has_edges_of(other.edges)

    def __hash__(self) -> int:
        return hash(self.frame)

    def __repr__(self) -> str:
        return text.summary(self)

    def __str__(self) -> str:
        small = max(self.num_dst, self.num_src) <= text.LARGEST_PICTURE and not self.varying_axes
        return text.picture(self.name, self.mask()) if small else repr(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": []}

    @property
    def shape4(self) -> rules.Shape:
        """``(batch or 1, heads or 1, num_dst, num_src)``."""
        return (self.batch or 1, self.heads or 1, self.num_dst, self.num_src)

    @property
    def frame(self) -> tuple[object, ...]:
        """Sizes and offsets: all of a graph but its edges."""
        return (self.num_dst, self.num_src, self.heads, self.batch, self.dst_offset, self.src_offset)

    @property
    def varying_axes(self) -> str:
        """The axes by which the graph differs, in words: "head", "sample and head", "" for a plain graph."""
        axes = {"sample": self.batch, "head": self.heads}
        return " and ".join(word for word, n in axes.items() if n is not None)

    def has_edges_of(self, edges: EdgeSet) -> bool:
        """True if every sample and head has exactly these edges."""
        return derived.has_edges_of(self, edges)
