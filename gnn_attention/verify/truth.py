"""Problems that checks share, a call of ``attend`` or a whole layer, and the truth about each.

The truth is dense attention in float64, and how far SDPA is from it: by these a result is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from gnn_attention.verify.measure import Attempt as Attempt
from gnn_attention.verify.measure import Truth, gradients_of, largest_errors, results_by_name
from gnn_attention.verify.roundings import TF32Products, is_tf32, lse_of, rounded

ORDERS = 8  # in which the yardstick of lse is taken
NEIGHBOURS = 16  # problems over which that of outputs and gradients is taken, itself among them
FAR = 8  # roundings by which a neighbour's inputs are off at most: the last bits of every product are others
OF_MASK = ("table", "bias")  # what SDPA's fused kernel gives no gradient

Dense = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # inputs, logits [B, H, dst, src] -> logits


def unchanged(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True, eq=False)
class Formula:
    """Dense attention, but for its inputs: "q", "k", "v", perhaps "sink_logits", and what ``dense`` needs.

    With ``heads`` it is a whole layer: inputs are "x_src", "x_dst" and the heads' weights by their names.
    ``mask [B, H, dst, src]``; ``factors`` multiply the weights; gradients are those of ``(out *
    direction).sum()`` for all inputs. ``additive`` says that ``dense`` is a sum, which SDPA can be given as a
    mask; without it, or with factors, the yardstick is the plain formula in the inputs' dtype.
    """

    mask: Tensor
    direction: Tensor
    scale: float
    dense: Dense = unchanged
    additive: bool = True
    factors: Tensor | None = None
    device: str = "cpu"
    heads: Any = None

    @torch.enable_grad()
    def truth(self, inputs: Mapping[str, Tensor]) -> Truth:
        """Output and gradients in float64 on rounded inputs, and SDPA's errors in the dtype of the inputs.

        SDPA's largest error on one problem of few numbers is luck (a half to twice what it mostly is). So it
        is taken over 16 problems: this one, and 15 :func:`nearby`, each in another order with its own truth.
        """
        out, gradients = self._solve(inputs)
        if self.direction.dtype == torch.float64:
            return Truth(out, gradients, {})
        worst = largest_errors(self._compared(inputs))
        plain, fused = (
            {name: error for (kernel, name), error in worst.items() if kernel == wanted}
            for wanted in ("plain", "fused")
        )
        return rounded(Truth(out, gradients, plain, fused), self.sums, inputs, self.direction)

    def _compared(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[tuple[str, str], Tensor, Tensor]]:
        """((kernel, name), result, truth) of SDPA on each problem nearby, by its plain and fused kernels."""
        for number in range(NEIGHBOURS):
            moved = {name: nearby(x, number) for name, x in inputs.items()}
            true = results_by_name(self._solve(moved))
            for kernel in ("plain", "fused"):
                results = results_by_name(self.baseline(moved, number, kernel == "fused"))
                for name, x in results.items():
                    yield (kernel, name), x, true[name]

    def _solve(self, inputs: Mapping[str, Tensor]) -> Attempt:
        """By the formulas alone, no weight of a layer passing through its own projections."""
        wide = leaves_of(inputs, "cpu", torch.float64)
        dense = partial(self.dense, wide)
        if self.heads is None:
            more = wide.get("sink_logits"), self.factors
            out = oracle.attention(*self._projected(wide), self.mask, self.scale, dense, *more)
        else:
            out = oracle.layer(wide, wide["x_src"], wide["x_dst"], self.mask, self.scale, dense)
        return out.detach(), gradients_of(out, self.direction.cpu().double(), wide)

    def sums(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The output, the sums of its heads, and lse, of inputs on the CPU; of a layer q, k and v, too."""
        q, k, v = self._projected(inputs)
        dense, sinks = partial(self.dense, inputs), inputs.get("sink_logits")
        z = oracle.attention(q, k, v, self.mask, self.scale, dense, sinks, self.factors)
        logits = dense(torch.einsum("bhid,bhjd->bhij", q, oracle.per_query_head(k, q)) * self.scale)
        found = self._collected(inputs, z), z, lse_of(logits, self.mask, sinks)
        return found if self.heads is None else (*found, q, k, v)

    def baseline(self, inputs: Mapping[str, Tensor], number: int, widened: bool) -> Attempt:
        """Output and gradients of SDPA, or of the plain formula, in the order of this number.

        In TF32 those of the plain formula on a CPU, whose products are shortened.
        """
        if not is_tf32(self.direction.dtype):
            return self._attempt(inputs, number, widened, self.device, by_sdpa=self.additive)
        with TF32Products():
            return self._attempt(inputs, number, widened, "cpu", by_sdpa=False)

    def _attempt(
        self, inputs: Mapping[str, Tensor], number: int, widened: bool, device: str, by_sdpa: bool
    ) -> Attempt:
        leaves = leaves_of(inputs, device, self.direction.dtype)
        (q, k, v), sinks, mask = self._projected(leaves), leaves.get("sink_logits"), self.mask.to(device)
        dense = partial(self.dense, leaves)
        if by_sdpa and self.factors is None:
            added = dense(q.new_zeros(mask.shape))
            z = oracle.sdpa(q, k, v, mask, self.scale, added, sinks, widened, number)
        else:
            factors = None if self.factors is None else self.factors.to(device)
            q, k = oracle.reordered(number, q, k)
            z = oracle.attention(q, k, v, mask, self.scale, dense, sinks, factors)
        learned = {name: x for name, x in leaves.items() if not (widened and name in OF_MASK)}
        out = self._collected(leaves, z)
        return out.detach(), gradients_of(out, self.direction.to(device), learned)

    def _projected(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """``k`` and ``v`` may have one sample for all."""
        if self.heads is not None:
            return (self._called("receive", inputs, "x_dst"), *self._called("send", inputs, "x_src"))
        q, k, v = (inputs[name] for name in "qkv")
        return q, k.expand(len(q), -1, -1, -1), v.expand(len(q), -1, -1, -1)

    def _collected(self, inputs: Mapping[str, Tensor], z: Tensor) -> Tensor:
        return z if self.heads is None else self._called("collect", {**inputs, "z": z}, "z")

    def _called(self, method: str, inputs: Mapping[str, Tensor], x: str) -> Any:
        names = [name for name, _ in self.heads.named_parameters()]
        weights = {f"heads.{name}": inputs[name.removeprefix("standard.")] for name in names}
        return functional_call(_Method(self.heads, method), weights, (inputs[x],))


class _Method(nn.Module):
    """One method of heads as a module, so that it can be called with other weights."""

    def __init__(self, heads: nn.Module, name: str) -> None:
        super().__init__()
        self.heads, self.name = heads, name

    def forward(self, x: Tensor) -> Any:
        return getattr(self.heads, self.name)(x)


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


def leaves_of(inputs: Mapping[str, Tensor], device: str, dtype: Any = None) -> dict[str, Tensor]:
    return {name: x.detach().to(device, dtype, copy=True).requires_grad_() for name, x in inputs.items()}


@dataclass(frozen=True, eq=False)
class Problem:
    """A call of ``attend``, or of a layer where the formula has heads; inputs have the dtype under test."""

    graph: TokenGraph
    formula: Formula
    inputs: Mapping[str, Tensor]
    options: Callable[[Mapping[str, Tensor]], dict[str, Any]] = lambda inputs: {}

    @staticmethod
    def of(
        case: GraphCase,
        feature: Feature,
        inputs: Mapping[str, Tensor],
        device: str,
        heads: Any = None,
        factors: Tensor | None = None,
    ) -> Problem:
        """The problem of a graph and a feature; "direction" multiplies the output before it is summed."""
        given = dict(inputs) | ({} if heads is None else plain_names(heads))
        scale = given["q"].shape[-1] ** -0.5 if heads is None else heads.scale
        about = given.pop("direction"), feature.arguments.get("scale", scale), partial(feature.dense, case)
        formula = Formula(case.mask, *about, feature.additive, factors, device, heads)
        return Problem(case.graph, formula, given, feature.options)

    @cached_property
    def truth(self) -> Truth:
        return self.formula.truth(self.inputs)

    def solve(self, backend: Backend | None, inputs: Any = None, form: Any = None) -> Attempt:
        """Output and gradients of a backend (None: message by message).

        ``inputs`` in place of the problem's own; ``form`` of its heads, whose weights get no gradient.
        """
        device = torch.device(self.formula.device)
        leaves = leaves_of(self.inputs if inputs is None else inputs, self.formula.device)
        options, heads = self.options(leaves), self.formula.heads
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            if heads is None:
                assert backend is not None
                q, k, v = (leaves[name] for name in "qkv")
                out = attend(q, k, v, self.graph, backend=backend, **options)
            else:
                weights = plain_names(heads.to(device))
                leaves = {name: x for name, x in leaves.items() if name not in weights}
                leaves |= weights if form is None else {}
                own = (heads if form is None else form(heads)).to(device)
                layer = MessagePassingAttention(
                    own, options.pop("score_mod", None), backend=backend or "message_passing"
                )
                out = layer((leaves["x_src"], leaves["x_dst"]), self.graph, **options)
        return out, gradients_of(out, self.formula.direction.to(device), leaves)


def plain_names(heads: Any) -> dict[str, Tensor]:
    return {name.removeprefix("standard."): parameter for name, parameter in heads.named_parameters()}
