"""Shapes of calls that the checks of every machine lack: widths, groups, layouts, ragged ends, far offsets.

Each problem is one call of ``attend`` on a small graph with hubs, isolated receivers and a last block that is
not full. The largest one is compared at its far end alone, where the place of a number in its tensor needs
more than 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.check import verdict
from gnn_attention.verify.measure import Truth, gradients_of
from gnn_attention.verify.truth import Formula, unchanged

SAMPLES = 2
OPTIONS = ("plain", "bias and sinks")
FAR_HEADS, FAR_DIM, FAR_WINDOW, FAR_RECEIVERS = 8, 64, 16, 64


def _as_is(x: Tensor) -> Tensor:
    return x


def _tokens_first(x: Tensor) -> Tensor:
    """In memory ``[B, T, H, D]``, as projections give it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _every_other(x: Tensor) -> Tensor:
    """Every other channel of a tensor twice as wide."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def _offset(x: Tensor) -> Tensor:
    """A part of a longer sequence, which begins where no wide load may."""
    padded = torch.cat([x[:, :, :1], x], dim=2)
    return torch.cat([padded[..., :1], padded], dim=-1)[:, :, 1:, 1:]


@dataclass(frozen=True)
class Shape:
    """Heads of queries and of keys, channels of keys and of values, and how q, k and v lie in memory."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 64
    layout: Callable[[Tensor], Tensor] = _as_is


SHAPES = {
    "20 channels": Shape(dim=20, value_dim=20),
    "64 channels": Shape(),
    "72 channels": Shape(dim=72, value_dim=72),
    "96 channels": Shape(dim=96, value_dim=96),
    "128 channels": Shape(dim=128, value_dim=128),
    "256 channels": Shape(2, 1, 256, 256),
    "64 and 128 channels": Shape(dim=64, value_dim=128),
    "128 and 40 channels": Shape(dim=128, value_dim=40),
    "groups of 8": Shape(8, 1),
    "tokens first": Shape(layout=_tokens_first),
    "every other channel": Shape(layout=_every_other),
    "odd offsets": Shape(layout=_offset),
}


@dataclass(frozen=True, eq=False)
class Edges:
    """A graph and its mask ``[dst, src]``, which defines it."""

    graph: TokenGraph
    mask: Bool[Tensor, "dst src"]


def _ends(dst: int, src: int) -> tuple[Tensor, Tensor]:
    return torch.arange(dst).unsqueeze(1), torch.arange(src)


@functools.cache
def shape_graphs(n: int) -> dict[str, Edges]:
    """The graphs of ``n`` receivers on which every shape is checked."""
    dst, src = _ends(n, n)
    hubs = torch.rand(n, n + n // 5, generator=torch.Generator().manual_seed(0)) < 0.05
    # one receiver attends to all, all attend to one sender, and some receivers have no in-edges
    hubs[5] = True
    hubs[:, 7] = True
    hubs[9::20] = False
    sender, receiver = hubs.nonzero().flip(1).t()
    sinks = (src <= dst) & ((dst - src < n // 3) | (src < 2))
    return {
        "causal": Edges(patterns.causal(n), src <= dst),
        "window and sinks": Edges(patterns.window(n, n // 3) | patterns.sinks(n, 2), sinks),
        "hubs": Edges(convert.from_edge_index(torch.stack([sender, receiver]), n, n + n // 5), hubs),
    }


def _with_bias(edges: Edges) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    dst, src = edges.mask.nonzero().t()

    def add(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
        heads = torch.arange(logits.shape[1], device=logits.device).unsqueeze(1)
        places = heads, dst.to(logits.device), src.to(logits.device)
        bias = inputs["bias"].to(logits.dtype)
        return logits + logits.new_zeros(logits.shape[1:]).index_put(places, bias)

    return add


@dataclass(frozen=True, eq=False)
class ShapeProblem:
    """One call, whose inputs are laid out in memory as its shape says."""

    shape: Shape
    edges: Edges
    inputs: Mapping[str, Tensor]
    formula: Formula

    @functools.cached_property
    def truth(self) -> Truth:
        """The float64 output and gradients of the call, and the yardstick."""
        return self.formula.truth(self.inputs)

    def run(self, backend: Backend) -> Mapping[str, Any]:
        """The fields of a check's result."""
        device = torch.device(self.formula.device)
        leaves = {name: x.to(device, copy=True).requires_grad_() for name, x in self.inputs.items()}
        q, k, v = (self.shape.layout(leaves[name]) for name in "qkv")
        options: dict[str, Any] = {name: x for name, x in leaves.items() if name not in "qkv"}
        out = attend(q, k, v, self.edges.graph, backend=backend, **options)
        gradients = gradients_of(out, self.formula.direction.to(device), leaves)
        return verdict(out, gradients, self.truth.for_backend(backend))


def shape_problem(device: str, dtype: torch.dtype, shape: Shape, edges: Edges, option: str) -> ShapeProblem:
    """A drawn call of this shape on a graph, plain or with all that is learned for an edge."""
    rng = torch.Generator().manual_seed(8)
    draw = partial(torch.randn, generator=rng, dtype=torch.float64)
    dst, src = edges.mask.shape
    inputs = {
        "q": draw(SAMPLES, shape.heads, dst, shape.dim),
        "k": draw(SAMPLES, shape.kv_heads, src, shape.dim),
        "v": draw(SAMPLES, shape.kv_heads, src, shape.value_dim),
    }
    direction = draw(SAMPLES, shape.heads, dst, shape.value_dim).to(dtype)
    mask = edges.mask.expand(SAMPLES, shape.heads, -1, -1)
    dense = unchanged if option == "plain" else _with_bias(edges)
    if option != "plain":
        inputs |= {"bias": draw(shape.heads, int(edges.mask.sum())), "sink_logits": draw(shape.heads)}
    rounded = {name: x.to(dtype) for name, x in inputs.items()}
    formula = Formula(mask, direction, shape.dim**-0.5, dense, device=device)
    return ShapeProblem(shape, edges, rounded, formula)


def run_far(device: str, dtype: torch.dtype, tokens: int, backend: Backend) -> Mapping[str, Any]:
    """The last receivers of a window over so many tokens that they lie beyond ``2**31`` numbers.

    The gradients are those that come from the last receivers alone.
    """
    rng = torch.Generator(device).manual_seed(9)
    shape = 1, FAR_HEADS, tokens, FAR_DIM
    leaves = {name: torch.randn(shape, generator=rng, dtype=dtype, device=device) for name in "qkv"}
    q, k, v = (x.requires_grad_() for x in leaves.values())
    out = attend(q, k, v, patterns.window(tokens, FAR_WINDOW), backend=backend)
    direction = torch.zeros_like(out)
    receivers = min(FAR_RECEIVERS, tokens - FAR_WINDOW)
    direction[:, :, -receivers:].normal_(generator=rng)
    gradients = gradients_of(out, direction, leaves)
    compared = receivers + FAR_WINDOW
    near = {name: x.detach()[:, :, -compared:].clone() for name, x in leaves.items()}
    dst, src = _ends(compared, compared)
    mask = ((src <= dst) & (dst - src < FAR_WINDOW)).expand(1, FAR_HEADS, -1, -1)
    formula = Formula(mask, direction[:, :, -compared:].clone(), FAR_DIM**-0.5, device=device)
    # the first receivers of the part have senders outside of it
    truth = formula.truth(near).rows(torch.arange(FAR_WINDOW, compared), torch.arange(compared))
    last = {name: x[:, :, -compared:] for name, x in gradients.items()}
    return verdict(out[:, :, -receivers:], last, truth.for_backend(backend))
