"""The graphs that a page offers: the model's own, some of the library's patterns, and the user's."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gnn_attention import algebra, patterns
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.convert import expressions
from gnn_attention.explorer._pack import UNION_NAME, encode_mask
from gnn_attention.graph import TokenGraph

# Graphs for texts typed on the page have 96 tokens, as if the text had 24 and the room were 72.
TYPED_SIZE, TYPED_ROOM = 96, 72


@dataclass(frozen=True)
class Choice:
    """A graph of ``num_tokens`` tokens to choose. ``mask`` is padded to the size of text and room."""

    name: str
    meaning: str
    mask: Bool[Tensor, "size size"]
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        record = {"name": self.name, "meaning": self.meaning, "bits": encode_mask(self.mask)}
        return record | {"causal": not bool(self.mask.triu(1).any()), "tokens": self.num_tokens}


def make_model_choice(graph: TokenGraph) -> Choice:
    n = graph.num_dst
    if graph.name == UNION_NAME:
        meaning = "The model's own graphs, which differ from layer to layer."
    elif graph == patterns.causal(n):
        meaning = "The model's own graph: every token attends to itself and all tokens before it."
    elif graph == patterns.full(n):
        meaning = "The model's own graph: every token attends to every token."
    else:
        meaning = "The model's own graph: every token attends to the tokens that the mask allows."
    return Choice(graph.name, meaning, graph.mask().view(n, n), n)


def zoo(num_tokens: int, room: int) -> list[Choice]:
    """Return patterns of the library: causal graphs first, then two that look ahead.

    >>> [choice.name for choice in zoo(6, 16)][:3]
    ['strict_causal(22)', 'window(22, 5)', 'window(22, 4) | sinks(22, 1)']
    """
    n = num_tokens + room
    half = -(-num_tokens // 2)
    w = max(2, round(math.sqrt(n)))
    block = max(1, w // 2)
    binary_tree = patterns.tree([-1, *((token - 1) // 2 for token in range(1, n))])
    streaming = patterns.window(n, w - 1) | patterns.sinks(n, 1)
    bigbird = patterns.bigbird(n, block, 1) & patterns.causal(n)
    graphs = [
        (patterns.strict_causal(n), "all tokens before it but not to itself, so the first receives 0"),
        (patterns.window(n, w), f"the last {w} tokens, itself included"),
        (streaming, f"the last {w - 1} tokens, itself included, and the very first (StreamingLLM)"),
        (patterns.dilated(n, w, 2), f"itself and {w - 1} earlier tokens, at steps of 2"),
        (patterns.sparse_strided(n, w), f"the last {w} tokens, then to one in {w} (Sparse Transformer)"),
        (patterns.log_sparse(n), "itself and the tokens 1, 2, 4, 8, ... before it"),
        (patterns.chunked(n, w), f"itself and the earlier tokens of its own chunk of {w}"),
        (patterns.documents([half, n - half]), "itself and the earlier tokens of its half of the text"),
        (binary_tree, "itself, its parent and all ancestors, in a binary tree in reading order"),
        (bigbird, f"itself and earlier tokens in blocks of {block}: own, previous, first, random (BigBird)"),
        (patterns.random_senders(n, w), f"{w} random tokens among itself and those before"),
        (patterns.self_loops(n), "itself only, so that no token learns anything about another"),
        (patterns.prefix(n, half), f"itself, to all tokens before it, and to all of the first {half} tokens"),
        (patterns.full(n), "every token, including later ones, as in an encoder"),
    ]
    return [Choice(g.name, f"Every token attends to {senders}.", g.mask(), n) for g, senders in graphs]


def add_distinct(choices: list[Choice], candidates: Iterable[Choice]) -> list[Choice]:
    """Append each candidate whose mask no choice has yet."""
    for candidate in candidates:
        if all(not candidate.mask.equal(choice.mask) for choice in choices):
            choices = [*choices, candidate]
    return choices


def make_typed_text_data(graphs: Iterable[Any]) -> dict[str, Any]:
    """Return the graphs for text typed on the page. Of ``graphs``, only expressions are used."""
    num_tokens = TYPED_SIZE - TYPED_ROOM
    user_choices: list[Choice] = []
    for expression in (graph for graph in graphs if isinstance(graph, str)):
        with contextlib.suppress(ValueError):
            user_choices += make_user_choices([expression], num_tokens, TYPED_ROOM)
    causal = make_model_choice(patterns.causal(TYPED_SIZE))
    choices = add_distinct([causal, *user_choices], zoo(num_tokens, TYPED_ROOM))
    return {"size": TYPED_SIZE, "start": min(1, len(user_choices)), "masks": [c.to_json() for c in choices]}


def make_user_choices(graphs: Iterable[Any], num_tokens: int, room: int) -> list[Choice]:
    """Turn the user's graphs into choices. An expression may use n, which is num_tokens + room.

    >>> make_user_choices(["window(n, 2) - causal(n).T"], 6, 2)[0].mask.sum().item()
    7
    """
    return [g if isinstance(g, Choice) else _read_choice(g, num_tokens, num_tokens + room) for g in graphs]


def _read_choice(value: Any, num_tokens: int, size: int) -> Choice:
    graph = expressions.parse(value, n=size) if isinstance(value, str) else value
    if not isinstance(graph, TokenGraph):
        kind = type(graph).__name__
        raise TypeError(f"a graph must be a TokenGraph or an expression such as 'window(n, 4)', got {kind}")
    if graph.varying_axes:
        raise ValueError(f"{graph!r} varies by head or sample: use graph.select(batch, head)")
    if graph.num_dst != graph.num_src or graph.num_dst < num_tokens:
        raise ValueError(
            f"a graph must be square, over at least the {num_tokens} tokens of the text ({size} with room), "
            f"got {graph!r}; n stands for {size}"
        )
    num_shown = min(graph.num_dst, size)
    mask = torch.zeros(size, size, dtype=torch.bool)
    mask[:num_shown, :num_shown] = algebra.restrict(graph, range(num_shown)).mask()
    return Choice(graph.name, f"Your graph, with {int(mask.sum()):,} edges.", mask, num_shown)
