"""The decorator of all builders. It checks integers and flags, and names the graph after the call."""

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


def builder(**minimums: int) -> Callable[[Builder[P]], Builder[P]]:
    """Return a decorator that checks a builder's integers and flags and names its graph after the call.

    A parameter annotated ``int`` must be at least ``minimums[parameter]``, by default 0. The name is the call
    as Python text without options at their default, such as ``band(8, 2, 1, dilation=2)``. A tensor
    with two or more axes appears as its shape, and a list of over 8 values as ``[50 lengths]``.
    """

    def decorate(build: Builder[P]) -> Builder[P]:
        signature = inspect.signature(build, eval_str=True)

        @not_compiled
        @functools.wraps(build)
        def build_checked(*args: P.args, **kwargs: P.kwargs) -> TokenGraph:
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError:
                # The plain call raises Python's own error, which names the function.
                return build(*args, **kwargs)
            for name, value in call.arguments.items():
                annotation = signature.parameters[name].annotation
                if annotation is int or (annotation == int | None and value is not None):
                    call.arguments[name] = checks.size(name, value, minimums.get(name, 0))
                elif annotation is bool:
                    checks.instance(name, value, bool)
                elif isinstance(value, Iterator):
                    call.arguments[name] = list(value)
            graph = build(*call.args, **call.kwargs)
            return replace(graph, name=f"{build.__name__}({_format_arguments(call)})")

        return build_checked

    return decorate


def _format_arguments(call: inspect.BoundArguments) -> str:
    """Return the arguments of a call as Python text, without options at their default."""
    arguments = []
    for name, value in call.arguments.items():
        default = call.signature.parameters[name].default
        text = _format_value(name, value)
        if default is inspect.Parameter.empty:
            arguments.append(text)
        elif text != repr(default):
            arguments.append(f"{name}={text}")
    return ", ".join(arguments)


def _format_value(name: str, value: Any) -> str:
    if isinstance(value, TokenGraph):
        return value.name
    if isinstance(value, Tensor) and value.dim() != 1:
        return f"{list(value.shape)} {name}"
    if isinstance(value, str) or not isinstance(value, Iterable):
        return repr(value)
    entries = value.tolist() if hasattr(value, "tolist") else value
    entries = entries if isinstance(entries, tuple) else list(entries)
    return str(entries) if len(entries) <= 8 else f"[{len(entries)} {name}]"
