"""The path of a leak: the tokens that carry the information, and the part where it comes in.

The Jacobian between the inputs of one layer and of the next gives the flow of that layer; the path is the
cheapest one through these hops. The part where the leak comes in is the first whose input, when the sender's
is replaced, changes only at tokens that the sender may have reached by then, and whose output changes at
others. Layers are the calls of :class:`MessagePassingAttention` if there are any, else those of the members
of the outermost ``ModuleList`` or ``Sequential`` whose members are all called with the sequence.
"""

from __future__ import annotations

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

# what a hop that is no edge costs: more than any number of edges
UNDECLARED = 2**16
NEVER = 2**60

Pair = tuple[int, int]


@dataclass(frozen=True)
class Bounds:
    """``after[k][dst, src]``: may src influence dst after k layers; ``hops[k]``: in layer k + 1 alone.

    In a square graph each token may influence itself (its state is carried along).
    """

    after: Sequence[Bool[Tensor, "dst src"]]
    hops: Sequence[Bool[Tensor, "dst src"]]

    @classmethod
    def of(cls, graphs: Sequence[TokenGraph], layers: int) -> Bounds:
        """Those of so many layers; the graphs are cycled. ValueError where a graph cannot follow itself."""
        square = is_square(graphs[0])
        if layers > 1 and not square:
            raise ValueError(f"layers must be 1 for the oblong {graphs[0]!r}, got {layers}")
        start = torch.eye(graphs[0].num_src, dtype=torch.bool, device="cpu")
        masks = [graph.mask() | start if square else graph.mask() for graph in graphs]
        after, hops = [start], [masks[layer % len(masks)] for layer in range(layers)]
        for hop in hops:
            after.append(hop.float() @ after[-1].float() > 0)
        return cls(after, hops)


class LeakPath(NamedTuple):
    """``tokens`` from sender to receiver, and the part where it comes in."""

    tokens: tuple[int, ...]
    layer: str | None = None


def leak_paths(runner: Runner, leaks: Sequence[Pair], bounds: Bounds) -> dict[Pair, LeakPath]:
    """The path of every leak ``(src, dst)`` in a module of square graphs, at an input that shows it."""
    paths: dict[Pair, LeakPath] = {}
    for sample in runner.probes:
        hidden = [leak for leak in leaks if leak not in paths or paths[leak].layer is None]
        shown = _paths_at(sample, runner, hidden, bounds) if hidden else {}
        paths |= {leak: path for leak, path in shown.items() if path.layer or leak not in paths}
    return paths


def _paths_at(sample: Sample, runner: Runner, leaks: Sequence[Pair], bounds: Bounds) -> dict[Pair, LeakPath]:
    layers = layer_names(runner, sample)
    hops = _hops(runner, sample, layers)
    senders = list(dict.fromkeys(src for src, _ in leaks))
    changed = changes(runner, sample, torch.tensor(senders, device="cpu"), layers)
    entrances = {src: _entrance(src, events, bounds) for src, events in changed}
    paths: dict[Pair, LeakPath] = {}
    for src in senders:
        layer = type(runner.module).__name__ if entrances.get(src) == "" else entrances.get(src)
        tokens = _cheapest_paths(src, [dst for other, dst in leaks if other == src], hops, bounds)
        paths |= {(src, dst): LeakPath(path, layer) for dst, path in tokens.items()}
    return paths


def _hops(runner: Runner, sample: Sample, layers: frozenset[str]) -> list[Bool[Tensor, "dst src"]]:
    # the flow from the input to the inputs of the layers to the output, by the Jacobian of each stage
    generator, parts = runner.cotangents(0), []
    receivers = torch.eye(runner.num_dst, dtype=torch.bool, device="cpu")
    for part in torch.split(receivers, runner.samples_below_tokens):
        states, copies = sample.differentiable_copies(len(part))
        events, y = events_of(runner, copies, layers)
        stages = [states, *(event.states for event in events if event.is_layer), y]
        sizes = [runner.pulled_back(far, part, near, generator, again=True) for near, far in pairwise(stages)]
        parts.append([size > 0 for size in sizes])
    return [torch.cat(stage) for stage in zip(*parts, strict=True)]


def _entrance(src: int, events: list[Event], bounds: Bounds) -> str | None:
    # whether the last input of each part was within the bounds; that of the module may be ids, no event
    inputs_within, begun = {"": True}, 0
    by_layer = sum(event.is_layer for event in events) == len(bounds.hops)
    for event in events:
        allowed = bounds.after[begun if by_layer else -1][:, src]
        begun += event.is_layer
        within = not bool((event.states & ~allowed).any())
        if event.inwards:
            inputs_within[event.name] = within
        elif not within and inputs_within.get(event.name):
            return event.name
    return None


def _cheapest_paths(
    src: int, receivers: Sequence[int], hops: Sequence[Tensor], bounds: Bounds
) -> dict[int, tuple[int, ...]]:
    # With the fewest undeclared hops, then the fewest hops.
    own, layers = bounds.after[0], len(hops) - 1
    # What is declared: nothing before the first layer; of layers that were not declared, the whole reach.
    reach = [bounds.after[-1]]
    by_layer = bounds.hops if layers == len(bounds.hops) else reach * layers
    cost, origins = torch.where(own[src], 0, NEVER), []
    for hop, declared in zip(hops, [own, *by_layer] if layers else reach, strict=True):
        price = torch.where(own, 0, torch.where(declared, 1, 1 + UNDECLARED)).masked_fill(~(hop | own), NEVER)
        cost, origin = (cost + price).clamp(max=NEVER).min(1)
        origins.append(origin)
    paths: dict[int, tuple[int, ...]] = {}
    for dst in receivers:
        path = [dst]
        for origin in reversed(origins):
            path.insert(0, int(origin[path[0]]))
        # a token may wait in a layer
        paths[dst] = tuple(dict.fromkeys(path)) if cost[dst] < NEVER else (src, dst)
    return paths


@dataclass(frozen=True)
class Event:
    """The states that went into a part, or came out; in :func:`changes`, which tokens of them changed."""

    # "" for the module itself
    name: str
    inwards: bool
    # whether this is the input of a layer
    is_layer: bool
    states: Float[Tensor, "batch tokens channels"] | Bool[Tensor, "... tokens"]


def events_of(
    runner: Runner, sample: Sample, layers: frozenset[str], by_ids: bool = False
) -> tuple[list[Event], Float[Tensor, "batch dst channels"]]:
    """All states in and out of the parts, in the order of the calls, and the module's output."""
    shape, events = sample.states.shape[:2], list[Event]()

    def note(name: str, inwards: bool, values: Iterable[Any]) -> None:
        floating = (x for value in values for x in floating_tensors(value) if x.dim() > 2)
        states = next((x for x in floating if x.shape[:2] == shape), None)
        if states is not None:
            events.append(Event(name, inwards, inwards and name in layers, states))

    def note_input(name: str, _: Any, inputs: Any, named: Any) -> None:
        note(name, True, [*inputs, *named.values()])

    with ExitStack() as hooks:
        for name, part in runner.module.named_modules():
            hooks.enter_context(part.register_forward_pre_hook(partial(note_input, name), with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(lambda _, x, y, name=name: note(name, False, [y])))
        y = runner.run(sample, by_ids)
    return events, y


@torch.no_grad()
def changes(
    runner: Runner, sample: Sample, senders: Int[Tensor, " senders"], layers: frozenset[str]
) -> Iterator[tuple[int, list[Event]]]:
    """For each sender the tokens that change in each event; skipped where the calls differ."""
    for part in torch.split(senders, runner.samples_below_tokens):
        before, _ = events_of(runner, sample.times(len(part)), layers, by_ids=True)
        after, _ = events_of(runner, runner.perturb_senders(sample, part, 1), layers, by_ids=True)
        first, second = ([(e.name, e.inwards, e.states.shape) for e in events] for events in (before, after))
        if first != second:
            continue
        pairs = zip(before, after, strict=True)
        changed = [replace(a, states=differs(b.states, a.states).cpu()) for b, a in pairs]
        for row, sender in enumerate(part.tolist()):
            yield sender, [replace(event, states=event.states[row]) for event in changed]


def _attention_layers(runner: Runner) -> frozenset[str]:
    parts = runner.module.named_modules()
    return frozenset(name for name, part in parts if isinstance(part, MessagePassingAttention))


@torch.no_grad()
def attention_calls(runner: Runner) -> int:
    """How often the module calls a :class:`MessagePassingAttention`."""
    return sum(event.is_layer for event in events_of(runner, runner.probes[0], _attention_layers(runner))[0])


@torch.no_grad()
def layer_names(runner: Runner, sample: Sample) -> frozenset[str]:
    parts, attention = dict(runner.module.named_modules()), _attention_layers(runner)
    called = {event.name for event in events_of(runner, sample, frozenset())[0] if event.inwards}
    if attention & called:
        return attention
    lists = {name: part for name, part in parts.items() if isinstance(part, (nn.ModuleList, nn.Sequential))}
    for name in sorted(lists, key=lambda name: (name.count("."), -len(lists[name]))):
        members = frozenset(f"{name}.{child}" if name else child for child, _ in lists[name].named_children())
        if members and members <= called:
            return members
    return frozenset()
