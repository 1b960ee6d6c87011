"""One head read off its weights: its pattern and message matrices, their subspaces, and tokens like them."""

from __future__ import annotations

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
    """One head: ``logit = heads.scale x W_P x'`` and message ``x' W_M``, for a receiver x, a sender x'.

    :attr:`pattern` and :attr:`message` are these matrices, factored and without biases; ``FactoredHeads`` has
    the patterns and messages of states, with biases. Weights are read once, in float32 or better, without
    gradients.

    With a ``gain [width]``, the weight of the norm before the layer, matrices and subspaces refer to states
    before that norm, each divided by its root mean square (:func:`of` takes it from a Block).

    Sources: seeds S0.5, S0.6, S1.1, S1.24; Elhage et al. 2021, "A Mathematical Framework for Transformer
    Circuits" (QK and OV circuits; folding the gain is TransformerLens' ``fold_ln``).
    """

    heads: StandardHeads
    head: int
    gain: Float[Tensor, " width"] | None = None

    def __repr__(self) -> str:
        kind = f"{type(self.heads).__name__}({self.heads.extra_repr()})"
        return f"Circuit(head {self.head} of {kind}{'' if self.gain is None else ', gain folded'})"

    @cached_property
    def pattern(self) -> FactoredMatrix:
        """``W_P = W_Q W_K^T [width, source_width]``, of rank at most ``head_dim``.

        ValueError for rotary heads (see :meth:`pattern_at`) and for ``qk_norm``, which has no such matrix.
        """
        if self.heads.rotary is not None:
            raise ValueError(f"{self!r} is rotary, its pattern varies: take pattern_at(dst - src)")
        return self._pattern(None)

    def pattern_at(self, distance: int) -> FactoredMatrix:
        """``W_P`` at ``distance = dst - src``: ``W_Q R W_K^T`` if rotary, else :attr:`pattern`."""
        distance = checks.position("distance", distance)
        return self.pattern if self.heads.rotary is None else self._pattern(distance)

    @cached_property
    def message(self) -> FactoredMatrix:
        """``W_M = W_V W_O [source_width, width]``. ValueError for heads without ``W_O``."""
        matrices = self.heads.message_matrix()
        left, right = _read(matrices.left[self.head]), _read(matrices.right[self.head])
        return FactoredMatrix(self._fold_gain(left), right)

    @property
    def reads_as_receiver(self) -> Subspace:
        """All of a receiver's state that this head's logits depend on: the columns of ``W_Q``."""
        return Subspace.spanned_by(self._fold_gain(self.heads.W_Q[self.head]).mT)

    @property
    def reads_as_sender(self) -> Subspace:
        """All of a sender's state that this head's logits depend on: the columns of ``W_K``."""
        return Subspace.spanned_by(self._fold_gain(self.heads.W_K[self._kv_head]).mT)

    @property
    def reads_as_value(self) -> Subspace:
        """All of a sender's state that its message depends on: the columns of ``W_V``."""
        return Subspace.spanned_by(self._fold_gain(self.heads.W_V[self._kv_head]).mT)

    @property
    def writes(self) -> Subspace:
        """All that messages can be made of: the rows of ``W_O``. ValueError for heads without one."""
        if self.heads.W_O is None:
            raise ValueError("heads without W_O have values but no messages: they write no states")
        return Subspace.spanned_by(self.heads.W_O[self.head])

    @property
    def _kv_head(self) -> int:
        return self.head * self.heads.num_kv_heads // self.heads.num_heads

    def _pattern(self, distance: int | None) -> FactoredMatrix:
        matrices = self.heads.pattern_matrix(distance)
        left, right = _read(matrices.left[self.head]), _read(matrices.right[self.head])
        return FactoredMatrix(self._fold_gain(left), self._fold_gain(right.mT).mT)

    def _fold_gain(self, weight: Float[Tensor, "width dim"]) -> Float[Tensor, "width dim"]:
        return weight if self.gain is None else self.gain.to(weight).unsqueeze(1) * weight


def of(source: Any, head: int, gain: Float[Tensor, " width"] | None = None) -> Circuit:
    """The circuit of one head.

    ``source`` is standard or factored heads, an attention layer of them, or a ``gnn_attention.model.Block``,
    whose norm's gain is then folded in. ``gain [width]`` is the weight of the norm before a layer of another
    model: see :class:`Circuit`. (A LayerNorm also centres: it reads nothing along the channels' mean.)

    Raises TypeError for another source, IndexError for an unknown head, ValueError for another gain.
    """
    circuits = each(source, gain)
    return circuits[checks.index("head", head, len(circuits))]


def each(source: Any, gain: Float[Tensor, " width"] | None = None) -> list[Circuit]:
    """The circuits of all heads of a layer, as :func:`of` gives them."""
    heads = source
    if isinstance(source, Block):
        if gain is not None:
            raise ValueError("gain must not be given with a Block, which has one: take block.attention")
        heads, gain = source.attention, source.attention_norm.weight
    heads = heads.heads if isinstance(heads, MessagePassingAttention) else heads
    heads = heads.standard if isinstance(heads, FactoredHeads) else heads
    if not isinstance(heads, StandardHeads):
        raise TypeError(
            "source must be standard or factored heads, a layer of them or a Block, "
            f"got {type(heads).__name__}; of another model take foreign.heads_of(model, layer)"
        )
    if gain is not None:
        if heads.source_width != heads.width:
            raise ValueError(f"gain cannot be folded into {heads!r}: both sides must read states of one norm")
        if tuple(gain.shape) != (heads.width,):
            raise ValueError(f"gain must be a float tensor [{heads.width}], got {checks.quote(gain)}")
        gain = _read(gain)
    return [Circuit(heads, head, gain) for head in range(heads.num_heads)]


def _read(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)


class TopTokens(NamedTuple):
    """The ``k`` tokens with the largest values, best first; both ``[*, k]``."""

    tokens: Int[Tensor, "*lead k"]
    values: Float[Tensor, "*lead k"]


def top_tokens(
    vectors: Float[Tensor, "*lead width"], embedding: Float[Tensor, "vocabulary width"], k: int = 10
) -> TopTokens:
    """The ``k`` tokens whose embeddings match each vector best, by dot product, best first.

    For patterns (of which tokens is it a template?) and, with the unembedding, for messages. ``-vectors``
    finds what they avoid. Source: seed S1.11. ValueError for widths that differ or a k too large.

    >>> top_tokens(torch.tensor([0.0, 1.0, 2.0]), torch.eye(3), k=2)
    TopTokens(tokens=tensor([2, 1]), values=tensor([2., 1.]))
    """
    if embedding.dim() != 2 or vectors.shape[-1:] != embedding.shape[1:]:
        raise ValueError(
            "vectors [*, width] and embedding [words, width] must be of one width, "
            f"got {checks.quote(vectors)} and {checks.quote(embedding)}"
        )
    logits = vectors.detach() @ embedding.detach().to(vectors).mT
    if checks.size("k", k, 1) > logits.shape[-1]:
        raise ValueError(f"k must be at most {logits.shape[-1]}, the vocabulary, got {k}")
    values, tokens = logits.topk(k, dim=-1)
    return TopTokens(tokens, values)
