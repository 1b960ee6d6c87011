"""Write before, next and the aim into every notebook, from the list in notebooks/README.md.

python .ci/book.py           # sources; the .ipynb beside each follows, without a run
python .ci/book.py --check   # exit code 1 if one of them would change
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
LINE = re.compile(r"^\d+\. \[(.+?)\]\((\d.+?)\.ipynb\): (.+)\.$", re.MULTILINE)
AIM, FOOT = "# **Afterwards you can** ", "# %% [markdown]\n# ---\n# "
OLD_AIM = re.compile(r"\n#\n# \*\*Afterwards you can\*\* .*?(?=\n\n)", re.DOTALL)
OLD_FOOT = re.compile(r"\n# %% \[markdown\]\n# ---\n# .*\n?\Z")


class Chapter(NamedTuple):
    """A notebook of the book."""

    title: str
    name: str
    aim: str


def chapters() -> list[Chapter]:
    """The notebooks in the order of reading."""
    return [Chapter(*found) for found in LINE.findall((NOTEBOOKS / "README.md").read_text(encoding="utf-8"))]


def links(book: list[Chapter], at: int) -> str:
    """Before, the book, next."""
    parts = ["[the book](README.md)"]
    if at:
        parts.insert(0, f"before: [{book[at - 1].title}]({book[at - 1].name}.ipynb)")
    if at + 1 < len(book):
        parts.append(f"next: [{book[at + 1].title}]({book[at + 1].name}.ipynb)")
    return " | ".join(parts)


def linked(text: str, book: list[Chapter], at: int) -> str:
    """A source with its aim and links at the end of its first cell, and the links after its last one."""
    text = OLD_FOOT.sub("", OLD_AIM.sub("", text).rstrip("\n") + "\n").rstrip("\n")
    head, first, rest = text.partition("# %% [markdown]\n")
    cell, gap, others = rest.partition("\n\n")
    aim = f"\n#\n{AIM}{book[at].aim}.\n#\n# {links(book, at)}"
    return f"{head}{first}{cell}{aim}{gap}{others}\n\n{FOOT}{links(book, at)}\n"


def follow(path: Path) -> None:
    """The committed notebook with the cells of its source, and the outputs that it had; ValueError where cells of code are new."""
    if not path.with_suffix(".ipynb").exists():
        raise ValueError("it has not run yet")
    old = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    new = jupytext.read(path)
    for number, cell in enumerate(new.cells):
        cell["id"] = f"cell-{number}"
    pairs = ([cell for cell in notebook.cells if cell.cell_type == "code"] for notebook in (new, old))
    for cell, before in zip(*pairs, strict=True):
        if not {"exercise", "check"} & set(cell.metadata.get("tags", ())):
            if cell.source != before.source:
                raise ValueError("its outputs may be others now")
            cell.outputs, cell.execution_count = before.outputs, before.execution_count
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


def behind(path: Path) -> bool:
    """Whether the committed notebook has other cells than its source."""
    if not path.with_suffix(".ipynb").exists():
        return True
    notebooks = (jupytext.read(path), nbformat.read(path.with_suffix(".ipynb"), as_version=4))
    source, committed = ([(cell.cell_type, cell.source) for cell in one.cells] for one in notebooks)
    return source != committed


def main() -> int:
    book, changed, check = chapters(), [], "--check" in sys.argv
    missing = {path.stem for path in NOTEBOOKS.glob("[0-9]*.py")} ^ {chapter.name for chapter in book}
    if missing:
        raise SystemExit(f"notebooks/README.md must list every notebook once: {', '.join(sorted(missing))}")
    for at, chapter in enumerate(book):
        path = NOTEBOOKS / f"{chapter.name}.py"
        old = path.read_text(encoding="utf-8")
        new = linked(old, book, at)
        if not check and new != old:
            path.write_text(new, encoding="utf-8")
        if new != old or behind(path):
            changed.append(chapter.name)
    for name in [] if check else changed:
        try:
            follow(NOTEBOOKS / f"{name}.py")
        except ValueError:
            print(f"cells of code are new: python tests/test_notebooks.py {name}", file=sys.stderr)
    print("\n".join(changed))
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
