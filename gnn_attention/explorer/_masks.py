"""The graphs that a page offers: the model's own, a choice of the zoo, and the user's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gnn_attention import algebra, patterns
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.convert import expressions
from gnn_attention.explorer._pack import EACH_ITS_OWN, bits
from gnn_attention.graph import TokenGraph

# tokens of a typed text and those written after it
TYPED, ROOM = 96, 72


@dataclass(frozen=True)
class Choice:
    """A graph under its name, its edges in one sentence, and its mask over tokens and room."""

    name: str
    meaning: str
    mask: Bool[Tensor, "size size"]
    tokens: int

    def to_json(self) -> dict[str, Any]:
        named = {"name": self.name, "meaning": self.meaning, "bits": bits(self.mask)}
        return named | {"causal": not bool(self.mask.triu(1).any()), "tokens": self.tokens}


def mask_of_text(graph: TokenGraph) -> Choice:
    n, which = graph.num_dst, "every token attends to those that its mask allows"
    if graph == patterns.causal(n):
        which = "every token attends to itself and all before it"
    elif graph == patterns.full(n):
        which = "every token attends to every token"
    several = "The model's own graphs, which differ from layer to layer."
    meaning = several if graph.name == EACH_ITS_OWN else f"The model's own graph: {which}."
    return Choice(graph.name, meaning, graph.mask().view(n, n), n)


def zoo(tokens: int, room: int) -> list[Choice]:
    """Builders in the size of the text, from the densest to the sparsest, then the two that look ahead.

    >>> [choice.name for choice in zoo(6, 16)][:3]
    ['strict_causal(22)', 'window(22, 5)', 'window(22, 4) | sinks(22, 1)']
    """
    n, w, half = tokens + room, max(2, round(math.sqrt(tokens + room))), -(-tokens // 2)
    parents, block = [-1, *((token - 1) // 2 for token in range(1, n))], max(1, w // 2)
    every = "Every token attends to "
    last, a_few = f"{every}the last {w} tokens", patterns.window(n, w - 1) | patterns.sinks(n, 1)
    big_bird = patterns.bigbird(n, block, 1) & patterns.causal(n)
    isolated = "not itself: the first has no in-edges and receives exactly 0."
    neighbours = "its own, the one before, the first and a random one (BigBird)."
    rest = "the rest attends to itself and all before it."
    binary, documents = "A binary tree in reading order", f"Two packed documents of {half} and {n - half}"
    found = [
        (patterns.strict_causal(n), f"{every}all before it, {isolated}"),
        (patterns.window(n, w), f"{last}, itself included."),
        (a_few, f"{every}the last {w - 1} tokens, itself included, and the very first (StreamingLLM)."),
        (patterns.dilated(n, w, 2), f"{every}{w} tokens at steps of 2, itself first."),
        (patterns.sparse_strided(n, w), f"{last} and every {w}th before them (Sparse Transformer)."),
        (patterns.log_sparse(n), f"{every}itself and the tokens 1, 2, 4, 8, ... before it."),
        (patterns.chunked(n, w), f"Chunks of {w} tokens: {every.lower()}its own so far, and no other."),
        (patterns.documents([half, n - half]), f"{documents} tokens: no token attends to the other one."),
        (patterns.tree(parents), f"{binary}: {every.lower()}itself, its parent and all above."),
        (big_bird, f"Blocks of {block}: {every.lower()}{neighbours}"),
        (patterns.random_senders(n, w), f"{every}{w} random tokens of those up to itself."),
        (patterns.self_loops(n), f"{every}itself alone: no token learns of another."),
        (patterns.prefix(n, half), f"The first {half} tokens attend to each other, {rest}"),
        (patterns.full(n), f"{every}every token, the future too: an encoder's graph."),
    ]
    return [Choice(graph.name, meaning, graph.mask(), n) for graph, meaning in found]


def distinct(shown: list[Choice], others: Iterable[Choice]) -> list[Choice]:
    """Those shown, and of the others each whose mask is not there yet."""
    for choice in others:
        if all(not choice.mask.equal(other.mask) for other in shown):
            shown = [*shown, choice]
    return shown


def masks_of_typed_text(graphs: Iterable[Any]) -> dict[str, Any]:
    """The graphs of a text that is typed on the page: of those given, expressions that fit any length."""
    sizes, general = (TYPED - ROOM, ROOM), []
    for expression in (graph for graph in graphs if isinstance(graph, str)):
        with contextlib.suppress(ValueError):
            general += users([expression], *sizes)
    choices = distinct([mask_of_text(patterns.causal(TYPED)), *general], zoo(*sizes))
    return {"size": TYPED, "start": min(1, len(general)), "masks": [choice.to_json() for choice in choices]}


def users(graphs: Iterable[Any], tokens: int, room: int) -> list[Choice]:
    """The user's graphs: choices, :class:`TokenGraph` or expressions, in which ``n`` is tokens and room.

    >>> users(["window(n, 2) - causal(n).T"], 6, 2)[0].mask.sum().item()
    7
    """
    return [g if isinstance(g, Choice) else _user(g, tokens, tokens + room) for g in graphs]


def _user(value: Any, tokens: int, size: int) -> Choice:
    graph = expressions.parse(value, n=size) if isinstance(value, str) else value
    if not isinstance(graph, TokenGraph):
        expected = "a TokenGraph or an expression such as 'window(n, 4)'"
        raise TypeError(f"a graph must be {expected}, got {type(graph).__name__}")
    if graph.varying_axes:
        raise ValueError(f"{graph!r} differs by head or sample: take graph.select(batch, head)")
    if graph.num_dst != graph.num_src or graph.num_dst < tokens:
        expected = f"at least the {tokens} tokens of the text ({size} to write on), all senders and receivers"
        raise ValueError(f"a graph must be of {expected}, got {graph!r}; n stands for {size}")
    count = min(graph.num_dst, size)
    mask = torch.zeros(size, size, dtype=torch.bool)
    mask[:count, :count] = algebra.restrict(graph, range(count)).mask()
    return Choice(graph.name, f"Your graph, {int(mask.sum()):,} edges.", mask, count)
