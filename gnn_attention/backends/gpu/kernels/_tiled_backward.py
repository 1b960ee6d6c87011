"""Gradients block by block: of q, before and bias over receivers, of k and v over senders; no atomics.

Weights are computed again from lse. A receiver whose lse is NaN gives nothing back. What is multiplied for
pairs that are no edges must be finite: k is cleaned where it spoiled a block, q and the gradients of
receivers that are spoiled are not read. A receiver whose gradient is NaN gives NaN to its senders.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnn_attention.backends.gpu.kernels import _common, _tiled


@triton.jit
def _pull(
    q, grad, base, delta, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t,
    BIAS, y_t, GRAD_BEFORE, GRAD_BIAS,
    scale, unit, cap, slope, stream, threshold, factor, dst_offset, src_offset, num_other,
    CAREFUL: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of logits, stored edge by edge where they are due, and summed over k for q."""
    STEP: tl.constexpr = 1 if PARTS else BN
    KNOWN: tl.constexpr = HAS_BEFORE or HAS_BIAS
    acc = tl.zeros([BM, DP], ACC)
    for at in range(lo, hi, STEP):
        other, there = _tiled.others_at(OTHER, at, hi, lane, num_other, PARTS, BN)
        slot, word = _tiled.words_at(WORDS, SLOTS, at, hi, row, lane, PARTS, SIZE, BN)
        k = _common.load_rows(K, other, k_t, there, D, DP, ALIGN)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
        on, number = there[None, :], begin[:, None]
        if KNOWN:
            on = _tiled.edges_in(word, row, lane, PARTS, BN)
            number, begin = _tiled.numbers_at(on, begin)
        s, bent = _tiled.logits_of(
            raw, own + dst_offset, other + src_offset, number, on, scale, cap, slope, BEFORE, x_t, BIAS, y_t,
            slot, word, row, lane, KNOWN, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS,
            BN, ACC,
        )  # fmt: skip
        p = _tiled.weights_of(s, unit, base[:, None])
        v = _common.load_rows(V, other, v_t, there, DV, DVP, ALIGN)
        pulled = tl.dot(grad, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        if HAS_DROPOUT:
            stay = _common.stays(stream, own[:, None] + dst_offset, other[None, :] + src_offset, threshold)
            pulled = tl.where(stay, pulled * factor, 0.0)
        ds = tl.where(p > 0.0, p * (pulled - delta[:, None]), 0.0)
        if HAS_BIAS:
            tl.store(GRAD_BIAS + number, ds, mask=on)
        if HAS_CAP:
            ds = ds * (1.0 - bent * bent)
        if HAS_BEFORE:
            tl.store(GRAD_BEFORE + number, ds, mask=on)
        if CAREFUL:
            k = tl.where(_common.is_finite(k), k, 0.0)
        ds = _common.round_to(ds, K.dtype.element_ty)
        acc = tl.dot(ds, k, acc, input_precision=PRECISION, out_dtype=ACC)
    return acc


@_common.jit
def receivers_backward(
    Q, K, V, GRAD, LSE, DELTA, GRAD_Q, GRAD_BEFORE, GRAD_BIAS, num_edges, PART, FLAGS, SLOPES, BEFORE, BIAS,
    SEED, ITEMS, OTHER, SLOTS, WORDS, FIRST,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t, x_b, x_h, x_t, y_b, y_h, y_t,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, heads, group, num_own, num_other, rows, first_slice,
    CAREFUL: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of q, before and bias for one block of receivers or a chunk, in one sample and head."""
    if CAREFUL:  # noqa: SIM102 - the one while compiling, the other while running
        if tl.load(_tiled.flag_at(FLAGS)) == 0:
            return
    slice_, sample, head, kv_head = _tiled.slice_of(first_slice, heads, group)
    item, row, own, live, lo, hi = _tiled.own_tokens(ITEMS, num_own, PARTS, SIZE, BM)
    lane = tl.arange(0, BN)
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    unit = _tiled.unit_of(scale, PLAIN) * _tiled.BINARY
    slope = tl.load(SLOPES + head).to(ACC) if HAS_SLOPES else scale
    stream = _common.stream_of(SEED, sample + first_sample, head + first_head) if HAS_DROPOUT else slice_
    begin = own
    if HAS_BEFORE or HAS_BIAS:
        begin = tl.load(FIRST + item * SIZE + row).to(tl.int64)
    K = _common.head_at(K, sample, kv_head, k_b, k_h, ALIGN)
    V = _common.head_at(V, sample, kv_head, v_b, v_h, ALIGN)
    BEFORE += sample * x_b + head * x_h
    BIAS += sample * y_b + head * y_h
    GRAD_BEFORE += slice_ * num_edges
    GRAD_BIAS += slice_ * num_edges
    q = _common.load_rows(_common.head_at(Q, sample, head, q_b, q_h, ALIGN), own, q_t, live, D, DP, ALIGN)
    grads = _common.head_at(GRAD, sample, head, g_b, g_h, ALIGN)
    grad = _common.load_rows(grads, own, g_t, live, DV, DVP, ALIGN)
    base = tl.load(LSE + slice_ * num_own + own, mask=live, other=float("inf")) * _tiled.BINARY
    delta = tl.load(DELTA + slice_ * num_own + own, mask=live, other=0.0)
    acc = _pull(
        q, grad, base, delta, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t,
        BIAS, y_t, GRAD_BEFORE, GRAD_BIAS, scale, unit, cap, slope, stream, threshold, factor, dst_offset,
        src_offset, num_other, CAREFUL, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, HAS_DROPOUT,
        D, DP, DV, DVP, ALIGN, SIZE, BM, BN, ACC, PRECISION,
    )  # fmt: skip
    if not CAREFUL:
        tl.store(_tiled.flag_at(FLAGS), _tiled.is_spoiled(acc).to(tl.int8))
    if _tiled.is_chunk(ITEMS, item):
        place = _tiled.places_of(ITEMS, item, row, rows)
        _tiled.store_rows(PART, place * D, acc * scale, live, D, DP, ALIGN)
    else:
        found = _common.head_at(GRAD_Q, sample, head, o_b, o_h, ALIGN)
        _tiled.store_rows(found, own * o_t, acc * scale, live, D, DP, ALIGN)


@_common.jit
def senders_backward(
    Q, K, V, GRAD, LSE, DELTA, GRAD_K, GRAD_V, POSITION, PART_K, PART_V, SLOPES, BEFORE, BIAS, SEED, ITEMS,
    OTHER, SLOTS, WORDS, FIRST,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t, u_b, u_h, u_t, x_b, x_h, x_t,
    y_b, y_h, y_t,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, heads, group, num_own, num_other, rows, first_slice,
    PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ALIGN: tl.constexpr, SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v for one block of senders and one key/value head, its query heads in order."""
    STEP: tl.constexpr = 1 if PARTS else BN
    KNOWN: tl.constexpr = HAS_BEFORE or HAS_BIAS
    slice_, sample, kv_head, _ = _tiled.slice_of(first_slice, heads // group, 1)
    item, row, own, live, lo, hi = _tiled.own_tokens(ITEMS, num_own, PARTS, SIZE, BM)
    lane = tl.arange(0, BN)
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    unit = _tiled.unit_of(scale, PLAIN) * _tiled.BINARY
    k = _common.load_rows(_common.head_at(K, sample, kv_head, k_b, k_h, ALIGN), own, k_t, live, D, DP, ALIGN)
    values = _common.head_at(V, sample, kv_head, v_b, v_h, ALIGN)
    v = _common.load_rows(values, own, v_t, live, DV, DVP, ALIGN)
    for_k = tl.zeros([BM, DP], ACC)
    for_v = tl.zeros([BM, DVP], ACC)
    for member in range(group):
        head = kv_head * group + member
        first = (sample * heads + head) * num_other
        slope = tl.load(SLOPES + head).to(ACC) if HAS_SLOPES else scale
        stream = _common.stream_of(SEED, sample + first_sample, head + first_head) if HAS_DROPOUT else slice_
        begin = own
        if KNOWN:
            begin = tl.load(FIRST + item * SIZE + row).to(tl.int64)
        for at in range(lo, hi, STEP):
            other, there = _tiled.others_at(OTHER, at, hi, lane, num_other, PARTS, BN)
            slot, word = _tiled.words_at(WORDS, SLOTS, at, hi, row, lane, PARTS, SIZE, BN)
            base = tl.load(LSE + first + other, mask=there, other=float("inf"))
            delta = tl.load(DELTA + first + other, mask=there, other=0.0)
            sound = there & _common.is_finite(base) & _common.is_finite(delta)
            queries = _common.head_at(Q, sample, head, q_b, q_h, ALIGN)
            q = _common.load_rows(queries, other, q_t, sound, D, DP, ALIGN)
            raw = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=ACC)
            on, number = there[None, :], begin[:, None]
            if KNOWN:
                on = _tiled.edges_in(word, row, lane, PARTS, BN)
                number, begin = _tiled.numbers_at(on, begin)
                number = tl.load(POSITION + number, mask=on, other=0).to(tl.int64)
            s, bent = _tiled.logits_of(
                raw, own + src_offset, other + dst_offset, number, on, scale, cap, slope,
                BEFORE + sample * x_b + head * x_h, x_t, BIAS + sample * y_b + head * y_h, y_t, slot, word,
                row, lane, KNOWN, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, BN, ACC,
            )  # fmt: skip
            p = _tiled.weights_of(s, unit, base[None, :] * _tiled.BINARY)
            grads = _common.head_at(GRAD, sample, head, g_b, g_h, ALIGN)
            grad = _common.load_rows(grads, other, g_t, sound, DV, DVP, ALIGN)
            pulled = tl.dot(v, tl.trans(grad), input_precision=PRECISION, out_dtype=ACC)
            weight = tl.where(p > 0.0, p + (delta - delta)[None, :], 0.0)
            if HAS_DROPOUT:
                dst, src = other[None, :] + dst_offset, own[:, None] + src_offset
                stay = _common.stays(stream, dst, src, threshold)
                weight = tl.where(stay, weight * factor, 0.0)
                pulled = tl.where(stay, pulled * factor, 0.0)
            weight = _common.round_to(weight, GRAD.dtype.element_ty)
            for_v = tl.dot(weight, grad, for_v, input_precision=PRECISION, out_dtype=ACC)
            ds = tl.where(p > 0.0, p * (pulled - delta[None, :]), 0.0)
            if HAS_CAP:
                ds = ds * (1.0 - bent * bent)
            ds = _common.round_to(ds, Q.dtype.element_ty)
            for_k = tl.dot(ds, q, for_k, input_precision=PRECISION, out_dtype=ACC)
    if _tiled.is_chunk(ITEMS, item):
        place = _tiled.places_of(ITEMS, item, row, rows)
        _tiled.store_rows(PART_K, place * D, for_k * scale, live, D, DP, ALIGN)
        _tiled.store_rows(PART_V, place * DV, for_v, live, DV, DVP, ALIGN)
    else:
        keys = _common.head_at(GRAD_K, sample, kv_head, o_b, o_h, ALIGN)
        _tiled.store_rows(keys, own * o_t, for_k * scale, live, D, DP, ALIGN)
        values = _common.head_at(GRAD_V, sample, kv_head, u_b, u_h, ALIGN)
        _tiled.store_rows(values, own * u_t, for_v, live, DV, DVP, ALIGN)
