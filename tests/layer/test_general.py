"""General message passing: attention, graph attention and an MLP are cases of it, by float64 formulas."""

import copy
import pickle
from itertools import product

import pytest
import torch
from support.bounds import assert_exact
from torch import nn
from torch.nn import functional
from torch_geometric.nn import EdgeConv, GATConv

import gnn_attention as ga
from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention.layer.pairwise import BothEnds, PairwiseMessages, StaticNodes
from gnn_attention.rotary import Rotary

# 2 and 4 are isolated
LISTED = ga.convert.from_edge_index(torch.tensor([[4, 0, 6, 2, 6, 5], [1, 1, 0, 3, 3, 3]]), 5, 7)
ACTIVATIONS = [nn.Identity(), nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh(), nn.Softmax(dim=-1)]


def drawn(*shape, seed=0, dtype=torch.float64):
    """Numbers from N(0, 1)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def heads(**options):
    """Float64 heads with grouped keys, unequal widths and drawn biases."""
    torch.manual_seed(0)
    made = StandardHeads(12, 4, head_dim=6, num_kv_heads=2, value_dim=5, bias=True, **options).double()
    for name, parameter in made.named_parameters():
        if name.startswith("b_"):
            nn.init.normal_(parameter)
    return made


def perceptron(activation=None, width=6, hidden=16, out=5, bias=True, dtype=torch.float64):
    """An MLP of one hidden layer."""
    torch.manual_seed(1)
    first, second = nn.Linear(width, hidden, bias), nn.Linear(hidden, out, bias)
    return nn.Sequential(first, nn.GELU() if activation is None else activation, second).to(dtype)


@pytest.mark.parametrize(
    "form", [lambda h: h, FactoredHeads.of, MergedHeads.of], ids=["standard", "factored", "merged"]
)
@pytest.mark.parametrize(
    "graph", [patterns.causal(7), patterns.window(7, 3), LISTED], ids=["causal", "window", "listed"]
)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
def test_attention_is_a_case(form, graph, batch):
    """Forward and every gradient, over senders and receivers of their own."""
    made = form(heads())
    results = []
    for layer in (PairwiseMessages.of(made), MessagePassingAttention(made)):
        sizes = enumerate((graph.num_src, graph.num_dst))
        x = tuple(drawn(*batch, size, 12, seed=side).requires_grad_() for side, size in sizes)
        y = layer(x, graph)
        loss = (y * drawn(*y.shape, seed=3)).sum()
        results.append([y, *torch.autograd.grad(loss, [*x, *made.parameters()])])
    (found, *slopes), (wanted, *true_slopes) = results
    assert_exact(found, wanted)
    assert_exact(slopes, true_slopes)
    if graph is LISTED:
        assert torch.equal(found[..., 2, :], made.b_O.expand(*batch, 12))


def test_graph_attention_networks_are_a_case():
    """Velickovic et al. 2018: a logit that is no product, a message that is linear in the sender."""
    torch.manual_seed(0)
    gat = GATConv(12, 5, heads=3, concat=False, add_self_loops=False, bias=False).double()
    graph, x = patterns.window(7, 3) | patterns.sinks(7, 1), drawn(7, 12)

    def projected(states):
        return (states @ gat.lin.weight.T).view(-1, 3, 5)

    def logit(x_dst, x_src):
        both = (projected(x_dst) * gat.att_dst).sum(-1) + (projected(x_src) * gat.att_src).sum(-1)
        return functional.leaky_relu(both, 0.2)

    mean = PairwiseMessages(lambda _, x_src: projected(x_src) / 3, logit)
    assert_exact(mean(x, graph), gat(x, graph.edge_index))


def test_edge_convolution_is_a_case():
    """Wang et al. 2019: a message of both ends, without weights. Equal to PyG's EdgeConv."""
    mlp = perceptron(width=24, out=12)
    usual = EdgeConv(mlp, aggr="add")  # it draws the weights anew
    graph, x = patterns.window(7, 3), drawn(7, 12)
    layer = PairwiseMessages(lambda x_dst, x_src: mlp(torch.cat([x_dst, x_src - x_dst], dim=-1)))
    assert_exact(layer(x, graph), usual(x, graph.edge_index))


WEIGHTS = {
    "softmax": lambda logit: logit.softmax(0),
    "identity": lambda logit: logit,
    "relu": lambda logit: logit.clamp(min=0),
    "gelu": lambda logit: logit * (1 + torch.erf(logit / 2**0.5)) / 2,
    "sigmoid": lambda logit: 1 / (1 + torch.exp(-logit)),
    torch.tanh: torch.tanh,
}


@pytest.mark.parametrize("normaliser", WEIGHTS)
@pytest.mark.parametrize("num_heads", [None, 3])
def test_both_ends_against_a_loop(normaliser, num_heads):
    """Messages and logits of both ends, with a head axis and without."""
    torch.manual_seed(0)
    count = num_heads or 1
    send, fit = (BothEnds(6, 8, count * out, source_width=4).double() for out in (5, 1))

    def shape(y, *end):
        return y.unflatten(-1, (count, *end)) if num_heads else y if end else y.squeeze(-1)

    message, logit = (lambda *x: shape(send(*x), 5)), (lambda *x: shape(fit(*x)))
    layer = PairwiseMessages(message, logit, normaliser)
    x_src, x_dst = drawn(2, 7, 4), drawn(2, 5, 6, seed=1)
    weigh = WEIGHTS[normaliser]
    wanted = torch.zeros(2, 5, 5, dtype=torch.float64)
    for b, i, h in product(range(2), range(5), range(count)):
        senders = LISTED.mask()[i].nonzero().flatten().tolist()
        logits = drawn(len(senders))
        for at, j in enumerate(senders):
            logits[at] = fit(x_dst[b, i], x_src[b, j])[h].item()
        for j, weight in zip(senders, weigh(logits), strict=True):
            wanted[b, i] += weight * send(x_dst[b, i], x_src[b, j])[5 * h : 5 * h + 5]
    assert_exact(layer((x_src, x_dst), LISTED), wanted)


def test_size_is_that_of_the_states():
    """PyG's bipartite calls: ``size=(senders, receivers)``, which must be those of x."""
    layer = PairwiseMessages.of(heads())
    x = drawn(LISTED.num_src, 12), drawn(LISTED.num_dst, 12, seed=1)
    wanted = layer(x, LISTED)
    assert_exact(layer(x, LISTED.edge_index, size=(LISTED.num_src, LISTED.num_dst)), wanted)
    with pytest.raises(ValueError, match=r"size must be \(senders, receivers\) = .*, as x has them, got"):
        layer(x, LISTED, size=(LISTED.num_dst, LISTED.num_src))


def test_a_non_edge_carries_nothing():
    """Neither a NaN nor a gradient."""
    x = drawn(7, 12)
    x[6] = torch.nan
    graph = patterns.window(7, 3)
    both = PairwiseMessages(BothEnds(12, 8, 12).double(), lambda *x: (x[0] * x[1]).sum(-1), "sigmoid")
    for layer in (PairwiseMessages.of(heads()), both):
        y = layer(x, graph)
        assert y.isnan().any(1).tolist() == [False] * 6 + [True]
        clean = drawn(7, 12).requires_grad_()
        layer(clean, graph)[2].sum().backward()
        assert clean.grad.abs().sum(1).gt(0).tolist() == [True] * 3 + [False] * 4


def test_half_types_are_summed_in_float32():
    """What travels is float32 until it has been summed."""
    graph, made = patterns.causal(64), StandardHeads(32, 2, bias=True)
    seen = []
    layer = PairwiseMessages.of(made.to(torch.bfloat16))
    layer.register_message_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    x = drawn(64, 32, dtype=torch.bfloat16)
    found = layer(x, graph)
    q, (k, v) = made.receive(x[None]), made.send(x[None])
    usual = made.collect(functional.scaled_dot_product_attention(q, k, v, is_causal=True))[0]
    exact = MessagePassingAttention(copy.deepcopy(made).double())(x.double(), graph)
    assert (seen, found.dtype) == ([torch.float32], torch.bfloat16)
    assert (found - exact).abs().max() <= 2 * (usual - exact).abs().max()
    for activation in (nn.GELU(), nn.Softmax(dim=-1)):
        nodes = StaticNodes.of(perceptron(activation, dtype=torch.bfloat16))
        nodes.register_message_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        assert nodes(drawn(3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 6)])
def test_an_mlp_is_attention_to_static_nodes(activation, bias, shape):
    """Forward and every gradient."""
    mlp = perceptron(activation, bias=bias)
    nodes = StaticNodes.of(mlp)
    xs = [drawn(*shape).requires_grad_() for _ in range(2)]
    for module, x in zip((mlp, nodes), xs, strict=True):
        y = module(x)
        (y * drawn(*y.shape, seed=1)).sum().backward()
    assert_exact(nodes(xs[1]), mlp(xs[0]))
    assert_exact(xs[1].grad, xs[0].grad)
    assert_exact(nodes.patterns.grad, mlp[0].weight.grad)
    assert_exact(nodes.messages.grad, mlp[2].weight.grad.T)
    for own, linear in ((nodes.bias, mlp[0]), (nodes.update_bias, mlp[2])):
        assert (own is not None) == bias
        if bias:
            assert_exact(own.grad, linear.bias.grad)


def test_a_graph_of_nodes_and_tokens():
    """A token over some of the nodes is an MLP without the others."""
    mlp, x = perceptron(), drawn(5, 6)
    graph = ga.convert.from_edge_index(torch.tensor([[0, 3, 15, 7], [0, 0, 1, 4]]), 5, 16)
    found = StaticNodes.of(mlp)(x, graph)
    assert_exact(found, (mlp[1](mlp[0](x)) * graph.mask()) @ mlp[2].weight.T + mlp[2].bias)
    assert torch.equal(found[2], mlp[2].bias)


@pytest.mark.parametrize("bias", [True, False])
def test_a_fixed_context(bias):
    """The static nodes of all heads, under softmax, add what attention to that context adds."""
    made = heads() if bias else StandardHeads(12, 4, num_kv_heads=2, value_dim=5, source_width=9).double()
    context, x = drawn(7, made.source_width), drawn(5, 12, seed=1)
    nodes = [StaticNodes.of_context(made, context, head) for head in range(4)]
    wanted = MessagePassingAttention(made)((context, x), LISTED)
    assert_exact(sum(each(x, LISTED) for each in nodes) + (made.b_O if bias else 0), wanted)
    gelu = [StaticNodes.of_context(made, context, head, "gelu") for head in range(4)]
    wanted = PairwiseMessages.of(made, "gelu")((context, x), LISTED)
    assert_exact(sum(each(x, LISTED) for each in gelu) + (made.b_O if bias else 0), wanted)


def test_nodes_own_their_numbers():
    """Copies: training the nodes leaves the MLP as it was. They can be copied and pickled."""
    mlp = perceptron()
    nodes, x = StaticNodes.of(mlp), drawn(3, 6)
    before = mlp(x)
    with torch.no_grad():
        for parameter in nodes.parameters():
            parameter.zero_()
    assert torch.equal(mlp(x), before)
    assert not nodes(x).any()
    for again in (copy.deepcopy(nodes), pickle.loads(pickle.dumps(nodes))):
        assert torch.equal(again(x), nodes(x))
    layer = PairwiseMessages.of(heads())
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(drawn(7, 12), patterns.causal(7)), layer(drawn(7, 12), patterns.causal(7)))


NODES, X = StaticNodes.of(perceptron()), drawn(7, 12)
ATTENTION = PairwiseMessages.of(heads())
CAUSAL, BY_HEAD = patterns.causal(7), patterns.duo_attention(7, 2, [0], 3, 1)


def source(x_dst, x_src):
    return x_src


WRONG = [
    (PairwiseMessages, (None,), TypeError, "message must be a function or a module, got None"),
    (PairwiseMessages, (source, 3), TypeError, "logit must be a function or a module, got 3 of type int"),
    (PairwiseMessages, (source, None, "max"), ValueError, "normaliser must be one of 'softmax', 'identity'"),
    (PairwiseMessages.of, (nn.Linear(3, 3),), TypeError, "heads must be Standard-, .* got Linear"),
    (PairwiseMessages.of, (StandardHeads(8, 2, rotary=Rotary()),), ValueError, "rotary"),
    (ATTENTION, ([1.0], CAUSAL), TypeError, "x must be a tensor .* got float"),
    (ATTENTION, (drawn(12), CAUSAL), ValueError, r"x must be \[N, d\] or \[B, T, d\]"),
    (ATTENTION, (X, patterns.causal(6)), ValueError, r"causal\(6\).* does not fit x with 7 senders"),
    (ATTENTION, (X, BY_HEAD), NotImplementedError, "select"),
    (PairwiseMessages(lambda a, b: b[:1]), (X, CAUSAL), ValueError, "message must return"),
    (PairwiseMessages(source, source), (X, CAUSAL), ValueError, "logit must return .*28"),
    (BothEnds, (0, 3, 3), ValueError, "width must be at least 1"),
    (StaticNodes.of, (nn.Linear(3, 3),), TypeError, "mlp must be an nn.Sequential .* got Linear"),
    (StaticNodes.of, (perceptron(nn.LayerNorm(16)),), ValueError, "expected Softmax.* in mlp, got LayerNorm"),
    (StaticNodes.of, (perceptron(nn.Softmax(dim=0)),), ValueError, "in mlp, got Softmax"),
    (StaticNodes, ([1.0], X), TypeError, r"patterns must be a Tensor, got \[1.0\] of type list"),
    (StaticNodes, (drawn(3, 2), drawn(4, 2)), ValueError, r"must be .* got \[3, 2\] and \[4, 2\]"),
    (StaticNodes, (drawn(3, 2), drawn(3, 2), None, drawn(3)), ValueError, r"update_bias must be \[2\]"),
    (NODES, (drawn(3, 7),), ValueError, r"x must be \[..., 6\] in torch.float64"),
    (NODES, (drawn(3, 6), CAUSAL), ValueError, "does not fit x with 16 senders and 3 receivers"),
    (StaticNodes.of_context, (NODES, X), TypeError, "heads must be a StandardHeads, got StaticNodes"),
    (StaticNodes.of_context, (heads(), X, 4), IndexError, r"head must be in 0 .. 3, got 4"),
    (StaticNodes.of_context, (heads(), X[:, :11]), ValueError, r"x must be \[B, T, 12\]"),
]


@pytest.mark.parametrize(("call", "arguments", "error", "words"), WRONG)
def test_errors(call, arguments, error, words):
    with pytest.raises(error, match=words):
        call(*arguments)
