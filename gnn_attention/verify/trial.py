"""A backend in one dtype, and the inputs and problems that the rules share."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, Feature, GraphCase
from gnn_attention.verify.check import DIM, VALUE_DIM, Settings
from gnn_attention.verify.measure import Outcome, Truth, judge
from gnn_attention.verify.problems import AttendProblem

Outcomes = Iterator[tuple[str, Outcome]]
QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Trial:
    """A backend in one dtype."""

    settings: Settings
    dtype: torch.dtype
    backend: Backend

    @property
    def device(self) -> torch.device:
        return torch.device(self.settings.device)

    def qkv(self, dst: int = 13, src: int = 13) -> QKV:
        """The inputs of most rules, drawn."""
        return drawn_qkv(self.settings, self.dtype, dst, src)

    def problem(
        self, graph: str, option: str = "plain", rows: tuple[int, ...] | None = None
    ) -> AttendProblem:
        """A graph of the checks with those inputs; gradients are those of the sum of ``rows`` (None: of
        all).
        """
        return _problem(self.settings, self.dtype, graph, option, rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, graph: TokenGraph, **options: Any) -> Any:
        return attend(q, k, v, graph, backend=self.backend, **options)

    def judged(self, out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Outcome:
        return judge(out, gradients, truth.for_backend(self.backend))


def drawn_qkv(settings: Settings, dtype: torch.dtype, dst: int, src: int) -> QKV:
    rng = torch.Generator().manual_seed(settings.seed + 2)
    shapes = ((HEADS, dst, DIM), (KV_HEADS, src, DIM), (KV_HEADS, src, VALUE_DIM))
    q, k, v = (
        torch.randn(BATCH, *s, generator=rng, dtype=torch.float64).to(settings.device, dtype) for s in shapes
    )
    return q, k, v


@functools.lru_cache(maxsize=128)
def _problem(
    settings: Settings, dtype: torch.dtype, graph: str, option: str, rows: tuple[int, ...] | None
) -> AttendProblem:
    """Shared by all backends."""
    case, feature = CASES[graph], OPTIONS[option]
    q, k, v = drawn_qkv(settings, dtype, *case.mask.shape[2:])
    direction = q.new_zeros(BATCH, HEADS, case.graph.num_dst, VALUE_DIM)
    direction[:, :, slice(None) if rows is None else list(rows)] = 1.0
    return AttendProblem.of(case, feature, {"q": q, "k": k, "v": v}, direction, settings.device)


def _share(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Divides by 0 where a causal graph has no edge."""
    return score / (dst - src + 1).clamp(min=0)


def _share_dense(case: GraphCase, inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """The same on the edges of a causal graph, and some number elsewhere."""
    dst, src = (x.to(logits.device) for x in case.positions())
    return logits / (dst - src + 1).clamp(min=1)


def _numbered(case: GraphCase, inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """A bias of edge number / 16."""
    src, dst = torch.tensor(case.edges(), device=logits.device).T
    bias = torch.arange(len(src), device=logits.device, dtype=logits.dtype) / 16
    return logits + logits.new_zeros(logits.shape[2:]).index_put((dst, src), bias)


CASES = GRAPHS | {
    "window of 3": GraphCase("window of 3", patterns.window(13, 3), lambda b, h, i, j: 0 <= i - j < 3)
}
OPTIONS = FEATURES | {
    "share": Feature("share", options=lambda _: {"score_mod": _share}, dense=_share_dense, additive=False),
    "numbered": Feature("numbered", dense=_numbered),
}
