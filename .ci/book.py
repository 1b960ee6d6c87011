"""Write the aim and the links to the neighbouring chapters into every notebook, from the tables in notebooks/README.md.

It also writes into these tables how many minutes a chapter takes to read.

python .ci/book.py           # write the sources, and update the .ipynb files without running them
python .ci/book.py --check   # write nothing; exit code 1 if a file would change
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PAGE = NOTEBOOKS / "README.md"
ROW = re.compile(r"^\| (\d\d) \| \[(.+?)\]\((\1_\w+)\.ipynb\) \| \d* \| (.+) \|$", re.MULTILINE)
EXERCISES = re.compile(r"^# ## (?:\d+\. )?Exercises$", re.MULTILINE)
AIM, FOOT = "# **Afterwards you can** ", "# %% [markdown]\n# ---\n# "
OLD_AIM = re.compile(r"\n#\n# \*\*Afterwards you can\*\* .*?(?=\n\n)", re.DOTALL)
OLD_FOOT = re.compile(r"\n# %% \[markdown\]\n# ---\n# .*\n?\Z")


class Chapter(NamedTuple):
    """A notebook of the book."""

    number: str
    title: str
    name: str
    aim: str

    def link(self) -> str:
        """Return a link with the number and the title."""
        return f"[{self.number}. {self.title}]({self.name}.ipynb)"


def minutes(name: str) -> int:
    """Return the time to read a chapter without its exercises, at 200 words or 25 lines of code a minute."""
    text = EXERCISES.split((NOTEBOOKS / f"{name}.py").read_text(encoding="utf-8"))[0]
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("# %%")]
    words = [word for line in lines if line.startswith("#") for word in line[1:].split()]
    return round(len(words) / 200 + sum(not line.startswith("#") for line in lines) / 25)


def chapters() -> list[Chapter]:
    """Return the notebooks in the order of reading."""
    return [Chapter(*match) for match in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def links(book: list[Chapter], index: int) -> str:
    """Return the links to the chapter before, to the book and to the next chapter."""
    parts = ["[the book](README.md)"]
    if index:
        parts.insert(0, f"before: {book[index - 1].link()}")
    if index + 1 < len(book):
        parts.append(f"next: {book[index + 1].link()}")
    return " | ".join(parts)


def insert_links(text: str, book: list[Chapter], index: int) -> str:
    """Add the aim and the links to the first cell of a source, and the links after its last cell."""
    text = OLD_FOOT.sub("", OLD_AIM.sub("", text).rstrip("\n") + "\n").rstrip("\n")
    head, marker, body = text.partition("# %% [markdown]\n")
    cell, gap, other_cells = body.partition("\n\n")
    aim = f"\n#\n{AIM}{book[index].aim}.\n#\n# {links(book, index)}"
    return f"{head}{marker}{cell}{aim}{gap}{other_cells}\n\n{FOOT}{links(book, index)}\n"


def update_notebook(path: Path) -> None:
    """Copy the cells of a source into its committed notebook and keep the outputs; ValueError if code has changed."""
    if not path.with_suffix(".ipynb").exists():
        raise ValueError(f"{path.stem} has no .ipynb file yet")
    old = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    new = jupytext.read(path)
    for number, cell in enumerate(new.cells):
        cell["id"] = f"cell-{number}"
    pairs = ([cell for cell in notebook.cells if cell.cell_type == "code"] for notebook in (new, old))
    for cell, old_cell in zip(*pairs, strict=True):
        if not {"exercise", "check"} & set(cell.metadata.get("tags", ())):
            if cell.source != old_cell.source:
                raise ValueError(f"the code of {path.stem} has changed, so its outputs may be out of date")
            cell.outputs, cell.execution_count = old_cell.outputs, old_cell.execution_count
    new.metadata = old.metadata
    count = 0
    for cell in new.cells:
        if cell.get("execution_count"):
            count += 1
            cell.execution_count = count
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = count
    nbformat.write(new, path.with_suffix(".ipynb"))


def is_outdated(path: Path) -> bool:
    """Return whether the cells of the committed notebook differ from those of its source."""
    if not path.with_suffix(".ipynb").exists():
        return True
    notebooks = (jupytext.read(path), nbformat.read(path.with_suffix(".ipynb"), as_version=4))
    source, committed = ([(cell.cell_type, cell.source) for cell in book.cells] for book in notebooks)
    return source != committed


def main() -> int:
    book, changed, check = chapters(), [], "--check" in sys.argv
    missing = {path.stem for path in NOTEBOOKS.glob("[0-9]*.py")} ^ {chapter.name for chapter in book}
    if missing:
        raise SystemExit(f"notebooks/README.md must list every notebook once: {', '.join(sorted(missing))}")
    page = PAGE.read_text(encoding="utf-8")
    new_page = ROW.sub(lambda x: f"| {x[1]} | [{x[2]}]({x[3]}.ipynb) | {minutes(x[3])} | {x[4]} |", page)
    if not check and new_page != page:
        PAGE.write_text(new_page, encoding="utf-8")
    for index, chapter in enumerate(book):
        path = NOTEBOOKS / f"{chapter.name}.py"
        old = path.read_text(encoding="utf-8")
        new = insert_links(old, book, index)
        if not check and new != old:
            path.write_text(new, encoding="utf-8")
        if new != old or is_outdated(path):
            changed.append(chapter.name)
    for name in [] if check else changed:
        try:
            update_notebook(NOTEBOOKS / f"{name}.py")
        except ValueError as error:
            print(f"{error}: run python tests/test_notebooks.py {name}", file=sys.stderr)
    print("\n".join(changed + ["README"] * (new_page != page)))
    return int(check and bool(changed or new_page != page))


if __name__ == "__main__":
    sys.exit(main())
