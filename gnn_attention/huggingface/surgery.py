"""Edges taken away from Hugging Face models, or only their messages: ``trace.operate`` on such a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

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
    """A selection of edges in force: cut, or muted.

    ``select(length, heads)`` is the selection over whole sequences of at least that length, ``check(place,
    heads)`` raises where it does not fit. ``layers`` None: all.
    """

    select: Callable[[int, int], TokenGraph]
    check_fit: Callable[[Place, int], None]
    layers: tuple[int, ...] | None
    mutes: bool
    _chosen: dict[tuple[int, int], tuple[TokenGraph, TokenGraph]] = field(default_factory=dict)

    def place(self, module: nn.Module, place: Place, heads: int) -> Place:
        """Without the edges that are cut."""
        if not self._holds_in(module):
            return place
        self.check_fit(place, heads)
        return place if self.mutes else place.under(self._both(place, heads)[1], False, self._who(module))

    def divide(self, module: nn.Module, place: Place, heads: int) -> tuple[Place, Place] | None:
        """The place with the muted edges alone, and with the others; None where nothing is muted."""
        if not self.mutes or not self._holds_in(module):
            return None
        muted, others = (place.under(graph, False, self._who(module)) for graph in self._both(place, heads))
        return muted, others

    def _holds_in(self, module: nn.Module) -> bool:
        return self.layers is None or self._layer(module) in self.layers

    def _both(self, place: Place, heads: int) -> tuple[TokenGraph, TokenGraph]:
        # the selection and all else, the same objects while sequences grow, so that their plans are found
        selection = self.select(place.length, heads)
        key = selection.num_dst, heads
        return self._chosen.setdefault(key, (selection, ~selection))

    def _who(self, module: nn.Module) -> str:
        return f"operate, {self.names[id(module)] or type(module).__name__}"


@dataclass(frozen=True)
class Watching(Backend):
    """A backend that watches another, so that edges are muted below it: ``around(other, muted)``."""

    inner: str | Backend = "auto"
    around: Callable[[str | Backend, tuple[TokenGraph, ...]], Backend] | None = None


def edited(
    model: nn.Module,
    select: Callable[[int, int], TokenGraph],
    check_fit: Callable[[Place, int], None],
    layers: tuple[int, ...] | None,
    mutes: bool,
) -> AbstractContextManager[None]:
    """A block with one :class:`Edit`; IndexError for a layer that the model lacks."""
    _overrides.check_routed(model)
    numbers = (getattr(part, "layer_idx", None) for part in model.modules())
    known = {number for number in numbers if isinstance(number, int)}
    if known and not known.issuperset(layers or ()):
        raise IndexError(f"layers must be among {sorted(known)}, the attention layers, got {layers}")
    names = {id(module): name for name, module in model.named_modules()}
    edit = Edit(
        *(model, _own_graph, False, names), select=select, check_fit=check_fit, layers=layers, mutes=mutes
    )
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
    if isinstance(backend, Watching) and backend.around is not None:
        below = Backend("muted edges", partial(_run_muted, tuple(muted), place.own, backend.inner))
        return backend.around(below, tuple(muted))
    return Backend("muted edges", partial(_run_muted, tuple(muted), place.own, backend))


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
