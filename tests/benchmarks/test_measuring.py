"""Methods are compared with the oracle, wrong ones are caught, and targets follow from the measurements."""

from dataclasses import replace

import pytest
import torch

from benchmarks import attention
from benchmarks.checked import Checked
from benchmarks.measuring import Settings
from benchmarks.methods import PEERS, Method, Prepared, ours
from benchmarks.targets import judge, judge_cpu
from benchmarks.workloads import CAUSAL, EAGER, FLEX, MASKED, MHA, PYG, Workload, draw
from gnn_attention import TokenGraph, attend, patterns
from gnn_attention.verify.measure import FLOAT64_RTOL

# These tests cover benchmarks, not the library.
pytestmark = pytest.mark.slow

QUICK = Settings(budget=0.0, fewest=3, most=3)
# The graph is not symmetric, and receiver 2 is isolated.
EDGES = torch.tensor([[0, 1, 2, 2, 5, 6, 3, 3, 0], [1, 1, 0, 3, 4, 4, 5, 6, 6]])
GRAPHS = {
    "causal": patterns.causal(40),
    "window": patterns.window(70, 9),
    "listed": TokenGraph.from_edges(EDGES, 7),
    # This graph is so long that receivers are sampled.
    "long": patterns.window(700, 20),
}
# Compiling FlexAttention is slow, and an additive mask gives NaN at an isolated receiver.
FITS = {CAUSAL: ["causal"], FLEX: [], MHA: [], EAGER: ["causal", "window", "long"]}


def verdict(graph, prepare, layer=False):
    problem = draw(graph, layer, heads=2, dim=8)
    return Checked(problem).verdict(prepare(problem), backward=True)


METHODS = {**PEERS, "auto": next(ours([]))}
CASES = [(name, graph, False) for name in METHODS for graph in FITS.get(name, GRAPHS)]
CASES += [(name, graph, True) for name in (MHA, MASKED, PYG, "auto") for graph in ("window", "long")]


@pytest.mark.parametrize(("name", "graph", "layer"), CASES)
def test_methods_agree_with_the_oracle(name, graph, layer):
    assert verdict(GRAPHS[graph], METHODS[name].prepare, layer).passed


def change_last_row(q, k, v, graph):
    out = attend(q, k, v, graph)
    return torch.cat([out[:, :, :-1], out[:, :, -1:] + 1e-4], 2)


FAULTS = {
    "no scale": lambda q, k, v, graph: attend(q, k, v, graph, scale=1.0),
    "one row off": change_last_row,
    "a gradient less": lambda q, k, v, graph: attend(q, 0.99 * k + 0.01 * k.detach(), v, graph),
}


@pytest.mark.parametrize("graph", ["window", "long"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_method_is_caught(graph, fault):
    """A method is caught even if only one sampled receiver, or only the gradient of k, is wrong."""
    prepare = lambda problem: Prepared(lambda *qkv: FAULTS[fault](*qkv, problem.graph))  # noqa: E731
    assert not verdict(GRAPHS[graph], prepare).passed


def fail(problem):
    raise torch.OutOfMemoryError("too much")


def test_every_case_is_measured_or_has_a_reason():
    small = Workload("small", "a window", 70, lambda n: patterns.window(n, 9), (), heads=2, dim=8)
    methods = [
        *ours(["dense", "reference"]),
        *(PEERS[name] for name in (MASKED, CAUSAL, PYG)),
        Method("absent", fail, modules=("no_such_package",)),
        replace(METHODS["auto"], name="forward only", backward="no backward pass"),
        Method("wrong", lambda problem: Prepared(lambda *qkv: FAULTS["no scale"](*qkv, problem.graph))),
        Method("hungry", fail),
    ]
    result = attention.measure(small, methods, QUICK)
    cases = {(case["method"], case["pass"]): case for case in result["cases"]}
    assert (result["workload"]["edges"], len(cases)) == (9 * 70 - 36, 2 * len(methods))
    outcomes = {name: (cases[name, "both"]["status"], cases[name, "both"].get("reason")) for name, _ in cases}
    assert outcomes["absent"] == ("missing", "no_such_package is not installed (ModuleNotFoundError)")
    assert outcomes["forward only"] == ("refused", "no backward pass")
    assert outcomes["hungry"] == ("out of memory", "OutOfMemoryError: too much")
    assert cases["wrong", "forward"]["output_error"] > 2
    measured_cases = [case for case in cases.values() if case["status"] == "measured"]
    assert len(measured_cases) == 2 * 5 + 1
    for case in measured_cases:
        assert case["samples"] == 3
        assert 0 < case["fastest"] <= case["seconds"]
        assert min(case["memory_mb"], case["ratio"] - FLOAT64_RTOL, 2 - case["output_error"]) >= 0


def test_targets_follow_from_what_was_measured():
    """The fastest peer counts, memory counts as at least 1 MB, and an unmeasured peer has the value None."""

    def case(method, **numbers):
        return {"workload": "w", "method": method, "pass": "forward", "status": "measured"} | numbers

    cases = [
        case("auto", ours=True, seconds=1.0, ratio=1.0, memory_mb=0.5, share=0.5),
        case("tiles", ours=True, seconds=0.5, ratio=0.5),
        case(PYG, ours=False, seconds=9.0, ratio=9.0, memory_mb=40.0),
        case(MASKED, ours=False, seconds=4.0, ratio=4.0),
        case(FLEX, ours=False, status="failed"),
    ]
    record = {"workloads": [{"workload": "w"}], "cases": cases}
    targets = [
        ("ratio", f"{PYG}|{MASKED}", 5),
        ("smaller", PYG, 40),
        ("ratio", FLEX, 1),
        ("share", "auto", 0.5),
    ]
    rows = judge(record, [("w", *target) for target in targets], ["forward"])
    assert [row["value"] for row in rows] == [4.0, 40.0, None, 0.5]
    assert [row["met"] for row in rows] == [False, True, None, True]
    assert judge_cpu(record)[0]["value"] == 2.0
