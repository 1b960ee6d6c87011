"""Parse graphs that are written as text, such as ``parse("window(64, 8) | sinks(64, 2)")``.

Python's parser reads the text, and every node of its syntax tree must be on a list of allowed
nodes; nothing is passed to ``eval``. An expression consists of

* calls of the builders of ``gnn_attention.patterns`` and functions of ``gnn_attention.algebra``:
  ``disjoint_sum(window(8, 3), causal(5))``; data are written as ``tensor([[1, 2], [3, 4]])``
  or drawn at random by ``randn(64, 8, seed=0)``;
* arguments, by position or by name: numbers, strings, True, False, None, lists and tuples of these;
* operators on graphs: ``|  &  -  ^  ~  @  ** k``, and parentheses;
* ``.T``, ``.rows(start, stop)`` and ``.select(batch, head)``; ``[k]`` chooses one of several graphs.

The length of the text, its numbers, products and powers are limited. If the number of tokens is
passed as ``n``, a text may use the name ``n`` for it, or leave it out: ``causal | window(8)``.
"""

import ast
import difflib
import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from gnn_attention import algebra, patterns
from gnn_attention._support import checks
from gnn_attention._support.locks import ignore_warnings
from gnn_attention._support.shapes import Tensor
from gnn_attention._support.text import one_line
from gnn_attention.graph import TokenGraph

__all__ = ["FUNCTIONS", "evaluate", "parse", "randn", "tensor"]

LONGEST_TEXT = 10_000
# No number in a text may exceed LARGEST_NUMBER, and randn returns no more numbers than that.
LARGEST_NUMBER = 2**24
LARGEST_POWER = 1024
# A product, or all hops of a power, may list at most MAX_PAIRS pairs, which takes under a minute.
MAX_PAIRS = 2**24

OPERATORS: Mapping[type[ast.operator], Callable[[TokenGraph, TokenGraph], TokenGraph]] = {
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Sub: operator.sub,
    ast.BitXor: operator.xor,
    ast.MatMult: operator.matmul,
}
ALLOWED = (
    "expected calls of builders, | & - ^ ~ @ ** of graphs, .T, .rows(start, stop), .select(batch, head), "
    "numbers, strings, lists, and arguments that are each written out once"
)
NOT_ALLOWED = f"this is not part of the language of graphs; {ALLOWED}"


def parse(text: str, *, n: int | None = None) -> TokenGraph:
    """Return the graph of an expression; ``parse(graph.name) == graph`` if that name is an expression.

    ``n`` is the number of tokens. The text may use the name ``n`` for it, and a builder that lacks
    an argument, or is named without a call, gets it as its first argument. Raises TypeError for
    anything but a string, and ValueError for any other fault, including errors that builders raise.
    If one part of the text is at fault, the message begins with its column and its text.

    >>> parse("causal - window(n, 4) | sinks(s=2)", n=64).name
    '(causal(64) - window(64, 4)) | sinks(64, 2)'
    >>> parse("windw(4, 2)")
    Traceback (most recent call last):
    ValueError: column 1, 'windw(4, 2)': there is no builder 'windw'; did you mean 'window'?
    """
    graph = evaluate(text, n=n)
    if not isinstance(graph, TokenGraph):
        raise ValueError(
            f"{checks.quote(text, 40)} is {checks.quote(graph)}, expected a graph such as "
            "'window(64, 8)'; [0] chooses the first of several graphs"
        )
    return graph


def evaluate(text: str, *, n: int | None = None) -> Any:
    """Return the value of an expression: a graph, several graphs, or one value for each edge.

    >>> evaluate("shortest_paths(full(4), window(4, 2))").shape
    torch.Size([16])
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string such as 'window(64, 8)', got {checks.describe_type(text)}")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the expression has {len(text)} characters, at most {LONGEST_TEXT} are read")
    text = re.sub(r"\s", " ", text).strip()
    reader = _Reader(text, None if n is None else checks.size("n", n))
    try:
        # Python warns about "1or 2", which is refused below anyway.
        with ignore_warnings():
            tree = ast.parse(text, mode="eval")
        return reader.read(tree.body)
    except (SyntaxError, UnicodeEncodeError) as error:
        column = getattr(error, "offset", None) or 1
        cause = f"not an expression ({getattr(error, 'msg', error)}); {ALLOWED}"
        raise ValueError(f"column {column}, {checks.quote(text, 40)}: {cause}") from None
    except (RecursionError, MemoryError) as error:
        raise ValueError("the expression nests too many parentheses and operators") from error


def tensor(values: list[Any]) -> Tensor:
    """Convert nested lists of numbers to a tensor that builders accept as data."""
    return torch.tensor(values)


def randn(*sizes: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers as data for builders; equal seeds give equal numbers."""
    shape = [checks.size("each entry of sizes", size) for size in sizes]
    if math.prod(shape) > LARGEST_NUMBER:
        raise ValueError(f"randn makes at most {LARGEST_NUMBER} numbers here, got sizes {shape}")
    return torch.randn(shape, generator=torch.Generator().manual_seed(checks.size("seed", seed)))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: getattr(module, name) for module in (patterns, algebra) for name in module.__all__
} | {"tensor": tensor, "randn": randn}


class _Reader:
    def __init__(self, text: str, n: int | None) -> None:
        self.text = text
        self.n = n

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number) if abs(number) > LARGEST_NUMBER:
                self.refuse(node, f"a number is at most {LARGEST_NUMBER}")
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.List(elts=items):
                return [self.read(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.read(item) for item in items)
            case ast.UnaryOp(op=ast.Invert(), operand=inner):
                return ~self.read_graph(inner)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
                return -self.read(number)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                graph = self.read_graph(left)
                hops = self.read(right)
                if type(hops) is not int or not 0 <= hops <= LARGEST_POWER:
                    self.refuse(right, f"the power of a graph is a number of hops in 0 .. {LARGEST_POWER}")
                self.limit_pairs(node, graph.num_dst * graph.num_src * hops)
                return self.attempt(node, pow, graph, hops)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                first, second = self.read_graph(left), self.read_graph(right)
                if type(op) is ast.MatMult:
                    self.limit_pairs(node, first.num_dst * max(first.num_src, second.num_src))
                return self.attempt(node, OPERATORS[type(op)], first, second)
            case ast.Call(func=ast.Name(id=name)):
                return self.call(node, self.find_builder(node, name))
            case ast.Call(func=ast.Attribute(value=inner, attr="rows" | "select" as name)):
                return self.call(node, getattr(self.read_graph(inner), name))
            case ast.Attribute(value=inner, attr="T"):
                return self.read_graph(inner).T
            case ast.Subscript(value=inner, slice=ast.Constant(value=int() as number)):
                return self.attempt(node, operator.getitem, self.read(inner), number)
            case ast.Name(id="n") if self.n is not None:
                return self.n
            case ast.Name(id=name):
                return self.attempt(node, self.find_builder(node, name))
        return self.refuse(node)

    def read_graph(self, node: ast.expr) -> TokenGraph:
        value = self.read(node)
        if not isinstance(value, TokenGraph):
            self.refuse(node, f"expected a graph here, got {checks.quote(value)}")
        return value

    def limit_pairs(self, node: ast.expr, pairs: int) -> None:
        if pairs > MAX_PAIRS:
            self.refuse(node, f"products and powers list at most {MAX_PAIRS} pairs here, got {pairs}")

    def find_builder(self, node: ast.expr, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            self.refuse(node, describe_unknown_builder(name))
        return FUNCTIONS[name]

    def call(self, node: ast.Call, function: Callable[..., Any]) -> Any:
        named = {keyword.arg: self.read(keyword.value) for keyword in node.keywords if keyword.arg}
        # An argument with ** has no name in the syntax tree.
        if len(named) < len(node.keywords):
            self.refuse(node)
        return self.attempt(node, function, *map(self.read, node.args), **named)

    def attempt(self, node: ast.expr, function: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Call a function; any exception becomes a ValueError that quotes the text of ``node``."""
        # A builder that lacks an argument gets the number of tokens `n` as its first argument.
        if self.n is not None and next(iter(inspect.signature(function).parameters), "") == "n":
            try:
                inspect.signature(function).bind(*positional, **named)
            except TypeError:
                positional = (self.n, *positional)
        try:
            return function(*positional, **named)
        # If a builder raises anything, the text is at fault.
        except Exception as error:
            self.refuse(node, str(error) or type(error).__name__, error)

    def refuse(self, node: Any, reason: str = NOT_ALLOWED, cause: Exception | None = None) -> NoReturn:
        segment = ast.get_source_segment(self.text, node) or self.text
        # Offsets in the syntax tree count bytes.
        column = len(self.text.encode()[: node.col_offset].decode()) + 1
        raise ValueError(f"column {column}, {checks.quote(segment, 40)}: {one_line(reason, 600)}") from cause


def describe_unknown_builder(name: str) -> str:
    matches = difflib.get_close_matches(name, FUNCTIONS, 1)
    hint = f"did you mean {matches[0]!r}?" if matches else "'gnn-attention graphs' lists them"
    return f"there is no builder {checks.quote(name)}; {hint}"
