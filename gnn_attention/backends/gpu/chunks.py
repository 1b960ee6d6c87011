"""Who works on which part of a block: long blocks are cut, so that no program works long after all others.

Hubs, sinks and global tokens make blocks that visit thousands of tiles where others visit ten. Each chunk of
such a block leaves a partial result in a workspace; these are added in the order of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.gpu.csr import ceil_div, edge_numbers
from gnn_attention.backends.gpu.formats import SIDE, Blocks
from gnn_attention.graph import TokenGraph, memoized

CHUNK = 4096  # other tokens, the least that are worth a program of their own
UNLIKE = 4  # a block is long if it visits so many times more than the average
BLOCKS = 128  # blocks of which a GPU works on all at once: the average of fewer is less
MOST_ROWS = 2**15  # of a workspace, for each sample and head

Form = tuple[Blocks, Blocks]


def blocks(
    ptr: Int[Tensor, " blocks_and_one"],
    other: Int[Tensor, " entries"],
    words: Int[Tensor, "..."],
    num_own: int,
    size: int,
    across: int,
    slots: Int[Tensor, " entries"] | None = None,
) -> Blocks:
    """The form whose block b visits the entries ``ptr[b] .. ptr[b + 1] - 1``, long blocks in chunks."""
    work = ptr.diff().long()
    each = _chunk(work, size, across)
    counts = ceil_div(work, each).clamp(min=1)
    block = torch.arange(len(work), device=ptr.device).repeat_interleave(counts)
    within = torch.arange(len(block), device=ptr.device) - (counts.cumsum(0) - counts)[block]
    low = within * each[block]
    high = torch.minimum(low + each[block], work[block])
    parts = torch.where(counts > 1, counts, 0)
    place = torch.where(parts[block] > 0, (parts.cumsum(0) - parts)[block] * size + within, -1)
    begin = ptr[block].long()
    items = torch.stack([block, begin + low, begin + high, place, parts[block]], 1).to(ptr.dtype)
    items = items[_heaviest_first(high - low)]
    nothing = other.new_zeros(0, dtype=torch.int32)
    long, long_first = _long(parts, num_own, size)
    slots, chunks = nothing if slots is None else slots, int(parts.sum())
    return Blocks(items, other, words, slots, long, long_first, nothing, nothing, chunks, size, across)


def with_edge_numbers(
    form: Form, graph: TokenGraph, device: torch.device, make: Callable[..., Form], size: int | None
) -> Form:
    """The form that ``make`` made, with ``first`` and ``position``, memoized."""
    first, out_first, position = memoized(_numbers, graph, device, make, size)
    return form[0]._replace(first=first), form[1]._replace(first=out_first, position=position)


def _numbers(
    graph: TokenGraph, device: torch.device, make: Callable[..., Form], size: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    receivers, senders = memoized(make, graph, device, size)
    first, out_first, position = edge_numbers(graph, device)
    src, dst = graph.edge_index.to(device)
    return _first(receivers, first, dst, src), _first(senders, out_first, src, dst), position


def _first(form: Blocks, ptr: Tensor, own: Tensor, other: Tensor) -> Int[Tensor, "items size"]:
    """Where the edges of each own token begin in each item: after those to tokens before the item's first."""
    block, low = form.items[:, 0].long(), form.items[:, 1].long()
    token = block[:, None] * form.size + torch.arange(form.size, device=ptr.device)
    begin = ptr[token.clamp(max=len(ptr) - 1)]
    if not form.chunks:
        return begin
    many = int(other.max()) + 1
    keys = (own * many + other).sort().values
    start = form.other[low.clamp(max=len(form.other) - 1)].long() * form.across
    found = torch.searchsorted(keys, token * many + start[:, None]).to(ptr.dtype)
    return torch.where(form.items[:, 3:4] < 0, begin, found)


def _chunk(work: Int[Tensor, " blocks"], size: int, across: int) -> Int[Tensor, " blocks"]:
    """How many entries each chunk of a block has: all unless it is long; there are few chunks in all."""
    limit = max(CHUNK // across, UNLIKE * int(work.sum()) // max(len(work), BLOCKS))
    while int(ceil_div(work[work > limit], limit).sum()) * size > MOST_ROWS:
        limit *= 2
    counts, step = ceil_div(work, limit).clamp(min=1), max(1, SIDE // across)
    # as many in each, in whole steps of a kernel
    return ceil_div(ceil_div(work, counts), step).clamp(min=1) * step


def _long(parts: Int[Tensor, " blocks"], num_own: int, size: int) -> tuple[Tensor, Tensor]:
    """The own tokens of long blocks, and where the results of their chunks begin."""
    block = parts.nonzero().squeeze(1)
    token = (block[:, None] * size + torch.arange(size, device=parts.device)).flatten()
    token = token[token < num_own]
    ends = parts[token // size].cumsum(0)
    return token, torch.cat([ends.new_zeros(1), ends]).int()


def _heaviest_first(work: Int[Tensor, " items"]) -> Int[Tensor, " items"]:
    """An order that begins with the items of most work, so that none starts last and alone.

    Neighbours of like work stay together, since they share other tokens.
    """
    octave = (work + 1).double().log2().floor()
    return octave.argsort(descending=True, stable=True)
