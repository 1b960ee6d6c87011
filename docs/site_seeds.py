"""An extension of Sphinx: where a page says S1.15 it links to that claim in the sources, and the sources link to the very place.

In the sources each id is an anchor. In a notebook the first mention of an id is one ("S0.4 to S0.6" mentions three).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes

MENTION = re.compile(r"\bS(\d)\.(\d+)(?: to S(\d)\.(\d+))?")
SOURCES = "sources"
NO_PLACE = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.raw)


def ids(text: str) -> list[str]:
    """The ids that a text mentions, those inside a range too.

    >>> ids("seeds S0.4 to S0.6 and S1.2")
    ['S0.4', 'S0.5', 'S0.6', 'S1.2']
    """
    return [
        f"S{seed}.{number}"
        for seed, first, _, last in MENTION.findall(text)
        for number in range(int(first), int(last or first) + 1)
    ]


def resolve(app: Any, tree: nodes.document, name: str) -> None:
    """Put anchors and links into a page."""
    if name == SOURCES:
        _rows(tree)
        return
    if name.startswith("source/"):
        return
    seen: set[str] = set()
    target = app.builder.get_relative_uri(name, SOURCES)
    for node in list(tree.findall(lambda one: isinstance(one, nodes.Text | nodes.literal_block))):
        new = [one for one in ids(node.astext()) if one not in seen]
        if not MENTION.search(node.astext()):
            continue
        if isinstance(node, nodes.literal_block) or _inside(node, NO_PLACE):
            _mark(node, new)
            seen.update(new)
        else:
            node.parent.replace(node, list(_linked(node.astext(), target, seen)))


def _mark(node: nodes.Node, new: list[str]) -> None:
    """Anchors where no link may stand, as in code or in a heading: the block is the anchor, of a heading its section."""
    while not isinstance(node, nodes.literal_block | nodes.paragraph | nodes.section | nodes.document):
        node = node.parent
    node["ids"] += new


def _linked(text: str, target: str, seen: set[str]) -> Iterator[nodes.Node]:
    """The text in pieces: each mention a link, with the anchors of ids that were not seen before."""
    end = 0
    for found in MENTION.finditer(text):
        yield nodes.Text(text[end : found.start()])
        named = ids(found[0])
        anchors = [one for one in named if one not in seen]
        seen.update(anchors)
        yield nodes.reference("", found[0], refuri=f"{target}#{named[0]}", internal=True, ids=anchors)
        end = found.end()
    yield nodes.Text(text[end:])


def _rows(tree: nodes.document) -> None:
    """In the sources: an anchor for each row, and links to the places in notebooks that show it."""
    for row in tree.findall(nodes.row):
        named = ids(row.children[0].astext())
        if named:
            row.children[0]["ids"].append(named[0])
            for link in row.findall(nodes.reference):
                if link.get("refuri", "").startswith("book/"):
                    link["refuri"] += f"#{named[0]}"


def _inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False


def setup(app: Any) -> dict[str, bool]:
    """After Sphinx has resolved its own links."""
    app.connect("doctree-resolved", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
