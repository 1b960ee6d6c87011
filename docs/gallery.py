"""Build the pages of the zoo from the package: for each builder its picture, its edges and its papers."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator

import torch

from gnn_attention import TokenGraph, patterns
from gnn_attention.convert import catalogue, expressions
from gnn_attention.convert.catalogue import Entry

ARXIV = re.compile(r"arXiv[: ]\s*(\d{4}\.\d{4,5})")
INK = "#3b82f6"


def picture(graph: TokenGraph, most_heads: int = 4) -> str:
    """Draw the mask as SVG, with receivers in rows, senders in columns and heads side by side.

    >>> picture(patterns.causal(2)).count("<path")
    1
    """
    masks = [graph.select(0, head).mask() for head in range(min(graph.heads or 1, most_heads))]
    rows, columns = masks[0].shape
    width = len(masks) * (columns + 2) - 2
    cells = "".join(_cells(mask, number * (columns + 2)) for number, mask in enumerate(masks))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {rows + 2}" width="320" '
        f'height="{round(320 * (rows + 2) / (width + 2))}">{cells}</svg>\n'
    )


def _cells(mask: torch.Tensor, offset: int) -> str:
    rows, columns = mask.shape
    path = "".join(f"M{offset + src} {dst}h1v1h-1z" for dst, src in mask.nonzero().tolist())
    frame = f'<rect x="{offset}" width="{columns}" height="{rows}" fill="{INK}" fill-opacity=".12"/>'
    return f'{frame}<path d="{path}" fill="{INK}"/>'


def _is_graph(entry: Entry) -> bool:
    return isinstance(expressions.evaluate(entry.example), TokenGraph)


def page(entry: Entry) -> str:
    """Return the page of a builder in reStructuredText."""
    family = f"Family `{entry.family} <../zoo.html#{entry.family}>`__."
    facts = f"{family} Example: ``{entry.example}``, which gives a value for each edge instead of a graph."
    image = ""
    if _is_graph(entry):
        image = (
            f".. image:: {entry.name}.svg\n   :class: mask\n   :width: 320\n"
            f"   :alt: Mask of {entry.example}: a row for each receiver, a column for each sender\n"
        )
        facts = f'{family} The picture: ``gnn-attention draw "{entry.example}"``.'
    ids = dict.fromkeys(ARXIV.findall(inspect.getdoc(getattr(patterns, entry.name)) or ""))
    links = ", ".join(f"`arXiv {paper} <https://arxiv.org/abs/{paper}>`__" for paper in ids)
    papers = f"**{'Papers with this graph' if len(ids) > 1 else 'Paper'}:** {links}." if ids else ""
    signature = f".. autofunction:: gnn_attention.patterns.{entry.name}"
    return "\n\n".join([f"{entry.name}\n{'=' * len(entry.name)}", image, facts, papers, signature]) + "\n"


def index() -> str:
    """Return the gallery in Markdown, with a heading for each family and a card for each builder."""
    entries = catalogue.entries()
    families: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        families[entry.family].append(entry)
    parts = [
        "# Zoo: masks from papers",
        f"{len(entries)} builders of graphs. Each page has a picture, the exact edges and the papers. In a picture, rows "
        "are receivers and columns are senders.",
    ]
    for family, members in families.items():
        cards = "\n\n".join(_card(entry) for entry in members)
        parts += [f"## {family}", f"````{{container}} zoo\n\n{cards}\n````"]
    pages = "\n".join(f"zoo/{entry.name}" for entry in entries)
    return "\n\n".join([*parts, "```{toctree}\n:hidden:\n\n" + pages + "\n```"]) + "\n"


def _card(entry: Entry) -> str:
    link = f"[{entry.name}](zoo/{entry.name}.rst)"
    if not _is_graph(entry):
        return f"{{.card}}\n{link}"
    options = f":figclass: card\n:target: zoo/{entry.name}.html\n:width: 120\n:alt: Mask of {entry.example}"
    return f"```{{figure}} zoo/{entry.name}.svg\n{options}\n\n{link}\n```"


def files() -> Iterator[tuple[str, str]]:
    """Yield (file name, text) for the page of each builder and for its picture."""
    for entry in catalogue.entries():
        yield f"{entry.name}.rst", page(entry)
        if _is_graph(entry):
            yield f"{entry.name}.svg", picture(expressions.parse(entry.example))
