"""The values of interval arithmetic: :class:`Interval` for tokens, :class:`TriState` for answers.

``intervals.arithmetic`` implements torch's operators for these values, and fills :data:`OPERATORS`.
All bounds are inclusive. They are int64 tensors ``[K]``, with one entry for each of K boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from gnn_attention._support.shapes import Tensor

# The name of torch's function or method -> its implementation
OPERATORS: dict[str, Callable[..., Any]] = {}
# These bits say what a value depends on: only dst, only src, only dst - src, or anything else.
DST, SRC, DIFFERENCE, ANYTHING = 1, 2, 4, 8
# No value may be larger, so that an overflow of the sum of two values is detected.
MAX_MAGNITUDE = 2**62
# The product of a slope and a position below 2^32 stays below MAX_MAGNITUDE.
MAX_SLOPE = 2**29


class UnsupportedError(TypeError):
    """The rule uses an operator that cannot be evaluated on ranges."""


class UnboundedError(UnsupportedError):
    """An operator has no bounds for these operands, but may have bounds for others."""


class Box(NamedTuple):
    """K boxes of receivers and senders, with inclusive bounds."""

    dst_low: Tensor
    dst_high: Tensor
    src_low: Tensor
    src_high: Tensor


class Value:
    """Base class of values. Calls of torch's functions and methods are looked up in OPERATORS."""

    def __bool__(self) -> NoReturn:
        raise UnsupportedError("a rule must not branch on its tokens")

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = "Tensor.where" if func == torch.Tensor.where else func.__name__
        return _find_operator(name)(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_find_operator("Tensor.where" if name == "where" else name), self)


def _find_operator(name: str) -> Callable[..., Any]:
    if name not in OPERATORS:
        raise UnsupportedError(f"{name} cannot be evaluated on ranges")
    return OPERATORS[name]


@dataclass(frozen=True, eq=False)
class Interval(Value):
    """Inclusive bounds ``low .. high`` of an integer expression in each box.

    With ``slope = (p, q)`` the expression is exactly ``p dst + q src + offset``; otherwise the
    slope is None. The bits of ``axes`` say what the expression depends on, 0 for a constant.
    ``dtype`` is the dtype of torch's result, which must not overflow, or None for a number without
    a dtype.
    """

    box: Box
    low: Tensor
    high: Tensor
    axes: Tensor
    slope: tuple[int, int] | None = None
    offset: Any = 0
    dtype: torch.dtype | None = torch.int64

    device = torch.device("cpu")

    def __post_init__(self) -> None:
        lower, upper = dtype_limits(self.dtype)
        if len(self.low) and not lower <= int(self.low.min()) <= int(self.high.max()) <= upper:
            raise UnboundedError(f"values may overflow {self.dtype}")

    def to(self, *args: Any, **kwargs: Any) -> Interval:
        """Change the dtype; a device is ignored."""
        dtype = _find_dtype(args, kwargs)
        return self if dtype in (None, self.dtype) else replace(self, dtype=dtype)


@dataclass(frozen=True, eq=False)
class TriState(Value):
    """``any_true``: there may be an edge. ``all_true``: all pairs are edges. ``axes``: see Interval."""

    box: Box
    any_true: Tensor
    all_true: Tensor
    axes: Tensor

    device = torch.device("cpu")
    dtype = torch.bool

    def to(self, *args: Any, **kwargs: Any) -> TriState:
        if _find_dtype(args, kwargs) not in (None, torch.bool):
            raise UnsupportedError("a bool must not be used as a number")
        return self


@dataclass(frozen=True, eq=False)
class Unknown(Value):
    """Any number or truth value: the result of an operator that has no bounds for its operands."""

    box: Box

    device = torch.device("cpu")
    dtype = None

    def to(self, *args: Any, **kwargs: Any) -> Unknown:
        return self


def unknown(box: Box) -> TriState:
    """Return the answer that is always correct: there may be an edge, and some pair may not be an edge."""
    true = torch.ones_like(box.dst_low, dtype=torch.bool)
    return TriState(box, true, ~true, torch.full_like(box.dst_low, ANYTHING, dtype=torch.uint8))


def _find_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    candidates = [x.dtype if isinstance(x, (torch.Tensor, Value)) else x for x in (*args, *kwargs.values())]
    return next((x for x in candidates if isinstance(x, torch.dtype)), None)


def dtype_limits(dtype: torch.dtype | None) -> tuple[int, int]:
    try:
        info = torch.iinfo(dtype or torch.int64)
    except TypeError:
        raise UnsupportedError(f"{dtype} is not an integer dtype") from None
    return max(info.min, -MAX_MAGNITUDE), min(info.max, MAX_MAGNITUDE)


def affine(box: Box, slope: tuple[int, int], offset: Any, dtype: Any = torch.int64) -> Interval:
    """Return the interval of ``p dst + q src + offset`` for ``slope = (p, q)``; the offset may be ``[K]``."""
    p, q = slope
    if max(abs(p), abs(q)) > MAX_SLOPE or (isinstance(offset, int) and abs(offset) > MAX_MAGNITUDE):
        raise UnboundedError("values may overflow int64")
    dst = (box.dst_low, box.dst_high) if p >= 0 else (box.dst_high, box.dst_low)
    src = (box.src_low, box.src_high) if q >= 0 else (box.src_high, box.src_low)
    low, high = (p * dst[end] + q * src[end] + offset for end in (0, 1))
    axes = DIFFERENCE if p == -q != 0 else DST * (p != 0) + SRC * (q != 0)
    box_axes = torch.full_like(low, axes, dtype=torch.uint8).masked_fill(low == high, 0)
    return Interval(box, low, high, box_axes, slope, offset, dtype)


def interval(box: Box, low: Tensor, high: Tensor, axes: Tensor, dtype: Any = torch.int64) -> Interval:
    return Interval(box, low, high, axes.masked_fill(low == high, 0), dtype=dtype)


def tristate(box: Box, any_true: Tensor, all_true: Tensor, axes: Tensor) -> TriState:
    """Return the answer, with ``axes`` 0 where it is certain."""
    return TriState(box, any_true, all_true, axes.masked_fill(all_true | ~any_true, 0))


def find_box(*values: Any) -> Any:
    return next(value.box for value in values if isinstance(value, Value))


def scalar(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, (bool, int)):
        return value
    raise UnsupportedError(f"a rule's constants are integers and bools, not {type(value).__name__}")


def as_interval(box: Box, value: Any) -> Interval:
    """Convert an operand to an interval; a number or a tensor of one element is constant."""
    if isinstance(value, TriState):
        raise UnsupportedError("a bool must not be used as a number")
    return value if isinstance(value, Interval) else affine(box, (0, 0), int(scalar(value)), None)


def as_tristate(box: Box, value: Any) -> TriState:
    """Convert an operand to a TriState; a bool or a tensor of one element is the same for all pairs."""
    if isinstance(value, (TriState, Unknown)):
        return value if isinstance(value, TriState) else unknown(box)
    if isinstance(value, Interval) or not isinstance(value := scalar(value), bool):
        raise UnsupportedError("a number must not be used as a bool")
    is_true = torch.full_like(box.dst_low, value, dtype=torch.bool)
    return TriState(box, is_true, is_true, torch.zeros_like(box.dst_low, dtype=torch.uint8))
