"""The record of a run: one :class:`LayerTrace` for each attention call, and the states between the blocks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.locks import lock_modules, restrict_to_thread
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import run_attention
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.interpret.trace import intervention, transformer
from gnn_attention.interpret.trace.intervention import Intervention, Numbers, cut, intervene
from gnn_attention.interpret.trace.layer import LayerTrace
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model import Block


@dataclass(frozen=True, eq=False, repr=False)
class Phase:
    """One step of the residual stream of a Block, ``after = before + update`` (seeds S1.19, S4.11, S4.19)."""

    layer: int
    name: str
    before: Float[Tensor, "batch tokens width"]
    update: Float[Tensor, "batch tokens width"]
    after: Float[Tensor, "batch tokens width"]


@dataclass(frozen=True, eq=False)
class Run:
    """The result of :func:`record`: the output, a :class:`LayerTrace` for each call, the phases."""

    output: Any
    layers: tuple[LayerTrace, ...]
    phases: tuple[Phase, ...]

    @property
    def states(self) -> tuple[Float[Tensor, "batch tokens width"], ...]:
        """The states before the first phase and after each (seed S4.11); empty without blocks."""
        return (*(phase.before for phase in self.phases[:1]), *(phase.after for phase in self.phases))

    def __repr__(self) -> str:
        return f"Run({len(self.layers)} calls of attention layers, {len(self.states)} states)"


def record(
    module: nn.Module,
    *inputs: Any,
    interventions: Intervention | Iterable[Intervention] = (),
    edges: Any = None,
    layers: Numbers = None,
    **options: Any,
) -> Run:
    """``module(*inputs, **options)``, and what every edge of its attention layers carried.

    ``module`` is any module with a ``MessagePassingAttention`` in it, or a Hugging Face model whose attention
    is ``"gnn_attention"`` (pairs count each sample's own tokens, see :class:`LayerTrace`; senders are those
    of a cache too); it is unchanged afterwards. ``interventions`` are one or several results of
    :func:`cut`, :func:`mute` and :func:`patch`. ``layers`` chooses, as in :func:`cut`, whose calls are
    stored; ``edges`` are what all edges stand for in them (pairs are of tokens of the call). Phases and
    states are those of the blocks of ``gnn_attention.model``. A layer with ``backend="message_passing"`` runs
    through "auto". Only calls of this thread are recorded; threads that record one module take turns. It is
    differentiable; ``torch.no_grad()`` saves memory.

    Raises ValueError for a module without such a layer, else as :func:`cut` and :func:`intervene` do.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> layer, x = MessagePassingAttention(StandardHeads(8, 2)).double(), torch.randn(5, 8).double()
    >>> run = record(layer, x, patterns.window(5, 2))
    >>> edges = run.layers[0].edge_index
    >>> received = torch.zeros_like(x).index_add(0, edges[1], run.layers[0].carried(edges)[0].sum(1))
    >>> torch.allclose(received, run.output, rtol=0, atol=1e-12)
    True
    """
    if "surgery" in options:
        if interventions != ():
            raise TypeError("give interventions= or surgery=, its old name, not both")
        warnings.warn("surgery= is now called interventions=", DeprecationWarning, stacklevel=2)
        interventions = options.pop("surgery")
    checks.check_order("interventions", interventions)
    steps = (interventions,) if isinstance(interventions, Intervention) else tuple(interventions)
    chosen = cut(edges, layers)
    part = partial(LayerTrace.only, edges=chosen.edges)
    if transformer.is_transformer(module):
        with intervene(module, *steps), transformer.recording(module, chosen.layers, part) as found:
            output = module(*inputs, **options)
        return Run(output, tuple(found), ())
    traces: list[LayerTrace] = []
    phases: list[Phase] = []
    modules = intervention.attention_layers(module)
    numbers = intervention.checked_layers(chosen, modules)
    blocks = [block for block in module.modules() if isinstance(block, Block)]
    with lock_modules(modules, brief=True), intervene(module, *steps), ExitStack() as stack:
        for number in numbers:
            stack.enter_context(_recorded_layer(number, modules[number], traces, part))
        for number, block in enumerate(blocks):
            if number in numbers:
                stack.enter_context(_recorded_block(number, block, phases))
        output = module(*inputs, **options)
    return Run(output, tuple(traces), tuple(phases))


@contextmanager
def _recorded_layer(
    number: int, layer: MessagePassingAttention, traces: list[LayerTrace], part: Callable[..., LayerTrace]
) -> Iterator[None]:
    inner, thread = layer.backend, threading.get_ident()
    calls: list[tuple[AttentionCall, Tensor, Tensor | None]] = []

    def append_trace(module: MessagePassingAttention, inputs: Any, output: Any) -> None:
        (call, z, lse), update = calls.pop(), output[0] if isinstance(output, tuple) else output
        steps = inner.steps if isinstance(inner, intervention.Changing) else ()
        changed = intervention.with_values(steps, call)[1:]
        update = update if update.dim() == 3 else update.unsqueeze(0)
        tensors = (call.q, call.k, call.v, z, update)
        traces.append(part(LayerTrace(number, module.heads, call.graph, *tensors, call, lse, changed)))

    def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if threading.get_ident() != thread:
            return run_attention(call, inner)
        call = replace(call, with_lse=True)
        out, lse = run_attention(call, inner)
        calls.append((call, out, lse))
        return out, lse

    before = layer.register_forward_pre_hook(lambda x, _: intervention.check_no_hooks(x, "record it"))
    after = layer.register_forward_hook(restrict_to_thread(append_trace))
    with before, after, intervention.backend_replaced(layer, Backend("recorder", run)):
        yield


@contextmanager
def _recorded_block(number: int, block: Block, phases: list[Phase]) -> Iterator[None]:
    at: dict[str, Tensor] = {}

    def append_phases(module: nn.Module, inputs: Any, output: Any) -> None:
        phases.append(Phase(number, "communication", at["before"], at["attention"], at["between"]))
        phases.append(Phase(number, "computation", at["between"], at["mlp"], output))

    def save(name: str, module: nn.Module, inputs: Any, *output: Any) -> None:
        at[name] = (output or inputs)[0]

    with ExitStack() as stack:
        for name, norm in (("before", block.attention_norm), ("between", block.mlp_norm)):
            stack.enter_context(norm.register_forward_pre_hook(restrict_to_thread(partial(save, name))))
        for name, part in (("attention", block.attention), ("mlp", block.mlp)):
            stack.enter_context(part.register_forward_hook(restrict_to_thread(partial(save, name))))
        stack.enter_context(block.register_forward_hook(restrict_to_thread(append_phases)))
        yield
