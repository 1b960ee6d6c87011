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

# One thread holds all locks of a module. Each is a pair (thread_id, is_brief), the outermost first.
_locks: WeakKeyDictionary[nn.Module, list[tuple[int, bool]]] = WeakKeyDictionary()
_lock_condition = threading.Condition()


@contextmanager
def lock_modules(modules: Sequence[nn.Module], is_brief: bool) -> Iterator[None]:
    """Let no other thread change the modules inside the context; first wait for other brief locks.

    Raises NotImplementedError if another thread's lock is not brief, because waiting could deadlock.
    """
    thread_id = threading.get_ident()
    with _lock_condition:
        while other_locks := [x[0] for x in map(_locks.get, modules) if x and x[0][0] != thread_id]:
            if not all(is_brief for _, is_brief in other_locks):
                raise NotImplementedError(
                    "another thread intervenes in this module: wait until it is done, "
                    "or give each thread a module of its own (copy.deepcopy)"
                )
            _lock_condition.wait()
        for module in modules:
            _locks.setdefault(module, []).append((thread_id, is_brief))
    try:
        yield
    finally:
        with _lock_condition:
            for module in modules:
                _locks[module].pop()
            _lock_condition.notify_all()


def restrict_to_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs in the current thread only; in others it returns None and changes nothing."""
    thread_id = threading.get_ident()
    return lambda *args, **kwargs: hook(*args, **kwargs) if threading.get_ident() == thread_id else None


_filter_lock = threading.RLock()


@contextmanager
def ignore_warnings(message: str = "") -> Iterator[None]:
    with _filter_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message)
        yield


@functools.cache
def silence_sparse_csr_warning() -> None:
    """Make torch issue its one-time warning about sparse CSR tensors here, where it is ignored."""
    with ignore_warnings("Sparse CSR tensor support"):
        crow_indices = torch.tensor([0], dtype=torch.int32, device="cpu")
        values = torch.zeros(0, device="cpu")
        torch.sparse_csr_tensor(crow_indices, crow_indices[:0], values, (0, 0), check_invariants=False)
