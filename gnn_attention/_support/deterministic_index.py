"""Table look-ups whose gradient does not depend on the number of threads."""

import torch

from gnn_attention._support.shapes import Float, Int, Tensor


def entries(table: Float[Tensor, "..."], *index: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return ``table[index]``, with an index tensor for each axis; raise IndexError if out of range.

    On a CPU, ``index_select`` sums the gradient in float64 and in a fixed order; for
    ``table[index]`` torch would sum it in several threads. On CUDA, for a single entry inside a
    kernel, and under ``torch.func`` transforms, this function simply returns ``table[index]``.

    >>> table = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> entries(table, torch.tensor([1, 1, 0])).sum().backward()
    >>> table.grad
    tensor([1., 2.])
    """
    is_one_entry = all(axis.dim() == 0 for axis in index)
    needs_cpu_gradient = table.requires_grad and table.device.type == "cpu"
    if is_one_entry or not needs_cpu_gradient or torch._C._are_functorch_transforms_active():
        return table[index]
    flat_index = torch.arange(table.numel(), device=table.device).view(table.shape)[index]
    float64_entries = table.flatten().double().index_select(0, flat_index.flatten())
    return float64_entries.view(flat_index.shape).to(table.dtype)
