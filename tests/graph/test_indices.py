"""A graph of chosen senders equals the mask of its index, in every view and backend."""

from __future__ import annotations

import pickle

import pytest
import torch
from support.covering import thin

import gnn_attention as ga
from gnn_attention import TokenGraph
from tests.support.bounds import assert_exact
from tests.support.extras import needs

FORMS = {"plain": (40, 9), "heads": (2, 40, 9), "samples": (2, 1, 40, 9), "both": (2, 2, 40, 9)}
NUM_SRC = 33


def random_index(*shape, num_src=NUM_SRC, none=0.2, seed=0):
    """Return random distinct senders with some -1; receiver 3 has none, and most chose sender 0."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*shape[:-1], num_src, generator=generator)
    scores[..., 0] += 0.5
    index = scores.argsort(-1)[..., -shape[-1] :].flip(-1)
    index = index.masked_fill(torch.rand(index.shape, generator=generator) < none, -1)
    index[..., 3, :] = -1
    return index


def make_mask(index, num_src=NUM_SRC):
    """Return the dense mask of an index."""
    table = torch.zeros(*index.shape[:-1], num_src + 1, dtype=torch.bool)
    return table.scatter(-1, torch.where(index < 0, num_src, index), True)[..., :num_src]


def qkv(graph, batch=2, heads=2, dim=8):
    torch.manual_seed(1)
    sizes = graph.num_dst, graph.num_src, graph.num_src
    return [torch.randn(batch, heads, n, dim, dtype=torch.float64, requires_grad=True) for n in sizes]


@pytest.mark.parametrize("form", FORMS)
def test_every_view_agrees_with_the_mask(form):
    index = random_index(*FORMS[form])
    graph, mask = TokenGraph.from_indices(index, NUM_SRC), make_mask(index)
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
    ("index", "options", "error", "message"),
    [
        ([[[0, 1]], [[2, 2]]], {}, ValueError, "sender 2 more than once for receiver 0 of head 1"),
        ([[0, 3]], {}, IndexError, r"holds 3 for receiver 0: expected 0 .. 2 \(num_src=3\)"),
        ([[0, -2]], {}, IndexError, "holds -2 for receiver 0"),
        ([[0], [2]], {"causal": True}, ValueError, "the edge 2 -> 1, which is not causal .*: put -1"),
        ([[0.0]], {}, TypeError, "index must be a tensor of signed integers"),
        ([[True]], {}, TypeError, "bool and shape .* convert.from_mask for a mask"),
        ([0], {}, ValueError, r"index must be \[dst, K\]"),
        ([[0, 1]], {"count": torch.tensor([3])}, IndexError, "count must be in 0 .. 2"),
        ([[0, 1]], {"count": torch.tensor([[1]])}, ValueError, r"count must have shape \[1\]"),
        ([[0, 1]], {"count": 1}, TypeError, "count must be a tensor"),
        ([[0, 0]], {"coalesce": "sum"}, ValueError, "coalesce must be True, False or 'count', got"),
        ([[0, 0]], {"coalesce": 1}, ValueError, "coalesce must be True, False or 'count', got"),
    ],
)
def test_what_is_refused(index, options, error, message):
    with pytest.raises(error, match=message):
        TokenGraph.from_indices(torch.tensor(index), 3, **options)


def test_grouped_heads_that_differ_in_their_senders():
    index = random_index(4, 40, 9)
    graph = TokenGraph.from_indices(index, NUM_SRC)
    q, k, v = qkv(graph, heads=4)
    k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))
    mask = ga.convert.from_mask(make_mask(index))
    outputs = [ga.attend(q, k, v, g, backend=name) for g, name in ((graph, "rows"), (mask, "reference"))]
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outputs]
    assert_exact([outputs[0], *grads[0]], [outputs[1], *grads[1]])


@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 5, 0)])
def test_sizes_of_nothing(shape):
    index = torch.zeros(shape, dtype=torch.int64)
    graph = TokenGraph.from_indices(index, 5)
    q, k, v = qkv(graph)
    out = ga.attend(q, k, v, graph, backend="rows")
    assert out.shape == q.shape
    assert graph.num_edges == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", [(), (2, 1), (2, 3)])
def test_blocks_agree_with_the_mask_of_their_tokens(lead, causal):
    index = random_index(*lead, 6, 3, num_src=5)
    graph = TokenGraph.from_block_indices(index, 8, 45, 37, causal)
    mask = make_mask(index, 5).repeat_interleave(8, -2).repeat_interleave(8, -1)[..., :45, :37]
    mask = mask.tril() if causal else mask
    assert torch.equal(graph.mask(), mask)
    inputs = qkv(graph, heads=3)
    expected = ga.attend(*inputs, ga.convert.from_mask(mask), backend="reference")
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    for backend in ("auto", "tiles", "rows", "mixed"):
        out = ga.attend(*inputs, graph, backend=backend)
        assert_exact([out, *torch.autograd.grad(out.square().sum(), inputs)], [expected, *grads])


def test_block_indices_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match="a row for each of the 6 blocks of receivers, got 5 for 45"):
        TokenGraph.from_block_indices(torch.zeros(5, 1, dtype=torch.int64), 8, 45, 37)
    with pytest.raises(IndexError, match=r"holds 5 for block of receivers 0: expected 0 .. 4 \(5 blocks of"):
        TokenGraph.from_block_indices(torch.full((6, 1), 5), 8, 45, 37)
    # The message does not advise coalesce, which from_block_indices lacks.
    with pytest.raises(ValueError, match=r"holds block 4 more than once .*: replace repeats by -1"):
        TokenGraph.from_block_indices(torch.full((6, 2), 4), 8, 45, 37)


def index_with_repeats(form, seed=0):
    """Return an index in which senders repeat, with some -1 and a receiver without any sender."""
    index = torch.randint(-1, 6, FORMS[form], generator=torch.Generator().manual_seed(seed))
    index[..., 3, :] = -1
    return index


def formula(q, k, v, index, counts_copies):
    """Compute dense attention in which a sender counts once, or as often as it was chosen."""
    counts = torch.nn.functional.one_hot(index + 1, NUM_SRC + 1)[..., 1:].sum(-2)
    weight = torch.exp(q @ k.mT / q.shape[-1] ** 0.5) * (counts if counts_copies else counts.clamp(max=1))
    return weight @ v / weight.sum(-1, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coalesce", [True, "count"])
@pytest.mark.parametrize("backend", thin(["auto", "rows", "tiles", "dense"]))
def test_a_repeated_sender_counts_once_or_each_time(form, coalesce, backend):
    index = index_with_repeats(form)
    result = TokenGraph.from_indices(index, NUM_SRC, coalesce=coalesce)
    graph, score_mod = result if coalesce == "count" else (result, None)
    inputs = qkv(graph)
    outputs = [
        ga.attend(*inputs, graph, score_mod=score_mod, backend=backend),
        formula(*inputs, index, coalesce == "count"),
    ]
    grads = [torch.autograd.grad(out.square().sum(), inputs) for out in outputs]
    assert_exact([outputs[0], *grads[0]], [outputs[1], *grads[1]])


def test_multiplicity_uses_absolute_positions_and_pickles():
    index = index_with_repeats("both")
    graph, score_mod = TokenGraph.from_indices(index, NUM_SRC, coalesce="count")
    q, k, v = qkv(graph)
    out = ga.attend(q[:, :, 5:9], k, v, graph.rows(5, 9), score_mod=pickle.loads(pickle.dumps(score_mod)))
    assert_exact([out], [formula(q, k, v, index, True)[:, :, 5:9]])


@pytest.mark.parametrize("window", [0, 5])
def test_equal_to_gather_attention_of_attention_gym(window):
    gather = needs("attn_gym.sparse.gather_attn")
    index = torch.randint(-1, 30, (2, 40, 50), generator=torch.Generator().manual_seed(2))
    index[:, :, 7] = 0
    index[:, 3] = -1
    # The senders are the pool, then the tokens, of which a receiver attends to the last few.
    graph, score_mod = TokenGraph.from_indices(index[:, None], 70, coalesce="count")
    local_graph = TokenGraph.from_rule(
        lambda b, h, dst, src: (src - 30 <= dst) & (dst - src + 30 < window) & (src >= 30), 40, 70
    )
    torch.manual_seed(3)
    q, local, pool = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((2, 40), (1, 40), (1, 30)))
    inputs = [x.requires_grad_() for x in (q, local, pool)]
    expected = gather.gather_attn(*inputs, index, sliding_window_size=window, impl="reference")
    kv = torch.cat([pool, local], 2).expand(2, 2, 70, 8)
    out = ga.attend(q, kv, kv, graph | local_graph, score_mod=score_mod)
    assert_exact(
        [out, *torch.autograd.grad(out.square().sum(), inputs)],
        [expected, *torch.autograd.grad(expected.square().sum(), inputs)],
    )
