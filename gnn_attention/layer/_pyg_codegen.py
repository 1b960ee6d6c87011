"""What torch_geometric writes for a class of layers: two modules, in temporary files that it never removes.

It renders ``propagate`` and ``edge_updater`` for the first layer of each class. Here the files are removed as
soon as they are loaded; their lines stay available for tracebacks and ``inspect``.
"""

from __future__ import annotations

import importlib.util
import linecache
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_one = threading.RLock()


@contextmanager
def rendered(layer: Any) -> Iterator[None]:
    """Around the constructor of torch_geometric's base class: one thread at a time, and no file is left."""
    with _one:
        yield
        for function in (layer.propagate, layer.edge_updater):
            file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
            if Path(file).parent == Path(tempfile.gettempdir()) and Path(file).exists():
                _remove(file)


def _remove(file: str) -> None:
    lines = linecache.getlines(file)
    # without a time linecache never looks for the file again
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    compiled = Path(importlib.util.cache_from_source(file))
    Path(file).unlink(missing_ok=True)
    compiled.unlink(missing_ok=True)
    with suppress(OSError):  # it may hold others
        compiled.parent.rmdir()
