"""A Sphinx extension that links each mention of a claim, such as S1.15, to its row in the sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes

MENTION = re.compile(r"\bS\d\.\d+(?: to S\d\.\d+)?")
SOURCES = "docs/sources"
UNLINKED = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.raw)


def resolve(app: Any, tree: nodes.document, name: str) -> None:
    """Make each row of the sources an anchor, and each mention elsewhere a link to it."""
    if name == SOURCES:
        for row in tree.findall(nodes.row):
            row.children[0]["ids"] += MENTION.findall(row.children[0].astext())
        return
    target = app.builder.get_relative_uri(name, SOURCES)
    for text in list(tree.findall(nodes.Text)):
        if MENTION.search(text.astext()) and not _is_inside(text, UNLINKED):
            text.parent.replace(text, list(_link_mentions(text.astext(), target)))


def _link_mentions(text: str, target: str) -> Iterator[nodes.Node]:
    """Split the text and yield each mention as a link; a range links to its first claim."""
    end = 0
    for mention in MENTION.finditer(text):
        yield nodes.Text(text[end : mention.start()])
        yield nodes.reference("", mention[0], refuri=f"{target}#{mention[0].split()[0]}", internal=True)
        end = mention.end()
    yield nodes.Text(text[end:])


def _is_inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def setup(app: Any) -> dict[str, bool]:
    """Run after Sphinx has resolved its own links."""
    app.connect("doctree-resolved", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
