"""Reading heads: what each looks for and says, in which subspaces, along which edges, and who reads what another wrote.

* :func:`of`, :func:`each`: the :class:`Circuit` of a head, its pattern and message matrices kept factored, the
  :class:`Subspace` it reads and the one it writes;
* :func:`split`, :func:`pattern_lengths`: a logit as length times length times cosine;
* :func:`composition`, :func:`compositions`: how much a later head reads of what an earlier one writes;
* :func:`copying_score`, :func:`effect_on_vocabulary`, :func:`top_tokens`: heads between embedding and unembedding;
* :func:`match`, :func:`detect`, :data:`TEMPLATES`: the job of a head as a graph. The scores of the two best known jobs, on random
  tokens, are ``model.previous_token_scores`` and ``model.induction_scores``.

>>> from gnn_attention import circuits, model as lm
>>> trained, vocabulary = lm.load_trained()
>>> head = circuits.of(trained.blocks[1], 3)
>>> head.message.rank().item(), head.reads_as_sender
(32, Subspace(dim 32 of 128))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edges import accumulation_dtype, logit, per_query_head
from gnn_attention.graph import TokenGraph, edge_list
from gnn_attention.heads import StandardHeads
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.heads.model_space import SIDES
from gnn_attention.interpret.circuits.head import Circuit, each, of
from gnn_attention.interpret.circuits.subspace import Subspace
from gnn_attention.interpret.circuits.templates import TEMPLATES, detect, duplicate_token, induction, match, previous_token
from gnn_attention.interpret.circuits.vocabulary import (
    TopTokens,
    VocabularyEffect,
    copying,
    copying_score,
    copying_scores,
    effect_on_vocabulary,
    full_circuit,
    neuron_patterns,
    top_tokens,
)
from gnn_attention.interpret.trace import pairs
from gnn_attention.interpret.trace.layer import LayerTrace
from gnn_attention.model import LanguageModel

__all__ = [
    "TEMPLATES",
    "Circuit",
    "PatternLengths",
    "Split",
    "Subspace",
    "TopTokens",
    "VocabularyEffect",
    "composition",
    "compositions",
    "copying",
    "copying_score",
    "copying_scores",
    "detect",
    "duplicate_token",
    "each",
    "effect_on_vocabulary",
    "full_circuit",
    "induction",
    "match",
    "neuron_patterns",
    "of",
    "pattern_lengths",
    "previous_token",
    "split",
    "top_tokens",
]

NUMBERS_AT_ONCE = 2**22  # gathered ends of edges: 16 MB in float32
KINDS = ("q", "k", "v")


# -- how long, and in which direction ---------------------------------------------------------------------------------


class Split(NamedTuple):
    """The three factors of a dot product: ``pattern . state = |pattern| |state| cos``, one of each for every edge."""

    length_of_pattern: Float[Tensor, "..."]
    length_of_state: Float[Tensor, "..."]
    cosine: Float[Tensor, "..."]

    @property
    def product(self) -> Float[Tensor, "..."]:
        """The dot product again: the logit before the scale."""
        return self.length_of_pattern * self.length_of_state * self.cosine


def split(patterns: Float[Tensor, "... width"], states: Float[Tensor, "... width"], edges: Any = None) -> Split:
    """How much of a logit is the length of the pattern, the length of the state, and their agreement (seed S1.16).

    Without ``edges``, patterns and states vector by vector: ``[..., width]``, broadcast. With them,
    ``patterns [..., dst, width]`` and ``states [..., src, width]`` give numbers ``[..., E]``; edges are a :class:`TokenGraph`,
    ``[2, E]``, or a list of ``(src, dst)``. The vectors of both ends are those of ``FactoredHeads``: ``form.receive(x)`` and
    ``form.send(x)[0]``. The cosine with a vector of length 0 is 0.

    Raises ValueError, TypeError or IndexError for vectors or edges that do not fit.

    >>> parts = split(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 3.0]]), [(0, 0), (1, 0), (1, 1)])
    >>> parts.length_of_pattern.tolist(), parts.length_of_state.tolist(), [round(cos, 4) for cos in parts.cosine.tolist()]
    ([5.0, 5.0, 2.0], [1.0, 3.0, 3.0], [0.6, 0.8, 1.0])
    """
    patterns, states = _vectors(patterns, states)
    lengths, sizes = patterns.norm(dim=-1), states.norm(dim=-1)
    if edges is None:
        _check_broadcast(patterns, states, 1)
        products = logit(patterns, states, 1.0)
    else:
        src, dst = _pairs_of(edges, patterns, states)
        products = _along(patterns, states, src, dst)
        lengths, sizes = lengths[..., dst], sizes[..., src]
    bound = lengths * sizes
    cosine = torch.where(bound > 0, products / bound, 0.0)
    return Split(lengths.expand(cosine.shape), sizes.expand(cosine.shape), cosine)


class PatternLengths(NamedTuple):
    """``|P|`` of every head and token ``[..., heads, tokens]``, of the receivers' patterns and of the senders'."""

    receiver: Float[Tensor, "*batch heads dst"]
    sender: Float[Tensor, "*batch heads src"]


def pattern_lengths(source: Any, x: Any = None) -> PatternLengths:
    """How long the patterns of tokens are, for each head: ``|x W_P + b_P|``, and on the senders' side ``|x W_P^T + b_S|``.

    A long pattern makes all logits of its token large, and the softmax sharp (seeds S1.15, S1.16).

    Args:
        source: heads or a layer of them, with ``x``; or a layer of a run (``trace.record(...).layers[0]``), without.
        x: what the layer is given, ``[T, width]`` or ``[B, T, width]``, or a pair ``(x_src, x_dst)``.

    Raises TypeError or ValueError for another source, and as :class:`Circuit` does where there is no pattern (rotary, qk_norm).

    >>> heads = StandardHeads.from_arrays(torch.eye(2)[None] * 3, torch.eye(2)[None], torch.eye(2)[None])
    >>> pattern_lengths(heads, torch.tensor([[1.0, 0.0], [0.0, 2.0]])).receiver.tolist()
    [[3.0, 6.0]]
    """
    if isinstance(source, LayerTrace):
        return _lengths_in(source)
    if x is None:
        raise TypeError("x must be given with heads or a layer: the states that the layer is given")
    x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
    circuits = each(source)
    ends = zip((x_dst, x_src), SIDES, strict=True)
    return PatternLengths(*(torch.stack([own.patterns(end, side).norm(dim=-1) for own in circuits], -2) for end, side in ends))


# -- who reads what another wrote -------------------------------------------------------------------------------------


def composition(earlier: Circuit, later: Circuit, kind: str, distance: int | None = None) -> float:
    """How much of what the earlier head writes the later one reads, ``||A B|| / (||A|| ||B||)`` in Frobenius norms, 0 to 1.

    ``A = W_M`` of the earlier head; ``B`` is the later head's ``W_P`` for ``kind="q"`` (the receiver heard it), ``W_P^T`` for
    ``"k"`` (the sender heard it: what an induction head needs of a previous-token head), ``W_M`` for ``"v"`` (it is passed on). A
    rotary later head needs a ``distance`` for q and k. If the space between is turned at random, the root of the mean square is
    exactly ``width ** -0.5``, whatever the heads: compare with that.

    Raises ValueError for another kind or heads that read no states of that width, TypeError for no circuits.

    Source: Elhage et al. 2021, "Two-layer attention-only transformers", the footnote on measuring composition; TransformerLens'
    ``all_composition_scores``.
    """
    kind = checks.choice("kind", kind, KINDS)
    for name, circuit in (("earlier", earlier), ("later", later)):
        if not isinstance(circuit, Circuit):
            raise TypeError(f"{name} must be a Circuit, got {quoted(circuit)}; circuits.of(heads, head) makes one")
    return float(_meeting(_unit_rows(earlier.message), _unit_rows(_reader(later, kind, distance).T)))


def compositions(
    layers: LanguageModel | Sequence[Sequence[Circuit]], kind: str, distance: int | None = None, relative: bool = False
) -> Float[Tensor, "later_layer later_head earlier_layer earlier_head"]:
    """:func:`composition` of all pairs, ``[later layer, head, earlier layer, head]``; 0 unless one layer is before the other.

    ``layers`` is a language model (gains are folded in), or ``[each(heads) for heads in ...]`` in the order of any model.
    ``relative=True`` gives them in units of ``width ** -0.5``: 1 is what unrelated heads have.

    >>> from gnn_attention import model as lm
    >>> trained, _ = lm.load_trained()
    >>> compositions(trained, "k").shape
    torch.Size([2, 4, 2, 4])
    """
    kind = checks.choice("kind", kind, KINDS)
    rows = [each(block) for block in layers.blocks] if isinstance(layers, LanguageModel) else [list(row) for row in layers]
    counts = {len(row) for row in rows}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"layers must be one or more, all with one number of heads, got {[len(row) for row in rows]}")
    written = [[_unit_rows(head.message) for head in row] for row in rows]
    read = [[_unit_rows(_reader(head, kind, distance).T) for head in row] for row in rows]
    result = written[0][0].new_zeros(len(rows), len(rows[0]), len(rows), len(rows[0]))
    for before, after in ((a, b) for b in range(len(rows)) for a in range(b)):
        result[after, :, before] = torch.stack([torch.stack([_meeting(A, B) for A in written[before]]) for B in read[after]])
    return result * rows[0][0].message.shape[1] ** 0.5 if relative else result


# -- inside -----------------------------------------------------------------------------------------------------------


def _vectors(*vectors: Any) -> list[Tensor]:
    """Both in float32 or better; ValueError unless they are floats of one width."""
    if any(not isinstance(part, Tensor) or not part.is_floating_point() or not part.dim() for part in vectors):
        got = ", ".join(str(part.dtype) if isinstance(part, Tensor) else type(part).__name__ for part in vectors)
        raise TypeError(f"patterns and states must be float tensors [..., width], got {got}")
    if vectors[0].shape[-1] != vectors[1].shape[-1]:
        shapes = " and ".join(str(list(part.shape)) for part in vectors)
        raise ValueError(f"patterns and states must be of one width to be compared, got {shapes}")
    wide = accumulation_dtype(torch.promote_types(vectors[0].dtype, vectors[1].dtype))
    return [part.to(wide) for part in vectors]


def _check_broadcast(patterns: Tensor, states: Tensor, own: int) -> None:
    """ValueError unless both broadcast, but for their last ``own`` axes."""
    sizes = zip(reversed(patterns.shape[:-own]), reversed(states.shape[:-own]), strict=False)
    if any(n != m and 1 not in (n, m) for n, m in sizes):
        raise ValueError(f"patterns and states must broadcast, got {list(patterns.shape)} and {list(states.shape)}")


def _pairs_of(edges: Any, patterns: Tensor, states: Tensor) -> Tensor:
    if patterns.dim() < 2 or states.dim() < 2:
        raise ValueError(
            f"with edges, patterns must be [..., dst, width] and states [..., src, width], got {list(patterns.shape)} "
            f"and {list(states.shape)}"
        )
    _check_broadcast(patterns, states, 2)
    num_dst, num_src = patterns.shape[-2], states.shape[-2]
    if isinstance(edges, TokenGraph):
        if (edges.num_dst, edges.num_src) != (num_dst, num_src):
            raise ValueError(
                f"edges must be over {num_src} senders and {num_dst} receivers, as the vectors are, got {quoted(edges)}"
            )
        return edges.edges_on(patterns.device)
    return edge_list.checked(pairs.as_pairs(edges), num_dst, num_src).to(patterns.device)


def _along(patterns: Tensor, states: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """The dot products of the ends of edges, some edges at a time."""
    one = max(patterns[..., :1, :].numel(), states[..., :1, :].numel(), 1)
    step = max(1, NUMBERS_AT_ONCE // one)
    ends = zip(torch.split(src, step), torch.split(dst, step), strict=True)
    return torch.cat([logit(patterns[..., to, :], states[..., at, :], 1.0) for at, to in ends], dim=-1)


@torch.no_grad()
def _lengths_in(call: LayerTrace) -> PatternLengths:
    """From the queries and keys of a run, which hold the biases."""
    if not isinstance(call.heads, StandardHeads):
        raise TypeError(
            f"source must be a run of StandardHeads, got {type(call.heads).__name__}: give its heads and their states x"
        )
    keys, matrices = per_query_head(call.k, call.q.shape[1]), [own.pattern for own in each(call.heads)]
    receiver = [(call.q[:, h].to(own.right) @ own.right).norm(dim=-1) for h, own in enumerate(matrices)]
    sender = [(keys[:, h].to(own.left) @ own.left.mT).norm(dim=-1) for h, own in enumerate(matrices)]
    return PatternLengths(torch.stack(receiver, dim=1), torch.stack(sender, dim=1))


def _reader(later: Circuit, kind: str, distance: int | None) -> FactoredMatrix:
    """The matrix whose rows read states: of a receiver, of a sender, or of what is passed on."""
    if kind == "v":
        return later.message
    pattern = later.pattern if distance is None else later.pattern_at(distance)
    return pattern if kind == "q" else pattern.T


def _unit_rows(matrix: FactoredMatrix) -> Float[Tensor, "few width"]:
    """As few rows as the matrix has rank, with its norms against everything on their right, scaled to norm 1: ``R right``.

    ``left = Q R`` with orthonormal columns of Q, which change no norm.
    """
    rows: Tensor = torch.linalg.qr(matrix.left, mode="r").R @ matrix.right
    norm = rows.norm()
    return rows / norm if bool(norm > 0) else rows


def _meeting(written: Tensor, read: Tensor) -> Tensor:
    if written.shape[1] != read.shape[1]:
        raise ValueError(
            f"the earlier head writes states of width {written.shape[1]}, the later reads vectors of width {read.shape[1]}: "
            "composition is between heads that read what others write (latent heads read latents)"
        )
    norm: Tensor = (written @ read.to(written).mT).norm()
    return norm
