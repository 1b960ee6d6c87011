"""The verb against the float64 formula, forward and every gradient: graphs x features x dtypes x input sizes x backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from gnn_attention._shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, Feature, GraphCase
from gnn_attention.verify.check import DIM, DTYPES, FUSED_ORDERS, ORDERS, VALUE_DIM, Check, Settings, bound, skip, verdict
from gnn_attention.verify.measure import Truth, gradients_of, worst_errors

__all__ = ["attend_checks"]


@dataclass(frozen=True, eq=False)
class _AttendCase:
    """One problem, shared by all backends: its inputs rounded to the dtype, and the truth about them."""

    settings: Settings
    graph_case: GraphCase
    feature: Feature
    dtype: torch.dtype
    size: float

    @cached_property
    def _drawn(self) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(self.settings.seed)
        graph = self.graph_case.graph
        shapes = {
            "q": (BATCH, HEADS, graph.num_dst, DIM),
            "k": (BATCH, KV_HEADS, graph.num_src, DIM),
            "v": (BATCH, KV_HEADS, graph.num_src, VALUE_DIM),
        }
        inputs = {name: torch.randn(*shape, generator=rng, dtype=torch.float64) * self.size for name, shape in shapes.items()}
        inputs |= self.feature.learned(self.graph_case, rng)
        inputs["direction"] = torch.randn(BATCH, HEADS, graph.num_dst, VALUE_DIM, generator=rng, dtype=torch.float64)
        return {name: x.to(self.dtype) for name, x in inputs.items()}

    @property
    def direction(self) -> Tensor:
        return self._drawn["direction"]

    @property
    def scale(self) -> float:
        return self.feature.scale or DIM**-0.5

    def inputs(self, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Fresh leaves holding the rounded inputs."""
        names = [name for name in self._drawn if name != "direction"]
        return {name: self._drawn[name].to(device, dtype, copy=True).requires_grad_() for name in names}

    @cached_property
    @torch.enable_grad()
    def truth(self) -> Truth:
        out, gradients = self._oracle()
        if self.dtype == torch.float64:
            return Truth(out, gradients, {}, {})
        plain = worst_errors((self._yardstick(n, widened=False) for n in range(ORDERS)), out, gradients)
        fused = worst_errors((self._yardstick(n, widened=True) for n in range(FUSED_ORDERS)), out, gradients)
        return Truth(out, gradients, plain, fused)

    def _yardstick(self, number: int, widened: bool) -> tuple[Tensor, Mapping[str, Tensor]]:
        """SDPA in the dtype under test, computed in the given order; the plain formula where SDPA cannot express the feature."""
        device, graph = self.settings.device, self.graph_case.graph
        inputs = self.inputs(self.dtype, device)
        order = oracle.Order.draw(number, BATCH, graph.num_dst, graph.num_src, DIM, device, widened)
        q, k, v, mask = inputs["q"], inputs["k"], inputs["v"], self.graph_case.mask.to(device)
        sinks, modify = inputs.get("sink_logits"), partial(self.feature.dense, self.graph_case, inputs)
        if self.feature.additive:
            added = modify(q.new_zeros(BATCH, HEADS, graph.num_dst, graph.num_src))
            out = oracle.reordered_sdpa(order, q, k, v, mask, self.scale, added, sinks)
        else:
            out = oracle.reordered_attention(order, q, k, v, mask, self.scale, modify, sinks)
        learners = {name: x for name, x in inputs.items() if name in "qkv"} if widened else inputs
        return out, gradients_of(out, self.direction.to(device), learners)

    def _oracle(self) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = self.inputs(torch.float64, "cpu")
        modify = partial(self.feature.dense, self.graph_case, inputs)
        q, k, v, sinks = inputs["q"], inputs["k"], inputs["v"], inputs.get("sink_logits")
        out = oracle.attention(q, k, v, self.graph_case.mask, self.scale, modify, sinks)
        return out, gradients_of(out, self.direction.double(), inputs)

    def run(self, backend: Backend) -> Mapping[str, Any]:
        inputs = self.inputs(self.dtype, self.settings.device)
        options = self.feature.options({name: x for name, x in inputs.items() if name not in "qkv"})
        out = attend(
            inputs["q"], inputs["k"], inputs["v"], self.graph_case.graph, scale=self.feature.scale, backend=backend, **options
        )
        gradients = gradients_of(out, self.direction.to(self.settings.device), inputs)
        return verdict(out, gradients, self.truth.for_backend(backend))


def attend_checks(settings: Settings) -> Iterator[Check]:
    """The verb over graphs x features x dtypes x input sizes x backends."""
    for dtype in settings.dtypes:
        for graph in settings.graphs:
            for feature in settings.features:
                for size in settings.sizes:
                    case = _AttendCase(settings, GRAPHS[graph], FEATURES[feature], DTYPES[dtype], size)
                    for backend in settings.backends:
                        run = skip("a per-edge bias has no order on a graph that differs by head or sample")
                        if not (case.feature.needs_edge_order and case.graph_case.varies):
                            run = bound(case.run, backend)
                        yield Check(
                            "attend", backend.name, dtype, f"{graph}, {feature}, inputs x{size:g}", run, with_gradients=True
                        )
