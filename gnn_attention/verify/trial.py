"""A backend in one dtype, and the inputs and problems that the rules share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress, product
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import (
    BATCH,
    FEATURES,
    GRAPHS,
    HEADS,
    KV_HEADS,
    Feature,
    GraphCase,
    Inputs,
    add_bias,
)
from gnn_attention.verify.check import DIM, VALUE_DIM, Settings
from gnn_attention.verify.measure import Outcome, Truth, judge
from gnn_attention.verify.truth import AttendProblem


@dataclass(frozen=True)
class Trial:
    """A backend in one dtype."""

    settings: Settings
    dtype: torch.dtype
    backend: Backend

    @property
    def device(self) -> torch.device:
        return torch.device(self.settings.device)

    def qkv(self, dst: int = 13, src: int = 13) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of most rules, drawn."""
        return _draw(self.settings, self.dtype, dst, src)

    def problem(
        self, graph: str, option: str = "plain", rows: tuple[int, ...] | None = None
    ) -> AttendProblem:
        """A graph with those inputs; gradients are those of the sum of ``rows`` (None: of all)."""
        return _problem(self.settings, self.dtype, graph, option, rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, graph: TokenGraph, **options: Any) -> Any:
        return attend(q, k, v, graph, backend=self.backend, **options)

    def judge(self, out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Outcome:
        return judge(out, gradients, truth.for_backend(self.backend))


def _draw(settings: Settings, dtype: torch.dtype, dst: int, src: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(settings.seed + 2)
    shapes = ((HEADS, dst, DIM), (KV_HEADS, src, DIM), (KV_HEADS, src, VALUE_DIM))
    q, k, v = (torch.randn(BATCH, *s, generator=rng, dtype=torch.float64) for s in shapes)
    return q.to(settings.device, dtype), k.to(settings.device, dtype), v.to(settings.device, dtype)


@functools.lru_cache(maxsize=256)
def _problem(
    settings: Settings, dtype: torch.dtype, graph: str, option: str, rows: tuple[int, ...] | None
) -> AttendProblem:
    """Shared by all backends."""
    case, feature = CASES[graph], OPTIONS[option]
    q, k, v = _draw(settings, dtype, *case.mask.shape[2:])
    learned = {name: x.to(q) for name, x in feature.learned(case, torch.Generator()).items()}
    direction = q.new_zeros(BATCH, HEADS, case.graph.num_dst, VALUE_DIM)
    direction[:, :, slice(None) if rows is None else list(rows)] = 1.0
    inputs = {"q": q, "k": k, "v": v, **learned}
    return AttendProblem.of(case, feature, inputs, direction, settings.device)


def _share(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Divides by 0 where a causal graph has no edge."""
    return score / (dst - src + 1).clamp(min=0)


def _share_dense(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
    """The same on the edges of a causal graph, and some number elsewhere."""
    dst, src = case.positions(logits.device)
    return logits / (dst - src + 1).clamp(min=1)


def _number_edges(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
    """A bias of edge number / 16."""
    return add_bias(case, {"bias": torch.arange(case.graph.num_edges, device=logits.device) / 16}, logits)


def _every_argument(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A score_mod of all its arguments."""
    return score * (1 + b / 8) + h / 4 - src / 16 + (dst - src) / 32


def _lse_feature(mod: bool, bias: bool, sinks: bool) -> Feature:
    """A set of options: that score_mod, a bias and sinks from -1 to 1."""
    names = list(compress(("score_mod", "bias", "sink_logits"), (mod, bias, sinks)))

    def learned(case: GraphCase, rng: torch.Generator) -> Inputs:
        sizes = {"bias": case.graph.num_edges, "sink_logits": HEADS}
        return {name: torch.linspace(-1, 1, size) for name, size in sizes.items() if name in names}

    def dense(case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
        if mod:
            b, h = (torch.arange(n, device=logits.device) for n in (BATCH, HEADS))
            places = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), *case.positions(logits.device)
            logits = _every_argument(logits, *places).to(logits.dtype)
        return add_bias(case, inputs, logits) if bias else logits

    mods = {"score_mod": _every_argument} if mod else {}
    return Feature(", ".join(names) or "no option", learned, lambda inputs: {**mods, **inputs}, dense, False)


LSE_OPTIONS = {f.name: f for f in (_lse_feature(*chosen) for chosen in product((False, True), repeat=3))}
CASES = GRAPHS | {
    "window of 3": GraphCase("window of 3", patterns.window(13, 3), lambda b, h, i, j: 0 <= i - j < 3)
}
OPTIONS = (
    FEATURES
    | LSE_OPTIONS
    | {
        "share": Feature(
            "share", options=lambda _: {"score_mod": _share}, dense=_share_dense, additive=False
        ),
        "numbered": Feature("numbered", dense=_number_edges),
    }
)
