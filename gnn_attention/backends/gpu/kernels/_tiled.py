"""What the kernels of blocks are made of: which tokens a block visits, which pairs are edges, logits.

A block of own tokens visits blocks of other tokens: receivers their senders, for the output and the gradient
of q; senders their receivers, for the gradients of k and v. The others of a window are listed one by one,
those of a tile (visited in ``PARTS`` steps, 0 for windows) are consecutive. Which pairs are edges is stored
in bits: in windows for each other token, in tiles for each own token.

Logits are in units: ``weight = exp(unit * logit - ...)``, where ``unit`` is the scale of a plain call.
Kernels take powers of 2, for which GPUs have an instruction: exponents are :data:`BINARY` times as large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnn_attention.backends.gpu.kernels import _common

BINARY = tl.constexpr(1.4426950408889634)  # log2(e)


@triton.jit
def slice_of(first_slice, heads, group):
    """(number, sample, head, key/value head): divided in 32 bits, since 64 take a subroutine."""
    index = tl.program_id(1) + first_slice
    head = index % heads
    number, sample = index.to(tl.int64), (index // heads).to(tl.int64)
    return number, sample, head.to(tl.int64), (head // group).to(tl.int64)


@triton.jit
def own_tokens(ITEMS, num_own, PARTS: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr):
    """(item, row in the block, token, whether it exists, first step, end); steps: tokens, parts of tiles."""
    item = (tl.program_id(0) // (SIZE // BM)).to(tl.int64)
    row = tl.program_id(0) % (SIZE // BM) * BM + tl.arange(0, BM)
    own = tl.load(ITEMS + item * 5).to(tl.int64) * SIZE + row
    lo, hi = tl.load(ITEMS + item * 5 + 1), tl.load(ITEMS + item * 5 + 2)
    if PARTS:
        lo, hi = lo * PARTS, hi * PARTS
    return item, row, own, own < num_own, lo, hi


@triton.jit
def is_chunk(ITEMS, item):
    """Whether an item leaves partial results in a workspace."""
    return tl.load(ITEMS + item * 5 + 3) >= 0


@triton.jit
def places_of(ITEMS, item, row, rows):
    """The own tokens of a chunk in the workspace, of which each slice has ``rows``."""
    place, step = tl.load(ITEMS + item * 5 + 3), tl.load(ITEMS + item * 5 + 4)
    return tl.program_id(1).to(tl.int64) * rows + place + row * step


@triton.jit
def flag_at(FLAGS):
    """Where a program leaves whether its sums are all finite, for the careful launch behind it."""
    return FLAGS + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def is_spoiled(acc):
    """1 if any number is not finite, else 0."""
    return tl.max(tl.max(tl.where(_common.is_finite(acc), 0, 1), 1), 0)


@triton.jit
def others_at(OTHER, at, stop, lane, num_other, PARTS: tl.constexpr, BN: tl.constexpr):
    """The numbers of the next other tokens, and whether there is one in each lane."""
    if PARTS:
        other = tl.load(OTHER + at // PARTS).to(tl.int64) * (PARTS * BN) + at % PARTS * BN + lane
        return other, other < num_other
    else:  # noqa: RET505 - both ends of a branch that is taken while compiling
        there = at + lane < stop
        return tl.load(OTHER + at + lane, mask=there, other=0).to(tl.int64), there


@triton.jit
def words_at(WORDS, SLOTS, at, stop, row, lane, PARTS: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr):
    """(slot, word): in bits, which pairs of a step are edges (:func:`edges_in`); in slot 0 of tiles, all.

    To be read in every step, before its products: then Triton fetches them a step ahead.
    """
    if PARTS:
        slot = tl.load(SLOTS + at // PARTS)
        word = tl.load(WORDS + slot.to(tl.int64) * SIZE + row)
        if BN <= 32:
            word = (word >> (at % PARTS * BN)).to(tl.int32)
        return slot, word
    else:  # noqa: RET505 - both ends of a branch that is taken while compiling
        return 1, tl.load(WORDS + at + lane, mask=at + lane < stop, other=0)


@triton.jit
def edges_in(word, row, lane, PARTS: tl.constexpr, BN: tl.constexpr):
    """Bool ``[BM, BN]``: which pairs of an own token (rows) and a visited one (lanes) are edges.

    For numbers of 64 bits, a GPU takes two instructions and registers.
    """
    if PARTS:
        half = word.to(tl.int32)[:, None]
        if BN > 32:
            half = tl.where((lane < 32)[None, :], half, (word >> 32).to(tl.int32)[:, None])
        return ((half >> (lane % 32)[None, :]) & 1) != 0
    else:  # noqa: RET505
        return ((word[None, :] >> row[:, None].to(word.dtype)) & 1) != 0


@triton.jit
def numbers_at(on, begin):
    """The number of each edge along its row, counted from ``begin``, and where the row goes on."""
    one = on.to(tl.int32)
    return begin[:, None] + (tl.cumsum(one, 1) - one).to(tl.int64), begin + tl.sum(one, 1).to(tl.int64)


@triton.jit
def unit_of(scale, PLAIN: tl.constexpr):
    """What a logit is multiplied by to be an exponent of e; without options that is the scale."""
    unit = scale * 0.0 + 1.0
    if PLAIN:
        unit = scale
    return unit


@triton.jit
def logits_of(
    raw, own, other, number, on, scale, cap, slope, BEFORE, x_t, BIAS, y_t, slot, word, row, lane,
    KNOWN: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """(logits from products, -inf where there is no edge, and what tanh gave); a full tile tests no bits."""
    s = raw
    if not PLAIN:
        s = raw * scale
    if HAS_SLOPES:
        s -= slope * tl.abs(own[:, None] - other[None, :]).to(ACC)
    if HAS_BEFORE:
        s += tl.load(BEFORE + number * x_t, mask=on, other=0.0).to(ACC)
    bent = s
    if HAS_CAP:
        bent = _common.tanh(s / cap)
        s = cap * bent
    if HAS_BIAS:
        s += tl.load(BIAS + number * y_t, mask=on, other=0.0).to(ACC)
    if KNOWN:
        s = tl.where(on, s, float("-inf"))
    elif PARTS:
        if slot > 0:
            s = tl.where(edges_in(word, row, lane, PARTS, BN), s, float("-inf"))
    else:
        s = tl.where(edges_in(word, row, lane, PARTS, BN), s, float("-inf"))
    return s, bent


@triton.jit
def weights_of(s, unit, base):
    """``2 ** (unit s - base)`` computed again; 0 where that is NaN: no in-edges, or a NaN among them."""
    p = tl.exp2(s * unit - base)
    return tl.where(p > 0.0, p, 0.0)


@triton.jit
def store_rows(base, rows, values, live, D: tl.constexpr, DP: tl.constexpr, ALIGN: tl.constexpr):
    """Write the rows of own tokens that are there; ``rows`` says where they begin."""
    channel = tl.arange(0, DP)
    place = base + tl.multiple_of(rows, ALIGN)[:, None] + channel[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=live[:, None] & (channel < D)[None, :])
