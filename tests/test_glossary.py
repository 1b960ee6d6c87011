"""The glossary has forty words, each with a picture whose graphs and numbers are true."""

import re
from xml.etree.ElementTree import fromstring

import pytest
import torch

import gnn_attention as ga
from notebooks.glossary_pictures import FOLDER, files

PICTURES = {name.removesuffix(".svg"): fromstring(text) for name, text in files().items()}
ENTRY = re.compile(r"^### (.*)\n\n!\[(.*)\]\(glossary/(.*)\.svg\)\n\n(.*)$", re.MULTILINE)


def test_forty_words_have_a_picture_and_a_chapter():
    """The text beside a picture is the description inside it; test_readme.py follows the links."""
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()} == files()
    entries = ENTRY.findall(FOLDER.with_suffix(".md").read_text(encoding="utf-8"))
    assert len(entries) == len(PICTURES) == 40
    for word, description, name, text in entries:
        assert name == word.lower().replace(" ", "-")
        assert description == PICTURES[name].find("{*}desc").text
        assert re.search(r"Taught in \[chapter \d\d, section \d\]\(\.\./notebooks/\d\d_\w+\.ipynb#\d-", text)


@pytest.mark.parametrize("name", PICTURES)
def test_graphs_and_numbers_are_true(name):
    for shown in PICTURES[name].findall(".//*[@data-graph]"):
        edges = [
            [int(token) for token in e.get("data-edge").split()] for e in shown.iter() if e.get("data-edge")
        ]
        assert sorted(edges) == sorted(eval(shown.get("data-graph"), {"ga": ga}).edge_index.T.tolist())
    for number in PICTURES[name].findall(".//*[@data-formula]"):
        text, value = number.text.strip("±"), eval(number.get("data-formula"), {"ga": ga, "torch": torch})
        assert text == f"{float(value):.{len(text.partition('.')[2])}f}"
