"""Symbols for the tokens of a pair. An expression of symbols is a rule, and can be pickled.

``(src <= dst) & (dst - src < 4)`` is the rule of a window of four tokens. ``&`` and ``|`` mean
"and" and "or". :func:`compute` applies any function of tensors, and :func:`look_up` reads a table.
"""

import operator
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import rules


class Expression(partial[Any]):
    """``function(*operands)`` as a rule; a subexpression that occurs several times is computed once."""

    num_uses = 0
    __hash__ = object.__hash__

    def __call__(self, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Any:
        return self._evaluate((b, h, dst, src), {})

    def _evaluate(self, inputs: tuple[Tensor, ...], cache: dict[int, Any]) -> Any:
        if self.func is not _apply:
            return self.func(*self.args, *inputs)
        if id(self) in cache:
            return cache[id(self)]
        function, operands = self.args
        value = function(*(x._evaluate(inputs, cache) if isinstance(x, Expression) else x for x in operands))
        if self.num_uses > 1:
            cache[id(self)] = value
        return value

    def __bool__(self) -> bool:
        """Compare operands of ``==`` or ``!=`` by identity, as ``in`` needs; otherwise TypeError.

        Python evaluates ``a < b < c`` as ``a < b and b < c``, which would silently drop ``a < b``.
        """
        if self.args[0] in (operator.eq, operator.ne):
            return bool(self.args[0](*map(id, self.args[1])))
        raise TypeError("an expression of tokens has no truth value: join comparisons by & and |")


def compute(function: Callable[..., Any], *operands: Any) -> Any:
    """Return the expression ``function(*operands)``; the function must not modify an operand."""
    for operand in operands:
        if isinstance(operand, Expression):
            operand.num_uses += 1
    return Expression(_apply, function, operands)


def _apply(
    function: Callable[..., Any], operands: tuple[Any, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Any:
    return function(*(x(b, h, dst, src) if isinstance(x, partial) else x for x in operands))


def _get_argument(index: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (b, h, dst, src)[index]


sample: Any = Expression(_get_argument, 0)
head: Any = Expression(_get_argument, 1)
dst: Any = Expression(_get_argument, 2)
src: Any = Expression(_get_argument, 3)


def _make_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: compute(function, *operands)


ARITHMETIC_OPERATORS = ("abs", "add", "sub", "mul", "floordiv", "mod")
LOGICAL_OPERATORS = ("invert", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne")
for _name in ARITHMETIC_OPERATORS + LOGICAL_OPERATORS:
    setattr(Expression, f"__{_name}__", _make_operator(getattr(operator, f"__{_name}__")))


def look_up(table: Tensor, *index: Any) -> Any:
    """Return ``table[sample, head, *index]``; the table may lack the axes of samples and heads."""
    return compute(rules.look_up, table, sample, head, *index)


def any_of(expressions: Iterable[Any]) -> Any:
    """Return an expression that is True where any of ``expressions`` is, or False if there are none."""
    return reduce(operator.or_, expressions, (dst < 0) & (src < 0))
