"""The cost constants by which backends are chosen are read from a file, if there is one."""

import json
from dataclasses import asdict, replace

import pytest

from gnn_attention.backends import cost_model
from gnn_attention.backends.cost_model import Costs, costs, path_of_costs, save


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """Use a temporary file, and clear the cache before and after the test."""
    monkeypatch.setenv(cost_model.PATH_VARIABLE, str(tmp_path / "costs.json"))
    costs.cache_clear()
    yield tmp_path / "costs.json"
    costs.cache_clear()


NEW_COSTS = Costs(call=1.0, rectangle=2.0, cell=3.0, edge=4.0, node=5.0, masked_pair=6.0, plain_pair=7.0)


def test_saved_constants_are_read_by_later_calls_and_processes(file):
    """Without a file the defaults hold; saving replaces an older file; unknown entries are ignored."""
    assert costs() == Costs()
    assert not file.exists()
    assert save(Costs()) == save(NEW_COSTS) == file
    assert costs() == NEW_COSTS
    assert costs() is costs()
    file.write_text(json.dumps({"costs": {**asdict(NEW_COSTS), "new": 1.0}, "machine": "mine"}))
    # The cache of a new process is empty.
    costs.cache_clear()
    assert costs() == NEW_COSTS
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_a_file_of_another_version_is_read(file):
    """A missing constant takes its default, an unknown one is ignored, a wrong value is refused."""
    new_costs = {**asdict(NEW_COSTS), "low_cell": 2.0}
    del new_costs["plain_pair"]
    file.write_text(json.dumps({"costs": new_costs}))
    assert costs() == replace(NEW_COSTS, plain_pair=Costs().plain_pair)
    costs.cache_clear()
    file.write_text(json.dumps({"costs": {**new_costs, "cell": "high"}}))
    with pytest.raises(ValueError, match="the constant 'cell' must be a number, got 'high'"):
        costs()


def test_path_of_the_file(monkeypatch, tmp_path):
    """The path is the argument, the variable, or in the user's cache folder; missing folders are created."""
    assert path_of_costs() == tmp_path / "costs.json"
    assert save(NEW_COSTS, tmp_path / "a" / "b.json") == tmp_path / "a" / "b.json"
    assert not path_of_costs().exists()
    monkeypatch.delenv(cost_model.PATH_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert path_of_costs() == tmp_path / "cache" / "gnn_attention" / "costs.json"
    assert save(NEW_COSTS).is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(cost_model.PATH_VARIABLE, "")
    assert path_of_costs() == tmp_path / "home" / ".cache" / "gnn_attention" / "costs.json"


NOT_NUMBERS = [json.dumps({"costs": {"edge": value}}) for value in ("fast", None, [1.0], -1)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cost": {}}', "\x00\xff", *NOT_NUMBERS])
def test_the_error_names_a_damaged_file(file, text):
    file.write_text(text, encoding="latin-1")
    message = r"costs\.json does not hold the constants of .*benchmarks calibrate`, or remove the file"
    with pytest.raises(ValueError, match=message):
        costs()
    save(NEW_COSTS)
    assert costs() == NEW_COSTS
