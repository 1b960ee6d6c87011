"""The base of the layers: torch_geometric's, without the files it leaves and the settings no layer has.

torch_geometric writes two modules for a class of layers, in temporary files that it never removes. It renders
``propagate`` and ``edge_updater`` for the first layer of each class. Here the files are removed as soon as
they are loaded; their lines stay available for tracebacks and ``inspect``.
"""

from __future__ import annotations

import importlib.util
import linecache
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, NoReturn

from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import is_sparse

_one = threading.RLock()
STEPS = ("edge_update", "message", "aggregate", "update")
# torch_geometric has none on update
HOOKS = [f"_{step}_forward_{kind}hooks" for step in ("propagate", *STEPS) for kind in ("", "pre_")]


class Layer(MessagePassing):
    """A sum of messages from ``src`` to ``dst``."""

    # The functions that a user may override or replace; torch_geometric renders the last two for each class.
    functions: ClassVar[dict[str, Any]] = {
        f"_orig_{name}": getattr(MessagePassing, name) for name in ("propagate", "edge_updater")
    }

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Layer in cls.__bases__:
            cls.functions = {step: getattr(cls, step) for step in STEPS} | Layer.functions

    def __init__(self, node_dim: int) -> None:
        with _remove_rendered_files(self):
            super().__init__(aggr="add", flow="source_to_target", node_dim=node_dim)

    def __setstate__(self, data: dict[str, Any]) -> None:
        with _remove_rendered_files(self):
            super().__setstate__(data)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError; ``torch.jit.script`` calls this for a module and each of its parts."""
        raise NotImplementedError(
            f"torch.jit.script cannot compile a {type(self).__name__}, whose graph is no tensor: "
            "use torch.compile, torch.export or torch.jit.trace"
        )

    def _is_watched(self) -> bool:
        """True while an explainer, a hook or a step of a user's own needs the messages of all edges."""
        kind, own = type(self), self.__dict__
        if self.explain or any(map(own.get, HOOKS)):
            return True
        if "edge_updater" in own or self.functions.keys() & own.keys():
            return True
        if [*map(partial(getattr, kind), self.functions)] != [*self.functions.values()]:
            return True
        # torch_geometric replaces these two while an explainer masks the edges.
        propagate = own.get("propagate", kind.propagate)
        # Dynamo answers getattr(method, "__func__", None) with None
        function = propagate.__func__ if isinstance(propagate, MethodType) else propagate
        return function not in (kind._jinja_propagate, kind._orig_propagate)

    def check_settings(self, g: Any) -> None:
        """Raise NotImplementedError for a setting of torch_geometric that the layer does not follow."""
        if self.flow != "source_to_target":
            raise NotImplementedError(
                f"flow must stay 'source_to_target', got {self.flow!r}: "
                "reverse the edges instead, by graph.T or edge_index.flip(0)"
            )
        if self.decomposed_layers != 1:
            raise NotImplementedError(
                f"decomposed_layers must stay 1, got {self.decomposed_layers}: "
                "a message is made and updated with all its channels at once"
            )
        fuses_index = self.SUPPORTS_FUSED_EDGE_INDEX and isinstance(g, EdgeIndex)
        if self.fuse and (is_sparse(g) or fuses_index):
            raise NotImplementedError(
                "message_and_aggregate is no step of this layer and would not run for a sparse graph: "
                "override message and aggregate, or give edge_index"
            )


@contextmanager
def _remove_rendered_files(layer: Any) -> Iterator[None]:
    """Let torch_geometric render in the block, one thread at a time, and remove the files that it wrote."""
    with _one:
        yield
        for function in (layer.propagate, layer.edge_updater):
            file = _file_of(function)
            if file and Path(file).exists():
                _remove(file)
        # Of a subclass torch_geometric takes the rendered function of the parent for the original, and an
        # explainer would mask nothing.
        for name in ("propagate", "edge_updater"):
            if _file_of(getattr(type(layer), f"_orig_{name}", None)):
                setattr(type(layer), f"_orig_{name}", getattr(MessagePassing, name))


def _file_of(function: Any) -> str:
    """The file into which torch_geometric wrote the function, or an empty string."""
    module = getattr(function, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    # a user's own script may stand in that folder too
    is_written = Path(file).name.startswith(f"{module}_")
    return file if is_written and Path(file).parent == Path(tempfile.gettempdir()) else ""


def _remove(file: str) -> None:
    lines = linecache.getlines(file)
    # without a time linecache never looks for the file again
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    compiled = Path(importlib.util.cache_from_source(file))
    Path(file).unlink(missing_ok=True)
    compiled.unlink(missing_ok=True)
    with suppress(OSError):  # it may hold others
        compiled.parent.rmdir()
