"""Record a run: a :class:`LayerTrace` of each call, and states between blocks (seeds: docs/sources.md)."""

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
from gnn_attention.interpret.trace.intervention import Indices, Intervention, cut, intervene
from gnn_attention.interpret.trace.layer import LayerTrace
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model import Block


@dataclass(frozen=True, eq=False, repr=False)
class Phase:
    """Half of a Block, attention or MLP: ``after = before + update`` (seeds S1.19, S4.11, S4.19)."""

    layer: int
    name: str
    before: Float[Tensor, "batch tokens width"]
    update: Float[Tensor, "batch tokens width"]
    after: Float[Tensor, "batch tokens width"]


@dataclass(frozen=True, eq=False)
class Run:
    """The output of a recorded run, a :class:`LayerTrace` of each attention call, and phases."""

    output: Any
    layers: tuple[LayerTrace, ...]
    phases: tuple[Phase, ...]

    @property
    def states(self) -> tuple[Float[Tensor, "batch tokens width"], ...]:
        """The states before the first and after each phase (seed S4.11), or () without blocks."""
        return (*(phase.before for phase in self.phases[:1]), *(phase.after for phase in self.phases))

    def __repr__(self) -> str:
        return f"Run({len(self.layers)} calls of attention layers, {len(self.states)} states)"


def record(
    module: nn.Module,
    *inputs: Any,
    interventions: Intervention | Iterable[Intervention] = (),
    edges: Any = None,
    layers: Indices = None,
    **options: Any,
) -> Run:
    """Run ``module(*inputs, **options)``, and record what each edge of its layers carried.

    ``module`` contains a ``MessagePassingAttention``, or is a Hugging Face model whose attention is
    ``"gnn_attention"``; cached tokens count as senders. ``module`` is left unchanged.
    ``interventions`` are one or several results of :func:`cut`, :func:`mute` and :func:`patch`.
    ``layers`` selects the layers whose calls are stored, as in :func:`cut`, and ``edges`` selects
    the edges, as pairs of tokens of the call or as a graph. Phases and states are those of the
    blocks of ``gnn_attention.model``. A layer with ``backend="message_passing"`` runs through
    "auto". Only calls of this thread are recorded; another thread that records the module waits.
    The run is differentiable, but ``torch.no_grad()`` saves memory.

    Raises ValueError for a module without such a layer, and the errors of :func:`cut` and
    :func:`intervene`.

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
            raise TypeError("pass interventions= or surgery=, its old name, not both")
        warnings.warn("surgery= is now called interventions=", DeprecationWarning, stacklevel=2)
        interventions = options.pop("surgery")
    checks.check_order("interventions", interventions)
    interventions = (interventions,) if isinstance(interventions, Intervention) else tuple(interventions)
    selection = cut(edges, layers)
    select = partial(LayerTrace.only, edges=selection.edges)
    if transformer.is_transformer(module):
        recording = transformer.record_calls(module, selection.layers, select)
        with intervene(module, *interventions), recording as calls:
            output = module(*inputs, **options)
        return Run(output, tuple(calls), ())
    traces: list[LayerTrace] = []
    phases: list[Phase] = []
    attentions = intervention.find_attention_layers(module)
    layer_indices = intervention.list_layers(selection, attentions)
    blocks = [block for block in module.modules() if isinstance(block, Block)]
    with lock_modules(attentions, is_brief=True), intervene(module, *interventions), ExitStack() as stack:
        for index in layer_indices:
            stack.enter_context(_record_layer(index, attentions[index], traces, select))
        for index, block in enumerate(blocks):
            if index in layer_indices:
                stack.enter_context(_record_block(index, block, phases))
        output = module(*inputs, **options)
    return Run(output, tuple(traces), tuple(phases))


@contextmanager
def _record_layer(
    index: int, layer: MessagePassingAttention, traces: list[LayerTrace], select: Callable[..., LayerTrace]
) -> Iterator[None]:
    inner = layer.backend
    thread = threading.get_ident()
    interventions = inner.interventions if isinstance(inner, intervention.ChangedMessages) else ()
    calls: list[tuple[AttentionCall, Tensor, Tensor | None]] = []

    def append_trace(module: MessagePassingAttention, inputs: Any, output: Any) -> None:
        call, z, lse = calls.pop()
        update = output[0] if isinstance(output, tuple) else output
        update = update if update.dim() == 3 else update.unsqueeze(0)
        changed_values = intervention.split_call(interventions, call)[1:]
        trace = LayerTrace.of_call(index, module.heads, call, z, update=update, _lse=lse)
        traces.append(select(replace(trace, _changed_values=changed_values)))

    def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if threading.get_ident() != thread:
            return run_attention(call, inner)
        call = replace(call, with_lse=True)
        out, lse = run_attention(call, inner)
        calls.append((call, out, lse))
        return out, lse

    check = layer.register_forward_pre_hook(lambda m, _: intervention.check_no_hooks(m, "record"))
    recorder = layer.register_forward_hook(restrict_to_thread(append_trace))
    with check, recorder, intervention.replace_backend(layer, Backend("recorder", run)):
        yield


@contextmanager
def _record_block(index: int, block: Block, phases: list[Phase]) -> Iterator[None]:
    states: dict[str, Tensor] = {}

    def save_input(name: str, module: nn.Module, inputs: Any) -> None:
        states[name] = inputs[0]

    def save_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        states[name] = output

    def append_phases(module: nn.Module, inputs: Any, output: Any) -> None:
        before, between = states["before"], states["between"]
        phases.append(Phase(index, "communication", before, states["attention"], between))
        phases.append(Phase(index, "computation", between, states["mlp"], output))

    with ExitStack() as stack:
        for name, norm in (("before", block.attention_norm), ("between", block.mlp_norm)):
            stack.enter_context(norm.register_forward_pre_hook(restrict_to_thread(partial(save_input, name))))
        for name, part in (("attention", block.attention), ("mlp", block.mlp)):
            stack.enter_context(part.register_forward_hook(restrict_to_thread(partial(save_output, name))))
        stack.enter_context(block.register_forward_hook(restrict_to_thread(append_phases)))
        yield
