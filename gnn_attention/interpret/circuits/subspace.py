"""Subspaces of states, such as the subspace that a head reads or writes."""

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
    """A subspace of ``width`` channels, spanned by the ``dim`` orthonormal columns of ``basis``.

    :meth:`spanned_by` computes the span of any vectors. ``U + V`` contains all sums of a vector in
    U and a vector in V. States are rows, ``[*, width]``. Raises ValueError for a basis whose
    columns are not orthonormal. Sources S1.24 and S1.25 of docs/sources.md.

    >>> plane = Subspace.spanned_by(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]).double())
    >>> state, projection = torch.tensor([[3.0, 4.0, 5.0], [3.0, 4.0, 0.0]]).double()
    >>> plane, torch.allclose(plane.project(state), projection, rtol=0, atol=1e-12)
    (Subspace(dim 2 of 3), True)
    """

    basis: Float[Tensor, "width dim"]

    def __post_init__(self) -> None:
        if not _is_float(self.basis) or self.basis.dim() != 2 or not self._is_orthonormal():
            raise ValueError(f"basis must be orthonormal columns, see spanned_by, got {quote(self.basis)}")

    @classmethod
    def spanned_by(cls, directions: Float[Tensor, "*n width"]) -> "Subspace":
        """Return the span of one vector or of several rows, by singular value decomposition.

        Singular values up to ``min(eps * max(shape), sqrt(eps))`` times the largest one count as 0.
        Unless ``sqrt(eps)`` is smaller, this is the rule of ``torch.linalg.matrix_rank``. For half
        inputs the basis is in float32. Raises ValueError for directions that are not finite floats.
        """
        if not _is_float(directions) or directions.dim() not in (1, 2):
            raise ValueError(f"directions must be floats [count, width] or [width], got {quote(directions)}")
        if not bool(directions.isfinite().all()):
            raise ValueError("directions must be finite, got NaN or an infinity")
        rows = directions.detach().reshape(-1, directions.shape[-1])
        eps = float(torch.finfo(rows.dtype).eps)
        tolerance = min(eps * max(rows.shape), math.sqrt(eps))
        _, S, Vh = torch.linalg.svd(rows.to(accumulation_dtype(rows.dtype)), full_matrices=False)
        return cls(Vh[tolerance * S[:1] < S].mT.contiguous())

    @property
    def dim(self) -> int:
        """Number of dimensions of the subspace."""
        return self.basis.shape[1]

    @property
    def width(self) -> int:
        """Number of channels of a state."""
        return self.basis.shape[0]

    def __repr__(self) -> str:
        return f"Subspace(dim {self.dim} of {self.width})"

    def __add__(self, other: "Subspace") -> "Subspace":
        """Return the subspace of all sums. Raises ValueError for subspaces of different widths."""
        if not isinstance(other, Subspace):
            return NotImplemented
        self._check_same_space(other)
        return Subspace.spanned_by(torch.cat([self.basis.mT, other.basis.mT.to(self.basis)]))

    def projector(self) -> Float[Tensor, "width width"]:
        """Return ``P = B B^T [width, width]``, so that ``project(x)`` is ``x @ P``."""
        return self.basis @ self.basis.mT

    def coordinates(self, x: States) -> Float[Tensor, "*tokens dim"]:
        """Return ``x B``, a coordinate for each basis vector. Raises ValueError for another width."""
        self._check_states("x", x)
        return x @ self.basis.to(x)

    def project(self, x: States) -> States:
        """Return the orthogonal projection of each state onto the subspace: ``x B B^T``."""
        return self.coordinates(x) @ self.basis.to(x).mT

    def reject(self, x: States) -> States:
        """Return the component of each state orthogonal to the subspace: ``x - x B B^T``."""
        return x - self.project(x)

    def edit(self, x: States, direction: Float[Tensor, " width"], value: float | Tensor) -> States:
        """Set the coordinate along a direction (seed S1.25): ``x + (value - x . u) u``.

        ``u`` is the projection of ``direction`` onto the subspace, scaled to length 1. ``value`` is
        a scalar, or one value for each state. Raises ValueError for a direction orthogonal to the
        subspace, or for values of another shape.
        """
        self._check_states("x", x)
        self._check_states("direction", direction)
        if direction.dim() != 1:
            raise ValueError(f"direction must be one vector [{self.width}], got {list(direction.shape)}")
        projection = self.project(direction)
        total_norm, norm = direction.norm(), projection.norm()
        if not bool(norm > torch.finfo(direction.dtype).eps ** 0.5 * total_norm):
            norms = f"{total_norm:.3g}, {norm:.3g} in it"
            raise ValueError(f"direction must not be orthogonal to the subspace, got length {norms}")
        unit: Tensor = (projection / norm).to(x)
        value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        if value.dim() and value.shape != x.shape[:-1]:
            raise ValueError(f"value must be a scalar or {list(x.shape[:-1])}, got {list(value.shape)}")
        edited: Tensor = x + (value - x @ unit).unsqueeze(-1) * unit
        return edited

    def overlap(self, other: "Subspace") -> float:
        """Return the mean squared cosine of the principal angles between two subspaces.

        The result is 1 if one subspace contains the other, and 0 if they are orthogonal or one has
        ``dim`` 0. For random subspaces it is ``max(dim, other.dim) / width`` on average.
        """
        self._check_same_space(other)
        dtype = torch.promote_types(self.basis.dtype, other.basis.dtype)
        cosines = self.basis.to(dtype).mT @ other.basis.to(self.basis.device, dtype)
        return float(cosines.square().sum() / max(min(cosines.shape), 1))

    def _is_orthonormal(self) -> bool:
        basis = self.basis.detach().to(accumulation_dtype(self.basis.dtype))
        error = basis.mT @ basis - torch.eye(self.dim).to(basis)
        return bool((error.abs() <= torch.finfo(self.basis.dtype).eps ** 0.5).all())

    def _check_same_space(self, other: "Subspace") -> None:
        if self.width != other.width:
            raise ValueError(f"subspaces must have the same width, got {self.width} and {other.width}")

    def _check_states(self, name: str, x: object) -> None:
        if not _is_float(x) or x.shape[-1:] != (self.width,):
            raise ValueError(f"{name} must be a float tensor [*, {self.width}], got {quote(x)}")


def _is_float(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point()
