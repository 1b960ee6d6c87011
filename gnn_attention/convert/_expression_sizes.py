"""The number of tokens in an expression that leaves it out: which calls lack it, by the signatures of their builders.

Only ``expressions.sized`` uses it. A builder takes a number of tokens if its first parameter is called n.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["Sizing"]


@dataclass(frozen=True)
class Sizing:
    """One text and its syntax tree, the functions that it may call, and n; ``refuse`` raises with the place in the text."""

    text: str
    tree: ast.expr
    functions: Mapping[str, Callable[..., Any]]
    n: int
    refuse: Callable[[ast.expr, str], NoReturn]

    def filled(self) -> str:
        """The text with n in every call that lacks it; bare names become calls."""
        content = self.text.encode()
        for place, added in sorted(self._additions(content), reverse=True):
            content = content[:place] + added + content[place:]
        return content.decode()

    def _additions(self, content: bytes) -> Iterator[tuple[int, bytes]]:
        """What is added, and before which byte."""
        nodes, size = list(ast.walk(self.tree)), str(self.n).encode()
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Name) and self._takes_size(call.func.id) and self._lacks_size(call, call.func.id):
                place = content.index(b"(", call.func.end_col_offset) + 1
                yield place, size + (b", " if call.args or call.keywords else b"")
        called = {id(call.func) for call in calls}
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in called:
                yield node.end_col_offset or 0, b"(%b)" % (size if self._takes_size(node.id) else b"")

    def _takes_size(self, name: str) -> bool:
        return name in self.functions and next(iter(inspect.signature(self.functions[name]).parameters), "") == "n"

    def _lacks_size(self, call: ast.Call, name: str) -> bool:
        """True where a call has a meaning only with n before its arguments; ValueError where it has one with and one without."""
        as_written = self._meaning(name, call.args, call.keywords)
        filled = self._meaning(name, [ast.Constant(self.n), *call.args], call.keywords)
        if as_written is None or filled is None:
            return filled is not None
        first = call.args[0]  # n: by name it would be there twice in the other reading
        if isinstance(first, ast.Constant) and first.value == self.n:
            return False
        readings = f"{name}({self._shown(as_written)}) or {name}({self._shown(filled)})"
        return self.refuse(call, f"this may be {readings}: write the names of its arguments")

    def _meaning(self, name: str, positional: Sequence[ast.expr], named: Sequence[ast.keyword]) -> dict[str, ast.expr] | None:
        """The arguments by name; None where their number, names or kinds do not fit the signature."""
        signature = inspect.signature(self.functions[name])
        try:
            found = signature.bind(*positional, **{str(keyword.arg): keyword.value for keyword in named}).arguments
        except TypeError:
            return None
        return found if all(_fits(value, signature.parameters[key]) for key, value in found.items()) else None

    def _shown(self, arguments: Mapping[str, ast.expr]) -> str:
        """Arguments as they are written in a call, with their names."""
        written = {key: ast.get_source_segment(self.text, value) for key, value in arguments.items() if hasattr(value, "lineno")}
        return ", ".join(f"{key}={str(written.get(key, self.n))[:40]}" for key in arguments)


def _fits(value: ast.expr, parameter: inspect.Parameter) -> bool:
    """False for an argument that is, as it is written, of none of the kinds that a parameter takes."""
    if parameter.annotation is parameter.empty:
        return True
    annotation = str(parameter.annotation)
    while (outer := re.sub(r"\[[^][]*\]", "", annotation)) != annotation:
        annotation = outer
    kinds = set(annotation.split(" | "))
    match value:
        case ast.Constant(value=None):
            return "None" in kinds
        case ast.Constant(value=bool() | int() | float() | str() as constant):
            return type(constant).__name__ in kinds or (type(constant) is int and "float" in kinds)
        case ast.List() | ast.Tuple():
            return bool({"Sequence", "Iterable"} & kinds)
        case ast.UnaryOp(op=ast.USub()):
            return bool({"int", "float"} & kinds)
    return True
