"""Markers for torch.compile that do not import the compiler, which would double the import time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Mark a function whose result torch.compile may treat as a constant for given arguments.

    ``torch.compiler.assume_constant_result`` sets the same attribute, but imports ``torch._dynamo``.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: F) -> F:
    """Mark a function that torch.compile must not trace, as ``torch.compiler.disable`` does."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@contextmanager
def _leave_modes() -> Iterator[None]:
    no_torch_function = torch._C.DisableTorchFunction()
    no_inference_mode = torch.inference_mode(False)
    with no_torch_function, torch._C._DisableFuncTorch(), _disable_current_modes(), no_inference_mode:
        yield


def eager_mode() -> AbstractContextManager[None]:
    """Context in which torch computes real values, outside of all modes, traces and transforms.

    Graph properties are computed here, so that no trace records them and none is an inference tensor.
    """
    num_modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    num_modes += _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    has_modes = num_modes or torch._C._are_functorch_transforms_active() or torch.is_inference_mode_enabled()
    # Exiting these context managers costs ten times as much as checking whether they are needed.
    return _leave_modes() if has_modes else nullcontext()
