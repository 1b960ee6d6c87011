"""``gnn-attention bench`` measures every graph and pass, and says why it skips a method."""

import json
from itertools import product

import pytest
import torch

from gnn_attention import attend
from gnn_attention.__main__ import main
from gnn_attention.cli import bench
from gnn_attention.cli.bench import GRAPHS, NEW_LIST_TITLE, PASSES, PEERS, Problem


def pose(title, tokens=40, dtype=torch.float32, backward=False):
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 1, bench.NUM_HEADS, tokens, bench.DIM, generator=rng, dtype=dtype)
    return Problem(title, GRAPHS[title](tokens), inputs, backward)


@pytest.fixture
def record(monkeypatch, tmp_path, capsys):
    """Return the record and the output of a short run without FlexAttention, which takes long to compile."""
    monkeypatch.setattr(bench, "MAX_SECONDS", 0.001)
    monkeypatch.setitem(PEERS, "FlexAttention", lambda problem: "not compiled")
    file = tmp_path / "record.json"
    assert main(["bench", "--tokens", "64", "--json", str(file)]) == 0
    return json.loads(file.read_text(encoding="utf-8")), capsys.readouterr().out


@pytest.mark.slow
def test_the_record_and_the_table_have_every_graph_and_pass(record):
    content, output = record
    cases = {(case["graph"], case["pass"], case["method"]): case for case in content["cases"]}
    assert set(cases) == set(product(GRAPHS, PASSES, ["attend", *PEERS]))
    for (_, _, method), case in cases.items():
        assert case.get("skipped") == "not compiled" if method == "FlexAttention" else case["seconds"] > 0
        assert ("backend" in case) == (method == "attend")
    assert {case["ratio"] for case in cases.values() if case["method"] == "attend"} == {1.0}
    assert (content["torch"], content["tokens"], content["dtype"]) == (torch.__version__, 64, "float32")
    assert all(f"\n{graph} " in output for graph in GRAPHS)
    assert "[1] skipped: not compiled" in output


def test_a_new_list_is_made_for_every_call(monkeypatch):
    """In other problems, all calls attend along one graph, whose plan is cached."""
    graphs = []
    monkeypatch.setattr(bench, "attend", lambda q, k, v, graph: graphs.append(graph))
    for title in ("causal", NEW_LIST_TITLE):
        problem = pose(title)
        function = bench._prepare_attend(problem)
        graphs.clear()
        for _ in range(2):
            function(*problem.inputs)
        assert graphs[0] == graphs[1] == problem.graph
        assert (graphs[0] is graphs[1]) == (title == "causal")


@pytest.mark.parametrize("name", ["SDPA", "TransformerConv"])
@pytest.mark.parametrize("title", GRAPHS)
def test_peers_compute_the_same(name, title):
    problem = pose(title, dtype=torch.float64)
    out = PEERS[name](problem)(*problem.inputs)
    torch.testing.assert_close(out, attend(*problem.inputs, problem.graph))


def test_why_a_peer_is_skipped(monkeypatch):
    monkeypatch.setattr(bench.memory, "available", lambda: 2000)
    monkeypatch.setitem(PEERS, "broken", lambda problem: 1 / 0)
    cases = [
        ("SDPA", pose("random edges, 32 each"), "SDPA with a mask needs more than half of the free memory"),
        ("TransformerConv", pose("causal"), "TransformerConv needs more than half of the free memory"),
        ("FlexAttention", pose("causal", backward=True), "FlexAttention has no backward pass on a CPU"),
        ("FlexAttention", pose(NEW_LIST_TITLE), "FlexAttention takes a rule, not an edge list"),
        ("broken", pose("causal"), "broken failed: ZeroDivisionError: division by zero"),
    ]
    for name, problem, reason in cases:
        assert bench._prepare_timing(name, problem) == reason
