"""The ``use_graph`` blocks in force, and what they give each module of their model."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface._alignment import Place

NAME: Final = "gnn_attention"
CROSS = ("crossatt", "cross_att", "encoder_att", "encdecatt", "enc_dec_att")  # in names of cross-attention

# (layer, head, length) -> graph, None: the model's own
GraphFunction = Callable[[int, int, int], TokenGraph | None]


@dataclass(frozen=True, eq=False)
class Use:
    """One ``use_graph`` in force: its graph and its modules, by id, with their names."""

    model: nn.Module
    choice: TokenGraph | GraphFunction
    replace: bool
    names: dict[int, str]
    # of modules without layer_idx, in the order of calls
    numbers: dict[int, int] = field(default_factory=dict)
    calls: list[int] = field(default_factory=lambda: [0])
    open: list[bool] = field(default_factory=lambda: [True])
    caller: ClassVar[str] = "use_graph"

    def covers(self, module: nn.Module) -> bool:
        name = self.names.get(id(module))
        return name is not None and not crosses(name, module)

    def check(self, module: nn.Module, num_dst: int, num_src: int, masked: bool) -> None:
        """ValueError where it cannot be aligned with a mask without positions, or padding."""
        if num_dst != num_src:
            got = f"{num_dst} receivers and {num_src} senders, and a mask without their positions"
            advice = "leave attention_mask to the model, or give use_graph a part of it without this module"
            raise ValueError(f"{self.caller}: {named(module)} has {got}; {advice}")
        if masked and self.replace:
            got = f"{named(module)} got a mask as a tensor, in which padding cannot be recognised"
            advice = "pass a 2-D attention_mask, or let the graph be intersected (replace=False)"
            raise ValueError(f"use_graph(replace=True): {got}: {advice}")

    def idle(self) -> str | None:
        """What to warn of on leaving the block; None: it had its effect."""
        if self.calls[0]:
            return None
        return f"no self-attention of {type(self.model).__name__} was computed in this {self.caller} block"

    def place(self, module: nn.Module, place: Place, heads: int) -> Place:
        layer = self._layer(module)
        who = f"use_graph, {self.names[id(module)] or type(module).__name__} (layer {layer})"
        if isinstance(self.choice, TokenGraph):
            return place.under(self.choice, self.replace, who)
        graphs = [self.choice(layer, head, place.length) for head in range(heads)]
        for graph in graphs:
            if graph is not None and not isinstance(graph, TokenGraph):
                got = f"must return a TokenGraph or None, got {type(graph).__name__}"
                raise TypeError(f"{who}: the function (layer, head, length) {got}")
        return place.by_head([place if g is None else place.under(g, self.replace, who) for g in graphs])

    def _layer(self, module: nn.Module) -> int:
        layer = getattr(module, "layer_idx", None)
        return self.numbers.setdefault(id(module), len(self.numbers)) if layer is None else int(layer)


class Blocks:
    """Whether any thread is in a block: compilers, which read no context, compare it before each run."""

    def __init__(self) -> None:
        self.entered, self._count, self._lock = False, 0, threading.Lock()

    @contextmanager
    def entering(self) -> Iterator[None]:
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, change: int) -> None:
        with self._lock:
            self._count += change
            self.entered = self._count > 0


blocks = Blocks()
_ACTIVE: ContextVar[tuple[Use, ...]] = ContextVar("gnn_attention.use_graph", default=())
# of all threads, for those in which torch goes backward on a GPU
_last: WeakKeyDictionary[nn.Module, tuple[Use, ...]] = WeakKeyDictionary()
_own = threading.local()  # the same for each thread, which goes backward itself on a CPU


def uses_now() -> tuple[Use, ...]:
    return _ACTIVE.get()


def uses_for(module: nn.Module) -> tuple[Use, ...]:
    """The uses in force; for a layer that is recomputed in a backward pass, those of its forward pass.

    RuntimeError if that block was left: another forward pass may have come in between.
    """
    uses, own = uses_now(), _own.__dict__.setdefault("last", WeakKeyDictionary())
    if torch._C._current_graph_task_id() == -1:
        own[module] = uses
        if uses or module in _last:
            _last[module] = uses
        return uses
    remembered: tuple[Use, ...] = own.get(module, _last.get(module, ()))
    if left := [use.caller for use in remembered if not use.open[0]]:
        reason = f"(gradient checkpointing) after its {left[0]} block was left"
        raise RuntimeError(f"{named(module)} is recomputed {reason}: call backward() inside the block")
    return remembered


@contextmanager
def in_force(use: Use) -> Iterator[None]:
    """The block; a warning on leaving it if it had no effect."""
    use.calls[0], use.open[0] = 0, True
    token = _ACTIVE.set((*_ACTIVE.get(), use))
    try:
        with blocks.entering():
            yield
        if (text := use.idle()) is not None:
            warnings.warn(text, stacklevel=3)
    finally:
        _ACTIVE.reset(token)
        use.open[0] = False


@contextmanager
def followed(module: nn.Module, twin: nn.Module) -> Iterator[None]:
    """The blocks of this context hold for ``twin``, a copy of ``module``, too."""
    copies = dict(twin.named_modules())
    own = module.named_modules()
    parts = [(id(x), id(copies[name])) for name, x in own if copies.get(name) not in (None, x)]
    tables: list[dict[int, Any]] = [table for use in uses_now() for table in (use.names, use.numbers)]
    for table in tables:
        table.update({copy: table[part] for part, copy in parts if part in table})
    try:
        yield
    finally:
        for table in tables:
            for _, copy in parts:
                table.pop(copy, None)


def check_routed(model: nn.Module) -> None:
    """ValueError or NotImplementedError unless the attention of every part of the model is ``NAME``."""
    modules = model.named_modules()
    parts = [(name, x) for name, x in modules if hasattr(getattr(x, "config", None), "_attn_implementation")]
    if not parts:
        reason = "has no part with a Hugging Face config: give a transformers model"
        raise ValueError(f"model: {type(model).__name__} {reason}")
    for name, part in parts:
        if part.config._attn_implementation == NAME:
            continue
        where = f"{type(part).__name__}{f' ({name})' if name else ''}"
        if not getattr(type(part), "_can_set_attn_implementation", lambda: True)():
            reason = "has attention of its own that does not go through transformers' AttentionInterface"
            advice = "give a part of the model without it, if there is one"
            raise NotImplementedError(f"model: {where} {reason}, so no graph can reach it; {advice}")
        got = f"{part.config._attn_implementation!r}: call model.set_attn_implementation({NAME!r})"
        raise ValueError(f"model: the attention of {where} is {got}, with this module imported")


def crosses(name: str, module: nn.Module) -> bool:
    """Whether a module of this name is cross-attention."""
    words = f"{name}.{type(module).__name__}".lower()
    return getattr(module, "is_cross_attention", False) or any(word in words for word in CROSS)


def named(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if layer is None else f" of layer {layer}")
