"""The kernels over rows of edges, forward and backward: what one program does.

A program has one row, a receiver or a sender, or one chunk of a long row (``CHUNKED``), and one head; it
takes ``EDGES`` edges at a time. ``q_b``, ``q_h``, ``q_t`` are the strides of q by sample, head and token, and
so on; ``D`` and ``DV`` the channels, ``DP`` and ``DVP`` the powers of two on which they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnn_attention.backends.gpu.kernels import _common


@triton.jit
def _place(
    PTR, CHUNK_ROW, CHUNK_START, limit, kv_heads, first_slice, GROUP: tl.constexpr, CHUNKED: tl.constexpr
):
    """(sample, key/value head, query head, row, first entry, end) of a program; a long row has no entries."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, kv_head = slice_ // kv_heads, slice_ % kv_heads
    head = kv_head * GROUP + tl.program_id(0) % GROUP
    item = tl.program_id(0) // GROUP
    if CHUNKED:
        row = tl.load(CHUNK_ROW + item).to(tl.int64)
        low = tl.load(CHUNK_START + item)
        # the sum of low and limit may be too large
        high = low + tl.minimum(tl.load(PTR + row + 1) - low, limit)
    else:
        row = item.to(tl.int64)
        low = tl.load(PTR + row)
        high = tl.load(PTR + row + 1)
        high = tl.where(high - low > limit, low, high)
    return sample, kv_head, head, row, low, high


@triton.jit
def _row(base, start, D: tl.constexpr, DP: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr):
    """One row ``[DP]`` from ``start`` on, 0 beyond ``D``."""
    channel = tl.arange(0, DP)
    return tl.load(base + tl.multiple_of(start, ALIGN) + channel, mask=channel < D, other=0.0).to(ACC)


@triton.jit
def _write(base, start, row, D: tl.constexpr, DP: tl.constexpr):
    """Its reverse."""
    channel = tl.arange(0, DP)
    tl.store(base + start + channel, row.to(base.dtype.element_ty), mask=channel < D)


@triton.jit
def _chunk_number():
    """Where the result of a chunk is in its workspace."""
    return tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _write_result(
    base, row, start, D: tl.constexpr, DP: tl.constexpr, ALIGN: tl.constexpr, CHUNKED: tl.constexpr
):
    """A row of the result at ``start``, or of the workspace."""
    if CHUNKED:
        _write(base, _chunk_number() * D, row, D, DP)
    else:
        _write(base, tl.multiple_of(start, ALIGN), row, D, DP)


@triton.jit
def _logit(
    dot, edge, ok, distance, slope, before, before_e, bias, bias_e, cap,
    HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """(logit, its derivative by what softcap bends) of edges from their scaled products."""
    bend = tl.full(dot.shape, 1.0, ACC)
    if HAS_SLOPES:
        dot -= slope * tl.abs(distance).to(ACC)
    if HAS_BEFORE:
        dot += tl.load(before + edge.to(tl.int64) * before_e, mask=ok, other=0.0).to(ACC)
    if HAS_CAP:
        bent = _common.tanh(dot / cap)
        dot = cap * bent
        bend = 1.0 - bent * bent
    if HAS_BIAS:
        dot += tl.load(bias + edge.to(tl.int64) * bias_e, mask=ok, other=0.0).to(ACC)
    return dot, bend


@triton.jit
def _of_head(
    SLOPES, SEED, BEFORE, BIAS, sample, head, x_b, x_h, y_b, y_h, first_sample, first_head,
    HAS_SLOPES: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """(slope, stream of dropout, before, bias) of a sample and head."""
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(SLOPES + head).to(ACC)
    stream = tl.full((), 0, tl.uint64)
    if HAS_DROPOUT:
        stream = _common.stream_of(SEED, sample + first_sample, head + first_head)
    before = BEFORE + sample * x_b + head * x_h if HAS_BEFORE else BEFORE
    bias = BIAS + sample * y_b + head * y_h if HAS_BIAS else BIAS
    return slope, stream, before, bias


@_common.jit
def forward(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, SLOPES, BEFORE, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, x_b, x_h, x_e, y_b, y_h, y_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, kv_heads, first_slice, OUT, LSE, o_b, o_h, o_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr, CHUNKED: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One receiver (or one chunk of its edges) and one head: the softmax over its in-edges, step by step."""
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    sample, kv_head, head, row, low, high = _place(
        PTR, CHUNK_ROW, CHUNK_START, limit, kv_heads, first_slice, GROUP, CHUNKED
    )
    slope, stream, before, bias = _of_head(
        SLOPES, SEED, BEFORE, BIAS, sample, head, x_b, x_h, y_b, y_h, first_sample, first_head, HAS_SLOPES,
        HAS_BEFORE, HAS_BIAS, HAS_DROPOUT, ACC,
    )  # fmt: skip
    query = _row(Q, sample * q_b + head * q_h + row * q_t, D, DP, ALIGN, ACC)
    keys = _common.head_at(K, sample, kv_head, k_b, k_h, ALIGN)
    values = _common.head_at(V, sample, kv_head, v_b, v_h, ALIGN)
    top = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    sums = tl.zeros([DVP], ACC)
    for start in range(low, high, EDGES):
        edge = start + tl.arange(0, EDGES)
        ok = edge < high
        src = tl.load(OTHERS + edge, mask=ok, other=0).to(tl.int64)
        key = _common.load_rows(keys, src, k_t, ok, D, DP, ALIGN).to(ACC)
        value = _common.load_rows(values, src, v_t, ok, DV, DVP, ALIGN).to(ACC)
        distance = (row + dst_offset) - (src + src_offset)
        logit, _ = _logit(
            tl.sum(query[None, :] * key, 1) * scale, edge, ok, distance, slope, before, x_e, bias, y_e, cap,
            HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, ACC,
        )  # fmt: skip
        logit = tl.where(ok, logit, float("-inf"))
        higher = tl.maximum(top, tl.max(logit, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a bias of -inf may close every edge
        weight = tl.exp(logit - base)
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 0)
        if HAS_DROPOUT:
            on = _common.stays(stream, row + dst_offset, src + src_offset, threshold)
            weight = tl.where(on, weight * factor, 0.0)
        sums = sums * shrink + tl.sum(weight[:, None] * value, 0)
        top = higher
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), top + tl.log(total))
    _write_result(OUT, sums / total, sample * o_b + head * o_h + row * o_t, DV, DVP, ALIGN, CHUNKED)
    if CHUNKED:
        tl.store(LSE + _chunk_number(), lse)
    else:
        tl.store(LSE + (sample * kv_heads * GROUP + head) * num_dst + row, lse)


@_common.jit
def backward_dst(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, SLOPES, BEFORE, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, x_b, x_h, x_e, y_b, y_h, y_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, kv_heads, first_slice, GRAD, LSE, DELTA, DBEFORE, DBIAS, g_b, g_h, g_t,
    num_edges, DQ, dq_b, dq_h, dq_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr, CHUNKED: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One receiver (or chunk) and one head: the gradients of its query and of the numbers of its edges."""
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    sample, kv_head, head, row, low, high = _place(
        PTR, CHUNK_ROW, CHUNK_START, limit, kv_heads, first_slice, GROUP, CHUNKED
    )
    slope, stream, before, bias = _of_head(
        SLOPES, SEED, BEFORE, BIAS, sample, head, x_b, x_h, y_b, y_h, first_sample, first_head, HAS_SLOPES,
        HAS_BEFORE, HAS_BIAS, HAS_DROPOUT, ACC,
    )  # fmt: skip
    query = _row(Q, sample * q_b + head * q_h + row * q_t, D, DP, ALIGN, ACC)
    grad = _row(GRAD, sample * g_b + head * g_h + row * g_t, DV, DVP, ALIGN, ACC)
    one = sample * kv_heads * GROUP + head
    lse = tl.load(LSE + one * num_dst + row)
    delta = tl.load(DELTA + one * num_dst + row)
    end = tl.where(_common.is_finite(lse), high, low)  # else no edge counts, but its gradient is written
    keys = _common.head_at(K, sample, kv_head, k_b, k_h, ALIGN)
    values = _common.head_at(V, sample, kv_head, v_b, v_h, ALIGN)
    sums = tl.zeros([DP], ACC)
    for start in range(low, high, EDGES):
        edge = start + tl.arange(0, EDGES)
        ok = edge < end
        src = tl.load(OTHERS + edge, mask=ok, other=0).to(tl.int64)
        key = _common.load_rows(keys, src, k_t, ok, D, DP, ALIGN).to(ACC)
        value = _common.load_rows(values, src, v_t, ok, DV, DVP, ALIGN).to(ACC)
        distance = (row + dst_offset) - (src + src_offset)
        logit, bend = _logit(
            tl.sum(query[None, :] * key, 1) * scale, edge, ok, distance, slope, before, x_e, bias, y_e, cap,
            HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, ACC,
        )  # fmt: skip
        wanted = tl.sum(grad[None, :] * value, 1)
        if HAS_DROPOUT:
            on = _common.stays(stream, row + dst_offset, src + src_offset, threshold)
            wanted = tl.where(on, wanted * factor, 0.0)
        slope_of = tl.where(ok, tl.exp(logit - lse) * (wanted - delta), 0.0)
        if HAS_BIAS:
            tl.store(DBIAS + one * num_edges + edge, slope_of, mask=edge < high)
        slope_of = slope_of * bend
        if HAS_BEFORE:
            tl.store(DBEFORE + one * num_edges + edge, slope_of, mask=edge < high)
        sums += tl.sum(slope_of[:, None] * key, 0)
    _write_result(DQ, sums * scale, sample * dq_b + head * dq_h + row * dq_t, D, DP, ALIGN, CHUNKED)


@_common.jit
def backward_src(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, SLOPES, BEFORE, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, x_b, x_h, x_e, y_b, y_h, y_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, kv_heads, first_slice, GRAD, LSE, DELTA, POSITION, g_b, g_h, g_t, DK, DVAL,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr, CHUNKED: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One sender (or chunk) and one key/value head: the gradients of its key and value."""
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    sample, kv_head, _, row, low, high = _place(
        PTR, CHUNK_ROW, CHUNK_START, limit, kv_heads, first_slice, 1, CHUNKED
    )
    key = _row(K, sample * k_b + kv_head * k_h + row * k_t, D, DP, ALIGN, ACC)
    value = _row(V, sample * v_b + kv_head * v_h + row * v_t, DV, DVP, ALIGN, ACC)
    key_sums = tl.zeros([DP], ACC)
    value_sums = tl.zeros([DVP], ACC)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope, stream, before, bias = _of_head(
            SLOPES, SEED, BEFORE, BIAS, sample, head, x_b, x_h, y_b, y_h, first_sample, first_head,
            HAS_SLOPES, HAS_BEFORE, HAS_BIAS, HAS_DROPOUT, ACC,
        )  # fmt: skip
        queries = _common.head_at(Q, sample, head, q_b, q_h, ALIGN)
        grads = _common.head_at(GRAD, sample, head, g_b, g_h, ALIGN)
        one = sample * kv_heads * GROUP + head
        for start in range(low, high, EDGES):
            entry = start + tl.arange(0, EDGES)
            ok = entry < high
            dst = tl.load(OTHERS + entry, mask=ok, other=0).to(tl.int64)
            lse = tl.load(LSE + one * num_dst + dst, mask=ok, other=float("inf"))
            delta = tl.load(DELTA + one * num_dst + dst, mask=ok, other=0.0)
            ok = ok & _common.is_finite(lse)
            edge = entry
            if HAS_BEFORE or HAS_BIAS:
                edge = tl.load(POSITION + entry, mask=ok, other=0)
            query = _common.load_rows(queries, dst, q_t, ok, D, DP, ALIGN).to(ACC)
            grad = _common.load_rows(grads, dst, g_t, ok, DV, DVP, ALIGN).to(ACC)
            distance = (dst + dst_offset) - (row + src_offset)
            logit, bend = _logit(
                tl.sum(query * key[None, :], 1) * scale, edge, ok, distance, slope, before, x_e, bias, y_e,
                cap, HAS_SLOPES, HAS_CAP, HAS_BEFORE, HAS_BIAS, ACC,
            )  # fmt: skip
            weight = tl.where(ok, tl.exp(logit - lse), 0.0)
            wanted = tl.sum(grad * value[None, :], 1)
            passed = weight
            if HAS_DROPOUT:
                on = _common.stays(stream, dst + dst_offset, row + src_offset, threshold)
                wanted = tl.where(on, wanted * factor, 0.0)
                passed = tl.where(on, weight * factor, 0.0)
            slope_of = tl.where(ok, weight * (wanted - delta) * bend, 0.0)
            key_sums += tl.sum(slope_of[:, None] * query, 0)
            value_sums += tl.sum(passed[:, None] * grad, 0)
    _write_result(DK, key_sums * scale, sample * dk_b + kv_head * dk_h + row * dk_t, D, DP, ALIGN, CHUNKED)
    _write_result(DVAL, value_sums, sample * dv_b + kv_head * dv_h + row * dv_t, DV, DVP, ALIGN, CHUNKED)


@triton.jit
def _long_row(LONG, FIRST, first_slice, kv_heads, GROUP: tl.constexpr):
    """(sample, head, row, first chunk, end) of a program that adds the chunks of a long row."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, head = slice_ // kv_heads, (slice_ % kv_heads) * GROUP + tl.program_id(0) % GROUP
    item = tl.program_id(0) // GROUP
    return sample, head, tl.load(LONG + item).to(tl.int64), tl.load(FIRST + item), tl.load(FIRST + item + 1)


@_common.jit
def merge(
    PART, PART_LSE, OUT, LSE, o_b, o_h, o_t, LONG, FIRST, first_slice, kv_heads, num_dst, chunks,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TOGETHER: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One long receiver and head: the results of its chunks as one, in the order of the list."""
    sample, head, row, low, high = _long_row(LONG, FIRST, first_slice, kv_heads, GROUP)
    top = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    sums = tl.zeros([DP], ACC)
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
        sums = sums * shrink + tl.sum(share[:, None] * _common.load_rows(PART, place, D, ok, D, DP, 1), 0)
        top = higher
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    _write(OUT, sample * o_b + head * o_h + row * o_t, sums / total, D, DP)
    lse = tl.where(nothing, float("-inf"), top + tl.log(total))
    tl.store(LSE + (sample * kv_heads * GROUP + head) * num_dst + row, lse)


@_common.jit
def add_up(
    PART, RESULT, r_b, r_h, r_t, LONG, FIRST, first_slice, kv_heads, num_dst, chunks,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TOGETHER: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One long row and head: the sum of the gradients of its chunks, in the order of the list."""
    sample, head, row, low, high = _long_row(LONG, FIRST, first_slice, kv_heads, GROUP)
    sums = tl.zeros([DP], ACC)
    for start in range(low, high, TOGETHER):
        chunk = start + tl.arange(0, TOGETHER)
        place = tl.program_id(1).to(tl.int64) * chunks + chunk * GROUP + tl.program_id(0) % GROUP
        sums += tl.sum(_common.load_rows(PART, place, D, chunk < high, D, DP, 1), 0)
    _write(RESULT, sample * r_b + head * r_h + row * r_t, sums, D, DP)
