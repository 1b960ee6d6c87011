"""Recomputation instead of saved intermediates, and a second derivative for kernels that have none."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch.autograd import forward_ad
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


def needs_every_derivative(tensors: Iterable[Tensor]) -> bool:
    """True under a forward-mode derivative, and in a gradient of a gradient of ``torch.func``."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        kinds = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
        return TransformType.Jvp in kinds or kinds.count(TransformType.Grad) > 1
    return _has_tangent(tensors)


def has_forward_derivative(tensors: Iterable[Tensor]) -> bool:
    """True where a forward-mode derivative passes through one of the tensors.

    >>> x = torch.ones(2)
    >>> with forward_ad.dual_level():
    ...     has_forward_derivative([x]), has_forward_derivative([forward_ad.make_dual(x, x)])
    (False, True)
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        levels = torch._C._functorch.get_interpreter_stack() or ()
        return any(level.key() == TransformType.Jvp for level in levels)
    return _has_tangent(tensors)


def _has_tangent(tensors: Iterable[Tensor]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)  # type: ignore[no-untyped-call]


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
            return None, None, *gradients(ctx.out, ctx.inner, grad, retain_graph=True)
        inputs = ctx.saved_tensors
        return None, None, *gradients(ctx.slow(*inputs), inputs, grad, create_graph=True)


def gradients(out: Tensor, inputs: Any, grad: Tensor, **options: bool) -> list[Tensor | None]:
    """``torch.autograd.grad``, with None for an input that needs no gradient."""
    learning = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(out, learning, grad, **options))
    return [next(found) if x.requires_grad else None for x in inputs]
