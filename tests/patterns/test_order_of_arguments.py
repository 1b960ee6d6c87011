"""Arguments whose order counts refuse a set and a dict; where it does not count, a set is taken."""

from __future__ import annotations

import pytest
import torch

from gnn_attention import algebra, analyse, draw, patterns
from gnn_attention.interpret import trace

GRAPH = patterns.causal(3)
ORDERED = {
    "lengths": patterns.documents,
    "answers": lambda values: patterns.shared_prefix(2, values),
    "groups": patterns.bidirectional_groups,
    "order": patterns.permutation,
    "parents": lambda values: patterns.tree(values),
    "media": lambda values: patterns.media_cross(4, values, 2),
    "shape": lambda values: patterns.axial(values),
    "graphs": analyse.diameter,
    "labels": lambda values: draw.mask(GRAPH, labels=values),
}


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys], ids=["set", "frozenset", "dict"])
@pytest.mark.parametrize("name", ORDERED)
def test_what_has_no_order_is_refused(name, kind):
    with pytest.raises(TypeError, match=rf"^{name} must be a list in its order, got .*the order counts"):
        ORDERED[name](kind([0, 1, 2]))


def test_relabel_refuses_a_set():
    with pytest.raises(TypeError, match=r"must be a list in its order, got .* of type set"):
        algebra.relabel(GRAPH, {2, 1, 0})


def test_a_generator_has_an_order():
    assert torch.equal(patterns.documents(n for n in (1, 2)).mask(), patterns.documents([1, 2]).mask())


def test_a_set_is_taken_where_the_order_does_not_count():
    assert torch.equal(patterns.global_tokens(4, {2, 0}).mask(), patterns.global_tokens(4, [0, 2]).mask())
    assert torch.equal(
        patterns.duo_attention(6, 3, {2, 0}, 2).mask(), patterns.duo_attention(6, 3, [0, 2], 2).mask()
    )
    assert sorted(trace.cut(heads={2, 0}).heads) == [0, 2]
