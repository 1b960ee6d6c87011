"""Check derivatives that a program computes, by a second computation or by central differences."""

from collections.abc import Callable

from gnn_attention._support.shapes import Tensor
from gnn_attention.verify import measure


def check_exact(name: str, result: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two float64 results; ArithmeticError if the rule forbids it.

    The rule is that of :mod:`gnn_attention.verify.measure`.
    """
    outcome = measure.judge(result, {}, measure.Truth(expected, {}, {}))
    if not outcome.passed:
        raise ArithmeticError(f"{name}: {outcome.where}")
    return measure.max_abs(result - expected)


def check_derivative(
    name: str, result: Tensor, function: Callable[[float], Tensor], step: float = 1e-3
) -> float:
    """Compare ``result`` with the derivative of ``function`` at 0 by central differences in float64.

    The error of a central difference is proportional to ``step ** 2``, up to higher powers. So with half
    the step it is a third of the difference of both. ArithmeticError if the result is further away than
    the whole difference; otherwise the function returns the largest distance.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> check_derivative("exp", x.exp(), lambda h: (x + h).exp()) < 1e-6
    True
    """
    coarse, fine = ((function(h) - function(-h)) / (2 * h) for h in (step, step / 2))
    error, allowed = measure.max_abs(result - fine), measure.max_abs(fine - coarse)
    if not error <= allowed:
        raise ArithmeticError(f"{name}: error allowed {allowed:.3g}, measured {error:.3g}")
    return error
