"""Attention over rectangles: a few calls of one dense kernel that returns lse, on views of the tokens.

On a CPU that kernel is ATen's flash attention, whose names are private (the tests pin what is used of it);
elsewhere it is the formula written out. The backward pass computes ``w = exp(logit - lse)`` again, from the
log-sum-exp of all pieces together, so that the gradients of the pieces add up exactly.

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
LARGEST_TABLE = 2**22  # bytes of masks that are made additive once for all calls
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
FLASH_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

InGroups = Float[Tensor, "groups _ _ _"]


def forward(
    q: Tensor, k: Tensor, v: Tensor, piece: Rectangles, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Attend inside the rectangles and write ``out`` and ``lse``, merged with what they hold unless fresh."""
    lse = lse.unsqueeze(-1)
    mask = _Additive(piece.masks, q.dtype)
    for sample, part in _parts(piece, q, k, _made_forward(piece)):
        ends = take(q, sample, part.dst), take(k, sample, part.src), take(v, sample, part.src)
        additive = mask.of(part.masks)
        result, result_lse = _attention(*ends, additive, part.causal, scale)
        result_lse = _lse_of_empty_rows(result_lse, ends[0], ends[1], part, additive, scale)
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

    ``tensors`` are grad_out, q, k, v and out, in whose place the formula takes ``sum(grad_out * out) -
    grad_lse``, one channel; out and lse are those of all pieces. A receiver whose lse is +inf takes no part.
    """
    lse = lse.unsqueeze(-1)
    mask = _Additive(piece.masks, tensors[1].dtype)
    for sample, part in _parts(piece, tensors[1], tensors[2], _made_backward(piece)):
        sides = part.dst, part.dst, part.src, part.src, part.dst
        inputs = [take(x, sample, side) for x, side in zip(tensors, sides, strict=True)]
        lse_here = take(lse, sample, part.dst).squeeze(-1)
        found = _attention_backward(inputs, lse_here, mask.of(part.masks), part.causal, scale)
        dq, dk, dv = (new[..., : total.shape[-1]] for new, total in zip(found, grads, strict=True))
        (put if part.fresh else add)(grads[0], sample, part.dst, dq)
        add(grads[1], sample, part.src, dk)
        add(grads[2], sample, part.src, dv)


class _Additive:
    """Masks as the kernel wants them: 0 for an edge, -inf for none, in the dtype of q."""

    def __init__(self, masks: Masks | None, dtype: torch.dtype) -> None:
        small = masks is not None and masks.table.numel() * dtype.itemsize <= LARGEST_TABLE
        self.dtype = dtype
        self.table = additive_mask(masks.table, dtype) if masks is not None and small else None

    def of(self, masks: Masks | None) -> Tensor | None:
        """``[M, N]``, or ``[groups, 1, M, N]`` where they differ."""
        if masks is None:
            return None
        if len(masks.table) == 1:
            return self.table[0] if self.table is not None else additive_mask(masks.table[0], self.dtype)
        if self.table is not None:
            return self.table.index_select(0, masks.which).unsqueeze(1)
        return additive_mask(masks.table.index_select(0, masks.which), self.dtype).unsqueeze(1)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for True and -inf for False, as kernels want masks."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _lse_of_empty_rows(
    lse: Tensor, q: Tensor, k: Tensor, part: Rectangles, mask: Tensor | None, scale: float
) -> Tensor:
    """``lse``, with -inf where no logit is finite: there the kernel gives out 0, but lse 0."""
    if part.has_empty_rows:
        assert part.masks is not None
        empty = ~part.masks.table.any(-1).index_select(0, part.masks.which).unsqueeze(1)
        # a NaN stays, as it does in out
        lse = lse.masked_fill(empty & ~lse.isnan(), -torch.inf)
    if not is_flash(q) or not bool((lse == 0).any()) or not _may_overflow(q, k, scale):
        return lse
    sums, _ = _attention(q, k, torch.ones_like(k), mask, part.causal, scale)  # of the weights
    return lse.masked_fill(sums[..., 0] == 0, -torch.inf)


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


def _made_forward(piece: Rectangles) -> tuple[int, int]:
    """``out``, and copies of q, k and v where they are gathered."""
    return 1 + isinstance(piece.dst, Gathered), 2 * isinstance(piece.src, Gathered)


def _made_backward(piece: Rectangles) -> tuple[int, int]:
    """The gradients of q, k and v, and copies of grad_out, q, out, k and v where they are gathered."""
    return 1 + 3 * isinstance(piece.dst, Gathered), 2 + 2 * isinstance(piece.src, Gathered)


def is_flash(x: Tensor) -> bool:
    """Whether tokens go to ATen's kernel, and not to the formula."""
    return FLASH is not None and FLASH_BACKWARD is not None and x.device.type == "cpu"


def _attention(
    q: InGroups, k: InGroups, v: InGroups, mask: Tensor | None, causal: bool, scale: float
) -> tuple[InGroups, Float[Tensor, "groups heads size"]]:
    if is_flash(q):
        out, lse = FLASH(q, k, v, is_causal=causal, attn_mask=mask, scale=scale)
        return out, lse
    weights, lse = edge_softmax.row_softmax(_logits(q, k, mask, causal, scale))
    return (weights @ edge_softmax.per_query_head(v, q.shape[1]).to(weights.dtype)).to(q.dtype), lse


def _attention_backward(
    tensors: Sequence[InGroups], lse: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from grad_out, q, k, v and out, or delta."""
    grad, q, k, v, delta = tensors
    if is_flash(q):
        found = FLASH_BACKWARD(*tensors, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return found[0], found[1], found[2]
    wide, heads = edge_softmax.accumulation_dtype(q.dtype), k.shape[1]
    weights = (_logits(q, k, mask, causal, scale) - lse.unsqueeze(-1)).exp()
    grad = grad.to(wide)
    slope = grad @ edge_softmax.per_query_head(v, q.shape[1]).to(wide).mT - delta
    slope = weights * slope * scale
    dq = slope @ edge_softmax.per_query_head(k, q.shape[1]).to(wide)
    products = slope.mT @ q.to(wide), weights.mT @ grad
    dk, dv = (x.view(len(x), heads, -1, *x.shape[2:]).sum(2) for x in products)
    return dq, dk, dv


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    wide = edge_softmax.accumulation_dtype(q.dtype)
    logits = q.to(wide) @ edge_softmax.per_query_head(k, q.shape[1]).to(wide).mT * scale
    if causal:
        below = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
        logits = logits.masked_fill(~below, -torch.inf)
    # a NaN of a pair that is no edge goes
    return logits if mask is None else logits.masked_fill(mask == -torch.inf, -torch.inf)


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
        _add_in_strips(x, sample, groups, value)


def _add_in_strips(x: Tensor, sample: int | slice, groups: Strided, value: Tensor) -> None:
    """Overlapping groups, a strip of ``stride`` tokens of each at a time: these do not overlap."""
    for offset in range(0, groups.size, groups.stride):
        size = min(groups.stride, groups.size - offset)
        strip = Strided(groups.start + offset, groups.stride, groups.count, size)
        take(x, sample, strip).add_(value[:, :, offset : offset + size])
