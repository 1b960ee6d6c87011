"""The verb against the float64 formula, forward and every gradient: graphs x features x dtypes x input sizes x backends."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, Feature, GraphCase, unordered
from gnn_attention.verify.check import DIM, DTYPES, VALUE_DIM, Check, Settings, alone, bound, verdict
from gnn_attention.verify.measure import Truth, gradients_of
from gnn_attention.verify.refusals import refused
from gnn_attention.verify.selection import covering
from gnn_attention.verify.truth import attention_truth

__all__ = ["attend_checks"]

BOTH, FORWARD = "forward and gradients", "forward alone"


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
    def _inputs(self) -> dict[str, Tensor]:
        return {name: x for name, x in self._drawn.items() if name != "direction"}

    @cached_property
    def truth(self) -> Truth:
        dense, scale = partial(self.feature.dense, self.graph_case), self.feature.scale or DIM**-0.5
        given = (self._inputs, self.graph_case.mask, self.direction, scale, dense, self.feature.additive)
        return attention_truth(*given, device=self.settings.device)

    def run(self, backend: Backend) -> Mapping[str, Any]:
        device = self.settings.device
        inputs = {name: x.to(device, copy=True).requires_grad_() for name, x in self._inputs.items()}
        options = self.feature.options({name: x for name, x in inputs.items() if name not in "qkv"})
        out = attend(
            inputs["q"], inputs["k"], inputs["v"], self.graph_case.graph, scale=self.feature.scale, backend=backend, **options
        )
        gradients = gradients_of(out, self.direction.to(device), inputs)
        return verdict(out, gradients, self.truth.for_backend(backend))


def attend_checks(settings: Settings) -> Iterator[Check]:
    """The verb over graphs x features x dtypes x backends, sizes in turn; pairs of them without gradients, too."""
    rows = _rows(settings.dtypes, settings.graphs, settings.features, settings.sizes)
    several = [{**row, "backend": backend.name} for row in rows for backend in settings.backends]
    forward = set(covering(several, 2))
    for number, row in enumerate(rows):
        case = _case(settings, row)
        for turn, backend in enumerate(settings.backends):
            yield _check(case, row, backend, BOTH)
            if number * len(settings.backends) + turn in forward:
                yield _check(case, row, backend, FORWARD)


@functools.lru_cache(maxsize=16)
def _rows(*values: tuple[Any, ...]) -> list[dict[str, str]]:
    """The values of each problem: all triples."""
    dtypes, graphs, features, sizes = values
    rows = [
        {"dtype": dtype, "graph": graph, "option": feature, "size": f"x{size:g}"}
        for dtype in dtypes
        for graph in graphs
        for feature in features
        for size in sizes
    ]
    return [rows[number] for number in covering(rows, 3)]


def _case(settings: Settings, row: Mapping[str, str]) -> _AttendCase:
    graph, feature, size = GRAPHS[row["graph"]], FEATURES[row["option"]], float(row["size"][1:])
    return _AttendCase(settings, graph, feature, DTYPES[row["dtype"]], size)


def _check(case: _AttendCase, row: Mapping[str, str], backend: Backend, direction: str) -> Check:
    name = f"{row['graph']}, {row['option']}, inputs {row['size']}" + (f", {FORWARD}" if direction == FORWARD else "")
    run = bound(case.run, backend) if direction == BOTH else alone(bound(case.run, backend))
    factors = {"graph": row["graph"], "option": row["option"], "size": row["size"], "direction": direction}
    skipped = unordered(case.feature, case.graph_case) or refused(backend, case.settings.device, case.dtype, row["option"])
    return Check("attend", backend.name, row["dtype"], name, run, direction == BOTH, factors, skipped)
