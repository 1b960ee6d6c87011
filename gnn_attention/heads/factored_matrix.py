"""A product of two thin matrices, as its factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from gnn_attention._support.shapes import Float, Tensor

__all__ = ["FactoredMatrix"]


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """The matrix ``left @ right``, ``[..., m, r] @ [..., r, n]``: only :meth:`full` makes the m x n product.

    ``W_P = W_Q W_K^T`` and ``W_M = W_V W_O`` are such matrices, with r = head_dim (seeds S0.5, S1.23).
    Leading axes are heads. The form follows TransformerLens' FactoredMatrix and Elhage et al. 2021, "A
    Mathematical Framework for Transformer Circuits", section "Splitting attention head terms into circuits".

    >>> m = FactoredMatrix(torch.ones(4, 1), torch.ones(1, 4))
    >>> m.shape, [round(v, 4) for v in m.singular_values().tolist()], round(m.norm().item(), 4)
    (torch.Size([4, 4]), [4.0], 4.0)
    """

    left: Float[Tensor, "*heads m r"]
    right: Float[Tensor, "*heads r n"]

    def __post_init__(self) -> None:
        left, right = self.left.shape, self.right.shape
        if len(left) < 2 or left[:-2] != right[:-2] or left[-1] != right[-2:-1].numel():
            shapes = f"{list(left)} and {list(right)}"
            raise ValueError(f"left [..., m, r] and right [..., r, n] must meet, got {shapes}")

    @property
    def shape(self) -> torch.Size:
        """The shape of the product."""
        return torch.Size([*self.left.shape[:-1], self.right.shape[-1]])

    @property
    def T(self) -> FactoredMatrix:
        """The transpose, still factored."""
        return FactoredMatrix(self.right.mT, self.left.mT)

    def full(self) -> Float[Tensor, "*heads m n"]:
        """The product itself."""
        return self.left @ self.right

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Thin singular value decomposition ``U, S, Vh`` from two QR decompositions: O((m + n) r^2)."""
        q_left, r_left = torch.linalg.qr(self.left)
        q_right, r_right = torch.linalg.qr(self.right.mT)
        u, s, vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
        return q_left @ u, s, vh @ q_right.mT

    def singular_values(self) -> Float[Tensor, "*heads r"]:
        """The at most r singular values that are not zero by construction, largest first."""
        return self.svd()[1]

    def eigenvalues(self) -> Tensor:
        """The at most r non-trivial eigenvalues (complex): those of the small ``right @ left``."""
        if self.shape[-1] != self.shape[-2]:
            raise ValueError(f"only a square matrix has eigenvalues, got {self.shape[-2]} x {self.shape[-1]}")
        return cast("Tensor", torch.linalg.eigvals(self.right @ self.left))

    def norm(self) -> Float[Tensor, "*heads"]:
        """Frobenius norm, from the r x r Gram matrices."""
        gram = (self.left.mT @ self.left) * (self.right @ self.right.mT)
        return gram.sum((-2, -1)).clamp(min=0).sqrt()

    def rank(self, tolerance: float = 1e-6) -> Tensor:
        """How many singular values exceed ``tolerance`` times the largest."""
        s = self.singular_values()
        return (s > tolerance * s[..., :1]).sum(-1)
