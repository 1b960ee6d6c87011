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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend

ALLOWED_OUTPUT, ALLOWED_GRADIENT = 2.0, 3.0
EXACT = 1e-12  # of the largest number: what float64 is allowed

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
        """The truth with the yardstick of a backend."""
        return self.of_recomputed_weights() if backend.recomputes else self

    def of_recomputed_weights(self) -> Truth:
        """The truth with the larger yardsticks for gradients."""
        return replace(self, yardstick={**self.yardstick, **self.recomputed})

    def rows(self, receivers: Tensor, senders: Tensor) -> Truth:
        """The output of some receivers and the gradients of some senders alone (axis 2 of each)."""
        gradients = {name: g[:, :, senders.to(g.device)] for name, g in self.gradients.items()}
        return replace(self, out=self.out[:, :, receivers.to(self.out.device)], gradients=gradients)


@dataclass(frozen=True)
class Outcome:
    """What a comparison found; None where it measures no error.

    ``output`` and ``gradient`` are the worst errors of the output and of its gradients, in units of the
    yardstick. ``share`` is the worst error over the allowed one, of output and gradients. ``where`` says what
    was expected there and what came.
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
    units, limits, ratios = dict[str, float](), dict[str, float](), dict[str, float]()
    for name, x in results.items():
        if x.dtype == torch.float64:
            limits[name] = 1.0
            units[name] = EXACT * (largest(truth.out) if name == "out" else largest_gradient)
        else:
            limits[name] = ALLOWED_OUTPUT if name == "out" else ALLOWED_GRADIENT
            rounding = torch.finfo(x.dtype).eps / 2 * largest(true[name])
            units[name] = max(rounding, truth.yardstick.get(name, 0.0))
        error = _error(x, true[name])
        ratios[name] = error / units[name] if units[name] > 0 else math.inf if error else 0.0
    shares = {name: ratio / limits[name] for name, ratio in ratios.items()}
    worst = max(shares, key=lambda name: badness(shares[name]))
    where = ""
    if not shares[worst] <= 1.0:
        title = "output" if worst == "out" else f"gradient of {worst}"
        where = _description(title, results[worst], true[worst], limits[worst] * units[worst])
    gradient = max((ratios[name] for name in gradients), default=None, key=badness)
    return Outcome(shares[worst], ratios["out"], gradient, where)


def holds(condition: bool | Tensor, where: str = "it does not hold") -> Outcome:
    """The outcome of a condition that measures no error."""
    return Outcome(0.0) if condition else Outcome(math.inf, where=where)


def worst_of(outcomes: Iterable[tuple[str, Outcome]]) -> Outcome:
    """The outcome of several named comparisons: the first that fails, or the worst share."""
    share = 0.0
    for name, outcome in outcomes:
        if not outcome.passed:
            return Outcome(outcome.share, where=f"{name}: {outcome.where}")
        share = max(share, outcome.share)
    return Outcome(share)


def worst_errors(
    attempts: Iterable[Attempt], out: Tensor, gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """The largest error of the output, as "out", and of each gradient, over several attempts at the truth.

    >>> zero = torch.zeros(2)
    >>> worst_errors([(zero - 3, {"q": zero}), (zero, {"q": zero + 1})], zero, {"q": zero})
    {'out': 3.0, 'q': 1.0}
    """
    true = {"out": out, **gradients}
    named = ({"out": attempt[0], **attempt[1]} for attempt in attempts)
    return largest_of({name: _error(x, true[name]) for name, x in results.items()} for results in named)


def largest_of(errors: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest error of each name; a NaN is larger than any number."""
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
    index = torch.unravel_index(off.nan_to_num(math.inf).argmax(), off.shape)
    a, b, error = (float(x[index]) for x in (expected, came, off))
    place = [int(i) for i in index]
    return f"{name}{place}: expected {a:.9g}, came {b:.9g}; error allowed {allowed:.3g}, found {error:.3g}"
