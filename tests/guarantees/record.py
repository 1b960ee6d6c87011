"""What came of measuring guarantees: one result each, as a table, as JSON, and as rows of the docs."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSIONS = ("python", "torch", "torch_geometric", "networkx", "transformers", "triton", "numpy")
SHOWN = 20  # failures and skipped cases of one guarantee in the table; JSON holds all
RECORDS = "*-guarantees.json"
LONGEST_CELL = 400  # characters, in the README


@dataclass(frozen=True)
class Result:
    """One guarantee as it was measured: its promise and bar, how many cases, when, for how long, and what
    came of them.

    ``full`` is true if as many cases ran as the guarantee states. A skipped case could not run: the guarantee
    does not hold.
    """

    name: str
    promise: str
    bar: str
    count: int
    full: bool
    value: str
    holds: bool
    failures: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    seconds: float = 0.0
    date: str = ""

    def __str__(self) -> str:
        """Whether it holds, name, promise, bar, what was measured, and what failed or was skipped."""
        word = "holds" if self.holds else "FAILS"
        part = "" if self.full else f" (in part: {self.count:,} cases)"
        lines = [
            f"{word}  {self.name}: {self.promise}{part}",
            f"       bar: {self.bar}",
            f"       {self.value}",
        ]
        for what, cases in (("failed", self.failures), ("skipped", self.skipped)):
            lines += [f"       {what}: {case}" for case in cases[:SHOWN]]
            lines += [f"       ... and {len(cases) - SHOWN} more {what}"] if len(cases) > SHOWN else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Results:
    """All results of a run, with the versions and the machine that they were measured with."""

    results: tuple[Result, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if something was measured and every guarantee holds."""
        return bool(self.results) and all(result.holds for result in self.results)

    def __contains__(self, name: object) -> bool:
        return any(result.name == name for result in self.results)

    def with_result(self, result: Result) -> Results:
        """These and one more, which takes the place of an earlier one of its name."""
        others = tuple(other for other in self.results if other.name != result.name)
        return dataclasses.replace(self, results=(*others, result))

    def sorted(self, names: Iterable[str]) -> Results:
        order = {name: number for number, name in enumerate(names)}
        return dataclasses.replace(
            self, results=tuple(sorted(self.results, key=lambda r: order.get(r.name, len(order))))
        )

    def __str__(self) -> str:
        failed = sum(not result.holds for result in self.results)
        said = "nothing was measured" if not self.results else f"{failed} FAILED" if failed else "all hold"
        where = ", ".join(
            f"{name} {self.environment[name]}" for name in VERSIONS if self.environment.get(name)
        )
        tail = (
            f"{len(self.results)} guarantees, {said} ({str(self.environment.get('date', ''))[:10]}; {where})"
        )
        return "\n\n".join([*map(str, self.results), tail])

    def to_json(self) -> str:
        record = {
            "environment": dict(self.environment),
            "guarantees": [asdict(result) for result in self.results],
        }
        return json.dumps(record, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """What :meth:`to_json` wrote; ValueError for anything else.

        >>> result = Result("F1", "equal", "0 mismatches", 10, False, "0 of 10", True)
        >>> Results.from_json(Results((result,), {"torch": "2.13"}).to_json()).results == (result,)
        True
        """
        try:
            found = json.loads(text)
            results = [
                Result(**{**one, "failures": tuple(one["failures"]), "skipped": tuple(one["skipped"])})
                for one in found["guarantees"]
            ]
            return cls(tuple(results), dict(found["environment"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"expected a record of guarantees: {type(error).__name__}: {error!s:.200}"
            ) from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Results:
        """The guarantees in a file; ValueError where it holds none, OSError where it cannot be read."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def newest(folder: Path) -> tuple[Path, Results] | None:
    """The newest record of guarantees in a folder (``<date>-guarantees.json``), None if there is none."""
    found = sorted(folder.glob(RECORDS))
    return (found[-1], Results.from_file(found[-1])) if found else None


def readme(folder: Path) -> str:
    """The newest record as the README shows it: a row for each guarantee, with its bar and what was measured.

    >>> readme(Path("nowhere"))
    'Not measured yet.'
    """
    found = newest(folder)
    if found is None:
        return "Not measured yet."
    rows = [
        (r.name, r.promise, r.bar, r.value if r.holds else f"**fails**: {r.value}") for r in found[1].results
    ]
    head = ["| guarantee | promise | bar | measured |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(text: str) -> str:
    return textwrap.shorten(text.replace("|", "/"), LONGEST_CELL)
