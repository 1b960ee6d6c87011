"""The core of checks that a GPU must pass: complete, fixed by name, and right on backends that run here."""

import collections

import pytest
import torch

from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.rows import BACKEND as ROWS
from gnn_attention.verify import record
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.check import DTYPES, Check, Settings
from tests.guarantees import gpu_core, gpu_large, gpu_shapes
from tests.guarantees.gpu_core import CORE_DTYPES, FORMS, TRIAL, core_checks


@pytest.fixture(scope="module")
def core():
    return core_checks()


def test_records_are_judged_by_this_list(core):
    """A check that is added, renamed or left out asks for a new record: ``record.CORE`` changes with it."""
    assert record.digest(check.label for check in core) == record.CORE
    assert len({check.label for check in core}) == len(core)


def test_every_form_has_every_dtype_graph_and_option(core):
    for backend in FORMS:
        for dtype in CORE_DTYPES:
            mine = [check for check in core if (check.backend, check.dtype) == (backend, dtype)]
            calls = [check.factors for check in mine if check.group == "attend"]
            assert {factors["graph"] for factors in calls} == set(GRAPHS)
            assert {factors["option"] for factors in calls} == set(FEATURES)
            assert {"shapes", "rules", "dropout", "large", "repeat"} <= {check.group for check in mine}
    by_group = collections.Counter(check.group for check in core)
    assert (by_group["far"], by_group["memory"]) == (len(FORMS), 4 * len(FORMS))


def test_shapes_are_those_that_are_promised():
    """Widths up to 256, keys and values of different widths, groups of 8, layouts without wide loads."""
    widths = {(shape.dim, shape.value_dim) for shape in gpu_shapes.SHAPES.values()}
    assert {20, 64, 72, 96, 128, 256} <= {dim for dim, value_dim in widths if dim == value_dim}
    assert any(dim != value_dim for dim, value_dim in widths)
    assert max(shape.heads // shape.kv_heads for shape in gpu_shapes.SHAPES.values()) == 8
    x = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    for shape in gpu_shapes.SHAPES.values():
        laid = shape.layout(x)
        assert torch.equal(laid, x)
        assert (laid.stride() == x.stride()) == (shape.layout is gpu_shapes.SHAPES["64 channels"].layout)


@pytest.mark.parametrize("full", [False, True])
def test_large_graphs_in_tf32_are_judged_by_shortened_products(full):
    """Whatever a GPU does with products of this size: the yardstick is that of operands of 11 bits."""
    units = {}
    for dtype in ("float32", "tf32"):
        case = gpu_large.LargeCase(Settings(), gpu_large.LARGE["hubs"], DTYPES[dtype], 64, full)

        def run(case=case, dtype=dtype):
            units[dtype] = case.truth.yardstick
            return {"passed": set(units[dtype]) == {"out", *case.truth.gradients}}

        assert Check("large", "none", dtype, "hubs", run)().passed
    for name, unit in units["tf32"].items():
        # 2^-11 is 8192 times 2^-24; sums of them grow alike
        assert 500 < unit / units["float32"][name] < 50_000, name


def chosen(backend):
    """Checks of shapes and far offsets, small ones, on a backend of a CPU."""
    found = core_checks("cpu", TRIAL, [backend])
    return [check for check in found if check.group in ("shapes", "far")]


# Every fifth check: all pairs of dtype, shape, graph and option occur among them.
EVERY = [pytest.param(5, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", ["rows", "tiles"])
def test_shapes_and_far_offsets_hold_here(name, every):
    checks = chosen(BACKENDS[name])
    assert len(checks) > 200
    some = [check for number, check in enumerate(checks) if check.group == "far" or number % every == 0]
    assert [result for check in some if not (result := check()).passed] == []


def wrong(call):
    """The rows of a call, the last of them 10 % too large."""
    out, lse = ROWS.run(call)
    out = out.clone()
    out[..., -1, :] = out[..., -1, :] * 1.1
    return out, lse


@pytest.mark.slow
def test_shapes_and_far_offsets_fail_on_a_wrong_kernel():
    planted = Backend("rows", wrong)
    results = [check() for check in chosen(planted) if check.dtype == "float32" or check.group == "far"]
    assert [result for result in results if result.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_a_new_process_are_compared(dtype, monkeypatch):
    """Of every larger graph; another answer of that process is a failure that says so."""
    (check,) = [
        check
        for check in core_checks("cpu", TRIAL, [BACKENDS["rows"]])
        if "new process" in check.name and check.dtype == dtype
    ]
    result = check()
    assert result.passed
    # so that a record can be compared with another
    assert result.message == f"bits {gpu_core.bits('cpu', 'rows', dtype, str(TRIAL.large))}"
    monkeypatch.setattr(gpu_core, "bits", lambda *given: "0123")
    assert "bits 0123, in a new process " in check().message
