"""Watching a module from inside: the states of the sequence that go in and out of its parts, by forward hooks.

Layers are the calls of :class:`MessagePassingAttention` if there are any, else those of the members of the outermost
``ModuleList`` or ``Sequential`` that all hear the sequence (``blocks``, ``layers``, ``h``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.audit.runner import Runner, Sample, differs
from gnn_attention.layer import MessagePassingAttention

__all__ = ["Event", "attention_calls", "changes", "layer_names", "watched"]


@dataclass(frozen=True)
class Event:
    """One call of a part, called ``""`` if it is the module itself: the states that went in, or came out.

    ``begun`` counts the layers that had begun before, ``is_layer`` is True of what goes into a layer. Of :func:`changes`,
    ``states`` says who changed, ``[tokens]``.
    """

    name: str
    inwards: bool
    begun: int
    is_layer: bool
    states: Float[Tensor, "batch tokens channels"] | Bool[Tensor, "... tokens"]


def watched(
    runner: Runner, sample: Sample, layers: frozenset[str], by_ids: bool = False
) -> tuple[list[Event], Float[Tensor, "batch dst channels"]]:
    """All states of the sequence that go in and out of the parts, in the order of the calls, and the module's output."""
    shape, begun, events, handles = sample.states.shape[:2], 0, list[Event](), []

    def note(name: str, inwards: bool, values: Iterable[Any]) -> None:
        nonlocal begun
        states = next((v for v in _tensors(values) if v.dim() > 2 and v.shape[:2] == shape and v.is_floating_point()), None)
        is_layer = inwards and name in layers
        if states is not None:
            events.append(Event(name, inwards, begun, is_layer, states))
        begun += is_layer

    for name, part in runner.inside.named_modules():
        before = part.register_forward_pre_hook(lambda _, a, k, name=name: note(name, True, [*a, *k.values()]), with_kwargs=True)
        handles += [before, part.register_forward_hook(lambda _, a, out, name=name: note(name, False, [out]))]
    try:
        y = runner.run(sample, by_ids)
    finally:
        for handle in handles:
            handle.remove()
    return events, y


@torch.no_grad()
def changes(
    runner: Runner, sample: Sample, senders: Int[Tensor, " senders"], layers: frozenset[str]
) -> Iterator[tuple[int, list[Event]]]:
    """For each sender who changed in each event when its input alone does; nothing where another input takes other calls."""
    at_once = max(1, min(runner.samples, runner.shape[0] - 1))  # not T, or states [T, B, ...] would be taken for [B, T, ...]
    for part in torch.split(senders, at_once):
        before, _ = watched(runner, sample.times(len(part)), layers, by_ids=True)
        after, _ = watched(runner, runner.nudged(sample, part, 1), layers, by_ids=True)
        if [_place(event) for event in before] != [_place(event) for event in after]:
            continue
        pairs = zip(before, after, strict=True)
        changed = [replace(a, states=differs(b.states, a.states).cpu()) for b, a in pairs]
        for row, sender in enumerate(part.tolist()):
            yield sender, [replace(event, states=event.states[row]) for event in changed]


def attention_calls(runner: Runner) -> int:
    """How often a forward pass calls a :class:`MessagePassingAttention`."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    handles = [part.register_forward_pre_hook(counted) for part in runner.inside.modules() if _is_attention(part)]
    with torch.no_grad():
        runner.run(runner.draw(0))
    for handle in handles:
        handle.remove()
    return count


@torch.no_grad()
def layer_names(runner: Runner, sample: Sample) -> frozenset[str]:
    """The parts that are layers, by name; none where the module has no such structure."""
    parts = dict(runner.inside.named_modules())
    attention = frozenset(name for name, part in parts.items() if _is_attention(part))
    called = {event.name for event in watched(runner, sample, frozenset())[0] if event.inwards}
    if attention & called:
        return attention
    lists = {name: part for name, part in parts.items() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part)}
    for name in sorted(lists, key=lambda name: (name.count("."), -len(lists[name]))):
        members = frozenset(f"{name}.{child}" if name else child for child, _ in lists[name].named_children())
        if members <= called:
            return members
    return frozenset()


# -- helpers ----------------------------------------------------------------------------------------------------------


def _is_attention(part: nn.Module) -> bool:
    return isinstance(part, MessagePassingAttention)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arguments or an output, one level of tuples and mappings deep."""
    for value in values:
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        yield from (tensor for tensor in inside if isinstance(tensor, Tensor))


def _place(event: Event) -> tuple[object, ...]:
    return event.name, event.inwards, event.states.shape[1:]
