"""The product of two thin matrices, stored as its factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from gnn_attention._support.shapes import Float, Tensor

__all__ = ["FactoredMatrix"]


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """The matrix ``left @ right``, ``[..., m, r] @ [..., r, n]``, which only :meth:`full` computes.

    Each head has ``W_P = W_Q W_K^T`` with r = head_dim and ``W_M = W_V W_O`` with r = value_dim.

    Sources: S0.5, S1.23 of docs/sources.md; Elhage et al. 2021; TransformerLens's FactoredMatrix.

    >>> m = FactoredMatrix(torch.ones(4, 1), torch.ones(1, 4))
    >>> m.shape, [round(v, 4) for v in m.singular_values().tolist()], round(m.norm().item(), 4)
    (torch.Size([4, 4]), [4.0], 4.0)
    """

    left: Float[Tensor, "*heads m r"]
    right: Float[Tensor, "*heads r n"]

    def __post_init__(self) -> None:
        left, right = list(self.left.shape), list(self.right.shape)
        if len(left) < 2 or left[:-2] != right[:-2] or left[-1:] != right[-2:-1]:
            raise ValueError(f"left must be [..., m, r] and right [..., r, n], got {left} and {right}")

    @property
    def shape(self) -> torch.Size:
        """Shape of the product."""
        return torch.Size([*self.left.shape[:-1], self.right.shape[-1]])

    @property
    def T(self) -> FactoredMatrix:
        """The transpose, in factored form."""
        return FactoredMatrix(self.right.mT, self.left.mT)

    def full(self) -> Float[Tensor, "*heads m n"]:
        """Compute the product."""
        return self.left @ self.right

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the thin singular value decomposition ``U, S, Vh`` in time O((m + n) r^2)."""
        q_left, r_left = torch.linalg.qr(self.left)
        q_right, r_right = torch.linalg.qr(self.right.mT)
        u, s, vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
        return q_left @ u, s, vh @ q_right.mT

    def singular_values(self) -> Float[Tensor, "*heads r"]:
        """Return the ``min(m, n, r)`` largest singular values in descending order; all others are 0."""
        return self.svd()[1]

    def eigenvalues(self) -> Tensor:
        """Return the r eigenvalues of ``right @ left``, as complex numbers; all others are 0."""
        if self.shape[-1] != self.shape[-2]:
            raise ValueError(f"only a square matrix has eigenvalues, got {list(self.shape)}")
        return cast("Tensor", torch.linalg.eigvals(self.right @ self.left))

    def norm(self) -> Float[Tensor, "*heads"]:
        """Compute the Frobenius norm from the r x r Gram matrices."""
        gram = (self.left.mT @ self.left) * (self.right @ self.right.mT)
        return gram.sum((-2, -1)).clamp(min=0).sqrt()

    def rank(self, tolerance: float = 1e-6) -> Tensor:
        """Count the singular values above ``tolerance`` times the largest."""
        s = self.singular_values()
        return (s > tolerance * s[..., :1]).sum(-1)
