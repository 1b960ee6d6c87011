"""What a stranger sees first: every page that a link leads to, and the numbers of its tour."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_browser import quiet, results
from support.explorer_engine import data_of

from gnn_attention import algebra, explorer
from gnn_attention import model as lm
from gnn_attention.convert import expressions
from gnn_attention.explorer._html import TEMPLATE
from gnn_attention.interpret import trace

pytestmark = pytest.mark.slow  # a browser is started

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BEFORE, AFTER = re.findall(r"falls from (\d+) to (\d+ %)", README)[0]
TITLE = "for name in names: ⏎ print(name) ⏎ for name in"
ONE_LINE = " ".join(explorer.FIRST.split())


def links() -> dict[Path, set[str]]:
    """The pages of HTML that README, docs and notebooks link to, and from where."""
    found: dict[Path, set[str]] = {}
    for file in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            text = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        for target in re.findall(r"\]\((?!\w+:)([^)#\s]+\.html)", text):
            found.setdefault((file.parent / target).resolve(), set()).add(file.name)
    return found


def test_every_linked_page_opens_with_the_tour() -> None:
    pages = links()
    assert {"README.md", "index.md"} <= set().union(*pages.values())
    for shown in results([{"scenario": "toured", "file": str(page)} for page in pages]):
        quiet(shown["seen"])
        assert (shown["title"], shown["heading"]) == (TITLE, TITLE)
        assert f"with {BEFORE} %" in shown["stops"][0][0]
        assert f"falls from {BEFORE} % to {AFTER}." in shown["stops"][2][0]


def test_the_numbers_of_the_tour_are_those_of_its_text(tmp_path: Path) -> None:
    """With line breaks and without, which the titles tell apart."""
    texts = {TITLE: explorer.FIRST, ONE_LINE: ONE_LINE}
    pages = [explorer.page(text).save(tmp_path / f"{len(text)}.html") for text in texts.values()]
    jobs = [{"scenario": "toured", "file": str(page)} for page in pages]
    for title, page, shown in zip(texts, pages, results(jobs), strict=True):
        quiet(shown["seen"])
        assert (shown["title"], shown["heading"]) == (title, title)
        check_tour(data_of(page), shown["stops"])


@torch.no_grad()
def check_tour(data: dict[str, Any], stops: list[Any]) -> None:
    """A click cuts an edge or takes a graph; what it tells is a probability or the weight of an edge."""
    (model, vocabulary), ids = lm.load_trained(), [token["id"] for token in data["tokens"]]
    window = next(mask["name"] for mask in data["masks"] if mask["name"].startswith("window("))
    last, (name,) = len(ids) - 1, vocabulary.encode(" name")
    # cut: (src, dst, layer); weight: (src, dst, layer, head)
    tour: list[dict[str, Any]] = [
        {},
        {"weight": (3, last, 1, 3)},
        {"cut": (3, last, 1)},
        {"cut": (1, last, 1)},
        {"weight": (2, 3, 0, 2)},
        {"cut": (2, 3, 0), "weight": (3, last, 1, 3)},
        {"graph": algebra.restrict(expressions.parse(window), range(len(ids)))},
        {},
    ]
    for stop, (_, values) in zip(tour, stops, strict=True):
        graph = [stop["graph"]] if "graph" in stop else []
        src, dst, layer = stop.get("cut", (0, 0, None))
        surgery = () if layer is None else trace.cut([(src, dst)], layers=layer)
        run = trace.record(model.double(), torch.tensor([ids]), *graph, surgery=surgery)
        expected = {}
        if "weight" in stop:
            src, dst, layer, head = stop["weight"]
            expected["tour-weight"] = run.layers[layer].weights([(src, dst)])[0, 0, head].item()
        if "weight" not in stop or "cut" in stop:
            expected["tour-chance"] = run.output[0, last].softmax(-1)[name].item()
        assert set(values) == set(expected)
        for key, value in expected.items():
            assert_exact(values[key], value)


def test_other_texts_have_no_tour(tmp_path: Path) -> None:
    """Nor has this one with a blank at its end: that is a token more, after which another word is likely."""
    texts = (explorer.FIRST + " ", explorer.FIRST.replace("print", "show"), "Llamas do not output words")
    pages = [explorer.page(text).save(tmp_path / f"{number}.html") for number, text in enumerate(texts)]
    seen = results([{"scenario": "toured", "file": str(page)} for page in pages])
    assert [shown["stops"] for shown in seen] == [[], [], []]


def test_the_template_says_that_it_is_one() -> None:
    (said,) = results([{"scenario": "failed", "file": str(TEMPLATE)}])
    assert said.endswith("it is a template without a text. The command gnn-attention explore writes a page.")
