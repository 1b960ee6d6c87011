"""Dropout is that of the edge's key: the very weights that ``_edge_dropout`` names are dropped, forward and backward.

One seed gives one answer on every backend, form and device; the normaliser is that before dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend, dropout
from gnn_attention.verify.cases import BATCH, GRAPHS, HEADS, KV_HEADS, GraphCase
from gnn_attention.verify.check import DIM, DTYPES, GPU_ONLY, VALUE_DIM, Check, Settings, bound, verdict
from gnn_attention.verify.measure import Truth, gradients_of
from gnn_attention.verify.refusals import DROPOUT, refused
from gnn_attention.verify.truth import attention_truth

__all__ = ["dropout_checks"]

PROBABILITY = 0.3
DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")


def dropout_checks(settings: Settings) -> Iterator[Check]:
    """Graphs x dtypes x backends."""
    for dtype in [name for name in settings.dtypes if name not in GPU_ONLY]:
        for graph in [name for name in DROPOUT_GRAPHS if name in settings.graphs]:
            case = _DropoutCase(settings, GRAPHS[graph], DTYPES[dtype])
            for backend in settings.backends:
                name, run = f"the weights dropped on {graph} are those of the key", bound(case.run, backend)
                skipped = refused(backend, settings.device, DTYPES[dtype], DROPOUT)
                yield Check("dropout", backend.name, dtype, name, run, True, {"graph": graph}, skipped)


@dataclass(frozen=True, eq=False)
class _DropoutCase:
    """One problem, shared by all backends."""

    settings: Settings
    case: GraphCase
    dtype: torch.dtype

    @cached_property
    def drawn(self) -> list[Tensor]:
        rng = torch.Generator().manual_seed(self.settings.seed + 4)
        dst, src = self.case.graph.num_dst, self.case.graph.num_src
        shapes = ((HEADS, dst, DIM), (KV_HEADS, src, DIM), (KV_HEADS, src, VALUE_DIM), (HEADS, dst, VALUE_DIM))
        return [torch.randn(BATCH, *shape, generator=rng, dtype=torch.float64).to(self.dtype) for shape in shapes]

    @cached_property
    def truth(self) -> Truth:
        """``(softmax(logits) * stays / (1 - p)) v``: the formula's weights times a factor."""
        dst, src = self.case.positions()
        sample, head = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
        stays = dropout.kept(self._seed(torch.device("cpu")), sample, head, dst, src, PROBABILITY)
        factors = (stays.double() / (1 - PROBABILITY)).expand(self.case.mask.shape)
        q, k, v, direction = self.drawn
        inputs = {"q": q, "k": k, "v": v}
        return attention_truth(inputs, self.case.mask, direction, DIM**-0.5, factors=factors, device=self.settings.device)

    def _seed(self, device: torch.device) -> Tensor:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed)
            return dropout.draw_seed(device).cpu()

    def run(self, backend: Backend) -> Mapping[str, Any]:
        device = torch.device(self.settings.device)
        q, k, v, direction = (x.to(device, copy=True) for x in self.drawn)
        leaves = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed)
            out = attend(q, k, v, self.case.graph, dropout=PROBABILITY, backend=backend)
        return verdict(out, gradients_of(out, direction, leaves), self.truth.for_backend(backend))
