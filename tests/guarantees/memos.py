"""What the package keeps between calls: every memo of its modules, and whether it is bounded.

``functools`` caches must have a size, or as few entries as there are devices, machines and numbers of
threads. Dictionaries in modules that are filled while the package works must be weak: what they know of a
tensor, a module or a graph goes with it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch.utils.weak import WeakIdKeyDictionary

FEW = 16  # entries of a cache without a size: keys such as devices and numbers of threads
WEAK = (WeakIdKeyDictionary, WeakKeyDictionary, WeakValueDictionary)


def memos() -> Iterator[tuple[str, Any]]:
    """Every cache of a function and every weak dictionary in a loaded module of the package, by its name."""
    for module in [m for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "gnn_attention"]:
        for name, value in list(vars(module).items()):
            own = getattr(value, "__module__", module.__name__) == module.__name__
            if (hasattr(value, "cache_info") and own) or isinstance(value, WEAK):
                yield f"{module.__name__}.{name}", value


def counted(alive: int = 1024) -> tuple[int, list[str]]:
    """How many memos there are, and in words which of them is not bounded, once everything unused is
    collected.

    A weak one may hold as many entries as ``alive``: graphs and modules that somebody else holds.

    >>> counted(alive=1_000_000)[1]
    []
    """
    gc.collect()
    found = dict(memos())
    return len(found), [line for name, memo in found.items() for line in _unbounded(name, memo, alive)]


def _unbounded(name: str, memo: Any, alive: int) -> list[str]:
    if isinstance(memo, WEAK):
        return [f"{name} still holds {len(memo)} entries"] if len(memo) > alive else []
    size = memo.cache_info()
    most = FEW if size.maxsize is None else size.maxsize
    return [f"{name} holds {size.currsize} entries, expected at most {most}"] if size.currsize > most else []
