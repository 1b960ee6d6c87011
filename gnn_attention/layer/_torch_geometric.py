"""What stands between the layer and torch_geometric: who looks on, settings, and what callers hand in."""

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
from gnn_attention.attend import Explanation, checked_backend, explain
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import explain_by_size
from gnn_attention.backends.traced import TracedEdges, is_edge_list
from gnn_attention.graph import TokenGraph, edge_list
from gnn_attention.heads import StandardHeads

STEPS = ("edge_update", "message", "aggregate", "update")
# torch_geometric renders these two anew for each class, and has no hook on update.
RENDERED = ("propagate", "edge_updater")
# What the layer gives to its steps, besides what torch_geometric has for each: index, size_i, ...
INPUTS = {
    "edge_update": ("q_i", "k_j", "call", "q", "k", "q_j", "k_i"),
    **dict.fromkeys(("message", "aggregate", "update"), ("v_j", "alpha", "v", "v_i")),
}
# What the layer follows of torch_geometric's settings, and what to do instead of setting another value.
SETTINGS = {
    "flow": ("source_to_target", "reverse the edges instead, by graph.T or edge_index.flip(0)"),
    "decomposed_layers": (1, "a message is made and updated with all its channels at once"),
    "aggr": ("add", "override aggregate instead"),
}
HOOKS = {f"_{step}_forward_{kind}hooks": step for step in ("propagate", *STEPS) for kind in ("", "pre_")}
# torch_geometric renders a class into a module of its name: one thread at a time.
_rendering = threading.RLock()


class TwoPathLayer(MessagePassing):
    """A sum of messages from ``src`` to ``dst`` that need not be made while nobody looks at them."""

    heads: Any
    backend: str | Backend
    # The steps of the layer itself, with which those of every subclass are compared.
    own_steps: ClassVar[dict[str, Any]]

    def __init__(self, node_dim: int) -> None:
        with _rendering:
            self._forget_other_classes()
            super().__init__(aggr="add", flow="source_to_target", node_dim=node_dim)
        # A forward of a subclass may give its steps other inputs.
        if not all(map(self._is_own, (*RENDERED, "forward"))):
            return
        # A step that asks for more would be given a global variable of that name, as notebooks have many.
        for step, inputs in INPUTS.items():
            given = (*inputs, *sorted(self.special_args))
            for name, parameter in self.inspector.get_param_dict(step).items():
                if name not in given and parameter.default is Parameter.empty:
                    asked = f"{step} of {type(self).__name__} asks for {name}"
                    raise TypeError(f"{asked}, which the layer does not give: it may take {', '.join(given)}")

    def __setstate__(self, data: dict[str, Any]) -> None:
        with _rendering:
            self._forget_other_classes()
            super().__setstate__(data)

    def _forget_other_classes(self) -> None:
        """Let torch_geometric render for this class what it would take from a parent or a namesake."""
        # What it rendered for a parent it takes for the original, in which an explainer would mask nothing;
        # and it finds its functions again by the name of a class, which a notebook may define anew.
        kind = type(self)
        for name in RENDERED:
            if name not in vars(kind):
                sys.modules.pop(f"{kind.__module__}_{kind.__name__}_{name}", None)
                if getattr(kind, name) is getattr(kind, f"_jinja_{name}", None):
                    setattr(kind, name, getattr(MessagePassing, name))

    def _is_own(self, name: str) -> bool:
        """Whether the class has this function from the layer itself, rendered or not."""
        kind = type(self)
        return getattr(kind, f"_orig_{name}", getattr(kind, name)) is self.own_steps[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "backend":
            if value is None:
                message = "backend=None is deprecated: write backend='message_passing'"
                # The constructor sets the first one: its caller's line is one further up.
                warnings.warn(message, DeprecationWarning, stacklevel=2 if "backend" in self.__dict__ else 3)
                value = "message_passing"
            value = checked_backend(value)
        if name in SETTINGS and value != SETTINGS[name][0]:
            expected, advice = SETTINGS[name]
            raise NotImplementedError(f"{name} must stay {expected!r}, got {value!r}: {advice}")
        if name == "aggr_module" and not isinstance(value, SumAggregation) and self._is_own("aggregate"):
            raise NotImplementedError(f"aggr must stay 'add', got {value}: {SETTINGS['aggr'][1]}")
        # torch would file a module under the submodules, and the function of the class would go on running.
        if isinstance(value, nn.Module) and name in (*STEPS, *RENDERED):
            raise TypeError(
                f"{name} must be a function, got the module {type(value).__name__}: "
                f"write layer.{name} = module.forward, and keep the module under another name to train it"
            )
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError; ``torch.jit.script`` calls this for a module and each of its parts."""
        raise NotImplementedError(
            f"torch.jit.script cannot compile a {type(self).__name__}, whose graph is no tensor: "
            "use torch.compile, torch.export or torch.jit.trace"
        )

    def watcher(self) -> str | None:
        """Who needs the messages of all edges, in words; None where nobody does."""
        kind, own = type(self), self.__dict__
        if self.explain:
            return "an explainer masks the edges"
        for name, step in HOOKS.items():
            if own.get(name):
                return f"there is a hook on {step}"
        if any(step in own for step in (*STEPS, "edge_updater")):
            return "the layer has a step of its own"
        if not all(self._is_own(step) for step in (*STEPS, *RENDERED)):
            return f"{kind.__name__} overrides a step"
        propagate = own.get("propagate", kind.propagate)
        # Dynamo answers getattr(method, "__func__", None) with None.
        function = propagate.__func__ if isinstance(propagate, MethodType) else propagate
        replaced = function not in (kind._jinja_propagate, kind._orig_propagate)
        return "propagate is replaced" if replaced else None

    def takes_messages(self) -> bool:
        """Whether a call runs the four steps for all edges, whatever its graph."""
        is_recorded = bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
        return self.backend == "message_passing" or self.watcher() is not None or is_recorded

    def explain_path(self, g: Any, num_dst: int | None = None, num_src: int | None = None) -> Explanation:
        """Which path a call along ``g`` takes, and why; for "auto" as :func:`gnn_attention.explain` says.

        ``g`` is what the layer takes; an ``edge_index`` does not know its sizes, which ``num_dst`` and
        ``num_src`` give. "message_passing" calls the four functions of PyG.

        >>> from gnn_attention import MessagePassingAttention, patterns
        >>> layer = MessagePassingAttention(StandardHeads(width=8, num_heads=2))
        >>> layer.explain_path(patterns.causal(3)).choice
        'dense'
        """
        graph = g if isinstance(g, TokenGraph) else convert.from_pyg(g, num_dst, num_src, parallel="keep")
        if (watcher := self.watcher()) is not None:
            return Explanation(repr(graph), "message_passing", f"somebody looks on: {watcher}")
        if self.backend != "auto":
            name = self.backend.name if isinstance(self.backend, Backend) else self.backend
            return Explanation(repr(graph), name, "it is the backend of the layer")
        explain_auto = explain if graph is g else explain_by_size
        return explain_auto(graph, self.heads.num_heads, self.heads.head_dim)

    def _read_graph(self, g: Any, num_dst: int, num_src: int) -> TokenGraph:
        if not isinstance(g, TokenGraph) and is_edge_list(g):
            for_messages = self.takes_messages()
            # The edges are an input of a program, whose later calls have other sizes and numbers.
            is_input = torch.compiler.is_compiling() and (for_messages or self.backend == "auto")
            if is_input or (for_messages and type(g) is Tensor and g.dtype in edge_list.SIGNED_DTYPES):
                return TracedEdges.of(g, num_dst, num_src)
        if self.fuse and (is_sparse(g) or (self.SUPPORTS_FUSED_EDGE_INDEX and isinstance(g, EdgeIndex))):
            raise NotImplementedError(
                "message_and_aggregate is no step of this layer and would not run for a sparse graph: "
                "override message and aggregate, or give edge_index"
            )
        return fitting_graph(g, num_dst, num_src)

    @property
    def in_channels(self) -> int | tuple[int, int]:
        """The width of a state, or ``(sender's, receiver's)`` where they differ."""
        source_width, width = int(self.heads.source_width), int(self.heads.width)
        return width if source_width == width else (source_width, width)

    @property
    def out_channels(self) -> int:
        """The width of an update."""
        if isinstance(self.heads, StandardHeads) and self.heads.W_O is None:
            return self.heads.num_heads * self.heads.W_V.shape[-1]
        return int(self.heads.width)

    def __repr__(self) -> str:
        heads = self.heads
        form = type(heads).__name__.removesuffix("Heads").lower()
        sizes = f"{form}, heads={heads.num_heads}, head_dim={heads.head_dim}"
        return f"{type(self).__name__}({sizes}, backend={self.backend!r})"


def read_states(x: Any, g: Any, size: Any, width: int) -> tuple[Tensor, Tensor]:
    """``(x_src, x_dst)``, with states of 0 of this width in place of PyG's None."""
    sizes = None if size is None else tuple(checks.sizes("size", size))
    pair = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
    if len(pair) == 2 and pair[1] is None and isinstance(pair[0], Tensor):
        x_src = pair[0]
        if x_src.dim() not in (2, 3):
            raise ValueError(f"x must be [N, d] or [B, T, d] (both of a pair alike), got {list(x_src.shape)}")
        if not sizes and type(g) is Tensor and g.layout == torch.strided:
            raise ValueError(
                "x=(x_src, None) does not say how many receivers: give size=(senders, receivers)"
            )
        graph = g if sizes or isinstance(g, TokenGraph) else convert.from_pyg(g, None, x_src.shape[-2])
        num_dst = sizes[-1] if sizes else graph.num_dst
        pair = x_src, x_src.new_zeros(*x_src.shape[:-2], num_dst, width)
    if len(pair) != 2 or not all(isinstance(states, Tensor) for states in pair):
        got = ", ".join(type(states).__name__ for states in pair)
        raise TypeError(f"x must be a tensor [N, d] or [B, T, d], or a pair (x_src, x_dst), got {got}")
    x_src, x_dst = pair
    if x_src.dim() not in (2, 3) or x_src.shape[:-2] != x_dst.shape[:-2] or x_src.dim() != x_dst.dim():
        shapes = f"{list(x_src.shape)} and {list(x_dst.shape)}"
        raise ValueError(f"x must be [N, d] or [B, T, d] (both of a pair alike), got {shapes}")
    if sizes not in (None, (x_src.shape[-2], x_dst.shape[-2])):
        expected = f"({x_src.shape[-2]}, {x_dst.shape[-2]})"
        raise ValueError(f"size must be (senders, receivers) = {expected}, as x has them, got {size}")
    return x_src, x_dst


def fitting_graph(g: Any, num_dst: int, num_src: int) -> TokenGraph:
    """``g``, or the graph of what torch_geometric has; ValueError where it does not fit the states."""
    graph = g if isinstance(g, TokenGraph) else convert.from_pyg(g, num_dst, num_src, parallel="keep")
    if (graph.num_src, graph.num_dst) != (num_src, num_dst):
        raise ValueError(f"{graph!r} does not fit x with {num_src} senders and {num_dst} receivers")
    return graph


def nodes(x: Tensor, call: AttentionCall, batched: bool) -> Tensor:
    """q, k or v of the call as ``[B, N, H, D]``, or without a batch ``[N, H, D]``, in the dtype of sums."""
    num_heads = int(call.q.shape[1])
    x = x if x.shape[1] == num_heads else edge_softmax.per_query_head(x, num_heads)
    x = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)
    return x if batched else x.squeeze(0)


def with_edges(g: Any, graph: TokenGraph, weights: Tensor) -> tuple[Any, Tensor]:
    """The edges in the form they came in, and their weights: the values of a sparse adjacency, as in PyG."""
    if isinstance(g, TokenGraph):
        return graph.edges_on(weights.device), weights
    if not is_torch_sparse_tensor(g) or weights.dim() != 2:
        return g, weights
    # What a COO tensor stores need not be sorted.
    if g.layout == torch.sparse_coo:
        size = (*g.shape, weights.shape[1])
        return torch.sparse_coo_tensor(g._indices(), weights, size, is_coalesced=g.is_coalesced()), weights
    return set_sparse_value(g, weights), weights
