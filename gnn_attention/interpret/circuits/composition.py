"""Measure how much of an earlier head's output a later head reads."""

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.interpret.circuits.head import Circuit, each
from gnn_attention.model import LanguageModel

KINDS = ("q", "k", "v")


def composition(earlier: Circuit, later: Circuit, kind: str, distance: int | None = None) -> float:
    """Return how much of an earlier head's output a later head reads: ``||A B|| / (||A|| ||B||)``.

    The norms are Frobenius norms, and ``A`` is ``W_M`` of the earlier head. The later head reads
    its receiver for ``kind="q"`` (``B = W_P``). It reads its sender for ``"k"`` (``B = W_P^T``, as
    induction heads read previous-token heads) and for ``"v"`` (``B = W_M``, the message). A rotary
    later head needs a ``distance`` for q and k. Unrelated heads score about ``width ** -0.5``. If
    one head is rotated at random, this is exactly the root mean square of the scores.

    Raises ValueError for an unknown kind or heads of different widths, TypeError unless both are
    circuits.

    Sources: Elhage et al. 2021, "Two-layer attention-only transformers", the footnote on measuring
    composition; TransformerLens' ``all_composition_scores``.
    """
    kind = checks.choice("kind", kind, KINDS)
    for name, circuit in (("earlier", earlier), ("later", later)):
        checks.instance(name, circuit, Circuit)
    reader = _compress(_select_reader(later, kind, distance).T)
    return float(_product_norm(_compress(earlier.message), reader))


def compositions(
    model: LanguageModel, kind: str, relative: bool = False
) -> Float[Tensor, "later_layer later_head earlier_layer earlier_head"]:
    """Return the :func:`composition` of each head with each head of an earlier layer.

    All other entries are 0. The gains of the norms before the layers are folded into the heads.
    ``relative=True`` divides by ``width ** -0.5``, so that unrelated heads score about 1.
    """
    kind = checks.choice("kind", kind, KINDS)
    circuits = [each(block) for block in checks.instance("model", model, LanguageModel).blocks]
    writers = [[_compress(head.message) for head in heads] for heads in circuits]
    readers = [[_compress(_select_reader(head, kind).T) for head in heads] for heads in circuits]
    scores = writers[0][0].new_zeros([len(circuits), len(circuits[0])] * 2)
    for later in range(len(circuits)):
        for earlier in range(later):
            norms = [[_product_norm(A, B) for A in writers[earlier]] for B in readers[later]]
            scores[later, :, earlier] = torch.tensor(norms)
    return scores * circuits[0][0].message.shape[1] ** 0.5 if relative else scores


def _select_reader(later: Circuit, kind: str, distance: int | None = None) -> FactoredMatrix:
    if kind == "v":
        return later.message
    pattern = later.pattern if distance is None else later.pattern_at(distance)
    return pattern if kind == "q" else pattern.T


def _compress(matrix: FactoredMatrix) -> Float[Tensor, "rank width"]:
    # left = Q R, and Q changes no norm, so the few rows of ``R @ right`` give the same norms.
    rows: Tensor = torch.linalg.qr(matrix.left, mode="r").R @ matrix.right
    return rows / rows.norm() if bool(rows.any()) else rows


def _product_norm(writer: Tensor, reader: Tensor) -> Tensor:
    if writer.shape[1] != reader.shape[1]:
        raise ValueError(
            f"the earlier head writes states of width {writer.shape[1]}, the later reads vectors of width "
            f"{reader.shape[1]}: use heads of one residual stream"
        )
    norm: Tensor = (writer @ reader.to(writer).mT).norm()
    return norm
