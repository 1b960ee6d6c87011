"""Graphs of some thousand tokens against the float64 formula, receivers in chunks: hubs, windows, random and
packed ones.

The small graphs of the other checks meet every option; these meet what only size brings: many tiles, long
rows in chunks, ragged ends. Everything is computed on the device, the truth too: in float64, by masks that
are written out or listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify import oracle
from gnn_attention.verify.check import DTYPES, Check, Settings, verdict
from gnn_attention.verify.measure import Truth, gradients_of, worst_errors
from gnn_attention.verify.roundings import TF32Products, is_tf32

TOKENS = 4096
LARGE_HEADS, LARGE_KV_HEADS, LARGE_DIM = 4, 2, 64
LARGE_ORDERS = 4  # of the yardstick: among so many numbers the worst is no matter of luck
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


@dataclass(frozen=True, eq=False)
class LargeCase:
    """One problem for all backends: one sample, grouped heads; with bias and sinks, or plain."""

    settings: Settings
    large: LargeGraph
    dtype: torch.dtype
    tokens: int = TOKENS
    full: bool = False

    @cached_property
    def graph(self) -> TokenGraph:
        return self.large.graph(self.tokens)

    @cached_property
    def mask(self) -> Bool[Tensor, "dst src"]:
        return self.large.mask(self.tokens).to(self.settings.device)

    @cached_property
    def _drawn(self) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(self.settings.seed + 5)
        heads = {"q": LARGE_HEADS, "k": LARGE_KV_HEADS, "v": LARGE_KV_HEADS, "direction": LARGE_HEADS}
        shapes = {name: (1, count, self.tokens, LARGE_DIM) for name, count in heads.items()}
        extra = (
            {"bias": (1, LARGE_HEADS, self.graph.num_edges), "sink_logits": (LARGE_HEADS,)}
            if self.full
            else {}
        )
        drawn = {name: torch.randn(*shape, generator=rng) for name, shape in {**shapes, **extra}.items()}
        return {name: x.to(self.settings.device, self.dtype) for name, x in drawn.items()}

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: x.to(dtype, copy=True).requires_grad_()
            for name, x in self._drawn.items()
            if name != "direction"
        }

    @property
    def direction(self) -> Tensor:
        return self._drawn["direction"]

    def attended(self, backend: Backend, inputs: Mapping[str, Tensor], **options: Any) -> Any:
        extra: dict[str, Any] = {name: x for name, x in inputs.items() if name not in "qkv"}
        return attend(inputs["q"], inputs["k"], inputs["v"], self.graph, backend=backend, **extra, **options)

    def run(self, backend: Backend) -> Mapping[str, Any]:
        inputs = self.inputs(self.dtype)
        out = self.attended(backend, inputs)
        return verdict(out, gradients_of(out, self.direction, inputs), self.truth.for_backend(backend))

    @cached_property
    @torch.enable_grad()
    def truth(self) -> Truth:
        out, gradients = self._oracle()
        if self.dtype == torch.float64:
            return Truth(out, gradients, {})
        plain, fused = (
            worst_errors((self._yardstick(n, widened) for n in range(LARGE_ORDERS)), out, gradients)
            for widened in (False, True)
        )
        return Truth(out, gradients, plain, fused)

    def _added(self, inputs: Mapping[str, Tensor], first: int, stop: int) -> Tensor | None:
        """The bias of the receivers ``first .. stop - 1`` as a table ``[1, H, dst, src]``."""
        if "bias" not in inputs:
            return None
        src, dst = self.graph.edge_index.to(self.settings.device)
        own = ((dst >= first) & (dst < stop)).nonzero().squeeze(1)
        table = inputs["bias"].new_zeros(1, LARGE_HEADS, stop - first, self.tokens)
        heads = torch.arange(LARGE_HEADS, device=own.device).view(-1, 1)
        return table.index_put(
            (torch.zeros_like(heads), heads, dst[own] - first, src[own]), inputs["bias"][0][:, own]
        )

    def _oracle(self) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = self.inputs(torch.float64)
        gradients = {name: torch.zeros_like(x) for name, x in inputs.items()}
        outs = []
        for first in range(0, self.tokens, CHUNK):
            stop = min(first + CHUNK, self.tokens)
            out = self._oracle_rows(inputs, first, stop)
            for name, gradient in gradients_of(out, self.direction[:, :, first:stop], inputs).items():
                gradients[name] += gradient
            outs.append(out.detach())
        return torch.cat(outs, dim=2), gradients

    def _oracle_rows(self, inputs: Mapping[str, Tensor], first: int, stop: int) -> Tensor:
        q, mask = inputs["q"][:, :, first:stop], self.mask[first:stop].expand(1, 1, -1, -1)
        added = self._added(inputs, first, stop)
        modify = None if added is None else lambda logits: logits + added
        return oracle.attention(
            q, inputs["k"], inputs["v"], mask, LARGE_DIM**-0.5, modify, inputs.get("sink_logits")
        )

    def _yardstick(self, number: int, widened: bool) -> tuple[Tensor, Mapping[str, Tensor]]:
        """SDPA; in TF32 the formula, whose products are shortened whatever a GPU does with them."""
        if is_tf32(self.dtype):
            with TF32Products():
                return self._shortened(number)
        inputs = self.inputs(self.dtype)
        added, mask = self._added(inputs, 0, self.tokens), self.mask.expand(1, 1, -1, -1)
        q, k, v, sinks = inputs["q"], inputs["k"], inputs["v"], inputs.get("sink_logits")
        out = oracle.sdpa(q, k, v, mask, LARGE_DIM**-0.5, added, sinks, widened, number)
        learners = {name: x for name, x in inputs.items() if name in "qkv"} if widened else inputs
        return out, gradients_of(out, self.direction, learners)

    def _shortened(self, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs = self.inputs(self.dtype)
        q, k = oracle.reordered(number, inputs["q"], inputs["k"])
        out = self._oracle_rows({**inputs, "q": q, "k": k}, 0, self.tokens)
        return out.detach(), gradients_of(out, self.direction, inputs)


def large_checks(settings: Settings, tokens: int = TOKENS) -> Iterator[Check]:
    """Graphs x dtypes x backends, forward and every gradient; listed graphs with bias and sinks too."""
    for dtype in settings.dtypes:
        for large in LARGE.values():
            for full in (False, True) if large.listed else (False,):
                case = LargeCase(settings, large, DTYPES[dtype], tokens, full)
                name = f"{large.name}, {tokens} tokens{', bias and sinks' if full else ''}"
                for backend in settings.backends:
                    yield Check(
                        "large", backend.name, dtype, name, partial(case.run, backend), with_gradients=True
                    )
