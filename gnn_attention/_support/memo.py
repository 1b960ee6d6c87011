"""Immutable values that memoize results; a compiled program refers to a value by its id."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from gnn_attention._support.dynamo import constant, eager_mode, not_compiled

_LIVE_VALUES: WeakValueDictionary[str, Frozen] = WeakValueDictionary()
_ID_COUNTER = itertools.count()
T = TypeVar("T")


class Frozen:
    """Base class of dataclasses that have a memo and, like frozen dataclasses, forbid assignment.

    With ``frozen=True``, Dynamo would read all fields, and before torch 2.12 not as constants.
    """

    _memo: Any
    _id: str = ""  # unique in this process; "" until __init__ is done

    @not_compiled
    def __post_init__(self) -> None:
        # FSDP2 walks through plain dicts, endlessly if a cached result holds the value itself.
        self._memo = UserDict()
        self._id = f"{type(self).__name__} {next(_ID_COUNTER)}"
        _LIVE_VALUES[self._id] = self

    @not_compiled
    def __setattr__(self, name: str, value: Any) -> None:
        if self._id:
            raise FrozenInstanceError(f"cannot assign to {name!r}: a {type(self).__name__} never changes")
        object.__setattr__(self, name, value)

    @not_compiled
    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {name!r}: a {type(self).__name__} never changes")

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name not in ("_id", "_memo")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()


def memoized(function: Callable[..., T], value: Any, *arguments: Any) -> T:
    """Compute ``function(value, *arguments)`` only once; ``function`` must be a global function."""
    if torch.compiler.is_dynamo_compiling():
        return _memoize_by_id(function, value._id, *arguments)[0]
    key = (function, *arguments)
    # A look-up in the underlying dict is faster than one through the methods of UserDict.
    cache: dict[Any, T] = value._memo.data
    if key not in cache:
        with eager_mode():
            result = function(value, *arguments)
        is_cuda_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        for device in arguments if is_cuda_initialized else ():
            if isinstance(device, torch.device) and device.type == "cuda":
                # Other streams will read the result without waiting for this one.
                torch.cuda.current_stream(device).synchronize()
        cache[key] = result
    return cache[key]


# Compilers treat an id as a constant and compare it before they reuse a program. The result is in a tuple
# because torch before 2.11 treats all tensors that constant functions return as the same tensor.
@constant
def _memoize_by_id(function: Callable[..., T], value_id: str, *arguments: Any) -> tuple[T]:
    return (memoized(function, _LIVE_VALUES[value_id], *arguments),)
