"""The markup and mathematics in a user's text are shown as letters in pages and pictures."""

import io
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
import torch
from support.extras import needs

from gnn_attention import TokenGraph, draw
from gnn_attention.explorer import Page

MARKUP = "'\"><script>&amp; $\\frac{1}{0}$"


def test_the_title_of_a_page_in_a_notebook():
    parser, elements = HTMLParser(), []
    parser.handle_starttag = lambda tag, attributes: elements.append((tag, dict(attributes)))
    parser.feed(Page("<p>", MARKUP, 3)._repr_html_())
    ((tag, attributes),) = elements
    assert (tag, attributes["srcdoc"], attributes["title"]) == ("iframe", "<p>", MARKUP)


@pytest.mark.parametrize("picture", [draw.mask, draw.graph, draw.arcs, draw.side_by_side])
def test_names_and_labels_of_a_picture(picture):
    matplotlib = needs("matplotlib")
    graph = TokenGraph.from_edges(torch.tensor([[0, 0], [0, 1]]), 2, name=MARKUP)
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        picture(graph, labels=[MARKUP, "b"]).savefig(stream, format="svg")
    elements = ElementTree.fromstring(stream.getvalue()).findall(".//{*}text")
    texts = ["".join(element.itertext()) for element in elements]
    assert sum(MARKUP in text for text in texts) >= 2
    assert "<script" not in stream.getvalue()
