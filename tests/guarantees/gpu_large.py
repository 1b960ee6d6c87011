"""Graphs of some thousand tokens against the float64 formula, receivers in chunks: hubs, windows, random and
packed ones.

The small graphs of the other checks meet every option. These meet what only size brings: long rows in chunks,
many tiles, ragged ends. Everything is computed on the device, the float64 truth too, by masks that are written
out or listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import HEADS, KV_HEADS
from gnn_attention.verify.check import verdict
from gnn_attention.verify.layer_checks import drawn_heads
from gnn_attention.verify.measure import Attempt, Truth, gradients_of, largest_errors, results_by_name
from gnn_attention.verify.truth import Formula, Problem, plain_names

ORDERS = 4  # of the yardstick: among so many numbers the worst is no matter of luck
CHUNK = 512  # receivers of the truth at a time


@dataclass(frozen=True, eq=False)
class LargeGraph:
    """A graph of ``n`` tokens and its mask ``[dst, src]``; ``listed`` ones have a bias for each edge."""

    name: str
    graph: Callable[[int], TokenGraph]
    mask: Callable[[int], Tensor]
    listed: bool = False


def _ends(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n).unsqueeze(1), torch.arange(n)


def _window(n: int) -> Tensor:
    dst, src = _ends(n)
    return (dst - src >= 0) & (dst - src < 256)


def _dilated(n: int) -> Tensor:
    dst, src = _ends(n)
    return (dst - src >= 0) & (dst - src < 512) & ((dst - src) % 8 == 0)


def _lengths(n: int) -> list[int]:
    return [n // 3, 0, n // 5, 1, n - n // 3 - n // 5 - 1]


def _documents(n: int) -> Tensor:
    dst, src = _ends(n)
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor(_lengths(n)))
    return (owner[dst] == owner[src]) & (src <= dst)


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
    dst, src = (end // 64 for end in _ends(n))
    return ((dst - src).abs() <= 1) | (src == 0) | (dst == 0) | (src == (dst * 7 + 3) % max(n // 64, 1))


def _listed(mask: Callable[[int], Tensor], n: int) -> TokenGraph:
    """The edges of a mask, shuffled: their order is the caller's."""
    edges = mask(n).nonzero().t().flip(0)
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))
    return convert.from_edge_index(edges[:, order], n, n)


LARGE = {
    large.name: large
    for large in (
        LargeGraph("window of 256", lambda n: patterns.window(n, 256), _window),
        LargeGraph("dilated", lambda n: patterns.dilated(n, 64, 8), _dilated),
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
    def mask(self) -> Bool[Tensor, "dst src"]:
        return self.large.mask(self.tokens).to(self.device)

    @cached_property
    def _drawn(self) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(5)
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "direction": HEADS}
        shapes = {name: (self.samples, count, self.tokens, self.dim) for name, count in heads.items()}
        learned = {"bias": (1, HEADS, self.graph.num_edges), "sink_logits": (HEADS,)}
        every = {**shapes, **(learned if self.full else {})}
        drawn = {name: torch.randn(*shape, generator=rng) for name, shape in every.items()}
        return {name: x.to(self.device, self.dtype) for name, x in drawn.items()}

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Leaves for one forward and backward pass."""
        inputs = {name: x for name, x in self._drawn.items() if name != "direction"}
        return {name: x.to(dtype, copy=True).requires_grad_() for name, x in inputs.items()}

    @property
    def direction(self) -> Tensor:
        return self._drawn["direction"]

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    def attend(self, backend: Backend, inputs: Mapping[str, Tensor], **options: Any) -> Any:
        """The output of the backend, with ``return_info=True`` with its info."""
        learned: dict[str, Any] = {name: x for name, x in inputs.items() if name not in "qkv"}
        q, k, v = (inputs[name] for name in "qkv")
        return attend(q, k, v, self.graph, backend=backend, **learned, **options)

    def run(self, backend: Backend) -> Mapping[str, Any]:
        """The fields of a check's result."""
        inputs = self.inputs(self.dtype)
        out = self.attend(backend, inputs)
        return verdict(out, gradients_of(out, self.direction, inputs), self.truth.for_backend(backend))

    @cached_property
    @torch.enable_grad()
    def truth(self) -> Truth:
        """The float64 output and gradients, and the errors of SDPA's plain and fused kernels."""
        out, gradients = self.oracle()
        if self.dtype == torch.float64:
            return Truth(out, gradients, {})
        errors = largest_errors(self._compared(results_by_name((out, gradients))))
        plain = {name: error for (kernel, name), error in errors.items() if kernel == "plain"}
        fused = {name: error for (kernel, name), error in errors.items() if kernel == "fused"}
        return Truth(out, gradients, plain, fused)

    def _compared(self, true: Mapping[str, Tensor]) -> Iterator[tuple[tuple[str, str], Tensor, Tensor]]:
        for kernel, number in product(("plain", "fused"), range(ORDERS)):
            results = results_by_name(self._baseline(number, kernel == "fused"))
            for name, x in results.items():
                yield (kernel, name), x, true[name]

    def _added(self, inputs: Mapping[str, Tensor], first: int, stop: int) -> Tensor | None:
        """The bias of the receivers ``first .. stop - 1`` as a table ``[1, H, dst, src]``."""
        if "bias" not in inputs:
            return None
        src, dst = self.graph.edge_index.to(self.device)
        own = ((dst >= first) & (dst < stop)).nonzero().squeeze(1)
        table = inputs["bias"].new_zeros(1, HEADS, stop - first, self.tokens)
        heads = torch.arange(HEADS, device=own.device).view(-1, 1)
        places = torch.zeros_like(heads), heads, dst[own] - first, src[own]
        return table.index_put(places, inputs["bias"][0][:, own])

    def oracle(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The formula in float64, some receivers at a time, and its gradients."""
        inputs = self.inputs(torch.float64)
        gradients = {name: torch.zeros_like(x) for name, x in inputs.items()}
        outs = []
        for first in range(0, self.tokens, CHUNK):
            stop = min(first + CHUNK, self.tokens)
            out = self.oracle_rows(inputs, first, stop)
            for name, gradient in gradients_of(out, self.direction[:, :, first:stop], inputs).items():
                gradients[name] += gradient
            outs.append(out.detach())
        return torch.cat(outs, dim=2), gradients

    def oracle_rows(self, inputs: Mapping[str, Tensor], first: int, stop: int) -> Tensor:
        """The formula for the receivers ``first .. stop - 1``."""
        q, mask = inputs["q"][:, :, first:stop], self.mask[first:stop].expand(1, 1, -1, -1)
        added = self._added(inputs, first, stop)
        modify = None if added is None else lambda logits: logits + added
        sinks = inputs.get("sink_logits")
        return oracle.attention(q, inputs["k"], inputs["v"], mask, self.scale, modify, sinks)

    def _baseline(self, number: int, widened: bool) -> Attempt:
        """Output and gradients of SDPA in the order of this number."""
        inputs = self.inputs(self.dtype)
        added, mask = self._added(inputs, 0, self.tokens), self.mask.expand(1, 1, -1, -1)
        q, k, v = (inputs[name] for name in "qkv")
        out = oracle.sdpa(q, k, v, mask, self.scale, added, inputs.get("sink_logits"), widened, number)
        learners = {name: x for name, x in inputs.items() if name in "qkv"} if widened else inputs
        return out, gradients_of(out, self.direction, learners)


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
