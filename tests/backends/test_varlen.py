"""The backend of packed documents equals the reference; on a CPU, the formula replaces its kernel."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS, RefusalError, dense, varlen
from gnn_attention.backends.gpu import flash_varlen
from tests.backends.test_flash import backward_kernel, forward_kernel

GRAPHS = {
    "documents": patterns.documents([5, 1, 8]),
    "full documents": patterns.documents([5, 1, 8], causal=False),
    "causal": patterns.causal(14),
    "window": patterns.window(14, 4),
    "windows in documents": patterns.documents([6, 8]) & patterns.window(14, 3),
    "both sides": patterns.window(14, 3, causal=False),
}


@pytest.fixture
def simulate_gpu(monkeypatch):
    """Let a CPU play a GPU, in float64."""
    capabilities = replace(varlen.BACKEND.capabilities, devices=("cpu",), dtypes=(torch.float64,))
    monkeypatch.setitem(BACKENDS, "varlen", replace(varlen.BACKEND, capabilities=capabilities))
    monkeypatch.setattr(flash_varlen, "DTYPES", (torch.float64,))
    monkeypatch.setattr(flash_varlen, "_forward_kernel", forward_kernel)
    monkeypatch.setattr(flash_varlen, "_backward_kernel", backward_kernel)


draw_inputs = partial(qkv, 14, dim=12, value_dim=10)


def solve(graph, backend, sinks, inputs):
    out, info = ga.attend(*inputs, graph, sink_logits=sinks, backend=backend, return_info=True)
    loss = out.sin().sum() + info.lse.cos().sum()
    return [out, info.lse, *torch.autograd.grad(loss, [*inputs, *([] if sinks is None else [sinks])])]


@pytest.mark.usefixtures("simulate_gpu")
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equal_to_the_reference(name, with_sinks):
    """Output, lse, and all gradients of a function of both are equal."""
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_() if with_sinks else None
    for result, expected in zip(
        *(solve(GRAPHS[name], b, sinks, draw_inputs()) for b in ("varlen", "reference")), strict=True
    ):
        assert_exact(result, expected)


@pytest.mark.usefixtures("simulate_gpu")
@pytest.mark.parametrize("graph", [patterns.causal(14), patterns.full(14), patterns.cross(14, 5)], ids=repr)
def test_dense_takes_lse_from_the_kernel(graph, monkeypatch):
    """Dense needs no logits of all pairs, also for gradients, and its memory estimate says so."""
    monkeypatch.setattr(dense, "FLASH_DEVICES", ("cpu",))
    q, k, v = draw_inputs()
    inputs = [q, *(x[:, :, : graph.num_src].detach().requires_grad_() for x in (k, v))]
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    call = ga.backends.AttentionCall.from_arguments(*(x.detach() for x in inputs), graph, with_lse=True)
    assert dense.bytes_needed(call) == 0
    assert varlen.bytes_needed(call) >= sum(x.nbytes for x in (call.q, call.k, call.v, call.q))
    monkeypatch.setattr(dense, "masked_attention", None)
    for out, truth in zip(*(solve(graph, b, sinks, inputs) for b in ("dense", "reference")), strict=True):
        assert_exact(out, truth)


def test_on_a_cpu_it_is_refused():
    """The error names the backend and says what to do."""
    message = r"'varlen' does not support .*runs on cuda, q is on cpu; .*use backend='tiles'"
    with pytest.raises(RefusalError, match=message):
        ga.attend(*draw_inputs(dtype=torch.float16), GRAPHS["documents"], backend="varlen")


PACKED, NO_PACKING = patterns.documents([5, 6, 3]), "not packed documents with one window"
REFUSALS = [
    (PACKED, {"score_mod": score_mods.softcap(1.0)}, "has no score_mod; leave score_mod out"),
    (PACKED, {"bias": torch.zeros(PACKED.num_edges, dtype=torch.float64)}, "has no bias"),
    (PACKED, {"dropout": 0.5}, "has no dropout; pass dropout=0.0"),
    (patterns.strict_causal(14), {}, NO_PACKING),
    (ga.TokenGraph.from_rule(lambda b, h, dst, src: dst - src <= h, 14, heads=4), {}, NO_PACKING),
]


@pytest.mark.usefixtures("simulate_gpu")
@pytest.mark.parametrize(("graph", "options", "message"), REFUSALS)
def test_unsupported_calls(graph, options, message):
    """The error says what is unsupported and what to do."""
    with pytest.raises(RefusalError, match=message):
        ga.attend(*draw_inputs(), graph, backend="varlen", **options)


@pytest.mark.usefixtures("simulate_gpu")
def test_sizes_and_types():
    """Calls need half types, at most 256 channels (one for the gradient of lse), and no empty axis."""
    graph = GRAPHS["documents"]
    with pytest.raises(RefusalError, match="in float64, q is float32; convert"):
        ga.attend(*draw_inputs(dtype=torch.float32), graph, backend="varlen")
    wide = qkv(14, dim=256, value_dim=256)
    assert ga.attend(*wide, graph, backend="varlen").shape == (2, 4, 14, 256)
    with pytest.raises(RefusalError, match="256 channels, one for lse's gradient, got 257"):
        ga.attend(*wide, graph, backend="varlen", return_info=True)
    with torch.no_grad():
        ga.attend(*wide, graph, backend="varlen", return_info=True)
    with pytest.raises(RefusalError, match="256 channels, one for lse's gradient, got 257"):
        ga.attend(*qkv(14, dim=257), graph, backend="varlen")
    ga.attend(*qkv(257), patterns.causal(257), backend="varlen")
    with pytest.raises(RefusalError, match="needs samples, heads, tokens and channels"):
        ga.attend(*(x[:0] for x in draw_inputs()), graph, backend="varlen")


@pytest.mark.usefixtures("simulate_gpu")
@pytest.mark.parametrize("name", GRAPHS)
def test_second_derivatives_are_those_of_the_reference(name):
    results = []
    for backend in ("varlen", "reference"):
        inputs = draw_inputs()
        out, info = ga.attend(*inputs, GRAPHS[name], backend=backend, return_info=True)
        loss = out.sin().sum() + info.lse.cos().sum()
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in grads), inputs))
    assert_exact(*results)
