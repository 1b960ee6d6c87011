"""Problems that checks share, a call of ``attend`` or a whole layer, and the truth about each.

The truth is dense attention in float64, and how far SDPA is from it: by these a result is judged.
"""

from __future__ import annotations

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
from gnn_attention.verify.measure import Attempt as Attempt
from gnn_attention.verify.measure import Truth, errors_of, gradients_of, largest_of
from gnn_attention.verify.roundings import lse_of, rounded

ORDERS = 8  # in which the yardstick of lse is taken
NEIGHBOURS = 16  # problems over which that of outputs and gradients is taken, itself among them
FAR = 8  # roundings by which a neighbour's inputs are off at most: the last bits of every product are others
OF_MASK = ("table", "bias")  # what SDPA's fused kernel gives no gradient

Dense = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # inputs, logits [B, H, dst, src] -> logits
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v -> output


def unchanged(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True, eq=False)
class Formula:
    """Dense attention, but for its inputs: "q", "k", "v", perhaps "sink_logits", and what ``dense`` needs.

    With ``heads`` it is a whole layer: inputs are "x_src", "x_dst" and the heads' weights by their names.
    ``mask [B, H, dst, src]``; ``factors`` multiply the weights; gradients are those of ``(out *
    direction).sum()`` for all inputs. ``additive`` says that ``dense`` is a sum, which SDPA can be given as a
    mask; without it, or with factors, the yardstick is the plain formula in the inputs' dtype. SDPA runs on
    ``device``, the formula in ``place``.
    """

    mask: Tensor
    direction: Tensor
    scale: float
    dense: Dense = unchanged
    additive: bool = True
    factors: Tensor | None = None
    device: str = "cpu"
    heads: Any = None
    place: str = "cpu"
    neighbours: int = NEIGHBOURS

    @torch.enable_grad()
    def truth(self, inputs: Mapping[str, Tensor]) -> Truth:
        """Output and gradients in float64 on rounded inputs, and SDPA's errors in the dtype of the inputs.

        SDPA's largest error on one problem of few numbers is luck (a half to twice what it mostly is). So it
        is taken over 16 problems: this one, and 15 :func:`nearby`, each in another order with its own truth.
        """
        out, gradients = self._solve(inputs)
        if self.direction.dtype == torch.float64:
            return Truth(out, gradients, {})
        errors = [self._errors_nearby(inputs, number) for number in range(self.neighbours)]
        plain, fused = (largest_of(by_kernel) for by_kernel in zip(*errors, strict=True))
        return rounded(Truth(out, gradients, plain, fused), self.sums, inputs, self.direction)

    def _errors_nearby(self, inputs: Mapping[str, Tensor], number: int) -> tuple[dict[str, float], ...]:
        """The errors of SDPA's plain and of its fused kernel on one problem nearby."""
        moved = {name: nearby(x, number) for name, x in inputs.items()}
        true = self._solve(moved)
        return tuple(errors_of(self.baseline(moved, number, fused), true) for fused in (False, True))

    def _solve(self, inputs: Mapping[str, Tensor]) -> Attempt:
        """By the formulas alone, no weight of a layer passing through its own projections."""
        wide = leaves_of(inputs, self.place, torch.float64)
        dense = partial(self.dense, wide)
        if self.heads is None:
            out = self._called(wide, self._attention(wide))[0]
        else:
            out = oracle.layer(wide, wide["x_src"], wide["x_dst"], self.mask, self.scale, dense)
        return out.detach(), gradients_of(out, self.direction.to(self.place, torch.float64), wide)

    def sums(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The output, the sums of its heads, and lse; of a layer q, k and v, too."""
        out, z, (q, k, v) = self._called(inputs, self._attention(inputs))
        logits = torch.einsum("bhid,bhjd->bhij", q, oracle.per_query_head(k, q)) * self.scale
        lse = lse_of(self.dense(inputs, logits), self.mask.to(q.device), inputs.get("sink_logits"))
        return (out, z, lse) if self.heads is None else (out, z, lse, q, k, v)

    def baseline(self, inputs: Mapping[str, Tensor], number: int, widened: bool) -> Attempt:
        """Output and gradients of SDPA, or of the plain formula, in the order of this number."""
        leaves = leaves_of(inputs, self.device, self.direction.dtype)
        out = self._called(leaves, self._attention(leaves, number, widened))[0]
        learned = {name: x for name, x in leaves.items() if not (widened and name in OF_MASK)}
        return out.detach(), gradients_of(out, self.direction.to(self.device), learned)

    def _attention(
        self, inputs: Mapping[str, Tensor], number: int | None = None, widened: bool = False
    ) -> Attention:
        """Attention of q, k and v by the formula; with a number in its order, by SDPA where that can."""
        dense, sinks = partial(self.dense, inputs), inputs.get("sink_logits")

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = self.mask.to(q.device)
            if number is not None and self.additive and self.factors is None:
                added = dense(q.new_zeros(mask.shape))
                return oracle.sdpa(q, k, v, mask, self.scale, added, sinks, widened, number)
            q, k = oracle.reordered(number or 0, q, k)
            factors = None if self.factors is None else self.factors.to(q.device)
            return oracle.attention(q, k, v, mask, self.scale, dense, sinks, factors)

        return attention

    def _called(self, inputs: Mapping[str, Tensor], attention: Attention) -> tuple[Tensor, Tensor, Any]:
        """The output, that of ``attention`` before heads are summed, and q, k and v.

        ``k`` and ``v`` may have one sample for all.
        """
        if self.heads is not None:
            names = [name for name, _ in self.heads.named_parameters()]
            weights = {f"heads.{name}": inputs[name.removeprefix("standard.")] for name in names}
            tokens = inputs["x_src"], inputs["x_dst"]
            called: tuple[Tensor, Tensor, Any] = functional_call(
                _Layer(self.heads), weights, (*tokens, attention)
            )
            return called
        q = inputs["q"]
        k, v = (inputs[name].expand(len(q), -1, -1, -1) for name in "kv")
        z = attention(q, k, v)
        return z, z, (q, k, v)


class _Layer(nn.Module):
    """A layer whose weights and attention are given at each call."""

    def __init__(self, heads: nn.Module) -> None:
        super().__init__()
        self.heads: Any = heads

    def forward(self, x_src: Tensor, x_dst: Tensor, attention: Attention) -> Any:
        q, (k, v) = self.heads.receive(x_dst), self.heads.send(x_src)
        z = attention(q, k, v)
        return self.heads.collect(z), z, (q, k, v)


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
    """A call of ``attend``, or of a layer where the formula has heads; inputs have the dtype under test.

    ``options(inputs)`` are further arguments of the call, and ``layout`` puts q, k and v in their places in
    memory. A layer is solved in another ``form`` of its heads, whose weights then get no gradient.
    """

    graph: TokenGraph
    formula: Formula
    inputs: Mapping[str, Tensor]
    options: Callable[[Mapping[str, Tensor]], dict[str, Any]] = lambda inputs: {}
    layout: Callable[[Tensor], Tensor] = lambda x: x
    form: Callable[[Any], Any] | None = None

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
        own = dict(inputs) | ({} if heads is None else plain_names(heads))
        scale = own["q"].shape[-1] ** -0.5 if heads is None else heads.scale
        scale, dense = feature.arguments.get("scale", scale), partial(feature.dense, case)
        direction = own.pop("direction")
        formula = Formula(case.mask, direction, scale, dense, feature.additive, factors, device, heads)
        return Problem(case.graph, formula, own, feature.options)

    @cached_property
    def truth(self) -> Truth:
        return self.formula.truth(self.inputs)

    def solve(self, backend: Backend, inputs: Mapping[str, Tensor] | None = None) -> Attempt:
        """Output and gradients of a backend, perhaps with other inputs than the problem's own."""
        device = torch.device(self.formula.device)
        leaves = leaves_of(self.inputs if inputs is None else inputs, self.formula.device)
        options, heads = self.options(leaves), self.formula.heads
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            if heads is None:
                q, k, v = (self.layout(leaves[name]) for name in "qkv")
                out = attend(q, k, v, self.graph, backend=backend, **options)
            else:
                weights = plain_names(heads.to(device))
                leaves = {name: x for name, x in leaves.items() if name not in weights}
                leaves |= weights if self.form is None else {}
                own = (heads if self.form is None else self.form(heads)).to(device)
                score_mod = options.pop("score_mod", None)
                layer = MessagePassingAttention(own, score_mod, backend=backend_of_layer(backend))
                out = layer((leaves["x_src"], leaves["x_dst"]), self.graph, **options)
        return out, gradients_of(out, self.formula.direction.to(device), leaves)


def backend_of_layer(backend: Backend) -> str | Backend:
    """The backend of a layer; "message_passing" by its name, which calls the layer's own four steps."""
    return backend.name if backend.name == "message_passing" else backend


def plain_names(heads: Any) -> dict[str, Tensor]:
    return {name.removeprefix("standard."): parameter for name, parameter in heads.named_parameters()}
