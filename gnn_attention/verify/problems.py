"""Problems that checks share: a call of ``attend``, or a whole layer, and the float64 truth about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from gnn_attention.verify.measure import Truth, gradients_of
from gnn_attention.verify.roundings import lse_of, rounded
from gnn_attention.verify.truth import (
    NEIGHBOURS,
    Attempt,
    Dense,
    attention_truth,
    nearby,
    unchanged,
    yardsticks,
)

Options = Callable[[dict[str, Tensor]], dict[str, Any]]  # learned inputs -> arguments of a call


@dataclass(frozen=True, eq=False)
class AttendProblem:
    """A call of ``attend``: q, k, v and what else is learned, in the dtype under test, on a graph.

    ``direction`` multiplies the output before it is summed and differentiated. ``factors`` multiply the
    weights; ``seed`` is set before the call, whose ``arguments`` are as given.
    """

    graph: TokenGraph
    mask: Tensor
    inputs: Mapping[str, Tensor]
    direction: Tensor
    device: str = "cpu"
    scale: float | None = None
    options: Options = lambda learned: {}
    dense: Dense = unchanged
    additive: bool = True
    factors: Tensor | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @staticmethod
    def of(
        case: GraphCase,
        feature: Feature,
        inputs: Mapping[str, Tensor],
        direction: Tensor,
        device: str,
        **more: Any,
    ) -> AttendProblem:
        """The problem of a graph and a feature."""
        places = (case.graph, case.mask, inputs, direction, device, feature.scale, feature.options)
        return AttendProblem(*places, partial(feature.dense, case), feature.additive, **more)

    @cached_property
    def truth(self) -> Truth:
        scale = self.inputs["q"].shape[-1] ** -0.5 if self.scale is None else self.scale
        given = (self.inputs, self.mask, self.direction, scale, self.dense, self.additive, self.factors)
        return attention_truth(*given, device=self.device)

    def solved(
        self, backend: Backend, inputs: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of a backend; ``inputs`` in place of the problem's own."""
        device = torch.device(self.device)
        given = self.inputs if inputs is None else inputs
        leaves = {name: x.detach().to(device, copy=True).requires_grad_() for name, x in given.items()}
        options = self.options({name: x for name, x in leaves.items() if name not in "qkv"})
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            q, k, v = (leaves[name] for name in "qkv")
            out = attend(q, k, v, self.graph, scale=self.scale, backend=backend, **options, **self.arguments)
        return out, gradients_of(out, self.direction.to(device), leaves)

    def run(self, backend: Backend) -> Mapping[str, Any]:
        """The fields of a check's result."""
        return verdict(*self.solved(backend), self.truth.for_backend(backend))


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """A whole layer in one form of its weights: states of senders and receivers on a graph."""

    heads: Any
    graph: TokenGraph
    mask: Tensor
    x_src: Tensor
    x_dst: Tensor
    direction: Tensor
    device: str = "cpu"
    learned: Mapping[str, Tensor] = field(default_factory=dict)
    options: Options = lambda learned: {}
    dense: Dense = unchanged
    additive: bool = True

    @cached_property
    def truth(self) -> Truth:
        states = (self.x_src, self.x_dst, self.direction)
        how = (self.learned, self.dense, self.additive)
        return layer_truth(self.heads, *states, self.mask, self.device, *how)

    def run(self, backend: Backend | None, heads: Any = None) -> Mapping[str, Any]:
        """The layer on a backend, or its messages one by one; other ``heads`` are judged by the same
        truth.
        """
        own = heads is None
        heads = (self.heads if own else heads).to(self.device)
        given = {"x_src": self.x_src, "x_dst": self.x_dst, **self.learned}
        inputs = {name: x.to(self.device, copy=True).requires_grad_() for name, x in given.items()}
        options = self.options({name: inputs[name] for name in self.learned})
        layer = MessagePassingAttention(heads, options.pop("score_mod", None), backend=backend)
        out = layer((inputs["x_src"], inputs["x_dst"]), self.graph, **options)
        weights = plain_names(heads) if own else {}
        gradients = gradients_of(out, self.direction.to(self.device), inputs | weights)
        return verdict(out, gradients, self.truth.for_backend(backend))


def plain_names(heads: Any) -> dict[str, Tensor]:
    """The weights by their names in the formulas."""
    return {name.removeprefix("standard."): parameter for name, parameter in heads.named_parameters()}


@torch.enable_grad()
def layer_truth(
    heads: Any,
    x_src: Tensor,
    x_dst: Tensor,
    direction: Tensor,
    mask: Tensor,
    device: str = "cpu",
    learned: Mapping[str, Tensor] | None = None,
    dense: Dense = unchanged,
    additive: bool = True,
) -> Truth:
    """The formula in float64 on the layer's weights as they are, and SDPA's errors between its projections.

    ``dense`` makes logits ``[B, heads, dst, src]`` of ``learned`` and logits; ``additive`` where it adds to
    them. The errors are taken over neighbours, as in :func:`attention_truth`, of states and weights.
    """
    problem = _DenseLayer(direction.to(device), mask, dense, additive)
    given = {"x_src": x_src, "x_dst": x_dst, **(learned or {})}
    out, gradients = problem.solved(heads, given)
    if direction.dtype == torch.float64:
        return Truth(out, gradients, {})
    neighbours = [_neighbour(heads.to(device), given, number) for number in range(NEIGHBOURS)]
    plain, fused = yardsticks(
        lambda number, widened: problem.baseline(*neighbours[number], number, widened),
        lambda number: problem.solved(*neighbours[number]),
    )
    leaves = given | plain_names(heads)
    return rounded(Truth(out, gradients, plain, fused), partial(problem.rows, heads), leaves, direction)


def _neighbour(heads: Any, given: Mapping[str, Tensor], number: int) -> tuple[Any, dict[str, Tensor]]:
    moved = copy.deepcopy(heads)
    for parameter in moved.parameters():
        parameter.data = nearby(parameter.data, number)
    return moved, {name: nearby(x, number) for name, x in given.items()}


@dataclass(frozen=True, eq=False)
class _DenseLayer:
    """A layer with dense attention in its middle, but for its weights and states."""

    direction: Tensor
    mask: Tensor
    dense: Dense
    additive: bool

    def solved(self, heads: Any, given: Mapping[str, Tensor]) -> Attempt:
        """Output and gradients in float64."""
        inputs = {name: x.detach().cpu().double().requires_grad_() for name, x in given.items()}
        weights = {name: p.detach().cpu().double().requires_grad_() for name, p in plain_names(heads).items()}
        dense = partial(self.dense, inputs)
        out = oracle.layer(weights, inputs["x_src"], inputs["x_dst"], self.mask, heads.scale, dense)
        return out, gradients_of(out, self.direction.double().cpu(), inputs | weights)

    def rows(self, heads: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the sums of its heads, and lse, of float64 states and weights."""
        exact = copy.deepcopy(heads).cpu().double()
        weights = {name: inputs[name.removeprefix("standard.")] for name, _ in exact.named_parameters()}
        q = _called(exact, "receive", weights, inputs["x_dst"])
        k, v = _called(exact, "send", weights, inputs["x_src"])
        dense = partial(self.dense, inputs)
        z = oracle.attention(q, k, v, self.mask, heads.scale, dense)
        return _called(exact, "collect", weights, z), z, lse_of(q, k, self.mask, heads.scale, dense)

    def baseline(self, heads: Any, given: Mapping[str, Tensor], number: int, widened: bool) -> Attempt:
        """SDPA in the dtype of the weights, tokens and samples in the given order."""
        device = self.direction.device
        inputs = {name: x.detach().to(device, copy=True).requires_grad_() for name, x in given.items()}
        x_src, x_dst, mask = inputs["x_src"], inputs["x_dst"], self.mask.to(device)
        q, (k, v) = heads.receive(x_dst), heads.send(x_src)
        sizes = (len(x_dst), x_dst.shape[1], x_src.shape[1], q.shape[-1])
        order = oracle.Order.draw(number, *sizes, str(device), widened)
        if self.additive:
            added = self.dense(inputs, q.new_zeros(mask.shape))
            z = oracle.reordered_sdpa(order, q, k, v, mask, heads.scale, added)
        else:
            dense = partial(self.dense, inputs)
            z = oracle.reordered_attention(order, q, k, v, mask, heads.scale, dense)
        out = heads.collect(z)
        learners = {name: x for name, x in inputs.items() if name.startswith("x_")} if widened else inputs
        return out, gradients_of(out, self.direction, learners | plain_names(heads))


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
