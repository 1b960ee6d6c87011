"""Graphs written as text: ``parse("window(64, 8) | sinks(64, 2)")``, the language in which graphs are named.

Python's parser reads the text, and each node of its tree must be in a list of what is allowed; nothing is
passed to ``eval``. An expression is made of

* calls of the builders of ``gnn_attention.patterns`` and the functions of ``gnn_attention.algebra``:
  ``disjoint_sum(window(8, 3), causal(5))``; data are ``tensor([[1, 2], [3, 4]])`` or, drawn at random,
  ``randn(64, 8, seed=0)``;
* arguments: numbers, strings, True, False, None, lists and tuples of these, by position or by name;
* operators on graphs: ``|  &  -  ^  ~  @  ** k``, and brackets;
* ``.T``, ``.rows(start, stop)`` and ``.select(batch, head)``; ``[k]`` of a builder that makes several graphs.

The length of the text and its numbers are limited. With an argument ``n`` the name ``n`` means it, and it may
be left out: ``causal | window(8)``.
"""

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from operator import and_, getitem, matmul, or_, sub, xor
from typing import Any, NoReturn

import torch

from gnn_attention import algebra, patterns
from gnn_attention._support import checks
from gnn_attention._support.locks import ignored
from gnn_attention._support.shapes import Tensor
from gnn_attention._support.text import one_line
from gnn_attention.graph import TokenGraph

__all__ = ["FUNCTIONS", "LARGEST_NUMBER", "LONGEST_TEXT"]
__all__ += ["evaluate", "parse", "randn", "tensor"]

LONGEST_TEXT = 10_000
# the sum of all numbers: tokens, and everything that counts them
LARGEST_NUMBER = 2**24
LARGEST_POWER = 1024
# the pairs of tokens of a product, times the hops of a power: less than a minute
MOST_PAIRS = 2**24

OPERATORS: Mapping[type[ast.operator], Callable[[TokenGraph, TokenGraph], TokenGraph]] = {
    ast.BitOr: or_,
    ast.BitAnd: and_,
    ast.Sub: sub,
    ast.BitXor: xor,
    ast.MatMult: matmul,
}
ALLOWED = (
    "allowed are calls of builders, | & - ^ ~ @ ** of graphs, .T, .rows(start, stop), .select(batch, head), "
    "numbers, strings, lists, and arguments that are written out, each once"
)
NOT_ALLOWED = f"this is not part of the language of graphs; {ALLOWED}"


def parse(text: str, *, n: int | None = None) -> TokenGraph:
    """The graph that an expression names; ``parse(graph.name) == graph`` wherever the name says it all.

    ``n`` is the number of tokens: the name ``n`` means it, a builder that is only named is called with it,
    and a call that lacks an argument takes it as its first.

    Raises TypeError for anything but a string, and ValueError for whatever else is wrong, errors of builders
    included, in one sentence that starts with the column and quotes the place.

    >>> parse("causal - window(n, 4) | sinks(s=2)", n=64).name
    '(causal(64) - window(64, 4)) | sinks(64, 2)'
    >>> parse("windw(4, 2)")
    Traceback (most recent call last):
    ValueError: column 1, 'windw(4, 2)': there is no builder 'windw'; did you mean 'window'?
    """
    graph = evaluate(text, n=n)
    if not isinstance(graph, TokenGraph):
        hint = "one of its graphs, by [0]" if isinstance(graph, tuple) else "a graph such as 'window(64, 8)'"
        raise ValueError(f"{checks.quoted(text, 40)} is {checks.quoted(graph)}, expected {hint}")
    return graph


def evaluate(text: str, *, n: int | None = None) -> Any:
    """The value of an expression: a graph, several of them, or a value for each edge.

    >>> evaluate("shortest_paths(full(4), window(4, 2))").shape
    torch.Size([16])
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression is a string such as 'window(64, 8)', got {checks.described(text)}")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the expression has {len(text)} characters, at most {LONGEST_TEXT} are read")
    reader = _Reader(re.sub(r"\s", " ", text).strip(), None if n is None else checks.size("n", n))
    try:
        return reader.read(reader.parse_text())
    except (RecursionError, MemoryError) as error:
        raise ValueError("the expression has too many brackets and operators inside one another") from error


def tensor(values: list[Any]) -> Tensor:
    """A tensor from nested lists of numbers, for builders of graphs that depend on data."""
    return torch.tensor(values)


def randn(*sizes: int, seed: int = 0) -> Tensor:
    """Normal random numbers, the same for the same sizes and seed, for builders that take data."""
    shape = [checks.size("each of sizes", size) for size in sizes]
    if math.prod(shape) > LARGEST_NUMBER:
        raise ValueError(f"randn makes at most {LARGEST_NUMBER} numbers here, got sizes {shape}")
    return torch.randn(shape, generator=torch.Generator().manual_seed(checks.size("seed", seed)))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(patterns, name) for name in patterns.__all__},
    **{name: getattr(algebra, name) for name in algebra.__all__},
    "tensor": tensor,
    "randn": randn,
}


class _Reader:
    def __init__(self, text: str, n: int | None) -> None:
        self.text, self.n = text, n

    def parse_text(self) -> ast.expr:
        """Parse the text as Python, within the limit of the numbers."""
        try:
            # "1or 2" warns, and is an error anyway
            with ignored():
                tree = ast.parse(self.text, mode="eval").body
        # ValueError: half a character; a null byte, before Python 3.11.4
        except (SyntaxError, ValueError) as error:
            column = min(getattr(error, "offset", None) or 1, len(self.text) + 1)
            place = self.text[column - 1 : column + 20] or "the end"
            reason = f"not an expression ({getattr(error, 'msg', error)}); {ALLOWED}"
            raise ValueError(f"column {column}, {place!r}: {reason}") from None
        numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        # an integer may be too large for a float
        total = sum(min(abs(x), 2 * LARGEST_NUMBER) for x in numbers if isinstance(x, (int, float)))
        if total > LARGEST_NUMBER:
            self.refuse(tree, f"the numbers of an expression add up to at most {LARGEST_NUMBER}")
        return tree

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.List(elts=items):
                return [self.read(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.read(item) for item in items)
            case ast.UnaryOp(op=ast.Invert(), operand=inner):
                return ~self.read_graph(inner)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                # minus True is a number in Python only
                return self.refuse(node) if isinstance(number, bool) else -number
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                graph, hops = self.read_graph(left), self.read(right)
                if type(hops) is not int or not 0 <= hops <= LARGEST_POWER:
                    self.refuse(right, f"the power of a graph is a number of hops in 0 .. {LARGEST_POWER}")
                self.limit_pairs(node, graph.num_dst * graph.num_src * hops)
                return self.attempt(node, pow, graph, hops)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                first, second = self.read_graph(left), self.read_graph(right)
                if type(op) is ast.MatMult:
                    self.limit_pairs(node, first.num_dst * max(first.num_src, second.num_src))
                return self.attempt(node, OPERATORS[type(op)], first, second)
            case ast.Call():
                return self.read_call(node)
            case ast.Attribute(value=inner, attr="T"):
                return self.read_graph(inner).T
            case ast.Subscript(value=inner, slice=index):
                graphs, number = self.read(inner), self.read(index)
                if not isinstance(graphs, tuple) or type(number) is not int:
                    self.refuse(node, "[k] takes one graph of a builder that makes several, by its number")
                return self.attempt(node, getitem, graphs, number)
            case ast.Name(id="n") if self.n is not None:
                return self.n
            case ast.Name(id=name):
                return self.attempt(node, self.find_builder(node, name))
        return self.refuse(node)

    def read_graph(self, node: ast.expr) -> TokenGraph:
        value = self.read(node)
        if not isinstance(value, TokenGraph):
            self.refuse(node, f"expected a graph here, got {checks.quoted(value)}")
        return value

    def limit_pairs(self, node: ast.expr, pairs: int) -> None:
        if pairs > MOST_PAIRS:
            self.refuse(node, f"products and powers list at most {MOST_PAIRS} pairs here, got {pairs}")

    def read_call(self, node: ast.Call) -> Any:
        match node.func:
            case ast.Name(id=name):
                function = self.find_builder(node, name)
            case ast.Attribute(value=inner, attr="rows" | "select" as name):
                function = getattr(self.read_graph(inner), name)
            case _:
                self.refuse(node)
        positional = [self.read(argument) for argument in node.args]
        named = {keyword.arg: self.read(keyword.value) for keyword in node.keywords if keyword.arg}
        # the name of ** is None
        if len(named) < len(node.keywords):
            self.refuse(node)
        return self.attempt(node, function, *positional, **named)

    def find_builder(self, node: ast.expr, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            self.refuse(node, describe_unknown_builder(name))
        return FUNCTIONS[name]

    def attempt(self, node: ast.expr, function: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """The result of a call; what it raises comes back as a ValueError that quotes the place."""
        if self.n is not None:
            positional = _insert_n(inspect.signature(function), self.n, positional, named)
        try:
            return function(*positional, **named)
        # whatever a builder raises is an error of this text
        except Exception as error:
            self.refuse(node, str(error) or type(error).__name__, error)

    def refuse(self, node: Any, reason: str = NOT_ALLOWED, cause: Exception | None = None) -> NoReturn:
        place = ast.get_source_segment(self.text, node) or self.text
        column = len(self.text.encode()[: node.col_offset].decode()) + 1
        raise ValueError(f"column {column}, {checks.quoted(place, 40)}: {one_line(reason, 600)}") from cause


def describe_unknown_builder(name: str) -> str:
    """The error message for a name that no builder has."""
    near = difflib.get_close_matches(name, FUNCTIONS, 1)
    hint = f"did you mean {near[0]!r}?" if near else "'gnn-attention graphs' lists them"
    return f"there is no builder {checks.quoted(name)}; {hint}"


def _insert_n(signature: inspect.Signature, n: int, positional: Any, named: Mapping[str, Any]) -> Any:
    """The positional arguments, behind n if that is the first parameter and they fit only so."""
    if next(iter(signature.parameters), "") != "n":
        return positional
    try:
        signature.bind(*positional, **named)
    except TypeError:
        return (n, *positional)
    return positional
