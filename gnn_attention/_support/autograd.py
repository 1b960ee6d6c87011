"""Recomputation instead of saved intermediates, and a second derivative for kernels that have none."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gnn_attention._support.shapes import Tensor

Run = Callable[..., Tensor]


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, of which only the arguments are saved for the backward pass.

    Under ``torch.func`` transforms, which do not support this, everything is saved.
    """
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False)


def twice_differentiable(fast: Run, slow: Run, *inputs: Tensor) -> Tensor:
    """``fast(*inputs)``; a gradient that will be differentiated again is that of the equal ``slow``.

    Compilers and ``torch.func`` transforms see ``fast`` alone: they have no graph of autograd to return to.

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> out = twice_differentiable(lambda x: 8 + 12 * (x - x.detach()), lambda x: x**3, x)
    >>> (slope,) = torch.autograd.grad(out, x, create_graph=True)
    >>> slope.tolist(), torch.autograd.grad(slope, x)[0].tolist()
    (12.0, 12.0)
    """
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if not wanted or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return fast(*inputs)
    out: Tensor = _Twice.apply(fast, slow, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Twice(torch.autograd.Function):
    """Saves what ``fast`` saves, and for a second derivative the inputs, whose storage is the same."""

    @staticmethod
    def forward(ctx: Any, fast: Run, slow: Run, *inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inner = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            ctx.out = fast(*ctx.inner)
        ctx.slow = slow
        ctx.save_for_backward(*inputs)
        out: Tensor = ctx.out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return None, None, *_gradients(ctx.out, ctx.inner, grad, retain_graph=True)
        inputs = ctx.saved_tensors
        return None, None, *_gradients(ctx.slow(*inputs), inputs, grad, create_graph=True)


def _gradients(out: Tensor, inputs: Any, grad: Tensor, **options: bool) -> list[Tensor | None]:
    learning = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(out, learning, grad, **options))
    return [next(found) if x.requires_grad else None for x in inputs]
