"""The constants by which backends are chosen: what they add up to, and their file."""

import json
from dataclasses import asdict

import pytest

from gnn_attention.backends import cost_model as module
from gnn_attention.backends.cost_model import Costs, Work, costs, path_of_costs, save
from gnn_attention.verify.measure import EXACT


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """A file of this test's own, and nothing read before it or left after it."""
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "costs.json"))
    costs.cache_clear()
    yield tmp_path / "costs.json"
    costs.cache_clear()


MEASURED = Costs(call=1.0, rectangle=2.0, cell=3.0, edge=4.0, node=5.0, masked_pair=6.0, plain_pair=7.0)


def test_each_part_has_its_price():
    """At 8 heads of 64 channels a call once for all heads; twice the channels cost at most twice as much."""
    prices = {
        "rectangles": 2,
        "weighted_cells": 3,
        "edges": 4,
        "nodes": 5,
        "masked_pairs": 6,
        "plain_pairs": 7,
    }
    for part, price in prices.items():
        work = Work(**{part: 10})
        found = MEASURED.seconds(work + Work(calls=1), heads=8)
        assert found == pytest.approx((8 * 10 * price + 1) * 1e-9, rel=EXACT)
        assert MEASURED.seconds(work, heads=8, dim=128) <= 2 * MEASURED.seconds(work, heads=8)


def test_what_is_saved_is_found_by_the_next_call_and_the_next_process(file):
    """The defaults without a file; the round trip, also over an older file, and of what else a file says."""
    assert costs() == Costs()
    assert not file.exists()
    assert save(Costs()) == save(MEASURED) == file
    assert costs() == MEASURED
    assert costs() is costs()
    file.write_text(json.dumps({"costs": {**asdict(MEASURED), "new": 1.0}, "machine": "mine"}))
    costs.cache_clear()  # as in a new process
    assert costs() == MEASURED
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_a_file_of_an_earlier_version_is_read(file):
    """It lacks the price of low rectangles, which takes its default; a wrong one is refused."""
    older = asdict(MEASURED)
    del older["low_cell"]
    file.write_text(json.dumps({"costs": older}))
    assert costs() == MEASURED
    assert costs().low_cell == Costs().low_cell
    costs.cache_clear()
    file.write_text(json.dumps({"costs": {**older, "low_cell": "high"}}))
    with pytest.raises(ValueError, match="a valid 'low_cell', got 'high'"):
        costs()


def test_where_the_file_is(monkeypatch, tmp_path):
    """The path given, the variable, else the user's cache folder; folders are made."""
    assert path_of_costs() == tmp_path / "costs.json"
    assert save(MEASURED, tmp_path / "a" / "b.json") == tmp_path / "a" / "b.json"
    assert not path_of_costs().exists()
    monkeypatch.delenv(module.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert path_of_costs() == tmp_path / "cache" / "gnn_attention" / "costs.json"
    assert save(MEASURED).is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(module.VARIABLE, "")
    assert path_of_costs() == tmp_path / "home" / ".cache" / "gnn_attention" / "costs.json"


NOT_NUMBERS = [json.dumps({"costs": {"edge": value}}) for value in ("fast", None, [1.0], -1)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cost": {}}', "\x00\xff", *NOT_NUMBERS])
def test_a_damaged_file_is_named(file, text):
    file.write_text(text, encoding="latin-1")
    message = r"costs\.json does not hold the constants of .*benchmarks calibrate`, or remove the file"
    with pytest.raises(ValueError, match=message):
        costs()
    save(MEASURED)
    assert costs() == MEASURED
