"""Edge sets keep parallel edges, answer from storage, and evaluate rules that fail on ranges."""

import pytest
import torch
from support.inputs import randn

import gnn_attention as ga
from gnn_attention import TokenGraph, backends, cache, patterns
from gnn_attention.graph.regions import enumerate_pairs, quadtree

N = 40
EDGES = torch.randint(N, (2, 90), generator=torch.Generator().manual_seed(0))
EDGES = torch.cat([EDGES, EDGES[:, :40], EDGES[:, 5:15]], dim=1)
MULTIGRAPH = TokenGraph.from_edges(EDGES, N, parallel="keep")
BIAS = 900 + randn(EDGES.shape[1], seed=3)
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def formula(q, k, v, bias):
    """Compute a softmax over all copies of edges, receiver by receiver."""
    out, weights = torch.zeros_like(q), q.new_zeros(2, 4, EDGES.shape[1])
    for dst in range(N):
        index = (EDGES[1] == dst).nonzero().flatten()
        logits = (q[:, :, dst : dst + 1] * k[:, :, EDGES[0, index]]).sum(-1) / 8**0.5 + bias[index]
        weights[:, :, index] = logits.softmax(-1) if len(index) else logits
        out[:, :, dst] = (weights[:, :, index].unsqueeze(-1) * v[:, :, EDGES[0, index]]).sum(2)
    return out, weights


@pytest.mark.parametrize("options", [{}, {"bias": BIAS}], ids=["plain", "bias"])
@pytest.mark.parametrize("backend", ["auto", "dense", "tiles", "rows", "message_passing", "reference"])
def test_every_copy_of_an_edge_counts(backend, options):
    """Check outputs, gradients and weights of each copy; a backend that merges copies refuses a bias."""
    q, k, v = (randn(2, 4, N, 8, seed=seed).requires_grad_() for seed in range(3))
    if options and backend in ("dense", "tiles"):
        with pytest.raises(NotImplementedError, match="no parallel edges with bias; use backend='rows'"):
            ga.attend(q, k, v, MULTIGRAPH, backend=backend, **options)
        return
    out, info = ga.attend(q, k, v, MULTIGRAPH, backend=backend, return_info=True, **options)
    expected, weights = formula(q, k, v, options.get("bias", torch.zeros(EDGES.shape[1])))
    table = weights.new_zeros(2, 4, N * N).index_add(2, EDGES[1] * N + EDGES[0], weights)
    outputs = out, info.weights(), info.weight_matrix().flatten(2)
    torch.testing.assert_close(outputs, (expected, weights, table), **EXACT)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(*grads, **EXACT)
    if not options:
        rows_out = ga.attend(q[:, :, 9:30], k, v, MULTIGRAPH.rows(9, 30), backend=backend)
        torch.testing.assert_close(rows_out, expected[:, :, 9:30], **EXACT)


def test_a_layer_takes_a_multiset_as_torch_geometric_does():
    layer, x = ga.MessagePassingAttention(ga.StandardHeads(8, 2)).double(), randn(N, 8)
    expected, (_, weights) = layer(x, MULTIGRAPH, return_attention_weights=True)
    for layer.backend in ("message_passing", "auto", "rows"):
        out, (edges, outputs) = layer(x, EDGES, return_attention_weights=True)
        torch.testing.assert_close((out, outputs), (expected, weights), **EXACT)
        assert torch.equal(edges, EDGES)


@pytest.mark.parametrize("size", [1, 5, N])
def test_a_cache_keeps_every_copy(size):
    causal_edges = EDGES[:, EDGES[0] <= EDGES[1]]
    graph = TokenGraph.from_edges(causal_edges, N, parallel="keep")
    q, k, v = (randn(1, 2, N, 8) for _ in range(3))
    kv_cache, outs = cache.KeyValueCache(graph), []
    for start in range(0, N, size):
        tokens = slice(start, start + size)
        kv_cache.append(k[:, :, tokens], v[:, :, tokens])
        outs.append(kv_cache.attend(q[:, :, tokens]))
    expected = ga.attend(q, k, v, graph, backend="reference")
    torch.testing.assert_close(torch.cat(outs, dim=2), expected, **EXACT)


def test_a_backend_without_score_mods_refuses_copies():
    copying_backend = backends.Backend(
        "copying", lambda call: (call.q, None), capabilities=backends.Capabilities(score_mod=False)
    )
    with pytest.raises(NotImplementedError, match="takes no parallel edges; use backend='rows'"):
        ga.attend(*(randn(1, 1, N, 8) for _ in range(3)), MULTIGRAPH, backend=copying_backend)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rule_may_answer_for_all_pairs_at_once(shape):
    g, answer = MULTIGRAPH.coalesce(), torch.ones(shape).bool()
    all_pairs = TokenGraph.from_rule(lambda b, h, dst, src: answer, N)
    for graph, expected in ((all_pairs & g, g), (g & all_pairs, g), (g - all_pairs, g - g)):
        assert torch.equal(graph.edge_index, expected.edge_index)


def test_chosen_rows_meet_a_rule_that_differs_by_sample_and_head():
    rows = TokenGraph.from_indices(torch.arange(6 * N).view(2, 3, N, 1) * 7 % N, N)
    rule_graph = TokenGraph.from_rule(lambda b, h, i, j: (b + 2 * h + j) % 4 < 2, N, heads=3, batch=2)
    assert torch.equal((rows & rule_graph).mask(), rows.mask() & rule_graph.mask())
    assert torch.equal((rows - rule_graph).mask(), rows.mask() & ~rule_graph.mask())


def test_masks_operators_and_equality_see_a_set():
    graph = MULTIGRAPH.coalesce()
    assert MULTIGRAPH == graph == TokenGraph.from_edges(EDGES, N, coalesce=True) == graph.coalesce()
    assert graph.num_edges == len(set(map(tuple, EDGES.T.tolist()))) < MULTIGRAPH.num_edges == EDGES.shape[1]
    assert MULTIGRAPH.in_degree().tolist() == EDGES[1].bincount(minlength=N).tolist()
    for first, second in (
        (MULTIGRAPH.T, graph.T),
        (~MULTIGRAPH, ~graph),
        (MULTIGRAPH.rows(7, 30), graph.rows(7, 30)),
    ):
        assert torch.equal(first.mask(), second.mask())
    assert (MULTIGRAPH | graph).num_edges == (MULTIGRAPH & patterns.full(N)).num_edges == graph.num_edges
    with pytest.raises(ValueError, match="parallel must be one of 'error', 'merge', 'keep', got 'first'"):
        TokenGraph.from_edges(EDGES, N, parallel="first")


def test_storage_answers_without_a_pair(monkeypatch):
    """Lists, chosen rows, and both combined with a rule read stored pairs only."""
    graph, causal = MULTIGRAPH.coalesce(), patterns.causal(N)
    rows = TokenGraph.from_indices(torch.arange(2 * N).view(2, N, 1) * 3 % N, N)
    for search in ((enumerate_pairs, "dense_mask"), (quadtree, "decompose")):
        monkeypatch.setattr(*search, lambda *_, **__: pytest.fail("pairs are searched"))
    for g in (graph, rows, graph & causal, causal & graph, graph - causal, rows.rows(3, 9), rows.T):
        assert (g.is_full(), g.is_causal(), g.num_edges) == (False, False, int(g.in_degree().sum()))
    assert graph == TokenGraph.from_edges(graph.edge_index.flip(1), N) != graph.T
    assert (rows == rows.T, (rows & graph).num_edges < rows.num_edges) == (False, True)


def test_a_rule_that_fails_on_ranges_is_evaluated_on_one():
    ranges = []

    def rule(b, h, dst, src):
        ranges.extend([] if isinstance(dst, torch.Tensor) else [dst])
        return dst.cos() > src.double().sin()

    graph = TokenGraph.from_rule(rule, 600)
    assert (graph.num_edges, len(ranges)) == (int(graph.mask().sum()), 1)
    for form in (graph, graph.T, graph.rows(9, 600), graph | patterns.window(600, 9)):
        assert "pair by pair, not on ranges of tokens (UnsupportedError: cos" in str(ga.explain(form, 8, 64))
    # The table of natten works on ranges, with fake tensors too.
    table = patterns.natten((32, 32), 7)
    assert "pair by pair" not in str(ga.explain(table, 8, 64, device="cuda")) + str(ga.explain(table, 8, 64))
