"""Record and change attention calls of Hugging Face models whose attention is "gnn_attention"."""

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
    """The output projection of the attention ``name``. The recorder sets ``module`` later."""

    name: str
    num_heads: int
    module: Any = None

    @cached_property
    def W_O(self) -> Float[Tensor, "heads value_dim width"]:
        if self.module is None:
            raise NotImplementedError(f"{self.name} has no messages: no linear map follows its heads")
        weight: Tensor = self.module.weight
        weight = weight.mT if isinstance(self.module, nn.Linear) else weight
        return weight.reshape(self.num_heads, -1, weight.shape[1])

    @property
    def b_O(self) -> Float[Tensor, " width"] | None:
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias


def _move_padding(trace: LayerTrace, padding: Int[Tensor, " samples"], is_cross: bool) -> LayerTrace:
    """Move the padding on the left of each sample behind its tokens."""
    graph, call = trace.graph, trace.call
    src_shifts = (padding - graph.src_offset).clamp(min=0).expand(len(trace.q))
    dst_shifts = (padding - graph.dst_offset).clamp(min=0).expand(len(trace.q))
    if is_cross:
        dst_shifts = torch.zeros_like(src_shifts)
    shifts = tuple(dst_shifts.tolist()), tuple(src_shifts.tolist())
    score_mod = call.score_mod and partial(_score_at_slots, call.score_mod, graph, (dst_shifts, src_shifts))
    q = _roll_samples(call.q, dst_shifts, 2)
    k = _roll_samples(call.k, src_shifts, 2)
    v = _roll_samples(call.v, src_shifts, 2)
    z = _roll_samples(trace.z, dst_shifts, 2)
    update = _roll_samples(trace.update, dst_shifts, 1)
    lse = None if trace._lse is None else _roll_samples(trace._lse, dst_shifts, 2)
    changes = trace._changed_values
    changes = [(memoized(_roll_graph, g, shifts), _roll_samples(x, src_shifts, 2)) for g, x in changes]
    call = replace(call, graph=memoized(_roll_graph, graph, shifts), q=q, k=k, v=v, score_mod=score_mod)
    moved_trace = LayerTrace.of_call(trace.number, trace.heads, call, z, update=update, _lse=lse)
    return replace(moved_trace, _changed_values=changes, _left_padding=trace._left_padding)


def _roll_samples(x: Tensor, shifts: Int[Tensor, " batch"], axis: int) -> Tensor:
    samples = zip(x, shifts.tolist(), strict=True)
    return torch.stack([sample.roll(-shift, axis - 1) for sample, shift in samples])


def _roll_graph(graph: TokenGraph, shifts: tuple[tuple[int, ...], tuple[int, ...]]) -> TokenGraph:
    mask = graph.mask()
    masks = mask.view(*[1] * (4 - mask.dim()), *mask.shape).expand(len(shifts[0]), -1, -1, -1)
    samples = zip(masks, *shifts, strict=True)
    rolled_masks = torch.stack([mask.roll((-dst, -src), (1, 2)) for mask, dst, src in samples])
    rolled_graph: TokenGraph = replace(convert.from_mask(rolled_masks), name=graph.name)
    return replace(rolled_graph, dst_offset=graph.dst_offset, src_offset=graph.src_offset)


def _score_at_slots(
    score_mod: Any, graph: TokenGraph, shifts: Any, score: Tensor, b: Any, h: Any, dst: Any, src: Any
) -> Tensor:
    """Apply a score_mod at the positions that the tokens had before the padding was moved."""
    dst_shift, src_shift = (shift.to(b.device)[b] for shift in shifts)
    dst = (dst - graph.dst_offset + dst_shift) % graph.num_dst + graph.dst_offset
    src = (src - graph.src_offset + src_shift) % graph.num_src + graph.src_offset
    modified: Tensor = score_mod(score, b, h, dst, src)
    return modified


def is_transformer(module: Any) -> bool:
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return any(hasattr(getattr(part, "config", None), "_attn_implementation") for part in modules)


@contextmanager
def record_calls(
    model: nn.Module, layers: Sequence[int] | None, select: Callable[[LayerTrace], LayerTrace]
) -> Iterator[list[LayerTrace]]:
    """Yield a list with ``select(trace)`` for each attention call of the layers, complete on exit.

    Raises ValueError unless ``model.set_attn_implementation("gnn_attention")`` was called.
    """
    overrides = _overrides_for(model)
    overrides.check_layers(model, layers)
    recorder = _Recorder(overrides.GraphContext(model, None, False), layers, select)
    with ExitStack() as stack:
        stack.enter_context(overrides.set_variable(overrides.BACKEND_WRAPPER, recorder.wrap))
        # A linear layer inside an adapter (LoRA) is only a part of the projection.
        part_ids = {id(part) for m in model.modules() if "base_layer" in m._modules for part in m.modules()}
        for linear in model.modules():
            is_linear = type(linear).forward is nn.Linear.forward or type(linear).__name__ == "Conv1D"
            if is_linear and id(linear) not in part_ids:
                stack.enter_context(linear.register_forward_hook(recorder.match_projection))
        yield recorder.traces
    recorder.finish_call()


@dataclass(eq=False)
class _Recorder:
    """Records calls. The last call is ``pending`` until the next call or the end of the run."""

    # A GraphContext, which has the names and indices of attention modules.
    context: Any
    layers: Sequence[int] | None
    select: Callable[[LayerTrace], LayerTrace]
    traces: list[LayerTrace] = field(default_factory=list)
    pending: LayerTrace | None = None
    pending_is_cross: bool = False

    def wrap(
        self, module: nn.Module, inner: str | Backend, changes: Sequence[Any], layout: Any
    ) -> str | Backend:
        """Return a backend that runs a call on ``inner`` and records it, if its layer is selected."""
        name = self.context.names.get(module)
        if name is None:
            return inner
        layer_index = self.context.layer_index(module)
        if self.layers is not None and layer_index not in self.layers:
            return inner

        def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
            self.finish_call()
            call = replace(call, with_lse=True)
            out, lse = run_attention(call, inner)
            # A projection reads this layout without a copy: the address of its input identifies it.
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
            values = [(graph, change(call.v)) for graph, change in changes]
            update = out.transpose(1, 2).flatten(2)
            heads = Projection(name, out.shape[1])
            trace = LayerTrace.of_call(layer_index, heads, call, out, update=update, _lse=lse)
            self.pending = replace(trace, _changed_values=values, _left_padding=layout.left_padding)
            self.pending_is_cross = not self.context.is_self_attention(module)
            return out, lse

        return Backend("recorder", run)

    def match_projection(self, linear: nn.Module, inputs: Any, output: Tensor) -> None:
        trace = self.pending
        if trace is None or trace.heads.module is not None or not inputs:
            return
        x = inputs[0]
        if x.data_ptr() == trace.z.data_ptr() and x.numel() == trace.z.numel():
            trace.heads.module = linear
            update = output.reshape(len(trace.z), trace.z.shape[2], -1)
            self.pending = replace(trace, update=update)

    def finish_call(self) -> None:
        """Store the selected edges of the pending trace."""
        trace, self.pending = self.pending, None
        if trace is None:
            return
        if trace._left_padding is not None:
            trace = _move_padding(trace, trace._left_padding, self.pending_is_cross)
        self.traces.append(self.select(trace))


def intervene(model: nn.Module, intervention: Any) -> Any:
    """Return a context in which edges of the model are cut or their messages are changed."""
    overrides = _overrides_for(model)
    find_pairs = partial(_find_pairs_in_call, intervention)
    return overrides.activate(overrides.InterventionContext(model, intervention, find_pairs))


def _overrides_for(model: nn.Module) -> Any:
    # This package is optional. If it was not imported, the model cannot use its attention.
    overrides = sys.modules.get(f"{PACKAGE}._contexts")
    if overrides is None:
        raise ValueError(
            f"trace: the attention of {type(model).__name__} is not 'gnn_attention': import {PACKAGE} and "
            "call model.set_attn_implementation('gnn_attention')"
        )
    return overrides


def _find_pairs_in_call(intervention: Any, layout: Any, num_heads: int) -> Bool[Tensor, " pairs"]:
    """Return which pairs lie in this call's longest sample, and check that they are edges."""
    if intervention.heads and max(intervention.heads) >= num_heads:
        raise IndexError(f"heads must be in 0 .. {num_heads - 1}, got {max(intervention.heads)}")
    if not isinstance(intervention.edges, Tensor):
        return torch.zeros(0, dtype=torch.bool)
    graph = layout.graph
    padding = 0 if layout.left_padding is None else int(layout.left_padding.min())
    slots = intervention.edges + padding - torch.tensor([[graph.src_offset], [graph.dst_offset]])
    is_in_call = ((slots >= 0) & (slots < torch.tensor([[graph.num_src], [graph.num_dst]]))).all(0)
    intervention.check_edges(graph, num_heads, slots[:, is_in_call])
    return is_in_call
