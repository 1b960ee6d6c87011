"""Graphs written as text: ``parse("window(64, 8) | sinks(64, 2)")``, the language in which graphs are named.

The text is read by Python's parser and then walked node by node against a list of what is allowed; nothing is ever handed
to ``eval``. An expression is made of

* calls of the builders of ``gnn_attention.patterns`` and the functions of ``gnn_attention.algebra``:
  ``disjoint_sum(window(8, 3), causal(5))``; data are ``tensor([[1, 2], [3, 4]])`` or, drawn at random, ``randn(64, 8, seed=0)``;
* arguments: numbers, strings, True, False, None, lists and tuples of these, by position or by name;
* operators on graphs: ``|  &  -  ^  ~  @  ** k``, and brackets;
* ``.T``, ``.rows(start, stop)`` and ``.select(batch, head)``; ``[k]`` of a builder that makes several graphs.

The length of the text, its depth, its numbers and the tokens of its graphs are limited. What draws, compares or lists (random
graphs, ``@``, ``closure``, ...) is estimated before it is done, so that a stranger's text is read or refused in about a second.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from operator import and_, matmul, or_, sub, xor
from typing import Any, NoReturn

import torch

from gnn_attention import algebra, patterns
from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.locks import ignored
from gnn_attention._support.shapes import Tensor
from gnn_attention.convert import _expression_budget, _expression_sizes
from gnn_attention.graph import TokenGraph

__all__ = ["FUNCTIONS", "LARGEST_NUMBER", "LONGEST_TEXT", "evaluate", "parameters", "parse", "randn", "sized", "tensor"]

LONGEST_TEXT = 10_000  # characters
DEEPEST = 64  # brackets and operators inside one another
LARGEST_NUMBER = 2**24  # the sum of all numbers: tokens, and everything that counts them
LARGEST_POWER = 1024
LISTING = {"ancestry", "closure", "edge_types", "k_hop", "quotient", "shortest_paths", "virtual_nodes"}  # they list edges

OPERATORS: Mapping[type[ast.operator], tuple[str, Callable[[TokenGraph, TokenGraph], TokenGraph]]] = {
    ast.BitOr: ("|", or_),
    ast.BitAnd: ("&", and_),
    ast.Sub: ("-", sub),
    ast.BitXor: ("^", xor),
    ast.MatMult: ("@", matmul),
}
METHODS = {"rows": "rows(start, stop)", "select": "select(batch, head)"}
ALLOWED = "allowed are calls of builders, | & - ^ ~ @ **, .T, .rows(a, b), .select(batch, head), numbers, strings, lists, tuples"


def parse(text: str, largest: int = LARGEST_NUMBER) -> TokenGraph:
    """The graph that an expression names; ``parse(graph.name) == graph`` wherever the name says it all.

    ``largest`` bounds the sum of the numbers in the text, and the tokens of its graphs over all heads and samples.
    Raises TypeError for anything but a string, and ValueError for everything else that is wrong with it, in one sentence
    that starts with the column and quotes the place: what a builder refuses too.

    >>> print(parse("window(4, 2) | sinks(4, 1)"))
    window(4, 2) | sinks(4, 1): mask[dst, src] and who hears whom
    0 ■ · · ·   0 <- 0
    1 ■ ■ · ·   1 <- 0 1
    2 ■ ■ ■ ·   2 <- 0 1 2
    3 ■ · ■ ■   3 <- 0 2 3
    >>> parse("windw(4, 2)")
    Traceback (most recent call last):
    ValueError: column 1, 'windw(4, 2)': there is no builder 'windw'; did you mean 'window'?
    """
    graph = evaluate(text, largest)
    if not isinstance(graph, TokenGraph):
        hint = "one of its graphs, by [0]" if isinstance(graph, tuple) and graph else "a graph such as 'window(64, 8)'"
        raise ValueError(f"{_shortened(text)!r} is {_kind(graph)}, expected {hint}")
    return graph


def evaluate(text: str, largest: int = LARGEST_NUMBER) -> Any:
    """What an expression stands for if it need not be one graph: several of them, or a value for each edge.

    >>> evaluate("shortest_paths(full(4), window(4, 2))").shape
    torch.Size([16])
    """
    text = _one_line(text)
    return _Reader(text, largest).value(_syntax_tree(text), 0)


def sized(text: str, n: int) -> str:
    """The expression for ``n`` tokens: n becomes the first argument of every builder that lacks it, and a bare name is a call.

    Builders that take a number of tokens are those whose first parameter is called n; all others stay as they are written. The
    signature says whether n is there: ``window(8)`` lacks an argument, so 8 is w; ``window(64, 8)`` and ``causal(64)`` lack none.
    What can be read both ways, such as ``sink_window(8, 2)``, is refused unless its first argument is n. Nothing is built:
    :func:`parse` reads the result, and refuses the rest. Raises as it does.

    >>> sized("causal | window(8) | sinks(s=4) | documents([40, 24])", 64)
    'causal(64) | window(64, 8) | sinks(64, s=4) | documents([40, 24])'
    """
    text = _one_line(text)
    refuse = _Reader(text, LARGEST_NUMBER).refuse
    return _expression_sizes.Sizing(text, _syntax_tree(text), FUNCTIONS, checks.size("n", n), refuse).filled()


def parameters(function: Callable[..., Any]) -> str:
    """The parameters of a function as they are written in a call: ``(n, w, causal=True)``."""
    listed = inspect.signature(function).parameters.values()
    return f"({', '.join(str(p.replace(annotation=inspect.Parameter.empty)) for p in listed)})"


# -- numbers ----------------------------------------------------------------------------------------------------------


def tensor(values: list[Any]) -> Tensor:
    """A tensor from nested lists of numbers, for builders of graphs that depend on data."""
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"tensor takes numbers in nested lists of equal lengths ({error})") from None


def randn(*sizes: int, seed: int = 0) -> Tensor:
    """Normal random numbers, always the same for the same sizes and seed, for builders of graphs that depend on data."""
    shape = [checks.size("each of sizes", size) for size in sizes]
    return torch.randn(shape, generator=torch.Generator().manual_seed(checks.size("seed", seed)))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(patterns, name) for name in patterns.__all__},
    **{name: getattr(algebra, name) for name in algebra.__all__},
    "tensor": tensor,
    "randn": randn,
}


# -- the reader -------------------------------------------------------------------------------------------------------


class _Reader:
    """Walks the syntax tree of one text; every refusal quotes the place in it."""

    def __init__(self, text: str, largest: int) -> None:
        self.text, self.largest = text, largest
        self.total = 0.0  # of the numbers read so far
        self.effort = 0.0  # of the calls and products made so far

    def value(self, node: ast.expr, depth: int) -> Any:
        """What a node stands for: a graph or an argument."""
        if depth > DEEPEST:
            self.refuse(node, f"more than {DEEPEST} brackets and operators inside one another")
        match node:
            case ast.Constant():
                return self.constant(node)
            case ast.List(elts=items):
                return [self.value(item, depth + 1) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item, depth + 1) for item in items)
            case ast.UnaryOp():
                return self.unary(node, depth)
            case ast.BinOp(op=ast.Pow()):
                return self.power(node, depth)
            case ast.BinOp():
                return self.binary(node, depth)
            case ast.Call():
                return self.call(node, depth)
            case ast.Attribute(value=inner, attr="T"):
                return self.graph(inner, depth + 1).T
            case ast.Subscript():
                return self.item(node, depth)
            case ast.Name(id=name):
                self.refuse(node, f"{_shortened(name)!r} is only a name, a builder is called: '{_shortened(name)}(...)'")
        return self.refuse(node, f"this is not part of the language of graphs; {ALLOWED}")

    def graph(self, node: ast.expr, depth: int) -> TokenGraph:
        """What a node stands for, which must be a graph."""
        value = self.value(node, depth)
        if not isinstance(value, TokenGraph):
            self.refuse(node, f"expected a graph here, got {_kind(value)}")
        return value

    def constant(self, node: ast.Constant) -> object:
        value = node.value
        if value is not None and not isinstance(value, (bool, int, float, str)):
            self.refuse(node, f"{_kind(value)} is no argument of a builder; {ALLOWED}")
        if isinstance(value, (int, float)):
            self.total += min(abs(value), 2 * self.largest)  # min: an integer may be too large for a float
            if not self.total <= self.largest:
                self.refuse(node, f"the numbers of an expression add up to at most {self.largest}")
        return value

    def unary(self, node: ast.UnaryOp, depth: int) -> Any:
        if isinstance(node.op, ast.Invert):
            return ~self.graph(node.operand, depth + 1)
        number = self.value(node.operand, depth + 1)
        if isinstance(node.op, ast.USub) and isinstance(number, (int, float)) and not isinstance(number, bool):
            return -number
        return self.refuse(node, "of operators with one operand there are ~ of a graph and - of a number")

    def binary(self, node: ast.BinOp, depth: int) -> TokenGraph:
        if type(node.op) not in OPERATORS:
            self.refuse(node, "this operator is not one of graphs; allowed are | & - ^ ~ @ **")
        sign, join = OPERATORS[type(node.op)]
        left, right = (self.graph(side, depth + 1) for side in (node.left, node.right))
        if sign == "@":
            self.check_pairs(node, sign, left, right)
            self.spend(node, sign, _expression_budget.of_product(left, right))
        result: TokenGraph = self.attempt(node, join, left, right)
        return result

    def power(self, node: ast.BinOp, depth: int) -> TokenGraph:
        base, hops = self.graph(node.left, depth + 1), self.value(node.right, depth + 1)
        if isinstance(hops, bool) or not isinstance(hops, int) or not 0 <= hops <= LARGEST_POWER:
            self.refuse(node.right, f"the power of a graph is a number of hops in 0 .. {LARGEST_POWER}")
        self.check_pairs(node, "**", base)
        self.spend(node, "**", _expression_budget.of_power(base, hops))
        result: TokenGraph = self.attempt(node, TokenGraph.__pow__, base, hops)
        return result

    def check_pairs(self, node: ast.expr, what: str, *graphs: object) -> None:
        pairs, most = (
            max((graph.num_dst * graph.num_src for graph in _expression_budget.graphs(graphs)), default=0),
            _expression_budget.MOST_PAIRS,
        )
        if pairs > most:
            self.refuse(node, f"{what} lists the edges of its graphs, here of {pairs} pairs; at most {most} are looked at")

    def spend(self, node: ast.expr, what: str, effort: float) -> None:
        """Count what is about to be done, and refuse what is too much for one text."""
        self.effort += effort
        if self.effort > _expression_budget.MOST:
            self.refuse(node, f"{what} would take too much time or memory here, take fewer tokens, edges, draws or hops")

    def call(self, node: ast.Call, depth: int) -> Any:
        """A builder, or a method of a graph."""
        function = self.function(node, depth)
        if any(isinstance(argument, ast.Starred) for argument in node.args) or None in [k.arg for k in node.keywords]:
            self.refuse(node, "arguments are written out, * and ** of arguments are not read")
        positional = [self.value(argument, depth + 1) for argument in node.args]
        named = {str(keyword.arg): self.value(keyword.value, depth + 1) for keyword in node.keywords}
        if len(named) < len(node.keywords):
            self.refuse(node, "an argument is given twice")
        if function.__name__ in LISTING:
            self.check_pairs(node, function.__name__, *positional, *named.values())
        return self.attempt(node, function, *positional, **named)

    def function(self, node: ast.Call, depth: int) -> Callable[..., Any]:
        match node.func:
            case ast.Name(id=name) if name in FUNCTIONS:
                return FUNCTIONS[name]
            case ast.Name(id=name):
                near = difflib.get_close_matches(name, FUNCTIONS, 1)
                hint = f"did you mean {near[0]!r}?" if near else "'gnn-attention graphs' lists the builders"
                return self.refuse(node, f"there is no builder {_shortened(name)!r}; {hint}")
            case ast.Attribute(value=inner, attr=name) if name in METHODS:
                method: Callable[..., Any] = getattr(self.graph(inner, depth + 1), name)
                return method
            case ast.Attribute(attr=name):
                return self.refuse(node, f"a graph has no method {_shortened(name)!r} here; there are .T, {_methods()}")
        return self.refuse(node.func, "only builders and the methods of graphs can be called")

    def item(self, node: ast.Subscript, depth: int) -> Any:
        """One graph of a builder that makes several."""
        several, number = self.value(node.value, depth + 1), self.value(node.slice, depth + 1) if _is_index(node.slice) else None
        if not isinstance(several, tuple) or isinstance(number, bool) or not isinstance(number, int):
            self.refuse(node, "[k] takes one graph of a builder that makes several, by its number")
        if not -len(several) <= number < len(several):
            self.refuse(node, f"expected a number in 0 .. {len(several) - 1} in the brackets, got {number}")
        return several[number]

    def attempt(self, node: ast.expr, function: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """The result of a call; what it raises comes back as a ValueError that quotes the place."""
        try:
            bound = inspect.signature(function).bind(*positional, **named)
        except TypeError as error:
            self.refuse(node, f"{error}; expected {function.__name__}{parameters(function)}")
        bound.apply_defaults()
        self.spend(node, function.__name__, _expression_budget.of_call(function.__name__, bound.arguments))
        try:
            result = function(*positional, **named)
        except Exception as error:  # whatever a builder refuses is a fault of this text
            raise ValueError(self.at(node, " ".join(str(error).split()) or type(error).__name__)) from error
        tokens = max((_expression_budget.size(graph) for graph in _expression_budget.graphs([result])), default=0)
        if tokens > self.largest:
            self.refuse(node, f"this has {tokens} tokens over all heads and samples, a graph can have at most {self.largest}")
        return result

    def refuse(self, node: ast.expr, reason: str) -> NoReturn:
        raise ValueError(self.at(node, reason))

    def at(self, node: ast.expr, reason: str) -> str:
        place = ast.get_source_segment(self.text, node) or self.text
        column = len(self.text.encode()[: node.col_offset].decode()) + 1
        return f"column {column}, {_shortened(place)!r}: {_shortened(reason, 600)}"


# -- helpers ----------------------------------------------------------------------------------------------------------


def _one_line(text: object) -> str:
    """The text without breaks, so that a column says it all; TypeError or ValueError for what is no text or too long."""
    if not isinstance(text, str):
        raise TypeError(f"an expression is a string such as 'window(64, 8)', got {quoted(text)} of type {type(text).__name__}")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the expression has {len(text)} characters, at most {LONGEST_TEXT} are read")
    return re.sub(r"\s", " ", text).strip()


def _syntax_tree(text: str) -> ast.expr:
    """Python's own reading of the text; ValueError where it is no expression."""
    try:
        with ignored():  # "1or 2" warns, and is refused anyway
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        column = min(error.offset or 1, len(text) + 1)
        place = text[column - 1 : column + 20] or "the end"
        raise ValueError(f"column {column}, {place!r}: not an expression ({error.msg}); {ALLOWED}") from None
    except UnicodeEncodeError:
        raise ValueError(f"column 1, {_shortened(ascii(text))}: not an expression (half a character); {ALLOWED}") from None
    except ValueError as error:  # a null byte, before Python 3.11.4
        raise ValueError(f"column 1, {_shortened(text)!r}: not an expression ({error}); {ALLOWED}") from None
    except (RecursionError, MemoryError):
        raise ValueError(
            f"column 1, {_shortened(text)!r}: more than {DEEPEST} brackets and operators inside one another"
        ) from None


def _is_index(node: ast.expr) -> bool:
    return isinstance(node, (ast.Constant, ast.UnaryOp))


def _methods() -> str:
    return ", ".join(f".{form}" for form in METHODS.values())


def _kind(value: object) -> str:
    """What a value is, in words."""
    if isinstance(value, TokenGraph):
        return "a graph"
    word = type(value).__name__
    return (
        f"{value!r}, {'an' if word[0] in 'aeiou' else 'a'} {word}" if isinstance(value, (bool, int, float, str)) else f"a {word}"
    )


def _shortened(text: str, longest: int = 40) -> str:
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."
