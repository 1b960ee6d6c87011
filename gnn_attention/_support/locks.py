"""Process-wide state changed by one thread at a time: hooks and backends of a module, warning filters."""

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
    """The thread that changes a module, in how many nested blocks; ``brief`` blocks end by themselves."""

    thread: int
    brief: bool
    depth: int = 0


_owners: WeakKeyDictionary[nn.Module, _Owner] = WeakKeyDictionary()
_released = threading.Condition()


@contextmanager
def turn(modules: Sequence[nn.Module], brief: bool) -> Iterator[None]:
    """Inside, only this thread changes the modules; it waits for another one's ``brief`` change.

    NotImplementedError where another thread is in a block of its own length: it could wait for this one.
    """
    mine = threading.get_ident()
    with _released:
        while others := [x for x in map(_owners.get, modules) if x is not None and x.thread != mine]:
            if not all(owner.brief for owner in others):
                advice = "wait until it is left, or give each thread a module of its own (copy.deepcopy)"
                raise NotImplementedError(f"another thread is in an operate block over this module: {advice}")
            _released.wait()
        for module in modules:
            _owners.setdefault(module, _Owner(mine, brief)).depth += 1
    try:
        yield
    finally:
        with _released:
            for module in modules:
                _owners[module].depth -= 1
                if not _owners[module].depth:
                    del _owners[module]
            _released.notify_all()


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for calls from the thread that makes it; None, which changes nothing, for all others."""
    mine = threading.get_ident()
    return lambda *args, **kwargs: hook(*args, **kwargs) if threading.get_ident() == mine else None


_filtering = threading.RLock()


@contextmanager
def ignored(message: str = "") -> Iterator[None]:
    with _filtering, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message)
        yield


@functools.cache
def accept_sparse_matrices() -> None:
    """Issue torch's warning about its CSR format once, ignored; no such matrix is returned to a user."""
    with ignored("Sparse CSR tensor support"):
        index, none = torch.tensor([0], dtype=torch.int32, device="cpu"), torch.zeros(0, device="cpu")
        torch.sparse_csr_tensor(index, index[:0], none, (0, 0), check_invariants=False)
