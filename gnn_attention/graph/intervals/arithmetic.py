"""Interval arithmetic: torch's operators on whole ranges of tokens.

A rule that is called with intervals for ``dst`` and ``src`` returns a ``TriState``. It says whether
a box of receivers and senders may hold an edge, whether all its pairs are edges, and what this
depends on. The operators never rule out an edge that may exist. An operator without bounds for its
operands returns :class:`Unknown`, and one that is not implemented raises :class:`UnsupportedError`.
"""

import operator
from collections.abc import Callable
from functools import partial, partialmethod, wraps
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.graph.intervals import values
from gnn_attention.graph.intervals.table_bounds import find_bounds
from gnn_attention.graph.intervals.values import Box, Interval, TriState, affine, find_box, interval, tristate


def with_unknown_bounds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator so that it returns :class:`Unknown` if it has no bounds for its operands."""

    @wraps(function)
    def guarded_function(*operands: Any, **options: Any) -> Any:
        leaves = [leaf for x in (*operands, *options.values()) for leaf in (x if type(x) is tuple else (x,))]
        if any(isinstance(leaf, values.Unknown) for leaf in leaves) and function not in (_and, _or):
            return values.Unknown(find_box(*leaves))
        try:
            return function(*operands, **options)
        except values.UnboundedError:
            return values.Unknown(find_box(*leaves))

    return guarded_function


def token_ranges(box: Box) -> tuple[Interval, Interval]:
    return affine(box, (1, 0), 0), affine(box, (0, 1), 0)


def constant(box: Box, value: Tensor | int) -> Interval:
    """Return the interval of a constant: one number for all boxes, or a tensor ``[K]``."""
    return affine(box, (0, 0), value)


def _as_intervals(*operands: Any) -> tuple[Box, Interval, Interval, torch.dtype]:
    """Convert two operands to intervals of the dtype in which torch would compute."""
    box = find_box(*operands)
    a, b = (values.as_interval(box, value) for value in operands)
    dtype = torch.promote_types(a.dtype or b.dtype or torch.int64, b.dtype or a.dtype or torch.int64)
    return box, a.to(dtype), b.to(dtype), dtype


def _sum(box: Box, a: Interval, b: Interval, dtype: torch.dtype) -> Interval:
    if a.slope and b.slope:
        return affine(box, (a.slope[0] + b.slope[0], a.slope[1] + b.slope[1]), a.offset + b.offset, dtype)
    return interval(box, a.low + b.low, a.high + b.high, a.axes | b.axes, dtype)


def _negate(a: Interval, dtype: torch.dtype | None = None) -> Interval:
    dtype = dtype or a.dtype or torch.int64
    if a.slope:
        return affine(a.box, (-a.slope[0], -a.slope[1]), -a.offset, dtype)
    return interval(a.box, -a.high, -a.low, a.axes, dtype)


def _subtract(a: Any, b: Any, dtype: torch.dtype | None = None) -> Interval:
    box, a, b, common_dtype = _as_intervals(a, b)
    return _sum(box, a, _negate(b, torch.int64), dtype or common_dtype)


# Numbers are compared by their difference in int64, which does not overflow.
_gap = partial(_subtract, dtype=torch.int64)


def _multiply(a: Any, b: Any) -> Interval:
    box, a, b, dtype = _as_intervals(a, b)
    if b.slope and isinstance(a.offset, int) and a.slope == (0, 0):
        a, b = b, a
    if a.slope and isinstance(b.offset, int) and b.slope == (0, 0):
        return affine(box, (a.slope[0] * b.offset, a.slope[1] * b.offset), a.offset * b.offset, dtype)
    if _magnitude(a) * _magnitude(b) > values.MAX_MAGNITUDE:
        raise values.UnboundedError("a product may overflow")
    return _hull(operator.mul, box, a, b, dtype)


def _magnitude(a: Interval) -> int:
    return int(torch.maximum(a.low.abs(), a.high.abs()).max()) if len(a.low) else 0


def _divide(a: Any, b: Any, rounding_mode: str | None = "floor") -> Interval:
    box, a, b, dtype = _as_intervals(a, b)
    _check_divisor(b, rounding_mode)
    return _hull(operator.floordiv, box, a, b, dtype)


def _remainder(a: Any, b: Any) -> Interval:
    box, a, b, dtype = _as_intervals(a, b)
    _check_divisor(b)
    # The remainder rises with a if no multiple of b lies between the bounds of a.
    is_rising = (b.low == b.high) & (a.low // b.low == a.high // b.low)
    low = torch.where(is_rising, a.low % b.low, 0)
    high = torch.where(is_rising, a.high % b.low, b.high - 1)
    return interval(box, low, high, a.axes | b.axes, dtype)


def _check_divisor(divisor: Interval, rounding_mode: str | None = "floor") -> None:
    if rounding_mode != "floor":
        raise values.UnsupportedError("a quotient must be rounded down")
    if not bool((divisor.low > 0).all()):
        raise values.UnboundedError("a divisor may be zero or negative")


def _hull(function: Callable[..., Tensor], box: Box, a: Interval, b: Interval, dtype: Any) -> Interval:
    """Return the range of a function that is monotonic in each operand, from all pairs of bounds."""
    corners = torch.stack([function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)])
    return interval(box, corners.amin(0), corners.amax(0), a.axes | b.axes, dtype)


def _absolute(a: Interval) -> Interval:
    low = torch.where(a.low > 0, a.low, torch.where(a.high < 0, -a.high, 0))
    return interval(a.box, low, torch.maximum(a.high, -a.low), a.axes, a.dtype)


def _apply_to_bounds(function: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Interval:
    box, a, b, dtype = _as_intervals(a, b)
    return interval(box, function(a.low, b.low), function(a.high, b.high), a.axes | b.axes, dtype)


def _clamp(a: Interval, min: Any = None, max: Any = None) -> Interval:
    a = a if min is None else _apply_to_bounds(torch.maximum, a, min)
    return a if max is None else _apply_to_bounds(torch.minimum, a, max)


def _exclusive_or(a: Any, b: Any) -> Any:
    """Return ``a ^ b`` for truth values or nonnegative numbers; fixed high bits stay exact."""
    if not isinstance(a, Interval) and not isinstance(b, Interval):
        return _not_equal_bools(a, b)
    box, a, b, dtype = _as_intervals(a, b)
    if bool((torch.minimum(a.low, b.low) < 0).any()):
        raise values.UnboundedError("a number may be negative")
    varying_bits = (a.low ^ a.high) | (b.low ^ b.high)
    # Set every bit below the highest one that varies.
    for shift in (1, 2, 4, 8, 16, 32):
        varying_bits = varying_bits | (varying_bits >> shift)
    fixed_bits = (a.low ^ b.low) & ~varying_bits
    return interval(box, fixed_bits, fixed_bits | varying_bits, a.axes | b.axes, dtype)


def _less(a: Any, b: Any) -> TriState:
    gap = _gap(a, b)
    return tristate(gap.box, gap.low < 0, gap.high < 0, gap.axes)


def _less_or_equal(a: Any, b: Any) -> TriState:
    gap = _gap(a, b)
    return tristate(gap.box, gap.low <= 0, gap.high <= 0, gap.axes)


def _equal(a: Any, b: Any) -> TriState:
    if isinstance(a, TriState) or isinstance(b, TriState):
        return _not(_not_equal_bools(a, b))
    gap = _gap(a, b)
    return tristate(gap.box, (gap.low <= 0) & (gap.high >= 0), (gap.low == 0) & (gap.high == 0), gap.axes)


def _not(a: Any) -> TriState:
    a = values.as_tristate(find_box(a), a)
    return TriState(a.box, ~a.all_true, ~a.any_true, a.axes)


def _and(a: Any, b: Any) -> TriState:
    box = find_box(a, b)
    a, b = values.as_tristate(box, a), values.as_tristate(box, b)
    return tristate(box, a.any_true & b.any_true, a.all_true & b.all_true, a.axes | b.axes)


def _or(a: Any, b: Any) -> TriState:
    box = find_box(a, b)
    a, b = values.as_tristate(box, a), values.as_tristate(box, b)
    return tristate(box, a.any_true | b.any_true, a.all_true | b.all_true, a.axes | b.axes)


def _not_equal_bools(a: Any, b: Any) -> TriState:
    box = find_box(a, b)
    a, b = values.as_tristate(box, a), values.as_tristate(box, b)
    is_certain = (a.all_true | ~a.any_true) & (b.all_true | ~b.any_true)
    is_different = a.all_true != b.all_true
    return tristate(box, ~is_certain | is_different, is_certain & is_different, a.axes | b.axes)


def _where(condition: Any, a: Any, b: Any) -> Any:
    box = find_box(condition, a, b)
    condition = values.as_tristate(box, condition)
    if any(isinstance(x, TriState) or x is True or x is False for x in (a, b)):
        return _or(_and(condition, a), _and(_not(condition), b))
    _, a, b, dtype = _as_intervals(values.as_interval(box, a), b)
    # The result is a if all pairs meet the condition, b if none does, and otherwise covers both.
    any_true, all_true = condition.any_true, condition.all_true
    low = torch.minimum(torch.where(any_true, a.low, b.low), torch.where(all_true, a.low, b.low))
    high = torch.maximum(torch.where(any_true, a.high, b.high), torch.where(all_true, a.high, b.high))
    return interval(box, low, high, condition.axes | a.axes | b.axes, dtype)


def _in_place(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Implement operators such as ``a |= b`` of truth values, which change ``a`` as in torch."""
    if not isinstance(a, TriState):
        raise values.UnsupportedError("a number must not be changed in place")
    result = values.as_tristate(a.box, function(a, b))
    for name in ("any_true", "all_true", "axes"):
        object.__setattr__(a, name, getattr(result, name))
    return a


def _look_up(table: Any, index: Any) -> Interval | TriState:
    """Return the range of ``table[index]``, where only one index may be a range."""
    index = index if isinstance(index, tuple) else (index,)
    box = find_box(*index)
    is_integer_table = isinstance(table, torch.Tensor) and not table.is_floating_point()
    if not is_integer_table or table.dim() != len(index) or not table.numel():
        raise values.UnsupportedError("a table must hold integers or bools and be indexed on every axis")
    spans = [values.as_interval(box, i) for i in index]
    range_axes = [i for i, span in enumerate(spans) if bool((span.low != span.high).any())]
    if len(range_axes) > 1:
        raise values.UnboundedError("more than one index of a table is a range")
    axis = range_axes[0] if range_axes else len(spans) - 1
    # The other indices are constant in each box. They are combined into one flat index.
    row, axes = torch.zeros_like(spans[axis].low), torch.zeros_like(spans[axis].axes)
    is_inside = torch.ones_like(row, dtype=torch.bool)
    for i, (span, size) in enumerate(zip(spans, table.shape, strict=True)):
        axes = axes | span.axes
        if i != axis:
            row = row * size + span.low
            is_inside = is_inside & (span.low >= 0) & (span.low < size)
    low, high = find_bounds(table, axis, torch.where(is_inside, row, -1), spans[axis].low, spans[axis].high)
    if table.dtype == torch.bool:
        return tristate(box, high.bool(), low.bool(), axes)
    return interval(box, low.to(torch.int64), high.to(torch.int64), axes, table.dtype)


def _search_sorted(table: Any, a: Any, *, right: bool = False, **options: Any) -> Interval:
    if options or not isinstance(a, Interval):
        raise values.UnsupportedError("searchsorted takes only a sorted table, a range and right")
    low, high = (torch.searchsorted(table, end.contiguous(), right=right) for end in (a.low, a.high))
    return interval(a.box, low, high, a.axes)


def _full_like(a: Any, value: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    if (dtype or a.dtype) == torch.bool:
        return values.as_tristate(a.box, bool(value))
    return values.as_interval(a.box, value).to(dtype or a.dtype)


def _make_bool(a: Any, value: bool, size: Any, dtype: Any = None, **options: Any) -> TriState:
    """Implement ``new_ones((), dtype=torch.bool)``, which torch's and transformers' ``and_masks`` call."""
    if size != () or dtype != torch.bool:
        raise values.UnsupportedError("new_ones and new_zeros must make a single bool")
    return values.as_tristate(a.box, value)


def _swap_operands(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(b, a)


# Each operator has these names in torch. The first is also Python's: `a + b` calls `__add__`.
_BINARY: dict[Callable[[Any, Any], Any], str] = {
    lambda a, b: _sum(*_as_intervals(a, b)): "add",
    _subtract: "sub subtract",
    _multiply: "mul multiply",
    _divide: "floordiv floor_divide",
    _remainder: "mod remainder",
    _and: "and bitwise_and logical_and",
    _or: "or bitwise_or logical_or",
    _exclusive_or: "xor bitwise_xor",
    lambda a, b: _divide(a, 1 << int(values.scalar(b))): "rshift bitwise_right_shift",
    lambda a, b: _multiply(a, 1 << int(values.scalar(b))): "lshift bitwise_left_shift",
}
_UNARY_AND_COMPARISONS: dict[Callable[..., Any], str] = {
    _less: "lt less",
    _less_or_equal: "le less_equal",
    _swap_operands(_less): "gt greater",
    _swap_operands(_less_or_equal): "ge greater_equal",
    _equal: "eq",
    lambda a, b: _not(_equal(a, b)): "ne not_equal",
    _negate: "neg negative",
    _absolute: "abs absolute",
    _not: "invert bitwise_not logical_not",
}
for _function, _names in (_BINARY | _UNARY_AND_COMPARISONS).items():
    _method = f"__{_names.split()[0]}__"
    values.OPERATORS |= dict.fromkeys((*_names.split(), _method), with_unknown_bounds(_function))
    setattr(values.Value, _method, with_unknown_bounds(_function))
for _function, _names in _BINARY.items():
    _name = _names.split()[0]
    values.OPERATORS[f"__r{_name}__"] = with_unknown_bounds(_swap_operands(_function))
    setattr(values.Value, f"__r{_name}__", with_unknown_bounds(_swap_operands(_function)))
    setattr(values.Value, f"__i{_name}__", partialmethod(partial(_in_place, _function)))

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "long": lambda a: a.to(torch.int64),
    "int": lambda a: a.to(torch.int32),
    "bool": lambda a: a.to(torch.bool),
    "contiguous": lambda a: a,
    "rsub": _swap_operands(_subtract),
    "div": partial(_divide, rounding_mode=None),
    "logical_xor": _not_equal_bools,
    "minimum": partial(_apply_to_bounds, torch.minimum),
    "maximum": partial(_apply_to_bounds, torch.maximum),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda a, min: _clamp(a, min=min),
    "clamp_max": lambda a, max: _clamp(a, max=max),
    "where": _where,
    "Tensor.where": lambda a, condition, b: _where(condition, a, b),
    "__getitem__": _look_up,
    "searchsorted": _search_sorted,
    "full_like": lambda a, fill_value, **options: _full_like(a, fill_value, **options),
    "new_ones": lambda a, size, **options: _make_bool(a, True, size, **options),
    "new_zeros": lambda a, size, **options: _make_bool(a, False, size, **options),
    "zeros_like": lambda a, **options: _full_like(a, 0, **options),
    "ones_like": lambda a, **options: _full_like(a, 1, **options),
}
values.OPERATORS |= {name: with_unknown_bounds(function) for name, function in _FUNCTIONS.items()}
