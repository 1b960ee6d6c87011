"""Apply the contexts of ``use_graph`` and ``trace.intervene`` to the modules of a model."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface._alignment import CallLayout

NAME: Final = "gnn_attention"
CROSS_NAMES = ("crossatt", "cross_att", "encoder_att", "encdecatt", "enc_dec_att")

# (layer, head, length) -> graph, or None for the model's own graph
GraphFunction = Callable[[int, int, int], TokenGraph | None]


class GraphContext:
    """A context of ``use_graph``, which changes the edges of a model's self-attention."""

    caller = "use_graph"

    def __init__(self, model: nn.Module, choice: TokenGraph | GraphFunction, is_replacement: bool) -> None:
        check_implementation(model)
        self.model = model
        self.graph_or_function = choice
        self.is_replacement = is_replacement
        self.names = {module: name for name, module in model.named_modules()}
        # Modules without layer_idx are numbered in the order of their calls.
        self.layer_indices: dict[nn.Module, int] = {}
        self.num_calls = 0
        self.is_open = True

    def is_self_attention(self, module: nn.Module) -> bool:
        """Return whether a module belongs to this context's model and is not cross-attention."""
        name = self.names.get(module)
        full_name = f"{name}.{type(module).__name__}".lower()
        is_cross = getattr(module, "is_cross_attention", False) or any(x in full_name for x in CROSS_NAMES)
        return name is not None and not is_cross

    def apply(self, module: nn.Module, layout: CallLayout, num_heads: int) -> CallLayout:
        """Return the layout of a call after this context has changed its edges."""
        layer = self.layer_index(module)
        caller = f"use_graph, {self.names[module] or type(module).__name__} (layer {layer})"
        if isinstance(self.graph_or_function, TokenGraph):
            return layout.restrict(self.graph_or_function, self.is_replacement, caller)
        graphs = [self.graph_or_function(layer, head, layout.length) for head in range(num_heads)]
        for g in graphs:
            if g is not None and not isinstance(g, TokenGraph):
                raise TypeError(
                    f"{caller}: the function (layer, head, length) must return a TokenGraph or "
                    f"None, got {type(g).__name__}"
                )
        layouts = [layout if g is None else layout.restrict(g, self.is_replacement, caller) for g in graphs]
        return layout.combine_heads(layouts)

    def check_tensor_mask(self, module: nn.Module, graph: TokenGraph, has_mask: bool) -> None:
        """Raise ValueError if a mask without positions cannot be aligned, or may hide padding."""
        caller = f"{self.caller}: {module_name(module)}"
        if graph.num_dst != graph.num_src:
            raise ValueError(f"{caller} has no positions for {graph!r}: leave attention_mask to the model")
        if has_mask and self.is_replacement:
            raise ValueError(f"{caller} cannot see padding in a 4-D mask: pass a 2-D one, or replace=False")

    def warning_text(self) -> str | None:
        if self.num_calls:
            return None
        return f"no self-attention of {type(self.model).__name__} was computed in this {self.caller} context"

    def layer_index(self, module: nn.Module) -> int:
        index = getattr(module, "layer_idx", None)
        return self.layer_indices.setdefault(module, len(self.layer_indices)) if index is None else int(index)


class InterventionContext(GraphContext):
    """A context of ``trace.intervene`` with one intervention.

    ``find_pairs(layout, num_heads)`` marks the listed pairs that lie in a call, or raises an error.
    """

    caller = "trace.intervene"

    def __init__(self, model: nn.Module, intervention: Any, find_pairs: Callable[..., Tensor]) -> None:
        super().__init__(model, lambda *_: None, False)
        check_layers(model, intervention.layers)
        self.intervention, self.find_pairs = intervention, find_pairs
        num_pairs = intervention.edges.shape[1] if isinstance(intervention.edges, Tensor) else 0
        self.is_unmatched = torch.ones(num_pairs, dtype=torch.bool)
        # The calls of a growing sequence reuse these graph objects, and so their plans.
        self._graphs: dict[tuple[int, int], tuple[TokenGraph, TokenGraph]] = {}

    def warning_text(self) -> str | None:
        text, kind = super().warning_text(), self.intervention.kind
        if text is not None or not self.is_unmatched.any():
            return text
        src, dst = self.intervention.edges[:, self.is_unmatched][:, 0].tolist()
        return f"{src} -> {dst} lay in no call of this {self.caller} context: there was nothing to {kind}"

    def apply(self, module: nn.Module, layout: CallLayout, num_heads: int) -> CallLayout:
        if not self.covers(module):
            return layout
        self.is_unmatched.logical_and_(~self.find_pairs(layout, num_heads))
        return layout if self.intervention.change else self.split(module, num_heads, layout)[1]

    def covers(self, module: nn.Module) -> bool:
        return self.intervention.layers is None or self.layer_index(module) in self.intervention.layers

    def split(self, module: nn.Module, num_heads: int, layout: CallLayout) -> tuple[CallLayout, CallLayout]:
        """Return the layout with only the selected edges, and the layout with all other edges."""
        selection = self.intervention.select_pairs(layout.length, num_heads)
        graphs = self._graphs.setdefault((selection.num_dst, num_heads), (selection, ~selection))
        caller = f"intervene, {self.names[module] or type(module).__name__}"
        return layout.restrict(graphs[0], False, caller), layout.restrict(graphs[1], False, caller)


# This list has one entry for each open context of any thread. torch.compile cannot read context
# variables, but it guards on the length of this list.
OPEN_CONTEXTS: list[None] = []
# (module, backend, edges whose messages are changed, layout) -> the backend that computes the call
BACKEND_WRAPPER: ContextVar[Callable[..., Any] | None] = ContextVar("backend_wrapper", default=None)
ACTIVE_CONTEXTS: ContextVar[tuple[GraphContext, ...]] = ContextVar("gnn_attention.use_graph", default=())
# These hold the contexts of each module's last forward pass, in any thread and in this thread. On
# a CPU the backward pass runs in the caller's thread, on a GPU in another one.
_last_contexts: WeakKeyDictionary[nn.Module, tuple[GraphContext, ...]] = WeakKeyDictionary()
_thread = threading.local()


def find_contexts(module: nn.Module) -> tuple[GraphContext, ...]:
    """Return the active contexts, or those of the forward pass if backward recomputes the module."""
    active = ACTIVE_CONTEXTS.get()
    thread_contexts = _thread.__dict__.setdefault("last_contexts", WeakKeyDictionary())
    if torch._C._current_graph_task_id() == -1:
        thread_contexts[module] = _last_contexts[module] = active
        return active
    contexts: tuple[GraphContext, ...] = thread_contexts.get(module, _last_contexts.get(module, ()))
    if closed_callers := [context.caller for context in contexts if not context.is_open]:
        raise RuntimeError(
            f"{module_name(module)} is recomputed (gradient checkpointing) outside its "
            f"{closed_callers[0]} context: call backward() inside it"
        )
    return contexts


@contextmanager
def set_variable(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    OPEN_CONTEXTS.append(None)
    try:
        yield
    finally:
        OPEN_CONTEXTS.pop()
        variable.reset(token)


@contextmanager
def activate(context: GraphContext) -> Iterator[None]:
    try:
        with set_variable(ACTIVE_CONTEXTS, (*ACTIVE_CONTEXTS.get(), context)):
            yield
        if (message := context.warning_text()) is not None:
            warnings.warn(message, stacklevel=3)
    finally:
        context.is_open = False


@contextmanager
def apply_to_copy(module: nn.Module, module_copy: nn.Module) -> Iterator[None]:
    """Also apply the active contexts to ``module_copy``, a copy of ``module``."""
    copies = dict(module_copy.named_modules())
    pairs = [(x, copies[name]) for name, x in module.named_modules() if copies.get(name, x) is not x]
    mappings: list[Any] = [m for x in ACTIVE_CONTEXTS.get() for m in (x.names, x.layer_indices)]
    for mapping in mappings:
        mapping.update({copy: mapping[original] for original, copy in pairs if original in mapping})
    try:
        yield
    finally:
        for mapping in mappings:
            for _, copy in pairs:
                mapping.pop(copy, None)


def check_layers(model: nn.Module, layers: Sequence[int] | None) -> None:
    layer_indices = (getattr(module, "layer_idx", None) for module in model.modules())
    indices = {index for index in layer_indices if isinstance(index, int)}
    if indices and not indices.issuperset(layers or ()):
        raise IndexError(f"layers must be among {sorted(indices)}, the attention layers, got {layers}")


def check_implementation(model: nn.Module) -> None:
    """Raise ValueError or NotImplementedError unless all attention of the model is set to ``NAME``."""
    attribute = "_attn_implementation"
    configs = [(name, x, getattr(x, "config", None)) for name, x in model.named_modules()]
    implementations = [(name, x, getattr(config, attribute, None)) for name, x, config in configs]
    if all(kind is None for *_, kind in implementations):
        raise ValueError(f"model: {type(model).__name__} has no part with a Hugging Face config")
    for name, module, kind in implementations:
        if kind in (None, NAME):
            continue
        label = f"{type(module).__name__}{f' ({name})' if name else ''}"
        if not getattr(type(module), "_can_set_attn_implementation", lambda: True)():
            raise NotImplementedError(f"model: {label} has attention of its own: pass a part without it")
        raise ValueError(f"attention of {label} is {kind!r}: call model.set_attn_implementation({NAME!r})")


def module_name(module: nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if index is None else f" of layer {index}")
