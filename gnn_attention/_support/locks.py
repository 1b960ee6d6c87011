"""Process-wide state changed by one thread at a time: hooks and backends of a module, warning filters."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# module -> the nested blocks of one thread that change it: the thread, and whether they end by themselves
_blocks: WeakKeyDictionary[nn.Module, list[tuple[int, bool]]] = WeakKeyDictionary()
_released = threading.Condition()


@contextmanager
def turn(modules: Sequence[nn.Module], brief: bool) -> Iterator[None]:
    """Inside, only this thread changes the modules; it waits for another one's ``brief`` change.

    NotImplementedError where another thread is in a block of its own length: it could wait for this one.
    """
    mine = threading.get_ident()
    with _released:
        while others := [
            blocks[0] for blocks in map(_blocks.get, modules) if blocks and blocks[0][0] != mine
        ]:
            if not all(ends_by_itself for _, ends_by_itself in others):
                advice = "wait until it has left, or give each thread a module of its own (copy.deepcopy)"
                raise NotImplementedError(f"another thread intervenes in this module: {advice}")
            _released.wait()
        for module in modules:
            _blocks.setdefault(module, []).append((mine, brief))
    try:
        yield
    finally:
        with _released:
            for module in modules:
                _blocks[module].pop()
            _released.notify_all()


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for calls from the thread that makes it; None, which changes nothing, for all others."""
    mine = threading.get_ident()
    return lambda *args, **kwargs: hook(*args, **kwargs) if threading.get_ident() == mine else None


_filtering = threading.RLock()


@contextmanager
def ignore_warnings(message: str = "") -> Iterator[None]:
    with _filtering, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message)
        yield


@functools.cache
def accept_sparse_matrices() -> None:
    """Issue torch's warning about its CSR format once, ignored; no such matrix is returned to a user."""
    with ignore_warnings("Sparse CSR tensor support"):
        index, none = torch.tensor([0], dtype=torch.int32, device="cpu"), torch.zeros(0, device="cpu")
        torch.sparse_csr_tensor(index, index[:0], none, (0, 0), check_invariants=False)
