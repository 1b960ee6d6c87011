"""Measure errors in units of a yardstick, and decide whether a check passes.

A check passes if ``error <= 2 * max(yardstick, rounding)``, with 3 instead of 2 for gradients. The
error is the largest absolute difference from the float64 truth. The yardstick is SDPA's largest
error in the same dtype, on the same problem and on slightly perturbed copies of it. The rounding is
``eps / 2`` times the largest entry of the truth. In float64, the limit is 1e-12 times the largest
output, or the largest gradient of any input, because the gradient of b_K is 0 in theory. The rule
follows FlashAttention's tests, which allow twice the error of a low-precision computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend

MAX_OUTPUT_RATIO, MAX_GRADIENT_RATIO = 2.0, 3.0
FLOAT64_RTOL, NUM_PERTURBATIONS = 1e-12, 4
# Inputs are perturbed by up to this many eps, which changes the last bits of every product.
MAX_ROUNDINGS = 8
# A solution is an output and its gradients.
Inputs = Mapping[str, Tensor]
Solution = tuple[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Truth:
    """The output and gradients in float64, and the errors of SDPA in the dtype under test.

    ``yardstick`` holds these errors for "out" and every gradient; it is empty for float64. The larger errors
    of SDPA's fused kernel are the ``fused_yardstick``, for gradients of backends that recompute the weights.
    """

    out: Tensor
    gradients: Mapping[str, Tensor]
    yardstick: Mapping[str, float]
    fused_yardstick: Mapping[str, float] = field(default_factory=dict)

    def for_backend(self, backend: Backend) -> Truth:
        """Return the truth with the fused yardstick if the backend recomputes its weights."""
        fused = self.fused_yardstick if backend.recomputes else {}
        return replace(self, yardstick={**self.yardstick, **fused})

    def rows(self, receivers: Tensor, senders: Tensor) -> Truth:
        """Select receivers (axis 2 of the output) and senders (axis 2 of each gradient)."""
        gradients = {name: g[:, :, senders.to(g.device)] for name, g in self.gradients.items()}
        return replace(self, out=self.out[:, :, receivers.to(self.out.device)], gradients=gradients)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a comparison: ``share`` is the largest error divided by the limit.

    ``output`` and ``gradient`` leave out the limit's factor 2 or 3; ``where`` describes a failure.
    """

    share: float
    output: float | None = None
    gradient: float | None = None
    where: str = ""

    @property
    def passed(self) -> bool:
        """True if every error is within its limit, which NaN never is."""
        return self.share <= 1.0


def judge(out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Outcome:
    """Compare an output, and gradients if there are any, with the truth by the rule of this module."""
    results, expected = {"out": out, **gradients}, {"out": truth.out, **truth.gradients}
    max_gradient = max(map(max_abs, truth.gradients.values()), default=0.0)
    ratios, shares, limits = dict[str, float](), dict[str, float](), dict[str, float]()
    for name, x in results.items():
        factor = MAX_OUTPUT_RATIO if name == "out" else MAX_GRADIENT_RATIO
        rounding = torch.finfo(x.dtype).eps / 2 * max_abs(expected[name])
        unit = max(rounding, truth.yardstick.get(name, 0.0))
        if x.dtype == torch.float64:
            factor, unit = 1.0, FLOAT64_RTOL * (max_abs(truth.out) if name == "out" else max_gradient)
        error = _max_error(x, expected[name])
        ratios[name] = error / unit if unit > 0 else math.inf if error else 0.0
        shares[name], limits[name] = ratios[name] / factor, factor * unit
    worst_name = max(shares, key=lambda name: nan_to_inf(shares[name]))
    title = "output" if worst_name == "out" else f"gradient of {worst_name}"
    worst = title, results[worst_name], expected[worst_name], limits[worst_name]
    where = "" if shares[worst_name] <= 1.0 else _describe_error(*worst)
    gradient = max((ratios[name] for name in gradients), default=None, key=nan_to_inf)
    return Outcome(shares[worst_name], ratios["out"], gradient, where)


def judge_condition(condition: bool | Tensor, where: str = "it does not hold") -> Outcome:
    """Return an outcome that passes if the condition is true; no error is measured."""
    return Outcome(0.0) if condition else Outcome(math.inf, where=where)


def measure_errors(result: Solution, truth: Solution) -> dict[str, float]:
    """Return the largest error of the output, under the name "out", and of each gradient."""
    expected = {"out": truth[0], **truth[1]}
    return {name: _max_error(x, expected[name]) for name, x in {"out": result[0], **result[1]}.items()}


def merge_errors(errors: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest error under each name; NaN counts as larger than any number.

    >>> merge_errors([{"out": 3.0, "q": 0.0}, {"out": 0.0, "q": 1.0}])
    {'out': 3.0, 'q': 1.0}
    """
    max_errors: dict[str, float] = {}
    for row in errors:
        max_errors |= {name: max(x, max_errors.get(name, 0.0), key=nan_to_inf) for name, x in row.items()}
    return max_errors


def differentiate(out: Tensor, direction: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of ``sum(out * direction)`` for each input, or {} under ``no_grad``."""
    if not torch.is_grad_enabled():
        return {}
    if not out.requires_grad:
        return {name: torch.zeros_like(x) for name, x in inputs.items()}
    options = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(out, list(inputs.values()), direction.to(out.dtype), **options)
    return dict(zip(inputs, gradients, strict=True))


def nan_to_inf(ratio: float) -> float:
    """Return ``ratio`` as a sort key, with infinity instead of NaN."""
    return math.inf if math.isnan(ratio) else ratio


def max_abs(x: Tensor) -> float:
    """Return the largest absolute value, or 0 for an empty tensor."""
    return float(x.detach().abs().amax()) if x.numel() else 0.0


def _max_error(result: Tensor, expected: Tensor) -> float:
    if result.shape != expected.shape:
        return math.inf
    return max_abs(result.detach().to(expected.device, torch.float64) - expected.detach().double())


def _describe_error(name: str, result: Tensor, expected: Tensor, limit: float) -> str:
    if result.shape != expected.shape:
        return f"{name}: expected the shape {list(expected.shape)}, got {list(result.shape)}"
    result, expected = (x.detach().to("cpu", torch.float64) for x in (result, expected))
    error = (result - expected).abs()
    index = [int(i) for i in torch.unravel_index(error.nan_to_num(math.inf).argmax(), error.shape)]
    a, b, e = (float(x[tuple(index)]) for x in (expected, result, error))
    return f"{name}{index}: expected {a:.9g}, got {b:.9g}; error allowed {limit:.3g}, measured {e:.3g}"


@torch.enable_grad()
def widen_by_roundings(
    truth: Truth, formula: Callable[..., tuple[Tensor, ...]], leaves: Mapping[str, Tensor], direction: Tensor
) -> Truth:
    """Return ``truth`` with yardsticks at least as large as the effect of unavoidable roundings.

    SDPA's error may be exactly 0 by luck: for a gradient that is 0 in theory, it may subtract two
    equal sums. So each yardstick is at least as large as the change in the float64 truth when

    * every input is perturbed by up to one eps of float32, because sums are computed in float32;
    * ``delta = sum(grad_out * out)``, which is subtracted from a nearly equal ``grad_out . v``, is rounded to
      float32, or to the dtype in a kernel that recomputes the weights, because this reads the stored output
      (FlashAttention-2, arXiv 2307.08691, algorithm 2). If delta grows by e, the gradient of lse falls by e;
    * in such a kernel, the stored lse is rounded to float32. If lse grows by e, all weights of a row,
      and the gradients through them, are multiplied by ``exp(-e)``;
    * in a layer, the stored gradients of q, k and v are rounded to the dtype. The gradient of b_K is
      the sum of the keys' gradients, and it is 0 in theory.
    """
    float32_eps, dtype_eps = torch.finfo(torch.float32).eps, torch.finfo(direction.dtype).eps
    leaves = {name: x.detach().double() for name, x in leaves.items()}
    grad_out = direction.double()

    def perturb_solution(seed: int, delta_eps: float, lse_eps: float) -> Solution:
        rng = torch.Generator().manual_seed(seed)
        inputs = {name: x * (1 + float32_eps * _noise(x, rng)) for name, x in leaves.items()}
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
        out, z, lse, *qkv = formula(inputs)
        (grad_z,) = torch.autograd.grad(out, z, grad_out, retain_graph=True)
        delta_error = (grad_z.abs() * z.detach().abs()).sum(-1) * _noise(lse, rng) * delta_eps
        lse_error = grad_z * (lse.detach().abs() * _noise(lse, rng) * lse_eps).unsqueeze(-1)
        # Adding (x * error).sum() to the total adds the error to the gradient of x.
        total = (out * grad_out).sum() + (z * lse_error).sum() + (lse * delta_error).sum()
        gradients = torch.autograd.grad(total, qkv, retain_graph=True) if qkv else ()
        for x, gradient in zip(qkv, gradients, strict=True):
            total = total + (x * gradient * _noise(gradient, rng) * dtype_eps).sum()
        return out.detach(), differentiate(total, torch.ones_like(total), inputs)

    def measure_max_errors(delta_eps: float, lse_eps: float) -> dict[str, float]:
        solutions = (perturb_solution(i, delta_eps, lse_eps) for i in range(1, 1 + NUM_PERTURBATIONS))
        return merge_errors(measure_errors(solution, (truth.out, truth.gradients)) for solution in solutions)

    yardstick = merge_errors([truth.yardstick, measure_max_errors(float32_eps, 0.0)])
    fused_errors = measure_max_errors(dtype_eps, float32_eps)
    fused_yardstick = merge_errors([yardstick, truth.fused_yardstick, fused_errors])
    # A kernel that recomputes its weights rounds its output like any other kernel.
    del fused_yardstick["out"]
    return replace(truth, yardstick=yardstick, fused_yardstick=fused_yardstick)


def perturb(x: Tensor, seed: int) -> Tensor:
    """Perturb each entry of x by up to 8 eps of its dtype; ``seed=0`` returns x.

    >>> x = torch.ones(3, dtype=torch.bfloat16)
    >>> bool(0 < (perturb(x, 1) - x).abs().max() <= MAX_ROUNDINGS * torch.finfo(x.dtype).eps)
    True
    """
    if not seed:
        return x
    noise = MAX_ROUNDINGS * torch.finfo(x.dtype).eps * _noise(x, torch.Generator().manual_seed(seed))
    return (x.detach().double() * (1 + noise)).to(x.dtype)


def _noise(x: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a float64 tensor of the shape of x with entries in [-1, 1]."""
    return 2 * torch.rand(x.shape, generator=rng, dtype=torch.float64).to(x.device) - 1
