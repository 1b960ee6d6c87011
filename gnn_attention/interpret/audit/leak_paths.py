"""The way of a leak: the tokens that hold the information in turn, and the part of the module where it comes in.

Between the inputs of one layer and of the next the Jacobian tells who really hears whom in that layer; the cheapest path
through these hops is the way. Where the leak comes in is seen when the sender's input is replaced: the first part that is
given states in which only such tokens changed as may have heard of the sender by then, and returns others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.interpret.audit.hooks import Event, changes, layer_names, watched
from gnn_attention.interpret.audit.reachability import Bounds
from gnn_attention.interpret.audit.runner import Runner, Sample

__all__ = ["Way", "ways"]

UNDECLARED = 2**16  # what a hop that is no edge costs: more than any number of edges
NEVER = 2**60


@dataclass(frozen=True)
class Way:
    """``path`` from sender to receiver, the name of the part where the leak comes in, and how many layers the module has."""

    path: tuple[int, ...]
    layer: str | None = None
    depth: int | None = None


def ways(runner: Runner, leaks: Mapping[int, Sequence[int]], bounds: Bounds) -> dict[tuple[int, int], Way]:
    """The way of every leak ``src -> dst``, given as src: [dst, ...], in a module of square graphs."""
    sample = runner.draw(0)
    layers = layer_names(runner, sample)
    seen = _hops_seen(runner, sample, layers)
    depth = len(seen) - 1 or None  # before the first layer there is a stage too
    senders = torch.tensor(list(leaks), device="cpu")
    entrances = {src: _entrance(src, events, bounds) for src, events in changes(runner, sample, senders, layers)}
    found: dict[tuple[int, int], Way] = {}
    for src, receivers in leaks.items():
        layer = type(runner.inside).__name__ if entrances.get(src) == "" else entrances.get(src)
        paths = _paths(src, receivers, seen, bounds)
        found |= {(src, dst): Way(paths[dst], layer, depth) for dst in receivers}
    return found


def _hops_seen(runner: Runner, sample: Sample, layers: frozenset[str]) -> list[Bool[Tensor, "dst src"]]:
    """Who hears whom between the input, the inputs of the layers, and the output: from each to the next by the Jacobian."""
    generator, parts = runner.cotangents(0), []
    at_once = max(1, min(runner.samples, runner.shape[0] - 1))
    for asked in torch.split(torch.eye(runner.num_dst, dtype=torch.bool, device="cpu"), at_once):
        states, copies = sample.tracked(len(asked))
        events, y = watched(runner, copies, layers)
        held = [states, *(event.states for event in events if event.is_layer), y]
        sizes = [runner.pulled_back(far, asked, near, generator, again=True) for near, far in pairwise(held)]
        parts.append([size > 0 for size in sizes])
    return [torch.cat(stage) for stage in zip(*parts, strict=True)]


def _entrance(src: int, events: list[Event], bounds: Bounds) -> str | None:
    """The first part to end that was given states within their bounds and returned others; None if none was."""
    kept_in: list[tuple[str, bool]] = []  # the calls that have not ended, and whether what went in kept its bounds
    by_layer = sum(event.is_layer for event in events) == bounds.layers
    for event in events:
        may = bounds.after[event.begun if by_layer else bounds.layers][:, src]
        kept = not bool((event.states & ~may).any())
        if event.inwards:
            kept_in.append((event.name, kept))
            continue
        place = next((i for i in reversed(range(len(kept_in))) if kept_in[i][0] == event.name), None)
        came_in_well = not event.name if place is None else kept_in[place][1]  # the module itself may be given ids, no states
        if not kept and came_in_well:
            return event.name
        kept_in = kept_in[:place]
    return None


def _paths(src: int, receivers: Sequence[int], seen: Sequence[Tensor], bounds: Bounds) -> dict[int, tuple[int, ...]]:
    """The cheapest paths along the hops that were seen: fewest undeclared ones, then fewest."""
    own = bounds.after[0]  # everybody has heard of itself
    cost, origins = torch.where(own[src], 0, NEVER), []
    for hop, declared in zip(seen, _declared_hops(len(seen), bounds), strict=True):
        price = torch.where(own, 0, torch.where(declared, 1, 1 + UNDECLARED)).masked_fill(~(hop | own), NEVER)
        cost, origin = (cost + price).clamp(max=NEVER).min(1)
        origins.append(origin)
    return {dst: _traced_back(dst, origins) if cost[dst] < NEVER else (src, dst) for dst in receivers}


def _declared_hops(stages: int, bounds: Bounds) -> list[Bool[Tensor, "dst src"]]:
    """What may be heard before the first layer (nothing new) and in each; of layers that were not declared, the whole reach."""
    if stages == 1:
        return [bounds.after[-1]]
    return [bounds.after[0], *(bounds.hops if stages - 1 == bounds.layers else [bounds.after[-1]] * (stages - 1))]


def _traced_back(dst: int, origins: Sequence[Int[Tensor, " dst"]]) -> tuple[int, ...]:
    """The path that ends at ``dst``, without waiting."""
    path = [dst]
    for origin in reversed(origins):
        before = int(origin[path[-1]])
        path += [before] if before != path[-1] else []
    return tuple(reversed(path))
