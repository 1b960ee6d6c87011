"""Records of selected layers, heads and edges equal those of the whole run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import traces
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import LISTED, TOKENS, heads, new_model, randn

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, patterns
from gnn_attention.interpret import trace
from gnn_attention.interpret.trace import pairs as trace_pairs


def assert_same(part, whole, pairs):
    """Check that every method returns the same values for these edges."""
    pairs = trace_pairs.read_pairs(pairs) if isinstance(pairs, list) else pairs
    assert sorted(part.edge_index.mT.tolist()) == sorted(pairs.mT.tolist())
    pairs = part.edge_index
    for name in ("logits", "weights", "norms", "carried", "messages", "pair_logits"):
        values, expected = (getattr(call, name)(pairs).nan_to_num(neginf=-9.0) for call in (part, whole))
        assert_exact(values, expected)


@pytest.mark.parametrize("kind", [None, *traces.KINDS])
@pytest.mark.parametrize("name", traces.GRAPHS)
def test_selected_edges_have_the_values_of_the_whole_record(name, kind):
    """Edges are selected as pairs or as a graph, with interventions, in graphs that vary by head."""
    layer, x, graph = MessagePassingAttention(heads(), backend="auto"), randn(2, 7, 12), traces.GRAPHS[name]
    intervention = traces.KINDS[kind](traces.PAIRS[name][:1], heads=2) if kind else ()
    whole = trace.record(layer, x, graph, interventions=intervention).layers[0]
    for selection in (whole.edge_index[:, ::3], whole.edge_index[:, -1:]):
        for edges in (selection, ga.convert.from_edge_index(selection, 7)):
            part = trace.record(layer, x, graph, interventions=intervention, edges=edges).layers[0]
            assert_same(part, whole, selection)


def test_biases_score_mods_and_gradients():
    """A bias stays with its edge, and a score_mod sees the right heads and tokens."""

    def by_position(score, b, h, dst, src):
        return score * (1 + h) + (2 * dst - src) / 8

    form, x = heads(), randn(2, 7, 12).requires_grad_()
    layer = MessagePassingAttention(form, by_position)
    whole = trace.record(layer, x, LISTED, bias=randn(4, 9)).layers[0]
    part = trace.record(layer, x, LISTED, bias=randn(4, 9), edges=[(6, 2), (4, 1)]).layers[0]
    assert part.edge_index.tolist() == [[6, 4], [2, 1]]
    assert_same(part, whole, [(6, 2), (4, 1)])
    assert_exact(part.weights((4, 1), heads=1), whole.weights((4, 1), heads=1))
    losses = (part.carried(None, [3, 1]), whole.carried(part.edge_index, [3, 1]))
    inputs = [x, form.W_Q, form.W_K, form.W_V, form.W_O]
    assert_exact(*(torch.autograd.grad(y.square().sum(), inputs) for y in losses))


def test_calls_of_some_layers():
    """Other layers are not recorded, and states are those of the selected blocks."""
    model = new_model()
    whole = trace.record(model, TOKENS)
    run = trace.record(model, TOKENS, edges=[(0, 5), (2, 5), (2, 6)], layers=[2, 0])
    assert [call.number for call in run.layers] == [0, 2]
    for call in run.layers:
        assert_same(call, whole.layers[call.number], [(0, 5), (2, 5), (2, 6)])
    layers = trace.record(model, TOKENS, layers=2)
    assert_exact(layers.states[1], whole.states[5])
    assert len(layers.states) == 3


def test_invalid_selections_are_refused():
    layer, x = MessagePassingAttention(heads()), randn(7, 12)
    part = trace.record(layer, x, LISTED, edges=[(6, 2)])
    call, record = part.layers[0], partial(trace.record, layer, x, LISTED)
    assert_refusals(
        [
            (partial(record, edges=[(0, 1)]), ValueError, "0 -> 1 is not an edge .* nothing to record"),
            (partial(record, edges=patterns.causal(6)), ValueError, "7"),
            (partial(record, layers=1), IndexError, "layers must be in 0 .. 0, the attention layers, got 1"),
            (partial(call.weights, (0, 2)), ValueError, "0 -> 2 is not an edge"),
        ]
    )
