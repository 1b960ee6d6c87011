"""The formula stands in for torch's flash attention over packed tokens in other tests."""

from itertools import pairwise

import torch

from gnn_attention.backends.gpu import flash_varlen


def masked_logits(q, k, limits, scale):
    """Return the logits of one sequence, -inf for non-edges."""
    dst, src = torch.arange(q.shape[0]).unsqueeze(1), torch.arange(k.shape[0])
    left, right = (side if side >= 0 else 10**6 for side in limits[2:4])
    is_hidden = (dst - src > left) | (src - dst > right)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(is_hidden, -torch.inf)


def pair_slices(cu_seqlens):
    sides = [[slice(start, stop) for start, stop in pairwise(ends.tolist())] for ends in cu_seqlens]
    return zip(*sides, strict=True)


def forward_kernel(q, k, v, cu_seqlens, limits, scale):
    """Compute as the kernel does, which multiplies values by weight 0, NaN included."""
    assert q.dim() == k.dim() == v.dim() == 3
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert q.shape[2] % 8 == 0
    assert all(x.stride(2) == 1 for x in (q, k, v))
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    for dst, src in pair_slices(cu_seqlens):
        assert dst.stop - dst.start <= limits[0]
        assert src.stop - src.start <= limits[1]
        logits = masked_logits(q[dst], k[src], limits, scale)
        value = v[src].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[dst] = torch.einsum("hij,jhd->ihd", logits.softmax(-1), value)
        lse[:, dst] = logits.logsumexp(-1).nan_to_num(torch.inf, torch.inf, torch.inf)
    return out, lse


def backward_kernel(tensors, lse, cu_seqlens, limits, scale):
    """Compute as the kernel does, from lse and ``delta = sum(grad_out * out)``."""
    grad, q, k, v, out = tensors
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for dst, src in pair_slices(cu_seqlens):
        p = (masked_logits(q[dst], k[src], limits, scale) - lse[:, dst].unsqueeze(-1)).exp()
        key, value = (x[src].repeat_interleave(group, 1) for x in (k, v))
        delta = (grad[dst] * out[dst]).sum(-1).T.unsqueeze(-1)
        slope = p * (torch.einsum("ihd,jhd->hij", grad[dst], value) - delta) * scale
        dq[dst] += torch.einsum("hij,jhd->ihd", slope, key)
        for total, weight, x in ((dk, slope, q), (dv, p, grad)):
            head_sums = torch.einsum("hij,ihd->jhd", weight, x[dst])
            total[src] += head_sums.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


def test_the_calls_of_the_kernel_are_what_this_torch_takes():
    """Meta tensors show that torch takes the arguments by name, order and kind, and gives these shapes."""
    q = torch.empty(14, 4, 16, device="meta", dtype=torch.float16)
    k, cu_seqlens = q[:, :2], torch.zeros(4, dtype=torch.int32, device="meta")
    limits = [8, 8, 3, 0]
    out, lse = flash_varlen._forward_kernel(q, k, k, [cu_seqlens, cu_seqlens], limits, 0.3)
    assert (out.shape, lse.shape) == (q.shape, (4, 14))
    grads = flash_varlen._backward_kernel((q, q, k, k, out), lse, [cu_seqlens, cu_seqlens], limits, 0.3)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
