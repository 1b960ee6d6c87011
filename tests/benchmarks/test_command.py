"""Each suite of ``python -m benchmarks`` runs and prints its record; wrong options are refused."""

import argparse
from functools import partial

import pytest
import torch

from benchmarks import batches, compare, primitives, start, training
from benchmarks.__main__ import main
from benchmarks.process import ROOT
from examples.training import Corpus, train
from tests.guarantees.gpu_record import RECORDS

# These tests cover benchmarks, not the library.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training", "--steps", "0"], "steps must be at least 1, got 0"),
        (["--workloads", "b,z"], "there is no workload 'z'; give letters (abc"),
        (["compare", "no/such/folder"], "no/such/folder holds no package"),
        (["--json", "no/such/folder/r.json"], "expected a folder that exists"),
        (["table", "no.json"], "no.json holds no record of the benchmarks"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    assert main([*arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*-bench-[!g]*.json")), ids=lambda path: path.stem)
def test_old_records_can_be_printed(path, capsys):
    assert main(["table", str(path)]) == 0
    assert "threads" in capsys.readouterr().out


def test_two_checkouts_are_compared_in_one_run():
    record = compare.run(argparse.Namespace(checkout=ROOT, workloads="g34", rounds=2))
    assert [case["pass"] for case in record["cases"]] == ["forward", "both"]
    assert all(case["ratio"] == case["seconds"] / case["other_seconds"] > 0 for case in record["cases"])
    assert "| g34 " in compare.text(record)


def test_starts_are_compared_with_the_import():
    record = start.run(argparse.Namespace(rounds=1))
    ratios = {case["program"]: case["ratio"] for case in record["cases"]}
    assert ratios[start.LIBRARY] == 1.0
    assert [row["value"] for row in record["targets"]] == list(ratios.values())[2:]
    assert "| gnn-attention graphs " in start.text(record)


def test_batches_have_the_expected_edges(monkeypatch):
    """No edge occurs twice, and every method is measured and compared with its target."""
    counts = {"32 molecules": 1816, "256 molecules": 14632, "karate club": 156, "in-degree 4": 80_000}
    for name, (build, nodes, _, _) in batches.WORKLOADS.items():
        edges = build()
        assert len(torch.unique(edges[1] * nodes + edges[0])) == edges.shape[1] == counts[name]
    monkeypatch.setattr(batches, "WORKLOADS", {"karate club": batches.WORKLOADS["karate club"]})
    record = batches.run(argparse.Namespace(rounds=2))
    seconds = {case["method"]: case["seconds"] for case in record["cases"]}
    assert record["targets"][0]["value"] == seconds[batches.NEW] / seconds[batches.PYG]
    assert "karate club" in batches.text(record)


@pytest.mark.parametrize("which", ["forward", "both"])
def test_edge_features_are_those_of_torch_geometric(which):
    _, ours, peer = primitives.edge_features(0.002)
    results = [side[which]()() for side in (ours, peer)]
    if which == "both":
        # The peer has one map for keys and values, whose gradient is the sum of both.
        (*_, grad_key, grad_value), grad_weight = results[0], results[1][-1]
        torch.testing.assert_close(
            (grad_key + grad_value).mT.flatten(0, 1), grad_weight, rtol=1e-4, atol=1e-4
        )
        results = [result[:4] for result in results]
    torch.testing.assert_close(*results)


def test_edge_ops_and_rows_agree():
    _, ours, peer = primitives.layer_of_edge_ops(0.004)
    for which in ("forward", "both"):
        torch.testing.assert_close(ours[which]()(), peer[which]()())


def test_primitives_are_compared(monkeypatch):
    """Every row is measured, and the median ratio decides whether its target is met."""
    call = lambda module, function, arguments, variables: getattr(primitives, function)(**arguments)  # noqa: E731
    monkeypatch.setattr(primitives.process, "run_in_process", call)
    record = primitives.run(argparse.Namespace(rounds=1, scale=0.004))
    rows = record["targets"]
    assert [row["bound"] for row in rows] == [target[2] for target in primitives.TARGETS]
    assert rows[0]["value"] == rows[0]["peer"]["median"] / rows[0]["ours"]["median"] > 0
    assert [row["met"] is None for row in rows] == [row["bound"] is None for row in rows]
    assert "layer of edge ops, 65 tokens, 2,080 edges" in primitives.text(record)


def test_both_methods_learn_the_same(monkeypatch):
    """Both methods have nearly the same losses, on a short text in this process."""
    text = Corpus({"a.py": "def read(self):\n    return 1\n" * 60}, {"b.py": "pass\n" * 90})
    monkeypatch.setattr(training, "train", partial(train, text=text))
    call = lambda module, function, arguments: getattr(training, function)(**arguments)  # noqa: E731
    monkeypatch.setattr(training.process, "run_in_process", call)
    record = training.run(argparse.Namespace(tokens=64, steps=3, no_peers=False))
    assert [run["method"] for run in record["runs"]] == ["auto", "SDPA mask"]
    assert record["apart"] < 2e-3
    assert "window(64, 64), 3 steps" in training.text(record)
