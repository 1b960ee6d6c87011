"""Derivatives of every order for a kernel that has a first derivative of its own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gnn_attention._support.autograd import unwrap
from gnn_attention._support.shapes import Tensor


def kernel_gradients(
    run: Callable[[], Sequence[Tensor]],
    formula: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Return the gradients of ``inputs``: ``run()``, or those of ``formula`` if they will be differentiated.

    ``formula(*inputs)`` computes what the kernel computes, by operators with derivatives of every order.
    """
    # Only ``create_graph=True`` enables gradients in a backward pass. Transforms foresee all derivatives.
    needs_grad = [unwrap(x).requires_grad for x in inputs]
    if not any(needs_grad) or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return run()
    # An input may be another one or a function of it, whose gradient must not contain that of the first.
    views = [x.view_as(x) if needed else x for x, needed in zip(inputs, needs_grad, strict=True)]
    pairs = [(x, grad) for x, grad in zip(formula(*views), grads, strict=False) if x.requires_grad]
    outputs, output_grads = zip(*pairs, strict=True)
    variables = [x for x, needed in zip(views, needs_grad, strict=True) if needed]
    new_grads = iter(torch.autograd.grad(outputs, variables, output_grads, create_graph=True))
    return [next(new_grads) if needed else None for needed in needs_grad]


class KernelFunction(torch.autograd.Function):
    """A kernel ``run(*inputs)`` with gradients by ``run_backward(grads, inputs, outputs)`` or ``formula``."""

    @staticmethod
    def forward(ctx: Any, run: Any, run_backward: Any, formula: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = run(*inputs)
        ctx.save_for_backward(*inputs, *outputs)
        ctx.functions = run_backward, formula, len(inputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        run_backward, formula, size = ctx.functions
        tensors = ctx.saved_tensors
        inputs, outputs = tensors[:size], tensors[size:]
        run = partial(run_backward, grads, inputs, outputs)
        return None, None, None, *kernel_gradients(run, formula, inputs, grads)
