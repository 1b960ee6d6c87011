"""What all builders do with their arguments: check numbers and flags, and name the graph after the call."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ParamSpec

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph

P = ParamSpec("P")
Builder = Callable[P, TokenGraph]


def builder(**least: int) -> Callable[[Builder[P]], Builder[P]]:
    """Check the whole numbers and flags that a builder takes, and name its graph after the call.

    A parameter annotated ``int`` takes an integer of at least ``least[parameter]``, 0 if that is not given.
    The name is the call as Python text without options that are the default, ``band(8, 2, 1, dilation=2)``;
    it has only the shape of a tensor and the length of a list of more than 8: ``documents([50 lengths])``.
    """

    def decorate(build: Builder[P]) -> Builder[P]:
        signature = inspect.signature(build, eval_str=True)

        @not_compiled
        @functools.wraps(build)
        def build_checked(*args: P.args, **options: P.kwargs) -> TokenGraph:
            try:
                call = signature.bind(*args, **options)
            except TypeError:
                # Python's own message names the function.
                return build(*args, **options)
            for word, value in call.arguments.items():
                call.arguments[word] = _argument(signature.parameters[word], value, least.get(word, 0))
            return replace(build(*call.args, **call.kwargs), name=f"{build.__name__}({_arguments(call)})")

        return build_checked

    return decorate


def _argument(parameter: inspect.Parameter, value: Any, least: int) -> Any:
    """The argument that a builder gets: an int for a whole number, a list for an iterator."""
    if parameter.annotation is int or (parameter.annotation == int | None and value is not None):
        return checks.size(parameter.name, value, least)
    if parameter.annotation is bool:
        return checks.instance(parameter.name, value, bool)
    return list(value) if isinstance(value, Iterator) else value


def _arguments(call: inspect.BoundArguments) -> str:
    """The arguments of a call as text, without options that are the default."""
    words = []
    for word, value in call.arguments.items():
        default, shown = call.signature.parameters[word].default, _format_value(word, value)
        if default is inspect.Parameter.empty:
            words.append(shown)
        elif shown != repr(default):
            words.append(f"{word}={shown}")
    return ", ".join(words)


def _format_value(word: str, value: Any) -> str:
    if isinstance(value, TokenGraph):
        return value.name
    if isinstance(value, Tensor) and value.dim() != 1:
        return f"{list(value.shape)} {word}"
    if isinstance(value, str) or not isinstance(value, Iterable):
        return repr(value)
    entries = value.tolist() if hasattr(value, "tolist") else value
    entries = entries if isinstance(entries, tuple) else list(entries)
    return str(entries) if len(entries) <= 8 else f"[{len(entries)} {word}]"
