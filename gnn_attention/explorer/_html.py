"""One self-contained page: the built template, a title and data, inert whatever they hold."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnn_attention._support import atomic_files
from gnn_attention._support.text import one_line

# built from web/ by npm run build
TEMPLATE = Path(__file__).parent / "page.html"
# by which a page of ours is known
MARK = '<meta name="generator" content="gnn-attention explorer">'
_ESCAPED = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


@dataclass(frozen=True, eq=False)
class Page:
    """One self-contained HTML file: ``html`` is its text, :meth:`save` writes it, a notebook shows it."""

    html: str
    title: str
    tokens: int

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, in full or not at all, and return where. OSError where that cannot be."""
        return atomic_files.write(path, self.html)

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame of its own, which may run its script and nothing more."""
        attributes = f'sandbox="allow-scripts" title="{html.escape(one_line(self.title))}"'
        size = 'width="100%" height="860" style="border: 0"'
        return f'<iframe srcdoc="{html.escape(self.html)}" {attributes} {size}></iframe>'

    def __repr__(self) -> str:
        return f"Page({self.title!r}, {self.tokens} tokens, {len(self.html) / 1e6:.1f} MB)"


def assemble_page(title: str, data: Mapping[str, Any]) -> str:
    """The text of the page; OSError without the built template.

    The data are pure ASCII, and nothing in them can end their element.
    """
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)
    before, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("__TITLE__")
    between, _, after = rest.partition("__DATA__")
    return "".join([before, html.escape(one_line(title)), between, embedded, after])


def is_ours(path: Path) -> bool:
    """True for a file that is a page of the explorer; a pipe is never waited for."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(2000)
