"""Heads between embedding and unembedding against dense vocabulary x vocabulary matrices in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from torch import Tensor, nn

from gnn_attention import FactoredMatrix, StandardHeads
from gnn_attention import model as lm
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.interpret.circuits.head import of
from gnn_attention.interpret.circuits.vocabulary import (
    TopTokens,
    copying,
    copying_score,
    copying_scores,
    effect_on_vocabulary,
    full_circuit,
    neuron_patterns,
    top_tokens,
)

SIZES = {
    "vocabulary_size": 30,
    "width": 12,
    "num_layers": 2,
    "num_heads": 3,
    "head_dim": 4,
    "mlp_width": 8,
    "reach": 3,
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def model() -> lm.LanguageModel:
    """A small model in float64 whose every number is drawn, gains too."""
    made = lm.LanguageModel(lm.Config(**SIZES)).double()
    for seed, parameter in enumerate(made.parameters()):
        parameter.data = drawn(*parameter.shape, seed=seed)
    return made


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


class TestFullCircuit:
    def test_against_the_dense_matrix(self, model):
        for layer, head in ((0, 0), (1, 2)):
            ends = (model.embedding.weight, model.unembedding.weight * model.norm.weight)
            circuit = full_circuit(of(model.blocks[layer], head), *ends)
            assert circuit.left.shape == (30, 4)
            assert_exact(circuit.full(), dense_circuit(model, layer, head))
            assert circuit.rank() == 4
            assert not circuit.left.requires_grad

    def test_vocabularies_of_two_sizes(self):
        """Other words come in than go out, and other widths: cross-attention."""
        heads, W_E, W_U = StandardHeads(12, 3, source_width=7).double(), drawn(20, 7), drawn(9, 12, seed=1)
        circuit = full_circuit(of(heads, 1), W_E, W_U)
        assert circuit.shape == (20, 9)
        assert_exact(circuit.full(), (W_E @ heads.W_V[1] @ heads.W_O[1] @ W_U.mT).detach())

    def test_refusals(self):
        heads = of(StandardHeads(12, 3, source_width=7), 1)
        with pytest.raises(
            ValueError,
            match=r"^embedding must be \[vocabulary, 7\], a row for each token, got .*shape \[20, 12\]",
        ):
            full_circuit(heads, torch.ones(20, 12), torch.ones(20, 12))
        with pytest.raises(ValueError, match=r"unembedding must be \[vocabulary, 12\].*got .*\[12, 20\]"):
            full_circuit(heads, torch.ones(20, 7), torch.ones(12, 20))
        with pytest.raises(ValueError, match=r"unembedding must be .* got Linear"):
            full_circuit(heads, torch.ones(20, 7), nn.Linear(12, 20))
        latent = of(LatentHeads(12, 2, 2, 2, latent_dim=5), 0)
        with pytest.raises(ValueError, match=r"embedding must be \[vocabulary, 5\]"):
            full_circuit(latent, torch.ones(20, 12), torch.ones(20, 12))


class TestCopying:
    @pytest.mark.parametrize(("m", "r"), [(9, 3), (9, 1), (5, 5), (30, 4)])
    def test_against_all_eigenvalues(self, m, r):
        """Those of the small product give what all eigenvalues of the whole give; the zeros add nothing."""
        matrix = FactoredMatrix(drawn(4, m, r), drawn(4, r, m, seed=1))
        assert_exact(copying(matrix), published_copying(matrix.full()))

    def test_the_extremes(self):
        A = drawn(9, 3)
        turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
        assert_exact(copying(FactoredMatrix(A, A.mT)), torch.tensor(1.0, dtype=torch.float64))
        assert_exact(copying(FactoredMatrix(A, -A.mT)), torch.tensor(-1.0, dtype=torch.float64))
        none = copying(FactoredMatrix(turn, torch.eye(2, dtype=torch.float64)))
        assert_exact(
            none, torch.tensor(0.0, dtype=torch.float64), largest=1.0
        )  # a share of the eigenvalues' absolute sum
        assert float(copying(FactoredMatrix(A, 0 * A.mT))) == 0.0

    def test_scores_of_a_model(self, model):
        scores = copying_scores(model)
        assert scores.shape == (2, 3)
        for layer in range(2):
            for head in range(3):
                expected = published_copying(dense_circuit(model, layer, head))
                assert_exact(
                    copying_score(model, layer, head), float(expected), largest=1.0
                )  # a share, as above
                assert_exact(float(scores[layer, head]), float(expected), largest=1.0)

    def test_the_induction_head_of_the_trained_model_copies(self):
        """Of all its heads, it copies most."""
        trained, _ = lm.load_trained()
        layer, head = divmod(int(lm.induction_scores(trained, samples=4).argmax()), 4)
        scores = copying_scores(trained)
        assert scores[layer, head] == scores.max() > 0.5

    def test_refusals(self, model):
        with pytest.raises(
            TypeError, match=r"model must be a gnn_attention.model.LanguageModel, got Linear.*heads_of"
        ):
            copying_score(nn.Linear(3, 3), 0, 0)
        with pytest.raises(TypeError, match="model must be a"):
            copying_scores(None)
        with pytest.raises(IndexError, match=r"layer must be in 0 .. 1, got 2"):
            copying_score(model, 2, 0)
        with pytest.raises(IndexError, match=r"head must be in 0 .. 2, got 3"):
            copying_score(model, 0, 3)
        with pytest.raises(ValueError, match="square"):
            copying(FactoredMatrix(drawn(3, 2), drawn(2, 4)))


class TestEffect:
    def test_against_sorted_rows(self, model):
        tokens, full = torch.tensor([[3, 29], [0, 3]]), dense_circuit(model, 1, 2)
        effect = effect_on_vocabulary(model, 1, 2, tokens, k=4)
        assert effect.raised.tokens.shape == effect.lowered.values.shape == (2, 2, 4)
        for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
            row = full[tokens[place]]
            order = row.argsort()
            assert torch.equal(effect.raised.tokens[place], order.flip(0)[:4])
            assert torch.equal(effect.lowered.tokens[place], order[:4])
            assert_exact(effect.raised.values[place], row[order.flip(0)[:4]])
            assert_exact(effect.lowered.values[place], row[order[:4]])

    def test_a_head_that_says_the_next_letter(self):
        """W_M by hand: token t raises t + 1."""
        words = torch.eye(6, dtype=torch.float64)
        made = lm.LanguageModel(
            lm.Config(6, width=6, num_layers=1, num_heads=1, head_dim=6, mlp_width=4)
        ).double()
        heads = made.blocks[0].attention.heads
        made.embedding.weight.data = made.unembedding.weight.data = words
        heads.W_V.data, heads.W_O.data = words[None], words.roll(1, dims=1)[None]
        effect = effect_on_vocabulary(made, 0, 0, torch.arange(6), k=1)
        assert effect.raised.tokens[:, 0].tolist() == [1, 2, 3, 4, 5, 0]

    @pytest.mark.parametrize(
        ("tokens", "k", "error", "match"),
        [
            (torch.tensor([30]), 3, IndexError, r"tokens must be in 0 .. 29, the vocabulary, got 30 .. 30"),
            (torch.tensor([-1, 2]), 3, IndexError, r"got -1 .. 2"),
            (torch.tensor([1.0]), 3, TypeError, "tokens must be an integer tensor, got .*torch.float32"),
            ([1], 3, TypeError, r"tokens must be an integer tensor, got \[1\]"),
            (torch.tensor([1]), 31, ValueError, "k must be at most 30, the vocabulary, got 31"),
            (torch.tensor([1]), 0, ValueError, "k must be at least 1"),
        ],
    )
    def test_refusals(self, model, tokens, k, error, match):
        with pytest.raises(error, match=match):
            effect_on_vocabulary(model, 0, 0, tokens, k)


class TestTopTokens:
    def test_against_sorted_products(self):
        vectors, embedding = drawn(2, 3, 12), drawn(30, 12, seed=1)
        best = top_tokens(vectors, embedding, k=5)
        for place in ((0, 0), (1, 2)):
            products = embedding @ vectors[place]
            assert torch.equal(best.tokens[place], products.argsort(descending=True)[:5])
            assert_exact(best.values[place], products.sort(descending=True).values[:5])
        assert torch.equal(
            top_tokens(-vectors[0, 0], embedding, k=1).tokens, (embedding @ vectors[0, 0]).argmin()[None]
        )

    def test_dtypes_differ(self):
        assert isinstance(top_tokens(torch.ones(3), torch.eye(3, dtype=torch.bfloat16), k=1), TopTokens)

    @pytest.mark.parametrize(
        ("vectors", "embedding"),
        [
            (torch.ones(4), torch.ones(9, 3)),
            (torch.ones(3), torch.ones(3)),
            ([1.0], torch.ones(9, 1)),
            (torch.tensor(1.0), torch.ones(1, 1)),
        ],
    )
    def test_refusals(self, vectors, embedding):
        with pytest.raises(
            ValueError,
            match=r"vectors \[\*, width\] and embedding \[vocabulary, width\] must be tensors of one width",
        ):
            top_tokens(vectors, embedding)


class TestNeurons:
    def test_the_activation_before_the_bias(self, model):
        block: Any = model.blocks[1]
        x = drawn(5, 12, seed=3)
        unit = x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
        wanted = block.mlp[0](block.mlp_norm(x)) - block.mlp[0].bias
        patterns = neuron_patterns(model, 1)
        assert patterns.shape == (8, 12)
        assert_exact(unit @ patterns.mT, wanted.detach())
        assert not patterns.requires_grad

    def test_refusals(self, model):
        with pytest.raises(TypeError, match="model must be a"):
            neuron_patterns(nn.Linear(3, 3), 0)
        with pytest.raises(IndexError, match=r"layer must be in 0 .. 1, got 5"):
            neuron_patterns(model, 5)
