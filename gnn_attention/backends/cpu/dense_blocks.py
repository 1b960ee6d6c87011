"""Attention over rectangles: a few calls of one dense kernel that returns lse, on views of the tokens.

That kernel is ATen's flash attention for CPUs, whose names are private (the tests pin what is used of it).
The backward pass computes ``w = exp(logit - lse)`` again, from the log-sum-exp of all pieces together, so
that the gradients of the pieces add up exactly.

All tensors are ``[B, H, T, D]`` (lse ``[B, H, T]``) of any strides with contiguous channels, best token-major
in memory.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.plan.plan import Gathered, Groups, Masks, Rectangles, Strided

# bytes of what is made for one call of the kernel: caches hold it, the allocator keeps it for the next
BYTES_AT_ONCE = 2**22
FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

InGroups = Float[Tensor, "groups _ _ _"]


def forward(
    q: Tensor, k: Tensor, v: Tensor, piece: Rectangles, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Attend inside the rectangles and write ``out`` and ``lse``, merged with what they hold unless fresh."""
    lse = lse.unsqueeze(-1)
    # out, and copies of q, k and v where they are gathered
    made = 1 + isinstance(piece.dst, Gathered), 2 * isinstance(piece.src, Gathered)
    for sample, part in _parts(piece, q, k, made):
        ends = take(q, sample, part.dst), take(k, sample, part.src), take(v, sample, part.src)
        additive = _additive(part.masks, q.dtype)
        result, result_lse = FLASH(*ends, is_causal=part.causal, attn_mask=additive, scale=scale)
        # where no logit is finite the kernel gives out 0, but lse 0 instead of -inf
        if part.has_empty_rows:
            assert part.masks is not None
            empty = ~part.masks.table.any(-1).index_select(0, part.masks.which).unsqueeze(1)
            result_lse = result_lse.masked_fill(empty, -torch.inf)
        if bool((result_lse == 0).any()) and _may_overflow(ends[0], ends[1], scale):
            # the sums of the weights
            options = {"is_causal": part.causal, "attn_mask": additive, "scale": scale}
            sums, _ = FLASH(ends[0], ends[1], torch.ones_like(ends[1]), **options)
            result_lse = result_lse.masked_fill(sums[..., 0] == 0, -torch.inf)
        if not part.fresh:
            before = take(out, sample, part.dst), take(lse, sample, part.dst).squeeze(-1)
            result, result_lse = edge_softmax.merge(
                *before, result[..., : out.shape[-1]].to(out.dtype), result_lse
            )
        put(out, sample, part.dst, result[..., : out.shape[-1]])
        put(lse, sample, part.dst, result_lse.unsqueeze(-1))


def backward(
    tensors: Sequence[Tensor], lse: Tensor, piece: Rectangles, scale: float, grads: Sequence[Tensor]
) -> None:
    """Add the gradients of q, k and v that pass through the rectangles to ``grads``.

    ``tensors`` are grad_out, q, k, v and out; out and lse are those of all pieces. A receiver whose lse is
    +inf takes no part.
    """
    lse = lse.unsqueeze(-1)
    # the gradients of q, k and v, and copies of grad_out, q, out, k and v where they are gathered
    made = 1 + 3 * isinstance(piece.dst, Gathered), 2 + 2 * isinstance(piece.src, Gathered)
    for sample, part in _parts(piece, tensors[1], tensors[2], made):
        sides = part.dst, part.dst, part.src, part.src, part.dst
        inputs = [take(x, sample, side) for x, side in zip(tensors, sides, strict=True)]
        lse_here = take(lse, sample, part.dst).squeeze(-1)
        options = {"attn_mask": _additive(part.masks, tensors[1].dtype), "scale": scale}
        found = FLASH_BACKWARD(*inputs, lse_here, 0.0, part.causal, **options)
        dq, dk, dv = (new[..., : total.shape[-1]] for new, total in zip(found, grads, strict=True))
        (put if part.fresh else add)(grads[0], sample, part.dst, dq)
        add(grads[1], sample, part.src, dk)
        add(grads[2], sample, part.src, dv)


def _additive(masks: Masks | None, dtype: torch.dtype) -> Tensor | None:
    """The masks of rectangles for the kernel: ``[M, N]``, or ``[groups, 1, M, N]`` where they differ."""
    if masks is None:
        return None
    if len(masks.table) == 1:
        return additive_mask(masks.table[0], dtype)
    return additive_mask(masks.table.index_select(0, masks.which), dtype).unsqueeze(1)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for True and -inf for False, as kernels want masks."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _may_overflow(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether some logit of finite q and k may be infinite."""
    largest = float(q.abs().amax()) * float(k.abs().amax()) * q.shape[-1] * max(1.0, abs(scale))
    return not largest < torch.finfo(edge_softmax.accumulation_dtype(q.dtype)).max


def _parts(
    piece: Rectangles, q: Tensor, k: Tensor, made: tuple[int, int]
) -> Iterator[tuple[int | slice, Rectangles]]:
    """Calls of the kernel: some groups of one sample, or one of some samples, whichever takes fewer calls.

    ``made``: how many rows of q's width a call makes for each head of a receiver, and of a sender.
    """
    samples: Iterable[int | slice]
    batch, number = q.shape[0], q.element_size()
    of_dst, of_src = made[0] * piece.dst.size * q.shape[1], made[1] * piece.src.size * k.shape[1]
    varied = piece.masks is not None and len(piece.masks.table) > 1
    masks = piece.dst.size * piece.src.size if varied else 0
    # copies of keys and values are two tensors, each of which stays within the limit
    room = 2 * BYTES_AT_ONCE if isinstance(piece.src, Gathered) else BYTES_AT_ONCE
    most = max(1, room // (number * (q.shape[3] * (of_dst + of_src) + masks)))
    if batch > 1 and (piece.dst.count < batch or piece.dst.count == 1):
        samples, most = [slice(first, first + most) for first in range(0, batch, most)], 1
    else:
        samples = range(batch)
    return itertools.product(samples, (piece,) if piece.dst.count <= most else tuple(piece.parts(most)))


def take(x: Tensor, sample: int | slice, groups: Groups) -> InGroups:
    """The tokens of each group of one sample; with a slice those of the only group, of some samples."""
    if isinstance(groups, Gathered):
        if isinstance(sample, slice):
            return x[sample].index_select(2, groups.index[0])
        rows = x[sample].transpose(0, 1).index_select(0, groups.index.flatten())
        return rows.view(*groups.index.shape, *rows.shape[1:]).transpose(1, 2)
    if isinstance(sample, slice):
        return x[sample, :, groups.start : groups.start + groups.size]
    head, token, channel = x[sample].stride()
    shape = (groups.count, x.shape[1], groups.size, x.shape[3])
    first = x[sample].storage_offset() + groups.start * token
    return x.as_strided(shape, (groups.stride * token, head, token, channel), first)


def put(x: Tensor, sample: int | slice, groups: Groups, value: InGroups) -> None:
    if isinstance(groups, Strided):
        take(x, sample, groups).copy_(value)
    elif isinstance(sample, slice):
        x[sample].index_copy_(2, groups.index[0], value.to(x.dtype))
    else:
        x[sample].transpose(0, 1).index_copy_(
            0, groups.index.flatten(), value.transpose(1, 2).flatten(0, 1).to(x.dtype)
        )


def add(x: Tensor, sample: int | slice, groups: Groups, value: InGroups) -> None:
    """Add to the groups' tokens, which may overlap."""
    if isinstance(groups, Gathered):
        index, rows = groups.index.flatten(), value.to(x.dtype)
        if isinstance(sample, slice):
            x[sample].index_add_(2, index, rows)
        else:
            x[sample].transpose(0, 1).index_add_(0, index, rows.transpose(1, 2).flatten(0, 1))
    elif groups.count == 1 or groups.stride >= groups.size:
        take(x, sample, groups).add_(value)
    elif groups.stride == 0:
        take(x, sample, groups.part(0, 1)).add_(value.sum(0, keepdim=True))
    else:
        # a strip of ``stride`` tokens of each group at a time: these do not overlap
        for offset in range(0, groups.size, groups.stride):
            size = min(groups.stride, groups.size - offset)
            strip = Strided(groups.start + offset, groups.stride, groups.count, size)
            take(x, sample, strip).add_(value[:, :, offset : offset + size])
