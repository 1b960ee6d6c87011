"""What torch_geometric writes for a class of layers: two modules, in temporary files that it never removes.

It renders ``propagate`` and ``edge_updater`` for the first layer of each class and loads them. Every process
that ever made a layer would leave two files behind; here they are removed as soon as they are loaded. Their
lines are kept for whoever asks for the source (tracebacks, ``inspect``).
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

__all__ = ["rendered"]

_one = threading.RLock()


@contextmanager
def rendered(layer: Any) -> Iterator[None]:
    """Around the constructor of torch_geometric's base class: no file is left, and no thread finds half of a
    module.

    Its first layer renders a class, and another thread's would take the module that has its name already, but
    not its functions.
    """
    with _one:
        yield
        _remove_files(layer)


def _remove_files(layer: Any) -> None:
    for function in (layer.propagate, layer.edge_updater):
        file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
        if Path(file).parent == Path(tempfile.gettempdir()) and Path(file).exists():
            lines = linecache.getlines(file)
            linecache.cache[file] = (
                sum(map(len, lines)),
                None,
                lines,
                file,
            )  # without a time nobody looks for the file
            compiled = Path(importlib.util.cache_from_source(file))
            Path(file).unlink(missing_ok=True)
            compiled.unlink(missing_ok=True)
            with suppress(OSError):  # it may hold others
                compiled.parent.rmdir()
