"""The zoo as pages, a page for each builder: picture, edges, theorem, papers, and what else is the same graph.

All of it comes from the package and from the table of theorems that tests check (``tests/support/zoo``).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch

from gnn_attention import TokenGraph, patterns
from gnn_attention.convert import catalogue, expressions
from gnn_attention.convert.catalogue import Entry

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for support.zoo
from support.zoo import ROWS, Row  # noqa: E402

SIZE = 17  # of graphs that are compared
ARXIV = re.compile(r"arXiv[: ]\s*(\d{4}\.\d{4,5})")
INK = "#3b82f6"


# ---- pictures


def picture(graph: TokenGraph, most_heads: int = 4) -> str:
    """The mask as SVG: receivers in rows, senders in columns, heads side by side.

    >>> picture(patterns.causal(2)).count("<path")
    1
    """
    masks = [graph.select(0, head).mask() for head in range(min(graph.heads or 1, most_heads))]
    rows, columns = masks[0].shape
    width = len(masks) * (columns + 2) - 2
    drawn = "".join(_cells(mask, number * (columns + 2)) for number, mask in enumerate(masks))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {rows + 2}" width="320" '
        f'height="{round(320 * (rows + 2) / (width + 2))}">{drawn}</svg>\n'
    )


def _cells(mask: torch.Tensor, left: int) -> str:
    rows, columns = mask.shape
    path = "".join(
        f"M{left + start} {row}h{end - start}v1h-{end - start}z" for row, start, end in _runs(mask)
    )
    frame = f'<rect x="{left}" width="{columns}" height="{rows}" fill="{INK}" fill-opacity=".12"/>'
    return f'{frame}<path d="{path}" fill="{INK}"/>'


def _runs(mask: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(row, first, one after the last) of the neighbouring cells of each row."""
    for number, row in enumerate(mask.int().tolist()):
        for run in re.finditer("1+", "".join(map(str, row))):
            yield number, run.start(), run.end()


# ---- the same graph under another name


@cache
def equal_rows() -> dict[str, tuple[tuple[str, str], ...]]:
    """For each builder (call, equal call of another builder), which build one graph of 17 tokens.

    Graphs without edges, of self loops alone, and those that differ by head are left out.
    """
    same: dict[bytes, list[Row]] = defaultdict(list)
    for row in ROWS:
        graph = row.build(SIZE if SIZE in row.sizes else row.sizes[-1])
        if not graph.heads and not graph.batch and not _trivial(graph):
            mask = graph.mask()
            same[repr(mask.shape).encode() + mask.numpy().tobytes()].append(row)
    found: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    for rows in same.values():
        for row in rows:
            for other in rows:
                if builder(other.name) != builder(row.name):
                    found[builder(row.name)][row.name, other.name] = None
    return {name: tuple(pairs) for name, pairs in found.items()}


def _trivial(graph: TokenGraph) -> bool:
    src, dst = graph.edge_index
    return bool((src == dst).all())


def builder(call: str) -> str:
    """The outermost builder of an expression: the one whose theorem it states.

    >>> builder("window(n, 3)")
    'window'
    """
    found = re.search(r"\b(" + "|".join(patterns.__all__) + r")\(", call)
    return found[1] if found else ""


# ---- papers


def papers(name: str) -> list[str]:
    """The ids of arXiv that a builder's docstring names."""
    return list(dict.fromkeys(ARXIV.findall(inspect.getdoc(getattr(patterns, name)) or "")))


def paper_links(ids: Iterable[str]) -> str:
    """Links to papers."""
    return ", ".join(f"[arXiv {one}](https://arxiv.org/abs/{one})" for one in ids)


# ---- pages


def page(entry: Entry) -> str:
    """The page of a builder."""
    parts = [
        f"# {entry.name}",
        _figure(entry),
        _facts(entry),
        _signature(entry),
        _same(entry),
        _theorem(entry),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _figure(entry: Entry) -> str:
    if entry.edges is None:
        return ""
    words = f"Mask of {entry.example}: a row for each receiver, a column for each sender"
    return f'<p><img class="mask" src="{entry.name}.svg" alt="{words}" width="320"></p>'


def _facts(entry: Entry) -> str:
    rate = entry.edges_per_token
    counted = "a value for each edge, no graph" if rate is None else f"{rate:.3g} senders for each receiver"
    drawn = "" if rate is None else f'; draw it: `gnn-attention draw "{entry.example}"`'
    found = papers(entry.name)
    lines = [
        f"Family [{entry.family}](index.md#{entry.family}). The picture: `{entry.example}`, {counted}{drawn}."
        if rate is not None
        else f"Family [{entry.family}](index.md#{entry.family}). Example: `{entry.example}`, {counted}.",
        f"**{'Papers with this graph' if len(found) > 1 else 'Paper'}:** {paper_links(found)}."
        if found
        else "",
    ]
    return "\n\n".join(line for line in lines if line)


def _signature(entry: Entry) -> str:
    return f"```{{eval-rst}}\n.. autofunction:: gnn_attention.patterns.{entry.name}\n```"


def _same(entry: Entry) -> str:
    pairs = equal_rows().get(entry.name, ())
    if not pairs:
        return ""
    known = set(patterns.__all__)
    lines = [
        f"- `{call}` is `{other}`"
        + (f": [{builder(other)}]({builder(other)}.md)" if builder(other) in known else "")
        for call, other in pairs
    ]
    return (
        f"## The same graph\n\nEdge by edge, for n = {SIZE} (or the size of its row below):\n\n"
        + "\n".join(lines)
    )


def _theorem(entry: Entry) -> str:
    rows = [row for row in ROWS if builder(row.name) == entry.name]
    if not rows:
        return ""
    head = ("call", "edge j -> i", "in-degree of i", "layers to full reach")
    cells = [[row.words.get(word, "") for word in ("edge", "degree", "layers")] for row in rows]
    lines = [[row.name, *more] for row, more in zip(rows, cells, strict=True)]
    return (
        "## Theorem\n\nTests check each row for all pairs of tokens at several n; the formulas are Python, written without the "
        "library. i receives, j sends; `once(n)` is 1 layer, `never(n)` none ever, `steps(d, s)` is d / s rounded up.\n\n"
        + table(head, ([_code(cell) for cell in line] for line in lines))
    )


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [[cell.replace("|", r"\|") for cell in row] for row in (head, *rows)]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, "|" + "---|" * len(head), *others])


def index(entries: Sequence[Entry]) -> str:
    """The gallery: families as headings, a card for each builder."""
    families: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        families[entry.family].append(entry)
    parts = [
        "# Zoo",
        f"{len(entries)} builders of graphs. Each page has the picture, the exact edges, the theorem that tests check, the "
        "papers, and which other builders give the same graph. In a picture a row receives and a column sends.",
    ]
    for family, members in families.items():
        cards = "".join(_card(entry) for entry in members)
        parts += [f"## {family}", f'<div class="zoo">{cards}</div>']
    pages = "\n".join(entry.name for entry in entries)
    parts += ["```{toctree}\n:hidden:\n\n" + pages + "\n```"]
    return "\n\n".join(parts) + "\n"


def _card(entry: Entry) -> str:
    shown = (
        f'<img src="{entry.name}.svg" alt="" loading="lazy" width="120">' if entry.edges is not None else ""
    )
    return f'<a class="card" href="{entry.name}.html">{shown}<span>{entry.name}</span></a>'


def graph_of(entry: Entry) -> TokenGraph:
    """The graph of a builder's example."""
    made = expressions.evaluate(entry.example)
    assert isinstance(made, TokenGraph)
    return made


def files() -> Iterator[tuple[str, str]]:
    """(name, text) of every page."""
    entries = catalogue.entries()
    yield "zoo/index.md", index(entries)
    yield from ((f"zoo/{entry.name}.md", page(entry)) for entry in entries)


def pictures() -> Iterator[tuple[str, str]]:
    """(name, text) of every picture: the gallery and the page of a builder show the same file."""
    drawn = (entry for entry in catalogue.entries() if entry.edges is not None)
    yield from ((f"zoo/{entry.name}.svg", picture(graph_of(entry))) for entry in drawn)
