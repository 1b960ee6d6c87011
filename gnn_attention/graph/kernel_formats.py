"""A graph as attention kernels take it: SDPA's mask, FlexAttention's BlockMask, packed lengths, a window.

A graph that a kernel cannot express is a ValueError. All but SDPA's mask are made without visiting every pair
of tokens. Public through ``gnn_attention.convert``.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.edges import CombinedEdges, RuleEdges, on_device
from gnn_attention.graph.regions import counting
from gnn_attention.graph.symbols import dst, look_up, src
from gnn_attention.graph.tiling import FULL_TILE, PARTIAL, tile_list, tiles
from gnn_attention.graph.token_graph import TokenGraph

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def to_sdpa_mask(graph: TokenGraph, dtype: torch.dtype | None = None) -> Tensor:
    """SDPA's ``attn_mask``: ``graph.mask()``, or 0.0 and -inf in a float dtype.

    >>> from gnn_attention import patterns
    >>> to_sdpa_mask(patterns.causal(2), torch.float32).tolist()
    [[0.0, -inf], [0.0, 0.0]]
    """
    mask = checks.instance("graph", graph, TokenGraph).mask()
    if dtype is None or dtype == torch.bool:
        return mask.clone()
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point dtype, torch.bool or None, got {dtype}")
    return torch.zeros(mask.shape, dtype=dtype, device="cpu").masked_fill(~mask, -torch.inf)


def to_block_mask(graph: TokenGraph, block_size: int = 128, device: torch.device | str = "cpu") -> BlockMask:
    """FlexAttention's ``BlockMask`` of the graph, lists of both directions, without a ``dst x src`` tensor.

    Its ``mask_mod`` is the graph's rule. Tiles that reach over the border are partial. The lists hold an
    int32 for every tile. ``device`` is that of the queries: FlexAttention's kernels read the lists and the
    tables of the rule there, and ``BlockMask.to`` would leave the tables behind. Raises ValueError without a
    receiver or a sender, and above 2^28 tiles.

    >>> from gnn_attention import patterns
    >>> mask = to_block_mask(patterns.window(512, 128))
    >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()
    ([[[1, 2, 2, 2]]], [[[0, 0, 0, 0]]])
    """
    from torch.nn.attention.flex_attention import BlockMask

    checks.instance("graph", graph, TokenGraph)
    block_size = checks.size("block_size", block_size, 1)
    if not graph.num_dst or not graph.num_src:
        raise ValueError(f"FlexAttention has no BlockMask without a receiver or a sender, got {graph!r}")
    parts = tiles(graph, block_size)
    if parts.num_tiles > MOST_TILES:
        size = f"the lists of {parts.num_tiles} tiles would take {32 * parts.num_tiles / 2**30:.0f} GiB"
        advice = f"take a larger block_size than {block_size}, or tiling.tiles, whose runs are small"
        raise ValueError(f"{size} for {graph!r}: {advice}")
    kinds = parts.table()
    # those that the border cuts are no full tiles
    kinds[:, :, graph.num_dst // block_size :] = kinds[:, :, graph.num_dst // block_size :].clamp(max=PARTIAL)
    kinds[..., graph.num_src // block_size :] = kinds[..., graph.num_src // block_size :].clamp(max=PARTIAL)
    lists = (*tile_list(kinds == PARTIAL), *tile_list(kinds == FULL_TILE))
    lengths = (graph.num_dst, graph.num_src)
    rule = on_device(graph.rule, torch.device(device))
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block_size, mask_mod=rule, seq_lengths=lengths)
    return mask.to(str(device))


MOST_TILES = 2**28


def from_block_mask(mask: BlockMask) -> TokenGraph:
    """The graph of FlexAttention's ``BlockMask``: the pairs of its full blocks, and where its ``mask_mod``
    holds in the partial ones.

    The graph has an axis of heads, or of samples, if the lists of the mask have more than one. Raises
    TypeError for another object.

    >>> from gnn_attention import patterns
    >>> from_block_mask(to_block_mask(patterns.window(300, 8))) == patterns.window(300, 8)
    True
    """
    from torch.nn.attention.flex_attention import BlockMask

    checks.instance("mask", mask, BlockMask)
    lists = [(mask.kv_num_blocks, mask.kv_indices)]
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        lists.append((mask.full_kv_num_blocks, mask.full_kv_indices))
    tables = []
    for number, columns in lists:
        # whatever follows the first ``number`` columns of a row is no tile
        is_listed = torch.arange(columns.shape[-1], device="cpu") < number.cpu().unsqueeze(-1)
        columns = columns.cpu().long()
        tables.append(torch.zeros_like(columns).scatter_add(-1, columns, is_listed.long()) > 0)
    batch, heads = (number if number > 1 else None for number in tables[0].shape[:2])
    sizes = (*mask.seq_lengths, heads, batch, "block_mask")
    holds = TokenGraph.from_rule(on_device(mask.mask_mod, torch.device("cpu")), *sizes)
    of_tiles = (partial(rules.look_up_blocks, table, *mask.BLOCK_SIZE) for table in tables)
    is_partial, *is_full = (TokenGraph.from_rule(rule, *sizes) for rule in of_tiles)
    graph = holds & is_partial
    return replace(graph | is_full[0] if is_full else graph, name="block_mask")


class Varlen(NamedTuple):
    """Packed documents as variable-length kernels take them (``torch.nn.attention.varlen``, flash-attention).

    Document i holds the tokens ``cu_seqlens[i] .. cu_seqlens[i + 1] - 1``. Inside it each token attends to
    itself, ``window[0]`` tokens before it and ``window[1]`` after it; -1 = all. Causal is ``(-1, 0)``.
    """

    cu_seqlens: Int[Tensor, " documents_and_one"]
    max_seqlen: int
    window: tuple[int, int]


def to_varlen(graph: TokenGraph) -> Varlen:
    """The graph as packed documents with one window for all: causal, full or local in each, nothing between.

    Raises ValueError for any other graph, and for one that differs by head or sample or is not square.

    >>> from gnn_attention import patterns
    >>> to_varlen(patterns.documents([3, 1, 2]))
    Varlen(cu_seqlens=tensor([0, 3, 4, 6], dtype=torch.int32), max_seqlen=3, window=(-1, 0))
    """
    _check_plain("varlen kernels hold", graph)
    if graph.num_dst != graph.num_src:
        raise ValueError(f"varlen kernels need as many receivers as senders, got {graph!r}; see to_window")
    before, after = _reach(graph, 0)
    # a document starts where no edge crosses, in either direction
    starts = before == 0
    starts[1:] &= after[:-1] == 0
    bounds = torch.cat([starts.nonzero().flatten(), torch.tensor([graph.num_dst], device="cpu")])
    lengths = bounds.diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
    left, right, longest = (int(side.max()) if len(lengths) else 0 for side in (before, after, lengths))
    meant = _band(left, right, 0) & (look_up(owner, dst) == look_up(owner, src))
    if not graph.has_edges_of(RuleEdges(meant)):
        raise ValueError(f"{graph!r} is no packing of documents with one window for all: see to_block_mask")
    return Varlen(
        bounds.to(torch.int32), longest, (_window_side(left, longest - 1), _window_side(right, longest - 1))
    )


def to_window(graph: TokenGraph) -> tuple[int, int]:
    """The graph as flash-attention's ``window_size=(left, right)``, tokens before and after; -1 = all.

    Receivers are aligned with the last senders, as in flash-attention. ``window(n, w)`` counts the token
    itself: it is ``(w - 1, 0)``. ValueError for any other graph, and one that differs by head or sample.

    >>> from gnn_attention import patterns
    >>> to_window(patterns.window(64, 8)), to_window(patterns.causal(9).rows(6, 9))
    ((7, 0), (-1, 0))
    """
    _check_plain("flash-attention's window is", graph)
    shift = graph.num_src - graph.num_dst
    before, after = _reach(graph, shift)
    # for a receiver that comes before all senders
    gap = (-1 - shift - torch.arange(graph.num_dst, device="cpu")).clamp(min=0)
    after = torch.where(after > 0, after + gap, 0)
    left, right = (int(side.max()) if len(side) else 0 for side in (before, after))
    if not graph.has_edges_of(RuleEdges(_band(left, right, shift))):
        raise ValueError(f"{graph!r} is no window (left, right): see to_varlen, to_block_mask")
    return _window_side(left, graph.num_src - 1), _window_side(right, graph.num_dst - 1)


def _check_plain(what: str, graph: TokenGraph) -> None:
    checks.instance("graph", graph, TokenGraph)
    if graph.heads is not None or graph.batch is not None:
        advice = "take one with select(batch, head)"
        raise ValueError(f"{what} one graph for all heads and samples, got {graph!r}: {advice}")


def _window_side(side: int, furthest: int) -> int:
    return -1 if side >= furthest else side


def _reach(graph: TokenGraph, shift: int) -> tuple[Tensor, Tensor]:
    """The number of senders before, and after, its own position ``dst + shift`` for every receiver."""
    halves = (RuleEdges((src - dst - shift) * sign > 0) for sign in (-1, 1))
    sides = (CombinedEdges(operator.and_, (graph.edges, half)) for half in halves)
    before, after = (counting.in_degree(side, repr(graph), graph.shape4)[0, 0] for side in sides)
    return before, after


def _band(left: int, right: int, shift: int) -> Any:
    return (dst + shift - src <= left) & (src - dst - shift <= right)
