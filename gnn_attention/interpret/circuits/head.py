"""The pattern and message matrices of a head, and the subspaces that it reads and writes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.heads import FactoredHeads, StandardHeads
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.interpret.circuits.subspace import Subspace
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model import Block


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """One head: ``logit = heads.scale x W_P x'`` and message ``x' W_M`` of receiver x and sender x'.

    :attr:`pattern` is the matrix ``W_P``, and :attr:`message` is ``W_M``, both without biases.
    To compute patterns and messages of states, with biases, use ``FactoredHeads``. The matrices are
    copies in float32 or better, without gradients.

    ``gain [width]`` is the weight of the norm before the layer. With it, matrices and subspaces
    apply to states before that norm, each divided by its root mean square. :func:`of` reads the
    gain of a Block.

    Sources: S0.5, S0.6, S1.1, S1.24 of docs/sources.md; Elhage et al. 2021, "A Mathematical
    Framework for Transformer Circuits" (QK and OV circuits); ``fold_ln`` in TransformerLens (gain).
    """

    heads: StandardHeads
    head: int
    gain: Float[Tensor, " width"] | None = None

    def __repr__(self) -> str:
        kind = f"{type(self.heads).__name__}({self.heads.extra_repr()})"
        return f"Circuit(head {self.head} of {kind}{'' if self.gain is None else ', gain folded'})"

    @cached_property
    def pattern(self) -> FactoredMatrix:
        """``W_P = W_Q W_K^T [width, source_width]``, a matrix of rank at most ``head_dim``.

        Raises ValueError for rotary heads (see :meth:`pattern_at`) and for ``qk_norm``, which has
        no ``W_P``.
        """
        if self.heads.rotary is not None:
            raise ValueError(f"{self!r} is rotary, so W_P varies: use pattern_at(dst - src)")
        return self._pattern(None)

    def pattern_at(self, distance: int) -> FactoredMatrix:
        """Return ``W_P`` at a distance dst - src: ``W_Q R W_K^T`` if rotary, else :attr:`pattern`."""
        distance = checks.integer("distance", distance)
        return self.pattern if self.heads.rotary is None else self._pattern(distance)

    @cached_property
    def message(self) -> FactoredMatrix:
        """``W_M = W_V W_O [source_width, width]``. Raises ValueError for heads without ``W_O``."""
        matrices = self.heads.message_matrix()
        left, right = _copy_weight(matrices.left[self.head]), _copy_weight(matrices.right[self.head])
        return FactoredMatrix(self._fold_gain(left), right)

    @property
    def reads_as_receiver(self) -> Subspace:
        """The subspace of receivers' states on which logits depend, spanned by the columns of ``W_Q``."""
        return Subspace.spanned_by(self._fold_gain(self.heads.W_Q[self.head]).mT)

    @property
    def reads_as_sender(self) -> Subspace:
        """The subspace of senders' states on which logits depend, spanned by the columns of ``W_K``."""
        return Subspace.spanned_by(self._fold_gain(self.heads.W_K[self._kv_head]).mT)

    @property
    def reads_as_value(self) -> Subspace:
        """The subspace of senders' states on which messages depend, spanned by the columns of ``W_V``."""
        return Subspace.spanned_by(self._fold_gain(self.heads.W_V[self._kv_head]).mT)

    @property
    def writes(self) -> Subspace:
        """The subspace of messages, spanned by the rows of ``W_O``. Raises ValueError without ``W_O``."""
        if self.heads.W_O is None:
            raise ValueError("heads without W_O have values but no messages: they write no states")
        return Subspace.spanned_by(self.heads.W_O[self.head])

    @property
    def _kv_head(self) -> int:
        return self.head * self.heads.num_kv_heads // self.heads.num_heads

    def _pattern(self, distance: int | None) -> FactoredMatrix:
        matrices = self.heads.pattern_matrix(distance)
        left, right = _copy_weight(matrices.left[self.head]), _copy_weight(matrices.right[self.head])
        return FactoredMatrix(self._fold_gain(left), self._fold_gain(right.mT).mT)

    def _fold_gain(self, weight: Float[Tensor, "width dim"]) -> Float[Tensor, "width dim"]:
        return weight if self.gain is None else self.gain.to(weight).unsqueeze(1) * weight


def of(source: Any, head: int, gain: Float[Tensor, " width"] | None = None) -> Circuit:
    """Return the circuit of one head.

    ``source`` is standard or factored heads, an attention layer with such heads, or a
    ``gnn_attention.model.Block``, whose norm's gain is folded in. For another model, pass the
    weight of the norm before the layer as ``gain [width]``. (A LayerNorm also removes each state's
    mean; gain does not.) Raises TypeError for another source, IndexError for an unknown head,
    ValueError for an invalid gain.
    """
    circuits = each(source, gain)
    return circuits[checks.index("head", head, len(circuits))]


def each(source: Any, gain: Float[Tensor, " width"] | None = None) -> list[Circuit]:
    """Return the circuits of all heads of a layer, with the arguments and errors of :func:`of`."""
    heads = source
    if isinstance(source, Block):
        if gain is not None:
            raise ValueError("gain must not be passed with a Block, which has one: pass block.attention")
        heads, gain = source.attention, source.attention_norm.weight
    heads = heads.heads if isinstance(heads, MessagePassingAttention) else heads
    heads = heads.standard if isinstance(heads, FactoredHeads) else heads
    if not isinstance(heads, StandardHeads):
        raise TypeError(
            "source must be standard or factored heads, a layer with such heads or a Block, got "
            f"{type(heads).__name__}; for another model pass gnn_attention.heads_of(model, layer)"
        )
    if gain is not None:
        if heads.source_width != heads.width:
            raise ValueError(f"gain needs heads of one width for receivers and senders, got {heads!r}")
        if tuple(gain.shape) != (heads.width,):
            raise ValueError(f"gain must be a float tensor [{heads.width}], got {checks.quote(gain)}")
        gain = _copy_weight(gain)
    return [Circuit(heads, head, gain) for head in range(heads.num_heads)]


def _copy_weight(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)


class TopTokens(NamedTuple):
    """The ``k`` tokens with the largest dot products, and the products: ``[*, k]``, descending."""

    tokens: Int[Tensor, "*lead k"]
    values: Float[Tensor, "*lead k"]


def top_tokens(
    vectors: Float[Tensor, "*lead width"], embedding: Float[Tensor, "vocabulary width"], k: int = 10
) -> TopTokens:
    """Find the ``k`` tokens whose embeddings have the largest dot product with each vector.

    Pass patterns to see which tokens they look for, or pass messages and the unembedding to see
    which tokens they promote. ``-vectors`` finds the smallest dot products. Raises ValueError
    for different widths or too large a k. Source: seed S1.11.

    >>> top_tokens(torch.tensor([0.0, 1.0, 2.0]), torch.eye(3), k=2)
    TopTokens(tokens=tensor([2, 1]), values=tensor([2., 1.]))
    """
    if embedding.dim() != 2 or vectors.shape[-1:] != embedding.shape[1:]:
        shapes = f"{list(vectors.shape)} and {list(embedding.shape)}"
        raise ValueError(f"vectors [*, width] must fit embedding [vocabulary, width], got {shapes}")
    logits = vectors.detach() @ embedding.detach().to(vectors).mT
    if checks.size("k", k, 1) > logits.shape[-1]:
        raise ValueError(f"k must be at most {logits.shape[-1]}, the size of the vocabulary, got {k}")
    values, tokens = logits.topk(k, dim=-1)
    return TopTokens(tokens, values)
