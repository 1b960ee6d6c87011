"""Tokens on a grid, in row-major order: boxes of coordinates as a rule, and arguments for each axis."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor

Value = TypeVar("Value")
# for each coordinate, the first and the last that it attends to
Interval = tuple[Int[Tensor, " _"], Int[Tensor, " _"]]


class Axis(NamedTuple):
    """An axis of a grid: a coordinate is ``token // place % size``, and attends to ``span``, by ``step``."""

    place: int
    size: int
    span: Interval
    step: int = 1


def in_box(box: tuple[Axis, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """The rule of a box: along every axis the sender stands in the receiver's span."""
    edge = (dst >= 0) & (src >= 0)
    for place, size, (first, last), step in box:
        own, other = dst // place % size, src // place % size
        edge = edge & (first.to(dst.device)[own] <= other) & (other <= last.to(dst.device)[own])
        if step > 1:
            edge = edge & ((own - other) % step == 0)
    return edge


def places(sizes: Sequence[int]) -> list[int]:
    """How many tokens lie between neighbours along each axis, in row-major order."""
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def shape_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The checked sizes of a grid: one axis at least, one token at least along each."""
    if not isinstance(shape, Iterable):
        got = checks.quoted(shape)
        raise TypeError(f"shape must be a sequence of sizes, got {got}; a line of tokens is ({got},)")
    checks.check_order("shape", shape)
    sizes = tuple(checks.size("each of shape", size, 1) for size in shape)
    if not sizes:
        raise ValueError("shape must have at least one axis, got ()")
    return sizes


def per_axis(name: str, value: Any, sizes: Sequence[int], minimum: int | None = 1) -> tuple[int, ...]:
    """One value for each axis, the same for all where a single one was given; flags for no minimum."""
    if not isinstance(value, Iterable):
        return (_checked(name, value, minimum),) * len(sizes)
    checks.check_order(name, value)
    values = tuple(_checked(f"each of {name}", each, minimum) for each in value)
    if len(values) != len(sizes):
        wanted = f"one value or {len(sizes)}, one for each axis of {tuple(sizes)}"
        raise ValueError(f"{name} must be {wanted}, got {values}")
    return values


def _checked(name: str, value: Any, minimum: int | None) -> int:
    if minimum is not None:
        return checks.size(name, value, minimum)
    return checks.instance(name, value, bool)


def shown(values: tuple[Value, ...]) -> Value | tuple[Value, ...]:
    """The one value that all axes share, else all of them."""
    return values[0] if len(set(values)) == 1 else values
