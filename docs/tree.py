"""The pages of the site as files for Sphinx: what is written in the repository, at the place where the site shows it.

A link in a page leads to a file of the repository. Here it is made to lead to the page that shows this file:
a page of text, a notebook, or a page with the source.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import live

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)(?<!`)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[ \t]*$)", re.DOTALL | re.MULTILINE)
SEED = re.compile(r"\bS\d\.\d+\b")
AT_THE_ROOT = ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING")
EXPLORER = ROOT / "docs" / "explore.html"  # no page of Sphinx: the site has a copy
PICTURES = (".png", ".gif", ".svg")


class Tree:
    """What is written into ``folder``; ``sources`` are the files that its pages link to.

    A file that is there already with the same text is left as it is, so that Sphinx reads only what has changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: set[Path] = set()
        self.written: set[Path] = set()

    def write(self, name: str, text: str) -> None:
        """A file of the site's own."""
        self._write(name, text.encode())

    def _write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        self.written.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)

    def markdown(self, path: Path, more: str = "") -> None:
        """A page of the repository, with more below it."""
        self.write(place(path), self.linked(path.read_text(encoding="utf-8"), path) + more)

    def notebook(self, path: Path, found: dict[str, Any]) -> None:
        """A notebook with its outputs, as ``found``."""
        said = set(SEED.findall("".join("".join(cell["source"]) for cell in found["cells"])))
        cells = []
        for cell in found["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.linked("".join(cell["source"]), path)
            # an id that stands in the tags of a cell only
            tags = [
                tag for tag in cell["metadata"].get("tags", ()) if SEED.fullmatch(tag) and tag not in said
            ]
            said.update(tags)
            cells += [anchors(tags), cell] if tags else [cell]
        found["cells"] = live.placed(path.stem, cells)
        self.write(place(path), json.dumps(found))

    def linked(self, text: str, path: Path) -> str:
        """The text of a page of the repository, whose links lead to pages of the site."""
        parts = FENCE.split(text)
        parts[::2] = [LINK.sub(lambda found: self._link(found, path), part) for part in parts[::2]]
        return "".join(parts)

    def _link(self, found: re.Match[str], path: Path) -> str:
        mark, words, target = found.groups()
        name, _, anchor = target.partition("#")
        # links may stand in the words of a link: a picture that leads somewhere
        words = LINK.sub(lambda inner: self._link(inner, path), words)
        if re.match(r"[a-z]+:", target) or not name:
            return f"{mark}[{words}]({target})"
        file = (path.parent / name).resolve()
        if file == EXPLORER:
            up = "../" * place(path).count("/")
            return f'<a href="{up}explore.html">{words}</a>'
        if not file.exists():
            raise FileNotFoundError(f"{path}: {target} leads nowhere")
        self._use(file)
        where = os.path.relpath(self.folder / place(file), (self.folder / place(path)).parent)
        return f"{mark}[{words}]({where}{'#' + anchor if anchor else ''})"

    def _use(self, file: Path) -> None:
        if file.suffix in PICTURES:
            self._write(place(file), file.read_bytes())
        elif place(file).startswith("source/"):
            self.sources.add(file)

    def finish(self) -> None:
        """A page for each file and folder of code that is linked to; what an earlier call wrote and this one did not goes."""
        for path in sorted(self.sources):
            self.write(place(path), folder_page(path) if path.is_dir() else source_page(path))
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.written:
                path.unlink()


def place(path: Path) -> str:
    """Where the site has a file of the repository, from its own root."""
    name = path.relative_to(ROOT)
    if str(name) in ("README.md", "docs"):
        return "index.md"
    if str(name) == "docs/zoo.md":
        return "zoo/index.md"
    if str(name) == "notebooks/README.md":
        return "book.md"
    if len(name.parts) == 1 and name.stem in AT_THE_ROOT:
        return f"{name.stem.lower()}.md"
    if name.suffix in (".ipynb", *PICTURES) and name.parts[0] == "notebooks":
        return "/".join(("book", *name.parts[1:]))
    if name.parts[0] == "docs" and name.suffix in (".md", *PICTURES):
        return "/".join(name.parts[1:])
    return f"source/{name.as_posix()}.md"


def anchors(names: list[str]) -> dict[str, Any]:
    """A cell that is seen by links alone."""
    text = "".join(f'<a id="{name}"></a>' for name in names)
    return {
        "cell_type": "markdown",
        "id": f"anchor-{names[0]}".replace(".", "-"),
        "metadata": {},
        "source": text,
    }


LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json"}


def source_page(path: Path) -> str:
    """The source of a file."""
    text = path.read_text(encoding="utf-8")
    language = LANGUAGES.get(path.suffix, "bash" if text.startswith("#!") else "text")
    shown = text if len(text) < 60_000 else "\n".join(text[:60_000].split("\n")[:-1]) + "\n[...]"
    # numbers of half a megabyte: their beginning, without colours
    language = "text" if shown is not text else language
    return f"{orphan(path)}`````{{code-block}} {language}\n\n{shown}\n`````\n"


def folder_page(path: Path) -> str:
    """What a folder has."""
    names = sorted(
        child.name + "/" * child.is_dir()
        for child in path.iterdir()
        if not child.name.startswith((".", "__pycache__"))
    )
    return orphan(path) + "\n".join(f"- `{name}`" for name in names) + "\n"


def orphan(path: Path) -> str:
    """The head of a page that no table of contents names and the search leaves out."""
    return f"---\norphan: true\nnosearch: true\n---\n# `{path.relative_to(ROOT).as_posix()}`\n\n"


def toctree(caption: str, pages: list[str], depth: int = 1) -> str:
    """A table of contents for the side bar."""
    head = f":hidden:\n:caption: {caption}\n:maxdepth: {depth}\n"
    return "\n```{toctree}\n" + head + "\n" + "\n".join(pages) + "\n```\n"


def each(pattern: str) -> Iterator[Path]:
    """The files of the repository that fit, in order."""
    return iter(sorted(ROOT.glob(pattern)))
