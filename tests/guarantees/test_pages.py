"""F11: texts stay texts in every page and picture, and a place where they do not is seen."""

import json

import pytest
from support.extras import needs

from gnn_attention import explorer
from gnn_attention.explorer import _html
from tests.guarantees import pages
from tests.guarantees.documents import html_document, svg_document
from tests.guarantees.guarantee import no_progress
from tests.guarantees.hostile_texts import TEXTS
from tests.guarantees.surfaces import SURFACES

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone

needs("matplotlib")
needs("transformers")

BY_NAME = {surface.name: surface for surface in SURFACES}


@pytest.fixture(autouse=True)
def _anew():
    yield
    pages._harmless.cache_clear()


def test_there_are_forty_texts_and_the_full_count_is_every_pair():
    assert len(set(TEXTS)) == 40
    assert pages.GUARANTEE.full == 40 * len(SURFACES)
    assert {surface.kind for surface in SURFACES} == {"html", "frame", "svg"}


def test_a_count_sees_every_pair_once(monkeypatch):
    seen = []
    monkeypatch.setattr(pages, "complaints", lambda surface, text: seen.append((surface.name, text)) or [])
    assert pages.measure(pages.GUARANTEE.full, no_progress).holds
    assert len(set(seen)) == len(seen) == pages.GUARANTEE.full
    seen.clear()
    pages.measure(len(SURFACES), no_progress)
    assert len({name for name, _ in seen}) == len({text for _, text in seen}) == len(SURFACES)


def found_in(name, texts=TEXTS):
    return [complaint for text in texts for complaint in pages.complaints(BY_NAME[name], text)]


def test_markup_in_data_is_seen(monkeypatch):
    monkeypatch.setattr(_html, "embedded", lambda data: json.dumps(data))
    assert any(
        "new element <script>" in complaint for complaint in found_in("page: a token's text", TEXTS[:5])
    )


def test_markup_in_a_title_is_seen(monkeypatch):
    monkeypatch.setattr(_html.html, "escape", lambda text, quote=True: text)
    assert any("new element <meta" in complaint for complaint in found_in("page: title", TEXTS[:9]))


def test_an_open_frame_is_seen(monkeypatch):
    framed = explorer.Page._repr_html_
    monkeypatch.setattr(
        explorer.Page, "_repr_html_", lambda page: framed(page).replace("&quot;", '"').replace("&#x27;", "'")
    )
    assert found_in("page in a notebook: title", TEXTS[:9])


def test_a_text_that_is_cut_or_changed_is_seen(monkeypatch):
    monkeypatch.setattr(_html, "embedded", lambda data: EMBEDDED(data).replace("window", "door"))
    assert "the text is not shown as it is" in found_in("page: name of a graph", TEXTS[:1])


EMBEDDED = _html.embedded
PICTURES = (
    "mask: title",
    "mask: labels",
    "arcs: labels",
    "degrees: title",
    "graph of many tokens: labels",
    "benchmark: method",
)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("<img src=a>", "<img src>"),
        ("<p onclick=a>", "<p onclick>"),
        ("<a href=a>", "<a href>"),
        ("<!-- a -->", "a comment"),
        ("<?a b>", "a declaration"),
        ("<p>", "it has no policy"),
        (
            "<meta content=\"default-src 'none'; script-src 'unsafe-inline'\"><script>a</script>",
            "its policy does not name its script",
        ),
        ('<meta content="default-src *">', "its policy lacks default-src 'none'"),
    ],
)
def test_what_is_wrong_with_a_page(text, wrong):
    assert any(wrong in one for one in html_document(text).wrong)


@pytest.mark.parametrize(
    "inside",
    [
        "<image href='http://127.0.0.1/a.png'/>",
        "<a xmlns:l='http://www.w3.org/1999/xlink' l:href='javascript:1'/>",
        "<p style='fill: url(http://127.0.0.1/a)'/>",
        "<p onload='a'/>",
        "<p>",
    ],
)
def test_what_is_wrong_with_a_picture(inside):
    assert svg_document(f"<svg>{inside}</svg>").wrong
    assert not svg_document("<svg><use href='#a'/><p style='clip-path: url(#b)'/></svg>").wrong
