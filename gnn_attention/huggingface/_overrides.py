"""The blocks of ``use_graph`` and ``trace.intervene`` in force, and what they give each module of a model."""

from __future__ import annotations

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
from gnn_attention.huggingface._alignment import Place

NAME: Final = "gnn_attention"
CROSS = ("crossatt", "cross_att", "encoder_att", "encdecatt", "enc_dec_att")  # in names of cross-attention

# (layer, head, length) -> graph, None: the model's own
GraphFunction = Callable[[int, int, int], TokenGraph | None]


class Override:
    """A block of ``use_graph``: other edges for the self-attention of a model, or of a part of one."""

    caller = "use_graph"

    def __init__(self, model: nn.Module, choice: TokenGraph | GraphFunction, replaces: bool) -> None:
        check_routed(model)
        self.model, self.choice, self.replaces = model, choice, replaces
        self.names = {module: name for name, module in model.named_modules()}
        # of modules without layer_idx, in the order of calls
        self.numbers: dict[nn.Module, int] = {}
        self.num_calls, self.is_open = 0, True

    def covers(self, module: nn.Module) -> bool:
        """Whether the block is of this module's attention, which is no cross-attention."""
        name = self.names.get(module)
        words = f"{name}.{type(module).__name__}".lower()
        crosses = getattr(module, "is_cross_attention", False) or any(word in words for word in CROSS)
        return name is not None and not crosses

    def place(self, module: nn.Module, place: Place, heads: int) -> Place:
        """The place of a call of a module with the edges that it has in this block."""
        layer = self.layer_of(module)
        who = f"use_graph, {self.names[module] or type(module).__name__} (layer {layer})"
        if isinstance(self.choice, TokenGraph):
            return place.under(self.choice, self.replaces, who)
        graphs = [self.choice(layer, head, place.length) for head in range(heads)]
        for graph in graphs:
            if graph is not None and not isinstance(graph, TokenGraph):
                got = f"must return a TokenGraph or None, got {type(graph).__name__}"
                raise TypeError(f"{who}: the function (layer, head, length) {got}")
        return place.by_head([place if g is None else place.under(g, self.replaces, who) for g in graphs])

    def check_unplaced(self, module: nn.Module, own: TokenGraph, is_masked: bool) -> None:
        """ValueError where a mask has no positions to align with, or padding that cannot be seen."""
        who = f"{self.caller}: {module_name(module)}"
        if own.num_dst != own.num_src:
            got = f"{own.num_dst} receivers and {own.num_src} senders, and a mask without their positions"
            raise ValueError(f"{who} has {got}; leave attention_mask to the model")
        if is_masked and self.replaces:
            got = "got a mask as a tensor, in which padding cannot be recognised"
            raise ValueError(f"{who} {got}: pass a 2-D attention_mask, or use replace=False")

    def warning(self) -> str | None:
        """What to warn of on leaving the block; None where it had its effect."""
        if self.num_calls:
            return None
        return f"no self-attention of {type(self.model).__name__} was computed in this {self.caller} block"

    def layer_of(self, module: nn.Module) -> int:
        layer = getattr(module, "layer_idx", None)
        return self.numbers.setdefault(module, len(self.numbers)) if layer is None else int(layer)


class InterventionBlock(Override):
    """A block of ``trace.intervene`` with one intervention, of which ``interpret.trace`` knows more.

    ``check_fit(place, heads)`` may refuse it; else it returns which of the listed pairs lie in the call.
    """

    caller = "trace.intervene"

    def __init__(self, model: nn.Module, one: Any, check_fit: Callable[[Place, int], Tensor]) -> None:
        super().__init__(model, lambda *_: None, False)
        check_layers(model, one.layers)
        self.intervention, self.check_fit = one, check_fit
        pairs = one.edges.shape[1] if isinstance(one.edges, Tensor) else 0
        self.missed = torch.ones(pairs, dtype=torch.bool)  # the listed pairs that lay in no call yet
        # by length and heads: the same objects while sequences grow, so that their plans are found
        self._graphs: dict[tuple[int, int], tuple[TokenGraph, TokenGraph]] = {}

    def warning(self) -> str | None:
        text, kind = super().warning(), self.intervention.kind
        if text is not None or not self.missed.any():
            return text
        src, dst = self.intervention.edges[:, self.missed][:, 0].tolist()
        return f"{src} -> {dst} lay in no call of this {self.caller} block: there was nothing to {kind}"

    def place(self, module: nn.Module, place: Place, heads: int) -> Place:
        """Without the edges that are cut."""
        if not self.holds_in(module):
            return place
        self.missed.logical_and_(~self.check_fit(place, heads))
        return place if self.intervention.change else self.split(module, heads, place)[1]

    def holds_in(self, module: nn.Module) -> bool:
        return self.intervention.layers is None or self.layer_of(module) in self.intervention.layers

    def split(self, module: nn.Module, heads: int, place: Place) -> tuple[Place, Place]:
        """The place with the chosen edges, and with the others."""
        selection = self.intervention.select_pairs(place.length, heads)
        graphs = self._graphs.setdefault((selection.num_dst, heads), (selection, ~selection))
        who = f"intervene, {self.names[module] or type(module).__name__}"
        return place.under(graphs[0], False, who), place.under(graphs[1], False, who)


# an entry for each block of any thread: compilers, which read no context, compare its length before a run
OPEN: list[None] = []
# (module, backend, edges whose messages are changed, place) -> the backend that computes the call
WATCH: ContextVar[Callable[..., Any] | None] = ContextVar("gnn_attention.huggingface.watch", default=None)
ACTIVE: ContextVar[tuple[Override, ...]] = ContextVar("gnn_attention.use_graph", default=())
# of all threads, for those in which torch goes backward on a GPU
_last: WeakKeyDictionary[nn.Module, tuple[Override, ...]] = WeakKeyDictionary()
_own = threading.local()  # the same for each thread, which goes backward itself on a CPU


def overrides_of(module: nn.Module) -> tuple[Override, ...]:
    """The blocks in force; for a layer that is recomputed in a backward pass, those of its forward pass.

    RuntimeError if such a block was left: another forward pass may have come in between.
    """
    now, own = ACTIVE.get(), _own.__dict__.setdefault("last", WeakKeyDictionary())
    if torch._C._current_graph_task_id() == -1:
        own[module] = _last[module] = now
        return now
    remembered: tuple[Override, ...] = own.get(module, _last.get(module, ()))
    if left := [override.caller for override in remembered if not override.is_open]:
        reason = f"(gradient checkpointing) after its {left[0]} block was left"
        raise RuntimeError(f"{module_name(module)} is recomputed {reason}: call backward() inside the block")
    return remembered


@contextmanager
def block(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    OPEN.append(None)
    try:
        yield
    finally:
        OPEN.pop()
        variable.reset(token)


@contextmanager
def in_force(override: Override) -> Iterator[None]:
    """The block; a warning on leaving it if it had no effect."""
    try:
        with block(ACTIVE, (*ACTIVE.get(), override)):
            yield
        if (text := override.warning()) is not None:
            warnings.warn(text, stacklevel=3)
    finally:
        override.is_open = False


@contextmanager
def apply_to_copy(module: nn.Module, twin: nn.Module) -> Iterator[None]:
    """The blocks of this context hold for ``twin``, a copy of ``module``, too."""
    copies = dict(twin.named_modules())
    parts = [(x, copies[name]) for name, x in module.named_modules() if copies.get(name, x) is not x]
    tables: list[dict[nn.Module, Any]] = [table for x in ACTIVE.get() for table in (x.names, x.numbers)]
    for table in tables:
        table.update({copy: table[part] for part, copy in parts if part in table})
    try:
        yield
    finally:
        for table in tables:
            for _, copy in parts:
                table.pop(copy, None)


def check_layers(model: nn.Module, layers: Sequence[int] | None) -> None:
    """IndexError for a layer that the model lacks."""
    numbers = (getattr(part, "layer_idx", None) for part in model.modules())
    known = {number for number in numbers if isinstance(number, int)}
    if known and not known.issuperset(layers or ()):
        raise IndexError(f"layers must be among {sorted(known)}, the attention layers, got {layers}")


def check_routed(model: nn.Module) -> None:
    """ValueError or NotImplementedError unless the attention of every part of the model is ``NAME``."""
    parts = [(name, x) for name, x in model.named_modules() if _implementation(x) is not None]
    if not parts:
        raise ValueError(f"model: {type(model).__name__} has no part with a Hugging Face config")
    for name, part in parts:
        where = f"{type(part).__name__}{f' ({name})' if name else ''}"
        if _implementation(part) == NAME:
            continue
        if not getattr(type(part), "_can_set_attn_implementation", lambda: True)():
            raise NotImplementedError(f"model: {where} has attention of its own: give a part without it")
        got = f"{_implementation(part)!r}: call model.set_attn_implementation({NAME!r})"
        raise ValueError(f"model: the attention of {where} is {got}")


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def module_name(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if layer is None else f" of layer {layer}")
