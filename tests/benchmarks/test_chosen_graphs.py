"""The measure of graphs chosen by the data: its selections, its verdicts, and the record that it writes."""

import json

import pytest

import gnn_attention as ga
from benchmarks import chosen_graphs as bench


def test_senders_are_distinct_and_none_is_later():
    """Else from_indices refuses the index."""
    index = bench.chosen(2, 300)
    assert ga.TokenGraph.from_indices(index, 300, causal=True).num_edges == int((index >= 0).sum())
    assert int((index[:, 200:] >= 0).sum(-1).min()) > bench.K // 2


@pytest.mark.parametrize("beyond", [False, True])
def test_a_target_is_met_up_to_its_bound(beyond):
    rows = {}
    for row, numbers in bench.TARGETS.items():
        worse = {"at most": 1.01, "at least": 0.99} if beyond else dict.fromkeys(("at most", "at least"), 1.0)
        rows[row] = {name: bound * worse[sense] for name, (_, sense, bound) in numbers.items()}
    found = bench.judged({"rows": rows})
    assert len(found) == sum(map(len, bench.TARGETS.values()))
    assert {one["met"] for one in found} == {not beyond}


def test_rows_that_are_named_replace_those_of_the_record(tmp_path, monkeypatch):
    values = {name: dict.fromkeys(bench.TARGETS[name], 1.0) for name in bench.MEASURES}
    monkeypatch.setattr(bench, "MEASURES", {name: lambda name=name: dict(values[name]) for name in values})
    first, *others = values
    file = tmp_path / "record.json"
    bench.main([str(file), "--rows", *others])
    assert list(json.loads(file.read_text())["rows"]) == others
    values[others[0]]["growth"] = 2.0
    bench.main([str(file), "--rows", first, others[0]])
    found = json.loads(file.read_text())["rows"]
    assert list(found) == list(values)
    assert (found[others[0]]["growth"], found[others[1]]["of same"]) == (2.0, 1.0)
