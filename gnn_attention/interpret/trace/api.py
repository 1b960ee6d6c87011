"""What each edge carried: the record of a run, edge surgery, and how much came from where in the end.

>>> import gnn_attention.interpret.trace as trace
>>> from gnn_attention import model as lm
>>> model, vocabulary = lm.load_trained()
>>> tokens = torch.tensor([vocabulary.encode("Llamas do not output words")])
>>> with torch.no_grad():
...     run = trace.record(model, tokens)
...     changed = trace.record(model, tokens, surgery=trace.cut([(0, 5)], layers=1, heads=2))
>>> len(run.layers), len(run.states), run["blocks.1.attn.hook_pattern"].shape
(2, 5, torch.Size([1, 4, 66]))
>>> run.layers[1].weights([(0, 5)]).shape, run.layers[1].carried([(0, 5)], heads=2).shape  # [B, edges, heads], [..., width]
(torch.Size([1, 1, 4]), torch.Size([1, 1, 1, 128]))
>>> bool(changed.layers[1].weights([(0, 5)])[0, 0, 2] == 0), torch.equal(run.output[:, :5], changed.output[:, :5])
(True, True)

Numbers of edges are ``[B, edges, heads]``, as ``MessagePassingAttention`` returns its weights, with a batch of one for a single
sequence. What tokens x tokens or edges x heads x width would hold is made only where it is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.locks import of_this_thread, turn
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import AttentionInfo, attend, attended
from gnn_attention.backends import Backend
from gnn_attention.backends.call import Call
from gnn_attention.interpret.trace.attribution import Mixing, largest_flow, rolled_out
from gnn_attention.interpret.trace.intervene import attention_layers, check_unwatched, exchanged, muted_by, operate
from gnn_attention.interpret.trace.interventions import Surgery, cut, mute
from gnn_attention.interpret.trace.layer import LayerTrace
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.layer.glossary import GLOSSARY, VIEWS, Term
from gnn_attention.model import Block

__all__ = [
    "GLOSSARY",
    "VIEWS",
    "LayerTrace",
    "Phase",
    "Run",
    "Surgery",
    "Term",
    "cut",
    "flow",
    "mute",
    "operate",
    "record",
    "rollout",
]

COMMUNICATION, COMPUTATION = "communication", "computation"
RESIDUAL_HOOKS = {  # of a block: the phase, and the tensor of that phase
    "hook_resid_pre": (0, "before"),
    "hook_resid_mid": (0, "after"),
    "hook_mlp_out": (1, "update"),
    "hook_resid_post": (1, "after"),
}


@dataclass(frozen=True, eq=False)
class Phase:
    """One block of the residual stream: ``after = before + update``, by communication along edges or computation at each token.

    ``layer`` numbers the :class:`gnn_attention.model.Block`. Sources: seeds S4.11, S4.19.
    """

    layer: int
    name: str
    before: Float[Tensor, "batch tokens width"]
    update: Float[Tensor, "batch tokens width"]
    after: Float[Tensor, "batch tokens width"]

    def __repr__(self) -> str:
        """Which one, and the shape of its states."""
        return f"Phase(layer {self.layer}, {self.name}, {list(self.after.shape)})"


@dataclass(frozen=True, eq=False)
class Run:
    """What :func:`record` saw: the module's output, a :class:`LayerTrace` for each call of an attention layer, the phases.

    ``run["blocks.0.attn.hook_q"]``, ``run["blocks.1.state update"]``: any name of a call, after the number of that call.
    """

    output: Any
    layers: tuple[LayerTrace, ...]
    phases: tuple[Phase, ...]

    @property
    def states(self) -> tuple[Float[Tensor, "batch tokens width"], ...]:
        """The B + 1 states of every token, before the first and after each of the B phases (seed S4.11); none without blocks."""
        return (*(phase.before for phase in self.phases[:1]), *(phase.after for phase in self.phases))

    def __repr__(self) -> str:
        """How much there is."""
        return f"Run({len(self.layers)} calls of attention layers, {len(self.states)} states)"

    def __getitem__(self, name: str) -> Tensor:
        """``"blocks.<call>.<name>"``, for every name of :class:`LayerTrace` and TransformerLens' hooks of the residual stream.

        KeyError for another name.
        """
        if name == "hook_embed" and self.phases:
            return self.phases[0].before
        word, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        if word != "blocks" or not number.isdecimal() or int(number) >= len(self.layers):
            raise KeyError(
                f"no part of this run is called {quoted(name)}: expected blocks.0 .. blocks.{len(self.layers) - 1}, as in "
                "'blocks.0.attn.hook_q' or 'blocks.0.listening distribution'"
            )
        if part in RESIDUAL_HOOKS and 2 * int(number) < len(self.phases):
            which, attribute = RESIDUAL_HOOKS[part]
            result: Tensor = getattr(self.phases[2 * int(number) + which], attribute)
            return result
        return self.layers[int(number)][part]


def record(module: nn.Module, *inputs: Any, surgery: Surgery | Iterable[Surgery] = (), **options: Any) -> Run:
    """``module(*inputs, **options)``, and what every edge of its attention layers carried.

    ``module`` is a ``LanguageModel``, a ``Block``, a ``MessagePassingAttention`` or any module that holds such layers; it is left
    as it was. ``surgery`` is what :func:`cut` and :func:`mute` return, one or several. Phases and states are those of the blocks
    of ``gnn_attention.model``. A layer that walks (``backend=None``) runs through "auto", which tells the log-sum-exp.

    Only what this thread computes is recorded; threads that record one module do so one after the other.

    What is recorded can be differentiated; run under ``torch.no_grad()`` to keep less.

    Raises ValueError for a module without such a layer, NotImplementedError where torch_geometric's hooks or explainers make a
    layer walk, and as :func:`operate` does.

    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> layer, x = MessagePassingAttention(StandardHeads(8, 2)).double(), torch.randn(5, 8).double()
    >>> run = record(layer, x, patterns.window(5, 2))
    >>> edges = run.layers[0].edge_index
    >>> received = torch.zeros_like(x).index_add(0, edges[1], run.layers[0].carried(edges)[0].sum(1))
    >>> torch.allclose(received, run.output, rtol=0, atol=1e-12)
    True
    """
    surgeries = (surgery,) if isinstance(surgery, Surgery) else tuple(surgery)
    layers: list[LayerTrace] = []
    phases: list[Phase] = []
    watched = attention_layers(module)
    with turn(watched, brief=True), operate(module, *surgeries), ExitStack() as stack:
        for number, layer in enumerate(watched):
            stack.enter_context(_watching_layer(number, layer, layers))
        blocks = [part for part in module.modules() if isinstance(part, Block)]
        for number, block in enumerate(blocks):
            stack.enter_context(_watching_block(number, block, phases))
        output = module(*inputs, **options)
    return Run(output, tuple(layers), tuple(phases))


# -- watching ---------------------------------------------------------------------------------------------------------


@contextmanager
def _watching_layer(number: int, layer: MessagePassingAttention, seen: list[LayerTrace]) -> Iterator[None]:
    """Every call of the layer becomes a trace: its backend tells what it computed, a hook what the layer made of it."""
    before = layer.backend
    calls: list[tuple[Call, Tensor, AttentionInfo]] = []

    def note(module: MessagePassingAttention, inputs: Any, output: Any) -> None:
        (call, z, info), update = calls.pop(), output[0] if isinstance(output, tuple) else output
        muted = tuple(muted_by(before, call.graph, call.q.shape[1]))
        update = update if update.dim() == 3 else update.unsqueeze(0)
        seen.append(LayerTrace(number, module.heads, update, z, call, info, muted))

    with ExitStack() as stack:
        stack.enter_context(exchanged(layer, Backend("recorder", partial(_run_recorded, threading.get_ident(), before, calls))))
        stack.callback(layer.register_forward_pre_hook(_check_unwatched).remove)
        stack.callback(layer.register_forward_hook(of_this_thread(note)).remove)
        yield


def _check_unwatched(layer: MessagePassingAttention, inputs: Any) -> None:
    check_unwatched(layer, "record it")


def _run_recorded(thread: int, inner: str | Backend | None, calls: list[Any], call: Call) -> tuple[Tensor, Tensor | None]:
    if threading.get_ident() != thread:
        return attended(call, inner or "auto")
    options = (call.scale, call.score_mod, call.bias, call.sink_logits, call.dropout, inner or "auto")
    out, info = attend(call.q, call.k, call.v, call.graph, *options, return_info=True)
    calls.append((call, out, info))
    return out, info._lse


@contextmanager
def _watching_block(number: int, block: Block, seen: list[Phase]) -> Iterator[None]:
    """The tensors at the seams of a block: what its norms are given, what its two phases return, and its result."""
    at: dict[str, Tensor] = {}

    def given(name: str, module: nn.Module, inputs: Any) -> None:
        at[name] = inputs[0]

    def returned(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        at[name] = output

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.append(Phase(number, COMMUNICATION, at["before"], at["heard"], at["between"]))
        seen.append(Phase(number, COMPUTATION, at["between"], at["thought"], output))
        at.clear()

    with ExitStack() as stack:
        for handle in (
            block.attention_norm.register_forward_pre_hook(of_this_thread(partial(given, "before"))),
            block.attention.register_forward_hook(of_this_thread(partial(returned, "heard"))),
            block.mlp_norm.register_forward_pre_hook(of_this_thread(partial(given, "between"))),
            block.mlp.register_forward_hook(of_this_thread(partial(returned, "thought"))),
            block.register_forward_hook(of_this_thread(note)),
        ):
            stack.callback(handle.remove)
        yield


# -- how much came from where -----------------------------------------------------------------------------------------


def rollout(layers: Sequence[LayerTrace], receivers: Iterable[int] | None = None) -> Float[Tensor, "batch receivers tokens"]:
    """Attention rollout: how much of each receiver's last state came from each token, ``[B, receivers, tokens]``.

    ``A_L ... A_2 A_1`` with ``A = 0.5 W + 0.5 I``, W the weights of a layer, the mean over heads; a muted edge brings nothing.
    Where a row of W does not sum to 1, as for a receiver that hears nobody in some head, that row of ``W + I`` is divided by its
    sum: whoever hears nobody keeps all of itself. Rows of the result sum to 1. Time is that of edges x receivers: take few
    ``receivers`` of long sequences (None: all, tokens x tokens numbers). ``run.layers[:k]`` asks after k layers.

    Raises ValueError for no layers or layers over different tokens, IndexError for a receiver that is not there.

    Source: Abnar and Zuidema 2020 (arXiv 2005.00928), section 3, attention rollout.

    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> run = record(MessagePassingAttention(StandardHeads(8, 2)), torch.zeros(3, 8), patterns.causal(3))
    >>> [round(share, 4) for share in rollout(run.layers * 2, [2])[0, 0].tolist()]
    [0.3194, 0.2361, 0.4444]
    """
    mixings = _mixings(layers)
    count = mixings[0].kept.shape[1]
    chosen = list(range(count)) if receivers is None else [_token("receivers", token, count) for token in receivers]
    return rolled_out(mixings, torch.tensor(chosen, dtype=torch.int64, device=mixings[0].kept.device))


def flow(layers: Sequence[LayerTrace], src: int, dst: int, sample: int = 0) -> float:
    """Attention flow: the largest flow from token ``src`` before the first layer to ``dst`` after the last, at most 1.

    Each layer's ``A`` of :func:`rollout` gives the capacities of the layered graph. It is at least the rollout of the same pair:
    a flow may use every capacity of every path in full. Time grows with layers x edges; meant for short sequences.

    Raises as :func:`rollout` does.

    Source: Abnar and Zuidema 2020 (arXiv 2005.00928), section 3, attention flow; networkx's ``maximum_flow_value``.

    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> run = record(MessagePassingAttention(StandardHeads(8, 2)), torch.zeros(3, 8), patterns.causal(3))
    >>> round(flow(run.layers * 2, 0, 2), 4)
    0.5
    """
    mixings = _mixings(layers)
    batch, count = mixings[0].kept.shape
    src, dst = _token("src", src, count), _token("dst", dst, count)
    return largest_flow(mixings, src, dst, _token("sample", sample, batch))


@torch.no_grad()
def _mixings(layers: Sequence[LayerTrace]) -> list[Mixing]:
    sizes = {(layer.graph.num_dst, layer.graph.num_src, len(layer.q)) for layer in layers}
    if len(sizes) != 1 or len({size for found in sizes for size in found[:2]}) != 1:
        raise ValueError(f"layers must be over the same tokens, got (dst, src, batch) {sorted(sizes)}; take run.layers")
    return [Mixing.of(layer.edge_index, layer.delivered().mean(1), layer.graph.num_dst) for layer in layers]


def _token(name: str, value: int, count: int) -> int:
    number = checks.size(name, value)
    if number >= count:
        raise IndexError(f"{name} must be in 0 .. {count - 1}, got {number}")
    return number
