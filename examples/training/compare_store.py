"""The finished trainings of a comparison: one JSON file each, there in full or not at all.

The folder belongs to one plan: everything that decides the results, but for the graphs and the number of
seeds. Both may grow, and what is there is not trained again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from examples.training.compare_results import Outcome
from gnn_attention._support import atomic_files, json_files
from gnn_attention._support.text import one_line

PLAN = "plan.json"
_KINDS = {"float": (int, float), "int": (int,), "str": (str,), "float | None": (int, float, type(None))}


class Store:
    """The finished trainings of one plan, which JSON can hold, in a folder; None stores nothing.

    ValueError for a folder of another plan or of other files, and a file that is not as it was written.
    """

    def __init__(self, folder: Path | None, plan: Mapping[str, Any]) -> None:
        self.folder, self.plan = folder, json.loads(json.dumps(plan))
        if folder is None:
            return
        if not folder.parent.is_dir():
            raise ValueError(
                f"--out {folder}: expected one in a folder that exists, make {folder.parent} first"
            )
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder} is no folder: its place is for one")
        folder.mkdir(exist_ok=True)
        if (folder / PLAN).exists():
            self._check_plan(folder)
        elif any(not path.name.endswith(".part") for path in folder.iterdir()):
            raise ValueError(f"--out {folder} holds files, but no {PLAN} of a comparison: choose another")

    def find(self, graph: str, key: str, seed: int) -> Outcome | None:
        # ``graph`` is the name it has now
        file = None if self.folder is None else self.folder / f"{key}-seed{seed}.json"
        if file is None or not file.exists():
            return None
        outcome = _outcome(file)
        if (outcome.key, outcome.seed) != (key, seed):
            found = f"{one_line(outcome.graph, 40)}, seed {outcome.seed}"
            raise ValueError(f"{file} holds the result of {found}: delete it to train anew")
        return replace(outcome, graph=graph)

    def add(self, outcome: Outcome) -> None:
        # before the first one the plan; another may have come meanwhile
        if self.folder is None:
            return
        if (self.folder / PLAN).exists():
            self._check_plan(self.folder)
        else:
            _write(self.folder / PLAN, self.plan)
        _write(self.folder / f"{outcome.key}-seed{outcome.seed}.json", asdict(outcome))

    def _check_plan(self, folder: Path) -> None:
        there = _read(folder / PLAN)
        pairs = ((name, there.get(name), self.plan.get(name)) for name in sorted(self.plan | there))
        changed = [(one_line(name, 40), _shown(old), _shown(new)) for name, old, new in pairs if old != new]
        if changed:
            others = ", ".join(f"{name} {old}, not {new}" for name, old, new in changed[:8])
            advice = "choose a new folder, or the same options as there"
            raise ValueError(f"--out {folder} holds a comparison with {others}: {advice}")


def _write(file: Path, value: Any) -> None:
    atomic_files.write(file, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        return json_files.parsed(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON of a comparison ({error}): delete it to begin anew") from error


def _outcome(file: Path) -> Outcome:
    value, kinds = _read(file), {field.name: _KINDS[str(field.type)] for field in fields(Outcome)}
    # JSON here knows NaN and numbers too large for a result
    numbers = [x for x in value.values() if isinstance(x, (int, float))]
    is_of = value.keys() == kinds.keys() and all(type(value[name]) in kinds[name] for name in kinds)
    if not is_of or not all(abs(number) < 1e300 for number in numbers):
        raise ValueError(f"{file} holds no result of a training: delete it to train anew")
    return Outcome(**value)


def _shown(value: object) -> str:
    return one_line(json.dumps(value), 60)
