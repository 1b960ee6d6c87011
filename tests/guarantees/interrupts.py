"""Interrupts: a command ends at Ctrl-C with one line, leaves every file whole, and can go on.

A case is a command and a moment: some seconds after its start, or just before the n-th time that it changes a
file or folder (a checkpoint being saved). Afterwards the exit code is 130, stderr holds one
line and no traceback, no process and no temporary file is left, and the same command, given once more, comes
to what the same command comes to without an interrupt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.guarantees import children
from tests.guarantees.guarantee import Guarantee, Measured, Tell


@dataclass(frozen=True)
class Command:
    """``arguments`` as in a shell, in an empty folder; ``span`` seconds and ``events`` of it may be hit.

    ``outcome(folder)`` is what it came to (ValueError, KeyError or OSError where a file is not whole);
    ``again`` goes on from what was left, if that is another command.
    """

    arguments: tuple[str, ...]
    span: float
    outcome: Callable[[Path], Any]
    events: int = 0
    again: Callable[[Path], tuple[str, ...]] | None = None
    rarely: bool = False
    once: bool = False  # it does not go on: what it measures is another time


def _json(name: str, *keep: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        record = json.loads((folder / name).read_text(encoding="utf-8"))
        return {key: record[key] for key in keep}

    return read


def _trained(folder: Path) -> Any:
    """The bytes of the weights: the same recipe gives the same, however often it was interrupted."""
    raw = (folder / "weights.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    losses = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["losses"])
    return losses, raw[8 + size :]


def _compared(folder: Path) -> Any:
    outcomes = json.loads((folder / "said.json").read_text(encoding="utf-8"))["outcomes"]
    return [(one["graph"], one["seed"], one["held_out_loss"], one["training_loss"]) for one in outcomes]


def _checked(folder: Path) -> Any:
    results = json.loads((folder / "checks.json").read_text(encoding="utf-8"))["results"]
    return sorted((one["group"], one["backend"], one["dtype"], one["name"], one["passed"]) for one in results)


def _goes_on(folder: Path) -> tuple[str, ...]:
    return (*VERIFY, "--resume", "checks.json") if (folder / "checks.json").exists() else VERIFY


SMALL = ("--batch", "2", "--length", "32", "--pieces", "260")
TRAIN = (
    *("train", "--steps", "10", *SMALL, "--out", "weights.safetensors", "--checkpoints", "checkpoints"),
    *("--every", "2"),
)
COMPARE = (
    *("compare", "--graphs", "causal; window(4)", "--seeds", "1", "--steps", "4", *SMALL, "--out", "done"),
    *("--json", "said.json"),
)
FEW = ("--device", "cpu", "--dtype", "float64", "--graph", "causal", "--backend", "dense", "--no-trained")
VERIFY = ("verify", *FEW, "--jobs", "1", "--json", "checks.json")
BENCH = ("bench", "--tokens", "64", "--no-peers", "--json", "record.json")
COMMANDS: dict[str, Command] = {
    "train": Command(TRAIN, 1.5, _trained, events=70),
    "generate": Command(
        ("generate", "def f(", "--tokens", "60", "--json", "said.json"),
        0.5,
        _json("said.json", "text"),
        events=3,
    ),
    "verify": Command(VERIFY, 1.0, _checked, events=3, again=_goes_on),
    "compare": Command(COMPARE, 1.5, _compared, events=12),
    "bench": Command(BENCH, 1.0, _json("record.json", "bench", "schema"), rarely=True, once=True),
    "verify --jobs 2": Command((*VERIFY, "--jobs", "2"), 7.0, _checked, again=_goes_on, rarely=True),
}


def measure(count: int, tell: Tell) -> Measured:
    """Run the cases ``0 .. count - 1``: commands in turn, the slow ones rarely."""
    if not hasattr(os, "fork"):
        return Measured(
            "nothing measured",
            skipped=("commands are interrupted in forks, which this system does not have",),
        )
    hit = late = 0
    failures: list[str] = []
    with Forks() as forks:
        names: set[str] = set()
        for number in range(count):
            case = Case.drawn(number)
            tell(f"case {number} of {count}: {case}")
            ended, wrong = forks.run(case)
            late += ended
            hit += not ended
            names |= set() if ended else {case.name}
            failures += [f"{case}: {line}" for line in wrong]
    missing = [
        f"no interrupt of {name} was in time" for name, command in COMMANDS.items() if name not in names
    ]
    value = f"{len(failures)} faults after {hit:,} interrupts of {len(names)} commands; {late:,} came after the end"
    return Measured(value, tuple(failures), tuple(missing))


@dataclass(frozen=True)
class Case:
    """A command and a moment: ``seconds`` after it began, or just before the ``event``-th change of a file.

    >>> print(Case.drawn(0))
    case 0, train, before its change 50 of a file
    """

    number: int
    name: str
    seconds: float | None = None
    event: int | None = None

    @staticmethod
    def drawn(number: int) -> Case:
        """Case ``number``: the slow commands once in eight rounds, one of the rest in turn otherwise."""
        rng = random.Random(number)
        quick = [name for name, command in COMMANDS.items() if not command.rarely]
        slow = [name for name, command in COMMANDS.items() if command.rarely]
        turn, place = divmod(number, len(quick) + 1)
        if place < len(quick):
            command = COMMANDS[quick[place]]
            if command.events and turn % 2 == 0:
                return Case(number, quick[place], event=rng.randint(1, command.events))
            return Case(number, quick[place], seconds=rng.uniform(0.0, command.span))
        name = slow[turn // 2 % len(slow)]
        return Case(number, name, seconds=rng.uniform(0.0, COMMANDS[name].span))

    def __str__(self) -> str:
        moment = f"before its change {self.event} of a file" if self.event else f"after {self.seconds:.3f} s"
        return f"case {self.number}, {self.name}, {moment}"


class Forks:
    """The program that forks commands, and what each of them comes to without an interrupt."""

    def __init__(self) -> None:
        self._truths: dict[str, Any] = {}

    def __enter__(self) -> Forks:
        self._folder = tempfile.TemporaryDirectory()
        self.root = Path(self._folder.name).resolve()
        command = [sys.executable, "-W", "ignore", "-c", children.PROGRAM]
        alone = os.environ | {
            "OMP_NUM_THREADS": "1"
        }  # a fork has none of the threads of OpenMP, and would wait for them
        self._program = subprocess.Popen(
            command, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.close()
        self._program.stdout.close()
        self._program.wait(children.PATIENCE)
        self._folder.cleanup()

    def run(self, case: Case) -> tuple[bool, list[str]]:
        """Whether the command had ended before its interrupt, and what is wrong in words."""
        command, folder = COMMANDS[case.name], self._new(f"case{case.number}")
        answer = self._answer(command.arguments, folder, seconds=case.seconds, event=case.event)
        ended = answer["code"] == 0
        wrong = _after(answer, folder)
        again = command.arguments if command.again is None else command.again(folder)
        return ended, [*wrong, *([] if command.once else self._goes_on(case.name, again, folder))]

    def _goes_on(self, name: str, again: tuple[str, ...], folder: Path) -> list[str]:
        """The command once more: what it comes to is what it comes to alone."""
        command = COMMANDS[name]
        if name not in self._truths:
            alone = self._new(name.replace(" ", ""))
            self._answer(command.arguments, alone)
            self._truths[name] = command.outcome(alone)
        answer = self._answer(again, folder)
        if answer["code"] != 0:
            return [f"once more: exit code {answer['code']}, {_text(folder, 'err')[-300:]!r}"]
        try:
            found = command.outcome(folder)
        except (OSError, ValueError, KeyError) as error:
            return [f"once more: {type(error).__name__}: {error}"[:300]]
        return [] if found == self._truths[name] else ["once more: it came to something else than alone"]

    def _answer(self, arguments: tuple[str, ...], folder: Path, **moment: float | None) -> dict[str, Any]:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        print(
            json.dumps({"arguments": arguments, "folder": str(folder), **moment}),
            file=self._program.stdin,
            flush=True,
        )
        line = self._program.stdout.readline()
        found: dict[str, Any] = json.loads(
            line or '{"code": null, "left": ["the program that forks has died"]}'
        )
        return found

    def _new(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir()
        folder.with_suffix(".tmp").mkdir()
        return folder


def _after(answer: dict[str, Any], folder: Path) -> list[str]:
    # a command that runs for five seconds says so; what counts is the line with which it ends
    lines = [line for line in _text(folder, "err").splitlines() if line.strip() and " elapsed" not in line]
    wrong = [f"a process was left: {name}" for name in answer["left"]]
    if answer["code"] != 0:
        if answer["code"] not in (130, -signal.SIGINT):
            wrong.append(f"exit code {answer['code']}, not 130: {lines[-1:]}"[:300])
        if len(lines) != 1 or "interrupted" not in lines[0]:
            wrong.append(f"{len(lines)} lines, expected one: {lines[:1] + lines[-2:]}"[:500])
    files = [path for place in (folder, folder.with_suffix(".tmp")) for path in sorted(place.rglob("*"))]
    wrong += [
        f"left: {path.name}"
        for path in files
        if path.name.endswith(".part") or path.is_relative_to(folder.with_suffix(".tmp"))
    ]
    return wrong


def _text(folder: Path, suffix: str) -> str:
    return folder.with_suffix(f".{suffix}").read_text(encoding="utf-8", errors="replace")


GUARANTEE = Guarantee(
    name="interrupts",
    promise=(
        "Ctrl-C ends a command with one line; its files are whole, nothing else is left, and the same "
        "command goes on"
    ),
    bar="0 faults: exit code, stderr, files, temporary files, processes, and what the command then comes to",
    quick=6,
    full=150,
    measure=measure,
)
