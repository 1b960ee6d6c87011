"""Heads between embedding and unembedding against dense vocabulary x vocabulary matrices in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals
from support.traces import drawn, redrawn
from torch import Tensor, nn

from gnn_attention import FactoredMatrix, StandardHeads, circuits
from gnn_attention import model as lm
from gnn_attention.heads.latent import LatentHeads


@pytest.fixture(scope="module")
def model() -> lm.LanguageModel:
    """A small model in float64 whose every number is drawn, gains too."""
    sizes = {"width": 12, "num_layers": 2, "num_heads": 3, "head_dim": 4, "mlp_width": 8, "reach": 3}
    return redrawn(lm.LanguageModel(lm.Config(30, **sizes)))


def dense_circuit(model: lm.LanguageModel, layer: int, head: int) -> Tensor:
    """``W_E diag(g) W_V W_O diag(g_last) W_U``, multiplied out."""
    block: Any = model.blocks[layer]
    heads, gains = block.attention.heads, (block.attention_norm.weight.diag(), model.norm.weight.diag())
    W_E, W_U = model.embedding.weight, model.unembedding.weight.mT
    return (W_E @ gains[0] @ heads.W_V[head] @ heads.W_O[head] @ gains[1] @ W_U).detach()


def published_copying(full: Tensor) -> Tensor:
    """Elhage et al. 2021: ``sum lambda / sum |lambda|`` over all eigenvalues of the whole matrix."""
    eigenvalues = torch.linalg.eigvals(full)
    return (eigenvalues.sum(-1) / eigenvalues.abs().sum(-1)).real


def test_full_circuit_against_the_dense_matrix(model):
    for layer, head in ((0, 0), (1, 2)):
        ends = (model.embedding.weight, model.unembedding.weight * model.norm.weight)
        circuit = circuits.full_circuit(circuits.of(model.blocks[layer], head), *ends)
        assert circuit.left.shape == (30, 4)
        assert_exact(circuit.full(), dense_circuit(model, layer, head))
        assert circuit.rank() == 4
        assert not circuit.left.requires_grad
    # vocabularies and widths of two sizes: cross-attention
    heads, W_E, W_U = StandardHeads(12, 3, source_width=7).double(), drawn(20, 7), drawn(9, 12, seed=1)
    circuit = circuits.full_circuit(circuits.of(heads, 1), W_E, W_U)
    assert circuit.shape == (20, 9)
    assert_exact(circuit.full(), (W_E @ heads.W_V[1] @ heads.W_O[1] @ W_U.mT).detach())


class TestCopying:
    @pytest.mark.parametrize(("m", "r"), [(9, 3), (9, 1), (5, 5), (30, 4)])
    def test_against_all_eigenvalues(self, m, r):
        """Those of the small product give what all eigenvalues of the whole give; the zeros add nothing."""
        matrix = FactoredMatrix(drawn(4, m, r), drawn(4, r, m, seed=1))
        assert_exact(circuits.copying(matrix), published_copying(matrix.full()))

    def test_the_extremes(self):
        """Tokens that raise themselves, lower themselves, and a rotation, whose eigenvalues are imaginary."""
        A, rotation = drawn(9, 3), torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
        eye = torch.eye(2, dtype=torch.float64)
        for left, right, expected in ((A, A.mT, 1), (A, -A.mT, -1), (rotation, eye, 0), (A, 0 * A.mT, 0)):
            # a share of the eigenvalues' absolute sum
            assert_exact(circuits.copying(FactoredMatrix(left, right)).item(), float(expected), largest=1.0)

    def test_scores_of_a_model(self, model):
        scores = circuits.copying_scores(model)
        assert scores.shape == (2, 3)
        for layer, head in scores.new_ones(2, 3).nonzero().tolist():
            expected = float(published_copying(dense_circuit(model, layer, head)))
            assert_exact(float(scores[layer, head]), expected, largest=1.0)


def test_effect_against_sorted_rows(model):
    tokens, full = torch.tensor([[3, 29], [0, 3]]), dense_circuit(model, 1, 2)
    effect = circuits.effect_on_vocabulary(model, 1, 2, tokens, k=4)
    assert effect.raised.tokens.shape == effect.lowered.values.shape == (2, 2, 4)
    for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        row = full[tokens[place]]
        lowest = row.argsort()
        for top, order in ((effect.raised, lowest.flip(0)[:4]), (effect.lowered, lowest[:4])):
            assert torch.equal(top.tokens[place], order)
            assert_exact(top.values[place], row[order])


def test_top_tokens_against_sorted_products():
    vectors, embedding = drawn(2, 3, 12), drawn(30, 12, seed=1)
    best = circuits.top_tokens(vectors, embedding, k=5)
    values, tokens = (vectors @ embedding.mT).sort(descending=True)
    assert torch.equal(best.tokens, tokens[..., :5])
    assert_exact(best.values, values[..., :5])
    half = torch.eye(3, dtype=torch.bfloat16)
    assert isinstance(circuits.top_tokens(torch.ones(3), half, k=1), circuits.TopTokens)


def test_a_neurons_pattern_gives_its_activation_before_the_bias(model):
    """Times a state divided by its root mean square (seed S1.11)."""
    block: Any = model.blocks[1]
    x = drawn(5, 12, seed=3)
    unit = x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
    wanted = block.mlp[0](block.mlp_norm(x)) - block.mlp[0].bias
    patterns = circuits.neuron_patterns(model, 1)
    assert patterns.shape == (8, 12)
    assert_exact(unit @ patterns.mT, wanted.detach())
    assert not patterns.requires_grad


HEAD = circuits.of(StandardHeads(12, 3, source_width=7), 1)
LATENT = circuits.of(LatentHeads(12, 2, 2, 2, latent_dim=5), 0)
ONES, full_circuit = torch.ones, circuits.full_circuit
WRONG = [
    (full_circuit, (HEAD, ONES(20, 12), ONES(20, 12)), ValueError, r"^embedding must be .* 7\], got"),
    (full_circuit, (HEAD, ONES(20, 7), ONES(12, 20)), ValueError, r"unembedding must .*12\].*\[12, 20\]"),
    (full_circuit, (HEAD, ONES(20, 7), nn.Linear(12, 20)), ValueError, "unembedding must be .* got Linear"),
    (full_circuit, (LATENT, ONES(20, 12), ONES(20, 12)), ValueError, r"must be a tensor \[vocabulary, 5\]"),
    (circuits.copying, (FactoredMatrix(drawn(3, 2), drawn(2, 4)),), ValueError, "square"),
    (circuits.copying_scores, (nn.Linear(3, 3),), TypeError, "LanguageModel, got Linear.*heads_of"),
    (circuits.neuron_patterns, (nn.Linear(3, 3), 0), TypeError, "model must be a"),
    (circuits.top_tokens, (ONES(4), ONES(9, 3)), ValueError, r"vectors \[\*, width\] .* of one width"),
    (circuits.top_tokens, ([1.0], ONES(9, 1)), ValueError, "of one width"),
]
WRONG_OF_A_MODEL = [
    ({"layer": 2}, IndexError, r"layer must be in 0 .. 1, got 2"),
    ({"head": 3}, IndexError, r"head must be in 0 .. 2, got 3"),
    ({"tokens": torch.tensor([-1, 30])}, IndexError, r"tokens must be in 0 .. 29, .* got \[-1, 30\]"),
    ({"tokens": ONES(1)}, TypeError, r"tokens must be an integer tensor, got .*torch.float32"),
    ({"tokens": [1]}, TypeError, r"tokens must be an integer tensor, got \[1\]"),
    ({"k": 31}, ValueError, "k must be at most 30, the vocabulary, got 31"),
    ({"k": 0}, ValueError, "k must be at least 1"),
]


def test_refusals(model):
    usual = {"layer": 0, "head": 0, "tokens": torch.tensor([1])}
    effect = partial(circuits.effect_on_vocabulary, model)
    cases = [(partial(effect, **usual | given), error, match) for given, error, match in WRONG_OF_A_MODEL]
    cases += [(partial(function, *given), error, match) for function, given, error, match in WRONG]
    assert_refusals(cases)
