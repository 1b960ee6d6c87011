"""A Sphinx extension that generates pages, and adds navigation and figures to the pages of the repository.

The pages of the repository keep their paths, so their links still lead to the same page, or to a file that the reader
can download. Generated are a page for each builder of graphs and a page for each public module.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gallery
import live
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import gnn_attention

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ("glossary", "semantics", "rosetta", "guarantees", "benchmarks", "backends", "limits", "sources")
PROJECT = ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "docs/walks")
PATTERNS = "gnn_attention.patterns"
# The guide describes the commands, and kernels are not part of the Python API.
EXCLUDED = ("cli", "gpu")


def toctree(names: list[str], caption: str = "") -> str:
    """Return a section of the side bar."""
    head = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{head}\n" + "\n".join(names) + "\n```\n"


def contents() -> dict[str, str]:
    """Return, for each page that has pages below it, the text that lists them."""
    notebooks = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    tasks = re.findall(r"\]\((guide/\w+)\.md\)", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8"))
    side_bar = {
        "Learn": ["Book </notebooks/README>", "Illustrations <illustrations>", "teaching"],
        "Use": ["guide", "zoo"],
        "Look up": ["api/index", *REFERENCE],
        "Project": [f"/{name}" for name in PROJECT],
    }
    return {
        "docs/index": "".join(toctree(names, caption) for caption, names in side_bar.items()),
        "docs/guide": toctree(tasks),
        "notebooks/README": toctree(notebooks),
    }


def modules() -> Iterator[str]:
    """Yield the package and its public modules, except those whose names their package exports too."""
    yield "gnn_attention"
    for info in pkgutil.walk_packages(gnn_attention.__path__, "gnn_attention."):
        if not any(part.startswith("_") or part in EXCLUDED for part in info.name.split(".")):
            module = importlib.import_module(info.name)
            package = importlib.import_module(info.name.rpartition(".")[0])
            names = set(getattr(module, "__all__", ()))
            if names and (package is gnn_attention or not names <= set(getattr(package, "__all__", ()))):
                yield info.name


def make_pages(app: Sphinx) -> None:
    """Write the generated pages into ``docs/api`` and ``docs/zoo``, which git ignores."""
    pages = {f"zoo/{name}": text for name, text in gallery.files()}
    names = list(modules())
    # The page of a module follows its __all__, in which classes come before the function that returns them.
    importlib.import_module("gnn_attention.attend").__all__.sort(key=lambda name: name != "attend")
    lines = "\n".join(f"   {name}" for name in names)
    pages["api/index.rst"] = f"API\n===\n\n.. toctree::\n   :maxdepth: 1\n\n{lines}\n"
    for name in names:
        # The names of the package are documented in its modules, and each builder has a page in the zoo.
        members = "" if name in ("gnn_attention", PATTERNS) else "   :members:\n"
        pages[f"api/{name}.rst"] = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n{members}"
    for name, text in pages.items():
        path = ROOT / "docs" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in (*(ROOT / "docs" / "api").iterdir(), *(ROOT / "docs" / "zoo").iterdir()):
        if path.relative_to(ROOT / "docs").as_posix() not in pages:
            path.unlink()


def extend_source(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the list of pages below a page, the gallery of the zoo, and the live figure of a chapter."""
    source[0] = gallery.index() if name == "docs/zoo" else source[0]
    source[0] += contents().get(name, "")
    if re.match(r"notebooks/\d", name):
        source[0] = dress_chapter(Path(name).name, json.loads(source[0]))


def dress_chapter(name: str, notebook: dict[str, Any]) -> str:
    """Number the title of a chapter, insert its live figure, and fold the code before its first section."""
    cells = live.insert_figure(name, notebook["cells"])
    cells[0]["source"] = cells[0]["source"].replace("# ", f"# {name[:2]}. ", 1)
    first_section = next(index for index, cell in enumerate(cells) if cell["source"].startswith("## "))
    for cell in cells[:first_section]:
        cell["metadata"] = {"tags": ["hide-input"], "mystnb": {"code_prompt_show": "Imports and set-up"}}
    return json.dumps(notebook | {"cells": cells})


def shorten_signature(app: Sphinx, *parts: Any) -> tuple[str, Any] | None:
    """Leave the private fields of a dataclass out of its signature."""
    signature, result = parts[-2:]
    return (re.sub(r", _\w+(: [^,()]*)?", "", signature), result) if signature else None


def mend_links(app: Sphinx, tree: nodes.document) -> None:
    """Point links to the README and the explorer to their pages, and turn links to folders into plain text."""
    folder = (ROOT / app.env.docname).parent
    for node in list(tree.findall(addnodes.pending_xref)):
        if node["reftarget"] == "README":
            node["reftarget"] = "docs/index"
        elif node["reftype"] == "myst" and (folder / node["reftarget"]).is_dir():
            node.parent.replace(node, node.children)
    for node in list(tree.findall(addnodes.download_reference)):
        if node["reftarget"].endswith("explore.html"):
            link = f"{'../' * app.env.docname.count('/')}explore.html"
            node.replace_self(nodes.reference("", "", *node.children, refuri=link))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the steps of a build."""
    app.connect("builder-inited", make_pages)
    app.connect("source-read", extend_source)
    app.connect("doctree-read", mend_links)
    app.connect("autodoc-process-signature", shorten_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
