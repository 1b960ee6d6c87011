"""Forget what a part of a computation keeps for its gradient, and compute it again when the gradient is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["recomputed"]


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, of which only the arguments are kept for the backward pass.

    Under ``torch.func`` transforms, which do not support this, everything is kept.
    """
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False)
