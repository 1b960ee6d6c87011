"""Write before, next and the aim into every notebook, from the list in notebooks/README.md.

python .ci/book.py           # sources; the .ipynb beside each follows, without a run
python .ci/book.py --check   # exit code 1 if one of them would change
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from split_solutions import follow

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


def main() -> int:
    book, changed = chapters(), []
    missing = {path.stem for path in NOTEBOOKS.glob("[0-9]*.py")} ^ {chapter.name for chapter in book}
    if missing:
        raise SystemExit(f"notebooks/README.md must list every notebook once: {', '.join(sorted(missing))}")
    for at, chapter in enumerate(book):
        path = NOTEBOOKS / f"{chapter.name}.py"
        old = path.read_text(encoding="utf-8")
        if (new := linked(old, book, at)) != old:
            changed.append(chapter.name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
                try:
                    follow(path)
                except ValueError:
                    print(
                        f"cells of code are new: python tests/test_notebooks.py {chapter.name}",
                        file=sys.stderr,
                    )
    print("\n".join(changed))
    return int("--check" in sys.argv and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
