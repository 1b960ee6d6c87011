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


def needs_all_derivatives(tensors: Iterable[Tensor]) -> bool:
    """True if a forward-mode derivative or nested ``torch.func`` gradients are being computed."""
    return has_forward_derivative(tensors) or _transforms().count(TransformType.Grad) > 1


def has_forward_derivative(tensors: Iterable[Tensor]) -> bool:
    """True if one of the tensors carries a forward-mode derivative.

    >>> x = torch.ones(2)
    >>> with forward_ad.dual_level():
    ...     has_forward_derivative([x]), has_forward_derivative([forward_ad.make_dual(x, x)])
    (False, True)
    """
    transforms = _transforms()
    if transforms or torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return TransformType.Jvp in transforms
    tangents = (forward_ad.unpack_dual(x).tangent for x in tensors)  # type: ignore[no-untyped-call]
    return any(tangent is not None for tangent in tangents)


def _transforms() -> list[TransformType]:
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return []
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
