"""Shapes of calls that the checks of every machine do not have: widths, groups, layouts, ragged ends, far offsets.

Each is one call of ``attend`` on a small graph with hubs, isolated receivers and a last block that is not
full, against the float64 formula as everywhere. The largest are checked at their far end alone: where the
place of a number in its tensor needs more than 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.backends.triton import WIDEST
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.check import DTYPES, Check, Settings, verdict
from gnn_attention.verify.measure import gradients_of
from gnn_attention.verify.truth import Formula, unchanged

SAMPLES = 2
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
    """A part of a longer sequence: it begins where no wide load may."""
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
def _edges(n: int) -> dict[str, Edges]:
    dst, src = _ends(n, n)
    hubs = torch.rand(n, n + n // 5, generator=torch.Generator().manual_seed(0)) < 0.05
    # a receiver that attends to all, a sender all attend to, and receivers without in-edges
    hubs[5], hubs[:, 7], hubs[9::20] = True, True, False
    sender, receiver = hubs.nonzero().flip(1).t()
    return {
        "causal": Edges(patterns.causal(n), src <= dst),
        "window and sinks": Edges(
            patterns.window(n, n // 3) | patterns.sinks(n, 2),
            (src <= dst) & ((dst - src < n // 3) | (src < 2)),
        ),
        "hubs": Edges(convert.from_edge_index(torch.stack([sender, receiver]), n, n + n // 5), hubs),
    }


def _with_bias(edges: Edges) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    dst, src = edges.mask.nonzero().t()

    def dense(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
        bias = inputs["bias"].to(logits.dtype)
        table = logits.new_zeros(logits.shape[1:])
        heads = torch.arange(logits.shape[1], device=logits.device).view(-1, 1)
        places = heads, dst.to(logits.device), src.to(logits.device)
        return logits + table.index_put(places, bias)

    return dense


OPTIONS = ("plain", "bias and sinks")


@dataclass(frozen=True, eq=False)
class ShapeProblem:
    """A call of one shape, in the dtype under test."""

    shape: Shape
    edges: Edges
    inputs: Mapping[str, Tensor]
    formula: Formula

    @functools.cached_property
    def truth(self) -> Any:
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


def _problem(settings: Settings, dtype: torch.dtype, shape: Shape, edges: Edges, option: str) -> ShapeProblem:
    rng = torch.Generator().manual_seed(settings.seed + 8)
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
    formula = Formula(mask, direction, shape.dim**-0.5, dense, device=settings.device)
    return ShapeProblem(shape, edges, rounded, formula)


def shape_checks(settings: Settings, tokens: int) -> Iterator[Check]:
    """Every shape that a form takes, on every graph, plain and with all that is learned for an edge."""
    for dtype, (name, shape) in product(settings.semantics, SHAPES.items()):
        backends = [backend for backend in settings.backends if _fits(shape, backend, DTYPES[dtype])]
        for (graph, edges), option in product(_edges(tokens).items(), OPTIONS):
            given = settings, DTYPES[dtype], shape, edges, option
            problem = functools.cache(partial(_problem, *given))
            for backend in backends:
                label = f"{graph} of {tokens} tokens, {name}, {option}"
                run = partial(_run, problem, backend)
                yield Check("shapes", backend.name, dtype, label, run, with_gradients=True)


def _run(problem: Callable[[], Any], backend: Backend) -> Mapping[str, Any]:
    return dict(problem().run(backend))


def _fits(shape: Shape, backend: Backend, dtype: torch.dtype) -> bool:
    """Whether the form takes heads so wide; those of blocks take half as many channels of wide numbers."""
    form = backend.name.removeprefix("triton-")
    return max(shape.dim, shape.value_dim) <= WIDEST[form] // (
        1 if form == "rows" or dtype.itemsize == 2 else 2
    )


@dataclass(frozen=True, eq=False)
class FarProblem:
    """A window over so many tokens that the last ones lie beyond ``2**31`` numbers; they alone are compared."""

    settings: Settings
    dtype: torch.dtype
    tokens: int

    def run(self, backend: Backend) -> Mapping[str, Any]:
        """Output of the last receivers, and the gradients that come from them alone."""
        device, n = self.settings.device, self.tokens
        rng = torch.Generator(device).manual_seed(self.settings.seed + 9)
        shape = 1, FAR_HEADS, n, FAR_DIM
        q, k, v = (torch.randn(shape, generator=rng, dtype=self.dtype, device=device) for _ in range(3))
        leaves = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}
        out = attend(q, k, v, patterns.window(n, FAR_WINDOW), backend=backend)
        direction = torch.zeros_like(out)
        direction[:, :, -FAR_RECEIVERS:].normal_(generator=rng)
        gradients, compared = gradients_of(out, direction, leaves), FAR_RECEIVERS + FAR_WINDOW
        near = {name: x.detach()[:, :, -compared:].clone() for name, x in leaves.items()}
        dst, src = _ends(compared, compared)
        mask = ((src <= dst) & (dst - src < FAR_WINDOW)).expand(1, FAR_HEADS, -1, -1)
        formula = Formula(mask, direction[:, :, -compared:].clone(), FAR_DIM**-0.5, device=device)
        # the first receivers of the part have senders outside of it
        truth = formula.truth(near).rows(torch.arange(FAR_WINDOW, compared), torch.arange(compared))
        found = {name: x[:, :, -compared:] for name, x in gradients.items()}
        return verdict(out[:, :, -FAR_RECEIVERS:], found, truth.for_backend(backend))


def far_checks(settings: Settings, tokens: int) -> Iterator[Check]:
    """Every form in bfloat16, where q, k, v and out have more than ``2**31`` numbers each."""
    for backend in settings.backends:
        run = partial(FarProblem(settings, torch.bfloat16, tokens).run, backend)
        yield Check("far", backend.name, "bfloat16", f"window of {FAR_WINDOW}, {tokens} tokens", run)
