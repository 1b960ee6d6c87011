"""Edges taken away from Hugging Face models, or only their messages: ``trace.operate`` on such a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gnn_attention import edges
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import AttentionInfo, attended
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface import _overrides
from gnn_attention.huggingface._alignment import Place


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit(_overrides.Use):
    """A ``Surgery`` of ``interpret.trace`` in force, which ``check_fit(place, heads)`` may refuse."""

    surgery: Any
    check_fit: Callable[[Place, int], None]
    _chosen: dict[tuple[int, int], tuple[TokenGraph, TokenGraph]] = field(default_factory=dict)

    def place(self, module: nn.Module, place: Place, heads: int) -> Place:
        """Without the edges that are cut."""
        if not self._holds_in(module):
            return place
        self.check_fit(place, heads)
        parts = None if self.surgery.kind == "mute" else self._parts(module, place, heads)
        return place if parts is None else parts[1]

    def divide(self, module: nn.Module, place: Place, heads: int) -> tuple[Place, Place] | None:
        """The place with the muted edges alone, and with the others; None where nothing is muted."""
        mutes = self.surgery.kind == "mute" and self._holds_in(module)
        return self._parts(module, place, heads) if mutes else None

    def _holds_in(self, module: nn.Module) -> bool:
        return self.surgery.layers is None or self._layer(module) in self.surgery.layers

    def _parts(self, module: nn.Module, place: Place, heads: int) -> tuple[Place, Place]:
        selection = self.surgery.over(place.length, heads)
        # the same objects while sequences grow, so that their plans are found
        graphs = self._chosen.setdefault((selection.num_dst, heads), (selection, ~selection))
        who = f"operate, {self.names[id(module)] or type(module).__name__}"
        return place.under(graphs[0], False, who), place.under(graphs[1], False, who)


@dataclass(frozen=True)
class Watching(Backend):
    """A backend that watches calls, ``watch(inner, muted, call)``; edges are muted in ``inner``."""

    inner: str | Backend = "auto"
    watch: Callable[..., tuple[Tensor, Tensor | None]] | None = None

    @classmethod
    def over(cls, watch: Any, inner: str | Backend, muted: tuple[TokenGraph, ...] = ()) -> Watching:
        return cls("watching", partial(watch, inner, muted), inner=inner, watch=watch)


def edited(
    model: nn.Module, surgery: Any, check_fit: Callable[[Place, int], None]
) -> AbstractContextManager[None]:
    """A block with one :class:`Edit`; IndexError for a layer that the model lacks."""
    _overrides.check_routed(model)
    numbers = (getattr(part, "layer_idx", None) for part in model.modules())
    known = {number for number in numbers if isinstance(number, int)}
    if known and not known.issuperset(surgery.layers or ()):
        raise IndexError(f"layers must be among {sorted(known)}, the attention layers, got {surgery.layers}")
    names = {id(module): name for name, module in model.named_modules()}
    edit = Edit(model, _own_graph, False, names, surgery=surgery, check_fit=check_fit)
    return _overrides.in_force(edit)


def _own_graph(layer: int, head: int, length: int) -> None:
    return None


def muting(
    uses: Sequence[_overrides.Use], module: nn.Module, place: Place, heads: int, backend: str | Backend
) -> str | Backend:
    """The backend with the edges muted that the uses mute in a module."""
    muted: list[TokenGraph] = []
    for use in uses:
        parts = use.divide(module, place, heads) if isinstance(use, Edit) else None
        if parts is not None:
            muted, place = [*muted, parts[0].own], parts[1]
    if not muted:
        return backend
    inner = backend.inner if isinstance(backend, Watching) else backend
    found = Backend("muted edges", partial(_run_muted, tuple(muted), place.own, inner))
    return Watching.over(backend.watch, found, tuple(muted)) if isinstance(backend, Watching) else found


def _run_muted(
    muted: tuple[TokenGraph, ...], others: TokenGraph, inner: str | Backend, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """The sum over the other in-edges, with the weights and the lse of all."""
    bare = replace(call, sink_logits=None, with_lse=True)
    out, lse = _result(replace(bare, graph=others), inner)
    for part in muted:
        # what is not sent is not read
        silent = replace(bare, graph=part, v=torch.zeros_like(call.v), dropout=0.0)
        out, lse = edges.merge(out, lse, torch.zeros_like(out), _result(silent, inner)[1])
    out, lse = call.with_sinks(out, lse)
    return out.to(call.q.dtype), lse


def _result(call: AttentionCall, inner: str | Backend) -> tuple[Tensor, Tensor]:
    out, lse = attended(call, inner)
    return out, AttentionInfo(call, lse).lse
