"""A subspace of the space of states: what a head reads or writes, to project on, edit and compare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

import torch

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edge_softmax import accumulation_dtype

States = Float[Tensor, "*tokens width"]


@dataclass(frozen=True, eq=False, repr=False)
class Subspace:
    """``dim`` orthogonal directions in a space of ``width`` channels: the orthonormal columns of ``basis``.

    :meth:`spanned_by` makes one of any directions. ``U + V`` holds all sums of a vector of each. States are
    rows, ``[*, width]``. ValueError for a basis whose columns are not orthonormal. Seeds S1.24 and S1.25.

    >>> plane = Subspace.spanned_by(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]).double())
    >>> word, below = torch.tensor([[3.0, 4.0, 5.0], [3.0, 4.0, 0.0]]).double()
    >>> plane, torch.allclose(plane.project(word), below, rtol=0, atol=1e-12)
    (Subspace(dim 2 of 3), True)
    """

    basis: Float[Tensor, "width dim"]

    def __post_init__(self) -> None:
        if not _is_float(self.basis) or self.basis.dim() != 2 or not self._is_orthonormal():
            expected = "a float tensor [width, dim] with orthonormal columns, as Subspace.spanned_by makes"
            raise ValueError(f"basis must be {expected}, got {quote(self.basis)}")

    @classmethod
    def spanned_by(cls, directions: Float[Tensor, "*n width"]) -> Subspace:
        """The span of the rows of ``directions`` (a single vector: a line), by singular value decomposition.

        Singular values up to ``eps * max(shape)`` times the largest count as 0, as in
        ``torch.linalg.matrix_rank``, but at most those up to ``sqrt(eps)`` times it. Half inputs give
        a float32 basis. ValueError for anything but finite directions.
        """
        if not _is_float(directions) or directions.dim() not in (1, 2):
            raise ValueError(
                f"directions must be a float tensor [count, width] or [width], got {quote(directions)}"
            )
        if not bool(directions.isfinite().all()):
            raise ValueError("directions must be finite, got NaN or an infinity")
        rows = directions.detach().reshape(-1, directions.shape[-1])
        eps = float(torch.finfo(rows.dtype).eps)
        tolerance = min(eps * max(rows.shape), math.sqrt(eps))
        _, values, right = torch.linalg.svd(rows.to(accumulation_dtype(rows.dtype)), full_matrices=False)
        return cls(right[values > tolerance * values[:1]].mT.contiguous())

    @property
    def dim(self) -> int:
        """How many directions."""
        return self.basis.shape[1]

    @property
    def width(self) -> int:
        """Channels of a state."""
        return self.basis.shape[0]

    def __repr__(self) -> str:
        return f"Subspace(dim {self.dim} of {self.width})"

    def __add__(self, other: Subspace) -> Subspace:
        """All sums of a vector of each. ValueError for subspaces of different spaces."""
        if not isinstance(other, Subspace):
            return NotImplemented
        self._check_same_space(other)
        return Subspace.spanned_by(torch.cat([self.basis.mT, other.basis.mT.to(self.basis)]))

    def projector(self) -> Float[Tensor, "width width"]:
        """The matrix ``B B^T``: states times it are projected. Of size width x width."""
        return self.basis @ self.basis.mT

    def coordinates(self, x: States) -> Float[Tensor, "*tokens dim"]:
        """Down: ``x B``, a number for each direction of the basis. ValueError for states of another width."""
        self._check_states("x", x)
        return x @ self.basis.to(x)

    def project(self, x: States) -> States:
        """Down and up again: the part of each state that lies in the subspace."""
        return self.coordinates(x) @ self.basis.to(x).mT

    def reject(self, x: States) -> States:
        """The rest: what :meth:`project` leaves of each state, at right angles to the subspace."""
        return x - self.project(x)

    def edit(self, x: States, direction: Float[Tensor, " width"], value: float | Tensor) -> States:
        """Set the coordinate along a line (seed S1.25): ``x + (value - x . u) u``.

        ``u`` is ``direction`` within the subspace, of length 1; ``value`` one number, or one for each state.
        ValueError for a direction at right angles to the subspace, or values that do not fit.
        """
        self._check_states("x", x)
        self._check_states("direction", direction)
        if direction.dim() != 1:
            raise ValueError(f"direction must be one vector [{self.width}], got {list(direction.shape)}")
        inside = self.project(direction)
        length, whole = inside.norm(), direction.norm()
        if not bool(length > torch.finfo(direction.dtype).eps ** 0.5 * whole):
            raise ValueError(
                "direction must have a part in the subspace, "
                f"got one of length {whole:.3g} with {length:.3g} in it"
            )
        line: Tensor = (inside / length).to(x)
        value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        if value.dim() and value.shape != x.shape[:-1]:
            states = list(x.shape[:-1])
            raise ValueError(f"value must be one number or {states} numbers, got {list(value.shape)}")
        edited: Tensor = x + (value - x @ line).unsqueeze(-1) * line
        return edited

    def overlap(self, other: Subspace) -> float:
        """The mean squared cosine of their principal angles: 1 if one contains the other, 0 if orthogonal.

        Two random subspaces have ``larger dim / width`` on average; a subspace without directions shares 0.
        """
        self._check_same_space(other)
        wide = torch.promote_types(self.basis.dtype, other.basis.dtype)
        cosines = self.basis.to(wide).mT @ other.basis.to(self.basis.device, wide)
        return float(cosines.square().sum() / max(min(cosines.shape), 1))

    def _is_orthonormal(self) -> bool:
        wide = self.basis.detach().to(accumulation_dtype(self.basis.dtype))
        error = wide.mT @ wide - torch.eye(self.dim).to(wide)
        return bool((error.abs() <= torch.finfo(self.basis.dtype).eps ** 0.5).all())

    def _check_same_space(self, other: Subspace) -> None:
        if self.width != other.width:
            raise ValueError(f"two subspaces must be of one space, got widths {self.width} and {other.width}")

    def _check_states(self, name: str, x: object) -> None:
        if not _is_float(x) or x.shape[-1:] != (self.width,):
            raise ValueError(f"{name} must be floats [*, {self.width}], got {quote(x)}")


def _is_float(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point()
