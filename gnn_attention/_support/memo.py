"""Immutable values, what is computed once for each, and its word in a compiled program."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from gnn_attention._support.dynamo import constant, eagerly, not_compiled

_ALIVE: WeakValueDictionary[str, Frozen] = WeakValueDictionary()
_NUMBERS = itertools.count()
T = TypeVar("T")


class Frozen:
    """A dataclass that cannot change once it is made, with the errors of a frozen one, and a memo.

    It is not frozen: of those Dynamo reads every field, and before torch 2.12 takes none for a constant.
    """

    _memo: Any
    _word: str = ""  # no other value of this process has it; "" while the value is being made

    @not_compiled
    def __post_init__(self) -> None:
        # Not a dict, since FSDP2 walks through dicts, and a cached result may hold the value itself.
        self._memo = UserDict()
        word = f"{type(self).__name__} {next(_NUMBERS)}"
        self._word = word
        _ALIVE[word] = self

    @not_compiled
    def __setattr__(self, name: str, value: Any) -> None:
        if self._word:
            raise FrozenInstanceError(f"cannot assign to {name!r}: a {type(self).__name__} never changes")
        object.__setattr__(self, name, value)

    @not_compiled
    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {name!r}: a {type(self).__name__} never changes")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_word", "_memo")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()


def memoized(make: Callable[..., T], value: Any, *arguments: Any) -> T:
    """``make(value, *arguments)``, computed once for each value; ``make`` must be a function of a module."""
    if torch.compiler.is_dynamo_compiling():
        return _constant(make, value._word, *arguments)[0]
    key = (make, *arguments)
    # a UserDict answers by functions in Python: its dict is asked
    cached: dict[Any, T] = value._memo.data
    if key not in cached:
        with eagerly():
            made = make(value, *arguments)
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        for device in arguments if on_gpu else ():
            if isinstance(device, torch.device) and device.type == "cuda":
                # other streams, which wait for nothing, may read it from now on
                torch.cuda.current_stream(device).synchronize()
        cached[key] = made
    return cached[key]


# compilers take a word for a constant, and compare words before they run a program again; in a tuple, for
# before torch 2.11 all tensors that one such function returns to a program are taken for the same one
@constant
def _constant(make: Callable[..., T], word: str, *arguments: Any) -> tuple[T]:
    return (memoized(make, _ALIVE[word], *arguments),)
