"""Gradients block by block: of q, before and bias over receivers, of k and v over senders; every sum has one
owner, no atomics.

Weights are computed again from lse. A receiver whose lse is NaN gives nothing back. What is multiplied for
pairs that are no edges must be finite: k is cleaned where it spoiled a block, q and the gradients of
receivers that are spoiled are not read. A receiver whose gradient is NaN gives NaN to its senders.
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
    masses,
    numbers_at,
    off_edges,
    others_at,
    places,
    unit_of,
    whereabouts,
    whole,
)

__all__ = ["receivers_backward", "senders_backward"]


@triton.jit
def _pull(
    q, grad, base, delta, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t, BIAS, y_t,
    GRAD_BEFORE, GRAD_BIAS, scale, unit, cap, slope, stream, threshold, keep, dst_offset, src_offset, num_other,
    CAREFUL: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits of a block of receivers: stored edge by edge where they are due, summed
    over k for q.
    """
    STEP: tl.constexpr = 1 if PARTS else BN
    KNOWN: tl.constexpr = HAS_BEFORE or HAS_BIAS
    acc = tl.zeros([BM, PADDED], ACC)
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
        turn = s
        if HAS_CAP:
            turn = tanh(s / cap)
            s = cap * turn
        if HAS_BIAS:
            s += tl.load(BIAS + number * y_t, mask=on, other=0.0).to(ACC)
        s = off_edges(s, on, WORDS, SLOTS, at, hi, row, lane, PARTS, KNOWN, SIZE, BN)
        p = masses(s, unit, base[:, None])
        v = gathered(V, other, v_t, there, VALUE, VALUE_PADDED, ALIGN)
        pulled = tl.dot(grad, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        if HAS_DROPOUT:
            stay = stays(stream, own[:, None] + dst_offset, other[None, :] + src_offset, threshold)
            pulled = tl.where(stay, pulled * keep, 0.0)
        ds = tl.where(p > 0.0, p * (pulled - delta[:, None]), 0.0)
        if HAS_BIAS:
            tl.store(GRAD_BIAS + number, ds, mask=on)
        if HAS_CAP:
            ds = ds * (1.0 - turn * turn)
        if HAS_BEFORE:
            tl.store(GRAD_BEFORE + number, ds, mask=on)
        if CAREFUL:
            k = tl.where(is_finite(k), k, 0.0)
        acc = tl.dot(narrowed(ds, K.dtype.element_ty), k, acc, input_precision=PRECISION, out_dtype=ACC)
    return acc


@triton.jit(do_not_specialize=SCALARS)
def receivers_backward(
    Q, K, V, GRAD, LSE, DELTA, GRAD_Q, GRAD_BEFORE, GRAD_BIAS, SLOPES, BEFORE, BIAS, SEED,
    PTR, OTHER, SLOTS, WORDS, ORDER, FIRST,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t, x_b, x_h, x_t, y_b, y_h, y_t,
    first_slice, heads, group, num_own, num_other, num_edges, dst_offset, src_offset, first_sample, first_head,
    scale_high, scale_low, cap_high, cap_low, threshold, keep_high, keep_low,
    PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of q for one block of receivers, in one sample and head, and of what is added to each of
    their edges.
    """
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
    GRAD_BEFORE += slice_ * num_edges
    GRAD_BIAS += slice_ * num_edges
    q = gathered(Q + tl.multiple_of(sample * q_b + head * q_h, ALIGN), own, q_t, live, WIDTH, PADDED, ALIGN)
    grad = gathered(
        GRAD + tl.multiple_of(sample * g_b + head * g_h, ALIGN), own, g_t, live, VALUE, VALUE_PADDED, ALIGN
    )
    base = tl.load(LSE + slice_ * num_own + own, mask=live, other=float("inf"))
    delta = tl.load(DELTA + slice_ * num_own + own, mask=live, other=0.0)
    acc = _pull(
        q, grad, base, delta, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t, BIAS, y_t,
        GRAD_BEFORE, GRAD_BIAS, scale, unit, cap, slope, stream, threshold, keep, dst_offset, src_offset, num_other,
        False, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, HAS_DROPOUT,
        WIDTH, PADDED, VALUE, VALUE_PADDED, ALIGN, SIZE, BM, BN, ACC, PRECISION,
    )  # fmt: skip
    if tl.max(tl.max(tl.where(is_finite(acc), 0, 1), 1), 0) > 0:
        acc = _pull(
            q, grad, base, delta, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t, BIAS, y_t,
            GRAD_BEFORE, GRAD_BIAS, scale, unit, cap, slope, stream, threshold, keep, dst_offset, src_offset, num_other,
            True, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, HAS_DROPOUT,
            WIDTH, PADDED, VALUE, VALUE_PADDED, ALIGN, SIZE, BM, BN, ACC, PRECISION,
        )  # fmt: skip
    channel = tl.arange(0, PADDED)
    place = places(GRAD_Q, sample * o_b + head * o_h, own * o_t, channel, ALIGN)
    tl.store(
        place, (acc * scale).to(GRAD_Q.dtype.element_ty), mask=live[:, None] & (channel < WIDTH)[None, :]
    )


@triton.jit(do_not_specialize=SCALARS)
def senders_backward(
    Q, K, V, GRAD, LSE, DELTA, GRAD_K, GRAD_V, SLOPES, BEFORE, BIAS, SEED, PTR, OTHER, SLOTS, WORDS, ORDER, FIRST, POSITION,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t, u_b, u_h, u_t, x_b, x_h, x_t, y_b, y_h, y_t,
    first_slice, heads, group, num_own, num_other, dst_offset, src_offset, first_sample, first_head,
    scale_high, scale_low, cap_high, cap_low, threshold, keep_high, keep_low,
    PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v for one block of senders, in one sample and key/value head, over its query
    heads in order.
    """
    STEP: tl.constexpr = 1 if PARTS else BN
    KNOWN: tl.constexpr = HAS_BEFORE or HAS_BIAS
    index = tl.program_id(1) + first_slice
    sample, kv_head, _ = whereabouts(index, heads // group, 1)
    slice_ = index.to(tl.int64)
    block = tl.load(ORDER + tl.program_id(0) // (SIZE // BM)).to(tl.int64)
    row, lane = tl.program_id(0) % (SIZE // BM) * BM + tl.arange(0, BM), tl.arange(0, BN)
    own = block * SIZE + row
    live = own < num_own
    scale = whole(scale_high, scale_low, ACC)
    cap = whole(cap_high, cap_low, ACC)
    keep = whole(keep_high, keep_low, ACC)
    unit = unit_of(scale, PLAIN)
    lo, hi = entries(PTR, block, PARTS, BN)
    k = gathered(
        K + tl.multiple_of(sample * k_b + kv_head * k_h, ALIGN), own, k_t, live, WIDTH, PADDED, ALIGN
    )
    v = gathered(
        V + tl.multiple_of(sample * v_b + kv_head * v_h, ALIGN), own, v_t, live, VALUE, VALUE_PADDED, ALIGN
    )
    for_k = tl.zeros([BM, PADDED], ACC)
    for_v = tl.zeros([BM, VALUE_PADDED], ACC)
    for member in range(group):
        head = kv_head * group + member
        heard = (sample * heads + head) * num_other
        slope = tl.load(SLOPES + head).to(ACC) if HAS_SLOPES else scale
        stream = stream_of(SEED, sample + first_sample, head + first_head) if HAS_DROPOUT else slice_
        begin = own
        if KNOWN:
            begin = tl.load(FIRST + own, mask=live, other=0).to(tl.int64)
        for at in range(lo, hi, STEP):
            other, there = others_at(OTHER, at, hi, lane, num_other, PARTS, BN)
            base = tl.load(LSE + heard + other, mask=there, other=float("inf"))
            delta = tl.load(DELTA + heard + other, mask=there, other=0.0)
            sound = there & is_finite(base) & is_finite(delta)
            q = gathered(
                Q + tl.multiple_of(sample * q_b + head * q_h, ALIGN), other, q_t, sound, WIDTH, PADDED, ALIGN
            )
            raw = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=ACC)
            on, number = there[None, :], begin[:, None]
            if KNOWN:
                on = edges_at(WORDS, SLOTS, at, hi, row, lane, PARTS, SIZE, BN)
                number, begin = numbers_at(on, begin)
                number = tl.load(POSITION + number, mask=on, other=0).to(tl.int64)
            s = before_cap(
                raw, own + src_offset, other + dst_offset, slope, BEFORE + sample * x_b + head * x_h, number * x_t, on,
                scale, PLAIN, HAS_SLOPES, HAS_BEFORE,
            )  # fmt: skip
            turn = s
            if HAS_CAP:
                turn = tanh(s / cap)
                s = cap * turn
            if HAS_BIAS:
                s += tl.load(BIAS + sample * y_b + head * y_h + number * y_t, mask=on, other=0.0).to(ACC)
            s = off_edges(s, on, WORDS, SLOTS, at, hi, row, lane, PARTS, KNOWN, SIZE, BN)
            p = masses(s, unit, base[None, :])
            grad = gathered(
                GRAD + tl.multiple_of(sample * g_b + head * g_h, ALIGN),
                other,
                g_t,
                sound,
                VALUE,
                VALUE_PADDED,
                ALIGN,
            )
            pulled = tl.dot(v, tl.trans(grad), input_precision=PRECISION, out_dtype=ACC)
            weight = tl.where(p > 0.0, p + (delta - delta)[None, :], 0.0)
            if HAS_DROPOUT:
                stay = stays(stream, other[None, :] + dst_offset, own[:, None] + src_offset, threshold)
                weight = tl.where(stay, weight * keep, 0.0)
                pulled = tl.where(stay, pulled * keep, 0.0)
            for_v = tl.dot(
                narrowed(weight, GRAD.dtype.element_ty), grad, for_v, input_precision=PRECISION, out_dtype=ACC
            )
            ds = tl.where(p > 0.0, p * (pulled - delta[None, :]), 0.0)
            if HAS_CAP:
                ds = ds * (1.0 - turn * turn)
            for_k = tl.dot(
                narrowed(ds, Q.dtype.element_ty), q, for_k, input_precision=PRECISION, out_dtype=ACC
            )
    channel = tl.arange(0, PADDED)
    place = places(GRAD_K, sample * o_b + kv_head * o_h, own * o_t, channel, ALIGN)
    tl.store(
        place, (for_k * scale).to(GRAD_K.dtype.element_ty), mask=live[:, None] & (channel < WIDTH)[None, :]
    )
    channel = tl.arange(0, VALUE_PADDED)
    place = places(GRAD_V, sample * u_b + kv_head * u_h, own * u_t, channel, ALIGN)
    tl.store(place, for_v.to(GRAD_V.dtype.element_ty), mask=live[:, None] & (channel < VALUE)[None, :])
