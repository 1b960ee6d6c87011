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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import Parameter
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, NoReturn

from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import is_sparse

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention.graph import TokenGraph

_one = threading.RLock()
STEPS = ("edge_update", "message", "aggregate", "update")
# torch_geometric has none on update
HOOKS = {f"_{step}_forward_{kind}hooks": step for step in ("propagate", *STEPS) for kind in ("", "pre_")}


class Layer(MessagePassing):
    """A sum of messages from ``src`` to ``dst``."""

    # The functions that a user may override or replace; torch_geometric renders the last two for each class.
    functions: ClassVar[dict[str, Any]] = {
        f"_orig_{name}": getattr(MessagePassing, name) for name in ("propagate", "edge_updater")
    }

    # What a layer gives to its steps, besides what torch_geometric has for each: index, size_i, ...
    inputs: ClassVar[dict[str, tuple[str, ...]]] = {}
    _own_forward: ClassVar[Any] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Layer in cls.__bases__:
            cls.functions = {step: getattr(cls, step) for step in STEPS} | Layer.functions
            cls._own_forward = cls.forward

    def __init__(self, node_dim: int) -> None:
        with _remove_rendered_files(self):
            super().__init__(aggr="add", flow="source_to_target", node_dim=node_dim)
        kind = type(self)
        functions = [getattr(kind, name, self.functions[name]) for name in Layer.functions]
        if kind.forward is kind._own_forward and functions == [*Layer.functions.values()]:
            self._check_parameters()

    def __setstate__(self, data: dict[str, Any]) -> None:
        with _remove_rendered_files(self):
            super().__setstate__(data)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError; ``torch.jit.script`` calls this for a module and each of its parts."""
        raise NotImplementedError(
            f"torch.jit.script cannot compile a {type(self).__name__}, whose graph is no tensor: "
            "use torch.compile, torch.export or torch.jit.trace"
        )

    def _check_parameters(self) -> None:
        """TypeError for a step that asks for what is not there: a global of its module would be read."""
        # the layers give torch_geometric a list of edges, never a sparse adjacency
        always = self.special_args - {"adj_t"}
        for step, inputs in self.inputs.items():
            for name, parameter in self.inspector.get_param_dict(step).items():
                if name not in {*inputs, *always} and parameter.default is Parameter.empty:
                    raise TypeError(
                        f"{step} of {type(self).__name__} asks for {name}, which the layer does not give: "
                        f"it may take {', '.join([*inputs, *sorted(always)])}"
                    )

    def __setattr__(self, name: str, value: Any) -> None:
        # torch would file it under the submodules, and the function of the class would go on running
        if isinstance(value, nn.Module) and name in (*STEPS, "propagate", "edge_updater"):
            raise TypeError(
                f"{name} must be a function, got the module {type(value).__name__}: "
                f"write layer.{name} = module.forward, and keep the module under another name to train it"
            )
        super().__setattr__(name, value)

    def _is_watched(self) -> bool:
        """True while an explainer, a hook or a step of a user's own needs the messages of all edges."""
        return self._onlooker() is not None

    def _onlooker(self) -> str | None:
        """Who needs the messages of all edges, in words; None where nobody does."""
        kind, own = type(self), self.__dict__
        if self.explain:
            return "an explainer masks the edges"
        for name, step in HOOKS.items():
            if own.get(name):
                return f"there is a hook on {step}"
        if "edge_updater" in own or self.functions.keys() & own.keys():
            return "the layer has a step of its own"
        if [*map(partial(getattr, kind), self.functions)] != [*self.functions.values()]:
            return f"{kind.__name__} overrides a step"
        # torch_geometric replaces these two while an explainer masks the edges.
        replaced = self._function_of("propagate") not in (kind._jinja_propagate, kind._orig_propagate)
        return "propagate is replaced" if replaced else None

    def _function_of(self, step: str) -> Any:
        method = self.__dict__.get(step, getattr(type(self), step))
        # Dynamo answers getattr(method, "__func__", None) with None
        return method.__func__ if isinstance(method, MethodType) else method

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
        # torch_geometric's own aggregate runs aggr_module, and none reads aggr
        sums = MessagePassing.aggregate is not self.functions["aggregate"] is type(self).aggregate
        if self.aggr != "add" or (sums and not isinstance(self.aggr_module, SumAggregation)):
            raise NotImplementedError(
                f"aggr must stay 'add', got {self.aggr!r} and {self.aggr_module}: override aggregate instead"
            )
        own = self._function_of("edge_update")
        if self.functions["edge_update"] is MessagePassing.edge_update is not own:
            raise NotImplementedError(
                f"edge_update is no step of a {type(self).__name__} and would not run: override message"
            )
        fuses_index = self.SUPPORTS_FUSED_EDGE_INDEX and isinstance(g, EdgeIndex)
        if self.fuse and (is_sparse(g) or fuses_index):
            raise NotImplementedError(
                "message_and_aggregate is no step of this layer and would not run for a sparse graph: "
                "override message and aggregate, or give edge_index"
            )


def check_size(size: Any, num_src: int, num_dst: int | None) -> int:
    """The receivers of PyG's ``size``; TypeError or ValueError unless it is that of the states."""
    sizes = checks.sizes("size", size) if isinstance(size, Iterable) else []
    if len(sizes) != 2 or sizes[0] != num_src or num_dst not in (None, sizes[1]):
        receivers = "any number" if num_dst is None else num_dst
        raise ValueError(
            f"size must be (senders, receivers) = ({num_src}, {receivers}), as x has them, got {quoted(size)}"
        )
    return sizes[1]


def known_receivers(g: Any) -> int:
    """The number of receivers that a graph knows by itself; ValueError for an edge_index, which does not."""
    if isinstance(g, TokenGraph):
        return g.num_dst
    number = g.sparse_size(1) if isinstance(g, EdgeIndex) else None
    number = g.size(0) if is_sparse(g) else number
    if number is None:
        raise ValueError(
            "x=(x_src, None) does not say how many receivers there are: give size=(senders, receivers)"
        )
    return int(number)


@contextmanager
def _remove_rendered_files(layer: Any) -> Iterator[None]:
    """Let torch_geometric render in the block, one thread at a time, and remove the files that it wrote."""
    kind = type(layer)
    with _one:
        # torch_geometric takes what it rendered for a parent for the function of a class whose name the
        # parent's begins with, and else for the original, in which an explainer would mask nothing
        for name in ("propagate", "edge_updater"):
            if name not in vars(kind) and _file_of(getattr(kind, name)):
                setattr(kind, name, getattr(MessagePassing, name))
        yield
        for function in (layer.propagate, layer.edge_updater):
            file = _file_of(function)
            if file and Path(file).exists():
                _remove(file)
                # A class that is defined again is rendered again; torch.compile imports a function's module.
                module = sys.modules.pop(function.__module__)
                module.__name__ = Path(file).stem
                sys.modules[module.__name__] = module


def _file_of(function: Any) -> str:
    """The file into which torch_geometric wrote the function, or an empty string."""
    module = getattr(function, "__module__", "")
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
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
