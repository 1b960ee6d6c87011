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
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend

ALLOWED_OUTPUT, ALLOWED_GRADIENT = 2.0, 3.0
EXACT = 1e-12  # of the largest number: what float64 is allowed

Key = TypeVar("Key", bound=Hashable)
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


def results_by_name(attempt: Attempt) -> dict[str, Tensor]:
    """The output as "out", and the gradients by the names of their inputs."""
    out, gradients = attempt
    return {"out": out, **gradients}


def worst_errors(
    attempts: Iterable[Attempt], out: Tensor, gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """The largest error of each result over several attempts at the truth ``out``, ``gradients``."""
    true = results_by_name((out, gradients))
    results = (item for attempt in attempts for item in results_by_name(attempt).items())
    return largest_errors((name, x, true[name]) for name, x in results)


def largest_errors(compared: Iterable[tuple[Key, Tensor, Tensor]]) -> dict[Key, float]:
    """The largest error of each key over all triples (key, result, truth); NaN stays NaN.

    Errors are computed in float64 on the device of the results and copied to the host together, at the end:
    each copy would wait for all kernels before it.

    >>> zero = torch.zeros(2)
    >>> largest_errors([("out", zero + 1, zero), ("out", zero - 3, zero), ("q", zero, zero)])
    {'out': 3.0, 'q': 0.0}
    """
    worst: dict[Key, Tensor] = {}
    for key, result, true in compared:
        error = _largest_difference(result, true)
        worst[key] = torch.maximum(worst[key], error) if key in worst else error
    return to_floats(worst)


def to_floats(scalars: Mapping[Key, Tensor]) -> dict[Key, float]:
    """Tensors of one number as floats, by one copy from their device."""
    if not scalars:
        return {}
    return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))


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
    """Compare an output and its gradients with the truth by the rule of this module."""
    exact = out.dtype == torch.float64
    results, true = results_by_name((out, gradients)), results_by_name((truth.out, truth.gradients))
    limits = dict.fromkeys(results, 1.0 if exact else ALLOWED_GRADIENT)
    limits["out"] = 1.0 if exact else ALLOWED_OUTPUT
    errors, sizes = _errors_and_sizes(results, true)
    scale = max((size for name, size in sizes.items() if name != "out"), default=0.0)
    units = {
        name: _unit(x, sizes[name], truth.yardstick.get(name), sizes["out"] if name == "out" else scale)
        for name, x in results.items()
    }
    shares = {name: _ratio(errors[name], units[name]) / limits[name] for name in results}
    worst = max(shares, key=lambda name: badness(shares[name]))
    gradient = max((shares[name] * limits[name] for name in gradients), default=0.0, key=badness)
    where = ""
    if not shares[worst] <= 1.0:
        title = "output" if worst == "out" else f"gradient of {worst}"
        where = _description(title, results[worst], true[worst], limits[worst] * units[worst])
    output = _ratio(errors["out"], units["out"])
    return Outcome(output, gradient, errors["out"], units["out"], shares[worst], where)


def _errors_and_sizes(
    results: Mapping[str, Tensor], true: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """The error of each result, inf where its shape is wrong, and the largest number of each truth."""
    scalars: dict[tuple[str, str], Tensor] = {}
    device = _device_of_errors(results["out"])
    for name, x in true.items():
        scalars["size", name] = _largest(x).to(device, torch.float64, non_blocking=True)
    for name, x in results.items():
        if x.shape == true[name].shape:
            scalars["error", name] = _largest_difference(x, true[name])
    floats = to_floats(scalars)
    errors = {name: floats.get(("error", name), math.inf) for name in results}
    return errors, {name: floats["size", name] for name in true}


def _unit(result: Tensor, size: float, yardstick: float | None, scale: float) -> float:
    """What an error is measured in: the yardstick, or a rounding; in float64 a share of ``scale``."""
    if result.dtype == torch.float64:
        return EXACT * scale
    return max(torch.finfo(result.dtype).eps / 2 * size, yardstick or 0.0)


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


def badness(ratio: float) -> float:
    """A NaN is worse than any number."""
    return math.inf if math.isnan(ratio) else ratio


def _ratio(error: float, unit: float) -> float:
    return error / unit if unit > 0 else math.inf if error else 0.0


def _distance(result: Tensor, true: Tensor) -> float:
    return float(_largest_difference(result, true))


def _largest_difference(result: Tensor, true: Tensor) -> Tensor:
    """In float64, on the device of the result."""
    device = _device_of_errors(result)
    wide = result.detach().to(device, torch.float64)
    return _largest(wide - _moved(true.detach(), device))


def _device_of_errors(result: Tensor) -> torch.device:
    """That of the result, or the CPU where the device has no float64."""
    return torch.device("cpu") if result.device.type == "mps" else result.device


def _moved(x: Tensor, device: torch.device) -> Tensor:
    # a copy to a GPU need not wait for the kernels before it; one to the host must
    return x.to(device, non_blocking=device.type == "cuda")


def _largest(x: Tensor) -> Tensor:
    return x.detach().abs().amax() if x.numel() else x.new_zeros(())


def largest(x: Tensor) -> float:
    return float(_largest(x))
