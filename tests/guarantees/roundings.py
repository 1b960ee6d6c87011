"""What roundings do to a problem: the least error that a computation in a dtype can promise.

SDPA's error may be exactly 0, on all neighbours of a problem: it takes ``grad_out . v`` and ``delta`` in one
order. Beside it stands what happens to the truth, in float64,

* when every input is moved by up to a rounding of float32, in which everyone sums (its conditioning);
* and to the gradients, when ``delta = sum(grad_out * out)`` is: that is subtracted from ``grad_out . v``,
  which may be nearly the same number. A kernel that computes weights again takes delta from the output as it
  stored it, so that for those it is a rounding of the dtype. A change of delta by e is a gradient of -e for
  lse;
* and to the gradients of such a kernel, when lse is rounded to float32, as which it is stored: a change by e
  makes all weights of a row ``exp(-e)`` times as large, and so what comes back through it.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2: line 4 for delta; weights from the lse that was
    stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Truth, worst_errors

__all__ = ["lse_of", "rounded"]

MOVES = 4
Formula = Callable[
    [Mapping[str, Tensor]], tuple[Tensor, Tensor, Tensor]
]  # inputs -> output, heads' sums, lse


def rounded(truth: Truth, formula: Formula, leaves: Mapping[str, Tensor], direction: Tensor) -> Truth:
    """``truth`` with yardsticks no smaller than what roundings of float32, and for fused kernels of the
    dtype, do to it.
    """
    single, own = torch.finfo(torch.float32).eps, torch.finfo(direction.dtype).eps

    def worst(delta: float, lse: float) -> dict[str, float]:
        moved = (_moved(formula, leaves, direction, n, delta, lse) for n in range(1, 1 + MOVES))
        return worst_errors(moved, *_moved(formula, leaves, direction))

    anybody, recomputing = worst(single, 0.0), worst(own, single)
    plain = {name: max(error, anybody[name]) for name, error in truth.yardstick.items()}
    fused = {name: max(truth.fused.get(name, 0.0), recomputing[name]) for name in plain}
    return replace(truth, yardstick=plain, fused=fused)


def _moved(
    formula: Formula,
    leaves: Mapping[str, Tensor],
    direction: Tensor,
    number: int = 0,
    delta: float = 0.0,
    lse: float = 0.0,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Output and gradients of the formula, inputs moved by a rounding of float32, delta and lse by so much;
    of 0 as they are.
    """
    rng = torch.Generator().manual_seed(number)
    single = torch.finfo(torch.float32).eps if number else 0.0
    inputs = {
        name: (x.double() * (1 + single * _signs(x, rng))).requires_grad_() for name, x in leaves.items()
    }
    out, heard, mass = formula(inputs)
    (grad_heard,) = torch.autograd.grad(out, heard, direction.double(), retain_graph=True)
    by_delta = (grad_heard.abs() * heard.detach().abs()).sum(-1) * _signs(mass, rng) * delta
    by_lse = grad_heard * (mass.detach().abs() * _signs(mass, rng) * lse).unsqueeze(-1)
    told = (direction.double(), by_lse, by_delta)
    found = torch.autograd.grad((out, heard, mass), list(inputs.values()), told, allow_unused=True)
    gradients = {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(inputs.items(), found, strict=True)
    }
    return out.detach(), gradients


def _signs(x: Tensor, rng: torch.Generator) -> Tensor:
    """Numbers in [-1, 1]."""
    return 2 * torch.rand(x.shape, generator=rng, dtype=torch.float64) - 1


def lse_of(
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "batch kv_heads src dim"],
    mask: Tensor,
    scale: float,
    modify: Callable[[Tensor], Tensor] | None = None,
    sink_logits: Tensor | None = None,
) -> Float[Tensor, "batch heads dst"]:
    """The logarithm of the sum of ``exp(logit)`` over edges, and the sink; 0 for a receiver without
    in-edges.
    """
    logits = torch.einsum("bhid,bhjd->bhij", q, oracle.per_query_head(k, q)) * scale
    logits = logits if modify is None else modify(logits)
    sink = logits.new_full((1, 1, 1, 1), -torch.inf) if sink_logits is None else sink_logits.view(1, -1, 1, 1)
    logits = torch.cat([logits.masked_fill(~mask, -torch.inf), sink.expand(*logits.shape[:3], 1)], -1)
    heard = mask.any(-1, keepdim=True)
    return logits.masked_fill(~heard, 0.0).logsumexp(-1) * heard.squeeze(-1)
