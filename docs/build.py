"""Build the site: landing page, book, zoo, guide, API, reference. It needs no network, and neither does who reads it.

    python docs/build.py                    # build/site/index.html, in a minute or two
    python docs/build.py --execute          # the notebooks run again, instead of being shown as they were committed
    python docs/build.py --out FOLDER

Needs: pip install -e ".[docs]". A warning of Sphinx, or a link or an anchor that leads nowhere, ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import api
import gallery
import links
from tree import EXPLORER, Tree, each, toctree

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ("glossary", "semantics", "backends", "guarantees", "benchmarks", "limits", "rosetta", "sources")
PROJECT = ("architecture", "contributing", "changelog")


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, let Sphinx make HTML of them, and follow every link."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="where the site goes")
    parser.add_argument("--execute", action="store_true", help="run the notebooks (minutes)")
    args = parser.parse_args(arguments)
    began = time.time()
    folder = args.out.resolve().parent / f"{args.out.name}-pages"
    write(folder, args.execute)
    if code := sphinx(folder, args.out):
        return code
    add_files(args.out)
    found = links.check(args.out)
    print(
        f"{args.out}/index.html: {found.pages} pages, {found.links} links and {len(found.broken)} broken, ",
        end="",
    )
    print(f"{found.megabytes:.0f} MB, {time.time() - began:.0f} s")
    print("\n".join(found.broken))
    return 1 if found.broken else 0


def write(folder: Path, execute: bool = False) -> None:
    """The pages as Sphinx reads them, of notebooks as they were committed, or as they run now."""
    tree = Tree(folder)
    for name, text in (*gallery.files(), *api.files()):
        tree.write(name, text)
    pages = [*each("docs/*.md"), *each("docs/guide/*.md"), *(ROOT / f"{one.upper()}.md" for one in PROJECT)]
    for path in pages:
        if path.name not in ("index.md", "zoo.md"):
            tree.markdown(path, guide(path) if path.name == "guide.md" else "")
    notebooks = list(each("notebooks/*.ipynb"))
    for path in notebooks:
        tree.notebook(path, executed(path) if execute else json.loads(path.read_text(encoding="utf-8")))
    tree.write(
        "book.md",
        "# Book\n"
        + toctree("", [f"book/{path.stem}" for path in notebooks]).replace(":hidden:\n:caption: \n", ""),
    )
    tree.markdown(ROOT / "docs" / "index.md", contents(tree))
    tree.finish()


def executed(path: Path) -> dict[str, Any]:
    """A notebook as it runs now, beside what it reads; an error in a cell that is no check of an exercise ends it."""
    # optional: sites of committed outputs need neither
    import nbclient
    import nbformat

    print(path.stem, flush=True)
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    here = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=1800, resources=here).execute()
    found: dict[str, Any] = json.loads(nbformat.writes(notebook))  # type: ignore[no-untyped-call]
    return found


def guide(path: Path) -> str:
    """The pages of the guide, in the order of its table."""
    names = re.findall(r"\]\((guide/\w+)\.md\)", path.read_text(encoding="utf-8"))
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def contents(tree: Tree) -> str:
    """The side bar: what is there, in the order of reading."""
    there = [name for name in REFERENCE if (tree.folder / f"{name}.md").exists()]
    return (
        toctree("Learn", ["book"], depth=2)
        + toctree("Use", ["guide", "zoo/index"], depth=2)
        + toctree("Look up", ["api/index", *there])
        + toctree("Project", [*PROJECT, "walks"])
    )


def sphinx(folder: Path, out: Path) -> int:
    """Sphinx, in a process of its own; every warning is an error."""
    cache = folder.parent / f"{out.name}-doctrees"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(cache)]
    return subprocess.run([*command, "-c", str(ROOT / "docs"), str(folder), str(out)]).returncode


def add_files(out: Path) -> None:
    """The page on which a sentence is explored, and the pictures of the zoo."""
    shutil.copy(EXPLORER, out)
    for name, text in gallery.pictures():
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
