"""The suite ``attention``: every method against the oracle, wrong ones caught, skips recorded, all of it."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import attention, checked, measure, methods, process
from benchmarks.__main__ import main
from benchmarks.measure import Guard, Settings, Timing, paired_ratio, timed_rounds
from benchmarks.methods import PEERS, Method, Prepared
from benchmarks.workloads import CAUSAL, EAGER, FLEX, MASKED, MHA, PYG, WORKLOADS, Problem
from gnn_attention import TokenGraph, attend, patterns
from gnn_attention.verify.measure import EXACT

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

TINY = Settings(budget=0.002, most=3, shortest=0.0, retries=0, patience=0.0)
# not symmetric; receiver 2 is isolated
EDGES = torch.tensor([[0, 1, 2, 2, 5, 6, 3, 3, 0], [1, 1, 0, 3, 4, 4, 5, 6, 6]])


def problem(graph, layer=False):
    return Problem.draw(graph, layer, heads=2, dim=8)


@pytest.fixture
def in_this_process(monkeypatch):
    """No forks in a test process, whose threads they would not survive."""

    def here(work):
        try:
            return work()
        except Exception as error:
            raise RuntimeError(process.one_line(error)) from error

    monkeypatch.setattr(process, "in_a_fork", here)


class TestWorkloads:
    @pytest.mark.parametrize(
        ("name", "edges"),
        [
            ("a512", 512 * 513 // 2),
            ("b131072", 131072 * 256 - 255 * 256 // 2),
            ("e4096", 4096 * 32),
            ("g34", 2 * 78 + 34),
            ("x-edges-64", 2048 * 32),
        ],
    )
    def test_graphs_have_the_edges_of_their_names(self, name, edges):
        graph = WORKLOADS[name].graph()
        assert graph.num_edges == edges
        assert graph.num_dst == graph.num_src == WORKLOADS[name].tokens


GRAPHS = {
    "causal": patterns.causal(40),
    "window": patterns.window(70, 9),
    "listed": TokenGraph.from_edges(EDGES, 7),
    "long": patterns.window(700, 20),  # of which receivers are sampled
}
FITS = {CAUSAL: ["causal"], FLEX: []}  # a compiler takes too long here: see the slow test


class TestChecked:
    @pytest.mark.parametrize(
        ("peer", "graph"),
        [(peer, graph) for peer in PEERS if peer != MHA for graph in FITS.get(peer, GRAPHS)],
    )
    def test_peers_agree_with_the_oracle(self, peer, graph):
        if PEERS[peer].missing():
            pytest.skip(str(PEERS[peer].missing()))
        if peer == EAGER and graph == "listed":
            pytest.skip("an additive mask makes NaN of an isolated receiver")
        posed = problem(GRAPHS[graph])
        found = checked.Checked(posed).verdict(PEERS[peer].prepare(posed), backward=True)
        assert found.passed, str(found)

    @pytest.mark.parametrize("peer", [MHA, MASKED, PYG, "auto"])
    @pytest.mark.parametrize("graph", ["window", "long"])
    def test_layers_agree_with_the_oracle(self, peer, graph):
        posed = problem(GRAPHS[graph], layer=True)
        method = {**PEERS, "auto": methods.ours()[0]}[peer]
        found = checked.Checked(posed).verdict(method.prepare(posed), backward=True)
        assert found.passed, str(found)

    @pytest.mark.parametrize("graph", ["window", "long"])
    @pytest.mark.parametrize("fault", ["one sender more", "no scale", "one row off", "a gradient less"])
    def test_a_wrong_method_is_caught(self, graph, fault):
        """Also where it is wrong on one sampled receiver only, or in the gradient of k only."""
        posed = problem(GRAPHS[graph])
        wrong = checked.Checked(posed).verdict(Prepared(FAULTS[fault](posed.graph)), backward=True)
        assert not wrong.passed
        assert "of SDPA's own (allowed 2), gradient" in str(wrong)


def _one_row_off(graph):
    def run(q, k, v):
        out = attend(q, k, v, graph)
        last = torch.zeros_like(out)
        last[:, :, -1] = 1e-4
        return out + last

    return run


FAULTS = {
    "one sender more": lambda graph: lambda q, k, v: attend(q, k, v, patterns.window(graph.num_dst, 21)),
    "no scale": lambda graph: lambda q, k, v: attend(q, k, v, graph, scale=1.0),
    "one row off": _one_row_off,
    "a gradient less": lambda graph: lambda q, k, v: attend(q, 0.99 * k + 0.01 * k.detach(), v, graph),
}


class TestTiming:
    def test_slow_methods_take_part_in_few_rounds_evenly(self):
        settings = Settings(budget=1.0, fewest=2, most=10, shortest=0.0)
        guard = Guard(0.5, 0.0, probe=lambda: 1.0)
        timings = timed_rounds({"fast": int, "slow": int}, settings, guard, {"fast": 0.01, "slow": 0.4})
        assert sorted(timings["fast"].seconds) == list(range(10))
        assert sorted(timings["slow"].seconds) == [4, 9]

    def test_ratios_are_paired_by_round(self):
        """Medians alone would say 10 / 2."""
        ours, theirs = Timing(1, 3, {0: 1.0, 1: 2.0, 2: 100.0}), Timing(1, 3, {0: 4.0, 1: 10.0, 2: 300.0})
        assert paired_ratio(ours, theirs) == 4.0
        assert paired_ratio(Timing(1, 1, {5: 1.0}), theirs) is None


class TestMeasureProblem:
    def run(self, posed, some, monkeypatch, **changes):
        monkeypatch.setattr(attention, "limits", lambda: {"gemm_gflops": 100.0, "copy_gb_s": 10.0})
        monkeypatch.setattr(measure, "PROBE", 64)
        about, cases = attention.measure_problem(posed, some, replace(TINY, **changes), threads=1)
        return about, {(case["method"], case["pass"]): case for case in cases}

    @pytest.mark.slow
    def test_every_case_is_measured_or_says_why_not(self, in_this_process, monkeypatch):
        posed = problem(patterns.window(70, 9))
        some = [
            *methods.ours(["dense", "reference"]),
            PEERS[MASKED],
            PEERS[CAUSAL],
            PEERS[PYG],
            Method("absent", _never, modules=("no_such_package",)),
            Method("hungry", _never, bytes_needed=lambda posed, both: 2**40),
            Method("slow", _never, seconds_needed=lambda posed, both: 60.0),
            Method("forward only", methods.ours()[0].prepare, backward="no backward pass"),
            Method("wrong", lambda posed: Prepared(FAULTS["no scale"](posed.graph))),
            Method("broken", _broken),
        ]
        about, cases = self.run(posed, some, monkeypatch)
        assert (about["edges"], about["heads"], about["dim"]) == (9 * 70 - 36, 2, 8)
        assert len(cases) == 2 * len(some)
        for name in ("auto", "dense", "reference", MASKED, PYG):
            for which in attention.PASSES:
                self.is_measured(cases[name, which], posed, which)
        both = {name: (cases[name, "both"]["status"], cases[name, "both"].get("reason")) for name, _ in cases}
        assert both["absent"] == ("missing", "no_such_package is not installed (ModuleNotFoundError)")
        assert both["hungry"] == ("out of memory by estimate", "1024.0 GiB, the limit is 14.0")
        assert both["slow"] == ("too slow by estimate", "60 s a call, the limit is 20")
        assert both["wrong"][0] == "wrong"
        assert both["forward only"] == ("refused", "no backward pass")
        assert both["broken"] == ("failed", "ValueError: it does not work")
        assert cases["wrong", "forward"]["output_error"] > 2
        assert cases["forward only", "forward"]["status"] == "measured"
        assert cases[CAUSAL, "forward"]["reason"] == "the graph is not causal"

    def is_measured(self, case, posed, which):
        assert case["status"] == "measured"
        assert case["samples"] == 3
        assert 0 < case["fastest"] <= case["seconds"]
        assert case["memory_mb"] >= 0
        assert case["output_error"] <= 2
        assert case["ratio"] > 0
        share = posed.flops(which) / case["seconds"] / 100e9
        assert case["roofline"] == pytest.approx(share, rel=EXACT)
        assert (case["gradient_error"] is None) == (which == "forward")


def _never(posed):
    raise AssertionError("this is left out")


def _broken(posed):
    def run(q, k, v):
        raise ValueError("it does not work")

    return Prepared(run if posed.graph.num_dst != 128 else methods.ours()[0].prepare(posed).call)


class TestEndToEnd:
    @pytest.mark.nightly
    def test_a_whole_run(self, tmp_path, capsys, monkeypatch):
        """The command, in child processes, over a small workload: a record, a report, pictures."""
        monkeypatch.setattr(Settings, "quick", classmethod(lambda cls: replace(TINY, budget=0.01)))
        file = tmp_path / "record.json"
        arguments = ["--workloads", "g34", "--quick", "--no-peers", "--json", str(file)]
        arguments += ["--plots", str(tmp_path)]
        assert main(arguments) == 0
        assert main(arguments) == 0
        record = json.loads(file.read_text(encoding="utf-8"))
        assert (record["bench"], record["schema"], record["quick"]) == ("attention", 1, True)
        assert record["settings"] == asdict(replace(TINY, budget=0.01))
        assert record["variables"]["default"]["OMP_PROC_BIND"] == "true"
        assert [w["workload"] for w in record["workloads"]] == ["g34"]
        assert all(w["limits"]["gemm_gflops"] > 1 for w in record["workloads"])
        for case in record["cases"]:
            assert case["status"] in ("measured", "refused", "missing"), case
            assert ("seconds" in case) == (case["status"] == "measured")
        auto = [case for case in record["cases"] if case["method"] == "auto"]
        assert [(case["workload"], case["pass"], case["status"], case["ratio"]) for case in auto] == [
            (name, which, "measured", 1.0) for name in ("g34",) for which in attention.PASSES
        ]
        assert {target["workload"] for target in record["targets"]} == {"g34"}
        text = capsys.readouterr().out
        assert "karate club (default allocator): 190 edges" in text
