"""One head read off its weights: its pattern and message matrices, and their subspaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.arrays import grouped
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.lazy import LazyHeads
from gnn_attention.heads.model_space import SIDES
from gnn_attention.interpret.circuits.subspace import Subspace, rank_tolerance
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model import Block

Heads = StandardHeads | MergedHeads | LatentHeads


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """One head: ``logit = scale P . x'`` with ``P = x W_P + b_P``, message ``M = x' W_M + b_M``.

    x is a receiver's state, x' a sender's. :attr:`pattern` and :attr:`message` are the matrices, factored and
    without biases: those are :attr:`b_P`, :attr:`b_M` and, on the senders' side, where
    ``logit = scale x . P'``, :attr:`b_S`. The product of both biases is the same for all edges and part of
    neither; ``b_O`` belongs to the layer. Weights are read once, in float32 or better, without gradients.

    With a ``gain [width]``, the weight of the norm before the layer, matrices and subspaces refer to states
    before that norm, each divided by its root mean square (:func:`of` takes it from a Block).

    Sources: seeds S0.5, S0.6, S1.1, S1.24; Elhage et al. 2021, "A Mathematical Framework for Transformer
    Circuits" (QK and OV circuits; folding the gain is TransformerLens' ``fold_ln``).
    """

    heads: Heads
    head: int
    gain: Float[Tensor, " width"] | None = None

    def __repr__(self) -> str:
        kind = f"{type(self.heads).__name__}({self.heads.extra_repr()})"
        return f"Circuit(head {self.head} of {kind}{'' if self.gain is None else ', gain folded'})"

    @property
    def scale(self) -> float:
        """``1 / sqrt(head_dim)``."""
        return self.heads.scale

    @cached_property
    def pattern(self) -> FactoredMatrix:
        """``W_P = W_Q W_K^T [width, source_width]``, of rank at most ``head_dim``.

        Of merged heads, which have no factors, those of the singular value decomposition. ValueError for
        rotary and latent heads (see :meth:`pattern_at`) and for ``qk_norm``, which has no such matrix.
        """
        if self._is_rotary:
            raise ValueError(f"{self!r} is rotary, its pattern varies: take pattern_at(dst - src)")
        return self._pattern(None)

    def pattern_at(self, distance: int) -> FactoredMatrix:
        """``W_P`` at ``distance = dst - src``: ``W_Q R W_K^T`` if rotary, else :attr:`pattern`.

        Of latent heads it leads from ``u`` to ``[c, x W_KR]``: see :meth:`LatentHeads.pattern_matrix`.

        """
        distance = checks.position("distance", distance)
        return self._pattern(distance) if self._is_rotary else self.pattern

    @cached_property
    def message(self) -> FactoredMatrix:
        """``W_M = W_V W_O [source_width, width]``; of latent heads ``[latent_dim, width]``.

        ValueError for heads without ``W_O``, which have values but no messages.
        """
        if isinstance(self.heads, MergedHeads):
            return self._gained(_thin(self.heads.W_M[self.head]))
        return self._gained(_of_head(self.heads.message_matrix(), self.head))

    @property
    def b_P(self) -> Float[Tensor, " source_width"] | None:
        """``b_Q W_K^T``, what the queries' bias adds to every pattern; None without one."""
        if isinstance(self.heads, MergedHeads):
            return self._merged_bias(self.heads.pattern[:, -1, : self.heads.source_width])
        return self._bias("b_Q", lambda: self.pattern.right)

    @property
    def b_S(self) -> Float[Tensor, " width"] | None:
        """``b_K W_Q^T``, what the keys' bias adds to every pattern on the senders' side; None without one."""
        if isinstance(self.heads, MergedHeads):
            return self._merged_bias(self.heads.pattern[:, : self.heads.width, -1])
        return self._bias("b_K", lambda: self.pattern.left.mT)

    @property
    def b_M(self) -> Float[Tensor, " width"] | None:
        """``b_V W_O``, what the values' bias adds to every message; None without one."""
        if isinstance(self.heads, MergedHeads):
            has_bias = self.heads.message.shape[1] > self.heads.source_width
            return _read(self.heads.message[self.head, -1]) if has_bias else None
        return self._bias("b_V", lambda: self.message.right)

    def patterns(
        self, x: Float[Tensor, "*tokens width"], side: str = "receiver"
    ) -> Float[Tensor, "*tokens other"]:
        """The pattern of each token, ``x W_P + b_P``; for ``side="sender"``, ``x W_P^T + b_S``.

        A logit is ``scale`` times the dot product with the other token's state, plus a constant over all
        in-edges of the receiver where the other side has a bias.
        """
        receives = checks.choice("side", side, SIDES) == "receiver"
        matrix, bias = (self.pattern, self.b_P) if receives else (self.pattern.T, self.b_S)
        return _applied(x, matrix, bias)

    def messages(self, x: Float[Tensor, "*tokens source_width"]) -> Float[Tensor, "*tokens width"]:
        """The message of each token, ``x W_M + b_M``, in the space of states."""
        if isinstance(self.heads, LatentHeads):
            rows = x.reshape(1, -1, x.shape[-1]).to(self.heads.W_DKV.dtype)
            x = self.heads.latents(rows).detach().reshape(*x.shape[:-1], self.heads.latent_dim)
        return _applied(x, self.message, self.b_M)

    @property
    def reads_as_receiver(self) -> Subspace:
        """All of a receiver's state that this head's logits depend on: the columns of ``W_Q``."""
        return self._reads(self._columns.receiver)

    @property
    def reads_as_sender(self) -> Subspace:
        """All of a sender's state that this head's logits depend on: the columns of ``W_K``."""
        return self._reads(self._columns.sender)

    @property
    def reads_as_value(self) -> Subspace:
        """All of a sender's state that its message depends on: the columns of ``W_V``."""
        return self._reads(self._columns.value)

    @property
    def writes(self) -> Subspace:
        """All that messages can be made of: the rows of ``W_O``. ValueError for heads without one."""
        columns = self._columns.written
        if columns is None:
            raise ValueError("heads without W_O have values but no messages: they write no states")
        return Subspace.spanned_by(columns.mT)

    @property
    def _columns(self) -> _Columns:
        heads, head = self.heads, self.head
        if isinstance(heads, MergedHeads):
            pattern, message = heads.W_P[head], heads.W_M[head]
            return _Columns(pattern, pattern.mT, message, message.mT)
        if isinstance(heads, LatentHeads):
            # what the norms are given: they mix channels, but add no direction
            query = (
                torch.cat([heads.W_UQ[head], heads.W_QR[head]], dim=1) if heads.W_DQ is None else heads.W_DQ
            )
            key = torch.cat([heads.W_DKV, heads.W_KR], dim=1)
            return _Columns(query, key, heads.W_DKV, heads.message_matrix().right[head].mT)
        shared, W_O = head * heads.num_kv_heads // heads.num_heads, heads.W_O
        written = None if W_O is None else W_O[head].mT
        return _Columns(heads.W_Q[head], heads.W_K[shared], heads.W_V[shared], written)

    @property
    def _is_rotary(self) -> bool:
        return getattr(self.heads, "rotary", None) is not None

    def _pattern(self, distance: int | None) -> FactoredMatrix:
        if isinstance(self.heads, MergedHeads):
            matrix = _thin(self.heads.W_P[self.head])
        else:
            matrix = _of_head(self.heads.pattern_matrix(distance), self.head)  # type: ignore[arg-type]
        return self._gained(self._gained(matrix).T).T

    def _gained(self, matrix: FactoredMatrix) -> FactoredMatrix:
        # the rows are the side that reads states
        if self.gain is None:
            return matrix
        return FactoredMatrix(self.gain.to(matrix.left).unsqueeze(1) * matrix.left, matrix.right)

    def _bias(self, name: str, matrix: Callable[[], Tensor]) -> Tensor | None:
        bias = getattr(self.heads, name, None)
        return None if bias is None else _read(grouped(bias, self.heads.num_heads)[self.head]) @ matrix()

    def _merged_bias(self, biases: Tensor) -> Tensor | None:
        # the last row and column of a merged pattern, which are there where a constant 1 carries biases
        if not isinstance(self.heads, MergedHeads) or self.heads.pattern.shape[1] == self.heads.width:
            return None
        bias = _read(biases[self.head])
        return bias if self.gain is None else self.gain.to(bias) * bias

    def _reads(self, columns: Tensor) -> Subspace:
        columns = columns if self.gain is None else self.gain.to(columns).unsqueeze(1) * columns
        return Subspace.spanned_by(columns.mT)


def of(source: Any, head: int, gain: Float[Tensor, " width"] | None = None) -> Circuit:
    """The circuit of one head.

    ``source`` is heads of any form, an attention layer of them, or a ``gnn_attention.model.Block``, whose
    norm's gain is then folded in. ``gain [width]`` is the weight of the norm before a layer of another model:
    see :class:`Circuit`. (A LayerNorm also centres: it reads nothing along the channels' mean.)

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
    if not isinstance(heads, (StandardHeads, MergedHeads, LatentHeads)) or isinstance(heads, LazyHeads):
        expected = f"heads of known widths, a layer of them or a Block, got {type(heads).__name__}"
        raise TypeError(f"source must be {expected}; of another model take foreign.heads_of(model, layer)")
    gain = None if gain is None else _checked_gain(heads, gain)
    return [Circuit(heads, head, gain) for head in range(heads.num_heads)]


def _checked_gain(heads: Heads, gain: Any) -> Tensor:
    if isinstance(heads, LatentHeads) or heads.source_width != heads.width:
        raise ValueError(f"gain cannot be folded into {heads!r}: both sides must read states of one norm")
    if not isinstance(gain, Tensor) or tuple(gain.shape) != (heads.width,) or not gain.is_floating_point():
        raise ValueError(f"gain must be a float tensor [{heads.width}], got {checks.quoted(gain)}")
    return _read(gain)


class _Columns(NamedTuple):
    """Matrices ``[width, some]`` whose columns span what a head reads, and what it writes."""

    receiver: Tensor
    sender: Tensor
    value: Tensor
    written: Tensor | None


def _read(part: Tensor) -> Tensor:
    return part.detach().to(torch.promote_types(part.dtype, torch.float32), copy=True)


def _of_head(matrices: FactoredMatrix, head: int) -> FactoredMatrix:
    return FactoredMatrix(_read(matrices.left[head]), _read(matrices.right[head]))


def _thin(matrix: Tensor) -> FactoredMatrix:
    # two factors as thin as the rank allows, evenly scaled
    u, values, vh = torch.linalg.svd(_read(matrix), full_matrices=False)
    rank = max(int((values > rank_tolerance(matrix) * values[:1]).sum()), 1)
    root = values[:rank].sqrt()
    return FactoredMatrix(u[:, :rank] * root, root.unsqueeze(1) * vh[:rank])


def _applied(x: Tensor, matrix: FactoredMatrix, bias: Tensor | None) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1:] != matrix.shape[:1]:
        raise ValueError(f"x must be states [*, {matrix.shape[0]}] of floats, got {checks.quoted(x)}")
    result = x.to(matrix.left) @ matrix.left @ matrix.right
    return result if bias is None else result + bias
