"""Only the checks on GPUs cover these shapes: widths, groups, layouts, ragged ends, far offsets.

Each problem is one call of ``attend`` on a small graph with hubs, isolated receivers and an incomplete last tile.
The largest problem is compared at its far end alone, where the offset of a number in its tensor needs more than
32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import GraphCase, store_tokens_first
from gnn_attention.verify.groups import draw_problem
from gnn_attention.verify.measure import Outcome, differentiate, judge
from gnn_attention.verify.truth import Problem

SAMPLES = 2
OPTIONS_OF_SHAPES = ("plain", "bias and sinks")
FAR_HEADS, FAR_DIM, FAR_WINDOW, FAR_RECEIVERS = 8, 64, 16, 64


def _every_other(x: Tensor) -> Tensor:
    """Return ``x`` as every other channel of a tensor twice as wide."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def _offset(x: Tensor) -> Tensor:
    """Return ``x`` as a slice of a longer tensor, at an offset that is not aligned for wide loads."""
    padded_tensor = torch.cat([x[:, :, :1], x], dim=2)
    return torch.cat([padded_tensor[..., :1], padded_tensor], dim=-1)[:, :, 1:, 1:]


@dataclass(frozen=True)
class Shape:
    """Channels of keys and of values, heads of queries and of keys, and the memory layout of q, k and v."""

    dim: int = 64
    value_dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    layout: Callable[[Tensor], Tensor] = lambda x: x


SHAPES = {
    **{f"{width} channels": Shape(width, width) for width in (20, 64, 72, 96, 128)},
    "256 channels": Shape(256, 256, 2, 1),
    "64 and 128 channels": Shape(64, 128),
    "128 and 40 channels": Shape(128, 40),
    "groups of 8": Shape(heads=8, kv_heads=1),
    "tokens first": Shape(layout=store_tokens_first),
    "every other channel": Shape(layout=_every_other),
    "odd offsets": Shape(layout=_offset),
}


@functools.cache
def shape_graphs(n: int) -> dict[str, tuple[TokenGraph, Tensor]]:
    """Return the graphs of ``n`` receivers for the checks of every shape, each with its mask ``[dst, src]``."""
    dst, src = torch.arange(n).unsqueeze(1), torch.arange(n)
    hubs = torch.rand(n, n + n // 5, generator=torch.Generator().manual_seed(0)) < 0.05
    # One receiver attends to all, all attend to one sender, and some receivers are isolated.
    hubs[5] = True
    hubs[:, 7] = True
    hubs[9::20] = False
    sender, receiver = hubs.nonzero().flip(1).t()
    hub_graph = convert.from_edge_index(torch.stack([sender, receiver]), n, n + n // 5)
    window_mask = (src <= dst) & ((dst - src < n // 3) | (src < 2))
    return {
        "causal": (patterns.causal(n), src <= dst),
        "window and sinks": (patterns.window(n, n // 3) | patterns.sinks(n, 2), window_mask),
        "hubs": (hub_graph, hubs),
    }


def shape_problem(device: str, tokens: int, row: Mapping[str, str]) -> Problem:
    """Return a random call of a shape on a graph, plain or with a bias and sinks."""
    shape = SHAPES[row["shape"]]
    graph, mask = shape_graphs(tokens)[row["graph"]]
    table: list[list[bool]] = mask.tolist()
    case = GraphCase(
        name=row["graph"],
        graph=graph,
        edge=lambda b, h, i, j: table[i][j],
        sizes=(SAMPLES, shape.heads),
        kv_heads=shape.kv_heads,
        dims=(shape.dim, shape.value_dim),
        layout=shape.layout,
    )
    return draw_problem(device, row["dtype"], case, row["option"])


def run_far(device: str, dtype: torch.dtype, tokens: int, backend: Backend) -> Outcome:
    """Judge the last receivers of a window over many tokens, whose offsets in memory exceed ``2**31``.

    Only the last receivers contribute to the gradients.
    """
    rng = torch.Generator(device).manual_seed(9)
    shape = 1, FAR_HEADS, tokens, FAR_DIM
    leaves = {name: torch.randn(shape, generator=rng, dtype=dtype, device=device) for name in "qkv"}
    q, k, v = (x.requires_grad_() for x in leaves.values())
    out = attend(q, k, v, patterns.window(tokens, FAR_WINDOW), backend=backend)
    direction = torch.zeros_like(out)
    receivers = min(FAR_RECEIVERS, tokens - FAR_WINDOW)
    direction[:, :, -receivers:].normal_(generator=rng)
    gradients = differentiate(out, direction, leaves)
    count = receivers + FAR_WINDOW
    inputs = {name: x.detach()[:, :, -count:].clone() for name, x in leaves.items()}
    mask = patterns.window(count, FAR_WINDOW).mask().expand(1, FAR_HEADS, -1, -1).to(device)
    problem = Problem(inputs, mask, direction[:, :, -count:].clone(), FAR_DIM**-0.5)
    # The first receivers of this slice have senders outside of it, so they are left out.
    truth = problem.truth.rows(torch.arange(FAR_WINDOW, count), torch.arange(count))
    last_gradients = {name: x[:, :, -count:] for name, x in gradients.items()}
    return judge(out[:, :, -receivers:], last_gradients, truth.for_backend(backend))
