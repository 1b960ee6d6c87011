"""The suite ``batches``: every workload has the numbers that it states, and targets compare least times."""

import json

import pytest
import torch

from benchmarks import batches

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

EDGES = {"32 molecules": 1816, "256 molecules": 14632, "karate club": 156, "in-degree 4": 80_000}


@pytest.mark.parametrize("name", batches.WORKLOADS)
def test_a_workload_is_a_graph_of_its_size(name):
    """Without an edge twice, and undirected but for the random senders."""
    workload = batches.WORKLOADS[name]
    edges = workload.edges()
    keys = edges[1] * workload.nodes + edges[0]
    assert edges.shape == (2, EDGES[name])
    assert int(edges.max()) < workload.nodes
    assert len(torch.unique(keys)) == EDGES[name]
    if name != "in-degree 4":
        assert torch.equal(torch.unique(keys), torch.unique(edges[0] * workload.nodes + edges[1]))


def test_every_method_is_measured_and_judged(monkeypatch):
    karate = {"karate club": batches.WORKLOADS["karate club"]}
    monkeypatch.setattr(batches, "WORKLOADS", karate)
    record = batches.run_batches(2)
    assert json.loads(json.dumps(record)) == record
    seconds = {case["method"]: case["seconds"] for case in record["cases"]}
    assert list(seconds) == [batches.PYG, batches.NEW, batches.KEPT, batches.MAPS]
    judged = next(row for row in record["targets"] if row["workload"] == "karate club")
    assert judged["value"] == seconds[batches.NEW] / seconds[batches.PYG]
    assert judged["met"] == (judged["value"] <= 1.05)
    assert "karate club" in batches.text(record)
