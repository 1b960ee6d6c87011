"""Graphs of some thousand tokens are compared with the float64 formula: hubs, windows, random and packed graphs.

The small graphs of the other checks cover every option. These graphs cover what needs size: long rows in chunks,
many tiles, ragged ends. Everything is computed on the device, the float64 truth included; its masks are written
out without the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import NUM_HEADS, NUM_KV_HEADS, draw_heads
from gnn_attention.verify.truth import Problem

ORDERS = 4  # attempts of the yardstick; the largest of so many errors varies little


@dataclass(frozen=True, eq=False)
class LargeGraph:
    """Functions that return a graph of ``n`` tokens and its mask ``[dst, src]``; ``listed`` adds a bias per edge."""

    name: str
    graph: Callable[[int], TokenGraph]
    mask: Callable[[int], Tensor]
    listed: bool = False


def _window(n: int, width: int, step: int = 1) -> Tensor:
    distance = torch.arange(n).unsqueeze(1) - torch.arange(n)
    return (distance >= 0) & (distance < width) & (distance % step == 0)


def _lengths(n: int) -> list[int]:
    return [n // 3, 0, n // 5, 1, n - n // 3 - n // 5 - 1]


def _documents(n: int) -> Tensor:
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor(_lengths(n)))
    return (owner.unsqueeze(1) == owner) & _window(n, n)


def _random(n: int) -> Tensor:
    """Draw 32 senders for each receiver; every seventh receiver is isolated."""
    src = torch.randint(n, (n, 32), generator=torch.Generator().manual_seed(n))
    mask = torch.zeros(n, n, dtype=torch.bool).scatter_(1, src, True)
    mask[::7] = False
    return mask


def _hubs(n: int) -> Tensor:
    """Return few random edges, two receivers that attend to all, and two senders to which all attend."""
    mask = _random(n) & (torch.arange(n) % 5 == 0)
    mask[[3, n // 2]] = True
    mask[:, [0, n - 2]] = True
    return mask


def _big_bird(n: int) -> Tensor:
    """Return blocks of 64: neighbours, the first row and column, and one more block in each row."""
    dst, src = torch.arange(n).unsqueeze(1) // 64, torch.arange(n) // 64
    return ((dst - src).abs() <= 1) | (src == 0) | (dst == 0) | (src == (dst * 7 + 3) % max(n // 64, 1))


def _make_list(mask: Callable[[int], Tensor], n: int) -> TokenGraph:
    """Return the graph of a mask as a shuffled edge list."""
    edges = mask(n).nonzero().t().flip(0)
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))
    return convert.from_edge_index(edges[:, order], n, n)


LARGE = {
    large.name: large
    for large in (
        LargeGraph("window of 256", lambda n: patterns.window(n, 256), lambda n: _window(n, 256)),
        LargeGraph("dilated", lambda n: patterns.dilated(n, 64, 8), lambda n: _window(n, 512, 8)),
        LargeGraph("documents", lambda n: patterns.documents(_lengths(n)), _documents),
        LargeGraph("BigBird of blocks", partial(_make_list, _big_bird), _big_bird, listed=True),
        LargeGraph("random, in-degree 32", partial(_make_list, _random), _random, listed=True),
        LargeGraph("hubs", partial(_make_list, _hubs), _hubs, listed=True),
    )
}


@cache
def _graph(large: LargeGraph, tokens: int) -> TokenGraph:
    """Build each graph once, because sorting its list takes a second and kernels cache data with it."""
    return large.graph(tokens)


def large_problem(
    device: str,
    large: LargeGraph,
    dtype: torch.dtype,
    tokens: int,
    full: bool = False,
    samples: int = 1,
    dim: int = 64,
) -> Problem:
    """Return a call with grouped heads and its truth on the device; ``full`` adds a bias and sinks."""
    graph, rng = _graph(large, tokens), torch.Generator().manual_seed(5)
    heads = {"q": NUM_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS, "direction": NUM_HEADS}
    shapes: dict[str, tuple[int, ...]] = {name: (samples, n, tokens, dim) for name, n in heads.items()}
    shapes |= {"bias": (1, NUM_HEADS, graph.num_edges), "sink_logits": (NUM_HEADS,)} if full else {}
    inputs = {name: torch.randn(*shape, generator=rng) for name, shape in shapes.items()}
    inputs = {name: x.to(device, dtype) for name, x in inputs.items()}
    direction = inputs.pop("direction")
    return Problem(
        inputs,
        mask=large.mask(tokens).to(device).expand(samples, NUM_HEADS, -1, -1),
        direction=direction,
        scale=dim**-0.5,
        dense=partial(_add_bias, graph) if full else lambda inputs, logits: logits,
        num_variants=ORDERS,
        graph=graph,
        options=lambda tensors: {name: tensors[name] for name in tensors.keys() - set("qkv")},
    )


def _add_bias(graph: TokenGraph, inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Add the bias of each edge to logits ``[B, H, dst, src]``."""
    src, dst = graph.edge_index.to(logits.device)
    heads = torch.arange(NUM_HEADS, device=logits.device).view(-1, 1)
    table = torch.zeros_like(logits[0]).index_put((heads, dst, src), inputs["bias"][0].to(logits.dtype))
    return logits + table


def large_layer(device: str, large: LargeGraph, dtype: torch.dtype, tokens: int) -> Problem:
    """Return a layer of grouped heads with biases on a larger graph, for one sample."""
    rng = torch.Generator().manual_seed(6)
    heads = draw_heads("grouped heads with biases", seed=6).to(device, dtype)
    width = heads.W_Q.shape[1]
    shapes = dict.fromkeys(("x_src", "x_dst", "direction"), (1, tokens, width))
    inputs = {name: torch.randn(shape, generator=rng).to(device, dtype) for name, shape in shapes.items()}
    mask = large.mask(tokens).expand(1, NUM_HEADS, -1, -1).to(device)
    direction = inputs.pop("direction")
    return Problem(inputs, mask, direction, heads.scale, heads=heads, graph=large.graph(tokens))
