"""Graphs written as text: ``parse("window(64, 8) | sinks(64, 2)")``, the language in which graphs are named.

Python's parser reads the text, and each node of its tree must be in a list of what is allowed; nothing is
passed to ``eval``. An expression is made of

* calls of the builders of ``gnn_attention.patterns`` and the functions of ``gnn_attention.algebra``:
  ``disjoint_sum(window(8, 3), causal(5))``; data are ``tensor([[1, 2], [3, 4]])`` or, drawn at random,
  ``randn(64, 8, seed=0)``;
* arguments: numbers, strings, True, False, None, lists and tuples of these, by position or by name;
* operators on graphs: ``|  &  -  ^  ~  @  ** k``, and brackets;
* ``.T``, ``.rows(start, stop)`` and ``.select(batch, head)``; ``[k]`` of a builder that makes several graphs.

The length of the text, its depth, its numbers, the tokens of its graphs and the pairs of what lists edges are
limited. With an argument ``n`` the name ``n`` means it, and it may be left out: ``causal | window(8)``.
"""

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from operator import and_, matmul, or_, sub, xor
from typing import Any, NoReturn

import torch

from gnn_attention import algebra, patterns
from gnn_attention._support import checks
from gnn_attention._support.locks import ignored
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph

__all__ = ["FUNCTIONS", "LARGEST_NUMBER", "LONGEST_TEXT"]
__all__ += ["evaluate", "parameters", "parse", "randn", "tensor"]

LONGEST_TEXT = 10_000
# brackets and operators inside one another
DEEPEST = 64
# the sum of all numbers: tokens, and everything that counts them
LARGEST_NUMBER = 2**24
LARGEST_POWER = 1024
# (dst, src), of graphs whose edges are listed, and entries of randn
MOST_PAIRS = 2**24
LISTING = {"ancestry", "closure", "edge_types", "k_hop", "quotient", "shortest_paths", "virtual_nodes"}

OPERATORS: Mapping[type[ast.operator], Callable[[TokenGraph, TokenGraph], TokenGraph]] = {
    ast.BitOr: or_,
    ast.BitAnd: and_,
    ast.Sub: sub,
    ast.BitXor: xor,
    ast.MatMult: matmul,
}
METHODS_TEXT = ".rows(start, stop), .select(batch, head)"
ALLOWED = f"allowed are calls of builders, | & - ^ ~ @ **, .T, {METHODS_TEXT}, numbers, strings, lists"


def parse(text: str, largest: int = LARGEST_NUMBER, n: int | None = None) -> TokenGraph:
    """The graph that an expression names; ``parse(graph.name) == graph`` wherever the name says it all.

    ``largest`` bounds the sum of the numbers in the text, and the tokens of its graphs over all heads and
    samples. ``n`` is the number of tokens: the name ``n`` means it, a builder that is only named is called
    with it, and a call that lacks an argument takes it as its first.

    Raises TypeError for anything but a string, and ValueError for whatever else is wrong, errors of builders
    included, in one sentence that starts with the column and quotes the place.

    >>> parse("causal - window(n, 4) | sinks(s=2)", n=64).name
    '(causal(64) - window(64, 4)) | sinks(64, 2)'
    >>> parse("windw(4, 2)")
    Traceback (most recent call last):
    ValueError: column 1, 'windw(4, 2)': there is no builder 'windw'; did you mean 'window'?
    """
    graph = evaluate(text, largest, n)
    if not isinstance(graph, TokenGraph):
        hint = "one of its graphs, by [0]" if isinstance(graph, tuple) else "a graph such as 'window(64, 8)'"
        raise ValueError(f"{_shorten(text)!r} is {_kind(graph)}, expected {hint}")
    return graph


def evaluate(text: str, largest: int = LARGEST_NUMBER, n: int | None = None) -> Any:
    """The value of an expression: a graph, several of them, or a value for each edge.

    >>> evaluate("shortest_paths(full(4), window(4, 2))").shape
    torch.Size([16])
    """
    text = _one_line(text)
    reader = _Reader(text, largest, None if n is None else checks.size("n", n))
    return reader.value(_syntax_tree(text), 0)


def parameters(function: Callable[..., Any]) -> str:
    """The parameters of a function as they are written in a call: ``(n, w, causal=True)``."""
    listed = inspect.signature(function).parameters.values()
    return f"({', '.join(str(p.replace(annotation=inspect.Parameter.empty)) for p in listed)})"


def tensor(values: list[Any]) -> Tensor:
    """A tensor from nested lists of numbers, for builders of graphs that depend on data."""
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"tensor takes numbers in nested lists of equal lengths ({error})") from None


def randn(*sizes: int, seed: int = 0) -> Tensor:
    """Normal random numbers, the same for the same sizes and seed, for builders that take data."""
    shape = [checks.size("each of sizes", size) for size in sizes]
    if math.prod(shape) > MOST_PAIRS:
        raise ValueError(f"randn makes at most {MOST_PAIRS} numbers here, got sizes {shape}")
    return torch.randn(shape, generator=torch.Generator().manual_seed(checks.size("seed", seed)))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(patterns, name) for name in patterns.__all__},
    **{name: getattr(algebra, name) for name in algebra.__all__},
    "tensor": tensor,
    "randn": randn,
}


class _Reader:
    def __init__(self, text: str, largest: int, n: int | None) -> None:
        self.text, self.largest, self.n = text, largest, n
        # of the numbers read so far
        self.total = 0.0

    def value(self, node: ast.expr, depth: int) -> Any:
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
            case ast.Name():
                return self.name(node)
        return self.refuse(node, f"this is not part of the language of graphs; {ALLOWED}")

    def name(self, node: ast.Name) -> Any:
        if self.n is not None and node.id == "n":
            return self.n
        if self.n is not None:
            return self.attempt(node, self.builder(node, node.id))
        return self.refuse(node, f"{_shorten(node.id)!r} is only a name, a builder is called, with brackets")

    def graph(self, node: ast.expr, depth: int) -> TokenGraph:
        value = self.value(node, depth)
        if not isinstance(value, TokenGraph):
            self.refuse(node, f"expected a graph here, got {_kind(value)}")
        return value

    def constant(self, node: ast.Constant) -> object:
        value = node.value
        if value is not None and not isinstance(value, (bool, int, float, str)):
            self.refuse(node, f"{_kind(value)} is no argument of a builder; {ALLOWED}")
        if isinstance(value, (int, float)):
            # an integer may be too large for a float
            self.total += min(abs(value), 2 * self.largest)
            if not self.total <= self.largest:
                self.refuse(node, f"the numbers of an expression add up to at most {self.largest}")
        return value

    def unary(self, node: ast.UnaryOp, depth: int) -> Any:
        if isinstance(node.op, ast.Invert):
            return ~self.graph(node.operand, depth + 1)
        number = self.value(node.operand, depth + 1)
        if isinstance(node.op, ast.USub) and type(number) in (int, float):
            return -number
        return self.refuse(node, "of operators with one operand there are ~ of a graph and - of a number")

    def binary(self, node: ast.BinOp, depth: int) -> Any:
        if type(node.op) not in OPERATORS:
            self.refuse(node, "this operator is not one of graphs; allowed are | & - ^ ~ @ **")
        left, right = (self.graph(side, depth + 1) for side in (node.left, node.right))
        if isinstance(node.op, ast.MatMult):
            self.check_pairs(node, "@", left, right)
        return self.attempt(node, OPERATORS[type(node.op)], left, right)

    def power(self, node: ast.BinOp, depth: int) -> Any:
        base, hops = self.graph(node.left, depth + 1), self.value(node.right, depth + 1)
        if isinstance(hops, bool) or not isinstance(hops, int) or not 0 <= hops <= LARGEST_POWER:
            self.refuse(node.right, f"the power of a graph is a number of hops in 0 .. {LARGEST_POWER}")
        self.check_pairs(node, "**", base)
        if base.num_dst * base.num_src * hops > MOST_PAIRS:
            self.refuse(node, f"** makes {hops} products here, of {base.num_dst} tokens: take fewer")
        return self.attempt(node, TokenGraph.__pow__, base, hops)

    def check_pairs(self, node: ast.expr, what: str, *arguments: object) -> None:
        pairs = max((graph.num_dst * graph.num_src for graph in _graphs(arguments)), default=0)
        if pairs > MOST_PAIRS:
            self.refuse(
                node, f"{what} lists the edges of graphs, here of {pairs} pairs; at most {MOST_PAIRS}"
            )

    def call(self, node: ast.Call, depth: int) -> Any:
        function = self.function(node, depth)
        if any(keyword.arg is None for keyword in node.keywords):
            self.refuse(node, "arguments are written out, ** of arguments is not read")
        positional = [self.value(argument, depth + 1) for argument in node.args]
        named = {str(keyword.arg): self.value(keyword.value, depth + 1) for keyword in node.keywords}
        if len(named) < len(node.keywords):
            self.refuse(node, "an argument is given twice")
        if function.__name__ in LISTING:
            self.check_pairs(node, function.__name__, *positional, *named.values())
        return self.attempt(node, function, *positional, **named)

    def function(self, node: ast.Call, depth: int) -> Callable[..., Any]:
        match node.func:
            case ast.Name(id=name):
                return self.builder(node, name)
            case ast.Attribute(value=inner, attr=name) if name in ("rows", "select"):
                method: Callable[..., Any] = getattr(self.graph(inner, depth + 1), name)
                return method
            case ast.Attribute(attr=name):
                return self.refuse(node, f"a graph has no method {name!r} here; there are .T, {METHODS_TEXT}")
        return self.refuse(node.func, "only builders and the methods of graphs can be called")

    def builder(self, node: ast.expr, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            near = difflib.get_close_matches(name, FUNCTIONS, 1)
            hint = f"did you mean {near[0]!r}?" if near else "'gnn-attention graphs' lists the builders"
            self.refuse(node, f"there is no builder {_shorten(name)!r}; {hint}")
        return FUNCTIONS[name]

    def item(self, node: ast.Subscript, depth: int) -> Any:
        several, number = self.value(node.value, depth + 1), None
        if isinstance(node.slice, (ast.Constant, ast.UnaryOp)):
            number = self.value(node.slice, depth + 1)
        if not isinstance(several, tuple) or type(number) is not int:
            self.refuse(node, "[k] takes one graph of a builder that makes several, by its number")
        if not -len(several) <= number < len(several):
            self.refuse(node, f"expected a number in 0 .. {len(several) - 1} in the brackets, got {number}")
        return several[number]

    def attempt(self, node: ast.expr, function: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """The result of a call; what it raises comes back as a ValueError that quotes the place."""
        signature = inspect.signature(function)
        if self.n is not None and next(iter(signature.parameters), "") == "n":
            positional = _with_n(signature, self.n, positional, named)
        try:
            signature.bind(*positional, **named)
        except TypeError as error:
            self.refuse(node, f"{error}; expected {function.__name__}{parameters(function)}")
        try:
            result = function(*positional, **named)
        # whatever a builder raises is an error of this text
        except Exception as error:
            raise ValueError(self.at(node, " ".join(str(error).split()) or type(error).__name__)) from error
        of_graphs = (max(g.num_dst, g.num_src) * (g.heads or 1) * (g.batch or 1) for g in _graphs([result]))
        tokens = max(of_graphs, default=0)
        if tokens > self.largest:
            self.refuse(node, f"this has {tokens} tokens over all heads and samples, at most {self.largest}")
        return result

    def refuse(self, node: ast.expr, reason: str) -> NoReturn:
        raise ValueError(self.at(node, reason))

    def at(self, node: ast.expr, reason: str) -> str:
        place = ast.get_source_segment(self.text, node) or self.text
        column = len(self.text.encode()[: node.col_offset].decode()) + 1
        return f"column {column}, {_shorten(place)!r}: {_shorten(reason, 600)}"


def _one_line(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"an expression is a string such as 'window(64, 8)', got {checks.described(text)}")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the expression has {len(text)} characters, at most {LONGEST_TEXT} are read")
    return re.sub(r"\s", " ", text).strip()


def _syntax_tree(text: str) -> ast.expr:
    column, place = 1, repr(_shorten(text))
    try:
        # "1or 2" warns, and is an error anyway
        with ignored():
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        column = min(error.offset or 1, len(text) + 1)
        place = repr(text[column - 1 : column + 20] or "the end")
        reason = f"not an expression ({error.msg}); {ALLOWED}"
    # half a character; a null byte, before Python 3.11.4
    except ValueError as error:
        place, reason = _shorten(ascii(text)), f"not an expression ({error}); {ALLOWED}"
    except (RecursionError, MemoryError):
        reason = f"more than {DEEPEST} brackets and operators inside one another"
    raise ValueError(f"column {column}, {place}: {reason}")


def _with_n(signature: inspect.Signature, n: int, positional: Any, named: Mapping[str, Any]) -> Any:
    """The positional arguments, behind n if they fit the signature only so."""
    try:
        signature.bind(*positional, **named)
    except TypeError:
        return (n, *positional)
    return positional


def _graphs(values: Any) -> Iterator[TokenGraph]:
    for value in values:
        if isinstance(value, TokenGraph):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _graphs(value)


def _kind(value: object) -> str:
    if isinstance(value, TokenGraph):
        return "a graph"
    word = type(value).__name__
    if not isinstance(value, (bool, int, float, str)):
        return f"a {word}"
    return f"{value!r}, {'an' if word[0] in 'aeiou' else 'a'} {word}"


def _shorten(text: str, longest: int = 40) -> str:
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."
