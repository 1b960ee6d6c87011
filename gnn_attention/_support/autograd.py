"""Checkpoint a function, and detect forward-mode and nested derivatives."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from gnn_attention._support.shapes import Tensor


def recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, and call it again in the backward pass to save memory.

    ``torch.func`` transforms do not support checkpointing, so a transform saves all intermediates.
    """
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False)


def derivative_order(tensors: Iterable[Tensor | None]) -> int:
    """Return how many nested derivatives of a function of ``tensors`` are being computed.

    Transforms of ``torch.func``, forward mode and autograd count. A second backward pass, which
    ``create_graph=True`` announces, cannot be foreseen. Compilers differentiate transforms
    themselves, so inside one a compiled program always has order 2.

    >>> x = torch.ones(2, requires_grad=True)
    >>> derivative_order([x]), torch.func.grad(lambda x: x.sum() * derivative_order([x]))(x)[0].item()
    (1, 2.0)
    """
    if torch.compiler.is_compiling():
        return 2 if is_compiling_a_transform() else 1
    transforms = _transforms()
    inputs = [x for x in tensors if x is not None]
    order = transforms.count(TransformType.Grad) + transforms.count(TransformType.Jvp)
    if TransformType.Jvp not in transforms and forward_ad._current_level >= 0:
        order += bool(transforms) or has_forward_derivative(inputs)
    return order + (torch.is_grad_enabled() and any(unwrap(x).requires_grad for x in inputs))


def is_compiling_a_transform() -> bool:
    """True in a compiled program, inside a transform of ``torch.func`` or forward mode."""
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return torch.compiler.is_compiling() and is_transformed


def has_forward_derivative(tensors: Iterable[Tensor | None]) -> bool:
    """True if one of the tensors carries a forward-mode derivative.

    >>> x = torch.ones(2)
    >>> with forward_ad.dual_level():
    ...     has_forward_derivative([x]), has_forward_derivative([forward_ad.make_dual(x, x)])
    (False, True)
    """
    transforms = _transforms()
    if transforms or torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return TransformType.Jvp in transforms
    inputs = (x for x in tensors if x is not None)
    tangents = (forward_ad.unpack_dual(x).tangent for x in inputs)  # type: ignore[no-untyped-call]
    return any(tangent is not None for tangent in tangents)


def _transforms() -> list[TransformType]:
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return []
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


def unwrap(x: Tensor) -> Tensor:
    """Return the tensor that the transforms of ``torch.func`` wrap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
