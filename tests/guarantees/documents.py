"""What a page or a picture is made of: its elements with their attributes, and its text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

FETCHING = {
    *("src", "href", "srcset", "action", "formaction", "data", "poster", "background", "ping", "manifest"),
    *("codebase", "cite"),
}
POLICY = ("default-src 'none'", "base-uri 'none'", "form-action 'none'")


@dataclass
class Document:
    """``elements`` with their attributes, ``texts`` as they are shown, and what is ``wrong``."""

    elements: Counter[tuple[str, ...]] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class _Parser(HTMLParser):
    """Every element with its attributes, and the text inside."""

    def __init__(self) -> None:
        super().__init__()
        self.document, self.inside, self.scripts = Document(), "", list[tuple[dict[str, str | None], str]]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Its text, where it is one of those that a browser does not parse, comes with it."""
        said = (f"{name}={value}" for name, value in attrs)
        self.document.elements[(tag, *said)] += 1
        self.inside = tag
        if tag in ("script", "style"):
            self.scripts.append(({"": tag, **dict(attrs)}, ""))
        self.document.wrong += [
            f"<{tag} {name}>" for name, _ in attrs if name in FETCHING or name.startswith("on")
        ]

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style"):
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)
        elif data.strip():
            self.document.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.document.wrong.append(f"a comment {data[:40]!r}")

    def unknown_decl(self, data: str) -> None:
        self.document.wrong.append(f"a declaration {data[:40]!r}")

    handle_pi = unknown_decl


def html_document(text: str) -> Document:
    """A page of ours: its data are texts; wrong is a request, a comment, and a script or style that its
    policy does not name.

    >>> found = html_document("<p title='a'>b</p>")
    >>> list(found.elements), found.texts, found.wrong
    ([('p', 'title=a')], ['b'], ['it has no policy'])
    """
    parser = _Parser()
    parser.feed(text)
    parser.close()
    found = parser.document
    for attributes, content in parser.scripts:
        if attributes.get("type") == "application/json":
            found.texts += _data(found, content)
    found.wrong += _against_policy(
        found, [(str(a[""]), content) for a, content in parser.scripts if "type" not in a]
    )
    return found


def _against_policy(found: Document, running: list[tuple[str, str]]) -> Iterator[str]:
    said = [
        part.removeprefix("content=")
        for element in found.elements
        for part in element
        if part.startswith("content=default-src")
    ]
    if len(said) != 1:
        yield "it has no policy" if not said else "it has several policies"
        return
    rules = [rule.strip() for rule in said[0].split(";")]
    yield from (f"its policy lacks {rule}" for rule in POLICY if rule not in rules)
    for kind, content in running:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        if f"{kind}-src 'sha256-{digest}'" not in rules:
            yield f"its policy does not name its {kind}"


def _data(found: Document, content: str) -> list[str]:
    try:
        return list(_strings(json.loads(content)))
    except ValueError as error:
        found.wrong.append(f"its data are no JSON: {error}")
        return []


def _strings(found: Any) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    for part in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from _strings(part)


def svg_document(text: str) -> Document:
    """A picture: wrong is what reaches out of it, and a file that is no XML.

    >>> found = svg_document('<svg xmlns="http://www.w3.org/2000/svg"><text x="1">a</text></svg>')
    >>> list(found.elements), found.texts, found.wrong
    ([('svg',), ('text', 'x')], ['a'], [])
    """
    found = Document()
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        found.wrong.append(f"no XML: {error}")
        return found
    for element in root.iter():
        tag = element.tag.rpartition("}")[2]
        names = sorted(name.rpartition("}")[2] for name in element.attrib)
        found.elements[(tag, *names)] += 1
        found.wrong += [
            f"<{tag} {name}={value[:40]}>"
            for name, value in element.attrib.items()
            if _reaches_out(name, value)
        ]
        if tag == "text":
            found.texts.append("".join(element.itertext()))
    return found


def _reaches_out(name: str, value: str) -> bool:
    """True for an attribute that runs or fetches something outside the picture or its data."""
    local = name.rpartition("}")[2]
    if local == "href":
        return not value.startswith(("#", "data:image/png;base64,"))
    fetched = re.findall(r"url\(\s*['\"]?([^)]*)", value)
    return local.startswith("on") or any(not place.startswith("#") for place in fetched)
