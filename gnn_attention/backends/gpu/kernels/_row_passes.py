"""The Triton kernels over rows of edges, forward and backward.

A program computes one row (of a receiver or a sender) or, if ``CHUNKED``, one chunk of a long row.
It computes ``EDGES`` edges and ``MEMBERS`` query heads of a key/value head at a time. Tensors have
axes [edge, member, channel]; an axis along which nothing varies has size 1. ``MEMBERS`` heads, ``D``
and ``DV`` channels are padded to the powers of two ``MP``, ``DP`` and ``DVP``. The strides of q by
sample, head and token are ``q_b``, ``q_h``, ``q_t``; those of bias end in ``_b``, ``_h``, ``_e``.
The rows ``R`` of queries for features have ``NF`` channels, ``F`` for each type of edge, padded to ``FP``.
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
def _load_features(
    base, TYPES, sample, edge, valid, f_b, f_e,
    F: tl.constexpr, NF: tl.constexpr, FP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Load the features of edges ``[edge, 1, FP]`` into the channels of their types; others are 0."""
    channel = tl.arange(0, FP)[None, None, :]
    mask = valid[:, :, None] & (channel < NF)
    if F != NF:
        mask = mask & (channel // F == tl.load(TYPES + edge, mask=valid, other=0)[:, :, None])
    offset = sample * f_b + edge.to(tl.int64)[:, :, None] * f_e + channel % F
    return tl.load(base + offset, mask=mask, other=0.0).to(ACC)


@triton.jit
def _result_start(
    sample, head, row, member, by_sample, by_head, by_token,
    D: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, ALIGN: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Return where the results of a row begin; a workspace is sorted by slice, chunk and member."""
    if CHUNKED:
        chunk = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // SPLIT) + tl.program_id(0) // SPLIT
        start = (chunk * GROUP + member) * D
    else:
        start = _offset(sample, head, row, by_sample, by_head, by_token, ALIGN)
    return start


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
    Q, K, V, PTR, NEIGHBOURS, CHUNK_ROW, CHUNK_START, BIAS, SEED, TYPES, R, FEATURES,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bias_b, bias_h, bias_e, r_b, r_h, r_t, f_b, f_h, f_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, num_kv_heads, first_slice, OUT, SUMS, LSE, o_b, o_h, o_t, s_b, s_h, s_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    NORMALISER: tl.constexpr, F: tl.constexpr, NF: tl.constexpr, FP: tl.constexpr, HAS_R: tl.constexpr,
):  # fmt: skip
    """Compute out, lse and sums of features of a receiver, or of one chunk of its in-edges."""
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
    feature_sums = tl.zeros([1, MP, FP], ACC)
    if HAS_R:
        feature_query = _load(R, _offset(sample, head, row, r_b, r_h, r_t, 1), in_group, NF, FP, ACC)
    for start in range(begin, end, EDGES):
        edge = start + tl.arange(0, EDGES)[:, None]
        valid = edge < end
        src = tl.load(NEIGHBOURS + edge, mask=valid, other=0).to(tl.int64)
        key = _load(K, _offset(sample, kv_head, src, k_b, k_h, k_t, ALIGN), valid, D, DP, ACC)
        value = _load(V, _offset(sample, kv_head, src, v_b, v_h, v_t, ALIGN), valid, DV, DVP, ACC)
        dot = tl.sum(query * key, 2)
        if NF:
            features = _load_features(FEATURES, TYPES, sample, edge, valid, f_b, f_e, F, NF, FP, ACC)
        if HAS_R:
            dot += tl.sum(feature_query * features, 2)
        logit, _ = _logit(
            dot * scale, edge, valid & in_group, BIAS, bias_row, bias_e, cap, HAS_CAP, HAS_BIAS, ACC
        )
        if NORMALISER == "softmax":
            logit = tl.where(valid, logit, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(logit, 0, keep_dims=True))
            # A bias may have set all logits so far to -inf.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.exp(logit - shift)
            rescale = tl.exp(running_max - shift)
            total = total * rescale + tl.sum(weight, 0, keep_dims=True)
            running_max = new_max
        else:
            weight, _ = _common.weigh(logit, 0.0, NORMALISER)
            weight = tl.where(valid, weight, 0.0)
            rescale = tl.full([1, MP], 1.0, ACC)
        if HAS_DROPOUT:
            keep = _common.keeps_edge(stream, row + dst_offset, src + src_offset, threshold)
            weight = tl.where(keep, weight * factor, 0.0)
        sums = sums * rescale[:, :, None] + tl.sum(weight[:, :, None] * value, 0, keep_dims=True)
        if NF:
            weighted_features = tl.sum(weight[:, :, None] * features, 0, keep_dims=True)
            feature_sums = feature_sums * rescale[:, :, None] + weighted_features
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, float("-inf"), running_max + tl.log(total))
    if NORMALISER != "softmax":
        lse = tl.zeros([1, MP], ACC)
    sums = sums / total[:, :, None]
    start = _result_start(sample, head, row, member, o_b, o_h, o_t, DV, GROUP, SPLIT, ALIGN, CHUNKED)
    _store(OUT, start, sums, in_group, DV, DVP)
    if NF:
        start = _result_start(sample, head, row, member, s_b, s_h, s_t, NF, GROUP, SPLIT, 1, CHUNKED)
        _store(SUMS, start, feature_sums / total[:, :, None], in_group, NF, FP)
    # Rows of lse are contiguous.
    by_head = num_dst.to(tl.int64)
    by_sample = by_head * num_kv_heads * GROUP
    start = _result_start(sample, head, row, member, by_sample, by_head, 1, 1, GROUP, SPLIT, 1, CHUNKED)
    tl.store(LSE + start, lse, mask=in_group)


@_common.jit
def backward_dst(
    Q, K, V, PTR, NEIGHBOURS, CHUNK_ROW, CHUNK_START, BIAS, SEED, TYPES, R, FEATURES,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bias_b, bias_h, bias_e, r_b, r_h, r_t, f_b, f_h, f_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, num_kv_heads, first_slice, GRAD, GRAD_SUMS, LSE, DELTA, DBIAS, DDOT, WEIGHT,
    g_b, g_h, g_t, gs_b, gs_h, gs_t, num_edges, DQ, DR, dq_b, dq_h, dq_t, dr_b, dr_h, dr_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    NORMALISER: tl.constexpr, F: tl.constexpr, NF: tl.constexpr, FP: tl.constexpr, HAS_R: tl.constexpr,
):  # fmt: skip
    """Compute a receiver's gradients of q, bias and R from its in-edges, or from one chunk of them.

    If edges have features, also store the weights after dropout and the gradients of the products.
    """
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
    feature_sums = tl.zeros([1, MP, FP], ACC)
    if HAS_R:
        feature_query = _load(R, _offset(sample, head, row, r_b, r_h, r_t, 1), in_group, NF, FP, ACC)
    if NF:
        start = _offset(sample, head, row, gs_b, gs_h, gs_t, 1)
        feature_grad = _load(GRAD_SUMS, start, in_group, NF, FP, ACC)
    for start in range(begin, end, EDGES):
        edge = start + tl.arange(0, EDGES)[:, None]
        in_row = edge < end
        valid = in_row & is_counted
        src = tl.load(NEIGHBOURS + edge, mask=in_row, other=0).to(tl.int64)
        is_needed = in_row & (tl.max(is_counted.to(tl.int32), 1, keep_dims=True) > 0)
        key = _load(K, _offset(sample, kv_head, src, k_b, k_h, k_t, ALIGN), is_needed, D, DP, ACC)
        value = _load(V, _offset(sample, kv_head, src, v_b, v_h, v_t, ALIGN), is_needed, DV, DVP, ACC)
        dot = tl.sum(query * key, 2)
        grad_weight = tl.sum(grad * value, 2)
        if NF:
            features = _load_features(FEATURES, TYPES, sample, edge, is_needed, f_b, f_e, F, NF, FP, ACC)
            grad_weight += tl.sum(feature_grad * features, 2)
        if HAS_R:
            dot += tl.sum(feature_query * features, 2)
        logit, cap_slope = _logit(
            dot * scale, edge, valid, BIAS, bias_row, bias_e, cap, HAS_CAP, HAS_BIAS, ACC
        )
        weight, slope = _common.weigh(logit, lse, NORMALISER)
        if HAS_DROPOUT:
            keep = _common.keeps_edge(stream, row + dst_offset, src + src_offset, threshold)
            grad_weight = tl.where(keep, grad_weight * factor, 0.0)
            weight = tl.where(keep, weight * factor, 0.0)
        grad_logit = tl.where(valid, slope * (grad_weight - delta), 0.0)
        grad_dot = tl.where(valid, grad_logit * cap_slope, 0.0)
        place = slice_index * num_edges + edge
        if HAS_BIAS:
            tl.store(DBIAS + place, grad_logit, mask=in_row & in_group)
        if NF:
            tl.store(DDOT + place, grad_dot, mask=in_row & in_group)
            tl.store(WEIGHT + place, tl.where(valid, weight, 0.0), mask=in_row & in_group)
            feature_sums += tl.sum(grad_dot[:, :, None] * features, 0, keep_dims=True)
        sums += tl.sum(grad_dot[:, :, None] * key, 0, keep_dims=True)
    # If a receiver is not counted, 0 times a key that is not finite may have made its sums NaN.
    sums = tl.where(is_counted[:, :, None], sums * scale, 0.0)
    start = _result_start(sample, head, row, member, dq_b, dq_h, dq_t, D, GROUP, SPLIT, ALIGN, CHUNKED)
    _store(DQ, start, sums, in_group, D, DP)
    if HAS_R:
        feature_sums = tl.where(is_counted[:, :, None], feature_sums * scale, 0.0)
        start = _result_start(sample, head, row, member, dr_b, dr_h, dr_t, NF, GROUP, SPLIT, 1, CHUNKED)
        _store(DR, start, feature_sums, in_group, NF, FP)


@_common.jit
def backward_src(
    Q, K, V, PTR, NEIGHBOURS, CHUNK_ROW, CHUNK_START, BIAS, SEED, TYPES, R, FEATURES,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bias_b, bias_h, bias_e, r_b, r_h, r_t, f_b, f_h, f_e,
    scale, scale_low, cap, cap_low, threshold, factor, factor_low, dst_offset, src_offset, first_sample,
    first_head, limit, num_dst, num_kv_heads, first_slice, GRAD, LSE, DELTA, POSITION,
    DDOT, WEIGHT, g_b, g_h, g_t, num_edges, DK, DVAL, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, MP: tl.constexpr, EDGES: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    NORMALISER: tl.constexpr, F: tl.constexpr, NF: tl.constexpr, FP: tl.constexpr, HAS_R: tl.constexpr,
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
            if HAS_BIAS or NF:
                edge = tl.load(POSITION + entry, mask=in_row, other=0).to(tl.int64)
            valid = in_row & in_group
            lse = tl.load(LSE + first_row + dst, mask=valid, other=float("inf"))
            delta = tl.load(DELTA + first_row + dst, mask=valid, other=0.0)
            valid = valid & _common.is_finite(lse)
            query = _load(Q, _offset(sample, head, dst, q_b, q_h, q_t, ALIGN), valid, D, DP, ACC)
            grad = _load(GRAD, _offset(sample, head, dst, g_b, g_h, g_t, ALIGN), valid, DV, DVP, ACC)
            if NF:
                # The pass over receivers stored both.
                place = (sample * num_kv_heads * GROUP + head) * num_edges + edge
                grad_dot = tl.load(DDOT + place, mask=valid, other=0.0)
                weight = tl.load(WEIGHT + place, mask=valid, other=0.0)
            else:
                logit, cap_slope = _logit(
                    tl.sum(query * key, 2) * scale, edge, valid, BIAS, bias_row, bias_e,
                    cap, HAS_CAP, HAS_BIAS, ACC,
                )  # fmt: skip
                weight, slope = _common.weigh(logit, lse, NORMALISER)
                grad_weight = tl.sum(grad * value, 2)
                if HAS_DROPOUT:
                    keep = _common.keeps_edge(stream, dst + dst_offset, row + src_offset, threshold)
                    grad_weight = tl.where(keep, grad_weight * factor, 0.0)
                    weight = tl.where(keep, weight * factor, 0.0)
                weight = tl.where(valid, weight, 0.0)
                grad_dot = tl.where(valid, slope * (grad_weight - delta) * cap_slope, 0.0)
            key_sums += _weighted_sum(grad_dot, query)
            value_sums += _weighted_sum(weight, grad)
    member = tl.zeros([1, 1], tl.int64)
    start = _result_start(sample, kv_heads, row, member, dk_b, dk_h, dk_t, D, 1, 1, ALIGN, CHUNKED)
    _store(DK, start, key_sums * scale, true, D, DP)
    start = _result_start(sample, kv_heads, row, member, dv_b, dv_h, dv_t, DV, 1, 1, ALIGN, CHUNKED)
    _store(DVAL, start, value_sums, true, DV, DVP)


@triton.jit
def _weighted_sum(weight, rows):
    """Sum ``rows`` over edges and members, weighted by ``weight`` [edge, member]."""
    return tl.sum(tl.sum(weight[:, :, None] * rows, 0, keep_dims=True), 1, keep_dims=True)


@_common.jit
def combine_chunks(
    PART, PART_LSE, RESULT, LSE, r_b, r_h, r_t,
    ROWS, FIRST_CHUNK, first_slice, num_kv_heads, num_dst, num_rows, GROUP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Merge by lse or sum, in order, the results that the chunks of a long row computed for one head."""
    slice_ = tl.program_id(1).to(tl.int64) + first_slice
    sample, head = slice_ // num_kv_heads, slice_ % num_kv_heads * GROUP + tl.program_id(0) % GROUP
    bounds = FIRST_CHUNK + tl.program_id(0) // GROUP
    begin, end = tl.load(bounds), tl.load(bounds + 1)
    row = tl.load(ROWS + tl.program_id(0) // GROUP).to(tl.int64)
    running_max = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    sums = tl.zeros([DP], ACC)
    for start in range(begin, end, STEP):
        chunk = start + tl.arange(0, STEP)
        valid = chunk < end
        workspace_row = tl.program_id(1).to(tl.int64) * num_rows + chunk * GROUP + tl.program_id(0) % GROUP
        chunk_rows = _load(PART, (workspace_row * D)[:, None], valid[:, None], D, DP, ACC)
        if HAS_LSE:
            chunk_lse = tl.load(PART_LSE + workspace_row, mask=valid, other=float("-inf"))
            new_max = tl.maximum(running_max, tl.max(chunk_lse, 0))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            chunk_weight = tl.exp(chunk_lse - shift)
            rescale = tl.exp(running_max - shift)
            total = total * rescale + tl.sum(chunk_weight, 0)
            chunk_rows = chunk_weight[:, None, None] * chunk_rows
            sums *= rescale
            running_max = new_max
        sums += tl.sum(tl.sum(chunk_rows, 0), 0)
    if HAS_LSE:
        is_empty = total == 0.0
        total = tl.where(is_empty, 1.0, total)
        lse = tl.where(is_empty, float("-inf"), running_max + tl.log(total))
        tl.store(LSE + (sample * num_kv_heads * GROUP + head) * num_dst + row, lse)
        sums = sums / total
    channel = tl.arange(0, DP)
    start = sample * r_b + head * r_h + row * r_t
    tl.store(RESULT + start + channel, sums.to(RESULT.dtype.element_ty), mask=channel < D)
