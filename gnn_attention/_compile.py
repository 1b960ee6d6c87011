"""What torch.compile is told about this package, without loading the compiler (which would double the time of an import)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["constant"]

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Mark a function whose result torch.compile may take as a constant of its arguments (graphs never change).

    This is ``torch.compiler.assume_constant_result``, which sets the same attribute but imports ``torch._dynamo`` to do so;
    the compilation tests fail if the attribute's name changes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
