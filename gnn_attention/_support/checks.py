"""Argument checks; each error names the argument, what it must be and what was given."""

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

T = TypeVar("T")


def quote(value: object, max_length: int = 60) -> str:
    """Describe a value on one line of at most ``max_length`` characters, or a tensor by dtype and shape.

    >>> quote("window"), quote(list(range(1000)), 20)
    ("'window'", '[0, 1, 2, 3, 4, 5...')
    """
    if getattr(value, "is_nested", False):
        return f"a nested {type(value).__name__}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {type(value).__name__} of {value.dtype} and shape {list(value.shape)}"
    text = repr(value)
    text = text if isinstance(value, str) else " ".join(text.split())
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def describe_type(value: object) -> str:
    return f"{quote(value)} of type {type(value).__name__}"


def size(name: str, value: object, minimum: int = 0) -> int:
    """Return ``value`` as an int of at least ``minimum``, or raise TypeError or ValueError."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got the bool {value}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {describe_type(value)}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def integer(name: str, value: object) -> int:
    return size(name, value, -(2**63))


def index(name: str, value: object, length: int) -> int:
    """Return ``value`` as an int in ``0 .. length - 1``, or raise IndexError or an error of :func:`size`."""
    number = size(name, value)
    if number >= length:
        raise IndexError(f"{name} must be in 0 .. {length - 1}, got {number}")
    return number


def check_order(name: str, values: object) -> None:
    """Raise TypeError for a set or a dict, because the order of the values matters."""
    # The nodes of a networkx graph are a mapping and a set, but have a fixed order.
    is_dict = isinstance(values, Mapping) and not isinstance(values, AbstractSet)
    if is_dict or isinstance(values, (set, frozenset)):
        raise TypeError(f"{name} must be a list, because order matters, got {describe_type(values)}")


def sizes(
    name: str, values: Any, minimum: int = 0, any_order: bool = False, kind: str = "sizes"
) -> list[int]:
    """Return ``values`` as a list of ints of at least ``minimum``, or raise an error of :func:`size`.

    Sets are accepted if ``any_order`` is true. ``kind`` names the values in the error.
    """
    if not any_order:
        check_order(name, values)
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, str) or not isinstance(items, Iterable):
        quoted = quote(values)
        raise TypeError(f"{name} must be a list of {kind}, got {quoted}; for a single value pass [{quoted}]")
    return [size(f"each entry of {name}", value, minimum) for value in items]


def integers(name: str, values: object, kind: str, any_order: bool = False) -> list[int]:
    """Return ``values`` as a list of ints of any sign."""
    return sizes(name, values, -(2**63), any_order, kind)


def labels(name: str, values: object, count: int, kind: str) -> list[Any]:
    """Return ``values`` as a list of ``count`` labels; ``kind`` names the labelled nodes in the error."""
    check_order(name, values)
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {count} labels, got {describe_type(values)}")
    names = list(values)
    if len(names) != count:
        raise ValueError(f"{name} must hold {count} names, one for each of the {kind}, got {len(names)}")
    return names


def number(name: str, value: object, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {describe_type(value)}")
    if not abs(value) < math.inf:
        raise ValueError(f"{name} must be finite, got {quote(value)}")
    if positive and value <= 0:
        raise ValueError(f"{name} must be positive, got {quote(value)}")
    return float(value)


def probability(name: str, value: float, allow_one: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (0.0 <= value < 1.0 or (allow_one and value == 1.0)):
        interval = "[0, 1]" if allow_one else "[0, 1)"
        raise ValueError(f"{name} must be a probability in {interval}, got {quote(value)}")
    return float(value)


def instance(name: str, value: Any, cls: type[T]) -> T:
    if not isinstance(value, cls):
        raise TypeError(f"{name} must be a {cls.__name__}, got {describe_type(value)}")
    return value


def check_signature(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise TypeError if ``function`` cannot be called with these positional arguments."""
    expected = ", ".join(arguments)
    if not callable(function):
        raise TypeError(f"{name} must be a function ({expected}), got {describe_type(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        parameters = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        raise TypeError(
            f"{name} must take ({expected}), got a {type(function).__name__} of ({parameters})"
        ) from None


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    choices = list(allowed)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {quote(value)}")
    return str(value)
