"""Convert graphs to inputs of attention kernels: SDPA masks, BlockMasks, packed documents, windows.

The functions raise ValueError for a graph that the kernel cannot express, and are public in
``gnn_attention.convert``. Only ``to_sdpa_mask`` visits every pair.
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

# With more tiles than this, the lists of a BlockMask would take more than 8 GiB.
MAX_TILES = 2**28


def to_sdpa_mask(graph: TokenGraph, dtype: torch.dtype | None = None) -> Tensor:
    """Return SDPA's ``attn_mask``: ``graph.mask()``, or 0.0 and -inf in a float dtype.

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
    """Return the graph as FlexAttention's ``BlockMask``, without making a ``dst x src`` tensor.

    Its ``mask_mod`` is the graph's rule. Tiles that extend beyond the graph are partial. The lists
    take memory for every tile, even an empty one. The kernels read the lists and the rule's tables
    on ``device``, so pass the device of the queries. ``BlockMask.to`` does not move the tables.
    Raises ValueError for a graph without receivers or senders, or with more than 2^28 tiles.

    >>> from gnn_attention import patterns
    >>> mask = to_block_mask(patterns.window(512, 128))
    >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()
    ([[[1, 2, 2, 2]]], [[[0, 0, 0, 0]]])
    """
    from torch.nn.attention.flex_attention import BlockMask

    checks.instance("graph", graph, TokenGraph)
    block_size = checks.size("block_size", block_size, 1)
    if not graph.num_dst or not graph.num_src:
        raise ValueError(f"a BlockMask needs at least one receiver and one sender, got {graph!r}")
    tiling = tiles(graph, block_size)
    if tiling.num_tiles > MAX_TILES:
        raise ValueError(
            f"the lists of {tiling.num_tiles} tiles would take {32 * tiling.num_tiles / 2**30:.0f} GiB "
            f"for {graph!r}: use a larger block_size than {block_size}, or use tiling.tiles"
        )
    kinds = tiling.table()
    # FlexAttention does not mask full tiles, so tiles that extend beyond the graph must be partial.
    kinds[:, :, graph.num_dst // block_size :].clamp_(max=PARTIAL)
    kinds[..., graph.num_src // block_size :].clamp_(max=PARTIAL)
    lists = (*tile_list(kinds == PARTIAL), *tile_list(kinds == FULL_TILE))
    lengths = (graph.num_dst, graph.num_src)
    rule = on_device(graph.rule, torch.device(device))
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block_size, mask_mod=rule, seq_lengths=lengths)
    return mask.to(str(device))


def from_block_mask(mask: BlockMask) -> TokenGraph:
    """Return the graph of FlexAttention's ``BlockMask``.

    A pair is an edge if it is in a full block, or in a partial one where ``mask_mod`` is True. The
    graph varies by head or sample if the lists of the mask do. Raises TypeError for other objects.

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
    for num_blocks, columns in lists:
        # Only the first ``num_blocks`` columns of a row are blocks. The others are padding.
        is_block = torch.arange(columns.shape[-1], device="cpu") < num_blocks.cpu().unsqueeze(-1)
        columns = columns.cpu().long()
        tables.append(torch.zeros_like(columns).scatter_add(-1, columns, is_block.long()) > 0)
    batch, heads = (size if size > 1 else None for size in tables[0].shape[:2])
    arguments = (*mask.seq_lengths, heads, batch, "block_mask")
    tile_rules = (partial(rules.look_up_blocks, table, *mask.BLOCK_SIZE) for table in tables)
    partial_tiles, *full_tiles = (TokenGraph.from_rule(rule, *arguments) for rule in tile_rules)
    graph = TokenGraph.from_rule(on_device(mask.mask_mod, torch.device("cpu")), *arguments) & partial_tiles
    return replace(graph | full_tiles[0] if full_tiles else graph, name="block_mask")


class Varlen(NamedTuple):
    """Packed documents, in the form that ``torch.nn.attention.varlen`` and flash-attention expect.

    Document i holds the tokens ``cu_seqlens[i] .. cu_seqlens[i + 1] - 1``. A token attends to
    itself, to ``window[0]`` tokens before it and to ``window[1]`` tokens after it in the same
    document; -1 means all. Causal attention is ``(-1, 0)``.
    """

    cu_seqlens: Int[Tensor, " documents_plus_one"]
    max_seqlen: int
    window: tuple[int, int]


def to_varlen(graph: TokenGraph) -> Varlen:
    """Return the graph as packed documents with one window for all of them.

    No edge may join two documents. Each document must be causal, full or local. Raises ValueError
    for any other graph, and for one that is not square or varies by head or sample.

    >>> from gnn_attention import patterns
    >>> to_varlen(patterns.documents([3, 1, 2]))
    Varlen(cu_seqlens=tensor([0, 3, 4, 6], dtype=torch.int32), max_seqlen=3, window=(-1, 0))
    """
    _check_one_slice(graph)
    if graph.num_dst != graph.num_src:
        raise ValueError(f"varlen kernels need as many receivers as senders, got {graph!r}; see to_window")
    num_before, num_after = _count_before_and_after(graph, 0)
    # A document starts at a token with no earlier senders, after a token with no later senders.
    is_start = num_before == 0
    is_start[1:] &= num_after[:-1] == 0
    bounds = torch.cat([is_start.nonzero().flatten(), torch.tensor([graph.num_dst], device="cpu")])
    lengths = bounds.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
    left, right, max_seqlen = (int(x.max()) if len(lengths) else 0 for x in (num_before, num_after, lengths))
    rule = _make_band_rule(left, right, 0) & (look_up(document, dst) == look_up(document, src))
    if not graph.has_edges_of(RuleEdges(rule)):
        raise ValueError(f"{graph!r} is not a packing of documents with one window: see to_block_mask")
    window = _to_window_side(left, max_seqlen - 1), _to_window_side(right, max_seqlen - 1)
    return Varlen(bounds.to(torch.int32), max_seqlen, window)


def to_window(graph: TokenGraph) -> tuple[int, int]:
    """Return flash-attention's ``window_size=(left, right)``: tokens before and after, -1 for all.

    The last receiver is aligned with the last sender, as in flash-attention. ``window(n, w)`` is
    ``(w - 1, 0)``, because w counts the token itself. Raises ValueError for a graph that is not
    such a window, or that varies by head or sample.

    >>> from gnn_attention import patterns
    >>> to_window(patterns.window(64, 8)), to_window(patterns.causal(9).rows(6, 9))
    ((7, 0), (-1, 0))
    """
    _check_one_slice(graph)
    shift = graph.num_src - graph.num_dst
    num_before, num_after = _count_before_and_after(graph, shift)
    # The window of a receiver before all senders includes the gap up to the first sender.
    gap = (-1 - shift - torch.arange(graph.num_dst, device="cpu")).clamp(min=0)
    num_after = torch.where(num_after > 0, num_after + gap, 0)
    left, right = (int(counts.max()) if len(counts) else 0 for counts in (num_before, num_after))
    if not graph.has_edges_of(RuleEdges(_make_band_rule(left, right, shift))):
        raise ValueError(f"{graph!r} is not a window (left, right): see to_varlen, to_block_mask")
    return _to_window_side(left, graph.num_src - 1), _to_window_side(right, graph.num_dst - 1)


def _check_one_slice(graph: TokenGraph) -> None:
    checks.instance("graph", graph, TokenGraph)
    if graph.heads is not None or graph.batch is not None:
        raise ValueError(
            "varlen kernels and flash-attention's window hold one graph for all heads and samples, "
            f"got {graph!r}: get one with select(batch, head)"
        )


def _to_window_side(num_tokens: int, max_tokens: int) -> int:
    """Return ``num_tokens``, or -1 (no limit) if it is at least ``max_tokens``."""
    return -1 if num_tokens >= max_tokens else num_tokens


def _count_before_and_after(graph: TokenGraph, shift: int) -> tuple[Tensor, Tensor]:
    """For each receiver, count the senders before and those after position ``dst + shift``."""
    directions = (RuleEdges((src - dst - shift) * sign > 0) for sign in (-1, 1))
    sides = (CombinedEdges(operator.and_, (graph.edges, direction)) for direction in directions)
    num_before, num_after = (counting.in_degree(side, repr(graph), graph.shape4)[0, 0] for side in sides)
    return num_before, num_after


def _make_band_rule(left: int, right: int, shift: int) -> Any:
    return (dst + shift - src <= left) & (src - dst - shift <= right)
