"""Values that stand for many: :class:`Interval` for ``dst`` and ``src``, :class:`TriState` the answer.

What torch's operators do to them is in ``intervals.arithmetic``, which fills :data:`OPERATORS`. All bounds
are int64 tensors ``[K]``, one entry for each of K boxes; they include both ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from gnn_attention._support.shapes import Tensor

# by the name of torch's function or method
OPERATORS: dict[str, Callable[..., Any]] = {}
# what a value depends on, as bits: dst alone, src alone, dst - src alone
DST, SRC, DIFFERENCE, ANYTHING = 1, 2, 4, 8
# int64 wraps round at twice this; no value goes further, so no sum or difference of two wraps unseen
MAX_MAGNITUDE = 2**62
# the product of a slope and one of 2^32 tokens stays below MAX_MAGNITUDE
MAX_SLOPE = 2**29


class UnsupportedError(TypeError):
    """The rule uses an operator for which there is no arithmetic of ranges."""


class UnboundedError(UnsupportedError):
    """An operator has no bounds for these operands, though it may have for others."""


class Box(NamedTuple):
    """K boxes of receivers and senders, ends included."""

    dst_low: Tensor
    dst_high: Tensor
    src_low: Tensor
    src_high: Tensor


class Value:
    """What both kinds share: no control flow may look into them; torch's functions come from a table."""

    def __bool__(self) -> NoReturn:
        raise UnsupportedError("a rule must not branch on its tokens")

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = "Tensor.where" if func == torch.Tensor.where else func.__name__
        return _operator(name)(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_operator("Tensor.where" if name == "where" else name), self)


def _operator(name: str) -> Callable[..., Any]:
    if name not in OPERATORS:
        raise UnsupportedError(f"{name} has no arithmetic of ranges")
    return OPERATORS[name]


@dataclass(frozen=True, eq=False)
class Interval(Value):
    """The integers ``low .. high`` that an expression can take in each box.

    ``slope`` (p, q): the expression is exactly ``p dst + q src + offset``; None where it is not of this form.
    ``axes``: bits of what it depends on, 0 where it is constant. ``dtype``: in which torch would compute, and
    beyond which it would wrap round; None for a number that takes the other operand's.
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
        least, most = limits(self.dtype)
        if len(self.low) and not least <= int(self.low.min()) <= int(self.high.max()) <= most:
            raise UnboundedError(f"values beyond the range of {self.dtype} wrap round")

    def to(self, *where: Any, **how: Any) -> Interval:
        """Intervals have no device, but a dtype of integers, wide enough for all of them."""
        dtype = _dtype_of(where, how)
        return self if dtype in (None, self.dtype) else replace(self, dtype=dtype)


@dataclass(frozen=True, eq=False)
class TriState(Value):
    """``some``: the box may hold an edge; ``every``: all pairs are edges; ``axes``: as in Interval."""

    box: Box
    some: Tensor
    every: Tensor
    axes: Tensor

    device = torch.device("cpu")
    dtype = torch.bool

    def to(self, *where: Any, **how: Any) -> TriState:
        """A TriState has no device and no dtype but bool."""
        if _dtype_of(where, how) not in (None, torch.bool):
            raise UnsupportedError("a bool is no number")
        return self


@dataclass(frozen=True, eq=False)
class Unknown(Value):
    """Any number or truth value: the result where an operator has no bounds for these operands."""

    box: Box

    device = torch.device("cpu")
    dtype = None

    def to(self, *where: Any, **how: Any) -> Unknown:
        return self


def unknown(box: Box) -> TriState:
    """The answer that is always allowed: there may be an edge, and not all pairs may be edges."""
    yes = torch.ones_like(box.dst_low, dtype=torch.bool)
    return TriState(box, yes, ~yes, torch.full_like(box.dst_low, ANYTHING, dtype=torch.uint8))


def _dtype_of(where: tuple[Any, ...], how: dict[str, Any]) -> torch.dtype | None:
    found = [x.dtype if isinstance(x, (torch.Tensor, Value)) else x for x in (*where, *how.values())]
    return next((x for x in found if isinstance(x, torch.dtype)), None)


def limits(dtype: torch.dtype | None) -> tuple[int, int]:
    try:
        info = torch.iinfo(dtype or torch.int64)
    except TypeError:
        raise UnsupportedError(f"{dtype} is no dtype of integers") from None
    return max(info.min, -MAX_MAGNITUDE), min(info.max, MAX_MAGNITUDE)


def affine(box: Box, slope: tuple[int, int], offset: Any, dtype: Any = torch.int64) -> Interval:
    """``p dst + q src + offset`` for the slope (p, q), exactly; the offset may differ from box to box."""
    p, q = slope
    if max(abs(p), abs(q)) > MAX_SLOPE or (isinstance(offset, int) and abs(offset) > MAX_MAGNITUDE):
        raise UnboundedError("numbers so large that int64 would wrap round")
    dst = (box.dst_low, box.dst_high) if p >= 0 else (box.dst_high, box.dst_low)
    src = (box.src_low, box.src_high) if q >= 0 else (box.src_high, box.src_low)
    low, high = (p * dst[end] + q * src[end] + offset for end in (0, 1))
    axes = DIFFERENCE if p == -q != 0 else DST * (p != 0) + SRC * (q != 0)
    axes_of_all = torch.full_like(low, axes, dtype=torch.uint8)
    return Interval(box, low, high, axes_of_all.masked_fill(low == high, 0), slope, offset, dtype)


def interval(box: Box, low: Tensor, high: Tensor, axes: Tensor, dtype: Any = torch.int64) -> Interval:
    return Interval(box, low, high, axes.masked_fill(low == high, 0), dtype=dtype)


def tristate(box: Box, some: Tensor, every: Tensor, axes: Tensor) -> TriState:
    """The answer, which depends on nothing where it is settled."""
    return TriState(box, some, every, axes.masked_fill(every | ~some, 0))


def box_of(*values: Any) -> Any:
    return next(value.box for value in values if isinstance(value, Value))


def scalar(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, (bool, int)):
        return value
    raise UnsupportedError(f"a rule's constants are integers and bools, not {type(value).__name__}")


def as_interval(box: Box, value: Any) -> Interval:
    """An operand as an interval: a Python number or a tensor of one element is a constant."""
    if isinstance(value, TriState):
        raise UnsupportedError("a bool is no number")
    return value if isinstance(value, Interval) else affine(box, (0, 0), int(scalar(value)), None)


def as_tristate(box: Box, value: Any) -> TriState:
    """An operand as an answer: a bool, or a tensor of one, holds in all of a box."""
    if isinstance(value, (TriState, Unknown)):
        return value if isinstance(value, TriState) else unknown(box)
    if isinstance(value, Interval) or not isinstance(value := scalar(value), bool):
        raise UnsupportedError("a number is no bool")
    every = torch.full_like(box.dst_low, value, dtype=torch.bool)
    return TriState(box, every, every, torch.zeros_like(box.dst_low, dtype=torch.uint8))
