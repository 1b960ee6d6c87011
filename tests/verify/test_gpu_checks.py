"""The checks for GPUs, run on a CPU: right backends pass them, and each mistake is caught by its own."""

from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact

from gnn_attention.backends import BACKENDS, Backend, dense, rows
from gnn_attention.verify.attend_checks import dropout_checks
from gnn_attention.verify.check import Settings
from tests.guarantees import gpu_checks as gpu
from tests.guarantees import gpu_large
from tests.guarantees.gpu_checks import gpu_checks
from tests.guarantees.gpu_large import LARGE, LargeCase, large_checks

TOKENS = 320


def own(run):
    """A backend that passes for one made of our kernels."""
    return Backend("triton-like", run, recomputes=True)


def settings(run, *dtypes):
    """On this machine."""
    return Settings(device="cpu", dtypes=dtypes or ("float64",), backends=(own(run),))


def results(checks, *groups):
    """Those of some groups."""
    return [check() for check in checks if check.group in groups]


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_a_large_graph_is_its_mask(large):
    """The builder, or the list, and the formula are two routes to the same edges."""
    graph = large.graph(TOKENS)
    assert torch.equal(graph.mask(), large.mask(TOKENS))
    assert not torch.equal(graph.mask(), graph.mask().mT)


def test_the_truth_in_chunks_is_the_truth():
    """However the receivers are divided, with bias and sinks: the formula over all of them."""
    case = LargeCase(settings(dense.run), LARGE["hubs"], torch.float64, TOKENS, full=True)
    inputs = case.inputs(torch.float64)
    out, gradients = case._oracle_rows(inputs, 0, TOKENS), case.truth.gradients
    whole = torch.autograd.grad((out * case.direction).sum(), list(inputs.values()))
    assert TOKENS < gpu_large.CHUNK
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_large, "CHUNK", 128)
        again, chunked = case._oracle()
    assert_exact(again, out)
    assert_exact([chunked[name] for name in inputs], whole)
    assert_exact([gradients[name] for name in inputs], whole)


CHANGES = {
    "scale": lambda call: replace(call, scale=1.01 * call.scale),
    "transposed": lambda call: replace(call, graph=call.graph.T),
    "order of edges": lambda call: replace(call, bias=call.bias if call.bias is None else call.bias.flip(-1)),
}


@pytest.mark.slow
def test_larger_graphs_show_right_and_wrong_backends():
    """Forward and every gradient, against the formula and SDPA."""
    found = results(large_checks(settings(dense.run, "float32"), TOKENS), "large")
    assert len(found) == len(LARGE) + 3
    assert [r.name for r in found if not r.passed] == []
    assert all(r.gradient is not None for r in found)
    for name, change in CHANGES.items():
        wrong = settings(lambda call, change=change: dense.run(change(call)))
        found = results(large_checks(wrong, TOKENS), "large")
        assert not any(r.passed for r in found if name != "order of edges" or "bias" in r.name), name


@pytest.mark.slow
def test_what_repeats_passes_and_noise_is_caught():
    """Bit for bit, output and gradients."""

    def noisy(call):
        out, lse = dense.run(call)
        return out * (1 + 1e-3 * torch.rand(())), lse

    few = settings(dense.run, "float32")
    assert all(r.passed for r in results(gpu_checks(few, TOKENS), "repeat"))
    caught = results(gpu_checks(replace(few, backends=(own(noisy),)), TOKENS), "repeat")
    assert {r.message for r in caught} == {"output differs from run to run"}
    assert len(caught) == len(LARGE)


@pytest.mark.slow
def test_operators_are_checked():
    """Ours pass; a backend that calls none, or whose compiled form differs, does not."""
    assert [
        r.message for r in results(gpu_checks(settings(rows.run), TOKENS), "operators") if not r.passed
    ] == []
    without = results(gpu_checks(settings(BACKENDS["reference"].run), TOKENS), "operators")
    assert {r.message for r in without if r.name.startswith("opcheck")} == {"no operator of ours was called"}

    def two_faced(call):
        out, lse = rows.run(call)
        return (2 * out if torch.compiler.is_compiling() else out), lse

    other = results(gpu_checks(settings(two_faced), TOKENS), "operators")
    caught = [r for r in other if r.name.startswith("compiled")]
    assert [r.passed for r in caught] == [False] * 2
    assert all("error allowed" in r.message for r in caught)


@pytest.mark.parametrize(
    ("peak", "left", "passes"),
    [(2**20, 2**10, True), (gpu.WORKSPACE * 9, 2**10, False), (2**20, gpu.WORKSPACE, False)],
    ids=["lean", "wasteful", "hoarding"],
)
def test_memory_is_bounded(monkeypatch, peak, left, passes):
    """Storage, results and 64 MiB: what is measured (here: made up) is compared with it, and said."""
    used = [0]
    monkeypatch.setattr(gpu, "MEMORY_TOKENS", 512)
    monkeypatch.setattr(gpu, "_allocated", lambda device: used.append(used[-1] + left) or used[-1])
    monkeypatch.setattr(gpu, "_peak", lambda device, run: (run(), peak))
    found = results(gpu_checks(settings(dense.run, "float32"), TOKENS), "memory")
    assert [r.passed for r in found] == [passes, passes]
    assert all(word in r.message for r in found for word in ("graph", "forward", "backward"))


@pytest.mark.slow
def test_dropout_is_that_of_the_key():
    """A backend that drops others, or divides by another number, is caught; ours are right."""
    few = replace(settings(dense.run, "float32"), graphs=("causal", "listed"))
    assert all(r.passed for r in results(dropout_checks(few), "dropout"))
    mistakes = (
        lambda call: replace(call, seed=call.seed + 1),
        lambda call: replace(call, first_head=1),
        lambda call: replace(call, dropout=0.0),
        lambda call: replace(call, v=call.v / 0.7),
    )
    for change in mistakes:
        wrong = replace(few, backends=(own(lambda call, change=change: dense.run(change(call))),))
        assert not any(r.passed for r in results(dropout_checks(wrong), "dropout"))
