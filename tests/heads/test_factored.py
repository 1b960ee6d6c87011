"""A product as two thin factors against torch.linalg on the full product."""

from __future__ import annotations

import pytest
import torch
from support.bounds import assert_exact
from torch import Tensor

from gnn_attention import FactoredMatrix

SHAPES = {
    "thin": ((), 9, 3, 9),
    "wide": ((), 4, 3, 11),
    "two axes": ((2, 3), 6, 2, 5),
    "no bottleneck": ((2,), 3, 5, 3),
}
each_shape = pytest.mark.parametrize(("lead", "m", "r", "n"), SHAPES.values(), ids=SHAPES)


def made(lead: tuple[int, ...], m: int, r: int, n: int) -> FactoredMatrix:
    generator = torch.Generator().manual_seed(0)
    shapes = (*lead, m, r), (*lead, r, n)
    return FactoredMatrix(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))


def product_of(matrix: FactoredMatrix) -> Tensor:
    return torch.einsum("...mr,...rn->...mn", matrix.left, matrix.right)


@each_shape
class TestAgainstTheProduct:
    def test_full_shape_and_transpose(self, lead, m, r, n):
        matrix = made(lead, m, r, n)
        assert matrix.shape == (*lead, m, n)
        assert_exact(matrix.full(), product_of(matrix))
        assert matrix.T.shape == (*lead, n, m)
        assert_exact(matrix.T.full(), product_of(matrix).mT)

    def test_svd(self, lead, m, r, n):
        """U and V have orthonormal columns, S falls, U S Vh is the product, and S is that of torch.linalg."""
        matrix = made(lead, m, r, n)
        u, s, vh = matrix.svd()
        k = min(m, r, n)
        assert u.shape == (*lead, m, k)
        assert s.shape == (*lead, k)
        assert vh.shape == (*lead, k, n)
        identity = torch.eye(k, dtype=torch.float64).expand(*lead, k, k)
        assert_exact(u.mT @ u, identity)
        assert_exact(vh @ vh.mT, identity)
        assert_exact((u * s.unsqueeze(-2)) @ vh, product_of(matrix))
        assert bool((s.diff(dim=-1) <= 0).all())
        assert bool((s >= 0).all())
        theirs = torch.linalg.svdvals(product_of(matrix))
        assert_exact(s, theirs[..., :k])
        assert bool((theirs[..., k:] < 1e-12).all())
        assert torch.equal(matrix.singular_values(), s)

    def test_norm_and_rank(self, lead, m, r, n):
        matrix = made(lead, m, r, n)
        assert matrix.norm().shape == lead
        assert_exact(matrix.norm(), torch.linalg.matrix_norm(product_of(matrix)))
        assert torch.equal(matrix.rank(), torch.linalg.matrix_rank(product_of(matrix)))
        assert torch.equal(matrix.rank(), torch.full(lead, min(m, r, n)))

    def test_eigenvalues(self, lead, m, r, n):
        """Those of the product that are not zero; a matrix that is not square has none."""
        matrix = made(lead, m, r, n)
        if m != n:
            with pytest.raises(ValueError, match=rf"square.*{m}.*{n}"):
                matrix.eigenvalues()
            return
        both = matrix.eigenvalues(), torch.linalg.eigvals(product_of(matrix))
        for ours, theirs in zip(*(x.reshape(-1, x.shape[-1]) for x in both), strict=True):
            ours, theirs = ours[ours.abs() > 1e-9], theirs[theirs.abs() > 1e-9]
            assert len(ours) == len(theirs) == min(m, r)
            distance, partner = (ours.unsqueeze(1) - theirs).abs().min(1)
            assert distance.max() < 1e-9
            assert len(partner.unique()) == len(ours)


class TestRank:
    def test_tolerance_is_relative_to_the_largest(self):
        diagonal = torch.tensor([1e8, 1.0, 1e-3], dtype=torch.float64)
        matrix = FactoredMatrix(diagonal.diag(), torch.eye(3).double())
        assert matrix.rank(1e-12) == 3
        assert matrix.rank(1e-9) == 2
        assert matrix.rank(1e-7) == 1


@pytest.mark.parametrize(("left", "right"), [((4, 2), (3, 4)), ((4,), (4, 4)), ((2, 4, 3), (5, 3, 4))])
def test_factors_that_do_not_meet_are_refused(left, right):
    with pytest.raises(ValueError, match=r"left.*right"):
        FactoredMatrix(torch.ones(left), torch.ones(right))
