"""Graphs of chosen senders: ``from_indices`` against the mask that its numbers mean, by view and backend."""

from __future__ import annotations

import pickle

import pytest
import torch

import gnn_attention as ga
from gnn_attention import TokenGraph, patterns
from tests.support.bounds import assert_exact

FORMS = {"plain": (40, 9), "heads": (2, 40, 9), "samples": (2, 1, 40, 9), "both": (2, 2, 40, 9)}
NUM_SRC = 33


def chosen(*shape, num_src=NUM_SRC, none=0.2, seed=0):
    """Random distinct senders, some -1 in the middle, receiver 3 without any, sender 0 chosen by most."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*shape[:-1], num_src, generator=generator)
    scores[..., 0] += 0.5
    index = scores.argsort(-1)[..., -shape[-1] :].flip(-1)
    index = index.masked_fill(torch.rand(index.shape, generator=generator) < none, -1)
    index[..., 3, :] = -1
    return index


def mask_of(index, num_src=NUM_SRC):
    """The mask written out: True at every listed pair."""
    table = torch.zeros(*index.shape[:-1], num_src + 1, dtype=torch.bool)
    return table.scatter(-1, torch.where(index < 0, num_src, index), True)[..., :num_src]


def qkv(graph, batch=2, heads=2, dim=8):
    torch.manual_seed(1)
    sizes = graph.num_dst, graph.num_src, graph.num_src
    return [torch.randn(batch, heads, n, dim, dtype=torch.float64, requires_grad=True) for n in sizes]


@pytest.mark.parametrize("form", FORMS)
def test_every_view_is_that_of_the_mask(form):
    index = chosen(*FORMS[form])
    graph, mask = TokenGraph.from_indices(index, NUM_SRC), mask_of(index)
    mask = mask if form != "samples" else mask.view(2, 1, 40, NUM_SRC)
    assert torch.equal(graph.mask(), mask)
    assert torch.equal(graph.in_degree(), mask.sum(-1))
    assert graph.num_edges == int(mask.sum())
    assert graph.has_empty_rows
    assert graph.max_in_degree == int(mask.sum(-1).max())
    assert torch.equal(graph.rows(2, 7).mask(), mask[..., 2:7, :])
    assert torch.equal(graph.T.mask(), mask.mT)
    assert torch.equal((~graph).mask(), ~mask)
    assert torch.equal(pickle.loads(pickle.dumps(graph)).mask(), mask)
    assert graph == TokenGraph.from_indices(index.flip(-1), NUM_SRC)
    assert graph != TokenGraph.from_indices(index[..., :-1], NUM_SRC)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sign", ["__or__", "__and__", "__sub__", "__xor__"])
def test_operators_with_a_structured_graph(form, sign):
    index, other = chosen(*FORMS[form]), patterns.window(40, 5).rows(0, 40)
    other = TokenGraph.from_rule(other.rule, 40, NUM_SRC)
    both = getattr(TokenGraph.from_indices(index, NUM_SRC), sign)(other)
    rest = (~mask_of(index)).__and__ if sign == "__sub__" else None
    masks = mask_of(index), other.mask()
    due = masks[0] & ~masks[1] if rest else getattr(masks[0], sign)(masks[1])
    assert torch.equal(both.mask(), due)
    assert torch.equal(both.in_degree(), due.sum(-1))


def test_the_list_keeps_the_order_of_the_index():
    index = torch.tensor([[2, -1, 0], [1, 2, -1], [-1, -1, -1], [0, 1, 2]])
    assert TokenGraph.from_indices(index, 3).edge_index.tolist() == [
        [2, 0, 1, 2, 0, 1, 2],
        [0, 0, 1, 1, 3, 3, 3],
    ]


def test_count_and_coalesce():
    index = torch.tensor([[1, 1, 0], [2, 0, 9], [7, 7, 7]])
    graph = TokenGraph.from_indices(index, 3, count=torch.tensor([3, 2, 0]), coalesce=True)
    assert graph.edge_index.tolist() == [[1, 0, 2, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("index", "options", "error", "words"),
    [
        (
            torch.tensor([[[0, 1]], [[2, 2]]]),
            {},
            ValueError,
            "sender 2 more than once for receiver 0 of head 1",
        ),
        (torch.tensor([[0, 3]]), {}, IndexError, r"holds 3 for receiver 0: expected 0 .. 2 \(num_src=3\)"),
        (torch.tensor([[0, -2]]), {}, IndexError, "holds -2 for receiver 0"),
        (torch.tensor([[0], [2]]), {"causal": True}, ValueError, "the edge 2 -> 1, which is not causal"),
        (torch.tensor([[0.0]]), {}, TypeError, "index must be a tensor of signed integers"),
        ([[0]], {}, TypeError, "index must be a tensor of signed integers"),
        (torch.tensor([0]), {}, ValueError, r"index must be \[dst, K\]"),
        (torch.tensor([[0, 1]]), {"count": torch.tensor([3])}, IndexError, "count must be in 0 .. 2"),
        (torch.tensor([[0, 1]]), {"count": torch.tensor([[1]])}, ValueError, r"count must be \[1\]"),
        (torch.tensor([[0, 1]]), {"count": 1}, TypeError, "count must be a tensor"),
    ],
)
def test_what_is_refused(index, options, error, words):
    with pytest.raises(error, match=words):
        TokenGraph.from_indices(index, 3, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["auto", "rows", "tiles", "mixed", "dense", "reference", "split"])
def test_attention_is_that_of_the_mask(form, backend):
    index = chosen(*FORMS[form])
    graph = TokenGraph.from_indices(index, NUM_SRC)
    given = qkv(graph)
    found, due = (
        ga.attend(*given, g, backend=name)
        for g, name in ((graph, backend), (ga.convert.from_mask(mask_of(index)), "reference"))
    )
    grads = [torch.autograd.grad(out.square().sum(), given) for out in (found, due)]
    assert_exact([found, *grads[0]], [due, *grads[1]])


def test_grouped_heads_with_lists_of_their_own_in_one_call():
    index = chosen(4, 40, 9)
    graph = TokenGraph.from_indices(index, NUM_SRC)
    q, k, v = qkv(graph, heads=4)
    k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))
    mask = ga.convert.from_mask(mask_of(index))
    outs = [ga.attend(q, k, v, g, backend=name) for g, name in ((graph, "rows"), (mask, "reference"))]
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
    assert_exact([outs[0], *grads[0]], [outs[1], *grads[1]])


@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 5, 0), (0, 4), (1, 1)])
def test_sizes_of_nothing(shape):
    index = torch.zeros(shape, dtype=torch.int64)
    graph = TokenGraph.from_indices(index, 5)
    q, k, v = qkv(graph)
    out = ga.attend(q, k, v, graph, backend="rows")
    assert out.shape == q.shape
    assert graph.num_edges == (1 if shape == (1, 1) else 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1), (2, 3)])
def test_blocks_are_the_mask_of_their_tokens(lead, causal):
    index = chosen(*lead, 6, 3, num_src=5)
    graph = TokenGraph.from_block_indices(index, 8, 45, 37, causal)
    mask = mask_of(index, 5).repeat_interleave(8, -2).repeat_interleave(8, -1)[..., :45, :37]
    mask = mask.tril() if causal else mask
    assert torch.equal(graph.mask(), mask)
    given = qkv(graph, heads=3)
    due = ga.attend(*given, ga.convert.from_mask(mask), backend="reference")
    grads = torch.autograd.grad(due.square().sum(), given)
    for backend in ("auto", "tiles", "rows", "mixed"):
        out = ga.attend(*given, graph, backend=backend)
        assert_exact([out, *torch.autograd.grad(out.square().sum(), given)], [due, *grads])


def test_block_indices_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match="a row for each of the 6 blocks of receivers, got 5 for 45"):
        TokenGraph.from_block_indices(torch.zeros(5, 1, dtype=torch.int64), 8, 45, 37)
    with pytest.raises(IndexError, match="holds 5 for receiver 0"):
        TokenGraph.from_block_indices(torch.full((6, 1), 5), 8, 45, 37)
