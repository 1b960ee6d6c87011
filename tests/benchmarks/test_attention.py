"""The suite ``attention``: every method against the oracle, wrong ones caught, skips recorded, the whole
path.
"""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch

from benchmarks import attention, checked, measure, methods, process, workloads
from benchmarks.__main__ import main
from benchmarks.measure import Guard, Settings, Timing, paired_ratio, timed_rounds
from benchmarks.methods import PEERS, Method, Prepared
from benchmarks.workloads import CAUSAL, EAGER, FLEX, MASKED, MHA, PYG, WORKLOADS, Problem
from gnn_attention import TokenGraph, attend, patterns
from gnn_attention.verify.measure import EXACT

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

TINY = Settings(budget=0.002, most=3, shortest=0.0, retries=0, patience=0.0)
EDGES = torch.tensor(
    [[0, 1, 2, 2, 5, 6, 3, 3, 0], [1, 1, 0, 3, 4, 4, 5, 6, 6]]
)  # not symmetric; receiver 2 is isolated


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
    def test_every_family_has_its_letter(self):
        assert {workload.family for workload in WORKLOADS.values()} == set(workloads.FAMILIES)
        assert all(name in PEERS for workload in WORKLOADS.values() for name in workload.peers)

    @pytest.mark.parametrize(
        ("name", "edges"),
        [
            ("a512", 512 * 513 // 2),
            ("b2048", 2048 * 256 - 255 * 256 // 2),
            ("b131072", 131072 * 256 - 255 * 256 // 2),
            ("e4096", 4096 * 32),
            ("g34", 2 * 78 + 34),
            ("x-tiles-8", 2048 * 256),
            ("x-edges-64", 2048 * 32),
            pytest.param("x-edges-1", 2048**2, marks=pytest.mark.slow),
        ],
    )
    def test_graphs_have_the_edges_of_their_names(self, name, edges):
        graph = WORKLOADS[name].graph()
        assert (graph.num_edges, graph.num_dst, graph.num_src) == (
            edges,
            WORKLOADS[name].tokens,
            WORKLOADS[name].tokens,
        )

    def test_flops(self):
        """4 E H D, 3.5 times that with backward; a layer has four projections of 2 T width^2, three times
        that with backward.
        """
        graph = patterns.causal(5)
        assert problem(graph).flops("forward") == 4 * 15 * 2 * 8
        assert problem(graph).flops("both") == 3.5 * 4 * 15 * 2 * 8
        assert problem(graph, layer=True).flops("forward") == 4 * 15 * 2 * 8 + 4 * 2 * 5 * 16**2
        assert problem(graph, layer=True).flops("both") == 3.5 * 4 * 15 * 2 * 8 + 3 * 4 * 2 * 5 * 16**2

    @pytest.mark.parametrize(
        ("wanted", "quick", "names"),
        [
            (["f64", "g"], False, ["f64", "g34", "g100000"]),
            (["g"], True, ["g34"]),
            (["g100000"], True, ["g100000"]),
        ],
    )
    def test_select(self, wanted, quick, names):
        assert [workload.name for workload in workloads.select(WORKLOADS, wanted, quick)] == names


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

    @pytest.mark.nightly
    def test_flex_agrees_with_the_oracle(self):
        posed = Problem.draw(patterns.window(256, 20))
        assert checked.Checked(posed).verdict(PEERS[FLEX].prepare(posed), backward=False).passed

    @pytest.mark.parametrize("graph", ["window", "long"])
    @pytest.mark.parametrize("fault", ["one sender more", "no scale", "one row off", "a gradient less"])
    def test_a_wrong_method_is_caught(self, graph, fault):
        """Also where it is wrong on one sampled receiver only, or in the gradient of k only."""
        posed = problem(GRAPHS[graph])
        wrong = checked.Checked(posed).verdict(Prepared(FAULTS[fault](posed.graph)), backward=True)
        assert not wrong.passed
        assert "of SDPA's own (allowed 2), gradient" in str(wrong)

    def test_sampled_receivers_hold_both_ends_and_a_run(self):
        rows = checked.sampled_receivers(100_000, 100_000).tolist()
        assert (len(rows), len(set(rows)), rows[0], rows[-1]) == (checked.FEW, checked.FEW, 0, 99_999)
        steps = [b - a for a, b in pairwise(rows)]
        assert steps.count(1) >= checked.FEW // 2 - 1


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
    "a gradient less": lambda graph: (
        lambda q, k, v: attend(q, k.detach() + 0.99 * (k - k.detach()), v, graph)
    ),
}


class TestTiming:
    def test_slow_methods_take_part_in_few_rounds_evenly(self):
        settings = Settings(budget=1.0, fewest=2, most=10, shortest=0.0)
        timings = timed_rounds(
            {"fast": int, "slow": int},
            settings,
            Guard(0.5, 0.0, probe=lambda: 1.0),
            {"fast": 0.01, "slow": 0.4},
        )
        assert sorted(timings["fast"].seconds) == list(range(10))
        assert sorted(timings["slow"].seconds) == [4, 9]

    def test_a_sample_in_noise_is_taken_again(self):
        """The probe is at half of its best after the first sample, and at its best from then on."""
        rates = iter([1.0] * 11 + [0.5] + [1.0] * 10)
        settings = Settings(budget=1.0, fewest=1, most=1, shortest=0.0, retries=2, patience=0.0)
        timing = timed_rounds({"it": int}, settings, Guard(0.8, 0.0, probe=lambda: next(rates)), {"it": 0.0})[
            "it"
        ]
        assert (timing.retries, timing.noisy, len(timing.seconds)) == (1, 0, 1)

    def test_a_guard_that_has_spent_its_allowance_asks_no_more(self):
        """A machine that is never at rest must not hold up the run: its samples are noisy, and that is
        said.
        """
        asked = []

        def probe():
            asked.append(1)
            return 1.0 if len(asked) <= 10 else 0.1

        settings = Settings(budget=1.0, fewest=5, most=5, shortest=0.0, retries=3)
        guard = Guard(0.8, patience=60.0, allowance=0.05, probe=probe)
        timing = timed_rounds({"it": int}, settings, guard, {"it": 0.0})["it"]
        assert guard.exhausted
        assert (timing.noisy, len(timing.seconds)) == (5, 5)
        assert timing.retries <= 1
        assert len(asked) < 20

    def test_a_method_that_raises_leaves_the_others(self):
        settings = Settings(budget=1.0, fewest=1, most=3, shortest=0.0)
        calls = {"good": int, "bad": lambda: 1 // 0}
        timings = timed_rounds(calls, settings, Guard(0.5, 0.0, probe=lambda: 1.0), {"good": 0.0, "bad": 0.0})
        assert isinstance(timings["bad"].error, ZeroDivisionError)
        assert len(timings["good"].seconds) == 3

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
            Method(
                "forward only",
                lambda posed: methods.ours()[0].prepare(posed),
                backward="it has no backward pass",
            ),
            Method("wrong", lambda posed: Prepared(FAULTS["no scale"](posed.graph))),
            Method("broken", _broken),
        ]
        about, cases = self.run(posed, some, monkeypatch)
        assert (about["edges"], about["heads"], about["dim"]) == (9 * 70 - 36, 2, 8)
        assert len(cases) == 2 * len(some)
        for name in ("auto", "dense", "reference", MASKED, PYG):
            for which in attention.PASSES:
                self.is_measured(cases[name, which], posed, which)
        said = {
            name: (cases[name, "both"]["status"], cases[name, "both"]["reason"])
            for name in ("absent", "hungry", "slow", "wrong")
        }
        assert said["absent"] == ("missing", "no_such_package is not installed (ModuleNotFoundError)")
        assert said["hungry"] == ("out of memory by estimate", "1024.0 GiB, the limit is 14.0")
        assert cases["hungry", "both"]["bytes"] == 2**40
        assert said["slow"] == ("too slow by estimate", "60 s a call, the limit is 20")
        assert said["wrong"][0] == "wrong"
        assert cases["wrong", "forward"]["output_error"] > 2
        assert "seconds" not in cases["wrong", "forward"]
        assert (cases["forward only", "forward"]["status"], cases["forward only", "both"]["status"]) == (
            "measured",
            "refused",
        )
        assert cases["forward only", "both"]["reason"] == "it has no backward pass"
        assert cases[CAUSAL, "forward"]["reason"] == "the graph is not causal"
        assert (cases["broken", "both"]["status"], cases["broken", "both"]["reason"]) == (
            "failed",
            "ValueError: it does not work",
        )
        assert json.dumps(list(cases.values()))

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

    def test_memory_is_the_peak_of_the_call(self, in_this_process):
        """64 MB that a call writes and frees; a plan that is kept from the first call is not counted."""
        posed, kept = problem(patterns.causal(20)), []

        def run(q, k, v):
            if not kept:
                kept.append(torch.ones(2**25))
            return q + torch.ones(2**24)[0] * 0

        case = attention._Case(Method("big", lambda posed: Prepared(run), keeps=True), both=False)
        assert 60 < attention._peak_of(case, posed, 1) < 80


def _never(posed):
    raise AssertionError("this is left out")


def _broken(posed):
    def run(q, k, v):
        raise ValueError("it does not work")

    return Prepared(run if posed.graph.num_dst != 128 else methods.ours()[0].prepare(posed).call)


class TestMethods:
    def test_a_backend_far_behind_is_not_timed(self):
        """Tiles that hold an edge or two; of a graph that is quick either way, everything is timed."""
        scattered = patterns.random_senders(20_000, 4, causal=False)
        for graph, names, behind in (
            (scattered, ["tiles", "rows", "flex"], {"tiles", "flex"}),
            (patterns.random_senders(500, 4, causal=False), ["tiles", "rows", "flex"], set()),
            (patterns.causal(4096), ["dense", "tiles", "rows"], set()),
        ):
            posed = Problem(
                graph,
                tuple(torch.empty(1, 8, graph.num_dst, 64, device="meta") for _ in range(3)),
                torch.empty(0),
            )
            refused = {
                method.name: method.unsupported_reason(posed)
                for method in methods.ours(names)
                if method.unsupported_reason
            }
            assert {name for name, reason in refused.items() if reason} == behind
            assert all("which auto takes: not timed" in refused[name] for name in behind)


class TestEndToEnd:
    @pytest.mark.nightly
    def test_a_whole_run(self, tmp_path, capsys, monkeypatch):
        """The command, in child processes, over a small workload: a record, a report, pictures of what there
        is.
        """
        monkeypatch.setattr(Settings, "quick", classmethod(lambda cls: replace(TINY, budget=0.01)))
        file = tmp_path / "record.json"
        arguments = [
            "--workloads",
            "g34",
            "--quick",
            "--no-peers",
            "--json",
            str(file),
            "--plots",
            str(tmp_path),
        ]
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

    def test_a_child_that_dies_leaves_a_record(self, monkeypatch):
        """All of its methods have failed, with the reason; the other workloads go on."""

        def dying(*arguments, **options):
            raise RuntimeError("measure_workload failed: killed by SIGKILL, most likely out of memory")

        monkeypatch.setattr(process, "in_a_process", dying)
        record = attention.run_attention(["g34"], quick=True)
        assert {case["status"] for case in record["cases"]} == {"failed"}
        assert {MASKED, PYG, "auto"} <= {case["method"] for case in record["cases"]}
        assert all(target["met"] is None for target in record["targets"] if target["measure"] != "alone")
