"""Interval arithmetic: a rule evaluated on whole ranges of tokens at once.

With an ``Interval`` in the place of ``dst`` and ``src`` a rule returns a ``TriState``: can there be an edge
in this box of receivers and senders, are all its pairs edges, and on what does the answer still depend? What
torch's operators do to numbers, the functions here do to ranges, on the safe side: an edge that may exist is
never denied. Where an operator has no bounds for its operands its result is :class:`Unknown`. An operator
without a counterpart here raises :class:`UnsupportedError`.
"""

import operator
from collections.abc import Callable
from functools import partial, partialmethod, wraps
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.graph.intervals.table_bounds import extremes
from gnn_attention.graph.intervals.values import (
    MAX_MAGNITUDE,
    OPERATORS,
    Box,
    Interval,
    TriState,
    UnboundedError,
    Unknown,
    UnsupportedError,
    Value,
    affine,
    as_interval,
    as_tristate,
    box_of,
    interval,
    scalar,
    tristate,
)


def with_unknown_bounds(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, whose result is :class:`Unknown` where it has no bounds."""

    @wraps(function)
    def operator_of_values(*operands: Any, **options: Any) -> Any:
        values = [x for y in (*operands, *options.values()) for x in (y if type(y) is tuple else (y,))]
        if any(isinstance(value, Unknown) for value in values) and function not in (_and, _or):
            return Unknown(box_of(*values))
        try:
            return function(*operands, **options)
        except UnboundedError:
            return Unknown(box_of(*values))

    return operator_of_values


def token_ranges(box: Box) -> tuple[Interval, Interval]:
    return affine(box, (1, 0), 0), affine(box, (0, 1), 0)


def constant(box: Box, value: Tensor | int) -> Interval:
    """The same number in all of a box; a tensor ``[K]`` gives each box its own."""
    return affine(box, (0, 0), value)


def _numbers(*values: Any) -> tuple[Box, Interval, Interval, torch.dtype]:
    """Two operands as intervals, and the dtype that torch would compute in, which both fit."""
    box = box_of(*values)
    a, b = (as_interval(box, value) for value in values)
    dtype = torch.promote_types(a.dtype or b.dtype or torch.int64, b.dtype or a.dtype or torch.int64)
    return box, a.to(dtype), b.to(dtype), dtype


def _sum(box: Box, a: Interval, b: Interval, dtype: torch.dtype) -> Interval:
    if a.slope and b.slope:
        return affine(box, (a.slope[0] + b.slope[0], a.slope[1] + b.slope[1]), a.offset + b.offset, dtype)
    return interval(box, a.low + b.low, a.high + b.high, a.axes | b.axes, dtype)


def _minus(a: Interval, dtype: torch.dtype | None = None) -> Interval:
    dtype = dtype or a.dtype or torch.int64
    if a.slope:
        return affine(a.box, (-a.slope[0], -a.slope[1]), -a.offset, dtype)
    return interval(a.box, -a.high, -a.low, a.axes, dtype)


def _subtract(a: Any, b: Any, dtype: torch.dtype | None = None) -> Interval:
    box, a, b, common = _numbers(a, b)
    return _sum(box, a, _minus(b, torch.int64), dtype or common)


# the difference of compared numbers, which does not wrap round
_gap = partial(_subtract, dtype=torch.int64)


def _multiply(a: Any, b: Any) -> Interval:
    box, a, b, dtype = _numbers(a, b)
    if b.slope and isinstance(a.offset, int) and a.slope == (0, 0):
        a, b = b, a
    if a.slope and isinstance(b.offset, int) and b.slope == (0, 0):
        return affine(box, (a.slope[0] * b.offset, a.slope[1] * b.offset), a.offset * b.offset, dtype)
    if _magnitude(a) * _magnitude(b) > MAX_MAGNITUDE:
        raise UnboundedError("a product that may wrap round")
    return _hull(operator.mul, box, a, b, dtype)


def _magnitude(a: Interval) -> int:
    return int(torch.maximum(a.low.abs(), a.high.abs()).max()) if len(a.low) else 0


def _divide(a: Any, b: Any, rounding_mode: str | None = "floor") -> Interval:
    box, a, b, dtype = _numbers(a, b)
    _check_divisor(b, rounding_mode)
    return _hull(operator.floordiv, box, a, b, dtype)


def _remainder(a: Any, b: Any) -> Interval:
    box, a, b, dtype = _numbers(a, b)
    _check_divisor(b)
    # no multiple of b in between
    straight = (b.low == b.high) & (a.low // b.low == a.high // b.low)
    low = torch.where(straight, a.low % b.low, 0)
    high = torch.where(straight, a.high % b.low, b.high - 1)
    return interval(box, low, high, a.axes | b.axes, dtype)


def _check_divisor(divisor: Interval, rounding_mode: str | None = "floor") -> None:
    if rounding_mode != "floor":
        raise UnsupportedError("a quotient that is not rounded down")
    if not bool((divisor.low > 0).all()):
        raise UnboundedError("a division by a number that may not be positive")


def _hull(function: Callable[..., Tensor], box: Box, a: Interval, b: Interval, dtype: Any) -> Interval:
    """The range of a function that is monotonic in each operand: between its values at the corners."""
    corners = torch.stack([function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)])
    return interval(box, corners.amin(0), corners.amax(0), a.axes | b.axes, dtype)


def _absolute(a: Interval) -> Interval:
    low = torch.where(a.low > 0, a.low, torch.where(a.high < 0, -a.high, 0))
    return interval(a.box, low, torch.maximum(a.high, -a.low), a.axes, a.dtype)


def _extreme(pick: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Interval:
    box, a, b, dtype = _numbers(a, b)
    return interval(box, pick(a.low, b.low), pick(a.high, b.high), a.axes | b.axes, dtype)


def _clamp(a: Interval, min: Any = None, max: Any = None) -> Interval:
    a = a if min is None else _extreme(torch.maximum, a, min)
    return a if max is None else _extreme(torch.minimum, a, max)


def _exclusive_or(a: Any, b: Any) -> Any:
    """Of truth values, or of numbers from 0 on: known are the bits above the highest one that varies."""
    if not isinstance(a, Interval) and not isinstance(b, Interval):
        return _differ(a, b)
    box, a, b, dtype = _numbers(a, b)
    if bool((torch.minimum(a.low, b.low) < 0).any()):
        raise UnboundedError("bits of negative numbers")
    varying = (a.low ^ a.high) | (b.low ^ b.high)
    # every bit below the highest one that varies
    for shift in (1, 2, 4, 8, 16, 32):
        varying = varying | (varying >> shift)
    known = (a.low ^ b.low) & ~varying
    return interval(box, known, known | varying, a.axes | b.axes, dtype)


def _less(a: Any, b: Any) -> TriState:
    gap = _gap(a, b)
    return tristate(gap.box, gap.low < 0, gap.high < 0, gap.axes)


def _less_or_equal(a: Any, b: Any) -> TriState:
    gap = _gap(a, b)
    return tristate(gap.box, gap.low <= 0, gap.high <= 0, gap.axes)


def _equal(a: Any, b: Any) -> TriState:
    if isinstance(a, TriState) or isinstance(b, TriState):
        return _not(_differ(a, b))
    gap = _gap(a, b)
    return tristate(gap.box, (gap.low <= 0) & (gap.high >= 0), (gap.low == 0) & (gap.high == 0), gap.axes)


def _not(a: Any) -> TriState:
    a = as_tristate(box_of(a), a)
    return TriState(a.box, ~a.every, ~a.some, a.axes)


def _and(a: Any, b: Any) -> TriState:
    box = box_of(a, b)
    a, b = as_tristate(box, a), as_tristate(box, b)
    return tristate(box, a.some & b.some, a.every & b.every, a.axes | b.axes)


def _or(a: Any, b: Any) -> TriState:
    box = box_of(a, b)
    a, b = as_tristate(box, a), as_tristate(box, b)
    return tristate(box, a.some | b.some, a.every | b.every, a.axes | b.axes)


def _differ(a: Any, b: Any) -> TriState:
    box = box_of(a, b)
    a, b = as_tristate(box, a), as_tristate(box, b)
    settled = (a.every | ~a.some) & (b.every | ~b.some)
    return tristate(box, ~settled | (a.every != b.every), settled & (a.every != b.every), a.axes | b.axes)


def _where(condition: Any, a: Any, b: Any) -> Any:
    box = box_of(condition, a, b)
    condition = as_tristate(box, condition)
    if any(isinstance(x, TriState) or x is True or x is False for x in (a, b)):
        return _or(_and(condition, a), _and(_not(condition), b))
    _, a, b, dtype = _numbers(as_interval(box, a), b)
    # a where the condition holds for every pair, b where for none, else both
    low = torch.minimum(*(torch.where(state, a.low, b.low) for state in (condition.some, condition.every)))
    high = torch.maximum(*(torch.where(state, a.high, b.high) for state in (condition.some, condition.every)))
    return interval(box, low, high, condition.axes | a.axes | b.axes, dtype)


def _in_place(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """``a |= b``: like torch it changes the object itself; numbers changed in place are unsupported."""
    if not isinstance(a, TriState):
        raise UnsupportedError("a number changed in place")
    result = as_tristate(a.box, function(a, b))
    for name in ("some", "every", "axes"):
        object.__setattr__(a, name, getattr(result, name))
    return a


def _look_up(table: Any, index: Any) -> Interval | TriState:
    """``table[index]``: the lowest and highest entries over the range; only one index may be a range."""
    index = index if isinstance(index, tuple) else (index,)
    box = box_of(*index)
    integers = isinstance(table, torch.Tensor) and not table.is_floating_point()
    if not integers or table.dim() != len(index) or not table.numel():
        raise UnsupportedError("only tables of integers or bools, with an index for every axis")
    spans = [as_interval(box, i) for i in index]
    ranged = [i for i, span in enumerate(spans) if bool((span.low != span.high).any())] or [len(spans) - 1]
    if len(ranged) > 1:
        raise UnboundedError("a table looked up by more than one range")
    return _entries(table, spans, ranged[0])


def _entries(table: Tensor, spans: list[Interval], axis: int) -> Interval | TriState:
    box, lead, axes = spans[axis].box, torch.zeros_like(spans[axis].low), torch.zeros_like(spans[axis].axes)
    inside = torch.ones_like(lead, dtype=torch.bool)
    for i, (span, size) in enumerate(zip(spans, table.shape, strict=True)):
        axes = axes | span.axes
        if i != axis:
            lead, inside = lead * size + span.low, inside & (span.low >= 0) & (span.low < size)
    low, high = extremes(table, axis, torch.where(inside, lead, -1), spans[axis].low, spans[axis].high)
    if table.dtype == torch.bool:
        return tristate(box, high.bool(), low.bool(), axes)
    return interval(box, low.to(torch.int64), high.to(torch.int64), axes, table.dtype)


def _search_sorted(table: Any, a: Any, *, right: bool = False, **other: Any) -> Interval:
    if other or not isinstance(a, Interval):
        raise UnsupportedError("searchsorted of a range in a plain sorted table only")
    low, high = (torch.searchsorted(table, end.contiguous(), right=right) for end in (a.low, a.high))
    return interval(a.box, low, high, a.axes)


def _like(a: Any, value: Any, dtype: torch.dtype | None = None, **other: Any) -> Any:
    if (dtype or a.dtype) == torch.bool:
        return as_tristate(a.box, bool(value))
    return as_interval(a.box, value).to(dtype or a.dtype)


def _new(a: Any, value: bool, size: Any, dtype: Any = None, **other: Any) -> TriState:
    """``new_ones((), dtype=torch.bool)``: how torch's and Hugging Face's ``and_masks`` begin."""
    if size != () or dtype != torch.bool:
        raise UnsupportedError("only a single bool can be new")
    return as_tristate(a.box, value)


def _swap(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(b, a)


# Each operator with torch's names for it; the first is also Python's (`add`: `a + b` calls `__add__`).
_BINARY: dict[Callable[[Any, Any], Any], str] = {
    lambda a, b: _sum(*_numbers(a, b)): "add",
    _subtract: "sub subtract",
    _multiply: "mul multiply",
    _divide: "floordiv floor_divide",
    _remainder: "mod remainder",
    _and: "and bitwise_and logical_and",
    _or: "or bitwise_or logical_or",
    _exclusive_or: "xor bitwise_xor",
    lambda a, b: _divide(a, 1 << int(scalar(b))): "rshift bitwise_right_shift",
    lambda a, b: _multiply(a, 1 << int(scalar(b))): "lshift bitwise_left_shift",
}
_OTHERS: dict[Callable[..., Any], str] = {
    _less: "lt less",
    _less_or_equal: "le less_equal",
    _swap(_less): "gt greater",
    _swap(_less_or_equal): "ge greater_equal",
    _equal: "eq",
    lambda a, b: _not(_equal(a, b)): "ne not_equal",
    _minus: "neg negative",
    _absolute: "abs absolute",
    _not: "invert bitwise_not logical_not",
}
for _function, _names in (_BINARY | _OTHERS).items():
    _python = f"__{_names.split()[0]}__"
    OPERATORS |= dict.fromkeys((*_names.split(), _python), with_unknown_bounds(_function))
    setattr(Value, _python, with_unknown_bounds(_function))
for _function, _names in _BINARY.items():
    _first = _names.split()[0]
    OPERATORS[f"__r{_first}__"] = with_unknown_bounds(_swap(_function))
    setattr(Value, f"__r{_first}__", with_unknown_bounds(_swap(_function)))
    setattr(Value, f"__i{_first}__", partialmethod(partial(_in_place, _function)))

_MORE: dict[str, Callable[..., Any]] = {
    "long": lambda a: a.to(torch.int64),
    "int": lambda a: a.to(torch.int32),
    "bool": lambda a: a.to(torch.bool),
    "contiguous": lambda a: a,
    "rsub": _swap(_subtract),
    "div": partial(_divide, rounding_mode=None),
    "logical_xor": _differ,
    "minimum": partial(_extreme, torch.minimum),
    "maximum": partial(_extreme, torch.maximum),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda a, min: _clamp(a, min=min),
    "clamp_max": lambda a, max: _clamp(a, max=max),
    "where": _where,
    "Tensor.where": lambda a, condition, b: _where(condition, a, b),
    "__getitem__": _look_up,
    "searchsorted": _search_sorted,
    "full_like": lambda a, fill_value, **other: _like(a, fill_value, **other),
    "new_ones": lambda a, size, **other: _new(a, True, size, **other),
    "new_zeros": lambda a, size, **other: _new(a, False, size, **other),
    "zeros_like": lambda a, **other: _like(a, 0, **other),
    "ones_like": lambda a, **other: _like(a, 1, **other),
}
OPERATORS |= {name: with_unknown_bounds(function) for name, function in _MORE.items()}
