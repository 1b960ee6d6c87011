"""What roundings do to a problem: the least error that a computation in a dtype can promise.

SDPA's error may be exactly 0 by luck: where a gradient is 0 in theory, it subtracts two sums that it takes in
one order. So its errors count at least as much as what happens to the truth, in float64,

* when every input is moved by up to a rounding of float32, in which sums are taken;
* and to the gradients, when ``delta = sum(grad_out * out)`` is: it is subtracted from ``grad_out . v``, which
  may be nearly the same number. A kernel that computes weights again takes delta from the output as it was
  stored, so that for those it is a rounding of the dtype. A change of delta by e is a gradient of -e for lse;
* and to the gradients of such a kernel, when lse is rounded to float32, as which it is stored: a change by e
  makes all weights of a row ``exp(-e)`` times as large, and so what comes back through it;
* and to the gradients of a layer, when those of its queries, keys and values are rounded to the dtype, in
  which they are stored: the gradient of b_K is their sum, 0 in theory.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2: line 4 for delta; weights from the stored lse.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.verify.measure import Truth, largest_of, worst_errors

MOVES = 4
# inputs -> output, sums of heads, lse; and of a layer its queries, keys and values
Formula = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]


@torch.enable_grad()
def rounded(truth: Truth, formula: Formula, leaves: Mapping[str, Tensor], direction: Tensor) -> Truth:
    """``truth`` with yardsticks no smaller than what roundings do to it."""
    single, own = torch.finfo(torch.float32).eps, torch.finfo(direction.dtype).eps
    wide, grad_out = {name: x.detach().double() for name, x in leaves.items()}, direction.double()

    def moved(number: int, delta: float, lse: float) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Output and gradients, inputs moved by a rounding of float32, delta and lse by these."""
        rng = torch.Generator().manual_seed(number)
        inputs = {name: (x * (1 + single * _signs(x, rng))).requires_grad_() for name, x in wide.items()}
        out, z, row_lse, *stored = formula(inputs)
        (grad_z,) = torch.autograd.grad(out, z, grad_out, retain_graph=True)
        by_delta = (grad_z.abs() * z.detach().abs()).sum(-1) * _signs(row_lse, rng) * delta
        by_lse = grad_z * (row_lse.detach().abs() * _signs(row_lse, rng) * lse).unsqueeze(-1)
        outs, weights = [out, z, row_lse], [grad_out, by_lse, by_delta]
        if stored:
            gradients = torch.autograd.grad(outs, stored, weights, retain_graph=True)
            outs += stored
            weights += [gradient * _signs(gradient, rng) * own for gradient in gradients]
        learners, options = list(inputs.values()), {"allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(outs, learners, weights, **options)
        return out.detach(), dict(zip(inputs, gradients, strict=True))

    def worst(delta: float, lse: float) -> dict[str, float]:
        attempts = (moved(number, delta, lse) for number in range(1, 1 + MOVES))
        return worst_errors(attempts, truth.out, truth.gradients)

    yardstick = largest_of([truth.yardstick, worst(single, 0.0)])
    recomputed = largest_of([yardstick, truth.recomputed, worst(own, single)])
    # the output of a kernel that computes weights again has no further rounding
    del recomputed["out"]
    return replace(truth, yardstick=yardstick, recomputed=recomputed)


def _signs(x: Tensor, rng: torch.Generator) -> Tensor:
    """Numbers in [-1, 1]."""
    return 2 * torch.rand(x.shape, generator=rng, dtype=torch.float64).to(x.device) - 1
