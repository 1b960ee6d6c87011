"""The kernels over rows of edges, forward and backward: what one program does.

A program has one row, a receiver or a sender, or one chunk of a long row (``CHUNKED``), and ``MEMBERS`` query
heads of the group of one key/value head; it takes ``EDGES`` edges at a time. Tensors have the axes
[edge, member, channel], of size 1 where a number does not vary. ``MP`` is the power of two on which members
lie, ``DP`` and ``DVP`` are those of the channels ``D`` and ``DV``. ``q_b``, ``q_h``, ``q_t`` are the strides
of q by sample, head and token, and so on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnn_attention.backends.gpu.kernels import _common


@triton.jit
def _row(PTR, CHUNK_ROW, CHUNK_START, limit, item, CHUNKED: tl.constexpr):
    """(row, first entry, end) of a program's row or chunk; a long row has no entries."""
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
    return row, low, high


@triton.jit
def _at(sample, head, token, by_sample, by_head, by_token, ALIGN: tl.constexpr):
    """Where rows begin, from strides that ``ALIGN`` divides: a product with it, for a compiler to see."""
    place = sample * (by_sample // ALIGN) + head * (by_head // ALIGN) + token * (by_token // ALIGN)
    return place * ALIGN


@triton.jit
def _load(base, start, ok, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr):
    """The rows ``[..., DP]`` from ``start`` on: 0 where not ``ok`` and beyond ``D``."""
    channel = tl.arange(0, DP)[None, None, :]
    place = start[:, :, None] + channel
    mask = tl.broadcast_to(ok, start.shape)[:, :, None]
    if DP != D:
        mask = mask & (channel < D)
    return tl.load(base + place, mask=mask, other=0.0).to(ACC)


@triton.jit
def _write(base, start, rows, ok, D: tl.constexpr, DP: tl.constexpr):
    """Its reverse."""
    channel = tl.arange(0, DP)[None, None, :]
    place = start[:, :, None] + channel
    tl.store(base + place, rows.to(base.dtype.element_ty), mask=ok[:, :, None] & (channel < D))


@triton.jit
def _in_workspace(member, GROUP: tl.constexpr, SPLIT: tl.constexpr):
    """Where the results of a chunk are: by sample and key/value head of the launch, chunk, and member."""
    chunks = tl.num_programs(0) // SPLIT
    return (tl.program_id(1).to(tl.int64) * chunks + tl.program_id(0) // SPLIT) * GROUP + member


@triton.jit
def _logit(
    dot, edge, ok, BIAS, bias, bias_e, cap, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(logit, its derivative by what softcap bends) of edges from their scaled products."""
    bend = tl.full(dot.shape, 1.0, ACC)
    if HAS_CAP:
        bent = _common.tanh(dot / cap)
        dot = cap * bent
        bend = 1.0 - bent * bent
    if HAS_BIAS:
        dot += tl.load(BIAS + bias + edge.to(tl.int64) * bias_e, mask=ok, other=0.0).to(ACC)
    return dot, bend


@triton.jit
def _stream(SEED, sample, head, first_sample, first_head, HAS_DROPOUT: tl.constexpr):
    """The generators of dropout of a sample's query heads."""
    stream = tl.zeros(head.shape, tl.uint64)
    if HAS_DROPOUT:
        stream = _common.stream_of(SEED, sample + first_sample, head + first_head)
    return stream


@triton.jit
def _query_heads(kv_heads, first_slice, SPLIT: tl.constexpr, MEMBERS: tl.constexpr, MP: tl.constexpr):
    """(sample, key/value head, members of its group, which of these are there) of a receiver's program."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    number = tl.arange(0, MP)[None, :]
    member = tl.program_id(0) % SPLIT * MEMBERS + number
    return slice_ // kv_heads, slice_ % kv_heads, member, number < MEMBERS


@_common.jit
def forward(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, x_b, x_h, x_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, kv_heads, first_slice, OUT, LSE, o_b, o_h, o_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """The softmax of a receiver over its in-edges (or one chunk of them), step by step."""
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    SPLIT: tl.constexpr = GROUP // MEMBERS
    row, low, high = _row(PTR, CHUNK_ROW, CHUNK_START, limit, tl.program_id(0) // SPLIT, CHUNKED)
    sample, kv_head, member, there = _query_heads(kv_heads, first_slice, SPLIT, MEMBERS, MP)
    head = kv_head * GROUP + member
    stream = _stream(SEED, sample, head, first_sample, first_head, HAS_DROPOUT)
    bias = sample * x_b + head * x_h
    query = _load(Q, _at(sample, head, row, q_b, q_h, q_t, ALIGN), there, D, DP, ACC)
    top = tl.full([1, MP], float("-inf"), ACC)
    total = tl.zeros([1, MP], ACC)
    sums = tl.zeros([1, MP, DVP], ACC)
    for start in range(low, high, EDGES):
        edge = start + tl.arange(0, EDGES)[:, None]
        ok = edge < high
        src = tl.load(OTHERS + edge, mask=ok, other=0).to(tl.int64)
        key = _load(K, _at(sample, kv_head, src, k_b, k_h, k_t, ALIGN), ok, D, DP, ACC)
        value = _load(V, _at(sample, kv_head, src, v_b, v_h, v_t, ALIGN), ok, DV, DVP, ACC)
        logit, _ = _logit(
            tl.sum(query * key, 2) * scale, edge, ok & there, BIAS, bias, x_e, cap, HAS_CAP, HAS_BIAS, ACC,
        )  # fmt: skip
        logit = tl.where(ok, logit, float("-inf"))
        higher = tl.maximum(top, tl.max(logit, 0, keep_dims=True))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a bias of -inf may close every edge
        weight = tl.exp(logit - base)
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 0, keep_dims=True)
        if HAS_DROPOUT:
            on = _common.stays(stream, row + dst_offset, src + src_offset, threshold)
            weight = tl.where(on, weight * factor, 0.0)
        sums = sums * shrink[:, :, None] + tl.sum(weight[:, :, None] * value, 0, keep_dims=True)
        top = higher
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), top + tl.log(total))
    sums = sums / total[:, :, None]
    if CHUNKED:
        place = _in_workspace(member, GROUP, SPLIT)
        _write(OUT, place * DV, sums, there, DV, DVP)
        tl.store(LSE + place, lse, mask=there)
    else:
        _write(OUT, _at(sample, head, row, o_b, o_h, o_t, ALIGN), sums, there, DV, DVP)
        tl.store(LSE + (sample * kv_heads * GROUP + head) * num_dst + row, lse, mask=there)


@_common.jit
def backward_dst(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, x_b, x_h, x_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, kv_heads, first_slice, GRAD, LSE, DELTA, DBIAS, g_b, g_h, g_t,
    num_edges, DQ, dq_b, dq_h, dq_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """A receiver's edges (or a chunk): the gradients of its queries and of the numbers of its edges."""
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    SPLIT: tl.constexpr = GROUP // MEMBERS
    row, low, high = _row(PTR, CHUNK_ROW, CHUNK_START, limit, tl.program_id(0) // SPLIT, CHUNKED)
    sample, kv_head, member, there = _query_heads(kv_heads, first_slice, SPLIT, MEMBERS, MP)
    head = kv_head * GROUP + member
    stream = _stream(SEED, sample, head, first_sample, first_head, HAS_DROPOUT)
    bias = sample * x_b + head * x_h
    query = _load(Q, _at(sample, head, row, q_b, q_h, q_t, ALIGN), there, D, DP, ACC)
    grad = _load(GRAD, _at(sample, head, row, g_b, g_h, g_t, ALIGN), there, DV, DVP, ACC)
    one = sample * kv_heads * GROUP + head
    lse = tl.load(LSE + one * num_dst + row, mask=there, other=float("inf"))
    delta = tl.load(DELTA + one * num_dst + row, mask=there, other=0.0)
    counts = _common.is_finite(lse)  # else no edge counts, but its gradient is written
    sums = tl.zeros([1, MP, DP], ACC)
    for start in range(low, high, EDGES):
        edge = start + tl.arange(0, EDGES)[:, None]
        within = edge < high
        ok = within & counts
        src = tl.load(OTHERS + edge, mask=within, other=0).to(tl.int64)
        shared = within & (tl.max(counts.to(tl.int32), 1, keep_dims=True) > 0)
        key = _load(K, _at(sample, kv_head, src, k_b, k_h, k_t, ALIGN), shared, D, DP, ACC)
        value = _load(V, _at(sample, kv_head, src, v_b, v_h, v_t, ALIGN), shared, DV, DVP, ACC)
        logit, bend = _logit(
            tl.sum(query * key, 2) * scale, edge, ok, BIAS, bias, x_e, cap, HAS_CAP, HAS_BIAS, ACC,
        )  # fmt: skip
        weight = tl.where(ok, tl.exp(logit - lse), 0.0)
        wanted = tl.sum(grad * value, 2)
        if HAS_DROPOUT:
            on = _common.stays(stream, row + dst_offset, src + src_offset, threshold)
            wanted = tl.where(on, wanted * factor, 0.0)
        slope = tl.where(ok, weight * (wanted - delta), 0.0)
        if HAS_BIAS:
            tl.store(DBIAS + one * num_edges + edge, slope, mask=within & there)
        sums += tl.sum((slope * bend)[:, :, None] * key, 0, keep_dims=True)
    # a key that one head of a group may not see, another may
    sums = tl.where(counts[:, :, None], sums * scale, 0.0)
    if CHUNKED:
        _write(DQ, _in_workspace(member, GROUP, SPLIT) * D, sums, there, D, DP)
    else:
        _write(DQ, _at(sample, head, row, dq_b, dq_h, dq_t, ALIGN), sums, there, D, DP)


@_common.jit
def backward_src(
    Q, K, V, PTR, OTHERS, CHUNK_ROW, CHUNK_START, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, x_b, x_h, x_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, kv_heads, first_slice, GRAD, LSE, DELTA, POSITION, g_b, g_h, g_t,
    DK, DVAL, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """A sender's out-edges (or a chunk of them): the gradients of its key and its value."""
    scale, cap, factor = _common.options(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    row, low, high = _row(PTR, CHUNK_ROW, CHUNK_START, limit, tl.program_id(0), CHUNKED)
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, kv_head = slice_ // kv_heads, slice_ % kv_heads
    number = tl.arange(0, MP)[None, :]
    there = number < MEMBERS
    own = tl.full([1, 1], 1, tl.int1)
    one = kv_head + tl.zeros([1, 1], tl.int64)
    key = _load(K, _at(sample, one, row, k_b, k_h, k_t, ALIGN), own, D, DP, ACC)
    value = _load(V, _at(sample, one, row, v_b, v_h, v_t, ALIGN), own, DV, DVP, ACC)
    key_sums = tl.zeros([1, 1, DP], ACC)
    value_sums = tl.zeros([1, 1, DVP], ACC)
    for part in range(GROUP // MEMBERS):
        head = kv_head * GROUP + part * MEMBERS + number
        stream = _stream(SEED, sample, head, first_sample, first_head, HAS_DROPOUT)
        bias = sample * x_b + head * x_h
        first = (sample * kv_heads * GROUP + head) * num_dst
        for start in range(low, high, EDGES):
            entry = start + tl.arange(0, EDGES)[:, None]
            within = entry < high
            dst = tl.load(OTHERS + entry, mask=within, other=0).to(tl.int64)
            edge = entry
            if HAS_BIAS:
                edge = tl.load(POSITION + entry, mask=within, other=0).to(tl.int64)
            ok = within & there
            lse = tl.load(LSE + first + dst, mask=ok, other=float("inf"))
            delta = tl.load(DELTA + first + dst, mask=ok, other=0.0)
            ok = ok & _common.is_finite(lse)
            query = _load(Q, _at(sample, head, dst, q_b, q_h, q_t, ALIGN), ok, D, DP, ACC)
            grad = _load(GRAD, _at(sample, head, dst, g_b, g_h, g_t, ALIGN), ok, DV, DVP, ACC)
            logit, bend = _logit(
                tl.sum(query * key, 2) * scale, edge, ok, BIAS, bias, x_e, cap, HAS_CAP, HAS_BIAS, ACC,
            )  # fmt: skip
            weight = tl.where(ok, tl.exp(logit - lse), 0.0)
            wanted = tl.sum(grad * value, 2)
            passed = weight
            if HAS_DROPOUT:
                on = _common.stays(stream, dst + dst_offset, row + src_offset, threshold)
                wanted = tl.where(on, wanted * factor, 0.0)
                passed = tl.where(on, weight * factor, 0.0)
            slope = tl.where(ok, weight * (wanted - delta) * bend, 0.0)
            key_sums += _over_edges(slope, query)
            value_sums += _over_edges(passed, grad)
    if CHUNKED:
        place = _in_workspace(tl.zeros([1, 1], tl.int64), 1, 1)
        _write(DK, place * D, key_sums * scale, own, D, DP)
        _write(DVAL, place * DV, value_sums, own, DV, DVP)
    else:
        _write(DK, _at(sample, one, row, dk_b, dk_h, dk_t, ALIGN), key_sums * scale, own, D, DP)
        _write(DVAL, _at(sample, one, row, dv_b, dv_h, dv_t, ALIGN), value_sums, own, DV, DVP)


@triton.jit
def _over_edges(weight, rows):
    """``weight`` [edge, member] times ``rows``, summed over edges and members."""
    return tl.sum(tl.sum(weight[:, :, None] * rows, 0, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _long_row(LONG, FIRST, first_slice, kv_heads, GROUP: tl.constexpr):
    """(sample, head, row, first chunk, end) of a program that adds the chunks of a long row."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, head = slice_ // kv_heads, (slice_ % kv_heads) * GROUP + tl.program_id(0) % GROUP
    item = tl.program_id(0) // GROUP
    return sample, head, tl.load(LONG + item).to(tl.int64), tl.load(FIRST + item), tl.load(FIRST + item + 1)


@triton.jit
def _write_one(base, start, row, D: tl.constexpr, DP: tl.constexpr):
    """A row ``[DP]`` at ``start``."""
    channel = tl.arange(0, DP)
    tl.store(base + start + channel, row.to(base.dtype.element_ty), mask=channel < D)


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
        part = _load(PART, (place * D)[:, None], ok[:, None], D, DP, ACC)
        sums = sums * shrink + tl.sum(tl.sum(share[:, None, None] * part, 0), 0)
        top = higher
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    _write_one(OUT, sample * o_b + head * o_h + row * o_t, sums / total, D, DP)
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
        part = _load(PART, (place * D)[:, None], (chunk < high)[:, None], D, DP, ACC)
        sums += tl.sum(tl.sum(part, 0), 0)
    _write_one(RESULT, sample * r_b + head * r_h + row * r_t, sums, D, DP)
