"""Arguments whose order counts refuse sets and dicts; other arguments accept a set."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from support.extras import needs

from gnn_attention import algebra, analyse, convert, draw, explorer, patterns
from gnn_attention.cache import KeyValueCache
from gnn_attention.interpret import trace
from gnn_attention.model.tokenizer import BytePair

GRAPH = patterns.causal(3)
NUMBERS = [0, 1, 2]


def reorder(samples):
    cache, rows = KeyValueCache(patterns.causal(4)), torch.ones(3, 1, 1, 2)
    cache.append(rows, rows)
    cache.reorder(samples)


# There is one case for each package: the name of an argument, values that are accepted as a list, the call.
ORDERED = [
    ("lengths", NUMBERS, patterns.documents),
    ("order", NUMBERS, patterns.permutation),
    ("parents", [-1, 0, 1], patterns.tree),
    ("shape", [1, 2], patterns.axial),
    ("tokens", NUMBERS, lambda values: algebra.restrict(GRAPH, values)),
    ("graphs", [GRAPH, patterns.full(3)], analyse.diameter),
    ("receivers", [0, 2], lambda values: analyse.influence(GRAPH, 2, receivers=values)),
    ("graphs", [GRAPH, patterns.full(3)], lambda values: draw.layers(values, 2)),
    ("labels", ["a", "b", "c"], lambda values: draw.mask(GRAPH, labels=values)),
    ("masks", ["window(n, 4)", "causal(n)"], lambda values: explorer.page([1, 2], masks=values)),
    ("index", NUMBERS, reorder),
    ("ids", [104, 105], BytePair().decode),
]


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys], ids=["set", "frozenset", "dict"])
@pytest.mark.parametrize(("name", "values", "call"), ORDERED)
def test_collections_without_an_order_are_refused(name, values, call, kind):
    with pytest.raises(TypeError, match=rf"^{name} must be a list, because order matters, got"):
        call(kind(values))


def test_the_nodes_of_networkx_have_an_order():
    """A networkx view of nodes is accepted, although it is both a mapping and a set."""
    needs("matplotlib")
    graph = nx.DiGraph([("a", "b"), ("b", "c")])
    axes = draw.mask(patterns.causal(3), labels=graph.nodes).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    assert convert.from_networkx(graph, order=graph.nodes).edge_index.tolist() == [[0, 1], [1, 2]]


def test_a_set_is_accepted_where_the_order_does_not_count():
    assert torch.equal(patterns.global_tokens(4, {2, 0}).mask(), patterns.global_tokens(4, [0, 2]).mask())
    assert patterns.duo_attention(6, 3, {2, 0}, 2) == patterns.duo_attention(6, 3, [0, 2], 2)
    assert sorted(trace.cut(heads={2, 0}).heads) == [0, 2]
