"""The command ``gnn-attention bench``: a table of attend and its peers, what is skipped, calibration."""

import json
from itertools import count, product
from types import SimpleNamespace

import pytest
import torch

from gnn_attention import attend, patterns
from gnn_attention.__main__ import main
from gnn_attention._support.progress import Progress
from gnn_attention.backends import cost_model
from gnn_attention.cli import bench, bench_methods, calibrate
from gnn_attention.cli.bench_methods import METHODS, OURS, PASSES, Anew, Comparison, Method, Problem

CPU = torch.device("cpu")


def problem(tokens=40):
    return Problem.draw(lambda n: patterns.window(n, 5), tokens, CPU, torch.float32)


def cases(names):
    compared = Comparison(lambda n: patterns.window(n, 8), 64, CPU, torch.float32, 0.1)
    found = compared.cases(names, "", Progress("bench", shown=False))
    return {(case["method"], case["pass"]): case for case in found}


@pytest.mark.slow
def test_the_record_and_the_table_have_every_graph_and_pass(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "SECONDS", 1.0)  # nothing is compiled
    file = tmp_path / "record.json"
    assert main(["bench", "--tokens", "64", "--json", str(file)]) == 0
    record = json.loads(file.read_text(encoding="utf-8"))
    found = {(case["graph"], case["pass"], case["method"]) for case in record["cases"]}
    assert found == set(product(bench.GRAPHS, PASSES, METHODS))
    assert [row["passed"] for row in record["checks"]] == [True] * len(bench.GRAPHS)
    measured = [case for case in record["cases"] if case["status"] == "measured"]
    assert all(case["seconds"] > 0 and case["bytes"] > 0 for case in measured)
    assert (record["torch"], record["tokens"], record["dtype"]) == (torch.__version__, 64, "float32")
    out = capsys.readouterr().out
    assert all(f"\n{graph} " in out for graph in bench.GRAPHS)
    assert "skipped: FlexAttention has no backward pass on a CPU" in out
    assert "skipped: FlexAttention takes a rule, not an edge list" in out


@pytest.mark.slow
def test_ours_alone_as_json(capsys):
    assert main(["bench", "--tokens", "16", "--no-peers", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {case["method"] for case in record["cases"]} == {OURS}
    assert all(case["backend"] for case in record["cases"])


def test_a_chosen_graph_is_made_anew_for_every_call():
    """Not by peers, which take a mask that was made before."""
    made = []
    posed = Problem.draw(Anew(lambda n: made.append(n) or patterns.window(n, 5)), 40, CPU, torch.float32)
    ours, peer = (METHODS[name].prepare(posed) for name in (OURS, "SDPA"))
    made.clear()
    for function in (ours, peer, ours):
        function(posed.q, posed.k, posed.v)
    assert made == [40, 40]


@pytest.mark.parametrize("name", ["SDPA", "PyG TransformerConv"])
@pytest.mark.parametrize("build", bench.GRAPHS.values(), ids=bench.GRAPHS)
def test_peers_compute_the_same(name, build):
    posed = Problem.draw(build, 40, CPU, torch.float64)
    if METHODS[name].unsupported(posed, False):
        return
    out = METHODS[name].prepare(posed)(posed.q, posed.k, posed.v)
    torch.testing.assert_close(out, attend(posed.q, posed.k, posed.v, posed.graph))


def test_a_wrong_result_is_seen_and_ends_with_code_1(monkeypatch, capsys):
    wider = lambda posed: lambda q, k, v: attend(q, k, v, patterns.window(q.shape[2], 6))  # noqa: E731
    monkeypatch.setattr(bench_methods, "_attend", wider)
    assert not bench_methods.largest_errors(problem())["passed"]
    graphs = {"window": lambda n: patterns.window(n, 5), "right": lambda n: patterns.window(n, 6)}
    monkeypatch.setattr(bench, "GRAPHS", graphs)
    assert main(["bench", "--tokens", "16", "--no-peers"]) == 1
    assert "WRONG on window (" in capsys.readouterr().out
    nan = lambda posed: lambda q, k, v: attend(q, k, v, posed.graph) * torch.nan  # noqa: E731
    monkeypatch.setattr(bench_methods, "_attend", nan)
    assert not bench_methods.largest_errors(problem())["passed"]


class TestSkipped:
    def test_what_does_not_fit_into_memory(self, monkeypatch):
        monkeypatch.setattr(bench_methods, "SMALL", 16)
        monkeypatch.setattr(bench_methods, "_room", lambda device: 1000.0)
        found = cases([OURS, "SDPA"])
        case = found["SDPA", "forward"]
        assert case["status"] == "skipped"
        assert (case["reason"][:17], case["needs"][-3:]) == ("SDPA needs about ", "GiB")

    def test_what_takes_too_long(self, monkeypatch):
        monkeypatch.setattr(bench_methods, "SMALL", 16)
        monkeypatch.setattr(bench_methods, "LONGEST", 0.0)
        assert cases([OURS, "SDPA"])["SDPA", "forward"]["reason"].startswith("a call of SDPA takes about ")

    def test_what_fails_leaves_the_others(self, monkeypatch):
        def broken(posed):
            raise RuntimeError("no kernel\nand more")

        monkeypatch.setitem(METHODS, "broken", Method(broken))
        found = cases([OURS, "broken"])
        assert found["broken", "forward"]["reason"] == "broken failed: RuntimeError: no kernel"
        assert found[OURS, "with backward"]["time_ratio"] == 1.0


def test_the_peak_is_what_lives_at_a_time():
    """Two of three tensors of 4 MB live together."""

    def call():
        first = torch.ones(2**20)
        second = first + 1
        del first
        return second + 1

    assert 8 * 2**20 <= bench_methods.peak_bytes(call, CPU) < 9 * 2**20


def test_calibrate_is_reached_and_its_constants_are_read(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(cost_model.VARIABLE, str(tmp_path / "costs.json"))
    monkeypatch.setattr(calibrate, "CASES", {"few edges": ("rows", lambda: patterns.random_senders(64, 4))})
    assert main(["bench", "calibrate"]) == 0
    assert f"saved in {tmp_path / 'costs.json'}" in capsys.readouterr().out
    saved, default = cost_model.read(tmp_path / "costs.json"), cost_model.Costs()
    assert saved.edge != default.edge
    assert saved.low_cell != default.low_cell


def test_the_share_of_system_time(monkeypatch):
    """Of a processor that spends a second in the system for every three in the program."""
    seconds = count(1)

    def times():
        passed = float(next(seconds))
        return SimpleNamespace(system=passed, user=3 * passed)

    monkeypatch.setattr(bench_methods.os, "times", times)
    found = cases([OURS, "SDPA"])
    assert {case["system"] for case in found.values()} == {0.25}
    rows = [{"graph": "window 8", "edges": 480, **case} for case in found.values()]
    about = {"tokens": 64, "heads": 8, "dim": 64, "dtype": "float32", "device": "cpu", "torch": "2"}
    line = next(
        line
        for line in bench.table({**about, "checks": [], "cases": rows}).splitlines()
        if "system time" in line
    )
    assert "attend 25% (window 8, forward); SDPA 25% (window 8, forward)." in line
