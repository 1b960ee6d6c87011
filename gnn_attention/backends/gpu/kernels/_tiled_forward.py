"""Outputs and lse, block of receivers by block of receivers, each added up by one program in a fixed order.

A product with a token that is not finite would spoil its whole block: one whose sums are not finite is
flagged, and visited again by a second launch, with care. There all other programs leave at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnn_attention.backends.gpu.kernels import _common, _tiled


@triton.jit
def _sums(
    q, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t, BIAS, y_t,
    scale, unit, cap, slope, stream, threshold, factor, dst_offset, src_offset, num_other,
    CAREFUL: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest logit of each receiver, and relative to it the sums of weights and of weighted values."""
    STEP: tl.constexpr = 1 if PARTS else BN
    KNOWN: tl.constexpr = HAS_BEFORE or HAS_BIAS or CAREFUL
    top = tl.full([BM], float("-inf"), ACC)
    total = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, DVP], ACC)
    for at in range(lo, hi, STEP):
        other, there = _tiled.others_at(OTHER, at, hi, lane, num_other, PARTS, BN)
        slot, word = _tiled.words_at(WORDS, SLOTS, at, hi, row, lane, PARTS, SIZE, BN)
        k = _common.load_rows(K, other, k_t, there, D, DP, ALIGN)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
        on, number = there[None, :], begin[:, None]
        if KNOWN:
            on = _tiled.edges_in(word, row, lane, PARTS, BN)
            number, begin = _tiled.numbers_at(on, begin)
        s, _ = _tiled.logits_of(
            raw, own + dst_offset, other + src_offset, number, on, scale, cap, slope, BEFORE, x_t, BIAS, y_t,
            slot, word, row, lane, KNOWN, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS,
            BN, ACC,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher) * unit
        p = tl.exp2(s * unit - base[:, None])
        shrunk = tl.exp2(top * unit - base)
        total = total * shrunk + tl.sum(p, 1)
        if HAS_DROPOUT:
            stay = _common.stays(stream, own[:, None] + dst_offset, other[None, :] + src_offset, threshold)
            p = tl.where(stay, p * factor, 0.0)
        v = _common.load_rows(V, other, v_t, there, DV, DVP, ALIGN)
        if CAREFUL:
            finite = _common.is_finite(v)
            bad = tl.max((on & (tl.min(finite.to(tl.int32), 1) == 0)[None, :]).to(tl.int32), 1)
            total = tl.where(bad > 0, float("nan"), total)
            v = tl.where(finite, v, 0.0)
        p, acc = _common.round_to(p, V.dtype.element_ty), acc * shrunk[:, None]
        acc = tl.dot(p, v, acc, input_precision=PRECISION, out_dtype=ACC)
        top = higher
    return top, total, acc


@_common.jit
def receivers(
    Q, K, V, OUT, LSE, PART, PART_LSE, FLAGS, SLOPES, BEFORE, BIAS, SEED, ITEMS, OTHER, SLOTS, WORDS, FIRST,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, x_b, x_h, x_t, y_b, y_h, y_t,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, heads, group, num_own, num_other, rows, first_slice,
    CAREFUL: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ALIGN: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs and lse of one block of receivers or a chunk of one, in one sample and head."""
    if CAREFUL:  # noqa: SIM102 - the one while compiling, the other while running
        if tl.load(_tiled.flag_at(FLAGS)) == 0:
            return
    slice_, sample, head, kv_head = _tiled.slice_of(first_slice, heads, group)
    item, row, own, live, lo, hi = _tiled.own_tokens(ITEMS, num_own, PARTS, SIZE, BM)
    lane = tl.arange(0, BN)
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    unit = _tiled.unit_of(scale, PLAIN)
    slope = tl.load(SLOPES + head).to(ACC) if HAS_SLOPES else scale
    stream = _common.stream_of(SEED, sample + first_sample, head + first_head) if HAS_DROPOUT else slice_
    begin = own
    if HAS_BEFORE or HAS_BIAS:
        begin = tl.load(FIRST + item * SIZE + row).to(tl.int64)
    K = _common.head_at(K, sample, kv_head, k_b, k_h, ALIGN)
    V = _common.head_at(V, sample, kv_head, v_b, v_h, ALIGN)
    BEFORE += sample * x_b + head * x_h
    BIAS += sample * y_b + head * y_h
    q = _common.load_rows(_common.head_at(Q, sample, head, q_b, q_h, ALIGN), own, q_t, live, D, DP, ALIGN)
    top, total, acc = _sums(
        q, row, own, lane, begin, lo, hi, K, V, k_t, v_t, OTHER, WORDS, SLOTS, BEFORE, x_t, BIAS, y_t, scale,
        unit * _tiled.BINARY, cap, slope, stream, threshold, factor, dst_offset, src_offset, num_other,
        CAREFUL, PARTS, PLAIN, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, HAS_DROPOUT, D, DP, DV, DVP, ALIGN,
        SIZE, BM, BN, ACC, PRECISION,
    )  # fmt: skip
    if not CAREFUL:
        tl.store(_tiled.flag_at(FLAGS), _tiled.is_spoiled(acc).to(tl.int8))
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top * unit + tl.log(total))
    out = acc / total[:, None]
    if _tiled.is_chunk(ITEMS, item):
        place = _tiled.places_of(ITEMS, item, row, rows)
        tl.store(PART_LSE + place, lse, mask=live)
        _tiled.store_rows(PART, place * DV, out, live, DV, DVP, ALIGN)
    else:
        tl.store(LSE + slice_ * num_own + own, lse, mask=live)
        outs = _common.head_at(OUT, sample, head, o_b, o_h, ALIGN)
        _tiled.store_rows(outs, own * o_t, out, live, DV, DVP, ALIGN)
