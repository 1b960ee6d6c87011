"""Edges of Hugging Face models taken away, or their messages changed: ``trace.operate`` on such a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attended_in_parts
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface import _overrides
from gnn_attention.huggingface._alignment import Place

# of values v whose first slot has this position in its sample: change(first, v)
Change = Callable[[Any, Tensor], Tensor]
# edges, and the values that they carry instead of v
Part = tuple[TokenGraph, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit(_overrides.Use):
    """A ``Surgery`` of ``interpret.trace`` in force, which ``check_fit(place, heads)`` may refuse.

    Else it returns which of the listed pairs lie in the call; those that lay in none yet are ``missed``.
    """

    surgery: Any
    check_fit: Callable[[Place, int], Tensor]
    missed: Tensor
    caller: ClassVar[str] = "trace.operate"
    _chosen: dict[tuple[int, int], tuple[TokenGraph, TokenGraph]] = field(default_factory=dict)

    def idle(self) -> str | None:
        text, kind = super().idle(), self.surgery.kind
        if text is not None or not self.missed.any():
            return text
        src, dst = self.surgery.edges[:, self.missed][:, 0].tolist()
        return f"{src} -> {dst} lay in no call of this {self.caller} block: there was nothing to {kind}"

    def place(self, module: nn.Module, place: Place, heads: int) -> Place:
        """Without the edges that are cut."""
        if not self._holds_in(module):
            return place
        self.missed.logical_and_(~self.check_fit(place, heads))
        return place if self.surgery.change else self._parts(module, heads, place)[1]

    def divided(self, module: nn.Module, parts: list[Any], heads: int) -> list[Any]:
        """Parts ``(place, changes of its values)`` with the edges apart whose messages this one changes."""
        if self.surgery.change is None or not self._holds_in(module):
            return parts
        change = partial(self.surgery.change, self._layer(module))
        found: list[Any] = self.surgery.divided(parts, partial(self._parts, module, heads), change)
        return found

    def _holds_in(self, module: nn.Module) -> bool:
        return self.surgery.layers is None or self._layer(module) in self.surgery.layers

    def _parts(self, module: nn.Module, heads: int, place: Place) -> tuple[Place, Place]:
        selection = self.surgery.over(place.length, heads)
        # the same objects while sequences grow, so that their plans are found
        graphs = self._chosen.setdefault((selection.num_dst, heads), (selection, ~selection))
        who = f"operate, {self.names[id(module)] or type(module).__name__}"
        return place.under(graphs[0], False, who), place.under(graphs[1], False, who)


@dataclass(frozen=True)
class Watching(Backend):
    """A backend that watches calls, ``watch(inner, changed, place, call)``; ``inner`` changes messages.

    ``changed``: graphs of edges with the function of their values; ``place``: the slots of the call.
    """

    inner: str | Backend = "auto"
    watch: Callable[..., tuple[Tensor, Tensor | None]] | None = None

    @classmethod
    def over(
        cls, watch: Any, inner: str | Backend, changed: Sequence[Part] = (), place: Any = None
    ) -> Watching:
        return cls("watching", partial(watch, inner, changed, place), inner=inner, watch=watch)


def check_layers(model: nn.Module, layers: Sequence[int] | None) -> None:
    """IndexError for a layer that the model lacks."""
    numbers = (getattr(part, "layer_idx", None) for part in model.modules())
    known = {number for number in numbers if isinstance(number, int)}
    if known and not known.issuperset(layers or ()):
        raise IndexError(f"layers must be among {sorted(known)}, the attention layers, got {layers}")


def edited(
    model: nn.Module, surgery: Any, check_fit: Callable[[Place, int], Tensor]
) -> AbstractContextManager[None]:
    """A block with one :class:`Edit`; IndexError for a layer that the model lacks."""
    _overrides.check_routed(model)
    check_layers(model, surgery.layers)
    names = {id(module): name for name, module in model.named_modules()}
    pairs = surgery.edges.shape[1] if isinstance(surgery.edges, Tensor) else 0
    more: dict[str, Any] = {"check_fit": check_fit, "missed": torch.ones(pairs, dtype=torch.bool)}
    return _overrides.in_force(Edit(model, lambda *_: None, False, names, surgery=surgery, **more))


def changing(
    uses: Sequence[_overrides.Use], module: nn.Module, place: Place, heads: int, backend: str | Backend
) -> str | Backend:
    """The backend with the messages changed that the uses change in a module."""
    parts: list[tuple[Place, tuple[Change, ...]]] = [(place, ())]
    for use in uses:
        parts = use.divided(module, parts, heads) if isinstance(use, Edit) else parts
    # of each sample
    first = place.own.src_offset - (0 if place.left is None else place.left)
    found = [(part.own, partial(_values, changes, first)) for part, changes in parts]
    inner = backend.inner if isinstance(backend, Watching) else backend
    if len(found) > 1:
        inner = Backend("changed messages", partial(_run_changed, found, inner))
    if isinstance(backend, Watching):
        return Watching.over(backend.watch, inner, found[1:], place)
    return inner


def _values(changes: tuple[Change, ...], first: Any, v: Tensor) -> Tensor:
    for change in changes:
        v = change(first, v)
    return v


def _run_changed(parts: Sequence[Part], inner: str | Backend, call: AttentionCall) -> tuple[Tensor, Tensor]:
    divided = [replace(call, graph=graph, v=values(call.v)) for graph, values in parts]
    return attended_in_parts(call, divided, inner)
