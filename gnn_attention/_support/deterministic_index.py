"""Table look-ups whose gradient is the same for any number of threads."""

import torch

from gnn_attention._support.shapes import Float, Int, Tensor


def entries(table: Float[Tensor, "..."], *index: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``table[index]``, an index for each axis; IndexError where there is no such entry.

    On a CPU its gradient is summed in float64 and in one order: torch adds the rows of ``index_select`` one
    after the other, but those of ``table[index]`` from several threads. Left to torch are CUDA, look-ups of
    one entry inside a kernel, and the transforms of ``torch.func``.

    >>> table = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> entries(table, torch.tensor([1, 1, 0])).sum().backward()
    >>> table.grad
    tensor([1., 2.])
    """
    is_one_entry = all(axis.dim() == 0 for axis in index)
    is_learned_on_cpu = table.requires_grad and table.device.type == "cpu"
    if is_one_entry or not is_learned_on_cpu or torch._C._are_functorch_transforms_active():
        return table[index]
    positions = torch.arange(table.numel(), device=table.device).view(table.shape)[index]
    wide = table.flatten().double().index_select(0, positions.flatten())
    return wide.view(positions.shape).to(table.dtype)
