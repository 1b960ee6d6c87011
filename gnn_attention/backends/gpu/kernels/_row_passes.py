"""The Triton kernels over rows of edges, forward and backward.

A program computes one row (of a receiver or a sender) or, if ``CHUNKED``, one chunk of a long row.
It computes ``EDGES`` edges and ``MEMBERS`` query heads of a key/value head at a time. Tensors have
axes [edge, member, channel]; an axis along which nothing varies has size 1. ``MEMBERS`` heads, ``D``
and ``DV`` channels are padded to the powers of two ``MP``, ``DP`` and ``DVP``. The strides of q by
sample, head and token are ``q_b``, ``q_h``, ``q_t``; those of bias end in ``_b``, ``_h``, ``_e``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnn_attention.backends.gpu.kernels import _common


@triton.jit
def _row(PTR, CHUNK_ROW, CHUNK_START, limit, item, CHUNKED: tl.constexpr):
    """Return the row of a program, and where the entries of the row or its chunk begin and end."""
    if CHUNKED:
        row = tl.load(CHUNK_ROW + item).to(tl.int64)
        begin = tl.load(CHUNK_START + item)
        # begin + limit may exceed int32.
        end = begin + tl.minimum(tl.load(PTR + row + 1) - begin, limit)
    else:
        row = item.to(tl.int64)
        begin = tl.load(PTR + row)
        end = tl.load(PTR + row + 1)
        # A long row is left to the programs of its chunks.
        end = tl.where(end - begin > limit, begin, end)
    return row, begin, end


@triton.jit
def _offset(sample, head, token, by_sample, by_head, by_token, ALIGN: tl.constexpr):
    """Return where rows begin. ``ALIGN`` divides all strides; the last product shows this to Triton."""
    offset = sample * (by_sample // ALIGN) + head * (by_head // ALIGN) + token * (by_token // ALIGN)
    return offset * ALIGN


@triton.jit
def _load(base, start, valid, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr):
    """Load rows ``[..., DP]`` from ``start`` on; invalid rows and channels from ``D`` on are 0."""
    channel = tl.arange(0, DP)[None, None, :]
    offset = start[:, :, None] + channel
    mask = tl.broadcast_to(valid, start.shape)[:, :, None]
    if DP != D:
        mask = mask & (channel < D)
    return tl.load(base + offset, mask=mask, other=0.0).to(ACC)


@triton.jit
def _store(base, start, rows, valid, D: tl.constexpr, DP: tl.constexpr):
    """Store rows ``[..., DP]`` from ``start`` on."""
    channel = tl.arange(0, DP)[None, None, :]
    offset = start[:, :, None] + channel
    tl.store(base + offset, rows.to(base.dtype.element_ty), mask=valid[:, :, None] & (channel < D))


@triton.jit
def _find_workspace_row(member, GROUP: tl.constexpr, SPLIT: tl.constexpr):
    """Return the row of a chunk's result in a workspace sorted by slice, chunk and member."""
    num_chunks = tl.num_programs(0) // SPLIT
    return (tl.program_id(1).to(tl.int64) * num_chunks + tl.program_id(0) // SPLIT) * GROUP + member


@triton.jit
def _logit(
    dot, edge, valid, BIAS, bias_row, bias_e, cap,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return logits, given the scaled products q . k, and the derivatives of the softcap."""
    cap_slope = tl.full(dot.shape, 1.0, ACC)
    if HAS_CAP:
        ratio = _common.tanh(dot / cap)
        dot = cap * ratio
        cap_slope = 1.0 - ratio * ratio
    if HAS_BIAS:
        dot += tl.load(BIAS + bias_row + edge.to(tl.int64) * bias_e, mask=valid, other=0.0).to(ACC)
    return dot, cap_slope


@triton.jit
def _stream(SEED, sample, head, first_sample, first_head, HAS_DROPOUT: tl.constexpr):
    """Return the random streams of dropout for some query heads of a sample."""
    stream = tl.zeros(head.shape, tl.uint64)
    if HAS_DROPOUT:
        stream = _common.random_stream(SEED, sample + first_sample, head + first_head)
    return stream


@triton.jit
def _query_heads(num_kv_heads, first_slice, SPLIT: tl.constexpr, MEMBERS: tl.constexpr, MP: tl.constexpr):
    """Return the sample, the key/value head, the members, and which members are not padding."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    index = tl.arange(0, MP)[None, :]
    member = tl.program_id(0) % SPLIT * MEMBERS + index
    return slice_ // num_kv_heads, slice_ % num_kv_heads, member, index < MEMBERS


@_common.jit
def forward(
    Q, K, V, PTR, NEIGHBOURS, CHUNK_ROW, CHUNK_START, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bias_b, bias_h, bias_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, num_kv_heads, first_slice, OUT, LSE, o_b, o_h, o_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of a receiver, or of one chunk of its in-edges, by online softmax."""
    scale, cap, factor = _common.to_acc(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    SPLIT: tl.constexpr = GROUP // MEMBERS
    row, begin, end = _row(PTR, CHUNK_ROW, CHUNK_START, limit, tl.program_id(0) // SPLIT, CHUNKED)
    sample, kv_head, member, in_group = _query_heads(num_kv_heads, first_slice, SPLIT, MEMBERS, MP)
    head = kv_head * GROUP + member
    stream = _stream(SEED, sample, head, first_sample, first_head, HAS_DROPOUT)
    bias_row = sample * bias_b + head * bias_h
    query = _load(Q, _offset(sample, head, row, q_b, q_h, q_t, ALIGN), in_group, D, DP, ACC)
    running_max = tl.full([1, MP], float("-inf"), ACC)
    total = tl.zeros([1, MP], ACC)
    sums = tl.zeros([1, MP, DVP], ACC)
    for start in range(begin, end, EDGES):
        edge = start + tl.arange(0, EDGES)[:, None]
        valid = edge < end
        src = tl.load(NEIGHBOURS + edge, mask=valid, other=0).to(tl.int64)
        key = _load(K, _offset(sample, kv_head, src, k_b, k_h, k_t, ALIGN), valid, D, DP, ACC)
        value = _load(V, _offset(sample, kv_head, src, v_b, v_h, v_t, ALIGN), valid, DV, DVP, ACC)
        logit, _ = _logit(
            tl.sum(query * key, 2) * scale, edge, valid & in_group, BIAS, bias_row, bias_e,
            cap, HAS_CAP, HAS_BIAS, ACC,
        )  # fmt: skip
        logit = tl.where(valid, logit, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logit, 0, keep_dims=True))
        # A bias may have set all logits so far to -inf.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp(logit - shift)
        rescale = tl.exp(running_max - shift)
        total = total * rescale + tl.sum(weight, 0, keep_dims=True)
        if HAS_DROPOUT:
            keep = _common.keeps_edge(stream, row + dst_offset, src + src_offset, threshold)
            weight = tl.where(keep, weight * factor, 0.0)
        sums = sums * rescale[:, :, None] + tl.sum(weight[:, :, None] * value, 0, keep_dims=True)
        running_max = new_max
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, float("-inf"), running_max + tl.log(total))
    sums = sums / total[:, :, None]
    if CHUNKED:
        workspace_row = _find_workspace_row(member, GROUP, SPLIT)
        _store(OUT, workspace_row * DV, sums, in_group, DV, DVP)
        tl.store(LSE + workspace_row, lse, mask=in_group)
    else:
        _store(OUT, _offset(sample, head, row, o_b, o_h, o_t, ALIGN), sums, in_group, DV, DVP)
        tl.store(LSE + (sample * num_kv_heads * GROUP + head) * num_dst + row, lse, mask=in_group)


@_common.jit
def backward_dst(
    Q, K, V, PTR, NEIGHBOURS, CHUNK_ROW, CHUNK_START, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bias_b, bias_h, bias_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, num_kv_heads, first_slice, GRAD, LSE, DELTA, DBIAS, g_b, g_h, g_t,
    num_edges, DQ, dq_b, dq_h, dq_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute a receiver's gradients of q and bias from its in-edges, or from one chunk of them."""
    scale, cap, factor = _common.to_acc(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    SPLIT: tl.constexpr = GROUP // MEMBERS
    row, begin, end = _row(PTR, CHUNK_ROW, CHUNK_START, limit, tl.program_id(0) // SPLIT, CHUNKED)
    sample, kv_head, member, in_group = _query_heads(num_kv_heads, first_slice, SPLIT, MEMBERS, MP)
    head = kv_head * GROUP + member
    stream = _stream(SEED, sample, head, first_sample, first_head, HAS_DROPOUT)
    bias_row = sample * bias_b + head * bias_h
    query = _load(Q, _offset(sample, head, row, q_b, q_h, q_t, ALIGN), in_group, D, DP, ACC)
    grad = _load(GRAD, _offset(sample, head, row, g_b, g_h, g_t, ALIGN), in_group, DV, DVP, ACC)
    slice_index = sample * num_kv_heads * GROUP + head
    lse = tl.load(LSE + slice_index * num_dst + row, mask=in_group, other=float("inf"))
    delta = tl.load(DELTA + slice_index * num_dst + row, mask=in_group, other=0.0)
    # If lse is not finite, all gradients of the receiver are 0; those of its bias are also stored.
    is_counted = _common.is_finite(lse)
    sums = tl.zeros([1, MP, DP], ACC)
    for start in range(begin, end, EDGES):
        edge = start + tl.arange(0, EDGES)[:, None]
        in_row = edge < end
        valid = in_row & is_counted
        src = tl.load(NEIGHBOURS + edge, mask=in_row, other=0).to(tl.int64)
        is_needed = in_row & (tl.max(is_counted.to(tl.int32), 1, keep_dims=True) > 0)
        key = _load(K, _offset(sample, kv_head, src, k_b, k_h, k_t, ALIGN), is_needed, D, DP, ACC)
        value = _load(V, _offset(sample, kv_head, src, v_b, v_h, v_t, ALIGN), is_needed, DV, DVP, ACC)
        logit, cap_slope = _logit(
            tl.sum(query * key, 2) * scale, edge, valid, BIAS, bias_row, bias_e,
            cap, HAS_CAP, HAS_BIAS, ACC,
        )  # fmt: skip
        weight = tl.where(valid, tl.exp(logit - lse), 0.0)
        grad_weight = tl.sum(grad * value, 2)
        if HAS_DROPOUT:
            keep = _common.keeps_edge(stream, row + dst_offset, src + src_offset, threshold)
            grad_weight = tl.where(keep, grad_weight * factor, 0.0)
        grad_logit = tl.where(valid, weight * (grad_weight - delta), 0.0)
        if HAS_BIAS:
            tl.store(DBIAS + slice_index * num_edges + edge, grad_logit, mask=in_row & in_group)
        sums += tl.sum((grad_logit * cap_slope)[:, :, None] * key, 0, keep_dims=True)
    # If a receiver is not counted, 0 times a key that is not finite may have made its sums NaN.
    sums = tl.where(is_counted[:, :, None], sums * scale, 0.0)
    if CHUNKED:
        _store(DQ, _find_workspace_row(member, GROUP, SPLIT) * D, sums, in_group, D, DP)
    else:
        _store(DQ, _offset(sample, head, row, dq_b, dq_h, dq_t, ALIGN), sums, in_group, D, DP)


@_common.jit
def backward_src(
    Q, K, V, PTR, NEIGHBOURS, CHUNK_ROW, CHUNK_START, BIAS, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bias_b, bias_h, bias_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, num_kv_heads, first_slice, GRAD, LSE, DELTA, POSITION,
    g_b, g_h, g_t, DK, DVAL, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute a sender's gradients of k and v from its out-edges, or from one chunk of them."""
    scale, cap, factor = _common.to_acc(scale, scale_low, cap, cap_low, factor, factor_low, ACC)
    row, begin, end = _row(PTR, CHUNK_ROW, CHUNK_START, limit, tl.program_id(0), CHUNKED)
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, kv_head = slice_ // num_kv_heads, slice_ % num_kv_heads
    index = tl.arange(0, MP)[None, :]
    in_group = index < MEMBERS
    true = tl.full([1, 1], 1, tl.int1)
    kv_heads = kv_head + tl.zeros([1, 1], tl.int64)
    key = _load(K, _offset(sample, kv_heads, row, k_b, k_h, k_t, ALIGN), true, D, DP, ACC)
    value = _load(V, _offset(sample, kv_heads, row, v_b, v_h, v_t, ALIGN), true, DV, DVP, ACC)
    key_sums = tl.zeros([1, 1, DP], ACC)
    value_sums = tl.zeros([1, 1, DVP], ACC)
    for step in range(GROUP // MEMBERS):
        head = kv_head * GROUP + step * MEMBERS + index
        stream = _stream(SEED, sample, head, first_sample, first_head, HAS_DROPOUT)
        bias_row = sample * bias_b + head * bias_h
        first_row = (sample * num_kv_heads * GROUP + head) * num_dst
        for start in range(begin, end, EDGES):
            entry = start + tl.arange(0, EDGES)[:, None]
            in_row = entry < end
            dst = tl.load(NEIGHBOURS + entry, mask=in_row, other=0).to(tl.int64)
            edge = entry
            if HAS_BIAS:
                edge = tl.load(POSITION + entry, mask=in_row, other=0).to(tl.int64)
            valid = in_row & in_group
            lse = tl.load(LSE + first_row + dst, mask=valid, other=float("inf"))
            delta = tl.load(DELTA + first_row + dst, mask=valid, other=0.0)
            valid = valid & _common.is_finite(lse)
            query = _load(Q, _offset(sample, head, dst, q_b, q_h, q_t, ALIGN), valid, D, DP, ACC)
            grad = _load(GRAD, _offset(sample, head, dst, g_b, g_h, g_t, ALIGN), valid, DV, DVP, ACC)
            logit, cap_slope = _logit(
                tl.sum(query * key, 2) * scale, edge, valid, BIAS, bias_row, bias_e,
                cap, HAS_CAP, HAS_BIAS, ACC,
            )  # fmt: skip
            weight = tl.where(valid, tl.exp(logit - lse), 0.0)
            grad_weight = tl.sum(grad * value, 2)
            dropped_weight = weight
            if HAS_DROPOUT:
                keep = _common.keeps_edge(stream, dst + dst_offset, row + src_offset, threshold)
                grad_weight = tl.where(keep, grad_weight * factor, 0.0)
                dropped_weight = tl.where(keep, weight * factor, 0.0)
            grad_logit = tl.where(valid, weight * (grad_weight - delta) * cap_slope, 0.0)
            key_sums += _weighted_sum(grad_logit, query)
            value_sums += _weighted_sum(dropped_weight, grad)
    if CHUNKED:
        workspace_row = _find_workspace_row(tl.zeros([1, 1], tl.int64), 1, 1)
        _store(DK, workspace_row * D, key_sums * scale, true, D, DP)
        _store(DVAL, workspace_row * DV, value_sums, true, DV, DVP)
    else:
        _store(DK, _offset(sample, kv_heads, row, dk_b, dk_h, dk_t, ALIGN), key_sums * scale, true, D, DP)
        _store(DVAL, _offset(sample, kv_heads, row, dv_b, dv_h, dv_t, ALIGN), value_sums, true, DV, DVP)


@triton.jit
def _weighted_sum(weight, rows):
    """Sum ``rows`` over edges and members, weighted by ``weight`` [edge, member]."""
    return tl.sum(tl.sum(weight[:, :, None] * rows, 0, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _long_row(ROWS, FIRST_CHUNK, first_slice, num_kv_heads, GROUP: tl.constexpr):
    """Return the sample, head and row of a merging program, and where its chunks begin and end."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, head = slice_ // num_kv_heads, slice_ % num_kv_heads * GROUP + tl.program_id(0) % GROUP
    index = tl.program_id(0) // GROUP
    row, bounds = tl.load(ROWS + index).to(tl.int64), FIRST_CHUNK + index
    return sample, head, row, tl.load(bounds), tl.load(bounds + 1)


@triton.jit
def _store_row(base, start, row, D: tl.constexpr, DP: tl.constexpr):
    """Store one row ``[DP]`` from ``start`` on."""
    channel = tl.arange(0, DP)
    tl.store(base + start + channel, row.to(base.dtype.element_ty), mask=channel < D)


@_common.jit
def merge_chunks(
    PART, PART_LSE, OUT, LSE, o_b, o_h, o_t,
    ROWS, FIRST_CHUNK, first_slice, num_kv_heads, num_dst, num_rows,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge, in order, the results that the chunks of a long row computed for one head."""
    sample, head, row, begin, end = _long_row(ROWS, FIRST_CHUNK, first_slice, num_kv_heads, GROUP)
    running_max = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    sums = tl.zeros([DP], ACC)
    for start in range(begin, end, STEP):
        chunk = start + tl.arange(0, STEP)
        valid = chunk < end
        workspace_row = tl.program_id(1).to(tl.int64) * num_rows + chunk * GROUP + tl.program_id(0) % GROUP
        chunk_lse = tl.load(PART_LSE + workspace_row, mask=valid, other=float("-inf"))
        new_max = tl.maximum(running_max, tl.max(chunk_lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        chunk_weight = tl.exp(chunk_lse - shift)
        rescale = tl.exp(running_max - shift)
        total = total * rescale + tl.sum(chunk_weight, 0)
        chunk_rows = _load(PART, (workspace_row * D)[:, None], valid[:, None], D, DP, ACC)
        sums = sums * rescale + tl.sum(tl.sum(chunk_weight[:, None, None] * chunk_rows, 0), 0)
        running_max = new_max
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    _store_row(OUT, sample * o_b + head * o_h + row * o_t, sums / total, D, DP)
    lse = tl.where(is_empty, float("-inf"), running_max + tl.log(total))
    tl.store(LSE + (sample * num_kv_heads * GROUP + head) * num_dst + row, lse)


@_common.jit
def sum_chunks(
    PART, RESULT, r_b, r_h, r_t, ROWS, FIRST_CHUNK, first_slice, num_kv_heads, num_dst, num_rows,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sum, in order, the gradients that the chunks of a long row computed for one head."""
    sample, head, row, begin, end = _long_row(ROWS, FIRST_CHUNK, first_slice, num_kv_heads, GROUP)
    sums = tl.zeros([DP], ACC)
    for start in range(begin, end, STEP):
        chunk = start + tl.arange(0, STEP)
        workspace_row = tl.program_id(1).to(tl.int64) * num_rows + chunk * GROUP + tl.program_id(0) % GROUP
        chunk_rows = _load(PART, (workspace_row * D)[:, None], (chunk < end)[:, None], D, DP, ACC)
        sums += tl.sum(tl.sum(chunk_rows, 0), 0)
    _store_row(RESULT, sample * r_b + head * r_h + row * r_t, sums, D, DP)
