"""Composition of heads: how much a later head reads of what an earlier one writes."""

from __future__ import annotations

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

    Raises ValueError for another kind or heads that read no states of that width, TypeError for no circuits.

    Sources: Elhage et al. 2021, "Two-layer attention-only transformers", the footnote on measuring
    composition; TransformerLens' ``all_composition_scores``.
    """
    kind = checks.choice("kind", kind, KINDS)
    for name, circuit in (("earlier", earlier), ("later", later)):
        checks.instance(name, circuit, Circuit)
    return float(_product_norm(_unit_rows(earlier.message), _unit_rows(_reader(later, kind, distance).T)))


def compositions(
    model: LanguageModel, kind: str, relative: bool = False
) -> Float[Tensor, "later_layer later_head earlier_layer earlier_head"]:
    """:func:`composition` of all pairs of heads, ``[later layer, head, earlier layer, head]``; else 0.

    The gains of a ``gnn_attention.model.LanguageModel`` are folded in. ``relative=True`` gives them in units
    of ``width ** -0.5``: 1 is what unrelated heads have.
    """
    kind = checks.choice("kind", kind, KINDS)
    rows = [each(block) for block in checks.instance("model", model, LanguageModel).blocks]
    written = [[_unit_rows(head.message) for head in row] for row in rows]
    read = [[_unit_rows(_reader(head, kind, None).T) for head in row] for row in rows]
    scores = written[0][0].new_zeros(len(rows), len(rows[0]), len(rows), len(rows[0]))
    for later in range(len(rows)):
        for earlier in range(later):
            pairs = [[_product_norm(A, B) for A in written[earlier]] for B in read[later]]
            scores[later, :, earlier] = torch.tensor(pairs)
    return scores * rows[0][0].message.shape[1] ** 0.5 if relative else scores


def _reader(later: Circuit, kind: str, distance: int | None) -> FactoredMatrix:
    if kind == "v":
        return later.message
    pattern = later.pattern if distance is None else later.pattern_at(distance)
    return pattern if kind == "q" else pattern.T


def _unit_rows(matrix: FactoredMatrix) -> Float[Tensor, "few width"]:
    # With left = Q R, the rows R right are as few as the rank, and Q changes no norm.
    rows: Tensor = torch.linalg.qr(matrix.left, mode="r").R @ matrix.right
    return rows / rows.norm() if bool(rows.any()) else rows


def _product_norm(written: Tensor, read: Tensor) -> Tensor:
    if written.shape[1] != read.shape[1]:
        raise ValueError(
            f"the earlier head writes states of width {written.shape[1]}, "
            f"the later reads vectors of width {read.shape[1]}: take heads of one residual stream"
        )
    norm: Tensor = (written @ read.to(written).mT).norm()
    return norm
