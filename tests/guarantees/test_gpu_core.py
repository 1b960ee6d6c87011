"""The core of checks for a GPU is complete and fixed by name, and passes on backends of a CPU."""

import itertools
from collections import Counter

import pytest
import torch

from gnn_attention.backends import BACKENDS, Backend, dense, rows
from gnn_attention.verify.cases import EDGE_OPTIONS, FEATURES, GRAPHS
from gnn_attention.verify.groups import EDGE_GRAPHS
from tests.guarantees import gpu_checks, gpu_core, gpu_shapes
from tests.guarantees.gpu_core import CORE_DTYPES, CORE_GRAPHS, EVERYWHERE, TRIAL, core_checks, parts
from tests.guarantees.gpu_large import LARGE, large_problem

HALVES = ("bfloat16", "float16")


@pytest.fixture(scope="module")
def core():
    return core_checks()


def values(checks, *names):
    """Return the combinations of these factors among checks; ``dtype`` is a factor too."""
    return {
        tuple(check.dtype if name == "dtype" else check.factors[name] for name in names) for check in checks
    }


def test_the_core_is_lean_and_every_check_has_a_name_of_its_own(core, monkeypatch):
    labels = [check.label for check in core]
    assert 1050 <= len(core) <= 1250
    assert len(set(labels)) == len(labels)
    assert [check.label for check in core if check.group == "far"] == labels[-1:]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [check.label for check in core_checks("cpu")] == labels


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_every_pair_of_dtype_graph_and_option_occurs(core, backend):
    calls = [check for check in core if (check.group, check.backend) == ("attend", backend)]
    full_calls = [check for check in calls if "direction" not in check.factors]
    assert values(full_calls, "dtype", "graph") == set(itertools.product(CORE_DTYPES, CORE_GRAPHS))
    assert values(full_calls, "dtype", "option") == set(itertools.product(CORE_DTYPES, FEATURES))
    pairs = itertools.product(CORE_GRAPHS, FEATURES)
    expected = {(graph, option) for graph, option in pairs if FEATURES[option].fits(GRAPHS[graph])}
    assert values(full_calls, "graph", "option") == expected
    shapes = [check for check in core if (check.group, check.backend) == ("shapes", backend)]
    assert values(shapes, "dtype", "shape") == set(itertools.product(CORE_DTYPES, gpu_shapes.SHAPES))


def test_every_pair_of_an_option_of_edges_occurs(core):
    checks = [check for check in core if check.group == "edges"]
    for names, sets in (
        (("dtype", "option"), (CORE_DTYPES, EDGE_OPTIONS)),
        (("graph", "option"), (EDGE_GRAPHS, EDGE_OPTIONS)),
    ):
        assert values(checks, *names) == set(itertools.product(*sets))


@pytest.mark.parametrize(
    ("backend", "dtypes", "options"),
    [
        ("flex", (*HALVES, "float32"), ("plain", "sinks", "relative bias")),
        ("varlen", HALVES, ("plain", "scale 0.7", "sinks")),
        ("message_passing", CORE_DTYPES, ("plain", "alibi", "relative bias", "softcap", "edge bias")),
    ],
)
def test_the_others_have_every_pair_that_they_take(core, backend, dtypes, options):
    calls = [check for check in core if check.backend == backend and check.group in ("attend", "layer")]
    assert values(calls, "dtype", "option") >= set(itertools.product(dtypes, options))
    assert {check.dtype for check in calls} == set(dtypes)
    graphs = {graph for (graph,) in values(calls, "graph")}
    assert values(calls, "dtype", "graph") == set(itertools.product(dtypes, graphs))
    assert {"full", "causal", "window", "documents", "causal, 97 tokens"} <= graphs


def test_layouts_change_strides_and_no_numbers():
    x = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    for name, shape in gpu_shapes.SHAPES.items():
        view = shape.layout(x)
        assert torch.equal(view, x)
        assert (view.stride() != x.stride()) == (
            name in ("tokens first", "every other channel", "odd offsets")
        )


def test_parts_keep_problems_and_kernels_together(core):
    """FlexAttention compiles at most 24 kernels, each in one process."""
    processes = parts(core)
    labels = [check.label for checks in processes.values() for check in checks]
    assert sorted(labels) == sorted(check.label for check in core)
    assert [check.group for check in processes["far"]] == ["far"]
    assert len(processes) == gpu_core.PROCESSES + 1
    problems, kernels = Counter(), Counter()
    for checks in processes.values():
        eager_checks = [check for check in checks if check.backend != "flex"]
        problems.update({(check.group, check.dtype, check.name) for check in eager_checks})
        kernels.update({gpu_core.kernel_of_flex(check) for check in checks if check.backend == "flex"})
    assert set(problems.values()) == set(kernels.values()) == {1}
    assert 20 <= len(kernels) <= 24


def small_checks(*groups):
    """Return small checks of some groups, for backends of a CPU."""
    checks = [check for check in core_checks("cpu", TRIAL) if check.group in groups]
    return [check for check in checks if check.backend in (*EVERYWHERE, "message_passing")]


# Among every eleventh check all pairs of backend and dtype occur.
STEPS = [pytest.param(11, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("step", STEPS)
def test_the_core_holds_on_backends_of_a_cpu(step):
    groups = ("attend", "layer", "shapes", "edges", "dropout", "rules", "large", "repeat", "operators", "far")
    checks = small_checks(*groups)
    assert len(checks) > 900
    assert [result for check in checks[::step] if not (result := check()).passed] == []


def negate_last_row(call):
    """Run ``rows`` with the sign of the last row wrong."""
    out, lse = rows.run(call)
    return torch.cat([out[..., :-1, :], -out[..., -1:, :]], -2), lse


@pytest.mark.slow
def test_a_wrong_sign_is_named_by_its_cell(monkeypatch):
    """All checks of the backend fail, and none of another backend."""
    monkeypatch.setitem(BACKENDS, "rows", Backend("rows", negate_last_row, recomputes=True))
    checks = [check for check in small_checks("shapes", "far") if check.dtype != "float16"][::5]
    results = [check() for check in checks]
    failed_cells = {(result.backend, result.dtype) for result in results if not result.passed}
    assert failed_cells == {("rows", "bfloat16"), ("rows", "float32"), ("rows", "float64")}
    assert not any(result.passed for result in results if result.backend == "rows")


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_a_large_graph_is_its_mask(large):
    """The builder or edge list and the formula give the same edges."""
    graph = large.graph(320)
    assert torch.equal(graph.mask(), large.mask(320))
    assert not torch.equal(graph.mask(), graph.mask().mT)


def test_noise_and_a_missing_kernel_are_caught():
    """Runs are compared bit for bit, and operators of torch must not replace the kernel of rows."""

    def add_noise(call):
        out, lse = dense.run(call)
        return out * (1 + 1e-3 * torch.rand(())), lse

    case = large_problem("cpu", LARGE["hubs"], torch.float32, 64)
    assert gpu_checks.run_again(case, BACKENDS["dense"]).passed
    outcome = gpu_checks.run_again(case, Backend("noisy", add_noise))
    assert (outcome.passed, outcome.where) == (False, "output differs from run to run")
    outcome = gpu_checks.run_again(case, BACKENDS["rows"], gpu_core.KERNEL_OF_ROWS)
    assert (outcome.passed, outcome.where) == (False, "the operator triton_attention was not called")


@pytest.mark.slow
def test_operators_are_checked():
    """A backend that calls no operator, or whose compiled form differs, does not pass."""
    case, call = "window", ("cpu", "float32")
    assert gpu_checks.run_opcheck(*call, case, BACKENDS["rows"]).passed
    assert not gpu_checks.run_opcheck(*call, case, BACKENDS["reference"]).passed

    def double_when_compiled(call):
        out, lse = rows.run(call)
        return (2 * out if torch.compiler.is_compiling() else out), lse

    assert gpu_checks.run_compiled(*call, case, BACKENDS["rows"]).passed
    outcome = gpu_checks.run_compiled(*call, case, Backend("inconsistent", double_when_compiled))
    assert "error allowed" in outcome.where
