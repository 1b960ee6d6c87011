"""Where a comparison keeps what is finished: one JSON file for each training, there in full or not at all.

The folder belongs to one plan: everything that decides the results, but for the graphs and the number of
seeds. Both may grow, and what is there is not trained again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from gnn_attention._support import atomic_files, json_files
from gnn_attention._support.text import one_line
from gnn_attention.training.compare_results import Outcome

__all__ = ["Store"]

PLAN = "plan.json"
_NUMBERS = {"float": (int, float), "int": (int,), "str": (str,), "float | None": (int, float, type(None))}


class Store:
    """The finished trainings of one plan in a folder, which is made if it is missing; without a folder
    nothing is kept.

    Raises ValueError for a folder of another plan, one that holds other files and no plan, and a file that is
    not as it was written; OSError where it cannot be read or made.
    """

    def __init__(self, folder: Path | None, plan: Mapping[str, Any]) -> None:
        """``plan``: values that JSON can hold."""
        self.folder, self.plan = folder, json.loads(json.dumps(plan))
        if folder is None:
            return
        if not folder.parent.is_dir():
            raise ValueError(
                f"--out {folder}: expected a place in a folder that exists, make {folder.parent} first"
            )
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder} is no folder: its place is for one")
        folder.mkdir(exist_ok=True)
        if (folder / PLAN).exists():
            self._check_plan(folder)
        elif any(not path.name.endswith(".part") for path in folder.iterdir()):
            raise ValueError(
                f"--out {folder} holds files, but no {PLAN} of a comparison: choose a new folder"
            )

    def find(self, graph: str, key: str, seed: int) -> Outcome | None:
        """What a training came to, if it is finished; ``graph`` is the name it has now."""
        file = self._file(key, seed)
        if file is None or not file.exists():
            return None
        outcome = _outcome(file)
        if (outcome.key, outcome.seed) != (key, seed):
            raise ValueError(
                f"{file} holds the result of {one_line(outcome.graph, 40)}, seed {outcome.seed}: delete it to train anew"
            )
        return replace(outcome, graph=graph)

    def keep(self, outcome: Outcome) -> None:
        """Write what a training came to, and before the first one the plan. ValueError if another plan took
        the folder since.
        """
        file = self._file(outcome.key, outcome.seed)
        if file is None:
            return
        if (plan := file.with_name(PLAN)).exists():
            self._check_plan(file.parent)
        else:
            _write(plan, self.plan)
        _write(file, asdict(outcome))

    def _file(self, key: str, seed: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{key}-seed{seed}.json"

    def _check_plan(self, folder: Path) -> None:
        there = _read(folder / PLAN)
        changed = sorted(name for name in self.plan | there if self.plan.get(name) != there.get(name))
        if changed:
            said = ", ".join(
                f"{one_line(name, 40)} {_shown(there.get(name))}, not {_shown(self.plan.get(name))}"
                for name in changed[:8]
            )
            raise ValueError(
                f"--out {folder} holds a comparison with {said}: choose a new folder, or the same options as there"
            )


def _write(file: Path, value: Any) -> None:
    atomic_files.write(file, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        return json_files.read(file)
    except ValueError as error:
        raise ValueError(f"{file} is no JSON of a comparison ({error}): delete it to begin anew") from error


def _outcome(file: Path) -> Outcome:
    value, kinds = _read(file), {field.name: _NUMBERS[str(field.type)] for field in fields(Outcome)}
    fitting = value.keys() == kinds.keys() and all(
        isinstance(value[name], kind) and not isinstance(value[name], bool) for name, kind in kinds.items()
    )
    if not fitting or not all(
        abs(number) < 1e300 for number in value.values() if isinstance(number, (int, float))
    ):  # nor NaN
        raise ValueError(f"{file} holds no result of a training: delete it to train anew")
    return Outcome(**value)


def _shown(value: object) -> str:
    return one_line(json.dumps(value), 60)
