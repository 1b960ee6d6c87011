"""Problems that checks share: a call of ``attend``, or a whole layer, and the float64 truth about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import Feature, GraphCase
from gnn_attention.verify.check import verdict
from gnn_attention.verify.measure import Truth, gradients_of, worst_errors
from gnn_attention.verify.truth import FUSED_ORDERS, ORDERS, Formula

Options = Callable[[dict[str, Tensor]], dict[str, Any]]  # learned inputs -> arguments of a call


@dataclass(frozen=True, eq=False)
class AttendProblem:
    """A call of ``attend``: q, k, v and what else is learned, in the dtype under test, on a graph."""

    graph: TokenGraph
    formula: Formula
    inputs: Mapping[str, Tensor]
    options: Options = lambda learned: {}

    @staticmethod
    def of(
        case: GraphCase,
        feature: Feature,
        inputs: Mapping[str, Tensor],
        direction: Tensor,
        device: str,
        factors: Tensor | None = None,
    ) -> AttendProblem:
        """The problem of a graph and a feature; ``direction`` multiplies the output before it is summed."""
        scale = inputs["q"].shape[-1] ** -0.5 if feature.scale is None else feature.scale
        dense = partial(feature.dense, case)
        formula = Formula(case.mask, direction, scale, dense, feature.additive, factors, device)
        return AttendProblem(case.graph, formula, inputs, feature.options)

    @cached_property
    def truth(self) -> Truth:
        return self.formula.truth(self.inputs)

    def solve(
        self, backend: Backend, inputs: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of a backend; ``inputs`` in place of the problem's own."""
        device, inputs = torch.device(self.formula.device), self.inputs if inputs is None else inputs
        leaves = {name: x.detach().to(device, copy=True).requires_grad_() for name, x in inputs.items()}
        options = self.options({name: x for name, x in leaves.items() if name not in "qkv"})
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            q, k, v = (leaves[name] for name in "qkv")
            out = attend(q, k, v, self.graph, backend=backend, **options)
        return out, gradients_of(out, self.formula.direction.to(device), leaves)

    def run(self, backend: Backend) -> Mapping[str, Any]:
        """The fields of a check's result."""
        return verdict(*self.solve(backend), self.truth.for_backend(backend))


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """A layer in one form of its weights on a graph; inputs are "x_src", "x_dst" and what else is learned."""

    heads: Any
    graph: TokenGraph
    formula: Formula
    inputs: Mapping[str, Tensor]
    options: Options = lambda learned: {}

    @cached_property
    def truth(self) -> Truth:
        return _truth(self.heads, self.formula, self.inputs)

    def run(self, backend: Backend | None, heads: Any = None) -> Mapping[str, Any]:
        """The layer on a backend, or message by message; other ``heads`` are judged by the same truth."""
        device, direction = self.formula.device, self.formula.direction.to(self.formula.device)
        inputs, weights = _leaves(self.inputs, device), {}
        if heads is None:
            heads = self.heads.to(device)
            weights = plain_names(heads)
        options = self.options(inputs)
        layer = MessagePassingAttention(heads.to(device), options.pop("score_mod", None), backend=backend)
        out = layer((inputs["x_src"], inputs["x_dst"]), self.graph, **options)
        return verdict(out, gradients_of(out, direction, inputs | weights), self.truth.for_backend(backend))


def plain_names(heads: Any) -> dict[str, Tensor]:
    """The weights by their names in the formulas."""
    return {name.removeprefix("standard."): parameter for name, parameter in heads.named_parameters()}


def layer_truth(heads: Any, x_src: Tensor, x_dst: Tensor, direction: Tensor, mask: Tensor) -> Truth:
    """The formula in float64 on the layer's weights as they are, and SDPA between its own projections."""
    return _truth(heads, Formula(mask, direction, heads.scale), {"x_src": x_src, "x_dst": x_dst})


@torch.enable_grad()
def _truth(heads: Any, formula: Formula, inputs: Mapping[str, Tensor]) -> Truth:
    wide, weights = (
        {name: x.detach().cpu().double().requires_grad_() for name, x in found.items()}
        for found in (inputs, plain_names(heads))
    )
    dense = partial(formula.dense, wide)
    out = oracle.layer(weights, wide["x_src"], wide["x_dst"], formula.mask, formula.scale, dense)
    gradients = gradients_of(out, formula.direction.double().cpu(), wide | weights)
    if formula.direction.dtype == torch.float64:
        return Truth(out, gradients, {})
    baseline = partial(_baseline, heads.to(formula.device), formula, inputs)
    plain, fused = (
        worst_errors((baseline(number, widened) for number in range(count)), out, gradients)
        for count, widened in ((ORDERS, False), (FUSED_ORDERS, True))
    )
    return Truth(out, gradients, plain, fused)


def _baseline(
    heads: Any, formula: Formula, inputs: Mapping[str, Tensor], number: int, widened: bool
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The layer with SDPA in its middle, in the dtype of its weights and the order of this number."""
    inputs = _leaves(inputs, formula.device)
    q, (k, v) = heads.receive(inputs["x_dst"]), heads.send(inputs["x_src"])
    order = oracle.Order.draw(number, len(q), q.shape[2], k.shape[2], q.shape[3], formula.device, widened)
    mask, dense = formula.mask.to(formula.device), partial(formula.dense, inputs)
    if formula.additive:
        z = oracle.reordered_sdpa(order, q, k, v, mask, heads.scale, dense(q.new_zeros(mask.shape)))
    else:
        z = oracle.reordered_attention(order, q, k, v, mask, heads.scale, dense)
    learners = {name: x for name, x in inputs.items() if name.startswith("x_")} if widened else inputs
    out = heads.collect(z)
    return out, gradients_of(out, formula.direction.to(formula.device), learners | plain_names(heads))


def _leaves(inputs: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: x.detach().to(device, copy=True).requires_grad_() for name, x in inputs.items()}
