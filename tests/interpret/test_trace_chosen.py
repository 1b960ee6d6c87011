"""Records of chosen layers, heads and edges give the numbers of the whole record."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import traces
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import LISTED, TOKENS, drawn, heads, new_model

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, patterns
from gnn_attention.interpret import trace
from gnn_attention.interpret.trace import pairs as trace_pairs


def assert_same(part, whole, pairs):
    """Of these edges, by every method."""
    pairs = trace_pairs.read_pairs(pairs) if isinstance(pairs, list) else pairs
    assert sorted(part.edge_index.mT.tolist()) == sorted(pairs.mT.tolist())
    pairs = part.edge_index
    for name in ("logits", "weights", "norms", "carried", "messages", "pair_logits"):
        found, expected = (getattr(call, name)(pairs).nan_to_num(neginf=-9.0) for call in (part, whole))
        assert_exact(found, expected)


@pytest.mark.parametrize("kind", [None, *traces.KINDS])
@pytest.mark.parametrize("name", traces.GRAPHS)
def test_chosen_edges_are_those_of_the_whole_record(name, kind):
    """Graphs that differ by head or sample, edges cut and muted; as pairs and as a graph."""
    layer, x, graph = MessagePassingAttention(heads(), backend="auto"), drawn(2, 7, 12), traces.GRAPHS[name]
    intervention = traces.KINDS[kind](traces.PAIRS[name][:1], heads=2) if kind else ()
    whole = trace.record(layer, x, graph, interventions=intervention).layers[0]
    for asked in (whole.edge_index[:, ::3], whole.edge_index[:, -1:]):
        for edges in (asked, ga.convert.from_edge_index(asked, 7)):
            part = trace.record(layer, x, graph, interventions=intervention, edges=edges).layers[0]
            assert_same(part, whole, asked)


def test_biases_score_mods_and_gradients():
    """A bias stays with its edge, a score_mod knows heads and tokens."""

    def by_place(score, b, h, dst, src):
        return score * (1 + h) + (2 * dst - src) / 8

    made, x = heads(), drawn(2, 7, 12).requires_grad_()
    layer = MessagePassingAttention(made, by_place)
    whole = trace.record(layer, x, LISTED, bias=drawn(4, 9)).layers[0]
    part = trace.record(layer, x, LISTED, bias=drawn(4, 9), edges=[(6, 2), (4, 1)]).layers[0]
    assert part.edge_index.tolist() == [[6, 4], [2, 1]]
    assert_same(part, whole, [(6, 2), (4, 1)])
    assert_exact(part.weights((4, 1), heads=1), whole.weights((4, 1), heads=1))
    losses = (part.carried(None, [3, 1]), whole.carried(part.edge_index, [3, 1]))
    inputs = [x, made.W_Q, made.W_K, made.W_V, made.W_O]
    assert_exact(*(torch.autograd.grad(y.square().sum(), inputs) for y in losses))


def test_calls_of_some_layers():
    """Of other layers there is nothing; the states are those of the chosen blocks."""
    model = new_model()
    whole = trace.record(model, TOKENS)
    run = trace.record(model, TOKENS, edges=[(0, 5), (2, 5), (2, 6)], layers=[2, 0])
    assert [call.number for call in run.layers] == [0, 2]
    for call in run.layers:
        assert_same(call, whole.layers[call.number], [(0, 5), (2, 5), (2, 6)])
    layers = trace.record(model, TOKENS, layers=2)
    assert_exact(layers.states[1], whole.states[5])
    assert len(layers.states) == 3


def test_wrong_choices_are_refused():
    layer, x = MessagePassingAttention(heads()), drawn(7, 12)
    part = trace.record(layer, x, LISTED, edges=[(6, 2)])
    call, refused = part.layers[0], partial(trace.record, layer, x, LISTED)
    assert_refusals(
        [
            (partial(refused, edges=[(0, 1)]), ValueError, "0 -> 1 is no edge .* nothing to record"),
            (partial(refused, edges=patterns.causal(6)), ValueError, "7"),
            (partial(refused, layers=1), IndexError, "layers must be in 0 .. 0, the attention layers, got 1"),
            (partial(call.weights, (0, 2)), ValueError, "0 -> 2 is no edge"),
        ]
    )
