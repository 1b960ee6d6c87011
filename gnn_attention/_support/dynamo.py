"""Marks for torch.compile, without loading the compiler (which would double the time of an import)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
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
def _no_function_modes() -> Iterator[None]:
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, torch computes with numbers, unseen by what traces or transforms a program.

    What is computed about a graph is no part of a program that uses it, and must serve training too.
    """
    numbers = torch.inference_mode(False)
    with _no_function_modes(), torch._C._DisableFuncTorch(), _disable_current_modes(), numbers:
        yield
