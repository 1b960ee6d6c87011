"""The truth about one call of attention, and how far SDPA is from it: what outputs and gradients are judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from gnn_attention._shapes import Tensor
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Truth, gradients_of, worst_errors

__all__ = ["FUSED_ORDERS", "ORDERS", "Dense", "attention_truth", "unchanged"]

ORDERS = 8  # in which the yardstick is taken
FUSED_ORDERS = 8  # in which that of the fused kernel is taken
FUSED = ("q", "k", "v", "sink_logits")  # what that kernel gives a gradient: no mask, and so no bias

Dense = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # inputs, logits [B, H, dst, src] -> logits


def unchanged(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    return logits


@torch.enable_grad()
def attention_truth(
    inputs: Mapping[str, Tensor],
    mask: Tensor,
    direction: Tensor,
    scale: float,
    dense: Dense = unchanged,
    additive: bool = True,
    factors: Tensor | None = None,
    device: str = "cpu",
) -> Truth:
    """Dense attention in float64 on rounded inputs, its gradients, and SDPA's errors in the dtype of the inputs.

    ``inputs`` holds "q", "k", "v", perhaps "sink_logits", and what ``dense`` makes logits of. Gradients are those of
    ``(out * direction).sum()`` for all of them. ``mask [B, H, dst, src]``; ``factors`` multiply the weights. Where SDPA cannot
    express the call (``additive`` False, or factors), the yardstick is the plain formula in the dtype of the inputs.
    """
    wide = _leaves(inputs, torch.float64, "cpu")
    out = oracle.attention(*_qkv(wide), mask, scale, lambda x: dense(wide, x), wide.get("sink_logits"), factors)
    gradients = gradients_of(out, direction.cpu().double(), wide)
    if direction.dtype == torch.float64:
        return Truth(out.detach(), gradients, {})
    places = [None if x is None else x.to(device) for x in (mask, direction, factors)]

    def attempts(count: int, widened: bool) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        for number in range(count):
            leaves = _leaves(inputs, direction.dtype, device)
            found = _baseline(number, widened, leaves, places, scale, dense, additive)
            learned = {name: x for name, x in leaves.items() if name in FUSED} if widened else leaves
            yield found, gradients_of(found, direction.to(device), learned)

    plain = worst_errors(attempts(ORDERS, False), out, gradients)
    return Truth(out.detach(), gradients, plain, worst_errors(attempts(FUSED_ORDERS, True), out, gradients))


def _baseline(
    number: int,
    widened: bool,
    leaves: Mapping[str, Tensor],
    places: list[Tensor | None],
    scale: float,
    dense: Dense,
    additive: bool,
) -> Tensor:
    """SDPA in the given order; the plain formula where SDPA cannot express the call."""
    (q, k, v), sinks, (mask, _, factors) = _qkv(leaves), leaves.get("sink_logits"), places
    assert mask is not None
    order = oracle.Order.draw(number, len(q), q.shape[2], k.shape[2], q.shape[3], str(q.device), widened)
    if additive and factors is None:
        added = dense(leaves, q.new_zeros(mask.shape))
        return oracle.reordered_sdpa(order, q, k, v, mask, scale, added, sinks)
    return oracle.reordered_attention(order, q, k, v, mask, scale, lambda x: dense(leaves, x), sinks, factors)


def _leaves(inputs: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {name: x.detach().to(device, dtype, copy=True).requires_grad_() for name, x in inputs.items()}


def _qkv(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return inputs["q"], inputs["k"], inputs["v"]
