"""The public checks pass, fail for a wrong backend, say what is wrong, and can run one by one."""

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.covering import thin
from support.faults import WRONG_BACKENDS

from gnn_attention import verify
from gnn_attention.__main__ import main
from gnn_attention._support.autograd import has_forward_derivative
from gnn_attention.backends import BACKENDS, Backend, dense, dropout, rows
from gnn_attention.edge_ops import normalisers
from gnn_attention.verify import groups, oracle
from gnn_attention.verify.cases import DROPOUT, FEATURES, GRAPHS, OPTIONS
from gnn_attention.verify.groups import FORMS
from gnn_attention.verify.report import Report, Result

COMMAND = ["verify", "--device=cpu", "--only", "attend: causal, plain, inputs x1 [dense, float32]"]
CPU_BACKENDS = {name for name, backend in BACKENDS.items() if not backend.compiled and name != "varlen"}


@pytest.mark.nightly
def test_all_checks_hold_on_the_cpu():
    report = verify.run(device="cpu", selection="all")
    assert report.ok, str(report)
    assert {r.group for r in report.results} == set(groups.GROUPS)
    assert {r.backend for r in report.results} == CPU_BACKENDS
    assert {r.dtype for r in report.results} == {"float64", "float32", "bfloat16", "float16"}
    assert sum(result.passed for result in report.results) > 4000


def test_the_oracle_is_the_dense_formula():
    """The truth equals torch.softmax of logits with one more column, a sink that has no value."""
    rng = torch.Generator().manual_seed(0)
    shapes = (2, 4, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4)
    q, k, v = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in shapes)
    mask = torch.rand(2, 4, 5, 6, generator=rng) < 0.6
    mask[:, :, :, 0] = True
    sinks = torch.randn(4, generator=rng, dtype=torch.float64)
    logits = (q @ k.repeat_interleave(2, 1).mT * 0.5).masked_fill(~mask, -torch.inf)
    extended = torch.cat([logits, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    expected = torch.softmax(extended, -1)[..., :-1] @ v.repeat_interleave(2, 1)
    assert_exact(oracle.attention(q, k, v, mask, 0.5, None, sinks), expected)
    assert_exact(oracle.sdpa(q, k, v, mask, 0.5, None, sinks), expected)
    values = torch.randn(4, 4, 5, 6, generator=rng, dtype=torch.float64)
    expected = torch.einsum("bhij,hvij->bhiv", torch.softmax(logits, -1), values)
    assert_exact(oracle.attention(q, k, 0 * v, mask, 0.5, edge_values=values), expected)


def test_the_normalisers_of_the_oracle_are_those_of_torch():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 6, generator=rng, dtype=torch.float64)
    mask = torch.rand(3, 5, 6, generator=rng) < 0.6
    mask[:, 0], mask[:, 1:, 0] = False, True
    assert oracle.NORMALISERS.keys() == {*normalisers.NAMES} - {"softmax"}
    formulas = {name: getattr(torch.nn.functional, name) for name in ("silu", "gelu", "relu", "sigmoid")}
    for name, formula in formulas.items():
        assert_exact(oracle.NORMALISERS[name](logits, mask), mask * formula(logits))
    # The nearest point of the simplex has the largest product with the rest of the logits.
    weights = oracle.sparsemax(logits, mask)
    assert_exact(weights.sum(-1)[:, 1:], torch.ones(3, 4, dtype=torch.float64))
    assert (weights >= 0).all()
    assert not weights[~mask].any()
    rest = logits - weights
    assert (mask * (rest - (weights * rest).sum(-1, keepdim=True)) <= 1e-12)[:, 1:].all()


@pytest.mark.parametrize("case", GRAPHS.values(), ids=GRAPHS)
def test_graph_cases_define_the_edges_of_the_graph(case):
    mask = case.graph.mask()
    assert torch.equal((mask if mask.dim() == 4 else mask.unsqueeze(0)).expand_as(case.mask), case.mask)


def change_call(change):
    """Return a dense backend that computes another call."""
    return lambda call: dense.run(change(call))


def change_lse(change):
    """Return a backend that computes the right output, but the lse of another call."""

    def run(call):
        out, lse = dense.run(call)
        return out, lse if lse is None else dense.run(change(call))[1]

    return run


def change_output(change):
    """Return a backend that changes the right output."""

    def run(call):
        out, lse = rows.run(call)
        return change(call, out), lse

    return run


def leak_infinity(call, out):
    """Apply score_mod to all pairs, edges or not, and add the scores times 0."""
    if call.score_mod is None:
        return out
    dst, src = (torch.arange(n) for n in (call.graph.num_dst, call.graph.num_src))
    zero = torch.zeros((), dtype=torch.int64)
    scores = call.score_mod(torch.ones(len(dst), len(src)), zero, zero, dst.unsqueeze(1), src)
    return out + 0 * scores.sum().to(out.dtype)


def leak_values(call, out):
    """Add all values times 0 in calls with a score_mod, so that NaNs of masked senders leak."""
    return out if call.score_mod is None else out + 0 * call.v.sum().to(out.dtype)


def bend_output(call, out):
    """Add a number that is 0, as are its first derivatives, but not its second ones."""
    return out + (call.q - call.q.detach()).square().sum()


def change_features(change):
    """Return the backend ``rows`` with other features of edges."""
    return lambda call: rows.run(call if call.features is None else replace(call, features=change(call)))


def double_values(condition):
    return change_call(lambda call: replace(call, v=call.v * (1 + condition(call))))


ATTEND, LSE = "attend: causal, plain, inputs x1 [", "rules: lse is that of the logits"
# Each fault has a check that finds it; some faults do not show at the usual shapes.
CHECKS_OF_FAULTS = {
    "scale dropped": ATTEND,
    "groups tiled": ATTEND,
    "graph ignored": ATTEND,
    "rows from the left": "attend: decode rows, plain",
    "isolated receive": "rules: isolated rows are exactly 0, lse",
    "mod ignored": "attend: causal, softcap",
    "bias ignored": "attend: causal, edge bias",
    "bias reversed": "attend: listed, edge bias",
    "sinks ignored": LSE,
    "half sums": ATTEND,
    "gradient of k lost": ATTEND,
    "off by 1e-4 in float32": ATTEND,
}
WRONG = {name: (label, WRONG_BACKENDS[name]) for name, label in CHECKS_OF_FAULTS.items()} | {
    "lse without bias": (LSE, change_lse(lambda call: replace(call, bias=None))),
    "another output with lse": (LSE, double_values(lambda call: call.with_lse)),
    "one key head": ("1 head over 1, 1 x 300", double_values(lambda call: call.k.shape[1] == 1)),
    "dropout ignored": ("dropout: causal", change_call(lambda call: replace(call, dropout=0.0))),
    "NaN leaks": ("rules: NaN, inf and 1e4 reach only", change_output(leak_values)),
    "NaN cleaned": ("rules: a NaN that is attended to", change_output(lambda call, out: out.nan_to_num(0.0))),
    "infinite off edges": ("rules: NaN, inf and 1e4 reach only", change_output(leak_infinity)),
    "lse of another scale": (LSE, change_lse(lambda call: replace(call, scale=2.0))),
    "features ignored": ("edges: causal, edge features", change_features(lambda call: None)),
    "feature keys ignored": (
        "edges: causal, edge features",
        change_features(lambda call: replace(call.features, key=None)),
    ),
    "types ignored": (
        "edges: listed, edge features",
        change_features(lambda call: replace(call.features, edge_type=call.features.edge_type * 0)),
    ),
    "another normaliser": ("edges: causal, relu2", lambda call: rows.run(replace(call, normaliser="relu"))),
    "another tangent": (
        "derivatives: causal, plain, forward mode",
        double_values(lambda call: has_forward_derivative([call.q])),
    ),
    "another second derivative": ("derivatives: causal, plain, second", change_output(bend_output)),
}


def run_checks(backend, *texts, condition=lambda check: True):
    """Return the results of a backend's checks whose labels contain all texts."""
    checks = verify.checks("cpu", backends=[backend])
    return [check() for check in checks if all(text in check.label for text in texts) and condition(check)]


@pytest.mark.parametrize(("label", "run"), thin(WRONG.values()), ids=WRONG)
def test_a_wrong_backend_is_caught(label, run):
    dtype = "float64]" if label.startswith("derivatives") else "float32]"
    capabilities = BACKENDS["rows"].capabilities
    results = run_checks(Backend("wrong", run, capabilities=capabilities), label, dtype)
    assert results
    assert not any(result.passed or result.skipped for result in results)


# These checks look for exact zeros, infinities and NaN, and compare no other numbers.
EXACT_CHECKS = {
    "isolated rows are exactly 0, lse -inf, gradients finite",
    "a NaN that is attended to is not cleaned",
}


@pytest.mark.parametrize(
    ("dtype", "fault"), [("float64", 1e-9), pytest.param("float32", 1e-4, marks=pytest.mark.slow)]
)
def test_a_relative_fault_fails_every_check_that_compares_numbers(dtype, fault):
    """The fault changes values and lse by a share that is far above any limit for rounding."""

    def run(call):
        out, lse = dense.run(replace(call, v=call.v * (1 + fault)))
        return out, lse if lse is None else lse * (1 + fault)

    graphs = ("causal", "listed", "decode rows", "by head")
    on_graphs = lambda check: check.factors.get("graph", "causal") in graphs  # noqa: E731
    backend = Backend("off", run, capabilities=BACKENDS["dense"].capabilities)
    report = Report(tuple(run_checks(backend, dtype, condition=on_graphs)))
    names = {result.name for result in report.results if result.passed}
    assert names <= EXACT_CHECKS, names - EXACT_CHECKS
    expected = set(groups.GROUPS) - (set() if dtype == "float64" else {"derivatives"})
    assert {result.group for result in report.failures} == expected
    assert all("error allowed" in result.message for result in report.failures if result.group != "rules")


@pytest.mark.slow
def test_the_selection_covers_every_pair():
    """A twelfth of all checks has every pair of values that occurs in the checks of any group."""
    all_checks = list(verify.checks(device="cpu"))
    selection = verify._cover_pairs(all_checks)
    assert len({check.label for check in all_checks}) == len(all_checks) > 5_000
    assert len(selection) < len(all_checks) / 12
    assert _pairs_of(selection) == _pairs_of(all_checks)
    values_covered = {value for pair in _pairs_of(selection) for value in pair[1:]}
    factors = {"option": FEATURES, "graph": GRAPHS, "form": FORMS, "backend": CPU_BACKENDS}
    assert {(name, value) for name, values in factors.items() for value in values} <= values_covered
    assert ("direction", "forward alone") in values_covered
    names = {check.name for check in all_checks}
    cases = itertools.product(GRAPHS, FEATURES)
    cases = {f"{g}, {f}, inputs x5" for g, f in cases if FEATURES[f].fits(GRAPHS[g])}
    assert cases <= names


def _pairs_of(checks):
    """Return the pairs ``(group, value, value)`` of all checks that can run."""
    runnable = [check for check in checks if check.skipped is None]
    rows = [(c.group, {"backend": c.backend, "dtype": c.dtype, **c.factors}) for c in runnable]
    return {(group, *pair) for group, row in rows for pair in itertools.combinations(sorted(row.items()), 2)}


def test_a_failure_says_what_was_expected_and_how_to_run_it_alone(monkeypatch, capsys):
    """The printed command runs this check and no other, and exits with 1."""
    monkeypatch.setitem(BACKENDS, "dense", Backend("dense", WRONG_BACKENDS["scale dropped"]))
    label = "attend: causal, plain, inputs x1 [dense, float32]"
    assert main(["verify", "--device", "cpu", "--only", label]) == 1
    output = capsys.readouterr().out
    number = r"-?\d[\d.e+-]*"
    assert re.search(rf"expected {number}, got {number}; error allowed {number}, measured {number}", output)
    assert f"again: gnn-attention verify --only '{label}'" in output
    assert output.splitlines()[-1].startswith("1 checks, 1 FAILED")


def test_the_summary_is_for_a_newcomer():
    """It begins with a picture and ends with a sentence; if every check is skipped, it is not ok."""
    environment = {"device": "a CPU", "torch": "2"}
    passed = Result("attend", "dense", "float64", "causal", passed=True, share=0.5)
    lines = str(Report((passed,), environment)).splitlines()
    assert lines[1] == "0 ■ · · ·   0 <- 0"
    assert lines[-1] == "1 checks, all equal (device a CPU, torch 2)"
    assert max(map(len, lines)) <= 110
    skipped = Report((Result("attend", "dense", "float32", "x", passed=False, skipped="no reason"),))
    assert not skipped.ok
    assert "skipped 1: no reason" in str(skipped)


@pytest.mark.slow
def test_a_backend_of_your_own_is_judged_skipped_or_fails():
    """Calls that it does not support are skipped with its reason, and a crash is a failure."""
    options = {"device": "cpu", "only": "attend: listed, "}
    assert verify.run(backends=[Backend("mine", dense.run)], **options).ok
    report = verify.run(backends=[Backend("broken", lambda call: 1 / 0)], **options)
    assert len(report.failures) == sum(result.skipped is None for result in report.results)
    assert "ZeroDivisionError" in report.failures[0].message
    reason = lambda call: None if call.bias is None else "a bias is heavy"  # noqa: E731
    backend = Backend("picky", dense.run, unsupported_reason=reason)
    report = verify.run(backends=[backend], **options)
    assert report.ok
    assert not any(r.passed for r in report.results if r.skipped)
    assert "picky: a bias is heavy" in str(report)


def drop_backward(run):
    """Return a backend without a backward pass."""
    reason = lambda call: "no backward" if call.q.requires_grad and torch.is_grad_enabled() else None  # noqa: E731
    return Backend("forward", run, unsupported_reason=reason)


def test_without_a_backward_pass_the_output_is_judged_alone():
    """A right output passes and a wrong one fails, with and without a backward pass."""
    wrong = change_call(lambda call: replace(call, scale=2 * call.scale))
    backends = [drop_backward(dense.run), BACKENDS["dense"], drop_backward(wrong), Backend("double", wrong)]
    results = []
    for backend in backends:
        results += run_checks(backend, "attend: causal, plain, inputs x1 [", "float32]")
    assert [result.passed for result in results] == [True, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backends": ["nope"]}, "backends must be one of .*, got "),
        ({"selection": "nope"}, "selection must be .*, got "),
        ({"device": "nope"}, r"device must be one that torch knows, got 'nope': Expected one of cpu"),
        ({"only": "no such label"}, "only must be in a label like .*, got 'no such label'"),
        ({"only": "x", "backends": []}, "only must be in a label like 'attend: causal, .*, got 'x'"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"jobs": 2, "backends": [Backend("mine", dense.run)]}, "jobs must be 1 for a Backend value, got 2"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        verify.run(**{"device": "cpu", **options})


def test_float32_is_refused_by_name_where_tf32_products_are_enabled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(groups, "unsupported_reason", lambda *call: None)
    monkeypatch.setattr(verify, "environment", lambda device: {})
    precision = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(ValueError, match=r"'float32' cannot be checked on 'cuda': .*TensorFloat-32"):
            verify.run("cuda", backends=["dense"])
        assert verify.run(
            "cuda", backends=["dense"], only="attend: one token, plain, inputs x1 [dense, float64]"
        ).results
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision


def test_json_without_a_file_is_all_of_stdout(capsys):
    """The record has the device, versions, a hash of the sources, and every check."""
    assert main([*COMMAND, "--json"]) == 0
    output = capsys.readouterr()
    assert "all equal" in output.err
    record = json.loads(output.out)
    names = "device torch python gnn_attention sources"
    assert names.split() == list(record["environment"])
    assert record["ok"]
    fields = "group backend dtype name passed share"
    assert [" ".join(result) for result in record["results"]] == [fields]


def test_dropout_is_drawn_on_the_device_of_the_call(monkeypatch):
    """The key is drawn there, because a GPU and a CPU draw different numbers from one seed."""
    devices = []
    monkeypatch.setattr(dropout, "draw_seed", lambda device: devices.append(device) or torch.tensor(1))
    OPTIONS[DROPOUT].factors(GRAPHS["causal"], "meta")
    assert devices == [torch.device("meta")]
