"""A head between embedding and unembedding: what it copies and which tokens it makes likelier."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.interpret.circuits.head import Circuit, each, of
from gnn_attention.model import Block, LanguageModel


class TopTokens(NamedTuple):
    """The ``k`` tokens with the largest values, best first; both ``[*, k]``."""

    tokens: Int[Tensor, "*lead k"]
    values: Float[Tensor, "*lead k"]


class VocabularyEffect(NamedTuple):
    """The tokens whose logits a message raises most, and those that it lowers most (most lowered first)."""

    raised: TopTokens
    lowered: TopTokens


def full_circuit(
    circuit: Circuit,
    embedding: Float[Tensor, "words_in source_width"],
    unembedding: Float[Tensor, "words_out width"],
) -> FactoredMatrix:
    """``W_E W_M W_U [vocabulary, vocabulary]``, factored: the effect of each token on every logit.

    Row s, column t: what the message of token s, read from its embedding, adds to the logit of t. Both
    matrices have a row for each token; multiply ``unembedding`` by the gain of the last norm. Norms beyond
    their gains, biases and what stands between are left out. ValueError for other widths. Source: Elhage et
    al. 2021, "The OV and QK circuits" (the full OV circuit, there transposed).
    """
    message = circuit.message
    ends = (("embedding", embedding), ("unembedding", unembedding))
    for (name, matrix), width in zip(ends, message.shape, strict=True):
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or matrix.shape[1] != width:
            raise ValueError(f"{name} must be a tensor [vocabulary, {width}], got {quoted(matrix)}")
    left, right = (matrix.detach().to(message.left) for matrix in (embedding, unembedding))
    return FactoredMatrix(left @ message.left, message.right @ right.mT)


def copying(matrix: FactoredMatrix) -> Float[Tensor, "*heads"]:
    """``sum Re(lambda) / sum |lambda|`` over eigenvalues: 1 if all are positive, -1 if negative.

    Of a full circuit: do tokens raise their own logits? 0 for a matrix without eigenvalues other than 0.
    Evidence of copying, not proof: an asymmetric matrix may raise other tokens more. Source: Elhage et al.
    2021, "Summarizing OV/QK matrices".
    """
    eigenvalues = matrix.eigenvalues()
    bound = eigenvalues.abs().sum(-1)
    return torch.where(bound > 0, eigenvalues.real.sum(-1) / bound, 0.0)


def copying_scores(model: LanguageModel) -> Float[Tensor, "layers heads"]:
    """:func:`copying` of the :func:`full_circuit` of every head, the gains of both norms folded in.

    TypeError for another kind of model (take :func:`full_circuit`).
    """
    blocks, ends = _blocks(model), _vocabularies(model)
    scores = [copying(full_circuit(circuit, *ends)) for block in blocks for circuit in each(block)]
    return torch.stack(scores).view(len(blocks), -1)


def effect_on_vocabulary(
    model: LanguageModel, layer: int, head: int, tokens: Int[Tensor, "*lead"], k: int = 10
) -> VocabularyEffect:
    """The logits that each token moves most through one head alone, ``[*, k]``: rows of the full circuit.

    Values are in the units of the :func:`full_circuit`: they compare tokens, as norms leave them to a factor.
    Raises as :func:`copying_scores` does, IndexError for an unknown head, layer or token, ValueError for a
    k too large.
    """
    matrix = full_circuit(of(_block(model, layer), head), *_vocabularies(model))
    logits = matrix.left[_known(tokens, matrix.shape[0])] @ matrix.right
    low = _largest(-logits, k)
    return VocabularyEffect(_largest(logits, k), TopTokens(low.tokens, -low.values))


def top_tokens(
    vectors: Float[Tensor, "*lead width"], embedding: Float[Tensor, "vocabulary width"], k: int = 10
) -> TopTokens:
    """The ``k`` tokens whose embeddings match each vector best, by dot product, best first.

    For patterns (of which tokens is it a template?), for neurons (:func:`neuron_patterns`), and, with the
    unembedding, for messages. ``-vectors`` finds what they avoid. Source: seed S1.11. ValueError for widths
    that differ or a k too large.

    >>> top_tokens(torch.tensor([0.0, 1.0, 2.0]), torch.eye(3), k=2)
    TopTokens(tokens=tensor([2, 1]), values=tensor([2., 1.]))
    """
    tensors = all(isinstance(part, Tensor) and part.dim() for part in (vectors, embedding))
    if not tensors or embedding.dim() != 2 or vectors.shape[-1] != embedding.shape[1]:
        got = f"{quoted(vectors)} and {quoted(embedding)}"
        raise ValueError(f"vectors [*, width] and embedding [words, width] must be of one width, got {got}")
    return _largest(vectors.detach() @ embedding.detach().to(vectors).mT, k)


def neuron_patterns(model: LanguageModel, layer: int) -> Float[Tensor, "neurons width"]:
    """The input weights of a layer's MLP neurons times the gain of the norm before, ``[neurons, width]``.

    A neuron is a pattern that does not depend on the token, where a head makes a new one for each (seed
    S1.11). Bias and activation are left out. TypeError for another model, IndexError for an unknown layer.
    """
    block = _block(model, layer)
    return block.mlp[0].get_parameter("weight").detach() * block.mlp_norm.weight.detach()


def _blocks(model: Any) -> list[Block]:
    if not isinstance(model, LanguageModel):
        other = f"{type(model).__name__}: take full_circuit of foreign.heads_of(model, layer)"
        raise TypeError(f"model must be a gnn_attention.model.LanguageModel, got {other}")
    return [block for block in model.blocks if isinstance(block, Block)]


def _block(model: Any, layer: int) -> Block:
    blocks = _blocks(model)
    return blocks[checks.index("layer", layer, len(blocks))]


def _vocabularies(model: LanguageModel) -> tuple[Tensor, Tensor]:
    return model.embedding.weight, model.unembedding.weight * model.norm.weight


def _known(tokens: Any, count: int) -> Tensor:
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be an integer tensor, got {quoted(tokens)}; see BytePair.encode")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < count:
        raise IndexError(f"tokens must be in 0 .. {count - 1}, the vocabulary, got {quoted(tokens.tolist())}")
    return tokens.long()


def _largest(logits: Tensor, k: int) -> TopTokens:
    if checks.size("k", k, 1) > logits.shape[-1]:
        raise ValueError(f"k must be at most {logits.shape[-1]}, the vocabulary, got {k}")
    values, tokens = logits.topk(k, dim=-1)
    return TopTokens(tokens, values)
