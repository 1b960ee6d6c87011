"""Table look-ups whose gradient is the same for any number of threads."""

from typing import Any

import torch

from gnn_attention._support.custom_op import operator
from gnn_attention._support.shapes import Float, Int, Tensor


def entries(table: Float[Tensor, "..."], *index: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``table[index]``, an index for each axis, none negative; IndexError where there is no such entry.

    On a CPU its gradient is summed in float64 and in one order, while torch's adds from several threads in
    the dtype of the table. Left to torch: CUDA, which sorts before it adds, look-ups of one entry inside a
    kernel, and the transforms of ``torch.func``, which differentiate forward too.

    >>> table = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> entries(table, torch.tensor([1, 1, 0])).sum().backward()
    >>> table.grad
    tensor([1., 2.])
    """
    learned_on_cpu = table.requires_grad and table.device.type == "cpu"
    single = all(axis.dim() == 0 for axis in index)
    if single or not learned_on_cpu or torch._C._are_functorch_transforms_active():
        return table[index]
    found: Tensor = _entries(table, list(index))
    return found


def _found(table: Tensor, index: list[Tensor]) -> Tensor:
    return table[tuple(index)]


def _shaped(table: Tensor, index: list[Tensor]) -> Tensor:
    return table.new_empty(torch.broadcast_shapes(*(axis.shape for axis in index)))  # type: ignore[no-untyped-call]


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor]], output: Tensor) -> None:
    ctx.sizes, ctx.dtype = inputs[0].shape, inputs[0].dtype
    ctx.save_for_backward(*inputs[1])


def _summed(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None]]:
    index = ctx.saved_tensors
    place = index[0]
    for axis, size in zip(index[1:], ctx.sizes[1:], strict=True):
        place = place * size + axis
    total = grad.new_zeros(ctx.sizes.numel(), dtype=torch.float64)
    total = total.index_add(0, place.expand(grad.shape).flatten(), grad.double().flatten())
    return total.view(ctx.sizes).to(ctx.dtype), [None for _ in index]


_entries = operator("entries", "(Tensor table, Tensor[] index) -> Tensor", _found, _shaped, _summed, _keep)
