"""Assemble a page from the built template, a title and data, escaped so that no browser runs it."""

import html
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnn_attention._support import atomic_files
from gnn_attention._support.text import one_line

# `npm run build` in web/ writes this template.
TEMPLATE = Path(__file__).parent / "page.html"
# Every page of the explorer contains this mark.
MARK = '<meta name="generator" content="gnn-attention explorer">'
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


@dataclass(frozen=True, eq=False)
class Page:
    """A self-contained HTML page: ``html`` is its source, and a notebook displays it."""

    html: str
    title: str
    tokens: int

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page atomically, and return its path. Raises OSError on failure."""
        return atomic_files.write(path, self.html)

    def _repr_html_(self) -> str:
        """Return an iframe for notebooks. Its sandbox allows scripts and nothing else."""
        attributes = f'sandbox="allow-scripts" title="{html.escape(one_line(self.title))}"'
        size = 'width="100%" height="860" style="border: 0"'
        return f'<iframe srcdoc="{html.escape(self.html)}" {attributes} {size}></iframe>'

    def __repr__(self) -> str:
        return f"Page({self.title!r}, {self.tokens} tokens, {len(self.html) / 1e6:.1f} MB)"


def assemble_page(title: str, data: Mapping[str, Any]) -> str:
    """Return the HTML source of the page. Raises OSError if the template is missing."""
    # The JSON is pure ASCII. It contains no "<", so no string can close the script element.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    before, _, remaining = TEMPLATE.read_text(encoding="utf-8").partition("__TITLE__")
    between, _, after = remaining.partition("__DATA__")
    return "".join([before, html.escape(one_line(title)), between, embedded, after])


def is_explorer_page(path: Path) -> bool:
    """Return whether a path is a page of the explorer. A pipe is not opened, since it may block."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(2000)
