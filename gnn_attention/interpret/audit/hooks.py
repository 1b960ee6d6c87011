"""The states that go in and out of a module's parts, recorded by forward hooks.

Layers are the calls of :class:`MessagePassingAttention` if there are any, else those of the members of the
outermost ``ModuleList`` or ``Sequential`` whose members are all called with the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.audit.runner import Runner, Sample, differs
from gnn_attention.layer import MessagePassingAttention


@dataclass(frozen=True)
class Event:
    """The states that went into a part, or came out; in :func:`changes`, which tokens of them changed."""

    # "" for the module itself
    name: str
    inwards: bool
    # how many layers had begun before, and whether this is the input of a layer
    begun: int
    is_layer: bool
    states: Float[Tensor, "batch tokens channels"] | Bool[Tensor, "... tokens"]

    @property
    def place(self) -> tuple[object, ...]:
        # the same for the same call in another pass
        return self.name, self.inwards, self.states.shape[1:]


def events_of(
    runner: Runner, sample: Sample, layers: frozenset[str], by_ids: bool = False
) -> tuple[list[Event], Float[Tensor, "batch dst channels"]]:
    """All states in and out of the parts, in the order of the calls, and the module's output."""
    shape, begun, events = sample.states.shape[:2], 0, list[Event]()

    def note(name: str, inwards: bool, values: Iterable[Any]) -> None:
        nonlocal begun
        floating = (x for x in _tensors(values) if x.dim() > 2 and x.is_floating_point())
        states = next((x for x in floating if x.shape[:2] == shape), None)
        is_layer = inwards and name in layers
        if states is not None:
            events.append(Event(name, inwards, begun, is_layer, states))
        begun += is_layer

    def note_input(name: str, _: Any, inputs: Any, named: Any) -> None:
        note(name, True, [*inputs, *named.values()])

    with ExitStack() as hooks:
        for name, part in runner.inside.named_modules():
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
        after, _ = events_of(runner, runner.nudged(sample, part, 1), layers, by_ids=True)
        if [event.place for event in before] != [event.place for event in after]:
            continue
        pairs = zip(before, after, strict=True)
        changed = [replace(a, states=differs(b.states, a.states).cpu()) for b, a in pairs]
        for row, sender in enumerate(part.tolist()):
            yield sender, [replace(event, states=event.states[row]) for event in changed]


def attention_calls(runner: Runner) -> int:
    calls: list[None] = []
    with torch.no_grad(), ExitStack() as hooks:
        for part in runner.inside.modules():
            if isinstance(part, MessagePassingAttention):
                hooks.enter_context(part.register_forward_pre_hook(lambda *_: calls.append(None)))
        runner.run(runner.draw(0))
    return len(calls)


@torch.no_grad()
def layer_names(runner: Runner, sample: Sample) -> frozenset[str]:
    """The parts that are layers, by name; empty where the module has no such structure."""
    parts = dict(runner.inside.named_modules())
    attention = frozenset(name for name, part in parts.items() if isinstance(part, MessagePassingAttention))
    called = {event.name for event in events_of(runner, sample, frozenset())[0] if event.inwards}
    if attention & called:
        return attention
    lists = {name: part for name, part in parts.items() if isinstance(part, (nn.ModuleList, nn.Sequential))}
    for name in sorted(lists, key=lambda name: (name.count("."), -len(lists[name]))):
        members = frozenset(f"{name}.{child}" if name else child for child, _ in lists[name].named_children())
        if members and members <= called:
            return members
    return frozenset()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    # one level of tuples and mappings deep
    for value in values:
        inside = value.values() if isinstance(value, Mapping) else value
        inside = inside if isinstance(value, (Mapping, list, tuple)) else [value]
        yield from (tensor for tensor in inside if isinstance(tensor, Tensor))
