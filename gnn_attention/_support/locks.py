"""Process-wide state changed by one thread at a time: hooks and backends of a module, warning filters."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn


@dataclass
class _Owner:
    """The thread that changes a module, how many blocks deep, and whether it is about to end by itself."""

    thread: int
    brief: bool
    depth: int = 0


_owners: WeakKeyDictionary[nn.Module, _Owner] = WeakKeyDictionary()
_given_back = threading.Condition()


@contextmanager
def turn(modules: Sequence[nn.Module], brief: bool) -> Iterator[None]:
    """Inside, only this thread changes the modules. Another one's ``brief`` change is waited for.

    NotImplementedError where another thread is in a block of its own length: it could wait for this one.

    >>> layer = nn.Linear(1, 1)
    >>> with turn([layer], brief=False), turn([layer], brief=True):
    ...     len(_owners)
    1
    >>> len(_owners)
    0
    """
    mine = threading.get_ident()
    with _given_back:
        while any(_others(module, mine) for module in modules):
            if not all(owner.brief for module in modules for owner in _others(module, mine)):
                raise NotImplementedError(
                    "another thread is in an operate block over this module, whose layers are changed for all threads: "
                    "wait until it is left, or give each thread a module of its own (copy.deepcopy)"
                )
            _given_back.wait()
        for module in modules:
            _owners.setdefault(module, _Owner(mine, brief)).depth += 1
    try:
        yield
    finally:
        with _given_back:
            for module in modules:
                _owners[module].depth -= 1
                if not _owners[module].depth:
                    del _owners[module]
            _given_back.notify_all()


def _others(module: nn.Module, mine: int) -> list[_Owner]:
    owner = _owners.get(module)
    return [] if owner is None or owner.thread == mine else [owner]


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for calls from the thread that makes it; None, which changes nothing, for all others."""
    mine = threading.get_ident()

    def for_mine(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == mine else None

    return for_mine


_filtering = threading.RLock()


@contextmanager
def ignored(message: str = "") -> Iterator[None]:
    """Inside, warnings that begin so are ignored. One thread at a time."""
    with _filtering, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message)
        yield


@functools.cache
def accept_sparse_matrices() -> None:
    """Issue torch's warning about its CSR format once, ignored; such a matrix is never handed out."""
    with ignored("Sparse CSR tensor support"):
        index = torch.tensor([0], dtype=torch.int32, device="cpu")
        torch.sparse_csr_tensor(
            index, index[:0], torch.zeros(0, device="cpu"), (0, 0), check_invariants=False
        )
