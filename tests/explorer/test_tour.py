"""Test the tour, and the pages to which README, docs and notebooks link."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_browser import assert_quiet, run_jobs

from gnn_attention import TokenGraph, explorer, patterns
from gnn_attention import model as lm
from gnn_attention.explorer._html import TEMPLATE
from gnn_attention.interpret import trace

pytestmark = pytest.mark.slow  # a browser is started

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BEFORE, AFTER = re.findall(r"falls from (\d+) to (\d+ %)", README)[0]
TITLE = "for name in names: ⏎ print(name) ⏎ for name in"
# Each stop shows a probability, the weight of an edge, or both; the riddle compares them with others.
CHANCE, WEIGHT = "tour-chance", "tour-weight"
RIDDLE = f"{CHANCE} tour-cut tour-missing", f"{WEIGHT} {WEIGHT}-before tour-senders"
STOPS = [CHANCE, WEIGHT, CHANCE, CHANCE, WEIGHT, f"{CHANCE} {WEIGHT}", *RIDDLE, CHANCE, CHANCE]


def links() -> dict[Path, set[str]]:
    """Return the HTML pages to which README, docs and notebooks link, and the linking files."""
    pages: dict[Path, set[str]] = {}
    for file in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            text = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        for target in re.findall(r"\]\((?!\w+:)([^)#\s]+\.html)", text):
            pages.setdefault((file.parent / target).resolve(), set()).add(file.name)
    return pages


def test_every_linked_page_opens_with_the_tour() -> None:
    pages = links()
    assert {"README.md", "index.md"} <= set().union(*pages.values())
    for visit in run_jobs([{"scenario": "toured", "file": str(page)} for page in pages]):
        assert_quiet(visit["seen"])
        assert (visit["title"], visit["heading"]) == (TITLE, TITLE)
        assert f"probability {BEFORE} %" in visit["stops"][0][0]
        assert f"falls from {BEFORE} % to {AFTER}." in visit["stops"][2][0]


def test_the_text_in_one_line_has_a_tour_too(tmp_path: Path) -> None:
    """Its numbers come from the engine, which is compared with torch; the titles differ."""
    text = " ".join(explorer.FIRST.split())
    (visit,) = run_jobs([{"scenario": "toured", "file": str(explorer.page(text).save(tmp_path / "a.html"))}])
    assert_quiet(visit["seen"])
    assert (visit["title"], visit["heading"]) == (text, text)
    assert [{*values} for _, values in visit["stops"]] == [{*names.split()} for names in STOPS]


def test_the_riddle_of_the_window_has_the_numbers_of_torch() -> None:
    """A window lacks 55 of 136 edges and leaves more than one cut does, until a second edge is cut."""
    (visit,) = run_jobs([{"scenario": "toured", "file": str(ROOT / "docs" / "explore.html")}])
    model, vocabulary = lm.load_trained()
    ids, window = vocabulary.encode(explorer.FIRST), patterns.window(16, 6)

    @torch.no_grad()
    def chance(graph: TokenGraph, *pairs: tuple[int, int]) -> float:
        edits = trace.cut(pairs, layers=1) if pairs else ()
        run = trace.record(model.double(), torch.tensor([ids]), graph, interventions=edits)
        return float(run.output[0, -1].softmax(-1)[vocabulary.encode(" name")[0]])

    (_, riddle), _, (_, answer) = visit["stops"][6:9]
    assert riddle.pop("tour-missing") == 136 - window.num_edges - 1 == 54
    expected = [chance(window), chance(patterns.causal(16), (3, 15)), chance(window, (10, 15))]
    assert_exact([riddle["tour-chance"], riddle["tour-cut"], answer["tour-chance"]], expected)
    assert [round(100 * value) for value in expected] == [30, 17, 22]


def test_other_texts_have_no_tour(tmp_path: Path) -> None:
    """The same text with a final blank has one more token, and another next word is likely."""
    texts = (explorer.FIRST + " ", explorer.FIRST.replace("print", "show"), "Llamas do not output words")
    pages = [explorer.page(text).save(tmp_path / f"{number}.html") for number, text in enumerate(texts)]
    visits = run_jobs([{"scenario": "toured", "file": str(page)} for page in pages])
    assert [visit["stops"] for visit in visits] == [[], [], []]


def test_the_template_says_that_it_is_one() -> None:
    (text,) = run_jobs([{"scenario": "failed", "file": str(TEMPLATE)}])
    assert text.endswith("it is only a template. The command gnn-attention explore writes a page of a text.")
