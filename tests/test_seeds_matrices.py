"""The claims of the third and the fourth text, as in ``test_seeds``."""

# ruff: noqa: F405

from __future__ import annotations

import pytest
import torch
from support.bounds import assert_exact, error
from support.explorer_engine import data_of
from support.seeds import *  # noqa: F403
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import EdgeConv

import gnn_attention as ga
from gnn_attention import (
    FactoredHeads,
    MessagePassingAttention,
    StandardHeads,
    edge_softmax,
    explorer,
    patterns,
)
from gnn_attention import model as lm
from gnn_attention.verify.measure import EXACT


def test_S3_1_pairwise_similarities():
    """(AB)_ij = a_i . b_j: a pairwise similarity matrix of two sets of vectors, n and m of them."""
    a, b, graph = drawn(4, 3), drawn(6, 3, seed=1), patterns.cross(4, 6)
    src, dst = graph.edge_index
    similarity = table_of(edge_softmax.logit(a[dst], b[src], 1.0), graph)
    assert_exact(similarity, torch.tensor([[sum(a_i * b_j) for b_j in b] for a_i in a], dtype=torch.float64))
    _, info = ga.attend(a[None, None], b[None, None], b[None, None], graph, scale=1.0, return_info=True)
    assert_exact(table_of(info.weights().log()[0, 0] + info.lse[0, 0, dst], graph), a @ b.T)


def test_S3_2_weights_before_they_are_normalised(way):
    """w_j is proportional to exp((W^Q v_i) . (W^K v_j) / sqrt(d))."""
    (q, k, v), (src, dst) = (drawn(1, 2, 5, 4, seed=s) for s in range(3)), LISTED.edge_index
    _, info = ga.attend(q, k, v, LISTED, return_info=True, backend=way or "auto")
    unnormalised = info.weights() * info.lse.exp()[:, :, dst]
    assert_exact(unnormalised, torch.exp((q[:, :, dst] * k[:, :, src]).sum(-1) / 4**0.5))


def test_S3_3_rows_are_attention_weights(way):
    """A = Softmax(Q K^T / sqrt(d)): A_ij is the weight of v_j in the output for v_i."""
    heads, x, graph = heads_with(num_heads=1, head_dim=4), drawn(5, 12), patterns.full(5)
    A = table_of(run_with_weights(heads, x, graph, way)[1], graph)[0]
    S = (x @ heads.W_Q[0]) @ (x @ heads.W_K[0]).T / 4**0.5
    assert_exact(A, S.softmax(dim=1))
    assert_exact(A, S.exp() / S.exp().sum(1, keepdim=True))


def test_S3_5_a_product_is_weighted_sums_of_rows(way):
    """Each row of AB is the weighted sum of the rows of B, with the weights of that row of A."""
    heads, x = heads_with(num_heads=1, head_dim=4), drawn(5, 12)
    bare = StandardHeads.from_arrays(heads.W_Q, heads.W_K, heads.W_V)
    out, weights = run_with_weights(bare, x, LISTED, way)
    A, V = weights_of(heads, x, LISTED.mask())[0], x @ heads.W_V[0]
    assert_exact(table_of(weights, LISTED)[0], A)
    assert_exact(out, A @ V)
    assert_exact(out, torch.stack([sum(A[i, j] * V[j] for j in range(5)) for i in range(5)]))


def test_S3_6_a_sum_without_oneself(way):
    """o_i = sum over j != i of w_j W^V v_j. Erratum: O = A V has j = i too; this is another graph."""
    heads, x = heads_with(num_heads=1, head_dim=4), drawn(6, 12)
    bare = StandardHeads.from_arrays(heads.W_Q, heads.W_K, heads.W_V)
    full, others = (run(bare, x, graph, way) for graph in (patterns.full(6), patterns.no_self(6)))
    S, V = (x @ heads.W_Q[0]) @ (x @ heads.W_K[0]).T / 2, x @ heads.W_V[0]
    assert_exact(full, S.softmax(1) @ V)
    assert_exact(others, (S + torch.full((6,), -torch.inf).diag()).softmax(1) @ V)
    assert differ(full, others)
    diagonal = S.softmax(1).diag()[:, None]
    without = S.softmax(1).fill_diagonal_(0) @ V  # as in O = A V with A_ii set to 0
    assert_exact(others, without / (1 - diagonal))
    assert (others - without).abs().max() > 0.1


def test_S3_7_row_and_column_conventions():
    """Erratum: the ith row of I W^Q is (W^Q)^T v_i and not "W^Q v_i"; a layout says which is meant."""
    v, W = drawn(5, 8), [drawn(8, 8, seed=s) for s in range(4)]
    rows = StandardHeads.from_arrays(*W, layout="row", num_heads=2)
    columns = StandardHeads.from_arrays(*W, layout="column", num_heads=2)
    transposed = StandardHeads.from_arrays(*(matrix.T for matrix in W), layout="column", num_heads=2)
    row, column = (heads.receive(v[None])[0].transpose(0, 1).flatten(1) for heads in (rows, columns))
    assert_exact(row, torch.stack([W[0].T @ v_i for v_i in v]))
    assert_exact(column, torch.stack([W[0] @ v_i for v_i in v]))
    assert differ(row, column)
    assert_exact(run(transposed, v, patterns.full(5)), run(rows, v, patterns.full(5)))


def test_S4_2_a_sequence_model():
    """An embedding block, transformer blocks (attention, MLP), each an additive update, an unembedding."""
    model, tokens = model_with(), torch.tensor([[3, 1, 4, 1, 5]])
    x, rms_norm = model.embedding.weight[tokens[0]], functional.rms_norm
    distance = (torch.arange(5)[:, None] - torch.arange(5)).clamp(-3, 3) + 3
    past = torch.ones(5, 5, dtype=torch.bool).tril()
    for block in model.blocks:
        heads, n = block.attention.heads, rms_norm(x, (12,), block.attention_norm.weight)
        logits = (n @ heads.W_Q) @ (n @ heads.W_K).mT / 2 + block.attention.score_mod.table[:, distance]
        A = logits.masked_fill(~past, -torch.inf).softmax(-1)
        x = x + (A @ n @ heads.W_V @ heads.W_O).sum(0)
        up, _, down = block.mlp
        hidden = functional.gelu(rms_norm(x, (12,), block.mlp_norm.weight) @ up.weight.T + up.bias)
        x = x + hidden @ down.weight.T + down.bias
    assert_exact(model(tokens)[0], rms_norm(x, (12,), model.norm.weight) @ model.unembedding.weight.T)
    assert [model(torch.zeros(2, T, dtype=torch.int64)).shape for T in (1, 7)] == [(2, 1, 9), (2, 7, 9)]


def test_S4_4_columns(way):
    """Y = W_O^T W_V X sigma(X^T W_K^T W_Q X), tokens as columns. Erratum: X^T W_K W_Q X does not fit."""
    W_Q, W_K, W_V, W_O = (drawn(rows, 12, seed=s) for s, rows in enumerate((3, 3, 5, 5)))  # R^(h x e)
    X, M = drawn(12, 6, seed=4), torch.ones(6, 6, dtype=torch.float64).triu()
    A = torch.exp(X.T @ W_K.T @ W_Q @ X / 3**0.5)
    Y = W_O.T @ W_V @ X @ (M * A / (M * A).sum(0))
    heads = StandardHeads.from_arrays(W_Q, W_K, W_V, W_O.T, layout="column", num_heads=1)
    assert_exact(run(heads, X.T, patterns.causal(6), way).T, Y)
    assert (heads.head_dim, heads.W_V.shape, heads.W_O.shape) == (3, (1, 12, 5), (1, 5, 12))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        X.T @ W_K @ W_Q @ X


def weights_at(graph: ga.TokenGraph, beta: float | None, way: str | None) -> Tensor:
    """``[dst, src]``, of the queries and keys of the next three tests."""
    one_hot = torch.eye(5, dtype=torch.float64)[None, None]
    found: Tensor = ga.attend(Q5, K5, one_hot, graph, scale=beta, backend=way or "auto")
    return found[0, 0]


Q5, K5 = drawn(1, 1, 5, 4), drawn(1, 1, 5, 4, seed=1)


def test_S4_7_inverse_temperature(way):
    """The factor beta is an inverse temperature, usually 1 / sqrt(h): how soft the softmax is."""
    logits, mask = (Q5 @ K5.mT)[0, 0].masked_fill(~LISTED.mask(), -torch.inf), LISTED.mask()
    assert_exact(weights_at(LISTED, None, way), (logits / 4**0.5).softmax(1))
    assert_exact(weights_at(LISTED, 0.3, way), (0.3 * logits).softmax(1))
    assert_exact(weights_at(LISTED, 1e6, way), functional.one_hot(logits.argmax(1), 5).double())
    assert_exact(weights_at(LISTED, 0.0, way), mask / mask.sum(1, keepdim=True).double())


def test_S4_8_three_stages_of_a_ranking(way):
    """The best result as a one-hot vector, a soft ranking in the simplex, and a masked soft ranking."""
    a = torch.stack([torch.stack([k_j @ q_i for q_i in Q5[0, 0]]) for k_j in K5[0, 0]])  # [j, i]
    full, causal = patterns.full(5), patterns.causal(5)
    assert_exact(weights_at(full, 1e6, way), functional.one_hot(a.argmax(0), 5).double())
    mass = torch.exp(a / 2)
    assert_exact(weights_at(full, 0.5, way).T, mass / mass.norm(p=1, dim=0))
    masked = torch.ones(5, 5, dtype=torch.float64).triu() * mass
    assert_exact(weights_at(causal, 0.5, way).T, masked / masked.norm(p=1, dim=0))
    # the soft and the masked soft ranking, to switch between in the explorer
    masks = data_of(explorer.page("Llamas do not output words"))["masks"]
    assert {"full", "causal"} <= {mask["name"].partition("(")[0] for mask in masks}


def test_S4_9_sum_to_i_or_to_T(way):
    """The sum runs to T. Erratum: written to i in the masked formula, which fits causal masks only."""
    graphs = {patterns.causal(5): True, patterns.window(5, 2): True, patterns.full(5): False, LISTED: False}
    for graph, same in graphs.items():
        mass = graph.mask().T * torch.exp((K5 @ Q5.mT)[0, 0] / 4**0.5)  # M_ji exp(beta a_ji)
        attention = weights_at(graph, None, way).T
        assert_exact(attention, mass / mass.sum(0))
        to_i = torch.stack([sum(mass[j, i] for j in range(i + 1)) for i in range(5)])
        assert (error(attention * to_i, mass) <= EXACT) == same


def test_S4_10_content_mixture_interpretation(way):
    """Values are the content, mixtures combine it, the output transform interprets the result."""
    heads, X, graph = heads_with(num_heads=1, head_dim=3, value_dim=5), drawn(12, 5), patterns.causal(5)
    W_V, W_O = heads.W_V[0].T, heads.W_O[0]  # R^(h' x e), where the text writes R^h once
    A = weights_of(heads, X.T, graph.mask())[0].T
    key, value = heads.send(X.T[None])
    mixture = ga.attend(heads.receive(X.T[None]), key, value, graph, backend=way or "auto")
    assert_exact(value[0, 0].T, W_V @ X)
    assert_exact(mixture[0, 0].T, W_V @ X @ A)
    assert_exact(heads.collect(mixture)[0].T, W_O.T @ (W_V @ X @ A))
    assert_exact(run(heads, X.T, graph, way).T, W_O.T @ (W_V @ X @ A))


@torch.no_grad()
def test_S4_12_attention_patterns_and_probes():
    """Visualise attention patterns; probe the residual stream at different points."""
    model, _ = lm.load_trained()
    tokens = torch.randint(model.config.vocabulary_size, (48, 96), generator=torch.Generator().manual_seed(1))
    states, (weights, _) = model.states(tokens), model.listen(tokens)
    src, dst = patterns.causal(96).edge_index
    # a head that attends to the token before
    assert weights[:, dst - src == 1].mean((0, 1)).max() > 0.5
    # to be read from a state: which token came before
    wanted = model.embedding(tokens)[:, :-1].flatten(0, 1).double()

    def explained(state: Tensor) -> float:
        x, y = (part - part.mean(0) for part in (state[:, 1:].flatten(0, 1).double(), wanted))
        half = len(x) // 2
        probe = torch.linalg.lstsq(x[:half], y[:half]).solution
        return 1 - ((x[half:] @ probe - y[half:]).square().sum() / y[half:].square().sum()).item()

    assert explained(states[0]) < 0.02  # an embedding knows nothing of its neighbour
    assert explained(states[1]) > 0.05  # after the first communication
    # the viewer has all that weights are computed from
    shown = data_of(explorer.page("Llamas do not output words"))
    assert set(shown["model"]["tensors"]) == set(model.state_dict())


def test_S4_18_limited_bandwidth():
    """A sender has one key and one message for all its receivers; multiple heads ameliorate that."""
    heads, x, graph, seen = heads_with(), drawn(8, 12), patterns.full(8), []
    layer = MessagePassingAttention(FactoredHeads.of(heads))
    layer.register_message_forward_hook(lambda module, inputs, output: seen.append(output))
    layer(x, graph)
    src = graph.edge_index[0]
    sent = seen[0][src == 5]  # [receivers, heads, width]: what node 5 sends to each of the 8
    weights = weights_of(heads, x)[:, :, 5].T
    assert_exact(sent, weights.unsqueeze(-1) * (x[5:6] @ heads.W_V @ heads.W_O)[:, 0])
    rank = torch.linalg.matrix_rank
    assert rank(sent.transpose(0, 1)).tolist() == [1, 1, 1]  # of one head: the same direction
    assert rank(sent.sum(1)) == 3
    # a message made of both ends
    both = EdgeConv(redrawn(nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 12))))
    both.register_message_forward_hook(lambda module, inputs, output: seen.append(output))
    both(x, graph.edge_index)
    assert rank(seen[1][src == 5]) == 8


def test_S4_20_a_program_on_a_graph(way):
    """An efficient, general-purpose, differentiable computer: two layers that complete a repeated text."""
    text = torch.tensor([3, 1, 4, 0, 2, 3, 1, 4, 0, 2])
    # a state is [token, what the token before was]
    token, memory = torch.eye(10, dtype=torch.float64).view(2, 5, 10)
    before = patterns.window(10, 2) - patterns.window(10, 1)
    shift = StandardHeads.from_arrays(token.T[None], token.T[None], token.T[None], memory[None])
    match = StandardHeads.from_arrays(token.T[None] * 100, memory.T[None], token.T[None], token[None])
    state = functional.one_hot(text, 5).double() @ token
    shifted = run(shift, state, before, way)
    assert torch.equal((shifted @ memory.T)[1:], functional.one_hot(text[:-1], 5).double())
    # which token followed my earlier occurrence?
    answer = run(match, state + shifted, patterns.strict_causal(10), way) @ token.T
    assert_exact(answer[5:9], functional.one_hot(text[6:], 5).double())
    shift.W_V.requires_grad_()
    learned = run(match, state + run(shift, state, before, way), patterns.causal(10), way)
    learned.square().sum().backward()
    assert 0 < shift.W_V.grad.norm() < torch.inf


def test_S4_22_senders_and_receivers_are_symmetric(way):
    """Sending and receiving messages are equivalent pursuits: the same edges, read from either end."""
    heads, x, (src, dst) = heads_with(), drawn(5, 12), LISTED.edge_index
    assert LISTED.T.T == LISTED != LISTED.T
    assert torch.equal(LISTED.T.edge_index, torch.stack([dst, src]))
    assert LISTED.T.in_degree().tolist() == [(src == j).sum() for j in range(5)]
    update, weights = run_with_weights(heads, x, LISTED, way)
    messages = FactoredHeads.of(heads).messages(x[None])[0][:, src]
    sent = (weights.unsqueeze(-1) * messages).sum(0)  # [E, width]
    # each reads its in-edges
    assert_exact(update, torch.stack([sent[dst == i].sum(0) for i in range(5)]))
    written, reversed_edges = torch.zeros(5, 12, dtype=torch.float64), LISTED.T.edge_index
    for j in range(5):  # each writes to all that attend to it
        written.index_add_(0, reversed_edges[0, reversed_edges[1] == j], sent[src == j])
    assert_exact(update, written)


def test_S4_23_keys_times_queries(way):
    """With columns, a product of keys and queries, whose columns are distributions: an alignment."""
    # four target words, and the source words that they translate
    words, order = drawn(6, 12) * 4, torch.tensor([2, 0, 5, 3])
    heads = StandardHeads.from_arrays(*[torch.eye(12, dtype=torch.float64)[None]] * 4)
    source, target, graph = words, words[order] + 0.1 * drawn(4, 12, seed=1), patterns.cross(4, 6)
    update, weights = run_with_weights(heads, (source, target), graph, way)
    alignment = table_of(weights, graph)[0].T  # [source, target]
    assert_exact(alignment, (source @ target.T / 12**0.5).softmax(0))
    assert torch.equal(alignment.argmax(0), order)
    assert_exact(update.T, source.T @ alignment)


def test_S4_24_with_weights_held_fixed_it_is_diffusion(way):
    """Other perspectives? With its weights held fixed attention is a linear map: a sparse product."""
    heads, x, y = heads_with(), drawn(5, 12), drawn(5, 12, seed=2)
    A, (q, k) = weights_of(heads, x, LISTED.mask()), (x @ heads.W_Q, x @ heads.W_K)

    def diffused(states: Tensor) -> Tensor:
        values = (states @ heads.W_V)[None]
        z = ga.attend(q[None], k[None], values, LISTED, backend=way or "auto")
        return heads.collect(z)[0]

    assert_exact(diffused(2 * x - 3 * y), 2 * diffused(x) - 3 * diffused(y))
    spread = torch.cat(list(A), dim=1).to_sparse()
    assert spread._nnz() == 3 * LISTED.num_edges
    assert_exact(diffused(x), torch.sparse.mm(spread, (x @ heads.W_V @ heads.W_O).flatten(0, 1)))
    assert differ(run(heads, 2 * x, LISTED, way), 2 * run(heads, x, LISTED, way))  # the weights are not fixed


def test_S4_25_the_graph_breaks_the_symmetry(way):
    """Positional encodings are left out: permuted tokens over a permuted graph give permuted updates."""
    heads, x, order = heads_with(), drawn(5, 12), torch.tensor([3, 0, 4, 1, 2])
    for graph in (LISTED, patterns.causal(5), patterns.full(5)):
        permuted = ga.convert.from_mask(graph.mask()[order][:, order])
        assert_exact(run(heads, x[order], permuted, way), run(heads, x, graph, way)[order])
        over_the_old = run(heads, x[order], graph, way)
        assert differ(over_the_old, run(heads, x, graph, way)[order]) == (graph != patterns.full(5))
