"""Graphs of some thousand tokens against the float64 formula: hubs, windows, random and packed ones.

The small graphs of the other checks meet every option. These meet what only size brings: long rows in chunks,
many tiles, ragged ends. Everything is computed on the device, the float64 truth too, by masks that are written
out or listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import HEADS, KV_HEADS
from gnn_attention.verify.groups import drawn_heads
from gnn_attention.verify.measure import Attempt, Truth, gradients_of, verdict, worst_errors
from gnn_attention.verify.truth import Formula, Problem, plain_names

ORDERS = 4  # of the yardstick: among so many numbers the worst is no matter of luck


@dataclass(frozen=True, eq=False)
class LargeGraph:
    """A graph of ``n`` tokens and its mask ``[dst, src]``; ``listed`` ones have a bias for each edge."""

    name: str
    graph: Callable[[int], TokenGraph]
    mask: Callable[[int], Tensor]
    listed: bool = False


def _window(n: int, width: int, step: int = 1) -> Tensor:
    far = torch.arange(n).unsqueeze(1) - torch.arange(n)
    return (far >= 0) & (far < width) & (far % step == 0)


def _lengths(n: int) -> list[int]:
    return [n // 3, 0, n // 5, 1, n - n // 3 - n // 5 - 1]


def _documents(n: int) -> Tensor:
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor(_lengths(n)))
    return (owner.unsqueeze(1) == owner) & _window(n, n)


def _random(n: int) -> Tensor:
    """``[dst, src]`` of 32 random senders each; every seventh receiver is isolated."""
    src = torch.randint(n, (n, 32), generator=torch.Generator().manual_seed(n))
    mask = torch.zeros(n, n, dtype=torch.bool).scatter_(1, src, True)
    mask[::7] = False
    return mask


def _hubs(n: int) -> Tensor:
    """Some random edges, two receivers that attend to all and two senders that all attend to."""
    mask = _random(n) & (torch.arange(n) % 5 == 0)
    mask[[3, n // 2]] = True
    mask[:, [0, n - 2]] = True
    return mask


def _big_bird(n: int) -> Tensor:
    """Blocks of 64: neighbours, the first, and one more each."""
    dst, src = torch.arange(n).unsqueeze(1) // 64, torch.arange(n) // 64
    return ((dst - src).abs() <= 1) | (src == 0) | (dst == 0) | (src == (dst * 7 + 3) % max(n // 64, 1))


def _listed(mask: Callable[[int], Tensor], n: int) -> TokenGraph:
    """The edges of a mask, shuffled: their order is the caller's."""
    edges = mask(n).nonzero().t().flip(0)
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))
    return convert.from_edge_index(edges[:, order], n, n)


LARGE = {
    large.name: large
    for large in (
        LargeGraph("window of 256", lambda n: patterns.window(n, 256), lambda n: _window(n, 256)),
        LargeGraph("dilated", lambda n: patterns.dilated(n, 64, 8), lambda n: _window(n, 512, 8)),
        LargeGraph("documents", lambda n: patterns.documents(_lengths(n)), _documents),
        LargeGraph("BigBird of blocks", partial(_listed, _big_bird), _big_bird, listed=True),
        LargeGraph("random, in-degree 32", partial(_listed, _random), _random, listed=True),
        LargeGraph("hubs", partial(_listed, _hubs), _hubs, listed=True),
    )
}


@cache
def _graph(large: LargeGraph, tokens: int) -> TokenGraph:
    """One graph for all cases: its list is sorted for a second, and kernels keep their forms with it."""
    return large.graph(tokens)


@dataclass(frozen=True, eq=False)
class LargeCase:
    """One call with grouped heads, which all backends share; ``full`` adds a bias and sinks."""

    device: str
    large: LargeGraph
    dtype: torch.dtype
    tokens: int
    full: bool = False
    samples: int = 1
    dim: int = 64

    @cached_property
    def graph(self) -> TokenGraph:
        return _graph(self.large, self.tokens)

    @cached_property
    def _drawn(self) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(5)
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "direction": HEADS}
        shapes = {name: (self.samples, count, self.tokens, self.dim) for name, count in heads.items()}
        learned = {"bias": (1, HEADS, self.graph.num_edges), "sink_logits": (HEADS,)}
        every = {**shapes, **(learned if self.full else {})}
        return {
            name: torch.randn(*shape, generator=rng).to(self.device, self.dtype)
            for name, shape in every.items()
        }

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Leaves for one forward and backward pass."""
        inputs = {name: x for name, x in self._drawn.items() if name != "direction"}
        return {name: x.to(dtype, copy=True).requires_grad_() for name, x in inputs.items()}

    def attend(self, backend: Backend, inputs: Mapping[str, Tensor], **options: Any) -> Any:
        """The output of the backend, with ``return_info=True`` with its info."""
        learned: dict[str, Any] = {name: x for name, x in inputs.items() if name not in "qkv"}
        q, k, v = (inputs[name] for name in "qkv")
        return attend(q, k, v, self.graph, backend=backend, **learned, **options)

    def results(self, backend: Backend) -> dict[str, Tensor]:
        """Output, lse and every gradient."""
        inputs = self.inputs(self.dtype)
        out, info = self.attend(backend, inputs, return_info=True)
        gradients = gradients_of(out, self._drawn["direction"], inputs)
        return {"output": out.detach(), "lse": info.lse.detach(), **gradients}

    def run(self, backend: Backend) -> Mapping[str, Any]:
        """The fields of a check's result."""
        inputs = self.inputs(self.dtype)
        out = self.attend(backend, inputs)
        gradients = gradients_of(out, self._drawn["direction"], inputs)
        return verdict(out, gradients, self.truth.for_backend(backend))

    @cached_property
    @torch.enable_grad()
    def truth(self) -> Truth:
        """The float64 output and gradients, and the errors of SDPA's plain and fused kernels."""
        out, gradients = self._solve(torch.float64)
        if self.dtype == torch.float64:
            return Truth(out, gradients, {})
        plain, fused = (
            worst_errors(
                (self._solve(self.dtype, number, widened) for number in range(ORDERS)), out, gradients
            )
            for widened in (False, True)
        )
        return Truth(out, gradients, plain, fused)

    def _solve(self, dtype: torch.dtype, number: int | None = None, widened: bool = False) -> Attempt:
        """Output and gradients by the formula, or by SDPA in the order of a number."""
        inputs = self.inputs(dtype)
        q, k, v = (inputs[name] for name in "qkv")
        mask = self.large.mask(self.tokens).to(self.device).expand(1, 1, -1, -1)
        added, sinks, scale = self._added(inputs), inputs.get("sink_logits"), self.dim**-0.5
        if number is None:
            modify = None if added is None else added.__add__
            out = oracle.attention(q, k, v, mask, scale, modify, sinks)
        else:
            out = oracle.sdpa(q, k, v, mask, scale, added, sinks, widened, number)
        learned = {name: x for name, x in inputs.items() if name in "qkv" or not widened}
        return out.detach(), gradients_of(out, self._drawn["direction"], learned)

    def _added(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """The bias as a table ``[1, H, dst, src]``."""
        if "bias" not in inputs:
            return None
        src, dst = self.graph.edge_index.to(self.device)
        table = inputs["bias"].new_zeros(1, HEADS, self.tokens, self.tokens)
        heads = torch.arange(HEADS, device=self.device).view(-1, 1)
        return table.index_put((torch.zeros_like(heads), heads, dst, src), inputs["bias"][0])


def large_layer(device: str, large: LargeGraph, dtype: torch.dtype, tokens: int) -> Problem:
    """A layer of grouped heads with biases on a larger graph, one sample."""
    rng = torch.Generator().manual_seed(6)
    heads = drawn_heads("grouped heads with biases", seed=6).to(dtype)
    width = heads.W_Q.shape[1]
    shapes = dict.fromkeys(("x_src", "x_dst", "direction"), (1, tokens, width))
    inputs = {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}
    inputs |= plain_names(heads)
    mask = large.mask(tokens).expand(1, HEADS, -1, -1)
    formula = Formula(mask, inputs.pop("direction"), heads.scale, device=device, heads=heads)
    return Problem(large.graph(tokens), formula, inputs)
