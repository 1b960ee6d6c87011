"""Marks for torch.compile, without loading the compiler (which would double the time of an import)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Mark a function whose result torch.compile may take as a constant of its arguments.

    ``torch.compiler.assume_constant_result`` sets the same attribute, but imports ``torch._dynamo``.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: F) -> F:
    """Mark a function that torch.compile calls with a graph break, as ``torch.compiler.disable`` does."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@contextmanager
def _hide_from_dynamo() -> Iterator[None]:
    functions, numbers = torch._C.DisableTorchFunction(), torch.inference_mode(False)
    with functions, torch._C._DisableFuncTorch(), _disable_current_modes(), numbers:
        yield


def eagerly() -> AbstractContextManager[None]:
    """Inside, torch computes with numbers, unseen by what traces or transforms a program.

    What is computed about a graph is no part of a program that uses it, and must serve training too.
    """
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    modes += _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    seen = modes or torch._C._are_functorch_transforms_active() or torch.is_inference_mode_enabled()
    # Exiting these context managers costs ten times as much as asking whether they are needed.
    return _hide_from_dynamo() if seen else nullcontext()
