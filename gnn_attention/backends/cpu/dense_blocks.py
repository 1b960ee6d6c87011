"""Attention over rectangles: a few calls of one dense kernel that returns lse, on views of the tokens.

The kernel is ATen's flash attention for CPUs, which is private (tests check all that is used here).
The backward pass recomputes ``w = exp(logit - lse)`` from the lse of all pieces, so that the
gradients of the pieces add up exactly. All tensors are ``[B, H, T, D]`` (lse ``[B, H, T]``) with
contiguous channels and any other strides; token-major memory is fastest.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.plan.plan import Gathered, Groups, Masks, Rectangles, Strided

# A call's temporary tensors take about this many bytes: they fit into the cache, and are reused.
BYTES_PER_CALL = 2**22
FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

GroupedTokens = Float[Tensor, "groups _ _ _"]


def forward(
    q: Tensor, k: Tensor, v: Tensor, piece: Rectangles, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Write ``out`` and ``lse``, merged with their earlier contents unless ``piece.is_first``."""
    lse = lse.unsqueeze(-1)
    # Each call allocates out, and copies of q, k and v if their tokens are gathered.
    dst_copies = 1 + isinstance(piece.dst, Gathered)
    src_copies = 2 * isinstance(piece.src, Gathered)
    for sample, part in _split_calls(piece, q, k, dst_copies, src_copies):
        query, key, value = take(q, sample, part.dst), take(k, sample, part.src), take(v, sample, part.src)
        mask = _additive_masks(part.masks, q.dtype)
        options = {"is_causal": part.causal, "attn_mask": mask, "scale": scale}
        new_out, new_lse = FLASH(query, key, value, **options)
        # If no logit is finite, the kernel returns 0 for out, but also 0, not -inf, for lse.
        if part.has_empty_rows:
            assert part.masks is not None
            is_empty = ~part.masks.table.any(-1).index_select(0, part.masks.index).unsqueeze(1)
            new_lse = new_lse.masked_fill(is_empty, -torch.inf)
        if bool((new_lse == 0).any()) and _may_overflow(query, key, scale):
            # If all values are 1, the output is the sum of the weights, which is 0 if no logit is finite.
            weight_sum, _ = FLASH(query, key, torch.ones_like(key), **options)
            new_lse = new_lse.masked_fill(weight_sum[..., 0] == 0, -torch.inf)
        new_out = new_out[..., : out.shape[-1]]
        if not part.is_first:
            old_out, old_lse = take(out, sample, part.dst), take(lse, sample, part.dst).squeeze(-1)
            new_out, new_lse = edge_softmax.merge(old_out, old_lse, new_out.to(out.dtype), new_lse)
        put(out, sample, part.dst, new_out)
        put(lse, sample, part.dst, new_lse.unsqueeze(-1))


def backward(
    tensors: Sequence[Tensor], lse: Tensor, piece: Rectangles, scale: float, grads: Sequence[Tensor]
) -> None:
    """Add to ``grads`` the gradients of q, k and v that pass through the rectangles.

    ``tensors`` are grad_out, q, k, v and out; out and lse are those of all pieces. A receiver whose
    lse is +inf contributes nothing.
    """
    lse = lse.unsqueeze(-1)
    # Each call allocates gradients of q, k and v, and copies of all tensors if they are gathered.
    dst_copies = 1 + 3 * isinstance(piece.dst, Gathered)
    src_copies = 2 + 2 * isinstance(piece.src, Gathered)
    for sample, part in _split_calls(piece, tensors[1], tensors[2], dst_copies, src_copies):
        groups = part.dst, part.dst, part.src, part.src, part.dst
        inputs = [take(x, sample, side) for x, side in zip(tensors, groups, strict=True)]
        part_lse = take(lse, sample, part.dst).squeeze(-1)
        options = {"attn_mask": _additive_masks(part.masks, tensors[1].dtype), "scale": scale}
        padded_grads = FLASH_BACKWARD(*inputs, part_lse, 0.0, part.causal, **options)
        dq, dk, dv = (x[..., : grad.shape[-1]] for x, grad in zip(padded_grads, grads, strict=True))
        (put if part.is_first else add)(grads[0], sample, part.dst, dq)
        add(grads[1], sample, part.src, dk)
        add(grads[2], sample, part.src, dv)


def jvp(
    tangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
    lse: Tensor,
    piece: Rectangles,
    scale: float,
    out_sums: Tensor,
    lse_sums: Tensor,
) -> None:
    """Add ``sum of dw v + p dv`` to ``out_sums``, and ``sum of dw`` to ``lse_sums``, as csr.jvp does."""
    num_cells = BYTES_PER_CALL // (2 * lse.element_size())
    parts = piece.split_receivers(max(1, num_cells // piece.src.size))
    parts = (y for x in parts for y in x.split_groups(max(1, num_cells // (x.dst.size * x.src.size))))
    for part, sample in itertools.product(parts, range(len(lse))):
        sides = part.dst, part.src, part.src
        q, k, v = (take(x, sample, side) for x, side in zip(inputs, sides, strict=True))
        dq, dk, dv = (take(x, sample, side) for x, side in zip(tangents, sides, strict=True))
        part_lse = take(lse.unsqueeze(-1), sample, part.dst)
        mask = _pair_masks(part, lse.dtype)
        out, lse_change = q.new_empty(*q.shape[:3], v.shape[3]), torch.empty_like(part_lse)
        # New memory pages would cost as much as the arithmetic.
        mass, change = q.new_empty(2, len(q), q.shape[2], k.shape[2])
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            query, key = q[:, head], k[:, kv_head].mT
            torch.sub(mask, part_lse[:, head], out=mass).baddbmm_(query, key, alpha=scale).exp_()
            torch.bmm(dq[:, head], key, out=change).baddbmm_(query, dk[:, kv_head].mT).mul_(mass)
            torch.sum(change, -1, keepdim=True, out=lse_change[:, head])
            out[:, head] = torch.bmm(mass, dv[:, kv_head]).baddbmm_(change, v[:, kv_head], alpha=scale)
        add(out_sums, sample, part.dst, out)
        add(lse_sums.unsqueeze(-1), sample, part.dst, lse_change * scale)


def _pair_masks(piece: Rectangles, dtype: torch.dtype) -> Float[Tensor, "groups_or_one receivers senders"]:
    """Return 0 for edges and -inf for other pairs."""
    masks = _additive_masks(piece.masks, dtype)
    if masks is not None:
        return masks.squeeze(1) if masks.dim() == 4 else masks.unsqueeze(0)
    shape = 1, piece.dst.size, piece.src.size
    mask = torch.ones(shape, dtype=torch.bool)
    return additive_mask(mask.tril() if piece.causal else mask, dtype)


def _additive_masks(masks: Masks | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask ``[M, N]`` for the kernel, or ``[groups, 1, M, N]`` if the rectangles differ."""
    if masks is None:
        return None
    if len(masks.table) == 1:
        return additive_mask(masks.table[0], dtype)
    return additive_mask(masks.table.index_select(0, masks.index), dtype).unsqueeze(1)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 for True and -inf for False, which kernels add to logits."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _may_overflow(q: Tensor, k: Tensor, scale: float) -> bool:
    """Return whether a logit of finite q and k may be infinite."""
    max_logit = float(q.abs().amax()) * float(k.abs().amax()) * q.shape[-1] * max(1.0, abs(scale))
    return not max_logit < torch.finfo(edge_softmax.accumulation_dtype(q.dtype)).max


def _split_calls(
    piece: Rectangles, q: Tensor, k: Tensor, dst_copies: int, src_copies: int
) -> Iterator[tuple[int | slice, Rectangles]]:
    """Split a piece into calls, each for some groups of one sample or one group of some samples.

    For each head, a call allocates ``dst_copies`` rows for each receiver and ``src_copies`` for each sender.
    """
    samples: Iterable[int | slice]
    batch = q.shape[0]
    num_rows = dst_copies * piece.dst.size * q.shape[1] + src_copies * piece.src.size * k.shape[1]
    masks_differ = piece.masks is not None and len(piece.masks.table) > 1
    num_mask_entries = piece.dst.size * piece.src.size if masks_differ else 0
    # Copies of keys and of values are two tensors, and each of them may reach the limit.
    limit = 2 * BYTES_PER_CALL if isinstance(piece.src, Gathered) else BYTES_PER_CALL
    max_groups = max(1, limit // (q.element_size() * (q.shape[3] * num_rows + num_mask_entries)))
    if batch > 1 and (piece.dst.count < batch or piece.dst.count == 1):
        samples = [slice(first, first + max_groups) for first in range(0, batch, max_groups)]
        max_groups = 1
    else:
        samples = range(batch)
    return itertools.product(samples, tuple(piece.split_groups(max_groups)))


def take(x: Tensor, sample: int | slice, groups: Groups) -> GroupedTokens:
    """Return the tokens of each group in a sample, or of the only group in a slice of samples."""
    if isinstance(groups, Gathered):
        if isinstance(sample, slice):
            return x[sample].index_select(2, groups.index[0])
        rows = x[sample].transpose(0, 1).index_select(0, groups.index.flatten())
        return rows.view(*groups.index.shape, *rows.shape[1:]).transpose(1, 2)
    if isinstance(sample, slice):
        return x[sample, :, groups.start : groups.start + groups.size]
    head, token, channel = x[sample].stride()
    shape = (groups.count, x.shape[1], groups.size, x.shape[3])
    offset = x[sample].storage_offset() + groups.start * token
    return x.as_strided(shape, (groups.stride * token, head, token, channel), offset)


def put(x: Tensor, sample: int | slice, groups: Groups, value: GroupedTokens) -> None:
    """Write to the tokens of each group; groups must not overlap."""
    if isinstance(groups, Strided):
        take(x, sample, groups).copy_(value)
    elif isinstance(sample, slice):
        x[sample].index_copy_(2, groups.index[0], value.to(x.dtype))
    else:
        rows = value.transpose(1, 2).flatten(0, 1).to(x.dtype)
        x[sample].transpose(0, 1).index_copy_(0, groups.index.flatten(), rows)


def add(x: Tensor, sample: int | slice, groups: Groups, value: GroupedTokens) -> None:
    """Add to the tokens of each group; groups may overlap."""
    if isinstance(groups, Gathered):
        index = groups.index.flatten()
        if isinstance(sample, slice):
            x[sample].index_add_(2, index, value.to(x.dtype))
        else:
            x[sample].transpose(0, 1).index_add_(0, index, value.to(x.dtype).transpose(1, 2).flatten(0, 1))
    elif groups.count == 1 or groups.stride >= groups.size:
        take(x, sample, groups).add_(value)
    elif groups.stride == 0:
        take(x, sample, groups.select_groups(0, 1)).add_(value.sum(0, keepdim=True))
    else:
        # Groups overlap, but strips of ``stride`` tokens, one from each group, do not.
        for offset in range(0, groups.size, groups.stride):
            size = min(groups.stride, groups.size - offset)
            strip = Strided(groups.start + offset, groups.stride, groups.count, size)
            take(x, sample, strip).add_(value[:, :, offset : offset + size])
