"""Find the path of a leak: which tokens carry the information, and at which module the leak enters.

The hops of a layer are the nonzero entries of the Jacobian from its input to the next layer's. The
path is the cheapest one along these hops. To find the module, the audit replaces the sender's
input: the leak enters at the first module whose input changes only at tokens that the sender may
reach, but whose output changes elsewhere. Layers are the calls of :class:`MessagePassingAttention`
if there are any, else the members of the outermost ``ModuleList`` or ``Sequential`` whose members
all get the sequence.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.analyse._walks import is_square
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.audit.runner import Runner, Sample, differs, floating_tensors
from gnn_attention.layer import MessagePassingAttention

# An undeclared hop costs more than any number of declared hops.
UNDECLARED_COST = 2**16
UNREACHABLE = 2**60

Pair = tuple[int, int]


@dataclass(frozen=True)
class Bounds:
    """Masks ``[dst, src]`` of the pairs in which src may influence dst.

    ``after[k]`` is the mask after k layers, and ``hops[k]`` is the mask of layer k + 1 alone. In a
    square graph each token may influence itself, as with residual connections.
    """

    after: Sequence[Bool[Tensor, "dst src"]]
    hops: Sequence[Bool[Tensor, "dst src"]]

    @classmethod
    def of(cls, graphs: Sequence[TokenGraph], num_layers: int) -> "Bounds":
        """Return the bounds of layers that use the graphs in turn; several layers need square graphs."""
        square = is_square(graphs[0])
        if num_layers > 1 and not square:
            raise ValueError(f"layers must be 1 for {graphs[0]!r}, which is not square, got {num_layers}")
        identity = torch.eye(graphs[0].num_src, dtype=torch.bool, device="cpu")
        masks = [graph.mask() | identity if square else graph.mask() for graph in graphs]
        after, hops = [identity], [masks[layer % len(masks)] for layer in range(num_layers)]
        for hop in hops:
            after.append(hop.float() @ after[-1].float() > 0)
        return cls(after, hops)


class LeakPath(NamedTuple):
    """The ``tokens`` from sender to receiver, and the name of the module where the leak enters."""

    tokens: tuple[int, ...]
    layer: str | None = None


def find_leak_paths(runner: Runner, leaks: Sequence[Pair], bounds: Bounds) -> dict[Pair, LeakPath]:
    """Find paths of leaks ``(src, dst)`` in square graphs. Try probes until one shows the module."""
    paths: dict[Pair, LeakPath] = {}
    for sample in runner.probes:
        unexplained = [leak for leak in leaks if leak not in paths or paths[leak].layer is None]
        new_paths = _find_paths(sample, runner, unexplained, bounds) if unexplained else {}
        paths |= {leak: path for leak, path in new_paths.items() if path.layer or leak not in paths}
    return paths


def _find_paths(sample: Sample, runner: Runner, leaks: list[Pair], bounds: Bounds) -> dict[Pair, LeakPath]:
    layers = _find_layers(runner, sample)
    hops = _find_hops(runner, sample, layers)
    senders = list(dict.fromkeys(src for src, _ in leaks))
    changes = _iterate_changes(runner, sample, torch.tensor(senders, device="cpu"), layers)
    names = {src: _find_leaking_module(src, events, bounds) for src, events in changes}
    paths: dict[Pair, LeakPath] = {}
    for src in senders:
        layer = type(runner.module).__name__ if names.get(src) == "" else names.get(src)
        receivers = [dst for sender, dst in leaks if sender == src]
        for dst, tokens in _find_cheapest_paths(src, receivers, hops, bounds).items():
            paths[src, dst] = LeakPath(tokens, layer)
    return paths


def _find_hops(runner: Runner, sample: Sample, layers: frozenset[str]) -> list[Bool[Tensor, "dst src"]]:
    chunks = []
    generator = runner.cotangent_generator(0)
    identity = torch.eye(runner.num_dst, dtype=torch.bool, device="cpu")
    for receivers in torch.split(identity, runner.hooked_batch_size):
        states, copies = sample.differentiable_copies(len(receivers))
        events, output = record_events(runner, copies, layers)
        stages = [states, *(event.states for event in events if event.is_layer), output]
        sizes = [runner.compute_gradient_sizes(y, receivers, x, generator, True) for x, y in pairwise(stages)]
        chunks.append([size > 0 for size in sizes])
    return [torch.cat(masks) for masks in zip(*chunks, strict=True)]


def _find_leaking_module(src: int, events: "list[Event]", bounds: Bounds) -> str | None:
    # The audited module is named "". Its input is allowed, even if no event records it (token ids).
    input_is_allowed = {"": True}
    num_layers = 0
    has_layer_bounds = sum(event.is_layer for event in events) == len(bounds.hops)
    for event in events:
        allowed = bounds.after[num_layers if has_layer_bounds else -1][:, src]
        num_layers += event.is_layer
        is_allowed = not bool((event.states & ~allowed).any())
        if event.is_input:
            input_is_allowed[event.name] = is_allowed
        elif not is_allowed and input_is_allowed.get(event.name):
            return event.name
    return None


def _find_cheapest_paths(
    src: int, receivers: Sequence[int], hops: Sequence[Tensor], bounds: Bounds
) -> dict[int, tuple[int, ...]]:
    """Find the paths with the fewest undeclared hops, and among these the fewest hops."""
    identity = bounds.after[0]
    num_layers = len(hops) - 1
    # No hop is declared before layer 1. If another number of layers ran, every allowed pair is declared.
    reach = [bounds.after[-1]]
    layer_hops = bounds.hops if num_layers == len(bounds.hops) else reach * num_layers
    predecessors = []
    cost = torch.where(identity[src], 0, UNREACHABLE)
    for hop, declared in zip(hops, [identity, *layer_hops] if num_layers else reach, strict=True):
        hop_cost = torch.where(identity, 0, torch.where(declared, 1, 1 + UNDECLARED_COST))
        hop_cost = hop_cost.masked_fill(~(hop | identity), UNREACHABLE)
        cost, predecessor = (cost + hop_cost).clamp(max=UNREACHABLE).min(1)
        predecessors.append(predecessor)
    paths: dict[int, tuple[int, ...]] = {}
    for dst in receivers:
        path = [dst]
        for predecessor in reversed(predecessors):
            path.insert(0, int(predecessor[path[0]]))
        # A token at which information stays during a layer occurs twice in ``path``.
        paths[dst] = tuple(dict.fromkeys(path)) if cost[dst] < UNREACHABLE else (src, dst)
    return paths


@dataclass(frozen=True)
class Event:
    """States that enter or leave a submodule; in :func:`_iterate_changes`, a mask of changed tokens.

    ``name`` is "" for the audited module itself. ``is_layer`` marks the input of a layer.
    """

    name: str
    is_input: bool
    is_layer: bool
    states: Float[Tensor, "batch tokens channels"] | Bool[Tensor, "... tokens"]


def record_events(
    runner: Runner, sample: Sample, layers: frozenset[str], use_ids: bool = False
) -> tuple[list[Event], Float[Tensor, "batch dst channels"]]:
    """Run the module; return all states that enter or leave submodules, in order, and the output."""
    events: list[Event] = []

    def append_event(name: str, is_input: bool, values: Iterable[Any]) -> None:
        floating = (x for value in values for x in floating_tensors(value) if x.dim() > 2)
        states = next((x for x in floating if x.shape[:2] == sample.states.shape[:2]), None)
        if states is not None:
            events.append(Event(name, is_input, is_input and name in layers, states))

    def append_input(name: str, _: Any, args: Any, kwargs: Any) -> None:
        append_event(name, True, [*args, *kwargs.values()])

    def append_output(name: str, _: Any, args: Any, output: Any) -> None:
        append_event(name, False, [output])

    with ExitStack() as hooks:
        for name, part in runner.module.named_modules():
            hook = partial(append_input, name)
            hooks.enter_context(part.register_forward_pre_hook(hook, with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(partial(append_output, name)))
        output = runner.run(sample, use_ids)
    return events, output


@torch.no_grad()
def _iterate_changes(
    runner: Runner, sample: Sample, senders: Int[Tensor, " senders"], layers: frozenset[str]
) -> Iterator[tuple[int, list[Event]]]:
    """Yield each sender and the tokens it changes in each event, if the same modules are called."""
    for chunk in torch.split(senders, runner.hooked_batch_size):
        before, _ = record_events(runner, sample.repeat(len(chunk)), layers, use_ids=True)
        after, _ = record_events(runner, runner.perturb_senders(sample, chunk, 1), layers, use_ids=True)
        keys = [[(e.name, e.is_input, e.states.shape) for e in events] for events in (before, after)]
        if keys[0] != keys[1]:
            continue
        pairs = zip(before, after, strict=True)
        changed = [replace(a, states=differs(b.states, a.states).cpu()) for b, a in pairs]
        for row, sender in enumerate(chunk.tolist()):
            yield sender, [replace(event, states=event.states[row]) for event in changed]


def _find_attention_names(runner: Runner) -> frozenset[str]:
    parts = runner.module.named_modules()
    return frozenset(name for name, part in parts if isinstance(part, MessagePassingAttention))


@torch.no_grad()
def count_attention_calls(runner: Runner) -> int:
    events, _ = record_events(runner, runner.probes[0], _find_attention_names(runner))
    return sum(event.is_layer for event in events)


@torch.no_grad()
def _find_layers(runner: Runner, sample: Sample) -> frozenset[str]:
    attention_names = _find_attention_names(runner)
    called_names = {event.name for event in record_events(runner, sample, frozenset())[0] if event.is_input}
    if attention_names & called_names:
        return attention_names
    parts = runner.module.named_modules()
    lists = {name: part for name, part in parts if isinstance(part, (nn.ModuleList, nn.Sequential))}
    for name in sorted(lists, key=lambda name: (name.count("."), -len(lists[name]))):
        members = frozenset(f"{name}.{child}" if name else child for child, _ in lists[name].named_children())
        if members and members <= called_names:
            return members
    return frozenset()
