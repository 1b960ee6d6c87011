"""Checks of arguments: an error is one sentence with the argument, what came and what is expected."""

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

T = TypeVar("T")


def quote(value: object, longest: int = 60) -> str:
    """A value in a message: its repr on one line, cut at ``longest``; of a tensor dtype and shape.

    >>> quote("window"), quote(list(range(1000)), 20)
    ("'window'", '[0, 1, 2, 3, 4, 5...')
    """
    if getattr(value, "is_nested", False):
        return f"a nested {type(value).__name__}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {type(value).__name__} of {value.dtype} and shape {list(value.shape)}"
    text = repr(value)
    text = text if isinstance(value, str) else " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def describe_type(value: object) -> str:
    return f"{quote(value)} of type {type(value).__name__}"


def size(name: str, value: object, minimum: int = 0) -> int:
    """``value`` as an int of at least ``minimum``, else TypeError or ValueError."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got the bool {value}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {describe_type(value)}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def position(name: str, value: object) -> int:
    return size(name, value, -(2**63))


def index(name: str, value: object, count: int) -> int:
    """``value`` as an int in ``0 .. count - 1``; TypeError or ValueError as :func:`size`, else IndexError."""
    number = size(name, value)
    if number >= count:
        raise IndexError(f"{name} must be in 0 .. {count - 1}, got {number}")
    return number


def check_order(name: str, values: object) -> None:
    """TypeError for a set or dict where the order of the values counts."""
    # The nodes of a networkx graph are a mapping too, but name themselves in their order.
    is_dict = isinstance(values, Mapping) and not isinstance(values, AbstractSet)
    if is_dict or isinstance(values, (set, frozenset)):
        reason = "the order counts, and this has none of its own"
        raise TypeError(f"{name} must be a list in its order, got {describe_type(values)}: {reason}")


def sizes(
    name: str, values: Any, minimum: int = 0, any_order: bool = False, wanted: str = "sizes"
) -> list[int]:
    """``values`` as a list of ints of at least ``minimum``, else TypeError or ValueError.

    A set is taken where ``any_order`` of the values means the same. ``wanted`` says what they are.
    """
    if not any_order:
        check_order(name, values)
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        got = quote(values)
        raise TypeError(f"{name} must be a list of {wanted}, got {got}; for a single one give [{got}]")
    return [size(f"each of {name}", value, minimum) for value in numbers]


def integers(name: str, values: object, wanted: str, any_order: bool = False) -> list[int]:
    """``values`` as a list of ints of any sign, as :func:`sizes` reads those of at least 0."""
    return sizes(name, values, -(2**63), any_order, wanted)


def labels(name: str, values: object, count: int, nodes: str) -> list[Any]:
    """A label for each node, from a list in their order."""
    check_order(name, values)
    if not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be a list of {count} labels in their order, got {describe_type(values)}"
        )
    names = list(values)
    if len(names) != count:
        raise ValueError(f"{name} must hold a name for each of the {nodes}, got {len(names)}")
    return names


def number(name: str, value: object, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {describe_type(value)}")
    if not abs(value) < math.inf:
        raise ValueError(f"{name} must be finite, got {quote(value)}")
    if positive and value <= 0:
        raise ValueError(f"{name} must be positive, got {quote(value)}")
    return float(value)


def probability(name: str, value: float, certain: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (0.0 <= value < 1.0 or (certain and value == 1.0)):
        end = "]" if certain else ")"
        raise ValueError(f"{name} must be a probability in [0, 1{end}, got {quote(value)}")
    return float(value)


def instance(name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {describe_type(value)}")
    return value


def takes(name: str, function: Callable[..., Any], *words: str) -> None:
    """TypeError unless ``function`` takes these positional arguments, where it has a signature."""
    if not callable(function):
        raise TypeError(f"{name} must be a function ({', '.join(words)}), got {describe_type(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*words)
    except TypeError:
        parameters = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        got = f"a {type(function).__name__} of ({parameters})"
        raise TypeError(f"{name} must take ({', '.join(words)}), got {got}") from None


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    words = list(allowed)
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {quote(value)}")
    return str(value)
