"""Arguments whose order counts refuse a set and a dict; where it does not count, a set is taken."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

from gnn_attention import (
    MessagePassingAttention,
    StandardHeads,
    algebra,
    analyse,
    convert,
    draw,
    explorer,
    patterns,
)
from gnn_attention.cache import KeyValueCache
from gnn_attention.interpret import circuits, trace
from gnn_attention.model.tokenizer import BytePair

GRAPH = patterns.causal(3)
LAYER, STATES = MessagePassingAttention(StandardHeads(8, 2)), torch.ones(3, 8)
CALL = trace.record(LAYER, STATES, GRAPH).layers[0]
NUMBERS = [0, 1, 2]
SURGERIES = [trace.mute(heads=0, factor=2.0), trace.mute(heads=1)]
PAIRS = [(b"a", b"b"), (b"c", b"d")]


def reorder(samples):
    cache, rows = KeyValueCache(patterns.causal(4)), torch.ones(3, 1, 1, 2)
    cache.append(rows, rows)
    cache.reorder(samples)


# the argument's name in the message, values that are taken as a list, the call
ORDERED = [
    ("lengths", NUMBERS, patterns.documents),
    ("answers", NUMBERS, lambda values: patterns.shared_prefix(2, values)),
    ("groups", NUMBERS, patterns.bidirectional_groups),
    ("order", NUMBERS, patterns.permutation),
    ("parents", [-1, 0, 1], patterns.tree),
    ("media", NUMBERS, lambda values: patterns.media_cross(4, values, 2)),
    ("shape", [1, 2], patterns.axial),
    ("window", [2, 4], lambda values: patterns.swin((4, 8), values)),
    ("times", NUMBERS, lambda values: patterns.temporal(GRAPH, values)),
    ("parts", [GRAPH, GRAPH.T], lambda values: patterns.edge_types(GRAPH, values)),
    ("sections", [(1, 2), (3,)], patterns.hierarchical_document),
    ("tokens", NUMBERS, lambda values: algebra.restrict(GRAPH, values)),
    ("groups", NUMBERS, lambda values: algebra.quotient(GRAPH, values)),
    ("graphs", [GRAPH, patterns.full(3)], analyse.diameter),
    ("graphs", [GRAPH, patterns.full(3)], analyse.overlap),
    ("residual", [0.1, 0.5], lambda values: analyse.influence(GRAPH, 2, residual=values)),
    ("weights", [torch.ones(6)], lambda values: analyse.influence(GRAPH, 2, weights=values)),
    ("receivers", [0, 2], lambda values: analyse.influence(GRAPH, 2, receivers=values)),
    ("senders", [0, 2], lambda values: analyse.influence(GRAPH, 2, senders=values)),
    ("graphs", [GRAPH, patterns.full(3)], lambda values: draw.layers(values, 2)),
    ("graphs", [GRAPH, patterns.full(3)], draw.hops),
    ("graphs", [GRAPH, patterns.full(3)], draw.over_time),
    ("weights", NUMBERS, lambda values: draw.arcs(patterns.causal(2), weights=values)),
    ("labels", ["a", "b", "c"], lambda values: draw.mask(GRAPH, labels=values)),
    ("src_labels", ["a", "b", "c"], lambda values: draw.mask(GRAPH, src_labels=values)),
    ("titles", ["a", "b"], lambda values: draw.over_time([GRAPH, GRAPH], values)),
    ("graph", ["window(n, 4)", "causal(n)"], lambda values: explorer.page([1, 2], graph=values)),
    ("masks", ["window(n, 4)", "causal(n)"], lambda values: explorer.page([1, 2], masks=values)),
    ("index", NUMBERS, reorder),
    ("surgery", SURGERIES, lambda values: trace.record(LAYER, STATES, GRAPH, surgery=values)),
    ("run", [CALL], lambda values: circuits.match(values, GRAPH)),
    ("ids", [104, 105], BytePair().decode),
    ("ids", [104, 105], BytePair().pieces),
    ("merges", PAIRS, BytePair),
]


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys], ids=["set", "frozenset", "dict"])
@pytest.mark.parametrize(("name", "values", "call"), ORDERED)
def test_what_has_no_order_is_refused(name, values, call, kind):
    with pytest.raises(TypeError, match=rf"^{name} must be a list in its order, got .*the order counts"):
        call(kind(values))


@pytest.mark.parametrize(("name", "values", "call"), ORDERED)
def test_the_same_values_in_a_list_are_taken(name, values, call):
    call(list(values))


def test_labels_and_order_are_a_dict_of_positions():
    axes = draw.mask(patterns.cross(3, 2), labels={2: "c", 0: "a", 1: "b"}, src_labels={1: "y", 0: "x"}).axes[
        0
    ]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["x", "y"]
    graph, places = nx.DiGraph([("a", "b"), ("b", "c")]), {"c": 0, "a": 1, "b": 2}
    assert convert.from_networkx(graph, order=places).edge_index.tolist() == [[1, 2], [2, 0]]
    for order in ({"a": 0, "b": 1, "c": 3}, {"a": 0, "b": 0, "c": 1}):
        with pytest.raises(
            TypeError, match=r"order must be a list in its order, got .* one of 0 \.\. 2, each"
        ):
            convert.from_networkx(graph, order=order)
    with pytest.raises(TypeError, match="order must hold the nodes themselves"):
        convert.from_networkx(graph, order={"a": [0], "b": [1], "c": [2]})
    with pytest.raises(
        TypeError, match=r"labels must be a list in its order, got .* each of 0 \.\. 2 to its"
    ):
        draw.mask(patterns.causal(3), labels={1: "a", 2: "b", 3: "c"})


def test_the_nodes_of_networkx_have_an_order():
    """They are a mapping, from nodes to attributes, and a set."""
    graph = nx.DiGraph([("a", "b"), ("b", "c")])
    axes = draw.mask(patterns.causal(3), labels=graph.nodes).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    assert convert.from_networkx(graph, order=graph.nodes).edge_index.tolist() == [[0, 1], [1, 2]]


def test_a_generator_has_an_order():
    assert torch.equal(patterns.documents(n for n in (1, 2)).mask(), patterns.documents([1, 2]).mask())


def test_a_set_is_taken_where_the_order_does_not_count():
    assert torch.equal(patterns.global_tokens(4, {2, 0}).mask(), patterns.global_tokens(4, [0, 2]).mask())
    assert torch.equal(
        patterns.duo_attention(6, 3, {2, 0}, 2).mask(), patterns.duo_attention(6, 3, [0, 2], 2).mask()
    )
    assert sorted(trace.cut(heads={2, 0}).heads) == [0, 2]
