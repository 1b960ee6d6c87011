"""The kernels over rows of edges, forward and backward: what one program does.

A program has one row, a receiver or a sender, or one chunk of a long row (``CHUNKED``), and one head; it
takes ``EDGES`` edges at a time. The names of its arguments: ``q_b``, ``q_h``, ``q_t`` are strides of q by
sample, head and token, and so on; ``D`` and ``DV`` the channels, ``DP`` and ``DVP`` the powers of two on
which they lie; numbers in two parts add up to a float64.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton
import triton.language as tl

from gnn_attention.backends.gpu.kernels._common import gathered, is_finite, joined, stays, stream_of, tanh

__all__ = ["add_up", "backward_dst", "backward_src", "forward", "merge"]

STRIDES = [f"{x}_{axis}" for x in ("q", "k", "v", "o", "g", "dq", "dk", "dv", "r") for axis in "bht"]
EDGE_STRIDES = [f"{x}_{axis}" for x in ("before", "bias") for axis in "bhe"]
COUNTS = ["threshold", "limit", "num_dst", "kv_heads", "num_edges", "chunks"]
PLACES = ["dst_offset", "src_offset", "first_sample", "first_head", "first_slice"]


def _jit(function: Any) -> Any:
    """``triton.jit``, told not to compile again for other strides, sizes and places."""
    names = {*STRIDES, *EDGE_STRIDES, *COUNTS, *PLACES}
    return triton.jit(
        do_not_specialize=[name for name in inspect.signature(function).parameters if name in names]
    )(function)


@triton.jit
def _span(PTR, CHUNK_ROW, CHUNK_START, item, limit, CHUNKED: tl.constexpr):
    """(row, first entry, end) of an item, a row or a chunk; a long row that is not in chunks has no
    entries.
    """
    if CHUNKED:
        row = tl.load(CHUNK_ROW + item).to(tl.int64)
        low = tl.load(CHUNK_START + item)
        high = low + tl.minimum(
            tl.load(PTR + row + 1) - low, limit
        )  # the sum of low and limit may be too large
    else:
        row = item.to(tl.int64)
        low = tl.load(PTR + row)
        high = tl.load(PTR + row + 1)
        high = tl.where(high - low > limit, low, high)
    return row, low, high


@triton.jit
def _row(base, start, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr):
    """One row ``[PADDED]`` from ``start`` on, 0 beyond ``WIDTH``."""
    channel = tl.arange(0, PADDED)
    return tl.load(base + tl.multiple_of(start, ALIGN) + channel, mask=channel < WIDTH, other=0.0).to(ACC)


@triton.jit
def _write(base, start, row, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Its reverse."""
    channel = tl.arange(0, PADDED)
    tl.store(base + start + channel, row.to(base.dtype.element_ty), mask=channel < WIDTH)


@triton.jit
def _logit(
    dot, edge, ok, distance, slope, before, before_e, bias, bias_e, cap,
    SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, BEFORE: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(logit, its derivative by what softcap bends) of edges from their scaled products."""
    bend = tl.full(dot.shape, 1.0, ACC)
    if SLOPES:
        dot -= slope * tl.abs(distance).to(ACC)
    if BEFORE:
        dot += tl.load(before + edge.to(tl.int64) * before_e, mask=ok, other=0.0).to(ACC)
    if SOFTCAP:
        bent = tanh(dot / cap)
        dot = cap * bent
        bend = 1.0 - bent * bent
    if BIAS:
        dot += tl.load(bias + edge.to(tl.int64) * bias_e, mask=ok, other=0.0).to(ACC)
    return dot, bend


@_jit
def forward(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, SLOPE, BEFORE_OF, BIAS_OF, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, before_b, before_h, before_e, bias_b, bias_h, bias_e,
    scale, scale_low, cap, cap_low, threshold, keep, keep_low,
    limit, num_dst, kv_heads, dst_offset, src_offset, first_sample, first_head, first_slice,
    OUT, LSE, o_b, o_h, o_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr,
    ALIGN: tl.constexpr, ACC: tl.constexpr, CHUNKED: tl.constexpr, SLOPES: tl.constexpr, SOFTCAP: tl.constexpr,
    BEFORE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One receiver (or one chunk of its edges) and one head: the softmax over its in-edges, step by step."""
    scale = joined(scale, scale_low, ACC)
    cap = joined(cap, cap_low, ACC)
    keep = joined(keep, keep_low, ACC)
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, kv_head = slice_ // kv_heads, slice_ % kv_heads
    head = kv_head * GROUP + tl.program_id(0) % GROUP
    row, low, high = _span(PTR, CHUNK_ROW, CHUNK_START, tl.program_id(0) // GROUP, limit, CHUNKED)
    slope = 0.0
    if SLOPES:
        slope = tl.load(SLOPE + head).to(ACC)
    stream = tl.full((), 0, tl.uint64)
    if DROPOUT:
        stream = stream_of(SEED, sample + first_sample, head + first_head)
    query = _row(Q, sample * q_b + head * q_h + row * q_t, D, DP, ALIGN, ACC)
    keys = K + tl.multiple_of(sample * k_b + kv_head * k_h, ALIGN)
    values = V + tl.multiple_of(sample * v_b + kv_head * v_h, ALIGN)
    before = BEFORE_OF + sample * before_b + head * before_h if BEFORE else BEFORE_OF
    bias = BIAS_OF + sample * bias_b + head * bias_h if BIAS else BIAS_OF
    top = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    sums = tl.zeros([DVP], ACC)
    for start in range(low, high, EDGES):
        edge = start + tl.arange(0, EDGES)
        ok = edge < high
        src = tl.load(OTHERS + edge, mask=ok, other=0).to(tl.int64)
        key = gathered(keys, src, k_t, ok, D, DP, ALIGN).to(ACC)
        value = gathered(values, src, v_t, ok, DV, DVP, ALIGN).to(ACC)
        distance = (row + dst_offset) - (src + src_offset)
        logit, _ = _logit(
            tl.sum(query[None, :] * key, 1) * scale, edge, ok, distance, slope, before, before_e, bias, bias_e, cap,
            SLOPES, SOFTCAP, BEFORE, BIAS, ACC,
        )  # fmt: skip
        logit = tl.where(ok, logit, float("-inf"))
        higher = tl.maximum(top, tl.max(logit, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a bias of -inf may close every edge
        weight = tl.exp(logit - base)
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 0)
        if DROPOUT:
            weight = tl.where(
                stays(stream, row + dst_offset, src + src_offset, threshold), weight * keep, 0.0
            )
        sums = sums * shrink + tl.sum(weight[:, None] * value, 0)
        top = higher
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), top + tl.log(total))
    if CHUNKED:
        place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        _write(OUT, place * DV, sums / total, DV, DVP)
        tl.store(LSE + place, lse)
    else:
        _write(OUT, tl.multiple_of(sample * o_b + head * o_h + row * o_t, ALIGN), sums / total, DV, DVP)
        tl.store(LSE + (sample * kv_heads * GROUP + head) * num_dst + row, lse)


@_jit
def backward_dst(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, SLOPE, BEFORE_OF, BIAS_OF, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, before_b, before_h, before_e, bias_b, bias_h, bias_e,
    scale, scale_low, cap, cap_low, threshold, keep, keep_low,
    limit, num_dst, kv_heads, dst_offset, src_offset, first_sample, first_head, first_slice,
    GRAD, LSE, DELTA, DBEFORE, DBIAS, g_b, g_h, g_t, num_edges, DQ, dq_b, dq_h, dq_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr,
    ALIGN: tl.constexpr, ACC: tl.constexpr, CHUNKED: tl.constexpr, SLOPES: tl.constexpr, SOFTCAP: tl.constexpr,
    BEFORE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One receiver (or chunk) and one head: the gradients of its query and of what was given for its
    edges.
    """
    scale = joined(scale, scale_low, ACC)
    cap = joined(cap, cap_low, ACC)
    keep = joined(keep, keep_low, ACC)
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, kv_head = slice_ // kv_heads, slice_ % kv_heads
    head = kv_head * GROUP + tl.program_id(0) % GROUP
    row, low, high = _span(PTR, CHUNK_ROW, CHUNK_START, tl.program_id(0) // GROUP, limit, CHUNKED)
    slope = 0.0
    if SLOPES:
        slope = tl.load(SLOPE + head).to(ACC)
    stream = tl.full((), 0, tl.uint64)
    if DROPOUT:
        stream = stream_of(SEED, sample + first_sample, head + first_head)
    query = _row(Q, sample * q_b + head * q_h + row * q_t, D, DP, ALIGN, ACC)
    grad = _row(GRAD, sample * g_b + head * g_h + row * g_t, DV, DVP, ALIGN, ACC)
    one = sample * kv_heads * GROUP + head
    lse = tl.load(LSE + one * num_dst + row)
    delta = tl.load(DELTA + one * num_dst + row)
    end = tl.where(is_finite(lse), high, low)  # else no edge counts, but its gradient is written
    keys = K + tl.multiple_of(sample * k_b + kv_head * k_h, ALIGN)
    values = V + tl.multiple_of(sample * v_b + kv_head * v_h, ALIGN)
    before = BEFORE_OF + sample * before_b + head * before_h if BEFORE else BEFORE_OF
    bias = BIAS_OF + sample * bias_b + head * bias_h if BIAS else BIAS_OF
    sums = tl.zeros([DP], ACC)
    for start in range(low, high, EDGES):
        edge = start + tl.arange(0, EDGES)
        ok = edge < end
        src = tl.load(OTHERS + edge, mask=ok, other=0).to(tl.int64)
        key = gathered(keys, src, k_t, ok, D, DP, ALIGN).to(ACC)
        value = gathered(values, src, v_t, ok, DV, DVP, ALIGN).to(ACC)
        distance = (row + dst_offset) - (src + src_offset)
        logit, bend = _logit(
            tl.sum(query[None, :] * key, 1) * scale, edge, ok, distance, slope, before, before_e, bias, bias_e, cap,
            SLOPES, SOFTCAP, BEFORE, BIAS, ACC,
        )  # fmt: skip
        wanted = tl.sum(grad[None, :] * value, 1)
        if DROPOUT:
            wanted = tl.where(
                stays(stream, row + dst_offset, src + src_offset, threshold), wanted * keep, 0.0
            )
        slope_of = tl.where(ok, tl.exp(logit - lse) * (wanted - delta), 0.0)
        if BIAS:
            tl.store(DBIAS + one * num_edges + edge, slope_of, mask=edge < high)
        slope_of = slope_of * bend
        if BEFORE:
            tl.store(DBEFORE + one * num_edges + edge, slope_of, mask=edge < high)
        sums += tl.sum(slope_of[:, None] * key, 0)
    if CHUNKED:
        place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        _write(DQ, place * D, sums * scale, D, DP)
    else:
        _write(DQ, tl.multiple_of(sample * dq_b + head * dq_h + row * dq_t, ALIGN), sums * scale, D, DP)


@_jit
def backward_src(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, SLOPE, BEFORE_OF, BIAS_OF, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, before_b, before_h, before_e, bias_b, bias_h, bias_e,
    scale, scale_low, cap, cap_low, threshold, keep, keep_low,
    limit, num_dst, kv_heads, dst_offset, src_offset, first_sample, first_head, first_slice,
    GRAD, LSE, DELTA, EDGE, g_b, g_h, g_t, DK, DVAL, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr,
    ALIGN: tl.constexpr, ACC: tl.constexpr, CHUNKED: tl.constexpr, SLOPES: tl.constexpr, SOFTCAP: tl.constexpr,
    BEFORE: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One sender (or chunk) and one key/value head: the gradients of its key and value, from all heads of the
    group.
    """
    scale = joined(scale, scale_low, ACC)
    cap = joined(cap, cap_low, ACC)
    keep = joined(keep, keep_low, ACC)
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, kv_head = slice_ // kv_heads, slice_ % kv_heads
    row, low, high = _span(PTR, CHUNK_ROW, CHUNK_START, tl.program_id(0), limit, CHUNKED)
    key = _row(K, sample * k_b + kv_head * k_h + row * k_t, D, DP, ALIGN, ACC)
    value = _row(V, sample * v_b + kv_head * v_h + row * v_t, DV, DVP, ALIGN, ACC)
    key_sums = tl.zeros([DP], ACC)
    value_sums = tl.zeros([DVP], ACC)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = 0.0
        if SLOPES:
            slope = tl.load(SLOPE + head).to(ACC)
        stream = tl.full((), 0, tl.uint64)
        if DROPOUT:
            stream = stream_of(SEED, sample + first_sample, head + first_head)
        queries = Q + tl.multiple_of(sample * q_b + head * q_h, ALIGN)
        grads = GRAD + tl.multiple_of(sample * g_b + head * g_h, ALIGN)
        before = BEFORE_OF + sample * before_b + head * before_h if BEFORE else BEFORE_OF
        bias = BIAS_OF + sample * bias_b + head * bias_h if BIAS else BIAS_OF
        one = sample * kv_heads * GROUP + head
        for start in range(low, high, EDGES):
            entry = start + tl.arange(0, EDGES)
            ok = entry < high
            dst = tl.load(OTHERS + entry, mask=ok, other=0).to(tl.int64)
            lse = tl.load(LSE + one * num_dst + dst, mask=ok, other=float("inf"))
            delta = tl.load(DELTA + one * num_dst + dst, mask=ok, other=0.0)
            ok = ok & is_finite(lse)
            edge = entry
            if BEFORE or BIAS:
                edge = tl.load(EDGE + entry, mask=ok, other=0)
            query = gathered(queries, dst, q_t, ok, D, DP, ALIGN).to(ACC)
            grad = gathered(grads, dst, g_t, ok, DV, DVP, ALIGN).to(ACC)
            distance = (dst + dst_offset) - (row + src_offset)
            logit, bend = _logit(
                tl.sum(query * key[None, :], 1) * scale, edge, ok, distance, slope, before, before_e, bias, bias_e, cap,
                SLOPES, SOFTCAP, BEFORE, BIAS, ACC,
            )  # fmt: skip
            weight = tl.where(ok, tl.exp(logit - lse), 0.0)
            wanted = tl.sum(grad * value[None, :], 1)
            passed = weight
            if DROPOUT:
                kept = stays(stream, dst + dst_offset, row + src_offset, threshold)
                wanted = tl.where(kept, wanted * keep, 0.0)
                passed = tl.where(kept, weight * keep, 0.0)
            slope_of = tl.where(ok, weight * (wanted - delta) * bend, 0.0)
            key_sums += tl.sum(slope_of[:, None] * query, 0)
            value_sums += tl.sum(passed[:, None] * grad, 0)
    if CHUNKED:
        place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        _write(DK, place * D, key_sums * scale, D, DP)
        _write(DVAL, place * DV, value_sums, DV, DVP)
    else:
        _write(
            DK, tl.multiple_of(sample * dk_b + kv_head * dk_h + row * dk_t, ALIGN), key_sums * scale, D, DP
        )
        _write(DVAL, tl.multiple_of(sample * dv_b + kv_head * dv_h + row * dv_t, ALIGN), value_sums, DV, DVP)


@_jit
def merge(
    PART, PART_LSE, OUT, LSE, o_b, o_h, o_t, LONG, FIRST, first_slice, kv_heads, num_dst, chunks,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One long receiver and head: the results of its chunks as one, in the order of the list."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, head = slice_ // kv_heads, (slice_ % kv_heads) * GROUP + tl.program_id(0) % GROUP
    item = tl.program_id(0) // GROUP
    row = tl.load(LONG + item).to(tl.int64)
    low, high = tl.load(FIRST + item), tl.load(FIRST + item + 1)
    top = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    sums = tl.zeros([PADDED], ACC)
    for start in range(low, high, TOGETHER):
        chunk = start + tl.arange(0, TOGETHER)
        ok = chunk < high
        place = tl.program_id(1).to(tl.int64) * chunks + chunk * GROUP + tl.program_id(0) % GROUP
        part_lse = tl.load(PART_LSE + place, mask=ok, other=float("-inf"))
        higher = tl.maximum(top, tl.max(part_lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(part_lse - base)
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(share, 0)
        sums = sums * shrink + tl.sum(share[:, None] * gathered(PART, place, WIDTH, ok, WIDTH, PADDED, 1), 0)
        top = higher
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    _write(OUT, sample * o_b + head * o_h + row * o_t, sums / total, WIDTH, PADDED)
    lse = tl.where(nothing, float("-inf"), top + tl.log(total))
    tl.store(LSE + (sample * kv_heads * GROUP + head) * num_dst + row, lse)


@_jit
def add_up(
    PART, RESULT, r_b, r_h, r_t, LONG, FIRST, first_slice, kv_heads, num_dst, chunks,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One long row and head: the sum of the gradients of its chunks, in the order of the list."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, head = slice_ // kv_heads, (slice_ % kv_heads) * GROUP + tl.program_id(0) % GROUP
    item = tl.program_id(0) // GROUP
    row = tl.load(LONG + item).to(tl.int64)
    low, high = tl.load(FIRST + item), tl.load(FIRST + item + 1)
    sums = tl.zeros([PADDED], ACC)
    for start in range(low, high, TOGETHER):
        chunk = start + tl.arange(0, TOGETHER)
        place = tl.program_id(1).to(tl.int64) * chunks + chunk * GROUP + tl.program_id(0) % GROUP
        sums += tl.sum(gathered(PART, place, WIDTH, chunk < high, WIDTH, PADDED, 1), 0)
    _write(RESULT, sample * r_b + head * r_h + row * r_t, sums, WIDTH, PADDED)
