"""Builders are related: each line of a table is an equation of graphs or a fact about one."""

from __future__ import annotations

import pytest
import torch
from support.zoo.trees import parents

from gnn_attention import TokenGraph, patterns

KIN = """
~causal(7) == strict_causal(7).T
~no_self(7) == window(7, 1) == self_loops(7)
mask(causal_aligned(2, 6, "lower_right")) == mask(causal(6).rows(4, 6))
causal_aligned(5, 3, "lower_right").in_degree().tolist() == [0, 0, 1, 2, 3]

window(12, 4) ** 3 == window(12, 3 * (4 - 1) + 1)
band(17, 0, 4) == band(17, 4, 0).T
all(band(17, d, d, s) == dilated(17, d // s + 1, s, causal=False) for d, s in ((6, 3), (7, 3), (0, 2)))
chunked(11, 4, causal=False) == documents([4, 4, 3], causal=False)

sink_window(17, 3) == sink_window(17, 3, 4) == duo_attention(17, 1, [], 3).select()
all(duo_attention(9, 4, [3, 0], 2, 1).select(head=h) == causal(9) for h in (0, 3))
all(duo_attention(9, 4, [3, 0], 2, 1).select(head=h) == sink_window(9, 2, 1) for h in (1, 2))

all(sparse_strided(17, s) == band(17, s, 0) | strides(17, s) for s in (1, 4, 20))

prefix(6, 4) == documents([4, 1, 1], causal=False) | causal(6)
shared_prefix(0, [2, 0, 3]) == documents([2, 0, 3])
submask(shared_prefix(3, [2, 4, 1]), (0, 1, 2, 5, 6, 7, 8)) == mask(causal(7))
all(block_causal(9, b) == bidirectional_groups([i // b for i in range(9)]) for b in (1, 2, 5, 9, 20))
permutation(range(5, -1, -1)) == causal(6).T and permutation([], context=3).num_dst == 0

tree_decoding(3, [-1, 0, 0, 1]) == prefix_tree([3, 1, 1, 1, 1], [-1, 0, 1, 1, 2])
draft_training(3, 2, 4) == prefix_tree([3, 4, 4], [-1, 0, 0]) == shared_prefix(3, [4, 4])

natten((9,), 3, causal=True) == window(9, 3)
natten((9,), 3, dilation=2, causal=True) == dilated(9, 3, 2)
swin((8,), 4) @ swin((8,), 4, 2) @ swin((8,), 4) == full(8)
swin((5, 7), (2, 3)) == haloed_blocks((5, 7), (2, 3), 0)
axial((2, 3, 4), 0) @ axial((2, 3, 4), 1) @ axial((2, 3, 4), 2) == full(24)

etc(9, 3, 2) == longformer(11, 3, 2, causal=False) == memory_tokens(band(9, 2, 2), 2, causal=False)
bigbird(17, 2, num_random=99) == full(17) and bigbird_etc(17, 2, 1, num_random=99) == full(18)
cross(19, 4) @ side_nodes(19, 4) == full(19)
isab(7, 2)[1] @ isab(7, 2)[0] == full(7)
perceiver(9, 3) == (isab(9, 3)[0], full(3))

all(power_attention(n) == log_sparse(n) for n in (2, 7, 8, 33))
longnet(17, [5], [1], causal=False) == documents([5, 5, 5, 2], causal=False)
union_over_heads(longnet(12, [12], [3], heads=6)) == mask(dilated(12, 12, 3))
(torch.tensor([[1, 30]]) @ random_senders(30, 4).edge_index).diff().min() > 0
random_senders(12, 13) == causal(12) and random_senders(12, 99, causal=False) == full(12)
hypercube(4) | window(16, 1) == butterfly(16) and torus(2, 2, 2) == hypercube(3)
expander(60, 3, seed=5) == expander(60, 3, seed=5, causal=False) & strict_causal(60)

temporal(full(6), range(6)) == causal(6) and temporal(full(6), range(6), strict=True) == strict_causal(6)
"""

FORMS = """
global_tokens(6, 3, causal=False) == global_tokens(6, range(3), causal=False)
global_tokens(6, [5, 2, 5]) == global_tokens(6, torch.tensor([2, 5])) == global_tokens(6, (t for t in (2, 5)))
hierarchical_document(((1, 2), (3,))) == hierarchical_document([torch.tensor([1, 2]), iter([3])])
permutation(range(40)).name == "permutation([40 order])" and cross(2, num_src=3).name == "cross(2, 3)"
band(8, 2, 1).name == "band(8, 2, 1)" and band(8, 2, 1, 2).name == "band(8, 2, 1, dilation=2)"
temporal(full(2), torch.tensor([1, 2])).name == "temporal(full(2), [1, 2])"
fill_in_the_middle(4, 1, 2, "spm").name == "fill_in_the_middle(4, 1, 2, order='spm')"
natten([6, 4], 3, dilation=(2, 1), causal=True).name == "natten([6, 4], 3, dilation=(2, 1), causal=True)"
expander(8, 2, seed=1, causal=False).name == "expander(8, 2, seed=1, causal=False)"
len(documents([1] * 50).name) < 40 and len(tree([-1] * 50).name) < 40
"""


def mask(graph):
    return graph.mask().tolist()


def submask(graph, tokens):
    """Return the mask among ``tokens``."""
    return graph.mask()[list(tokens)][:, list(tokens)].tolist()


def union_over_heads(graph):
    """Return the union of the masks of all heads."""
    return graph.mask().any(0).tolist()


NAMES = {
    **vars(patterns),
    "torch": torch,
    **{helper.__name__: helper for helper in (mask, submask, union_over_heads, parents)},
}


@pytest.mark.parametrize("line", [line for line in KIN.splitlines() if line])
def test_kin(line):
    assert eval(line, dict(NAMES))


def test_forms_and_names():
    """Arguments of all types give the same graph; names hold only options that are not default."""
    for line in FORMS.strip().splitlines():
        assert eval(line, dict(NAMES)), line


def test_a_graph_of_one_head_differs_by_head():
    """One head is the first of several, and counts and degrees keep the head axis."""
    for build in (
        lambda n, heads: patterns.bigbird(n, 2, num_random=1, heads=heads),
        lambda n, heads: patterns.bigbird_etc(n, 2, 1, num_random=1, heads=heads),
        lambda n, heads: patterns.duo_attention(n, heads, [0], 2),
        lambda n, heads: patterns.longnet(n, [4], [2], heads=heads),
    ):
        for n in (0, 1, 17):
            graph, triple = build(n, 1), build(n, 3)
            assert graph.mask().shape == (1, graph.num_dst, graph.num_src)
            assert triple.in_degree().shape == (3, triple.num_dst)
            assert triple.num_edges == sum(triple.select(head=head).num_edges for head in range(3))
            assert graph.select(head=0) == triple.select(head=0)


def test_a_deep_tree_needs_no_deep_stack():
    n = 5000
    graph = patterns.tree([-1, *range(n - 1)])
    assert graph.rows(n - 1, n).num_edges == n
    assert graph.rows(0, 1).num_edges == 1


def test_changing_an_argument_later_does_not_change_the_graph():
    for build, argument in (
        (patterns.documents, [2, 3]),
        (patterns.tree, [-1, 0]),
        (lambda tokens: patterns.global_tokens(4, tokens), [1]),
        (patterns.bidirectional_groups, torch.tensor([-1, 0, 0])),
        (patterns.shared_bucket, torch.tensor([[1, 2, 1, 2]])),
        (lambda logits: patterns.top_k(logits, 1), torch.eye(4).flip(0)),
        (lambda points: patterns.nearest(points, 1, loops=False), torch.tensor([[0.0], [4.0], [1.0]])),
    ):
        graph = build(argument)
        expected = graph.mask()
        argument[:] = [0] * len(argument) if isinstance(argument, list) else torch.zeros_like(argument)
        assert torch.equal(TokenGraph.from_rule(graph.rule, graph.num_dst).mask(), expected)
        assert torch.equal(graph.rows(0, graph.num_dst).mask(), expected)
