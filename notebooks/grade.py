"""Grade filled-in copies of the notebooks.

    python notebooks/grade.py 19_audit_a_leak-Ada.ipynb 10_the_zoo-Ada.ipynb

A copy is known by its title, or by a name that begins with the notebook's. Only the cells tagged "exercise" are
taken from it; everything else, the checks too, comes from the notebook in this folder, and runs in a kernel of
its own. The exit code is 0 if every exercise is right. It needs the extra ``notebooks``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbclient

NOTEBOOKS = Path(__file__).resolve().parent
NOT_SOLVED = "answer = None"


def sources() -> list[Path]:
    """The sources of the notebooks, in the order of their numbers."""
    return sorted(NOTEBOOKS.glob("[0-9]*.py"))


def tagged(notebook: Any, tag: str) -> list[Any]:
    """The cells that carry a tag, in their order."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def title(notebook: Any) -> str:
    """The first line of a notebook's text."""
    return next(
        (cell.source.partition("\n")[0] for cell in notebook.cells if cell.cell_type == "markdown"), ""
    )


def original(copy: Path) -> Path:
    """The source of the notebook that a file is a copy of, by its name or its title; ValueError if neither says."""
    if fitting := [source for source in sources() if copy.stem.startswith(source.stem)]:
        return fitting[-1]
    titles = {title(jupytext.read(source)): source for source in sources()}
    if (found := title(jupytext.read(copy))) not in titles:
        raise ValueError(
            f"a copy of no notebook: its title is {found!r}, and its name begins with none of theirs"
        )
    return titles[found]


def solutions(source: Path) -> list[str]:
    """The solutions of a notebook's exercises, from the folder beside it."""
    notebook = jupytext.read(source.parent / "solutions" / source.name, fmt="py:percent")
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def fill(notebook: Any, answers: list[str]) -> None:
    """Put answers into the exercises. An answer that fails leaves none, not the one before."""
    exercises = tagged(notebook, "exercise")
    if len(answers) != len(exercises):
        raise ValueError(f"expected {len(exercises)} cells tagged 'exercise', got {len(answers)}")
    for cell, answer in zip(exercises, answers, strict=True):
        # what an exercise gives beside the answer stays given
        cell.source = f"{cell.source}\n{NOT_SOLVED}\n{answer}"


def verdicts(notebook: Any) -> list[str]:
    """Of each check of a notebook that has run: "" if it passed, else what it, or the answer above it, said."""
    found = []
    for answer, check in zip(tagged(notebook, "exercise"), tagged(notebook, "check"), strict=True):
        said = [*_errors(answer), *_errors(check)]
        found.append(said[0] if said else "" if check.execution_count is not None else "did not run")
    return found


def _errors(cell: Any) -> list[str]:
    errors = [output for output in cell.outputs if output.output_type == "error"]
    return [f"{error.ename}: {error.evalue}" for error in errors]


def grade(copy: Path, timeout: int = 600) -> list[str]:
    """The verdicts on a filled-in copy, one for each exercise; "" is right."""
    source = original(copy)
    notebook, filled = jupytext.read(source), jupytext.read(copy)
    fill(notebook, [cell.source for cell in tagged(filled, "exercise")])
    nbclient.NotebookClient(notebook, timeout=timeout, allow_errors=True, resources=_here()).execute()
    return verdicts(notebook)


def _here() -> dict[str, dict[str, str]]:
    return {"metadata": {"path": str(NOTEBOOKS)}}


def main(arguments: list[str] | None = None) -> int:
    """Print the verdicts on each copy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("copies", nargs="+", type=Path, metavar="COPY", help="a filled-in notebook")
    wrong = 0
    for copy in parser.parse_args(arguments).copies:
        try:
            found = grade(copy)
        except (OSError, ValueError) as error:
            print(f"{copy}: {error}", file=sys.stderr)
            wrong += 1
            continue
        wrong += sum(map(bool, found))
        print(f"{copy.name}: {found.count('')} of {len(found)} right")
        for number, verdict in enumerate(found, 1):
            print(f"  {number} {'red: ' + verdict if verdict else 'green'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
