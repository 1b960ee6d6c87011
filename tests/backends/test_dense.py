"""What the dense backend looks at to know that nothing leaked: the results, and for gradients what is
multiplied by weights 0.
"""

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from gnn_attention import edges, patterns
from gnn_attention.backends import dense, nonfinite
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import flash_varlen

GRAPHS = {
    "causal": patterns.causal(7),
    "window": patterns.window(7, 3),
    "full": patterns.full(7),
    "listed": ga.convert.from_edge_index(torch.tensor([[4, 0, 6, 4, 2], [0, 1, 1, 5, 6]]), 7, 7),
}


def qkv(*, dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, 7, dim, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


def attend(q, k, v, name):
    return ga.attend(q, k, v, GRAPHS[name], backend="dense")


@pytest.mark.parametrize(("name", "told"), [("causal", 1), ("window", 7), ("full", 1)])
def test_of_the_output_the_last_receiver_tells_if_it_hears_everyone(name, told, monkeypatch):
    """Of a graph with a mask all of them do."""
    asked = []
    monkeypatch.setattr(
        nonfinite, "surely_finite", lambda *tensors: asked.extend(tuple(x.shape) for x in tensors) or True
    )
    attend(*qkv(), name)
    assert asked == [(1, 4, told, 4), (1, 4, 7, 4), (1, 2, 7, 4)]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("may_ask", [True, False])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
def test_a_nan_reaches_those_who_hear_it(name, may_ask, with_gradients, where, monkeypatch):
    """Also where nobody may ask, as while a CUDA graph is recorded; the others get what they got without
    it.
    """
    monkeypatch.setattr(nonfinite, "may_ask", lambda x: may_ask)
    graph, given = GRAPHS[name], qkv()
    clean = attend(*given, name)
    given[where][:, :, 4, 1] = torch.nan
    out = attend(*(x.requires_grad_(with_gradients) for x in given), name)
    reached = graph.mask()[:, 4] if where else (torch.arange(7) == 4) & (graph.in_degree() > 0)
    assert out.isnan().any(-1)[0, 0].tolist() == reached.tolist()
    assert_exact(out[:, :, ~reached], clean[:, :, ~reached])


@pytest.mark.parametrize(
    "graph", [patterns.self_loops(7), patterns.cross(7, 1), patterns.causal(7)], ids=repr
)
def test_who_hears_nothing_but_a_nan(graph):
    """The kernel for CPUs takes a row of logits that are all NaN for one that is hidden."""
    q, k, v = qkv()
    k, v = k[:, :, : graph.num_src], v[:, :, : graph.num_src]
    k[:, :, 0] = torch.nan
    out = ga.attend(q, k, v, graph, backend="dense")
    assert out.isnan().any(-1)[0, 0].tolist() == graph.mask()[:, 0].tolist()


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_key_that_silences_itself_does_not_spoil_gradients(name):
    """k = inf where all who hear it have logit -inf: the output is finite, and so is the gradient of those
    who do not hear it.
    """
    q, k, v = qkv(dim=1)
    q, k = -q.abs(), k.abs()
    q[:, :, 0] = 1.0
    k[:, :, 3] = torch.inf
    given = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*given, name)
    deaf_to_it = ~GRAPHS[name].mask()[:, 3]
    (slope,) = torch.autograd.grad(out[:, :, deaf_to_it].sum(), given[:1])
    assert slope[:, :, deaf_to_it].isfinite().all()


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_query_that_silences_everyone_does_not_spoil_gradients(name):
    """q = inf with logits -inf throughout."""
    q, k, v = qkv(dim=1)
    k = -k.abs()
    q[:, :, 2] = torch.inf
    given = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*given, name)
    others = torch.arange(7) != 2
    unheard = ~GRAPHS[name].mask()[2]
    _, dk, dv = torch.autograd.grad(out[:, :, others].sum(), given)
    assert dk[:, :, unheard].isfinite().all()
    assert dv[:, :, unheard].isfinite().all()


def test_who_may_ask(monkeypatch):
    """Not a program that is recorded as a CUDA graph; a GPU is asked once for all tensors."""

    class OnCuda:
        is_cuda = True

    assert nonfinite.may_ask(torch.zeros(1))
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert nonfinite.may_ask(OnCuda()) is not capturing


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_surely_finite(dtype, bad):
    """Whatever tensor holds it; large half numbers do not overflow their sum."""
    fine = torch.full((40, 40), 6e4, dtype=dtype)
    spoilt = fine.clone()
    spoilt[3, 5] = bad
    assert nonfinite.surely_finite(fine, fine)
    assert not nonfinite.surely_finite(fine, spoilt)
    assert not nonfinite.surely_finite(spoilt, -spoilt)


@pytest.mark.parametrize("name", GRAPHS)
def test_second_derivatives(name):
    """SDPA's fused kernels have none: of a plain call they are those of the formula, and its first are the
    fused ones still.
    """
    slopes, bends = [], []
    for backend in ("dense", "reference"):
        given = [x.requires_grad_() for x in qkv()]
        out = ga.attend(*given, GRAPHS[name], backend=backend)
        found = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        slopes.append(found)
        bends.append(torch.autograd.grad(sum(x.square().sum() for x in found), given))
    for ours, truth in (slopes, bends):
        assert_exact(ours, truth)


def test_some_inputs_learn_and_a_gradient_is_asked_for_twice():
    """A key alone, and once more with what was kept."""
    q, k, v = qkv()
    k.requires_grad_()
    out = attend(q, k, v, "causal")
    first, again = (torch.autograd.grad(out.sum(), k, retain_graph=True)[0] for _ in range(2))
    wanted = torch.autograd.grad(ga.attend(q, k, v, GRAPHS["causal"], backend="reference").sum(), k)[0]
    assert torch.equal(first, again)
    assert_exact(first, wanted)


def test_channels_that_are_not_side_by_side_run_on_the_fused_kernel():
    """SDPA itself makes all weights for them."""
    q = torch.randn(1, 2, 40, 16, dtype=torch.float64)[..., ::2]
    with torch.profiler.profile() as watched:
        out = ga.attend(q, q, q, patterns.causal(40), backend="dense")
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {
        event.key for event in watched.key_averages()
    }
    assert_exact(out, ga.attend(q, q, q, patterns.causal(40), backend="reference"))


def test_a_graph_that_differs_by_head_runs_on_the_fused_kernel():
    """A mask of three axes kept SDPA from it, and all weights were held for the backward pass."""

    def rule(b, h, dst, src):
        return (src <= dst) & (dst - src <= 3 * (h + 1))

    graph = ga.TokenGraph.from_rule(rule, 40, heads=2)
    q = torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True)
    with torch.profiler.profile() as watched:
        out = ga.attend(q, q, q, graph, backend="dense")
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {
        event.key for event in watched.key_averages()
    }
    assert_exact(out, ga.attend(q, q, q, graph, backend="reference"))


@pytest.mark.parametrize(
    ("dtype", "value_dim", "available", "told"),
    [
        (torch.bfloat16, 4, True, True),
        (torch.float32, 4, True, False),
        (torch.bfloat16, 4, False, False),
        (torch.bfloat16, flash_varlen.WIDEST - 1, True, True),
        (torch.bfloat16, flash_varlen.WIDEST, True, False),
    ],
)
def test_when_the_kernel_of_cuda_is_asked_for_its_lse(dtype, value_dim, available, told, monkeypatch):
    """Halves, where torch has the kernel, and a channel is left for the gradient of lse; as if this were
    CUDA.
    """
    monkeypatch.setattr(dense, "DEVICES_OF_FLASH", {"cpu"})
    monkeypatch.setattr(flash_varlen, "available", lambda: available)
    q = torch.zeros(1, 2, 7, 8, dtype=dtype)
    assert (
        dense._has_flash_lse(
            AttentionCall.checked(q, q, q.new_zeros(1, 2, 7, value_dim), patterns.causal(7), with_lse=True)
        )
        == told
    )


def test_softmax_of_a_row_of_minus_infinity():
    """Weights 0 and lse -inf; with a sink, which takes all, lse is the sink."""
    logits = torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf]]).view(1, 1, 2, 2)
    weights, lse = edges.row_softmax(logits, None)
    assert weights.tolist() == [[[[0, 0], [1, 0]]]]
    assert lse.tolist() == [[[-torch.inf, 0]]]
    weights, lse = edges.row_softmax(logits[:, :, :1], torch.tensor([0.5]).view(1, 1, 1, 1))
    assert weights.tolist() == [[[[0, 0]]]]
    assert lse.tolist() == [[[0.5]]]
