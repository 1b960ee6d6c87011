"""The token graph: which token may attend to which.

======================  =====================================================================================
token = node            ``src`` is the sender, ``dst`` the receiver; ``src -> dst`` lets dst attend to src
``edge_index``          int64 ``[2, E]``; row 0 holds src, row 1 dst (PyG's ``source_to_target``)
``mask[dst, src]``      True = edge = attend (SDPA): PyG's ``adj_t``, the transpose of networkx's adjacency
rule                    ``rule(b, h, dst, src) -> bool tensor``: FlexAttention's ``mask_mod``
======================  =====================================================================================

A graph is a *set* of edges. It is stored as a rule, a list or the senders that each receiver chose.
A graph never changes, so its mask, edge list and counts are computed on first use and then cached.
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

# attend(backend="auto") counts the tiles of a large list only after this many calls.
NUM_FIRST_CALLS = 2


@dataclass(eq=False, repr=False)
class TokenGraph(GraphOperators):
    """A set of edges ``src -> dst`` from ``num_src`` senders to ``num_dst`` receivers.

    Make graphs by :meth:`from_rule`, :meth:`from_edges`, the builders of ``gnn_attention.patterns``
    or the functions of ``gnn_attention.convert``. Operators combine them: ``| & - ^ ~``, ``.T``
    (reversed edges), ``@`` (two hops) and ``** k`` (k hops).

    ``heads`` is the number of heads if the graph varies by head, otherwise None. ``batch`` is the
    same for samples. ``dst_offset`` and ``src_offset`` are the absolute positions of the first
    receiver and the first sender. Score_mods receive absolute positions.

    >>> print(TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 3, name="causal(3)"))
    causal(3): mask[dst, src] and in-edges
    0 ■ · ·   0 <- 0
    1 ■ ■ ·   1 <- 0 1
    2 ■ ■ ■   2 <- 0 1 2
    """

    # gnn_attention.backends sets these. Traced calls of from_indices and from_block_indices use them.
    traced_indices: ClassVar[Callable[..., TokenGraph]]
    traced_blocks: ClassVar[Callable[..., TokenGraph]]

    # gnn_attention.backends caches the graph of each sample and head here.
    _slices: list[list[TokenGraph]] = field(default_factory=list, init=False)

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
        """Return the graph of all pairs ``(src, dst)`` for which ``rule(b, h, dst, src)`` is True.

        ``rule`` has the signature of FlexAttention's ``mask_mod``. It maps broadcastable int64
        tensors to a bool tensor. If a trial shows that it needs scalars, ``torch.vmap`` maps it
        over the pairs. ``num_src=None`` means ``num_dst``. Pass ``heads`` if the rule uses h,
        and ``batch`` if it uses b. Raises TypeError (invalid rule) or ValueError (invalid size).

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
            fitted_rule = enumerate_pairs.fit_rule(rule, repr(graph))
            graph = graph if fitted_rule is rule else replace(graph, edges=RuleEdges(fitted_rule))
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
        """Return the graph of the edges ``edge_index [2, E]``: row 0 senders, row 1 receivers.

        The order of the edges is kept. No size is inferred from the largest index.
        ``parallel`` says what to do with parallel edges: "error" raises ValueError, "merge" keeps
        the first copy of each edge (as ``coalesce=True`` does), and "keep" makes a multigraph:
        each copy has its own bias and weight, but masks, set operators and ``==`` merge the copies.
        Raises TypeError (not integers), ValueError (shape, parallel edges) or IndexError (range).

        >>> edges = torch.tensor([[0, 2, 2], [1, 1, 1]])
        >>> graph = TokenGraph.from_edges(edges, 3, parallel="keep")
        >>> graph.num_edges, graph.in_degree().tolist(), graph.coalesce().num_edges
        (3, [0, 3, 0], 2)
        """
        num_dst = checks.size("num_dst", num_dst)
        num_src = num_dst if num_src is None else checks.size("num_src", num_src)
        mode = checks.choice("parallel", "merge" if coalesce else parallel, get_args(Parallel))
        edge_index = edge_list.check_edge_index(edge_index, num_dst, num_src)
        edges = ListedEdges(edge_index, num_dst, num_src, parallel="keep")
        if mode == "error" and edges.has_parallel_edges:
            edge_list.raise_duplicate_error(edge_index, num_src)
        return cls(edges if mode == "keep" else edges.unique_edges, num_dst, num_src, name=name)

    @classmethod
    def from_distinct_edges(cls, edges: Tensor, num_dst: int, num_src: int, name: str) -> TokenGraph:
        """Return the graph of a list of edges, which must be valid and distinct (unchecked)."""
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
        """Return the graph of the senders that each receiver chose: ``src in index[..., dst]``.

        ``index`` is an integer tensor ``[dst, K]``, ``[heads, dst, K]`` or
        ``[batch, heads or 1, dst, K]``, in which -1 means no sender. With ``count [..., dst]`` only
        the first ``count`` entries of a receiver are valid. ``coalesce=True`` merges repeated senders
        of a receiver. ``coalesce="count"`` does too, but returns ``(graph, score_mod)``; the score_mod
        adds log m to the score of a sender that was chosen m times, which flex does not support.
        ``causal=True`` checks that ``src <= dst``. Takes O(E log K) time and O(E) memory for
        ``E = batch * heads * dst * K``, without a dst x src tensor. :attr:`edge_index` is sorted by
        receiver, and the senders of a receiver keep the order of the index. A compiled or exported
        program may compute the index or take it as an input. Raises TypeError (not integers),
        ValueError (shape, duplicates, not causal, unknown ``coalesce``) or IndexError (range).

        >>> TokenGraph.from_indices(torch.tensor([[0, -1], [1, 0], [0, 2]]), 3).edge_index.tolist()
        [[0, 1, 0, 0, 2], [0, 1, 1, 2, 2]]
        """
        if torch.compiler.is_compiling():
            return cls.traced_indices(index, num_src, count, coalesce, causal, name)
        edges, score_mod = indices.read_senders(index, num_src, count, coalesce, causal)
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
        """Return the graph in which each block of receivers attends to its chosen blocks of senders.

        Every edge has ``src // block_size in index[..., dst // block_size]`` and, with ``causal``,
        ``src <= dst``. The shape of ``index``, its use in compiled programs and the errors are as
        in :meth:`from_indices`. The graph stores a table of blocks, not a list of edges.

        >>> blocks = torch.tensor([[0, -1], [0, 1]])
        >>> TokenGraph.from_block_indices(blocks, 2, 4, 4, causal=True).in_degree().tolist()
        [1, 2, 3, 4]
        """
        if torch.compiler.is_compiling():
            return cls.traced_blocks(index, block_size, num_dst, num_src, causal, name)
        edges = indices.read_blocks(index, block_size, num_dst, num_src, causal)
        batch, heads = indices.varying_sizes(index)
        return cls(edges, num_dst, num_src, heads, batch, name)

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """The edges, int64 ``[2, E]`` on the CPU: row 0 senders, row 1 receivers.

        Edges from a list or an index keep their order. Others are sorted by receiver, then sender.
        The result is cached: do not write into it. ValueError if the graph varies by head or sample
        or is too large.
        """
        return self.edges_on(torch.device("cpu"))

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        """Return :attr:`edge_index` on ``device``. The copy is cached."""
        if self.heads is not None or self.batch is not None:
            raise ValueError(
                f"edge_index of {self!r}: a graph that varies by {self.varying_axes} has no single "
                "edge list; use mask(), or select(batch, head) for one slice"
            )
        return memoized(derived.edge_index, self, device)

    def positions_of(self, edges: Tensor) -> Int[Tensor, " edges"]:
        """Return the index in :attr:`edge_index` of each edge ``[2, K]``; ValueError if one is missing."""
        edges = edge_list.check_edge_index(edges, self.num_dst, self.num_src)
        return edge_list.find_edges(self.edge_index, edges, self.num_src, repr(self))

    def mask(self, device: torch.device | str | None = None) -> Bool[Tensor, "..."]:
        """Return the mask: bool ``[dst, src]``, True where there is an edge.

        The shape is ``[heads, dst, src]`` or ``[batch, heads or 1, dst, src]`` for a graph that
        differs by head or sample. The mask is cached: do not write into it. ValueError if memory is
        short.
        """
        if not isinstance(device, (str, torch.device, type(None))):
            raise TypeError(f"device must be a torch.device or the name of one, got {checks.quote(device)}")
        return memoized(derived.mask, self, torch.device(device or "cpu"))

    @property
    def rule(self) -> Rule:
        """The edges as ``rule(b, h, dst, src) -> bool tensor``, FlexAttention's ``mask_mod``."""
        return self.edges.rule

    @property
    def has_parallel_edges(self) -> bool:
        """True if an edge occurs several times in :attr:`edge_index`; see :meth:`from_edges`."""
        return self.edges.has_parallel_edges

    @property
    def num_edges(self) -> int:
        """Number of edges, over all heads and samples by which the graph differs."""
        return int(memoized(derived.num_edges, self))

    def positions(self, side: str, count: int, device: torch.device) -> Int[Tensor, " tokens"]:
        """Return the absolute positions of ``count`` receivers (side "dst") or senders (side "src")."""
        offset = self.dst_offset if side == "dst" else self.src_offset
        return torch.arange(offset, offset + count, device=device)

    def runner(self, backend: Any) -> Callable[[Any], Any] | None:
        """Return None. A subclass may return ``call -> (out, lse)``, which then replaces the backend."""
        return None

    def in_degree(self) -> Int[Tensor, "..."]:
        """Return the in-degree of each receiver, int64 ``[..., dst]``. It is cached: do not write into it."""
        return memoized(derived.in_degree, self)

    @property
    def max_in_degree(self) -> int:
        """The largest in-degree, 0 for a graph without receivers."""
        return int(memoized(derived.max_in_degree, self))

    @property
    def has_empty_rows(self) -> bool:
        """True if there is an isolated receiver, that is, a receiver without in-edges."""
        return bool(memoized(derived.has_empty_rows, self))

    def is_full(self) -> bool:
        """True if every pair is an edge."""
        return bool(memoized(derived.is_full, self))

    def is_causal(self) -> bool:
        """True if the graph is square and its edges are exactly ``src <= dst``."""
        return bool(memoized(derived.is_causal, self))

    def prepare(self) -> TokenGraph:
        """Mark the graph as one that will be used many times, and return it.

        A training loop may make a new list of edges in every step. So in the first two calls on
        a list, unless the graph is small, ``attend(backend="auto")`` chooses a backend by sizes
        alone. It counts tiles only in the third call, or in the first one after ``prepare``.

        >>> TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3).prepare().num_edges
        2
        """
        self._memo["calls"] = NUM_FIRST_CALLS
        return self

    @property
    def is_prepared(self) -> bool:
        """False in the first calls on a list, when counting and planning would not pay off."""
        return self.edges.listed() is None or self._memo.data.get("calls", 0) >= NUM_FIRST_CALLS

    def count_call(self) -> None:
        """Count a call on the graph, for :attr:`is_prepared`."""
        self._memo["calls"] = self._memo.data.get("calls", 0) + 1

    def __eq__(self, other: object) -> bool:
        """True if sizes, offsets and edge sets are equal; names and edge order do not matter."""
        if not isinstance(other, TokenGraph):
            return NotImplemented
        return self.frame == other.frame and self.has_edges_of(other.edges)

    def __hash__(self) -> int:
        return hash(self.frame)

    def __repr__(self) -> str:
        return text.summary(self)

    def __str__(self) -> str:
        is_small = max(self.num_dst, self.num_src) <= text.MAX_PICTURE_SIZE
        return text.picture(self.name, self.mask()) if is_small and not self.varying_axes else repr(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_slices": []}

    @property
    def shape4(self) -> rules.Shape:
        """``(batch or 1, heads or 1, num_dst, num_src)``."""
        return (self.batch or 1, self.heads or 1, self.num_dst, self.num_src)

    @property
    def frame(self) -> tuple[object, ...]:
        """Sizes and offsets: everything that ``==`` compares, except the edges."""
        return (self.num_dst, self.num_src, self.heads, self.batch, self.dst_offset, self.src_offset)

    @property
    def varying_axes(self) -> str:
        """The axes by which the graph differs: "head", "sample", "sample and head", or ""."""
        sizes = {"sample": self.batch, "head": self.heads}
        return " and ".join(axis for axis, size in sizes.items() if size is not None)

    def has_edges_of(self, edges: EdgeSet) -> bool:
        """True if every sample and head has exactly these edges."""
        return derived.has_edges_of(self, edges)
