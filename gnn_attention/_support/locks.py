"""Locks for process-wide state: the hooks and backends of a module, and warning filters."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# One thread holds all locks of a module. Each is a pair (thread, is_brief), the outermost first.
_locks: WeakKeyDictionary[nn.Module, list[tuple[int, bool]]] = WeakKeyDictionary()
_released = threading.Condition()


@contextmanager
def lock_modules(modules: Sequence[nn.Module], brief: bool) -> Iterator[None]:
    """Context in which no other thread changes the modules; it first waits for the ``brief`` locks of others.

    Raises NotImplementedError if a lock of another thread is not brief: that thread may wait for this one.
    """
    thread = threading.get_ident()
    with _released:
        while rivals := [locks[0] for locks in map(_locks.get, modules) if locks and locks[0][0] != thread]:
            if not all(is_brief for _, is_brief in rivals):
                raise NotImplementedError(
                    "another thread intervenes in this module: wait until it is done, "
                    "or give each thread a module of its own (copy.deepcopy)"
                )
            _released.wait()
        for module in modules:
            _locks.setdefault(module, []).append((thread, brief))
    try:
        yield
    finally:
        with _released:
            for module in modules:
                _locks[module].pop()
            _released.notify_all()


def restrict_to_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs in the current thread only; in others it returns None and changes nothing."""
    thread = threading.get_ident()
    return lambda *args, **kwargs: hook(*args, **kwargs) if threading.get_ident() == thread else None


_filter_lock = threading.RLock()


@contextmanager
def ignore_warnings(message: str = "") -> Iterator[None]:
    with _filter_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message)
        yield


@functools.cache
def accept_sparse_matrices() -> None:
    """Make torch issue its one-time warning about sparse CSR tensors here, where it is ignored."""
    with ignore_warnings("Sparse CSR tensor support"):
        pointer = torch.tensor([0], dtype=torch.int32, device="cpu")
        values = torch.zeros(0, device="cpu")
        torch.sparse_csr_tensor(pointer, pointer[:0], values, (0, 0), check_invariants=False)
