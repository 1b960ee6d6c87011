"""With NaN or inf, no call waits for a device (simulated on a CPU), and some run edge by edge."""

import resource
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention._support import devices
from gnn_attention.backends import BACKENDS, nonfinite, rows, varlen
from gnn_attention.backends.gpu import flash_varlen
from tests.backends.test_flash import backward_kernel, forward_kernel

N, BAD = 14, 8
WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::_unique2"}
WAITS |= {"aten::equal", "aten::masked_select", "aten::bincount"}
FEW_EDGES = ga.convert.from_edge_index(torch.tensor([[80, 8, 140], [0, 140, 3]]), 150, 150)
GRAPHS = {
    "causal": patterns.causal(N),
    "full": patterns.full(N),
    "window": patterns.window(N, 4),
    "documents": patterns.documents([5, 1, 8]),
    # One sender has more edges than are summed at once.
    "scattered": patterns.window(150, 20) | patterns.sinks(150, 1) | FEW_EDGES,
    "listed": ga.convert.from_edge_index(torch.tensor([[8, 0, 12, 8, 2], [0, 1, 1, 5, 8]]), N, N),
}
CASES = [*product(["dense", "rows"], GRAPHS), *product(["varlen"], ["causal", "window", "documents"])]


@pytest.fixture
def simulate_gpu(monkeypatch):
    """Let a CPU play a GPU, in float64."""
    capabilities = replace(varlen.BACKEND.capabilities, devices=("cpu",), dtypes=(torch.float64,))
    monkeypatch.setitem(BACKENDS, "varlen", replace(varlen.BACKEND, capabilities=capabilities))
    monkeypatch.setattr(flash_varlen, "DTYPES", (torch.float64,))
    monkeypatch.setattr(flash_varlen, "_forward_kernel", forward_kernel)
    monkeypatch.setattr(flash_varlen, "_backward_kernel", backward_kernel)
    monkeypatch.setattr(devices, "ASYNCHRONOUS", ("cpu",))


def draw_inputs(requires_grad=True, tokens=N):
    return [x.detach().requires_grad_(requires_grad) for x in qkv(tokens, dim=10, value_dim=10)]


@pytest.mark.usefixtures("simulate_gpu")
@pytest.mark.parametrize("with_info", [False, True])
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_nothing_waits_for_the_device(backend, name, with_info, monkeypatch):
    """In the second call no value is read, forward or backward."""
    for attempt in range(2):
        inputs = draw_inputs(tokens=GRAPHS[name].num_dst)
        # A profile on a CPU does not show these methods; the simulated flash kernels need them.
        for method in ("tolist", "cpu", "numpy") if attempt and backend == "rows" else ():
            monkeypatch.setattr(torch.Tensor, method, None)
        with torch.profiler.profile() as profile:
            options = {"sink_logits": inputs[0][0, :, 0, 0], "return_info": True} if with_info else {}
            out = ga.attend(*inputs, GRAPHS[name], backend=backend, **options)
            out = out[0] + out[1].lse.unsqueeze(-1) if with_info else out
            torch.autograd.grad(out.sum(), inputs)
    assert WAITS & {event.key for event in profile.key_averages()} == set()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_finite_skips_the_check(name, asynchronous, request):
    """The output is the same, without a pass over the inputs."""
    if asynchronous:
        request.getfixturevalue("simulate_gpu")
    graph = GRAPHS[name]
    inputs = draw_inputs(requires_grad=False, tokens=graph.num_dst)
    expected = ga.attend(*inputs, graph, backend="dense")
    with torch.profiler.profile() as profile:
        out = ga.attend(*inputs, graph, backend="dense", finite=True)
    assert torch.equal(out, expected)
    assert not WAITS & {event.key for event in profile.key_averages()}


ROWS = patterns.window(N + 3, 5).rows(3, N + 3)
ORDER = torch.randperm(ROWS.num_edges, generator=torch.Generator().manual_seed(0))
LONG = {
    "listed": ga.TokenGraph.from_edges(ROWS.edge_index[:, ORDER], N, N + 3),
    "rows": ROWS,
    "by head": ga.TokenGraph.from_rule(lambda b, h, dst, src: dst - src <= h, N, heads=4),
    "by sample": ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst - b, N, batch=2),
}
OPTIONS = {
    "plain": {},
    "score_mod": {"score_mod": lambda score, b, h, dst, src: score + dst / 7 - src / (9 + h) + b},
    "bias": {"bias": torch.randn(2, 4, 69, generator=torch.Generator().manual_seed(1)).double()},
    "dropout": {"dropout": 0.4},
    "sinks": {"sink_logits": torch.arange(4.0).double()},
}
# A graph that varies by head or sample has no single order of edges, so it takes no bias.
RANGES = [x for x in product(LONG, OPTIONS) if x[0] in ("listed", "rows") or x[1] != "bias"]


@pytest.mark.parametrize("backend", ["dense", "auto"])
@pytest.mark.parametrize(("name", "option"), RANGES)
def test_ranges_of_receivers_equal_one_call(name, option, backend, monkeypatch):
    """Ranges keep the positions, order of edges, samples and heads of the graph, and the gradients."""
    graph, ranges, run = LONG[name], [], rows.run
    monkeypatch.setattr(nonfinite, "MAX_EDGES", 12)
    monkeypatch.setattr(rows, "run", lambda call: ranges.append(call.graph.num_dst) or run(call))
    inputs = [x.detach() for x in qkv(N, graph.num_src, batch=2)]
    inputs[2][1, :, BAD] = torch.nan
    results = []
    for backend_name in (backend, "reference"):
        torch.manual_seed(0)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, info = ga.attend(*leaves, graph, backend=backend_name, return_info=True, **OPTIONS[option])
        grads = torch.autograd.grad(out[0].sum() + info.lse[0].exp().sum(), leaves)
        results.append([out.nan_to_num(7.0), info.lse, *(x[0] for x in grads)])
    assert len(ranges) > 3
    assert_exact(*results)
    assert out[1].isnan().any()


def test_a_backend_value_is_called_without_a_check():
    """The kernel of a backend value spreads a NaN; by name the same call runs edge by edge."""
    q, k, v = draw_inputs(requires_grad=False)
    v[:, :, BAD, 1] = torch.nan
    receivers = GRAPHS["window"].mask()[:, BAD]
    for backend, expected in (("dense", receivers), (BACKENDS["dense"], torch.ones(N, dtype=torch.bool))):
        out = ga.attend(q, k, v, GRAPHS["window"], backend=backend)
        assert out.isnan().any(-1)[0, 0].tolist() == expected.tolist()


@pytest.mark.slow
@torch.no_grad()
def test_a_nan_in_a_long_call_takes_little_memory():
    """The list of all 134 million edges would take 5 GiB; a range takes less than a fifth of that."""
    q, k, v = torch.randn(3, 1, 1, 2**14, 8)
    v[:, :, 9000] = torch.nan
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = ga.attend(q, k, v, patterns.causal(2**14))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - max_rss < 2**20
    assert out.isnan().any(-1)[0, 0].tolist() == [dst >= 9000 for dst in range(2**14)]


EAGER = [name for name, backend in BACKENDS.items() if not backend.compiled and name != "varlen"]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("backend", EAGER)
def test_lse_without_edges_has_a_gradient_of_zero(backend, with_bias):
    if with_bias and not BACKENDS[backend].capabilities.bias:
        pytest.skip("it takes no bias")
    bias, q = torch.zeros(0) if with_bias else None, torch.randn(1, 1, 4, 3, requires_grad=True)
    out, info = ga.attend(q, q, q, patterns.window(4, 0), bias=bias, backend=backend, return_info=True)
    nan_out = ga.attend(q, q, q.detach() * torch.nan, patterns.window(4, 0), backend=backend)
    (gradient,) = torch.autograd.grad([nan_out, info.lse], [q], [out + 1, torch.ones(1, 1, 4)])
    assert torch.equal(gradient, torch.zeros_like(q))
