"""Adapt the layer to torch_geometric: its hooks, settings, generated code and kinds of inputs."""

from __future__ import annotations

import sys
import threading
import warnings
from inspect import Parameter
from types import MethodType
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import is_sparse, is_torch_sparse_tensor
from torch_geometric.utils.sparse import set_sparse_value

from gnn_attention import convert, edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import Explanation, check_backend, explain
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import explain_by_size
from gnn_attention.backends.traced import TracedEdges, is_edge_list
from gnn_attention.graph import TokenGraph, edge_list
from gnn_attention.heads import StandardHeads

STEPS = ("edge_update", "message", "aggregate", "update")
# torch_geometric generates these two functions for each class.
GENERATED = ("propagate", "edge_updater")
# The layer passes these inputs to each step; torch_geometric adds others, such as index and size_i.
STEP_INPUTS = {
    "edge_update": ("q_i", "k_j", "call", "q", "k", "q_j", "k_i"),
    **dict.fromkeys(("message", "aggregate", "update"), ("v_j", "alpha", "v", "v_i")),
}
# Each setting of torch_geometric must keep this value. The text is the end of the error message.
REQUIRED_SETTINGS = {
    "flow": ("source_to_target", "reverse the edges instead, by graph.T or edge_index.flip(0)"),
    "decomposed_layers": (1, "a message is computed and updated with all its channels at once"),
    "aggr": ("add", "override aggregate instead"),
}
HOOKS = {f"_{step}_forward_{when}hooks": step for step in ("propagate", *STEPS) for when in ("", "pre_")}
# Generated code goes into a module named after the class, which two threads must not write at once.
_generation_lock = threading.RLock()


class TwoPathLayer(MessagePassing):
    """A layer that runs the steps of torch_geometric only if something needs their messages."""

    heads: Any
    backend: str | Backend
    edge_dim: int | None
    edge_key: nn.Parameter | None
    edge_value: nn.Parameter | None
    # The layer defines these functions. A subclass with another function of that name overrides it.
    original_steps: ClassVar[dict[str, Any]]

    def __init__(self, node_dim: int) -> None:
        with _generation_lock:
            self._discard_generated_code()
            super().__init__(aggr="add", flow="source_to_target", node_dim=node_dim)
        # A subclass that overrides forward may pass other inputs to its steps.
        if not all(map(self._is_original, (*GENERATED, "forward"))):
            return
        owner = type(self).__name__
        # torch_geometric would read an unknown input from a global variable of that name.
        for step, inputs in STEP_INPUTS.items():
            allowed = (*inputs, *sorted(self.special_args))
            for name, parameter in self.inspector.get_param_dict(step).items():
                if name not in allowed and parameter.default is Parameter.empty:
                    raise TypeError(f"{step} of {owner} asks for {name}, but may take {', '.join(allowed)}")

    def __setstate__(self, data: dict[str, Any]) -> None:
        with _generation_lock:
            self._discard_generated_code()
            super().__setstate__(data)

    def reset_edge_parameters(self) -> None:
        """Draw the maps of features or types of edges from N(0, 1 / fan_in)."""
        for weight in (self.edge_key, self.edge_value):
            if weight is not None:
                nn.init.normal_(weight, std=weight.shape[-2] ** -0.5)

    def _discard_generated_code(self) -> None:
        """Make torch_geometric generate code for this class instead of reusing older code."""
        # Otherwise torch_geometric would keep the generated code of a parent, which explainers cannot mask,
        # or reuse the code of another class with this name, such as an earlier one in a notebook.
        cls = type(self)
        for name in GENERATED:
            if name not in vars(cls):
                sys.modules.pop(f"{cls.__module__}_{cls.__name__}_{name}", None)
                if getattr(cls, name) is getattr(cls, f"_jinja_{name}", None):
                    setattr(cls, name, getattr(MessagePassing, name))

    def _is_original(self, name: str) -> bool:
        """Return whether the class inherits this function from the layer, as written or as generated code."""
        cls = type(self)
        return getattr(cls, f"_orig_{name}", getattr(cls, name)) is self.original_steps[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "backend":
            if value is None:
                # The first assignment is in the constructor, whose caller is one frame further up.
                message = "backend=None is deprecated: write backend='message_passing'"
                warnings.warn(message, DeprecationWarning, 2 if "backend" in self.__dict__ else 3)
                value = "message_passing"
            value = check_backend(value)
        if name in REQUIRED_SETTINGS and value != REQUIRED_SETTINGS[name][0]:
            expected, advice = REQUIRED_SETTINGS[name]
            raise NotImplementedError(f"{name} must stay {expected!r}, got {value!r}: {advice}")
        if name == "aggr_module" and not isinstance(value, SumAggregation) and self._is_original("aggregate"):
            raise NotImplementedError(f"aggr must stay 'add', got {value}: override aggregate instead")
        # torch would register the module as a submodule, and the step of the class would still run.
        if isinstance(value, nn.Module) and name in (*STEPS, *GENERATED):
            raise TypeError(
                f"{name} must be a function, got the module {type(value).__name__}: "
                f"write layer.{name} = module.forward, and keep the module under another name to train it"
            )
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError; ``torch.jit.script`` calls this for every module in it."""
        raise NotImplementedError(
            f"torch.jit.script cannot compile a {type(self).__name__}, whose graph is not a tensor: "
            "use torch.compile, torch.export or torch.jit.trace"
        )

    def reason_for_messages(self) -> str | None:
        """Return why the messages of all edges are needed, or None if they are not."""
        if self.explain:
            return "an explainer masks the edges"
        cls = type(self)
        for hook_name, step in HOOKS.items():
            if self.__dict__.get(hook_name):
                return f"there is a hook on {step}"
        if any(step in self.__dict__ for step in (*STEPS, "edge_updater")):
            return "a step is replaced on the layer"
        if not all(self._is_original(step) for step in (*STEPS, *GENERATED)):
            return f"{cls.__name__} overrides a step"
        propagate = self.__dict__.get("propagate", cls.propagate)
        # In Dynamo, getattr(method, "__func__", None) would be None.
        function = propagate.__func__ if isinstance(propagate, MethodType) else propagate
        is_replaced = function not in (cls._jinja_propagate, cls._orig_propagate)
        return "propagate is replaced" if is_replaced else None

    def uses_message_passing(self) -> bool:
        """Return whether a call runs the four steps over all edges, whatever its graph."""
        is_tracing = bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
        return self.backend == "message_passing" or self.reason_for_messages() is not None or is_tracing

    def explain_path(self, g: Any, num_dst: int | None = None, num_src: int | None = None) -> Explanation:
        """Explain which path a call on ``g`` takes; "message_passing" runs the four steps of PyG.

        ``num_dst`` and ``num_src`` are the sizes of an ``edge_index``, which does not store them.
        With backend "auto" the explanation is that of :func:`gnn_attention.explain`.

        >>> from gnn_attention import MessagePassingAttention, patterns
        >>> layer = MessagePassingAttention(StandardHeads(width=8, num_heads=2))
        >>> layer.explain_path(patterns.causal(3)).choice
        'dense'
        """
        graph = g if isinstance(g, TokenGraph) else convert.from_pyg(g, num_dst, num_src, parallel="keep")
        if (reason := self.reason_for_messages()) is not None:
            return Explanation(repr(graph), "message_passing", reason)
        if self.backend != "auto":
            name = self.backend.name if isinstance(self.backend, Backend) else self.backend
            return Explanation(repr(graph), name, "it is the backend of the layer")
        explain_auto = explain if graph is g else explain_by_size
        return explain_auto(graph, self.heads.num_heads, self.heads.head_dim)

    def _graph_of_call(self, g: Any, num_dst: int, num_src: int) -> TokenGraph:
        if not isinstance(g, TokenGraph) and is_edge_list(g):
            needs_messages = self.uses_message_passing()
            # In a compiled program the edges are an input, whose size may differ from call to call.
            is_input = torch.compiler.is_compiling() and (needs_messages or self.backend == "auto")
            # The four steps accept edges in any order, so an edge_index need not be sorted.
            if is_input or (needs_messages and type(g) is Tensor and g.dtype in edge_list.SIGNED_DTYPES):
                return TracedEdges.from_edge_index(g, num_dst, num_src)
        if self.fuse and (is_sparse(g) or (self.SUPPORTS_FUSED_EDGE_INDEX and isinstance(g, EdgeIndex))):
            raise NotImplementedError(
                "message_and_aggregate is not a step of this layer and would not run for a sparse graph: "
                "override message and aggregate, or pass an edge_index"
            )
        return convert_graph(g, num_dst, num_src)

    @property
    def in_channels(self) -> int | tuple[int, int]:
        """Width of a state, or the widths ``(sender, receiver)`` if they differ."""
        source_width, width = int(self.heads.source_width), int(self.heads.width)
        return width if source_width == width else (source_width, width)

    @property
    def out_channels(self) -> int:
        """Width of an update."""
        if isinstance(self.heads, StandardHeads) and self.heads.W_O is None:
            return self.heads.num_heads * self.heads.W_V.shape[-1]
        return int(self.heads.width)

    def __repr__(self) -> str:
        form = type(self.heads).__name__.removesuffix("Heads").lower()
        summary = f"{form}, heads={self.heads.num_heads}, head_dim={self.heads.head_dim}"
        return f"{type(self).__name__}({summary}, backend={self.backend!r})"


def read_states(x: Any, g: Any, size: Any, width: int) -> tuple[Tensor, Tensor]:
    """Return ``(x_src, x_dst)``; if x_dst is None, it becomes zeros with ``width`` channels."""
    sizes = None if size is None else tuple(checks.sizes("size", size))
    pair = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
    if len(pair) == 2 and pair[1] is None and isinstance(pair[0], Tensor):
        x_src = pair[0]
        if x_src.dim() not in (2, 3):
            raise ValueError(f"x_src must be [N, d] or [B, T, d], got {list(x_src.shape)}")
        if not sizes and type(g) is Tensor and g.layout == torch.strided:
            raise ValueError("x=(x_src, None) with an edge_index needs size=(senders, receivers)")
        graph = g if sizes or isinstance(g, TokenGraph) else convert.from_pyg(g, None, x_src.shape[-2])
        num_dst = sizes[-1] if sizes else graph.num_dst
        pair = x_src, x_src.new_zeros(*x_src.shape[:-2], num_dst, width)
    if len(pair) != 2 or not all(isinstance(states, Tensor) for states in pair):
        types = ", ".join(type(states).__name__ for states in pair)
        raise TypeError(f"x must be a tensor [N, d] or [B, T, d], or a pair (x_src, x_dst), got {types}")
    x_src, x_dst = pair
    if x_src.dim() not in (2, 3) or x_src.shape[:-2] != x_dst.shape[:-2] or x_src.dim() != x_dst.dim():
        raise ValueError(
            "x must be [N, d] or [B, T, d], and x_src and x_dst of a pair must have the same axes and batch, "
            f"got {list(x_src.shape)} and {list(x_dst.shape)}"
        )
    num_src, num_dst = x_src.shape[-2], x_dst.shape[-2]
    if sizes not in (None, (num_src, num_dst)):
        raise ValueError(f"size must be (senders, receivers) = ({num_src}, {num_dst}), got {size}")
    return x_src, x_dst


def convert_graph(g: Any, num_dst: int, num_src: int) -> TokenGraph:
    """Return ``g`` as a :class:`TokenGraph`; ValueError if its sizes do not fit the states."""
    graph = g if isinstance(g, TokenGraph) else convert.from_pyg(g, num_dst, num_src, parallel="keep")
    if (graph.num_src, graph.num_dst) != (num_src, num_dst):
        raise ValueError(f"{graph!r} does not fit x with {num_src} senders and {num_dst} receivers")
    return graph


def arrange_by_node(x: Tensor, call: AttentionCall, is_batched: bool) -> Tensor:
    """Return q, k or v as ``[B, N, H, D]``, or ``[N, H, D]`` without a batch, in at least float32."""
    num_heads = int(call.q.shape[1])
    x = x if x.shape[1] == num_heads else edge_softmax.per_query_head(x, num_heads)
    x = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)
    return x if is_batched else x.squeeze(0)


def add_edge_parameters(layer: TwoPathLayer, edge_dim: int | None, num_edge_types: int | None) -> None:
    """Register ``edge_key`` and ``edge_value`` for features or types of edges, or None."""
    layer.edge_dim = None if edge_dim is None else checks.size("edge_dim", edge_dim, 1)
    types = () if num_edge_types is None else (checks.size("num_edge_types", num_edge_types, 1),)
    parameter = next(layer.heads.parameters())
    with torch.no_grad():
        rows = layer.heads.send(parameter.new_zeros(1, 1, layer.heads.source_width))
    for name, x in zip(("edge_key", "edge_value"), rows, strict=True):
        shape = *types, x.shape[1], edge_dim or x.shape[3], x.shape[3]
        has_map = edge_dim is not None or types
        layer.register_parameter(name, nn.Parameter(parameter.new_empty(shape)) if has_map else None)


def edge_arguments(
    layer: TwoPathLayer, edge_attr: Tensor | None, edge_type: Tensor | None
) -> dict[str, Tensor | None]:
    """Return the arguments of ``attend`` for edges; ValueError if they do not fit the layer."""
    weight = layer.edge_key
    num_types = len(weight) if weight is not None and weight.dim() == 4 else None
    for name, value, option, size in (
        ("edge_attr", edge_attr, "edge_dim", layer.edge_dim),
        ("edge_type", edge_type, "num_edge_types", num_types),
    ):
        if value is None and size is not None:
            raise ValueError(f"a layer with {option}={size} needs {name}, got None")
        if value is not None and size is None:
            raise ValueError(f"a layer with {option}=None takes no {name}: pass {option} to the constructor")
    if weight is None:
        return {}
    maps = {"edge_key": layer.edge_key, "edge_value": layer.edge_value}
    return {**maps, "edge_attr": edge_attr, "edge_type": edge_type}


def senders_of_edges(call: AttentionCall, edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return edges from one sender each, and the keys and values of these senders, with features."""
    assert call.features is not None
    src, dst = edge_index
    rows = call.features.edge_rows(call.k.shape[1], call.k.dtype)
    k, v = (x.index_select(2, src) + y.transpose(0, 1) for x, y in zip((call.k, call.v), rows, strict=True))
    return torch.stack([torch.arange(len(src), device=src.device), dst]), k, v


def attach_weights(g: Any, graph: TokenGraph, weights: Tensor) -> tuple[Any, Tensor]:
    """Return the edge list of a token graph, or ``g``, and the weights; a sparse ``g`` also stores them."""
    if isinstance(g, TokenGraph):
        return graph.edges_on(weights.device), weights
    if not is_torch_sparse_tensor(g) or weights.dim() != 2:
        return g, weights
    # set_sparse_value would sort the edges of a COO tensor.
    if g.layout == torch.sparse_coo:
        size = (*g.shape, weights.shape[1])
        return torch.sparse_coo_tensor(g._indices(), weights, size, is_coalesced=g.is_coalesced()), weights
    return set_sparse_value(g, weights), weights
