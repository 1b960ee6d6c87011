"""Composition of heads: how much a later head reads of what an earlier one writes."""

from __future__ import annotations

import itertools

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.interpret.circuits.head import Circuit, each
from gnn_attention.model import LanguageModel

KINDS = ("q", "k", "v")


def composition(earlier: Circuit, later: Circuit, kind: str, distance: int | None = None) -> float:
    """How much of the earlier head's output the later reads: ``||A B|| / (||A|| ||B||)``, Frobenius norms.

    ``A = W_M`` of the earlier head; ``B`` is the later head's ``W_P`` for ``kind="q"`` (read by its
    receiver), ``W_P^T`` for ``"k"`` (by its sender: what an induction head needs of a previous-token head),
    ``W_M`` for ``"v"`` (passed on). A rotary later head needs a ``distance`` for q and k. If the space
    between is rotated at random, the root of the mean square is exactly ``width ** -0.5``: compare with that.

    Raises ValueError for another kind or heads that read no states of that width.

    Sources: Elhage et al. 2021, "Two-layer attention-only transformers", the footnote on measuring
    composition; TransformerLens' ``all_composition_scores``.
    """
    checks.choice("kind", kind, KINDS)
    read = later.message
    if kind != "v":
        pattern = later.pattern if distance is None else later.pattern_at(distance)
        read = pattern if kind == "q" else pattern.T
    written = earlier.message
    if written.shape[1] != read.shape[0]:
        raise ValueError(
            f"the earlier head writes states of width {written.shape[1]}, "
            f"the later reads vectors of width {read.shape[0]}: take heads of one residual stream"
        )
    product = FactoredMatrix(written.left @ (written.right @ read.left.to(written.right)), read.right)
    sizes = written.norm() * read.norm()
    return float(product.norm() / sizes) if sizes else 0.0


def compositions(
    model: LanguageModel, kind: str, relative: bool = False
) -> Float[Tensor, "later_layer later_head earlier_layer earlier_head"]:
    """:func:`composition` of all pairs of heads, ``[later layer, head, earlier layer, head]``; else 0.

    The gains of a ``gnn_attention.model.LanguageModel`` are folded in. ``relative=True`` gives them in units
    of ``width ** -0.5``: 1 is what unrelated heads have.
    """
    kind = checks.choice("kind", kind, KINDS)
    heads = [each(block) for block in checks.instance("model", model, LanguageModel).blocks]
    shape, dtype = (len(heads), len(heads[0])), heads[0][0].message.left.dtype
    scores = torch.zeros(*shape, *shape, dtype=dtype)
    for after, before in itertools.combinations(reversed(range(len(heads))), 2):
        pairs = [[composition(one, other, kind) for one in heads[before]] for other in heads[after]]
        scores[after, :, before] = torch.tensor(pairs, dtype=dtype)
    return scores * heads[0][0].message.shape[1] ** 0.5 if relative else scores
