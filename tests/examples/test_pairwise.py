"""Attention and MLPs are special cases of general message passing in float64."""

from itertools import product

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import heads, randn
from torch import nn

import gnn_attention as ga
from examples.pairwise import BothEnds, PairwiseMessages, StaticNodes
from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention.rotary import Rotary

# The receivers 2 and 4 are isolated.
GRAPH = ga.convert.from_edge_index(torch.tensor([[4, 0, 6, 2, 6, 5], [1, 1, 0, 3, 3, 3]]), 5, 7)


@pytest.mark.parametrize("form", [FactoredHeads.of, MergedHeads.of, lambda h: h])
@pytest.mark.parametrize(("graph", "batch"), [(patterns.window(7, 3), ()), (GRAPH, (2,))])
def test_attention_is_a_case(form, graph, batch):
    """The output and all gradients equal those of attention, also if senders and receivers differ."""
    converted = form(heads())
    results = []
    for layer in (PairwiseMessages.of(converted), MessagePassingAttention(converted)):
        sizes = enumerate((graph.num_src, graph.num_dst))
        x = tuple(randn(*batch, size, 12, seed=side).requires_grad_() for side, size in sizes)
        y = layer(x, graph)
        loss = (y * randn(*y.shape, seed=3)).sum()
        results.append([y, *torch.autograd.grad(loss, [*x, *converted.parameters()])])
    (output, *gradients), (expected, *expected_gradients) = results
    assert_exact(output, expected)
    assert_exact(gradients, expected_gradients)
    if graph is GRAPH:
        assert torch.equal(output[..., 2, :], converted.b_O.expand(*batch, 12))


WEIGHTS = {
    "softmax": lambda logit: logit.softmax(0),
    "identity": lambda logit: logit,
    "relu": lambda logit: logit.clamp(min=0),
    "gelu": lambda logit: logit * (1 + torch.erf(logit / 2**0.5)) / 2,
    "sigmoid": lambda logit: 1 / (1 + torch.exp(-logit)),
    "silu": lambda logit: logit / (1 + torch.exp(-logit)),
    "relu2": lambda logit: logit.clamp(min=0) ** 2,
    torch.tanh: torch.tanh,
}


@pytest.mark.parametrize("normaliser", WEIGHTS)
@pytest.mark.parametrize("num_heads", [None, 3])
def test_both_ends_against_a_loop(normaliser, num_heads):
    """The layer equals a loop if messages and logits depend on both ends, with and without heads."""
    torch.manual_seed(0)
    count = num_heads or 1
    send, fit = (BothEnds(6, 8, count * out).double() for out in (5, 1))

    def split_heads(y, *end):
        return y.unflatten(-1, (count, *end)) if num_heads else y if end else y.squeeze(-1)

    message, logit = (lambda *x: split_heads(send(*x), 5)), (lambda *x: split_heads(fit(*x)))
    layer = PairwiseMessages(message, logit, normaliser)
    x_src, x_dst = randn(2, 7, 6), randn(2, 5, 6, seed=1)
    weigh = WEIGHTS[normaliser]
    expected = torch.zeros(2, 5, 5, dtype=torch.float64)
    for b, i, h in product(range(2), range(5), range(count)):
        senders = GRAPH.mask()[i].nonzero().flatten().tolist()
        logits = randn(len(senders))
        for index, j in enumerate(senders):
            logits[index] = fit(x_dst[b, i], x_src[b, j])[h].item()
        for j, weight in zip(senders, weigh(logits), strict=True):
            expected[b, i] += weight * send(x_dst[b, i], x_src[b, j])[5 * h : 5 * h + 5]
    assert_exact(layer((x_src, x_dst), GRAPH), expected)


def test_a_non_edge_carries_nothing():
    """A NaN changes only receivers with an edge from it, and gradients reach only senders."""
    x = randn(7, 12)
    x[6] = torch.nan
    graph = patterns.window(7, 3)
    pairwise = PairwiseMessages(BothEnds(12, 8, 12).double(), lambda *x: (x[0] * x[1]).sum(-1), "sigmoid")
    for layer in (PairwiseMessages.of(heads()), pairwise):
        y = layer(x, graph)
        assert y.isnan().any(1).tolist() == [False] * 6 + [True]
        clean = randn(7, 12).requires_grad_()
        layer(clean, graph)[2].sum().backward()
        assert clean.grad.abs().sum(1).gt(0).tolist() == [True] * 3 + [False] * 4


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU("tanh"), nn.Softmax(dim=-1)], ids=str)
@pytest.mark.parametrize(("bias", "shape"), [(True, (3, 6)), (False, (2, 3, 6))])
def test_an_mlp_is_attention_to_static_nodes(activation, bias, shape):
    """Attention to all nodes is the MLP; a graph with some of the nodes leaves out the other neurons."""
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(6, 16, bias), activation, nn.Linear(16, 5, bias)).double()
    nodes, x = StaticNodes.of(mlp), randn(*shape)
    assert_exact(nodes(x), mlp(x))
    sparse = ga.convert.from_edge_index(torch.tensor([[0, 3, 15, 7], [0, 0, 1, 2]]), 3, 16)
    if not isinstance(activation, nn.Softmax):
        expected = (mlp[:2](x) * sparse.mask()) @ mlp[2].weight.T
        assert_exact(nodes(x, sparse), expected + mlp[2].bias if bias else expected)


X, CAUSAL = randn(7, 12), patterns.causal(7)
WRONG = [
    (PairwiseMessages(lambda x_dst, x_src: x_dst[:1]), (X, CAUSAL), "message must return"),
    (PairwiseMessages(lambda x_dst, x_src: x_src, lambda *x: x[1]), (X, CAUSAL), "logit must return .*28"),
    (PairwiseMessages, (lambda *x: x[1], lambda *x: x[1][..., 0], "max"), "normaliser must be"),
    (PairwiseMessages.of, (StandardHeads(8, 2, rotary=Rotary()),), "rotary"),
]


@pytest.mark.parametrize(("call", "arguments", "words"), WRONG)
def test_errors(call, arguments, words):
    with pytest.raises(ValueError, match=words):
        call(*arguments)
