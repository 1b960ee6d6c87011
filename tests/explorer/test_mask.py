"""Test the mask beside the arcs, the names of the rows, the cards of the heads, and the tour by hand."""

from pathlib import Path

import pytest
from support.explorer_browser import assert_quiet, run_jobs

from gnn_attention import explorer

pytestmark = pytest.mark.slow  # a browser is started

PAGE = str(Path(__file__).parents[2] / "docs" / "explore.html")
CELLS, COUNT = [[3, 15], [1, 15], [0, 5], [7, 7]], 16
ROWS = [["weights", ["port"]], ["tokens", ["token"]], ["stream, layer 0", ["phase"]]]
ROWS += [["stream, layer 1", ["phase"]], ["predicts next", ["guess"]]]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_a_cell_of_the_mask_is_an_arc(width: int, height: int) -> None:
    job = {"scenario": "cells", "file": PAGE, "cells": CELLS, "count": COUNT}
    (result,) = run_jobs([{**job, "viewport": {"width": width, "height": height}}])
    assert_quiet(result["seen"])
    assert result["words"] == ["mask", "message passing", "softmax"]
    assert result["names"] == ([ROWS, ROWS] if width > 500 else [[], []])
    for pair, seen in zip(CELLS, result["cells"], strict=True):
        assert seen == {"lights": [1, pair], "changed": [pair], "kinds": [pair], "drawn": 1, "restored": True}
    edits, label = result["byKey"]
    assert [edits[0][name] for name in ("src", "dst", "present")] == [15, 14, True]
    assert label.startswith("added edge from 15 ")
    graph, why, reached, other_graph = result["reach"]
    assert (graph, other_graph) == ("window(32, 6)", "causal(32)")
    assert why.startswith("Graph shown: window(32, 6). In causal(32)")
    assert "reaches 6 of 32 tokens" in reached


def test_the_tour_goes_on_by_hand_and_the_card_agrees_with_it() -> None:
    (result,) = run_jobs([{"scenario": "byHand", "file": PAGE}])
    assert [result[name] for name in ("button", "arc", "cell")] == [["1 of 9", "2 of 9", []]] * 3
    assert result["begin"] == {"token": 15, "sender": 3, "head": 3, "layer": 1}
    assert result["light"] == [3, 15]
    assert "the token after an earlier ‘␣in’ (induction), with weight 0.585" in result["card"]
    assert "self 15, induction 1" in result["card"]
    assert "and this one is an exception: It looks for itself." in " ".join(result["card"].split())


def test_an_english_text_is_told_what_the_model_knows(tmp_path: Path) -> None:
    file = explorer.page("The animal did not cross the street because it was tired").save(tmp_path / "a.html")
    (result,) = run_jobs([{"scenario": "hinted", "file": str(file)}])
    assert "knows Python, not English" in result["hint"]
    assert result["chances"] == sorted(result["chances"], reverse=True)
    assert result["chances"][0] > 0.8
    assert_quiet(result["seen"])
