"""Outputs and lse, block of receivers by block of receivers: every one has one owner, who adds in a fixed
order.

A product with a token that is not finite would spoil its whole block: one whose sums are not finite is
visited again, with care.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnn_attention.backends.gpu.kernels._common import gathered, is_finite, narrowed, stays, stream_of, tanh
from gnn_attention.backends.gpu.kernels._tiled import (
    SCALARS,
    before_cap,
    edges_at,
    entries,
    numbers_at,
    off_edges,
    others_at,
    places,
    unit_of,
    whereabouts,
    whole,
)

__all__ = ["receivers"]


@triton.jit
def _sums(
    q, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t, BIAS, y_t,
    scale, unit, cap, slope, stream, threshold, keep, dst_offset, src_offset, num_other,
    CAREFUL: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest logit of each receiver, and the sums over its senders of weights and weighted values,
    relative to it.
    """
    STEP: tl.constexpr = 1 if PARTS else BN
    KNOWN: tl.constexpr = HAS_BEFORE or HAS_BIAS or CAREFUL
    top = tl.full([BM], float("-inf"), ACC)
    total = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, VALUE_PADDED], ACC)
    for at in range(lo, hi, STEP):
        other, there = others_at(OTHER, at, hi, lane, num_other, PARTS, BN)
        k = gathered(K, other, k_t, there, WIDTH, PADDED, ALIGN)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
        on, number = there[None, :], begin[:, None]
        if KNOWN:
            on = edges_at(WORDS, SLOTS, at, hi, row, lane, PARTS, SIZE, BN)
            number, begin = numbers_at(on, begin)
        s = before_cap(
            raw,
            own + dst_offset,
            other + src_offset,
            slope,
            BEFORE,
            number * x_t,
            on,
            scale,
            PLAIN,
            HAS_SLOPES,
            HAS_BEFORE,
        )
        if HAS_CAP:
            s = cap * tanh(s / cap)
        if HAS_BIAS:
            s += tl.load(BIAS + number * y_t, mask=on, other=0.0).to(ACC)
        s = off_edges(s, on, WORDS, SLOTS, at, hi, row, lane, PARTS, KNOWN, SIZE, BN)
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher) * unit
        p = tl.exp(s * unit - base[:, None])
        shrunk = tl.exp(top * unit - base)
        total = total * shrunk + tl.sum(p, 1)
        if HAS_DROPOUT:
            p = tl.where(
                stays(stream, own[:, None] + dst_offset, other[None, :] + src_offset, threshold),
                p * keep,
                0.0,
            )
        v = gathered(V, other, v_t, there, VALUE, VALUE_PADDED, ALIGN)
        if CAREFUL:
            finite = is_finite(v)
            heard = tl.max((on & (tl.min(finite.to(tl.int32), 1) == 0)[None, :]).to(tl.int32), 1)
            total = tl.where(heard > 0, float("nan"), total)
            v = tl.where(finite, v, 0.0)
        acc = tl.dot(
            narrowed(p, V.dtype.element_ty),
            v,
            acc * shrunk[:, None],
            input_precision=PRECISION,
            out_dtype=ACC,
        )
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize=SCALARS)
def receivers(
    Q, K, V, OUT, LSE, SLOPES, BEFORE, BIAS, SEED, PTR, OTHER, SLOTS, WORDS, ORDER, FIRST,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, x_b, x_h, x_t, y_b, y_h, y_t,
    first_slice, heads, group, num_own, num_other, dst_offset, src_offset, first_sample, first_head,
    scale_high, scale_low, cap_high, cap_low, threshold, keep_high, keep_low,
    PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs and lse of one block of receivers, in one sample and head."""
    index = tl.program_id(1) + first_slice
    sample, head, kv_head = whereabouts(index, heads, group)
    slice_ = index.to(tl.int64)
    block = tl.load(ORDER + tl.program_id(0) // (SIZE // BM)).to(tl.int64)
    row, lane = tl.program_id(0) % (SIZE // BM) * BM + tl.arange(0, BM), tl.arange(0, BN)
    own = block * SIZE + row
    live = own < num_own
    scale = whole(scale_high, scale_low, ACC)
    cap = whole(cap_high, cap_low, ACC)
    keep = whole(keep_high, keep_low, ACC)
    unit = unit_of(scale, PLAIN)
    slope = tl.load(SLOPES + head).to(ACC) if HAS_SLOPES else scale
    stream = stream_of(SEED, sample + first_sample, head + first_head) if HAS_DROPOUT else slice_
    begin = own
    if HAS_BEFORE or HAS_BIAS:
        begin = tl.load(FIRST + own, mask=live, other=0).to(tl.int64)
    lo, hi = entries(PTR, block, PARTS, BN)
    K += tl.multiple_of(sample * k_b + kv_head * k_h, ALIGN)
    V += tl.multiple_of(sample * v_b + kv_head * v_h, ALIGN)
    BEFORE += sample * x_b + head * x_h
    BIAS += sample * y_b + head * y_h
    q = gathered(Q + tl.multiple_of(sample * q_b + head * q_h, ALIGN), own, q_t, live, WIDTH, PADDED, ALIGN)
    top, total, acc = _sums(
        q, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t, BIAS, y_t,
        scale, unit, cap, slope, stream, threshold, keep, dst_offset, src_offset, num_other,
        False, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, HAS_DROPOUT,
        WIDTH, PADDED, VALUE, VALUE_PADDED, ALIGN, SIZE, BM, BN, ACC, PRECISION,
    )  # fmt: skip
    if tl.max(tl.max(tl.where(is_finite(acc), 0, 1), 1), 0) > 0:
        top, total, acc = _sums(
            q, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t, BIAS, y_t,
            scale, unit, cap, slope, stream, threshold, keep, dst_offset, src_offset, num_other,
            True, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, HAS_DROPOUT,
            WIDTH, PADDED, VALUE, VALUE_PADDED, ALIGN, SIZE, BM, BN, ACC, PRECISION,
        )  # fmt: skip
    deaf = total == 0.0
    total = tl.where(deaf, 1.0, total)
    lse = tl.where(deaf, float("-inf"), top * unit + tl.log(total))
    tl.store(LSE + slice_ * num_own + own, lse, mask=live)
    channel = tl.arange(0, VALUE_PADDED)
    place = places(OUT, sample * o_b + head * o_h, own * o_t, channel, ALIGN)
    tl.store(
        place,
        (acc / total[:, None]).to(OUT.dtype.element_ty),
        mask=live[:, None] & (channel < VALUE)[None, :],
    )
