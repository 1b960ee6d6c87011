"""Tokens that hold NaN or inf on a GPU, with a CPU in its place: nothing waits, they stay on their edges."""

from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS, nonfinite, varlen
from gnn_attention.backends.gpu import flash_varlen
from tests.backends.test_flash import backward_kernel, forward_kernel

N, BAD = 14, 8
WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::_unique2"}
WAITS |= {"aten::equal", "aten::masked_select", "aten::bincount"}
FEW = ga.convert.from_edge_index(torch.tensor([[80, 8, 140], [0, 140, 3]]), 150, 150)
GRAPHS = {
    "causal": patterns.causal(N),
    "full": patterns.full(N),
    "window": patterns.window(N, 4),
    "documents": patterns.documents([5, 1, 8]),
    # with a sender of more than the edges that are summed at once
    "scattered": patterns.window(150, 20) | patterns.sinks(150, 1) | FEW,
    "listed": ga.convert.from_edge_index(torch.tensor([[8, 0, 12, 8, 2], [0, 1, 1, 5, 8]]), N, N),
}
CASES = [
    *(("dense", name) for name in GRAPHS),
    *(("varlen", name) for name in ("causal", "window", "documents")),
    *(("rows", name) for name in GRAPHS),
]


def sdpa(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """As kernels of a GPU: NaN in a row of logits makes the row NaN, a hidden value is multiplied by 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * scale
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1) if is_causal else torch.tensor(False)
    logits = logits.masked_fill(hidden, -torch.inf)
    if attn_mask is not None:
        logits = (
            logits.masked_fill(~attn_mask, -torch.inf)
            if attn_mask.dtype == torch.bool
            else logits + attn_mask
        )
    return logits.softmax(-1) @ v


@pytest.fixture
def asynchronous(monkeypatch):
    """A CPU as if it were a GPU, in float64."""
    supported = replace(varlen.BACKEND.capabilities, devices=("cpu",), dtypes=(torch.float64,))
    monkeypatch.setitem(BACKENDS, "varlen", replace(varlen.BACKEND, capabilities=supported))
    monkeypatch.setattr(flash_varlen, "DTYPES", (torch.float64,))
    monkeypatch.setattr(flash_varlen, "_forward_kernel", forward_kernel)
    monkeypatch.setattr(flash_varlen, "_backward_kernel", backward_kernel)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(nonfinite, "ASYNCHRONOUS", ("cpu",))


def drawn(where=None, value=torch.nan, requires_grad=True, tokens=N):
    given = [x.detach() for x in qkv(tokens, dim=10, value_dim=10)]
    if where is not None:
        given[where][:, :, BAD, 1] = value
    return [x.requires_grad_(requires_grad) for x in given]


@pytest.mark.usefixtures("asynchronous")
@pytest.mark.parametrize(("backend", "name"), CASES)
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
def test_on_a_gpu_it_reaches_the_receivers_of_its_edges_alone(backend, name, with_gradients, value, where):
    """Outputs of others, and gradients of a loss over them, are those without it; its edges show a NaN."""
    graph = GRAPHS[name]
    itself = torch.arange(graph.num_dst) == BAD
    reached = graph.mask()[:, BAD] if where else itself & (graph.in_degree() > 0)
    untouched = ~graph.mask()[reached].any(0) & ~itself
    results = []
    for place in (None, where):
        given = drawn(place, value, with_gradients, graph.num_dst)
        out = ga.attend(*given, graph, backend=backend)
        found = [out[:, :, ~reached]]
        if with_gradients:
            dq, dk, dv = torch.autograd.grad(out[:, :, ~reached].sum(), given)
            found += [dq[:, :, ~reached], dk[:, :, untouched], dv[:, :, untouched]]
        results.append(found)
    for mine, theirs in zip(*results, strict=True):
        assert_exact(mine, theirs)
    if value != value:
        assert out.isnan().any(-1)[0, 0].tolist() == reached.tolist()


@pytest.mark.usefixtures("asynchronous")
@pytest.mark.parametrize("with_more", [False, True])
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_nothing_waits_for_the_device(backend, name, with_more, monkeypatch):
    """No number is asked for, forward or backward, once the graph was seen."""
    for attempt in range(2):
        given = drawn(tokens=GRAPHS[name].num_dst)
        # of these a profile on a CPU does not tell; the kernels that stand in for flash attention take them
        for way in ("tolist", "cpu", "numpy") if attempt and backend == "rows" else ():
            monkeypatch.setattr(torch.Tensor, way, None)
        with torch.profiler.profile() as watched:
            more = {"sink_logits": given[0][0, :, 0, 0], "return_info": True} if with_more else {}
            out = ga.attend(*given, GRAPHS[name], backend=backend, **more)
            out = out[0] + out[1].lse.unsqueeze(-1) if with_more else out
            torch.autograd.grad(out.sum(), given)
    assert WAITS & {event.key for event in watched.key_averages()} == set()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_promise_spares_every_look(name, asynchronous, request):
    """The same numbers, without a pass to ask for them; what breaks the promise is not contained."""
    if asynchronous:
        request.getfixturevalue("asynchronous")
    graph = GRAPHS[name]
    given = drawn(requires_grad=False, tokens=graph.num_dst)
    exact = ga.attend(*given, graph, backend="dense")
    with torch.profiler.profile() as watched:
        out = ga.attend(*given, graph, backend="dense", finite=True)
    assert torch.equal(out, exact)
    looks = WAITS | {"aten::linalg_vector_norm", "aten::nan_to_num", "aten::isfinite"}
    assert not looks & {event.key for event in watched.key_averages()}
