"""The record of a Hugging Face model whose attention is ``"gnn_attention"``: one LayerTrace for each call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from gnn_attention import convert
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.attend import run_attention
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.interpret.trace.layer import LayerTrace

PACKAGE = "gnn_attention.huggingface"


@dataclass(eq=False)
class Projection:
    """The output projection of an attention module, found by its input; ``part`` is the module's name."""

    part: str
    heads: int
    module: Any = None

    @cached_property
    def W_O(self) -> Float[Tensor, "heads value_dim width"]:
        if self.module is None:
            raise NotImplementedError(
                f"{self.part}: no plain linear map takes the result of its heads, so its messages are "
                "unknown; weights and values are there"
            )
        weight: Tensor = self.module.weight
        weight = weight.mT if isinstance(self.module, nn.Linear) else weight
        return weight.reshape(self.heads, -1, weight.shape[1])

    @property
    def b_O(self) -> Float[Tensor, " width"] | None:
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias


def _move_padding_behind(trace: LayerTrace, left: Int[Tensor, " samples"], crosses: bool) -> LayerTrace:
    """The trace with a sample's padding on the left moved behind its tokens: token 0 is its first one."""
    own, batch = trace.graph, len(trace.q)
    to_src = (left - own.src_offset).clamp(min=0).expand(batch)
    to_dst = 0 * to_src if crosses else (left - own.dst_offset).clamp(min=0).expand(batch)
    turns = tuple(to_dst.tolist()), tuple(to_src.tolist())
    graph, call = memoized(_roll_graph, own, turns), trace.call
    score_mod = call.score_mod and partial(_score_at_slots, call.score_mod, own, (to_dst, to_src))
    tensors: dict[str, Any] = {name: _roll_samples(getattr(trace, name), to_src, 2) for name in "kv"}
    tensors |= {name: _roll_samples(getattr(trace, name), to_dst, 2) for name in "qz"}
    call = replace(call, graph=graph, score_mod=score_mod, **{name: tensors[name] for name in "qkv"})
    lse = None if trace._lse is None else _roll_samples(trace._lse, to_dst, 2)
    changed = [(memoized(_roll_graph, g, turns), _roll_samples(v, to_src, 2)) for g, v in trace._changed]
    update = _roll_samples(trace.update, to_dst, 1)
    return replace(trace, graph=graph, call=call, update=update, _lse=lse, _changed=changed, **tensors)


def _roll_samples(x: Tensor, shifts: Int[Tensor, " batch"], axis: int) -> Tensor:
    parts = zip(x, shifts.tolist(), strict=True)
    return torch.stack([part.roll(-slots, axis - 1) for part, slots in parts])


def _roll_graph(graph: TokenGraph, turns: tuple[tuple[int, ...], tuple[int, ...]]) -> TokenGraph:
    mask = graph.mask()
    masks = mask.view(*[1] * (4 - mask.dim()), *mask.shape).expand(len(turns[0]), -1, -1, -1)
    parts = [part.roll((-dst, -src), (1, 2)) for part, dst, src in zip(masks, *turns, strict=True)]
    rolled = convert.from_mask(torch.stack(parts))
    offsets = {"dst_offset": graph.dst_offset, "src_offset": graph.src_offset}
    moved: TokenGraph = replace(rolled, name=graph.name, **offsets)
    return moved


def _score_at_slots(
    inner: Any,
    own: TokenGraph,
    shifts: tuple[Tensor, Tensor],
    score: Tensor,
    b: Any,
    h: Any,
    dst: Any,
    src: Any,
) -> Tensor:
    to_dst, to_src = (x.to(b.device)[b] for x in shifts)
    dst = (dst - own.dst_offset + to_dst) % own.num_dst + own.dst_offset
    src = (src - own.src_offset + to_src) % own.num_src + own.src_offset
    changed: Tensor = inner(score, b, h, dst, src)
    return changed


def is_transformer(module: Any) -> bool:
    """True for a module with a part whose config chooses the attention of transformers."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return any(hasattr(getattr(part, "config", None), "_attn_implementation") for part in parts)


@contextmanager
def recording(
    model: nn.Module, layers: Sequence[int] | None, part: Callable[[LayerTrace], LayerTrace]
) -> Iterator[list[LayerTrace]]:
    """A block in which a ``part`` of the attention calls of some layers is traced: in the list at its end.

    ValueError where the attention is another: ``model.set_attn_implementation("gnn_attention")``.
    """
    overrides = _overrides_for(model)
    overrides.check_layers(model, layers)
    recorder = _Recorder(overrides.GraphContext(model, None, False), layers, part)
    with ExitStack() as stack:
        stack.enter_context(overrides.set_variable(overrides.BACKEND_WRAPPER, recorder.watch))
        # Linear maps whose result is the projection's: not those to which an adapter adds something.
        adapted = {id(getattr(module, "base_layer", None)) for module in model.modules()}
        for linear in model.modules():
            is_linear = type(linear).forward is nn.Linear.forward or type(linear).__name__ == "Conv1D"
            if is_linear and id(linear) not in adapted:
                stack.enter_context(linear.register_forward_hook(recorder.match))
        yield recorder.traces
    recorder.finish()


@dataclass(eq=False)
class _Recorder:
    """The calls of attention in some layers; the last one waits until its projection is known."""

    # Numbers the layers of the model.
    override: Any
    layers: Sequence[int] | None
    part: Callable[[LayerTrace], LayerTrace]
    traces: list[LayerTrace] = field(default_factory=list)
    # The last trace, and whether it is of cross-attention.
    last: tuple[LayerTrace, bool] | None = None

    def watch(
        self, module: nn.Module, inner: str | Backend, changed: Sequence[Any], place: Any
    ) -> str | Backend:
        """The backend of a call on ``inner``, which records it if the module is of these layers."""
        name = self.override.names.get(module)
        if name is None:
            return inner
        number = self.override.layer_index(module)
        if self.layers is not None and number not in self.layers:
            return inner

        def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
            self.finish()
            call = replace(call, with_lse=True)
            out, lse = run_attention(call, inner)
            # In the layout that the model reads, so that its projection is known by the memory of its input.
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
            values = [(graph, change(call.v)) for graph, change in changed]
            tensors = (call.q, call.k, call.v, out, out.transpose(1, 2).flatten(2))
            heads = Projection(name, out.shape[1])
            trace = LayerTrace(number, heads, call.graph, *tensors, call, lse, values, place.left_padding)
            self.last = trace, not self.override.is_self_attention(module)
            return out, lse

        return Backend("watching", run)

    def match(self, part: nn.Module, inputs: Any, output: Tensor) -> None:
        """Note the linear map that takes the result of the last call."""
        if self.last is None or self.last[0].heads.module is not None or not inputs:
            return
        trace, x = self.last[0], inputs[0]
        if x.data_ptr() == trace.z.data_ptr() and x.numel() == trace.z.numel():
            trace.heads.module = part
            update = output.reshape(len(trace.z), trace.z.shape[2], -1)
            self.last = replace(trace, update=update), self.last[1]

    def finish(self) -> None:
        """Trace what was chosen of the last call, and let the rest go."""
        if self.last is not None:
            trace, crosses = self.last
            left, self.last = trace._left, None
            self.traces.append(
                self.part(trace if left is None else _move_padding_behind(trace, left, crosses))
            )


def intervene(model: nn.Module, one: Any) -> Any:
    """A block in which edges are cut or changed; ValueError where the attention is another."""
    overrides = _overrides_for(model)
    return overrides.activate(overrides.InterventionContext(model, one, partial(_check_fit, one)))


def _overrides_for(model: nn.Module) -> Any:
    """What is in force in Hugging Face models: imported only where their package, which is optional, is."""
    overrides = sys.modules.get(f"{PACKAGE}._contexts")
    if overrides is None:
        raise ValueError(
            f"trace: the attention of {type(model).__name__} is another: import {PACKAGE} and call "
            "model.set_attn_implementation('gnn_attention')"
        )
    return overrides


def _check_fit(one: Any, place: Any, heads: int) -> Bool[Tensor, " pairs"]:
    """Which pairs are within this call in the longest sample; a step of decoding has a part of them."""
    if one.heads and max(one.heads) >= heads:
        raise IndexError(f"heads must be in 0 .. {heads - 1}, got {max(one.heads)}")
    if not isinstance(one.edges, Tensor):
        return torch.zeros(0, dtype=torch.bool)
    own, pad = place.graph, 0 if place.left_padding is None else int(place.left_padding.min())
    slots = one.edges + pad - torch.tensor([[own.src_offset], [own.dst_offset]])
    inside = ((slots >= 0) & (slots < torch.tensor([[own.num_src], [own.num_dst]]))).all(0)
    one.check(own, heads, slots[:, inside])
    return inside
