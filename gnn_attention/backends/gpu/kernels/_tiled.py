"""What the kernels that go block by block are made of: which others a block visits, which pairs are edges,
and what a pair gives.

A block of own tokens visits blocks of other tokens: receivers their senders, for the output and the gradient
of q; senders their receivers, for the gradients of k and v. The others of a window are listed one by one,
those of a tile (visited in ``PARTS`` steps, 0 for windows) are tokens in a row. Which pairs are edges is told
in bits, in windows for each other token, in tiles for each own token.

Logits are counted in units: ``weight = exp(unit * logit - ...)``, where ``unit`` holds the scale of a plain
call.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "SCALARS",
    "before_cap",
    "edges_at",
    "entries",
    "masses",
    "numbers_at",
    "off_edges",
    "others_at",
    "places",
]
__all__ += ["unit_of", "whereabouts", "whole"]

SCALARS = ["first_slice", "heads", "group", "num_own", "num_other", "num_edges", "threshold"]
SCALARS += ["dst_offset", "src_offset", "first_sample", "first_head"]
SCALARS += [f"{name}_{axis}" for name in "qkvoguxy" for axis in "bht"]  # strides


@triton.jit
def whereabouts(index, heads, group):
    """The sample, the head and its key/value head of a slice: divided in 32 bits, since 64 take a
    subroutine.
    """
    head = index % heads
    return (index // heads).to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)


@triton.jit
def places(base, slice_, rows, channel, ALIGN: tl.constexpr):
    """Where the channels of rows are."""
    return base + tl.multiple_of(slice_, ALIGN) + tl.multiple_of(rows, ALIGN)[:, None] + channel[None, :]


@triton.jit
def entries(PTR, block, PARTS: tl.constexpr, BN: tl.constexpr):
    """The first and the last step of a block, in tokens of a window or parts of tiles."""
    lo, hi = tl.load(PTR + block), tl.load(PTR + block + 1)
    if PARTS:
        lo, hi = lo * PARTS, hi * PARTS
    return lo, hi


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
def edges_at(WORDS, SLOTS, at, stop, row, lane, PARTS: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr):
    """Bool ``[BM, BN]``: which pairs of an own token (rows) and a visited one (lanes) are edges."""
    if PARTS:
        word = tl.load(WORDS + tl.load(SLOTS + at // PARTS).to(tl.int64) * SIZE + row) >> (at % PARTS * BN)
        return ((word[:, None] >> lane[None, :].to(word.dtype)) & 1) != 0
    else:  # noqa: RET505
        word = tl.load(WORDS + at + lane, mask=at + lane < stop, other=0)
        return ((word[None, :] >> row[:, None].to(word.dtype)) & 1) != 0


@triton.jit
def off_edges(
    s, on, WORDS, SLOTS, at, stop, row, lane,
    PARTS: tl.constexpr, KNOWN: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Logits with -inf where there is no edge; a full tile is not looked into."""
    if KNOWN:
        s = tl.where(on, s, float("-inf"))
    elif PARTS:
        if tl.load(SLOTS + at // PARTS) > 0:
            s = tl.where(edges_at(WORDS, SLOTS, at, stop, row, lane, PARTS, SIZE, BN), s, float("-inf"))
    else:
        s = tl.where(edges_at(WORDS, SLOTS, at, stop, row, lane, PARTS, SIZE, BN), s, float("-inf"))
    return s


@triton.jit
def numbers_at(on, begin):
    """The number of each edge along its row, counted from ``begin``, and where the row goes on."""
    one = on.to(tl.int32)
    return begin[:, None] + (tl.cumsum(one, 1) - one).to(tl.int64), begin + tl.sum(one, 1).to(tl.int64)


@triton.jit
def whole(high, low, ACC: tl.constexpr):
    """A number from its two parts."""
    return tl.full((), 0.0, ACC) + high + low


@triton.jit
def unit_of(scale, PLAIN: tl.constexpr):
    """What a logit is multiplied by to be an exponent of e: one without options may wait for its scale until
    here.
    """
    unit = scale * 0.0 + 1.0
    if PLAIN:
        unit = scale
    return unit


@triton.jit
def before_cap(
    raw,
    own,
    other,
    slope,
    BEFORE,
    offset,
    on,
    scale,
    PLAIN: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):
    """``scale raw - slope |own - other| + before``; of a plain call the product itself, whose scale is in the
    unit.
    """
    x = raw
    if not PLAIN:
        x = raw * scale
    if HAS_SLOPES:
        x -= slope * tl.abs(own[:, None] - other[None, :]).to(raw.dtype)
    if HAS_BEFORE:
        x += tl.load(BEFORE + offset, mask=on, other=0.0).to(raw.dtype)
    return x


@triton.jit
def masses(s, unit, base):
    """Weights ``exp(unit s - base)`` computed again; where that is NaN, since the receiver heard nobody or
    NaN, 0.
    """
    p = tl.exp(s * unit - base)
    return tl.where(p > 0.0, p, 0.0)
