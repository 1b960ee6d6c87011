"""The truth about one call of attention, and how far SDPA is from it: by these a result is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Truth, gradients_of, largest, summation_bound, worst_errors

ORDERS = 8  # in which the yardstick of a layer is taken
FUSED_ORDERS = 8  # in which that of the fused kernel is taken
NEIGHBOURS = 16  # problems over which that of a call is taken, itself among them
FAR = 8  # roundings by which a neighbour's inputs are off at most: the last bits of every product are others
FUSED = ("q", "k", "v", "sink_logits")  # what that kernel gives a gradient: no mask, and so no bias

Attempt = tuple[Tensor, Mapping[str, Tensor]]  # an output and its gradients
Dense = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # inputs, logits [B, H, dst, src] -> logits


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
        neighbours = [{name: nearby(x, number) for name, x in inputs.items()} for number in range(NEIGHBOURS)]
        truths = [self._solve(neighbour) for neighbour in neighbours]

        def worst(widened: bool) -> dict[str, float]:
            numbered = enumerate(zip(neighbours, truths, strict=True))
            errors = [worst_errors([self._baseline(x, n, widened)], *true) for n, (x, true) in numbered]
            return {name: max(error[name] for error in errors) for name in errors[0]}

        return Truth(out, gradients, worst(widened=False), worst(widened=True), self._cancelled(inputs))

    def _solve(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        wide = _leaves(inputs, torch.float64, "cpu")
        (q, k, v), sinks = (wide[name] for name in "qkv"), wide.get("sink_logits")
        dense = partial(self.dense, wide)
        out = oracle.attention(q, k, v, self.mask, self.scale, dense, sinks, self.factors)
        return out.detach(), gradients_of(out, self.direction.cpu().double(), wide)

    def _baseline(
        self, inputs: Mapping[str, Tensor], number: int, widened: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of SDPA, or of the plain formula, in the order of this number."""
        leaves = _leaves(inputs, self.direction.dtype, self.device)
        (q, k, v), sinks, mask = (
            (leaves[n] for n in "qkv"),
            leaves.get("sink_logits"),
            self.mask.to(self.device),
        )
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

    def _cancelled(self, inputs: Mapping[str, Tensor]) -> dict[str, float]:
        """Bounds of what gradients through the logits are off in float32, where their terms cancel.

        The gradient of a logit is ``w_e (grad_out . v - grad_out . out)``: two sums of C products, each off
        by at most ``gamma_C sum |grad_out| |v|``. It goes to q as ``scale |k|``, to k ``scale |q|``, to what
        else is learned times 1.
        """
        wide = {name: x.detach().cpu().double() for name, x in inputs.items()}
        (q, k, v), options = (wide[n] for n in "qkv"), (partial(self.dense, wide), wide.get("sink_logits"))
        weights = oracle.attention_weights(q, k, self.mask, self.scale, *options, self.factors)
        direction = self.direction.cpu().double().abs()
        products = torch.einsum("bhic,bhjc->bhij", direction, oracle.per_query_head(v, q).abs())
        off = weights * summation_bound(v.shape[3], 2 * products, torch.float32)
        by_query = torch.einsum("bhij,bhjd->bhid", off, oracle.per_query_head(k, q).abs())
        by_key = torch.einsum("bhij,bhid->bhjd", off, q.abs()).reshape(len(k), k.shape[1], -1, *k.shape[2:])
        bounds = {name: float(off.sum()) for name in inputs if name != "v"}
        ends = {"q": by_query, "k": by_key.sum(2)}
        return bounds | {name: abs(self.scale) * largest(x) for name, x in ends.items()}


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


def _leaves(inputs: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {name: x.detach().to(device, dtype, copy=True).requires_grad_() for name, x in inputs.items()}
