"""The dense backend runs the fused kernel, has second derivatives, and estimates its memory."""

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import dense
from gnn_attention.backends.call import AttentionCall

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


@pytest.mark.parametrize("name", GRAPHS)
def test_second_derivatives(name):
    """SDPA's fused kernels have no second derivatives, so the written-out formula gives them."""
    first_derivatives, second_derivatives = [], []
    for backend in ("dense", "reference"):
        inputs = [x.requires_grad_() for x in qkv()]
        out = ga.attend(*inputs, GRAPHS[name], backend=backend)
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        first_derivatives.append(grads)
        second_derivatives.append(torch.autograd.grad(sum(x.square().sum() for x in grads), inputs))
    for result, truth in (first_derivatives, second_derivatives):
        assert_exact(result, truth)


def test_a_gradient_of_one_input_can_be_computed_twice():
    q, k, v = qkv()
    k.requires_grad_()
    out = attend(q, k, v, "causal")
    first, second = (torch.autograd.grad(out.sum(), k, retain_graph=True)[0] for _ in range(2))
    expected = torch.autograd.grad(ga.attend(q, k, v, GRAPHS["causal"], backend="reference").sum(), k)[0]
    assert torch.equal(first, second)
    assert_exact(first, expected)


def window_by_head(b, h, dst, src):
    return (src <= dst) & (dst - src <= 3 * (h + 1))


@pytest.mark.parametrize("graph", [patterns.causal(40), ga.TokenGraph.from_rule(window_by_head, 40, heads=2)])
@pytest.mark.parametrize("strided", ["q", "k", "v", "qkv", ""])
def test_the_fused_kernel_runs(graph, strided):
    """For strided channels or a mask of three axes, SDPA itself would store all weights."""
    inputs = [
        torch.randn(1, 2, 40, 16, dtype=torch.float64)[..., ::2].requires_grad_()
        if name in strided
        else torch.randn(1, 40, 2, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for name in "qkv"
    ]
    with torch.profiler.profile() as profile:
        out = ga.attend(*inputs, graph, backend="dense")
    events = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in events
    # Views are not copied if the channels of each token are contiguous.
    assert strided or "aten::contiguous" not in events
    assert_exact(out, ga.attend(*inputs, graph, backend="reference"))


def test_the_memory_estimate_covers_the_mask():
    """A mask takes a bool and a float32 for each pair; a causal graph needs none."""
    q, bytes_of_masks = torch.zeros(1, 4, 64, 16), 64 * 64 * (1 + 4)
    graphs = patterns.causal(64), patterns.window(64, 5)
    bytes_needed = [dense.bytes_needed(AttentionCall(q, q, q, graph, 0.25)) for graph in graphs]
    assert bytes_needed[0] == 0
    assert bytes_of_masks <= bytes_needed[1] <= 2 * bytes_of_masks
