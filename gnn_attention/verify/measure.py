"""Errors in units of a yardstick: the rule by which a check passes.

``error <= 2 * max(yardstick, rounding)`` for outputs and 3 for gradients. Error and yardstick are the largest
absolute differences from the float64 truth, of the code under test and of SDPA in the same dtype (over some
problems a few roundings apart); rounding is half an ulp of the largest true number (no result in this dtype
can promise less). In float64 the unit is 1e-12 of the largest output, or of the largest gradient of all
inputs (the gradient of b_K is 0 in theory: no error is small in comparison). The rule is FlashAttention's
(twice the error of a low-precision computation), with SDPA as the yardstick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend

ALLOWED_OUTPUT, ALLOWED_GRADIENT = 2.0, 3.0
EXACT = 1e-12  # of the largest number: what float64 is allowed
MOVES = 4
FAR = 8  # roundings by which a neighbour's inputs are off at most: the last bits of every product are others

Attempt = tuple[Tensor, Mapping[str, Tensor]]  # an output and its gradients


@dataclass(frozen=True, eq=False)
class Truth:
    """The float64 output and gradients, and how far SDPA in the dtype under test is from its own truth.

    ``yardstick`` holds those errors for "out" and every gradient; empty for float64. ``recomputed`` holds
    the larger ones of its fused kernel, by which gradients are judged of a backend that computes its weights
    again from lse.
    """

    out: Tensor
    gradients: Mapping[str, Tensor]
    yardstick: Mapping[str, float]
    recomputed: Mapping[str, float] = field(default_factory=dict)

    def for_backend(self, backend: Backend) -> Truth:
        """The truth with the yardstick of a backend, which is larger for gradients of recomputed weights."""
        larger = self.recomputed if backend.recomputes else {}
        return replace(self, yardstick={**self.yardstick, **larger})

    def rows(self, receivers: Tensor, senders: Tensor) -> Truth:
        """The output of some receivers and the gradients of some senders alone (axis 2 of each)."""
        gradients = {name: g[:, :, senders.to(g.device)] for name, g in self.gradients.items()}
        return replace(self, out=self.out[:, :, receivers.to(self.out.device)], gradients=gradients)


@dataclass(frozen=True)
class Outcome:
    """What a comparison found: the worst error over the allowed one, and what was expected there and came.

    ``output`` and ``gradient`` are the worst errors of each in units of the yardstick, None where none is.
    """

    share: float
    output: float | None = None
    gradient: float | None = None
    where: str = ""

    @property
    def passed(self) -> bool:
        """True if no error is larger than allowed; a NaN is."""
        return self.share <= 1.0


def judge(out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Outcome:
    """Compare an output and its gradients with the truth by the rule of this module.

    Without gradients, as under ``no_grad``, the output alone is judged.
    """
    results, true = {"out": out, **gradients}, {"out": truth.out, **truth.gradients}
    largest_gradient = max(map(largest, truth.gradients.values()), default=0.0)
    ratios, shares, allowed = dict[str, float](), dict[str, float](), dict[str, float]()
    for name, x in results.items():
        if x.dtype == torch.float64:
            limit, unit = 1.0, EXACT * (largest(truth.out) if name == "out" else largest_gradient)
        else:
            limit = ALLOWED_OUTPUT if name == "out" else ALLOWED_GRADIENT
            rounding = torch.finfo(x.dtype).eps / 2 * largest(true[name])
            unit = max(rounding, truth.yardstick.get(name, 0.0))
        error = _error(x, true[name])
        ratios[name] = error / unit if unit > 0 else math.inf if error else 0.0
        shares[name], allowed[name] = ratios[name] / limit, limit * unit
    worst = max(shares, key=lambda name: badness(shares[name]))
    where = ""
    if not shares[worst] <= 1.0:
        title = "output" if worst == "out" else f"gradient of {worst}"
        where = _description(title, results[worst], true[worst], allowed[worst])
    gradient = max((ratios[name] for name in gradients), default=None, key=badness)
    return Outcome(shares[worst], ratios["out"], gradient, where)


def holds(condition: bool | Tensor, where: str = "it does not hold") -> Outcome:
    """The outcome of a condition that measures no error."""
    return Outcome(0.0) if condition else Outcome(math.inf, where=where)


def errors_of(attempt: Attempt, true: Attempt) -> dict[str, float]:
    """The largest error of the output, as "out", and of each gradient."""
    wanted = {"out": true[0], **true[1]}
    return {name: _error(x, wanted[name]) for name, x in {"out": attempt[0], **attempt[1]}.items()}


def largest_of(errors: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest error of each name; a NaN is larger than any number.

    >>> largest_of([{"out": 3.0, "q": 0.0}, {"out": 0.0, "q": 1.0}])
    {'out': 3.0, 'q': 1.0}
    """
    worst: dict[str, float] = {}
    for each in errors:
        worst |= {name: max(x, worst.get(name, 0.0), key=badness) for name, x in each.items()}
    return worst


def gradients_of(out: Tensor, direction: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of ``sum(out * direction)`` for each input; {} under ``no_grad``."""
    if not torch.is_grad_enabled():
        return {}
    if not out.requires_grad:
        return {name: torch.zeros_like(x) for name, x in inputs.items()}
    leaves, weights = list(inputs.values()), direction.to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, weights, allow_unused=True, materialize_grads=True)
    return dict(zip(inputs, gradients, strict=True))


def badness(ratio: float) -> float:
    """A NaN is worse than any number."""
    return math.inf if math.isnan(ratio) else ratio


def largest(x: Tensor) -> float:
    """The largest absolute value; 0 of an empty tensor."""
    return float(x.detach().abs().amax()) if x.numel() else 0.0


def _error(result: Tensor, true: Tensor) -> float:
    """The largest difference, in float64 on the device of the truth; inf where the shape is wrong."""
    if result.shape != true.shape:
        return math.inf
    return largest(result.detach().to(true.device, torch.float64) - true.detach().double())


def _description(name: str, result: Tensor, true: Tensor, allowed: float) -> str:
    """Where the error is largest: the number expected, the number that came, the error allowed and found."""
    if result.shape != true.shape:
        return f"{name}: expected the shape {list(true.shape)}, came {list(result.shape)}"
    came, expected = (x.detach().to("cpu", torch.float64) for x in (result, true))
    off = (came - expected).abs()
    place = [int(i) for i in torch.unravel_index(off.nan_to_num(math.inf).argmax(), off.shape)]
    a, b, error = (float(x[tuple(place)]) for x in (expected, came, off))
    return f"{name}{place}: expected {a:.9g}, came {b:.9g}; error allowed {allowed:.3g}, found {error:.3g}"


# ---- what roundings do to a truth


@torch.enable_grad()
def widen_by_roundings(
    truth: Truth, formula: Callable[..., tuple[Tensor, ...]], leaves: Mapping[str, Tensor], direction: Tensor
) -> Truth:
    """``truth`` with yardsticks no smaller than what roundings do to it: the least that a dtype can promise.

    SDPA's error may be exactly 0 by luck: where a gradient is 0 in theory, it subtracts two sums that it
    takes in one order. So its errors count at least as much as what happens to the truth, in float64,

    * when every input is moved by up to a rounding of float32, in which sums are taken;
    * and to the gradients, when ``delta = sum(grad_out * out)`` is: it is subtracted from ``grad_out . v``,
      which may be nearly the same number. A kernel that computes weights again takes delta from the output as
      it was stored: for those it is a rounding of the dtype. A change of delta by e is a gradient of -e for
      lse;
    * and to the gradients of such a kernel, when lse is rounded to float32, as which it is stored: a change
      by e makes all weights of a row ``exp(-e)`` times as large, and so what comes back through it;
    * and to the gradients of a layer, when those of its queries, keys and values are rounded to the dtype, in
      which they are stored: the gradient of b_K is their sum, 0 in theory.

    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2: line 4 for delta; weights from the stored lse.
    """
    single, own = torch.finfo(torch.float32).eps, torch.finfo(direction.dtype).eps
    wide, grad_out = {name: x.detach().double() for name, x in leaves.items()}, direction.double()

    def perturbed_attempt(number: int, delta: float, lse: float) -> Attempt:
        """Output and gradients, inputs moved by a rounding of float32, delta and lse by these."""
        rng = torch.Generator().manual_seed(number)
        inputs = {name: (x * (1 + single * _signs(x, rng))).requires_grad_() for name, x in wide.items()}
        out, z, row_lse, *stored = formula(inputs)
        (grad_z,) = torch.autograd.grad(out, z, grad_out, retain_graph=True)
        by_delta = (grad_z.abs() * z.detach().abs()).sum(-1) * _signs(row_lse, rng) * delta
        by_lse = grad_z * (row_lse.detach().abs() * _signs(row_lse, rng) * lse).unsqueeze(-1)
        total = (out * grad_out).sum() + (z * by_lse).sum() + (row_lse * by_delta).sum()
        gradients = torch.autograd.grad(total, stored, retain_graph=True) if stored else ()
        for x, gradient in zip(stored, gradients, strict=True):
            total = total + (x * gradient * _signs(gradient, rng) * own).sum()
        return out.detach(), gradients_of(total, torch.ones_like(total), inputs)

    def worst(delta: float, lse: float) -> dict[str, float]:
        true = truth.out, truth.gradients
        return largest_of(
            errors_of(perturbed_attempt(number, delta, lse), true) for number in range(1, 1 + MOVES)
        )

    yardstick = largest_of([truth.yardstick, worst(single, 0.0)])
    recomputed = largest_of([yardstick, truth.recomputed, worst(own, single)])
    # the output of a kernel that computes weights again has no further rounding
    del recomputed["out"]
    return replace(truth, yardstick=yardstick, recomputed=recomputed)


def nearby(x: Tensor, number: int) -> Tensor:
    """Every number moved by up to 8 roundings of its dtype, so that roundings differ; number 0 moves none.

    >>> x = torch.ones(3, dtype=torch.bfloat16)
    >>> nearby(x, 0).equal(x), bool(0 < (nearby(x, 1) - x).abs().max() <= FAR * torch.finfo(x.dtype).eps)
    (True, True)
    """
    if not number:
        return x
    moves = FAR * torch.finfo(x.dtype).eps * _signs(x, torch.Generator().manual_seed(number))
    return (x.detach().double() * (1 + moves)).to(x.dtype)


def _signs(x: Tensor, rng: torch.Generator) -> Tensor:
    """Numbers in [-1, 1]."""
    return 2 * torch.rand(x.shape, generator=rng, dtype=torch.float64).to(x.device) - 1
