"""A malformed input as a value, and the judgement of what it was answered with.

A :class:`Subject` is made anew for each case and knows a valid call with its truth from elsewhere; a
:class:`Case` does something malformed to one. What came of it is judged by :func:`faults`: the named type of
exception, raised by this library's own code, one short sentence that names the argument and says what came,
nothing of the subject changed, and the next valid call right.
"""

from __future__ import annotations

import importlib.util
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gnn_attention
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.measure import summation_bound

__all__ = ["COMPILED", "EAGER", "Case", "CommandRefusedError", "Of", "Subject", "faults", "state_of"]

Error = type[BaseException]
Call = Callable[[Any], Any]

EAGER, COMPILED = "eager", "compiled"
LONGEST_MESSAGE = 400  # characters
EXPECTS = re.compile(
    r"must|expected|such as|need|takes?\b|give\b|use\b|pass\b|see\b|make\b|choose|append|leave|call\b|cannot|holds?\b|at most"
    r"|more than|allowed|invalid|unrecognized|start\b|only|no room|there (is|are) no|(is|are) no\b|does not fit|differ|come"
)
RAW = re.compile(
    r"Traceback|aten::|c10|\btorch\._|Expected all tensors|size of tensor|mat1 and mat2|shape '|expand\(|unpack"
    r"|object (has no|is not)|unsupported operand|unexpected keyword|positional argument"
)
PACKAGE = Path(gnn_attention.__file__).resolve().parent
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


class CommandRefusedError(Exception):
    """A command ended with exit code 2, after this as its last line on stderr."""


@dataclass(frozen=True)
class Subject:
    """What malformed inputs are given to: ``make()`` one, ``good(one)`` is a valid call, ``truth(one)`` what
    it must give.

    ``needs`` names a package that need not be installed. Through ``compiled`` subjects a function goes that
    ``torch.compile``
    takes: their cases are run both ways.
    """

    name: str
    make: Callable[[], Any]
    good: Call
    truth: Call
    compiled: bool = False
    needs: str | None = None

    @property
    def is_missing(self) -> bool:
        """True if what it ``needs``, an optional dependency, is not installed."""
        return self.needs is not None and importlib.util.find_spec(self.needs) is None


@dataclass(frozen=True)
class Case:
    """A malformed call, the type of error expected, and what its message must match of argument and value."""

    subject: Subject
    error: Error
    argument: str
    came: str
    bad: Call

    @property
    def ways(self) -> tuple[str, ...]:
        return (EAGER, COMPILED) if self.subject.compiled else (EAGER,)

    def __str__(self) -> str:
        """Its name: the subject, then what the message must match."""
        return f"{self.subject.name}: {self.argument}, {self.came}"


@dataclass(frozen=True)
class Of:
    """Cases of one subject, by the type of error that they expect.

    >>> shape = Of(Subject("shape", make=lambda: None, good=lambda _: 1, truth=lambda _: 1))
    >>> print(shape.value("size", "-1", lambda _: None))
    shape: size, -1
    """

    subject: Subject

    def value(self, argument: str, came: str, bad: Call) -> Case:
        return Case(self.subject, ValueError, argument, came, bad)

    def type(self, argument: str, came: str, bad: Call) -> Case:
        return Case(self.subject, TypeError, argument, came, bad)

    def index(self, argument: str, came: str, bad: Call) -> Case:
        return Case(self.subject, IndexError, argument, came, bad)

    def refused(self, argument: str, came: str, bad: Call, error: Error = NotImplementedError) -> Case:
        return Case(self.subject, error, argument, came, bad)


def faults(case: Case, way: str = EAGER) -> list[str]:
    """What is wrong with the answer to a case; nothing if it was refused as it must be.

    >>> from gnn_attention.patterns import window
    >>> sizes = Subject("window", make=lambda: None, good=lambda _: window(3, 1).num_edges, truth=lambda _: 3)
    >>> faults(Case(sizes, TypeError, "n must", "3.0", lambda _: window(3.0, 1)))
    []
    >>> faults(Case(sizes, ValueError, "n must", "3.0", lambda _: window(3.0, 1)))
    ['TypeError in place of ValueError: n must be an integer, got 3.0 of type float']
    """
    one = case.subject.make()
    before = state_of(one)
    bad, good = (_as(way, call) for call in (case.bad, case.subject.good))
    found = list(_of_answer(case, bad, one))
    if state_of(one) != before:
        found.append("something of the object changed")
    return found + list(_of_next(case, good, one))


def _as(way: str, call: Call) -> Call:
    if way == EAGER:
        return call
    torch.compiler.reset()
    return torch.compile(call, backend="eager")


def _of_answer(case: Case, bad: Call, one: Any) -> Iterator[str]:
    try:
        answer = bad(one)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        yield from _of_error(case, error)
    else:
        yield f"no error: it gave {type(answer).__name__}"


def _of_error(case: Case, error: BaseException) -> Iterator[str]:
    said = str(error)
    shown = " ".join(said.split())[:200]
    if type(error) is not case.error:
        yield f"{type(error).__name__} in place of {case.error.__name__}: {shown}"
    if not _is_ours(error):
        yield f"raised from below: {shown}"
    patterns = {"the argument": case.argument, "what came": case.came, "what to do": EXPECTS.pattern}
    for part, pattern in patterns.items():
        if not re.search(pattern, said):
            yield f"the message does not name {part} ({pattern[:60]}): {shown}"
    if RAW.search(said):
        yield f"raw words in the message: {shown}"
    if len(said) > LONGEST_MESSAGE or "\n" in said:
        yield f"a message of {len(said)} characters in {said.count(chr(10)) + 1} lines: {shown}"


def _is_ours(error: BaseException) -> bool:
    """True if the library's own code raised it."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, CommandRefusedError) or any(map(last.is_relative_to, (PACKAGE, EXAMPLES)))


def _of_next(case: Case, good: Call, one: Any) -> Iterator[str]:
    try:
        given, truth = good(one), case.subject.truth(one)
    except Exception as error:
        yield f"the next valid call fails: {type(error).__name__}: {str(error)[:200]}"
        return
    if not _same(given, truth):
        yield f"the next valid call is wrong: {str(given)[:80]}, expected {str(truth)[:80]}"


def _same(given: Any, truth: Any) -> bool:
    """Equal, numbers of a float tensor but for roundings; a NaN equals nothing."""
    if not isinstance(truth, Tensor):
        return bool(given == truth)
    if not isinstance(given, Tensor) or given.shape != truth.shape:
        return False
    # a chain of at most 64 sums in float32, of numbers that add up to no more than the largest, or to 1
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    allowed = summation_bound(64, max(1.0, largest), torch.float32)
    return bool(((given.double() - truth.double()).abs() <= allowed).all())


def state_of(one: Any, depth: int = 6) -> Any:
    """What an object holds, as plain values that can be compared: numbers of tensors, sizes, the state of
    modules.

    >>> state_of({"x": torch.ones(1), "n": (1, "a")}) == state_of({"x": torch.ones(1), "n": (1, "a")}) != state_of({"x": torch.zeros(1)})
    True
    """
    if isinstance(one, Tensor):
        values = None if one.is_meta else str(one.detach().tolist())
        return (one.dtype, tuple(one.shape), str(one.device), values)
    if isinstance(one, TokenGraph):
        return one.frame
    if isinstance(one, nn.Module):
        hooks = len(one._forward_hooks) + len(one._forward_pre_hooks)
        parts = {name: state_of(part, depth - 1) for name, part in one.named_children()} if depth else {}
        own = {name: state_of(part) for name, part in one.named_parameters(recurse=False)}
        return (type(one), one.training, hooks, own, parts, _plain(vars(one)))
    if isinstance(one, dict):
        return {key: state_of(value, depth - 1) for key, value in one.items()} if depth else len(one)
    if isinstance(one, (list, tuple, set, frozenset)):
        return [state_of(value, depth - 1) for value in one] if depth else len(one)
    if isinstance(one, (bool, int, float, str, bytes, type(None))):
        return one
    is_ours = type(one).__module__.split(".")[0] in ("gnn_attention", "types")
    if not depth or not hasattr(one, "__dict__") or not is_ours:
        return type(one)
    if is_dataclass(one):  # what else it has was worked out from its fields
        names = [field.name for field in fields(one) if field.name != "_memo"]
        return (type(one), [state_of(getattr(one, name), depth - 1) for name in names])
    return (
        type(one),
        state_of({name: value for name, value in vars(one).items() if name != "_memo"}, depth - 1),
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in values.items() if isinstance(value, plain)}
