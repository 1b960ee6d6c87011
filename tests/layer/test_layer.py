"""The message-passing path equals attend and nn.MultiheadAttention, with the conventions of PyG."""

import copy
import pickle

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import heads, randn
from torch_geometric import EdgeIndex

import gnn_attention as ga
from gnn_attention import (
    FactoredHeads,
    MergedHeads,
    MessagePassingAttention,
    StandardHeads,
    patterns,
    score_mods,
)
from gnn_attention.rotary import Rotary

BACKENDS = ["message_passing", "dense", "reference", "auto"]


@pytest.mark.parametrize("form", [lambda h: h, FactoredHeads.of, MergedHeads.of])
def test_message_passing_equals_attend(form):
    """All backends agree in a call with score_mod, bias, more senders than receivers, and isolated ones."""
    graph = ga.convert.from_edge_index(torch.tensor([[4, 0, 6, 2, 6], [1, 1, 0, 3, 3]]), 5, 7)
    x = (randn(2, 7, 12), randn(2, 5, 12))
    bias = randn(2, 4, 5)
    layers = [MessagePassingAttention(form(heads()), score_mods.softcap(2.0), backend=b) for b in BACKENDS]
    results = [layer(x, graph, bias=bias, return_attention_weights=True) for layer in layers]
    for y, (edge_index, weights) in results:
        assert torch.equal(edge_index, graph.edge_index)
        assert_exact(y, results[0][0])
        assert_exact(weights, results[0][1][1])


def test_an_isolated_row_gets_b_O_alone():
    """The update of an isolated receiver lacks b_V W_O, which is part of messages."""
    standard = heads()
    for backend in BACKENDS:
        y = MessagePassingAttention(standard, backend=backend)(randn(9, 12), patterns.strict_causal(9))
        assert torch.equal(y[0], standard.b_O)


def test_pyg_calls_message_aggregate_update_in_this_order():
    """PyG's hooks see the output of each step, on edges and then on nodes."""
    layer = MessagePassingAttention(heads())
    output_shapes = {}
    for step in ("edge_update", "message", "aggregate", "propagate"):
        register = getattr(layer, f"register_{step}_forward_hook")
        register(lambda module, inputs, out, step=step: output_shapes.update({step: tuple(out.shape)}))
    layer(randn(9, 12), patterns.window(9, 3))
    edges = 9 * 3 - 3
    shapes = {"edge_update": (edges, 4), "message": (edges, 4, 5), "aggregate": (9, 4, 5)}
    assert list(output_shapes.items()) == list({**shapes, "propagate": (9, 12)}.items())
    # Without this argument, PyG would hide a failure of its templates and use slower code.
    layer._set_jittable_templates(raise_on_error=True)
    assert type(layer).propagate.__module__.endswith("MessagePassingAttention_propagate")
    assert type(layer).edge_updater.__module__.endswith("MessagePassingAttention_edge_updater")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_a_graph(backend):
    """TokenGraph, edge_index, EdgeIndex and adj_t as COO and CSR give the same update."""
    layer, x = MessagePassingAttention(heads(), backend=backend), randn(9, 12)
    graph = ga.convert.from_edge_index(patterns.tree([-1, 0, 0, 1, 1, 2, 2, 5, 5]).edge_index.flip(1), 9)
    expected, (edges, weights) = layer(x, graph, return_attention_weights=True)
    adj_t = ga.convert.to_pyg(graph, "adj_t")
    for g in (edges, EdgeIndex(edges, sparse_size=(9, 9)), adj_t, adj_t.to_sparse_csr()):
        y, (same_edges, alpha) = layer(x, g, return_attention_weights=True)
        assert_exact(y, expected)
        assert alpha.shape == (edges.shape[1], 4)
        if g.layout == torch.strided:
            assert same_edges is g
            assert_exact(alpha, weights)
        else:
            # By PyG's convention, the weights are returned as the values of the adjacency.
            dense = torch.zeros(9, 9, 4, dtype=torch.float64).index_put((edges[1], edges[0]), weights)
            assert_exact(same_edges.to_dense(), dense)


@pytest.mark.parametrize("backend", ["message_passing", "dense"])
def test_rotary_positions_follow_decoding_rows(backend):
    """Rows 5 to 8 of a graph are rotated by positions 5 to 8, as in the whole graph."""
    torch.manual_seed(0)
    rotary_heads = StandardHeads(12, 2, head_dim=6, rotary=Rotary(), qk_norm=True).double()
    layer = MessagePassingAttention(rotary_heads, backend=backend)
    x, graph = randn(9, 12), patterns.causal(9)
    full_output = layer(x, graph)
    assert_exact(layer((x, x[5:]), graph.rows(5, 9)), full_output[5:])
    assert (layer((x, x[5:]), ga.convert.from_mask(graph.mask()[5:])) - full_output[5:]).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_only_in_training(backend):
    """A layer in eval mode has no dropout; the returned weights are those before dropout."""
    layer, x, graph = MessagePassingAttention(heads(), dropout=0.5, backend=backend), X, CAUSAL
    expected = MessagePassingAttention(layer.heads, backend=backend)(x, graph)
    assert torch.equal(layer.eval()(x, graph), expected)
    torch.manual_seed(0)
    y, (edge_index, weights) = layer.train()(x, graph, return_attention_weights=True)
    assert (y - expected).abs().max() > 1e-3
    sums = torch.zeros(9, 4, dtype=torch.float64).index_add(0, edge_index[1], weights)
    assert_exact(sums, torch.ones_like(sums))


@pytest.mark.parametrize("backend", ["message_passing", "dense", "reference"])
def test_copies_pickles_and_leaves_no_state(backend):
    """Copies by deepcopy and pickle give equal outputs; a call adds nothing to the layer."""
    layer = MessagePassingAttention(heads(), score_mods.RelativeBias(4, 3).double(), backend=backend)
    x, graph = randn(9, 12), patterns.causal(9)
    attributes = set(vars(layer))
    y = layer(x, graph)
    assert set(vars(layer)) == attributes
    for copied_layer in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied_layer(x, graph), y)
    assert "score_mod.table" in dict(layer.named_parameters())


def test_reset_parameters_and_repr():
    layer = MessagePassingAttention(heads(), score_mods.RelativeBias(4, 3), backend="dense")
    torch.nn.init.ones_(layer.score_mod.table)
    initial = layer.heads.W_Q.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(initial, layer.heads.W_Q)
    assert (layer.score_mod.table == 0).all()
    assert (layer.heads.b_Q == 0).all()
    assert repr(layer) == "MessagePassingAttention(standard, heads=4, head_dim=6, backend='dense')"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score_mod", [None, score_mods.softcap(2.0)])
def test_no_tokens_no_samples_no_edges(backend, score_mod):
    """The axes of tokens, samples and edges may have size 0."""
    layer = MessagePassingAttention(heads(), score_mod, backend=backend)
    empty = patterns.window(9, 0)
    for shape, graph in (((0, 12), patterns.causal(0)), ((0, 9, 12), CAUSAL), ((9, 12), empty)):
        y, (_, weights) = layer(randn(*shape), graph, return_attention_weights=True)
        assert y.shape == shape
        assert weights.shape == (*shape[:-2], graph.num_edges, 4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["receiver", "sender"])
@pytest.mark.parametrize("form", [lambda h, side: h, FactoredHeads.of, MergedHeads.of])
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_runs_every_form(backend, form, side, bias):
    """Parameters in float32 accept states in float32 and bfloat16, but not in float64."""
    torch.manual_seed(0)
    layer = MessagePassingAttention(form(StandardHeads(12, 4, bias=bias), side), backend=backend)
    x, graph = randn(9, 12).float(), patterns.window(9, 3)
    expected = layer(x, graph)
    for states in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            y, (_, weights) = layer(states, graph, return_attention_weights=True)
        assert (y - expected).abs().max() < 0.1
        assert weights.dtype == torch.float32
        y.float().sum().backward()
    refusal = pytest.raises(ValueError, match=r"x must be .* in torch.float64")
    with torch.autocast("cpu", torch.bfloat16), refusal:
        layer(x.double(), graph)


CAUSAL, X = patterns.causal(9), randn(9, 12)
WRONG_INPUTS = [
    ((randn(2, 9, 12), randn(3, 9, 12)), CAUSAL, ValueError, r"x_src and x_dst of a pair must"),
    ((X, X, X), CAUSAL, TypeError, r"a pair .*, got Tensor, Tensor, Tensor"),
    ("x", CAUSAL, TypeError, r"x must be a tensor \[N, d\] or \[B, T, d\], .* got str"),
    (randn(8, 12), CAUSAL, ValueError, r"causal\(9\).* does not fit x with 8 senders and 8 receivers"),
    (X, "causal", TypeError, r"expected a torch_geometric Data, EdgeIndex, .* got 'causal'"),
    (X, CAUSAL.mask(), TypeError, r"got a Tensor of torch.bool .*from_mask"),
    (randn(9, 11), CAUSAL, ValueError, r"x must be \[B, T, 12\] in torch.float64 .* got \[1, 9, 11\]"),
]


@pytest.mark.parametrize(("x", "graph", "error", "message"), WRONG_INPUTS)
def test_wrong_input_is_named(x, graph, error, message):
    """The error names the argument and what was expected, and the next call works."""
    layer = MessagePassingAttention(heads())
    with pytest.raises(error, match=message):
        layer(x, graph)
    with pytest.raises(ValueError, match=r"bias must be broadcastable to \[B, Hq, E\] = \[1, 4, 45\]"):
        layer(X, CAUSAL, bias=torch.zeros(3))
    with pytest.raises(ValueError, match=r"dropout must be a probability in \[0, 1\), got 1.5"):
        MessagePassingAttention(heads(), dropout=1.5)
    assert layer(X, CAUSAL).shape == (9, 12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adjacency_that_is_not_coalesced_keeps_its_order(backend):
    """The weights are returned in the order of the stored indices of an adjacency that is not coalesced."""
    layer, x, graph = MessagePassingAttention(heads(), backend=backend), randn(9, 12), patterns.window(9, 3)
    _, (edges, expected) = layer(x, graph, return_attention_weights=True)
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(2))
    adj_t = torch.sparse_coo_tensor(edges[:, order].flip(0), torch.ones(len(order)), (9, 9))
    _, (same_edges, weights) = layer(x, adj_t, return_attention_weights=True)
    assert_exact(weights, expected[order])
    assert torch.equal(same_edges._indices(), adj_t._indices())
    assert not same_edges.is_coalesced()
    dense = torch.zeros(9, 9, 4, dtype=torch.float64).index_put((edges[1], edges[0]), expected)
    assert_exact(same_edges.to_dense(), dense)
