"""Problems that checks share, a call of ``attend`` or a whole layer, and the truth about each.

The truth is dense attention in float64, and how far SDPA is from it: by these a result is judged.
"""

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
from gnn_attention.verify.roundings import lse_of, rounded

ORDERS = 8  # in which the yardstick of lse is taken
NEIGHBOURS = 16  # problems over which that of outputs and gradients is taken, itself among them
FAR = 8  # roundings by which a neighbour's inputs are off at most: the last bits of every product are others
FUSED = ("q", "k", "v", "sink_logits")  # what that kernel gives a gradient: no mask, and so no bias

Attempt = tuple[Tensor, Mapping[str, Tensor]]  # an output and its gradients
Dense = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # inputs, logits [B, H, dst, src] -> logits
Options = Callable[[dict[str, Tensor]], dict[str, Any]]  # learned inputs -> arguments of a call


def unchanged(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True, eq=False)
class Formula:
    """Dense attention, but for its inputs: "q", "k", "v", perhaps "sink_logits", and what ``dense`` needs.

    ``mask [B, H, dst, src]``; ``factors`` multiply the weights; gradients are those of
    ``(out * direction).sum()`` for all inputs. ``additive`` says that ``dense`` is a sum, which SDPA can be
    given as a mask; without it, or with factors, the yardstick is the plain formula in the inputs' dtype.
    """

    mask: Tensor
    direction: Tensor
    scale: float
    dense: Dense = unchanged
    additive: bool = True
    factors: Tensor | None = None
    device: str = "cpu"

    @torch.enable_grad()
    def truth(self, inputs: Mapping[str, Tensor]) -> Truth:
        """Output and gradients in float64 on rounded inputs, and SDPA's errors in the dtype of the inputs.

        SDPA's largest error on one problem of few numbers is luck (a half to twice what it mostly is). So it
        is taken over 16 problems: this one, and 15 :func:`nearby`, each in another order and with a truth of
        its own.
        """
        out, gradients = self._solve(inputs)
        if self.direction.dtype == torch.float64:
            return Truth(out, gradients, {})

        def neighbour(number: int) -> dict[str, Tensor]:
            return {name: nearby(x, number) for name, x in inputs.items()}

        plain, fused = _yardsticks(
            lambda number: self._solve(neighbour(number)),
            lambda number, widened: self.baseline(neighbour(number), number, widened),
        )
        return rounded(Truth(out, gradients, plain, fused), self._sums, inputs, self.direction)

    def _solve(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        wide = _leaves(inputs, "cpu", torch.float64)
        out, *_ = self._sums(wide)
        return out.detach(), gradients_of(out, self.direction.cpu().double(), wide)

    def _sums(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The output, again as the sums of heads, and lse, of float64 inputs."""
        q, k, v = _qkv(inputs)
        modify = partial(self.dense, inputs), inputs.get("sink_logits")
        out = oracle.attention(q, k, v, self.mask, self.scale, *modify, self.factors)
        return out, out, lse_of(q, k, self.mask, self.scale, *modify)

    def baseline(self, inputs: Mapping[str, Tensor], number: int, widened: bool) -> Attempt:
        """Output and gradients of SDPA, or of the plain formula, in the order of this number."""
        leaves = _leaves(inputs, self.device, self.direction.dtype)
        (q, k, v), sinks, mask = _qkv(leaves), leaves.get("sink_logits"), self.mask.to(self.device)
        order = oracle.Order.draw(number, len(q), q.shape[2], k.shape[2], q.shape[3], self.device, widened)
        dense = partial(self.dense, leaves)
        if self.additive and self.factors is None:
            added = dense(q.new_zeros(mask.shape))
            out = oracle.reordered_sdpa(order, q, k, v, mask, self.scale, added, sinks)
        else:
            factors = None if self.factors is None else self.factors.to(self.device)
            out = oracle.reordered_attention(order, q, k, v, mask, self.scale, dense, sinks, factors)
        learned = {name: x for name, x in leaves.items() if name in FUSED} if widened else leaves
        return out.detach(), gradients_of(out, self.direction.to(self.device), learned)


def _yardsticks(
    solve: Callable[[int], Attempt], baseline: Callable[[int, bool], Attempt]
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest errors of SDPA, and of its fused kernel, over neighbouring problems by their numbers."""
    truths = [solve(number) for number in range(NEIGHBOURS)]

    def worst(widened: bool) -> dict[str, float]:
        errors = [worst_errors([baseline(n, widened)], *true) for n, true in enumerate(truths)]
        return {name: max(error[name] for error in errors) for name in errors[0]}

    return worst(widened=False), worst(widened=True)


def nearby(x: Tensor, number: int) -> Tensor:
    """Every number moved by up to 8 roundings of its dtype, so that roundings differ; number 0 moves none.

    >>> x = torch.ones(3, dtype=torch.bfloat16)
    >>> nearby(x, 0).equal(x), bool(0 < (nearby(x, 1) - x).abs().max() <= FAR * torch.finfo(x.dtype).eps)
    (True, True)
    """
    if not number:
        return x
    rng = torch.Generator().manual_seed(number)
    moves = 2 * torch.rand(x.shape, generator=rng, dtype=torch.float64) - 1
    return (x.detach().cpu().double() * (1 + FAR * torch.finfo(x.dtype).eps * moves)).to(x.device, x.dtype)


def _leaves(
    inputs: Mapping[str, Tensor], device: str | torch.device, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    return {name: x.detach().to(device, dtype, copy=True).requires_grad_() for name, x in inputs.items()}


def _qkv(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """``k`` and ``v`` may have one sample for all."""
    q, k, v = (inputs[name] for name in "qkv")
    return q, k.expand(len(q), -1, -1, -1), v.expand(len(q), -1, -1, -1)


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
        leaves = _leaves(inputs, device)
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
        return _layer_truth(self.heads, self.formula, self.inputs)

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
    return _layer_truth(heads, Formula(mask, direction, heads.scale), {"x_src": x_src, "x_dst": x_dst})


@torch.enable_grad()
def _layer_truth(heads: Any, formula: Formula, inputs: Mapping[str, Tensor]) -> Truth:
    out, gradients = _solve_layer(formula, heads, inputs)
    if formula.direction.dtype == torch.float64:
        return Truth(out, gradients, {})
    neighbours = [_neighbour(heads.to(formula.device), inputs, number) for number in range(NEIGHBOURS)]
    plain, fused = _yardsticks(
        lambda number: _solve_layer(formula, *neighbours[number]),
        lambda number, widened: _layer_baseline(*neighbours[number], formula, number, widened),
    )
    leaves, sums = {**inputs, **plain_names(heads)}, partial(_layer_sums, heads, formula)
    return rounded(Truth(out, gradients, plain, fused), sums, leaves, formula.direction)


def _solve_layer(formula: Formula, heads: Any, inputs: Mapping[str, Tensor]) -> Attempt:
    """Output and gradients in float64."""
    wide, weights = (_leaves(found, "cpu", torch.float64) for found in (inputs, plain_names(heads)))
    dense = partial(formula.dense, wide)
    out = oracle.layer(weights, wide["x_src"], wide["x_dst"], formula.mask, formula.scale, dense)
    return out.detach(), gradients_of(out, formula.direction.double().cpu(), wide | weights)


def _neighbour(heads: Any, inputs: Mapping[str, Tensor], number: int) -> tuple[Any, dict[str, Tensor]]:
    moved = copy.deepcopy(heads)
    for parameter in moved.parameters():
        parameter.data = nearby(parameter.data, number)
    return moved, {name: nearby(x, number) for name, x in inputs.items()}


def _layer_sums(heads: Any, formula: Formula, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the sums of its heads, and lse, of float64 states and weights."""
    exact = copy.deepcopy(heads).cpu().double()
    weights = {name: inputs[name.removeprefix("standard.")] for name, _ in exact.named_parameters()}
    q = _called(exact, "receive", weights, inputs["x_dst"])
    k, v = _called(exact, "send", weights, inputs["x_src"])
    options = formula.mask, formula.scale, partial(formula.dense, inputs)
    z = oracle.attention(q, k, v, *options)
    return _called(exact, "collect", weights, z), z, lse_of(q, k, *options)


class _Method(nn.Module):
    """One method of heads as a module, so that it can be called with other weights."""

    def __init__(self, heads: nn.Module, name: str) -> None:
        super().__init__()
        self.heads, self.name = heads, name

    def forward(self, x: Tensor) -> Any:
        return getattr(self.heads, self.name)(x)


def _called(heads: nn.Module, name: str, weights: Mapping[str, Tensor], x: Tensor) -> Any:
    """A method of the heads with these weights."""
    return functional_call(_Method(heads, name), {f"heads.{key}": w for key, w in weights.items()}, (x,))


def _layer_baseline(
    heads: Any, inputs: Mapping[str, Tensor], formula: Formula, number: int, widened: bool
) -> Attempt:
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
