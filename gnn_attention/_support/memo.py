"""Immutable values, what is computed once for each, and the word by which a compiled program knows each."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any
from weakref import WeakValueDictionary

import torch

from gnn_attention._support.dynamo import constant, eagerly, not_compiled

_ALIVE: WeakValueDictionary[str, Frozen] = WeakValueDictionary()
_NUMBERS = itertools.count()


class Frozen:
    """A dataclass that cannot change once it is made, with the errors of a frozen one, and a memo of
    its own.

    It is not frozen: of those, Dynamo reads every field, the memory too, and before torch 2.12 takes none for
    a constant.
    """

    _memo: Any
    _word: str = ""  # no other value of this process has it; "" while the value is being made

    @not_compiled
    def __post_init__(self) -> None:
        """A UserDict, for FSDP2 walks through dicts, and a cached result may hold the value itself."""
        self._memo = UserDict(self._memo) if isinstance(self._memo, dict) else self._memo
        self._seal()

    @not_compiled
    def _seal(self) -> None:
        word = f"{type(self).__name__} {next(_NUMBERS)}"
        self._word = word
        _ALIVE[word] = self

    @not_compiled
    def __setattr__(self, name: str, value: Any) -> None:
        if self._word:
            raise FrozenInstanceError(
                f"cannot assign to field {name!r}: a {type(self).__name__} never changes, make another"
            )
        object.__setattr__(self, name, value)

    @not_compiled
    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(
            f"cannot delete field {name!r}: a {type(self).__name__} never changes, make another"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_word"} | {
            "_memo": UserDict()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._seal()


def memoized(make: Callable[..., Any], value: Any, *arguments: Any) -> Any:
    """``make(value, *arguments)``, computed once for each value and cached with it; ``make`` must be a
    function of a module.

    The value never changes, so that what is worked out about it is a constant to a compiler too.
    """
    if torch.compiler.is_dynamo_compiling():
        return _kept_of(make, value._word, *arguments)[0]
    key = (make, *arguments)
    if key not in value._memo:
        with eagerly():
            value._memo[key] = make(value, *arguments)
    return value._memo[key]


@constant
def _kept_of(make: Callable[..., Any], word: str, *arguments: Any) -> tuple[Any]:
    """The same for a compiler: every version takes a word for a constant, and compares words before it runs a
    program again.

    In a tuple: before torch 2.11, all tensors that one such function returns to a program are taken for the
    same one.
    """
    return (memoized(make, _ALIVE[word], *arguments),)
