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
from typing import TypeVar

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend

ALLOWED_OUTPUT, ALLOWED_GRADIENT = 2.0, 3.0
EXACT = 1e-12  # of the largest number: what float64 is allowed

Magnitude = TypeVar("Magnitude", float, Tensor)
Attempt = tuple[Tensor, Mapping[str, Tensor]]  # an output and its gradients


@dataclass(frozen=True, eq=False)
class Truth:
    """The float64 output and gradients, and how far SDPA in the dtype under test is from its own truth.

    ``yardstick`` holds those errors for "out" and every gradient; empty for float64. ``fused`` holds those of
    its fused kernel: gradients of a backend that makes weights anew, too, are judged by the larger.
    """

    out: Tensor
    gradients: Mapping[str, Tensor]
    yardstick: Mapping[str, float]
    fused: Mapping[str, float] = field(default_factory=dict)

    def for_backend(self, backend: Backend | None) -> Truth:
        """What a backend (None: the walk) is judged by."""
        if backend is None or not backend.recomputes:
            return self
        fused = {name: max(x, self.fused.get(name, 0.0)) for name, x in self.yardstick.items()}
        fused.pop("out", None)
        return replace(self, yardstick={**self.yardstick, **fused})

    def rows(self, receivers: Tensor, senders: Tensor) -> Truth:
        """About the output of some receivers and the gradients of some senders alone (axis 2 of each)."""
        gradients = {name: g[:, :, senders.cpu()] for name, g in self.gradients.items()}
        return replace(self, out=self.out[:, :, receivers.cpu()], gradients=gradients)


def worst_errors(
    attempts: Iterable[Attempt], out: Tensor, gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """The largest error of each result over several attempts at the truth ``out``, ``gradients``."""
    true, worst = {"out": out, **gradients}, dict[str, float]()
    for found_out, found in attempts:
        for name, x in {"out": found_out, **found}.items():
            worst[name] = max(worst.get(name, 0.0), _distance(x, true[name]))
    return worst


@dataclass(frozen=True)
class Outcome:
    """The worst errors of an output and of its gradients, in units of the yardstick.

    ``error`` and ``unit`` are the output's two numbers; ``share`` is the worst error over the allowed one, of
    output and gradients; ``where`` says of that number what was expected and what came.
    """

    output: float
    gradient: float
    error: float
    unit: float
    share: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """True if no error is larger than allowed; a NaN is."""
        return self.share <= 1.0


def gradients_of(out: Tensor, direction: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of ``sum(out * direction)`` for each input; {} under ``no_grad``."""
    if not torch.is_grad_enabled():
        return {}
    if not out.requires_grad:
        return {name: torch.zeros_like(x) for name, x in inputs.items()}
    leaves, weights = list(inputs.values()), direction.to(out.dtype)
    found = torch.autograd.grad(out, leaves, weights, allow_unused=True, materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


def judge(out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Outcome:
    exact = out.dtype == torch.float64
    limit, slope = (1.0, 1.0) if exact else (ALLOWED_OUTPUT, ALLOWED_GRADIENT)
    scale = max((largest(g) for g in truth.gradients.values()), default=0.0)
    error, unit = _measure(out, truth.out, truth.yardstick.get("out"), largest(truth.out))
    compared = [(_ratio(error, unit) / limit, ("output", out, truth.out, limit * unit))]
    for name, g in gradients.items():
        true = truth.gradients[name]
        off, allowed = _measure(g, true, truth.yardstick.get(name), scale)
        compared.append((_ratio(off, allowed) / slope, (f"gradient of {name}", g, true, slope * allowed)))
    gradient = slope * max((share for share, _ in compared[1:]), default=0.0, key=badness)
    share, worst = max(compared, key=lambda part: badness(part[0]))
    return Outcome(_ratio(error, unit), gradient, error, unit, share, _description(*worst))


def within(name: str, found: Tensor, true: Tensor, allowed: float | None = None) -> Outcome:
    """Compare a result with the truth by a bound on the error (None: 1e-12 of the largest number)."""
    allowed = EXACT * largest(true) if allowed is None else allowed
    error = _distance(found, true) if found.shape == true.shape else math.inf
    share = _ratio(error, allowed)
    return Outcome(share, 0.0, error, allowed, share, _description(name, found, true, allowed))


def holds(condition: bool | Tensor, where: str = "it does not hold") -> Outcome:
    share = 0.0 if condition else math.inf
    return Outcome(share, 0.0, share, 0.0, share, where)


def _description(name: str, found: Tensor, true: Tensor, allowed: float) -> str:
    """Of the number that is off most: what was expected, what came, the error allowed and found."""
    if found.shape != true.shape:
        return f"{name}: expected the shape {list(true.shape)}, came {list(found.shape)}"
    if not found.numel():
        return f"{name}: empty"
    came, wanted = (x.detach().to("cpu", torch.float64) for x in (found, true))
    off = (came - wanted).abs()
    index = torch.unravel_index(off.nan_to_num(math.inf).argmax(), off.shape)
    a, b, error = (float(x[index]) for x in (wanted, came, off))
    place = [int(i) for i in index]
    return f"{name}{place}: expected {a:.9g}, came {b:.9g}; error allowed {allowed:.3g}, found {error:.3g}"


def summation_bound(terms: int, magnitude: Magnitude, dtype: torch.dtype) -> Magnitude:
    """How far a sum of ``terms`` terms in ``dtype`` may be off in any order.

    ``n u / (1 - n u) sum |term|``, ``u = eps / 2``, where ``magnitude`` is the sum of absolute values.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.

    >>> summation_bound(1024, 1.0, torch.float32) == 2.0**-14 / (1 - 2.0**-14)
    True
    """
    share = terms * torch.finfo(dtype).eps / 2
    return magnitude * (share / (1 - share) if share < 1 else math.inf)


def _measure(found: Tensor, true: Tensor, yardstick: float | None, scale: float) -> tuple[float, float]:
    """The error of one tensor and its unit, which in float64 is a share of ``scale``."""
    if found.shape != true.shape:
        return math.inf, 0.0
    if found.dtype == torch.float64:
        return _distance(found, true), EXACT * scale
    return _distance(found, true), max(torch.finfo(found.dtype).eps / 2 * largest(true), yardstick or 0.0)


def badness(ratio: float) -> float:
    """A NaN is worse than any number."""
    return math.inf if math.isnan(ratio) else ratio


def _ratio(error: float, unit: float) -> float:
    return error / unit if unit > 0 else math.inf if error else 0.0


def _distance(found: Tensor, true: Tensor) -> float:
    return largest(found.detach().to("cpu", torch.float64) - true.detach().to("cpu"))


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
