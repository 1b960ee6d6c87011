"""Graphs inside a traced program: edge lists and chosen senders whose numbers become edges each time it runs.

Under ``torch.compile`` and ``torch.export`` ``TokenGraph.from_edges`` makes a :class:`TracedEdges`, and
``from_indices`` and ``from_block_indices`` make a :class:`TracedIndices`, whose index is an input of the
program or computed in it. One operator checks the numbers; that of an index sorts it into rows and their
transpose, or into rows of blocks, of the size of the index whatever its numbers are, so that no other numbers
compile anew. On a GPU the host waits for it, as for ``rows`` in general.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.custom_op import define
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cpu import attention_op
from gnn_attention.backends.cpu.dense_blocks_eager import formula
from gnn_attention.backends.plan.csr import edges_of
from gnn_attention.backends.plan.plan import PADDED, Gathered, Masks, Plan, Rectangles, pack_plan
from gnn_attention.graph import TokenGraph, edge_list, indices
from gnn_attention.graph.edges import ListedEdges, RuleEdges

Lists = tuple[Tensor, ...]


@dataclass(eq=False, repr=False)
class Traced(TokenGraph):
    """A graph whose numbers are not known yet, under ``torch.compile`` and ``torch.export``.

    It ends with the trace: nothing is cached.
    """

    def __post_init__(self) -> None:
        """Nothing that a compiler would have to trace."""

    __setattr__ = object.__setattr__  # type: ignore[assignment]


@dataclass(eq=False, repr=False)
class TracedEdges(Traced):
    """What stands in for ``TokenGraph.from_edges``, with the same errors."""

    @classmethod
    def of(cls, edge_index: Any, num_dst: int, num_src: int) -> TracedEdges:
        """The graph of an ``edge_index [2, E]`` or ``EdgeIndex``, in its order.

        The sizes of an EdgeIndex are not read: compilers do not guard attributes of tensors.
        """
        plain = edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else edge_index
        if torch.compiler.is_compiling():
            edges = torch.ops.gnn_attention.edge_list(plain, num_dst, num_src)
        else:
            edges = edge_list.check_edge_index(plain, num_dst, num_src).to(plain.device)
        return cls(ListedEdges(edges, num_dst, num_src, "keep"), num_dst, num_src, name="edges")

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        return cast("ListedEdges", self.edges).edge_index

    @property
    def num_edges(self) -> int:
        return self.edges_on(torch.device("cpu")).shape[1]

    @property
    def has_parallel_edges(self) -> bool:
        """True, since their numbers are not known yet."""
        return True


def is_edge_list(edges: Any) -> bool:
    """True for a plain integer tensor, such as an ``edge_index`` or torch_geometric's ``EdgeIndex``."""
    if not isinstance(edges, Tensor) or edges.layout != torch.strided:
        return False
    return not (edges.is_floating_point() or edges.is_complex())


def _check_edge_index(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    return edge_list.check_edge_index(edge_index, num_dst, num_src).to(edge_index.device)


def _like_checked(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    return edge_index.new_empty((2, edge_index.shape[-1]), dtype=torch.int64)


define(
    "edge_list",
    "(Tensor edge_index, SymInt num_dst, SymInt num_src) -> Tensor",
    _check_edge_index,
    _like_checked,
)


@dataclass(eq=False, repr=False)
class TracedIndices(Traced):
    """What stands in for ``TokenGraph.from_indices`` and ``from_block_indices``, with the same errors."""

    # those of plan.EdgeRows; of blocks the sorted index
    lists: Lists = ()
    size: int = 0
    past: bool = False

    @classmethod
    def of(
        cls, index: Tensor, num_src: int, count: Tensor | None, coalesce: bool | str, causal: bool, name: str
    ) -> TracedIndices:
        if not isinstance(coalesce, bool):
            got = f"coalesce={coalesce!r}, which makes a score_mod of numbers that are not known yet"
            raise NotImplementedError(f"from_indices in a traced program takes no {got}: use True or False")
        axes = _axes(index)
        lists = tuple(torch.ops.gnn_attention.chosen_edges(index, count, num_src, coalesce, causal))
        return cls(UNKNOWN, index.shape[-2], num_src, *axes, name, lists=lists)

    @classmethod
    def of_blocks(
        cls, index: Tensor, block_size: int, num_dst: int, num_src: int, causal: bool, name: str
    ) -> TracedIndices:
        axes = _axes(index)
        indices.check_blocks(index, block_size, num_dst)
        table = torch.ops.gnn_attention.chosen_blocks(index, block_size, num_dst, num_src)
        return cls(UNKNOWN, num_dst, num_src, *axes, name, lists=(table,), size=block_size, past=causal)

    def __post_init__(self) -> None:
        """NotImplementedError for what an operator makes of it: its edges would not be those of the lists."""
        if self.edges is not UNKNOWN:
            _refuse_edges()

    def runner(self, backend: Any) -> Callable[[Any], Any]:
        return partial(_run, backend)

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        return _refuse_edges(device)


def _refuse_edges(*ends: Any) -> Tensor:
    what = "the edges of an index in a traced program are not known"
    raise NotImplementedError(f"{what}: combine its graph, or look at it, outside of the program")


UNKNOWN = RuleEdges(_refuse_edges)


def _axes(index: Tensor) -> tuple[int | None, int | None]:
    """``heads, batch`` of the graph."""
    if not isinstance(index, Tensor) or not 2 <= index.dim() <= 4:
        raise ValueError(f"index must be a tensor [..., dst, K] of 2 to 4 axes, got {checks.quote(index)}")
    return indices.varying_sizes(index)[::-1]


def _run(backend: Any, call: AttentionCall) -> tuple[Tensor, Tensor]:
    graph: Any = call.graph
    maker, own = ("from_block_indices", "tiles") if graph.size else ("from_indices", "rows")
    if backend not in ("auto", own) or not call.is_plain:
        got = f"backend={backend!r}" if call.is_plain else "a score_mod, bias or dropout"
        reason = f"{maker} in a traced program does not run with {got}"
        raise NotImplementedError(f"{reason}: use 'auto' or {own!r} without them, or make the graph outside")
    if graph.size:
        return _along_blocks(call, graph)
    # An index by query head gives each of them senders of its own.
    heads = call.k.shape[1] if graph.heads is None else call.q.shape[1]
    k, v = (edge_softmax.per_query_head(x, heads) for x in (call.k, call.v))
    has_in_edges = graph.lists[0].diff().view(*graph.shape4[:3]) > 0
    plan = list(graph.lists), [1, PADDED, 1]
    return attention_op.along_all_tokens(replace(call, k=k, v=v), plan, has_in_edges)


def _along_blocks(call: AttentionCall, graph: Any) -> tuple[Tensor, Tensor]:
    """One rectangle for each block of receivers; samples and heads follow each other as tokens of one."""
    (batch, heads, num_dst, _), kv_heads, device = call.q.shape, call.k.shape[1], call.q.device
    table, size, num_src = graph.lists[0], graph.size, graph.num_src
    blocks = table.shape[2]
    src = (table.long().unsqueeze(-1) * size + torch.arange(size, device=device)).flatten(-2)
    dst = torch.arange(blocks * size, device=device).view(blocks, size, 1)
    edge = (src.unsqueeze(-2) < num_src) & (dst < num_dst)
    edge = edge & (src.unsqueeze(-2) <= dst) if graph.past else edge
    first = torch.arange(batch * heads, device=device) * kv_heads // heads * num_src
    senders = src.clamp(max=num_src - 1) + first.view(batch, heads, 1, 1)
    receivers = torch.arange(batch * heads * blocks * size, device=device).view(-1, size)
    which = torch.arange(edge.shape[:3].numel(), device=device).view(edge.shape[:3])
    masks = Masks(edge.flatten(0, 2), which.expand(batch, heads, -1).flatten())
    every = Rectangles(Gathered(receivers), Gathered(senders.flatten(0, 2)), masks, has_empty_rows=True)
    # the kernel takes no rectangle of nothing
    plan = Plan((every,), True) if num_src and edge.numel() else Plan((), False)
    q = functional.pad(call.q, (0, 0, 0, blocks * size - num_dst))
    q, k, v = (x.reshape(1, 1, -1, x.shape[3]) for x in (q, call.k, call.v))
    if device.type == "cpu":
        found = attention_op.attention(q, k, v, pack_plan(plan), call.scale)
    else:
        found = formula(AttentionCall(q, k, v, graph, call.scale), plan)
    out, lse = (x.reshape(batch, heads, -1, *x.shape[3:])[:, :, :num_dst] for x in found)
    if call.sink_logits is None:
        return out, lse
    return edge_softmax.add_sinks(out, lse, call.sink_logits, edge.any(-1).flatten(2)[..., :num_dst])


def _chosen_edges(index: Tensor, count: Tensor | None, num_src: int, coalesce: bool, causal: bool) -> Lists:
    graph = TokenGraph.from_indices(index, num_src, count, coalesce, causal)
    found = edges_of(graph, index.device).tensors
    sizes = [x.shape[0] for x in _like_chosen_edges(index, count, num_src)]
    return tuple(torch.cat([x, x.new_zeros(size - len(x))]) for x, size in zip(found, sizes, strict=True))


def _like_chosen_edges(index: Tensor, count: Tensor | None, num_src: int, *options: bool) -> Lists:
    most, rows = index.numel(), math.prod(index.shape[:-1])
    sizes = rows + 1, most, most, math.prod(index.shape[:-2]) * num_src + 1, most, most
    return tuple(index.new_empty(size, dtype=torch.int32) for size in sizes)


SIX = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
OF_TOKENS = f"(Tensor index, Tensor? count, SymInt num_src, bool coalesce, bool causal) -> {SIX}"
OF_BLOCKS = "(Tensor index, SymInt block_size, SymInt num_dst, SymInt num_src) -> Tensor"
define("chosen_edges", OF_TOKENS, _chosen_edges, _like_chosen_edges)
define(
    "chosen_blocks",
    OF_BLOCKS,
    lambda *arguments: indices.read_block_rows(*arguments).table,
    lambda index, *sizes: torch.empty_like(index[(None,) * (4 - index.dim())], dtype=torch.int32),
)
TokenGraph.traced_indices, TokenGraph.traced_blocks = TracedIndices.of, TracedIndices.of_blocks
