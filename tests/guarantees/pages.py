"""F11: hostile texts in every place of every page and picture that shows a text.

A page with such a text has the elements and the attributes of the same page with harmless words, runs and
fetches nothing else, and shows the text as it is, its markup as letters.
Pictures are written twice, with texts as texts, which are compared, and as matplotlib usually writes them, as
shapes.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from html.parser import HTMLParser

from gnn_attention._support.text import printable
from tests.guarantees.documents import Document, html_document, svg_document
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.hostile_texts import TEXTS
from tests.guarantees.surfaces import SURFACES, Surface, written

SPREAD = 12  # places from one case to the next: pages and pictures in turn
MOST_LINES = 3 * 64  # letters of a title that is broken into lines: of a longer one the end is left out


def complaints(surface: Surface, text: str) -> list[str]:
    """What is wrong with a text in a place; ``[]`` if nothing is.

    >>> complaints(SURFACES[0], "<script>window.ran=1</script>")
    []
    """
    given = surface.accepted(text)
    try:
        found = _documents(surface, given)
    except Exception as error:
        return [f"raised {type(error).__name__}: {str(error)[:200]}"]
    new = [
        more
        for one, other in zip(found, _harmless(surface), strict=True)
        for more in _new(surface, one, other)
    ]
    lost = [] if _is_shown(surface, given, found[0].texts) else ["the text is not shown as it is"]
    return [*new, *(wrong for one in found for wrong in one.wrong), *lost]


@cache
def _harmless(surface: Surface) -> list[Document]:
    return _documents(surface, surface.accepted("harmless words"))


def _documents(surface: Surface, text: str) -> list[Document]:
    """What is made: one page, or a picture with its texts as texts and as shapes."""
    if surface.kind == "svg":
        return [svg_document(one) for one in written(surface.make, text)]
    made = surface.make(text)
    return [html_document(made) if surface.kind == "html" else _framed(made)]


def _new(surface: Surface, found: Document, harmless: Document) -> list[str]:
    """Elements that the harmless one does not have; of a picture kinds of them, as each letter is one."""
    known = {*harmless.elements, *_LETTERS} if surface.kind == "svg" else set()
    more = [element for element in found.elements - harmless.elements if element not in known]
    return [f"new element <{' '.join(element)[:200]}>" for element in more]


_LETTERS = {  # and a stroke of no length, where a long label leaves the axes no room
    ("path", "style"),
    ("text", "style", "transform"),
    ("use", "href", "x"),
    ("use", "href", "transform"),
    ("use", "href"),
    ("path", "d", "id", "transform"),
    ("path", "d", "id"),
}


class _Frame(HTMLParser):
    """The attributes of the one frame, and how many elements there are."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.attributes = 0, dict[str, str | None]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count, self.attributes = self.count + 1, dict(attrs)


def _framed(text: str) -> Document:
    """The page inside a notebook's frame, which stands alone, is closed off, and has a title."""
    parser = _Frame()
    parser.feed(text)
    found = html_document(parser.attributes.pop("srcdoc", None) or "")
    found.texts.append(parser.attributes.pop("title", None) or "")
    found.elements += Counter(
        [("frame", *(f"{name}={value}" for name, value in sorted(parser.attributes.items())))]
    )
    if parser.count != 1:
        found.wrong.append(f"{parser.count} elements around the page")
    return found


def _is_shown(surface: Surface, text: str, texts: list[str]) -> bool:
    """True if the text is there: in a page's data exactly, else as what can be printed of it."""
    if surface.kind == "html" and text in texts:
        return True
    wanted = _letters(printable(text)[: surface.longest or MOST_LINES])
    return wanted in _letters("".join(texts))


def _letters(text: str) -> str:
    return "".join(text.split())


def measure(count: int, tell: Tell) -> Measured:
    """``count`` pairs of a place and a text, at first every place with another text."""
    most = len(SURFACES) * len(TEXTS)
    pairs = [
        (k * SPREAD % len(SURFACES), (k // len(SURFACES) + k % len(SURFACES)) % len(TEXTS))
        for k in range(min(count, most))
    ]
    failures: list[str] = []
    for number, (place, which) in enumerate(pairs):
        if number % 100 == 0:
            tell(f"{number} of {len(pairs)} pages and pictures, {len(failures)} failures so far")
        if found := complaints(SURFACES[place], TEXTS[which]):
            failures.append(
                f"{SURFACES[place].name}, text {which} {TEXTS[which][:40]!a}: {'; '.join(found)[:400]}"
            )
    value = f"{len(failures)} of {len(pairs):,} pages and pictures had an element, an attribute or a request more, or a text less"
    return Measured(value, tuple(failures), () if pairs else ("every page: 0 cases",))


GUARANTEE = Guarantee(
    name="F11",
    promise=(
        "a text is a text in every page and picture: nothing in it runs, fetches or changes what stands "
        "around it"
    ),
    bar="40 texts in each of 35 places: 0 new elements or attributes, 0 requests, each shown as it is",
    quick=8,
    full=40 * 35,
    measure=measure,
)
