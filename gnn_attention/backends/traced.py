"""Graphs inside a traced program, whose edges are known only when the program runs.

Under ``torch.compile`` and ``torch.export`` ``TokenGraph.from_edges`` returns a :class:`TracedEdges`, and
``from_indices`` and ``from_block_indices`` return a :class:`TracedIndices`. An operator checks the values;
for an index it also makes the edge rows and their transpose, or a table of blocks. Their sizes depend
only on the shape of the index, so new values need no new program. On a GPU the host waits for the operator.
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
from gnn_attention.backends.cpu.dense_blocks_eager import rectangle_attention
from gnn_attention.backends.plan.plan import PADDED, Gathered, Masks, Plan, Rectangles, pack_plan
from gnn_attention.edge_ops.edge_lists import edge_rows
from gnn_attention.graph import TokenGraph, edge_list, indices
from gnn_attention.graph.edges import ListedEdges, RuleEdges

Lists = tuple[Tensor, ...]


@dataclass(eq=False, repr=False)
class TracedGraph(TokenGraph):
    """A graph whose edges are not known yet; it exists only in a trace, so it caches nothing."""

    def __post_init__(self) -> None:
        """Make no memo for cached results, since a compiler would have to trace it."""

    __setattr__ = object.__setattr__  # type: ignore[assignment]


@dataclass(eq=False, repr=False)
class TracedEdges(TracedGraph):
    """The graph that ``from_edges`` returns in a trace, after the same checks as outside."""

    @classmethod
    def from_edge_index(cls, edge_index: Any, num_dst: int, num_src: int) -> TracedEdges:
        """Return the graph of an ``edge_index [2, E]`` or ``EdgeIndex``, with edges in the same order.

        The sizes of an EdgeIndex are not read, since compilers do not guard attributes of tensors.
        """
        index = edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else edge_index
        if torch.compiler.is_compiling():
            edges = torch.ops.gnn_attention.edge_list(index, num_dst, num_src)
        else:
            edges = _check_edge_index(index, num_dst, num_src)
        return cls(ListedEdges(edges, num_dst, num_src, "keep"), num_dst, num_src, name="edges")

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        return cast("ListedEdges", self.edges).edge_index

    @property
    def num_edges(self) -> int:
        return self.edges_on(torch.device("cpu")).shape[1]

    @property
    def has_parallel_edges(self) -> bool:
        """True, because the edges are not known yet and may be parallel."""
        return True


def is_edge_list(edges: Any) -> bool:
    """True for a strided integer tensor, such as an ``edge_index`` or PyG's ``EdgeIndex``."""
    if not isinstance(edges, Tensor) or edges.layout != torch.strided:
        return False
    return not (edges.is_floating_point() or edges.is_complex())


def _check_edge_index(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    return edge_list.check_edge_index(edge_index, num_dst, num_src).to(edge_index.device)


define(
    "edge_list",
    "(Tensor edge_index, SymInt num_dst, SymInt num_src) -> Tensor",
    _check_edge_index,
    lambda edge_index, *_: edge_index.new_empty((2, edge_index.shape[-1]), dtype=torch.int64),
)


@dataclass(eq=False, repr=False)
class TracedIndices(TracedGraph):
    """The result of ``from_indices`` and ``from_block_indices`` in a trace."""

    # The tensors of a plan.EdgeRows, or the sorted index of blocks.
    lists: Lists = ()
    block_size: int = 0
    causal: bool = False

    @classmethod
    def from_index(
        cls, index: Tensor, num_src: int, count: Tensor | None, coalesce: bool | str, causal: bool, name: str
    ) -> TracedIndices:
        if not isinstance(coalesce, bool):
            raise NotImplementedError(
                f"from_indices in a traced program takes no coalesce={coalesce!r}, which needs values "
                "that are not known yet: use True or False"
            )
        heads, batch = _varying_sizes(index)
        lists = tuple(torch.ops.gnn_attention.chosen_edges(index, count, num_src, coalesce, causal))
        return cls(UNKNOWN, index.shape[-2], num_src, heads, batch, name, lists=lists)

    @classmethod
    def from_blocks(
        cls, index: Tensor, block_size: int, num_dst: int, num_src: int, causal: bool, name: str
    ) -> TracedIndices:
        heads, batch = _varying_sizes(index)
        indices.check_num_block_rows(index, block_size, num_dst)
        lists = (torch.ops.gnn_attention.chosen_blocks(index, block_size, num_dst, num_src),)
        return cls(
            UNKNOWN, num_dst, num_src, heads, batch, name, lists=lists, block_size=block_size, causal=causal
        )

    def __post_init__(self) -> None:
        """Refuse graphs derived from this one, because ``lists`` would not hold their edges."""
        if self.edges is not UNKNOWN:
            _refuse_edges()

    def runner(self, backend: Any) -> Callable[[Any], Any]:
        return partial(_run, backend)

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        return _refuse_edges(device)


def _refuse_edges(*ends: Any) -> Tensor:
    raise NotImplementedError(
        "the edges of an index in a traced program are not known: use the graph outside of it"
    )


UNKNOWN = RuleEdges(_refuse_edges)


def _varying_sizes(index: Tensor) -> tuple[int | None, int | None]:
    if not isinstance(index, Tensor) or not 2 <= index.dim() <= 4:
        raise ValueError(f"index must be a tensor [..., dst, K] of 2 to 4 axes, got {checks.quote(index)}")
    return indices.varying_sizes(index)[::-1]


def _run(backend: Any, call: AttentionCall) -> tuple[Tensor, Tensor]:
    graph: Any = call.graph
    builder, kernel = ("from_block_indices", "tiles") if graph.block_size else ("from_indices", "rows")
    if backend not in ("auto", kernel) or not call.is_plain:
        option = f"backend={backend!r}" if call.is_plain else "a score_mod, bias or other option"
        raise NotImplementedError(
            f"{builder} in a traced program does not run with {option}: use 'auto' or {kernel!r} without "
            "score_mod, bias and dropout, or make the graph outside of the program"
        )
    if graph.block_size:
        return _attend_to_blocks(call, graph)
    # If the index varies by query head, each head has its own senders, so k and v are repeated.
    heads = call.k.shape[1] if graph.heads is None else call.q.shape[1]
    k, v = (edge_softmax.per_query_head(x, heads) for x in (call.k, call.v))
    has_in_edges = graph.lists[0].diff().view(*graph.shape4[:3]) > 0
    packed_plan = list(graph.lists), [1, PADDED, 1]
    return attention_op.run_folded(replace(call, k=k, v=v), packed_plan, has_in_edges)


def _attend_to_blocks(call: AttentionCall, graph: Any) -> tuple[Tensor, Tensor]:
    """Run one rectangle for each block of receivers, with all samples and heads in one sequence."""
    batch, heads, num_dst, _ = call.q.shape
    device = call.q.device
    block_index, size, num_src = graph.lists[0], graph.block_size, graph.num_src
    num_blocks = block_index.shape[2]
    src = (block_index.long().unsqueeze(-1) * size + torch.arange(size, device=device)).flatten(-2)
    dst = torch.arange(num_blocks * size, device=device).view(num_blocks, size, 1)
    mask = (src.unsqueeze(-2) < num_src) & (dst < num_dst)
    mask = mask & (src.unsqueeze(-2) <= dst) if graph.causal else mask
    first_sender = torch.arange(batch * heads, device=device) * call.k.shape[1] // heads * num_src
    senders = src.clamp(max=num_src - 1) + first_sender.view(batch, heads, 1, 1)
    receivers = torch.arange(batch * heads * num_blocks * size, device=device).view(-1, size)
    mask_index = torch.arange(mask.shape[:3].numel(), device=device).view(mask.shape[:3])
    masks = Masks(mask.flatten(0, 2), mask_index.expand(batch, heads, -1).flatten())
    rectangles = Rectangles(Gathered(receivers), Gathered(senders.flatten(0, 2)), masks, has_empty_rows=True)
    # The kernel does not support empty rectangles.
    plan = Plan((rectangles,), True) if num_src and mask.numel() else Plan((), False)
    q = functional.pad(call.q, (0, 0, 0, num_blocks * size - num_dst))
    q, k, v = (x.reshape(1, 1, -1, x.shape[3]) for x in (q, call.k, call.v))
    if device.type == "cpu":
        result = attention_op.attention(q, k, v, pack_plan(plan), call.scale)
    else:
        result = rectangle_attention(AttentionCall(q, k, v, graph, call.scale), plan)
    out, lse = (x.reshape(batch, heads, -1, *x.shape[3:])[:, :, :num_dst] for x in result)
    if call.sink_logits is None:
        return out, lse
    return edge_softmax.add_sinks(out, lse, call.sink_logits, mask.any(-1).flatten(2)[..., :num_dst])


def _chosen_edges(index: Tensor, count: Tensor | None, num_src: int, coalesce: bool, causal: bool) -> Lists:
    graph = TokenGraph.from_indices(index, num_src, count, coalesce, causal)
    sizes = [len(x) for x in _fake_chosen_edges(index, count, num_src)]
    pairs = zip(edge_rows(graph, index.device).tensors, sizes, strict=True)
    return tuple(torch.cat([x, x.new_zeros(size - len(x))]) for x, size in pairs)


def _fake_chosen_edges(index: Tensor, count: Tensor | None, num_src: int, *options: bool) -> Lists:
    max_edges, num_receivers = index.numel(), math.prod(index.shape[:-1])
    num_senders = math.prod(index.shape[:-2]) * num_src
    sizes = num_receivers + 1, max_edges, max_edges, num_senders + 1, max_edges, max_edges
    return tuple(index.new_empty(size, dtype=torch.int32) for size in sizes)


SIX_TENSORS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
SCHEMA = f"(Tensor index, Tensor? count, SymInt num_src, bool coalesce, bool causal) -> {SIX_TENSORS}"
define("chosen_edges", SCHEMA, _chosen_edges, _fake_chosen_edges)
define(
    "chosen_blocks",
    "(Tensor index, SymInt block_size, SymInt num_dst, SymInt num_src) -> Tensor",
    lambda *arguments: indices.read_block_rows(*arguments).index,
    lambda index, *sizes: torch.empty_like(index[(None,) * (4 - index.dim())], dtype=torch.int32),
)
TokenGraph.traced_indices, TokenGraph.traced_blocks = TracedIndices.from_index, TracedIndices.from_blocks
