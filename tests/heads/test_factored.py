"""``FactoredMatrix`` equals torch.linalg on the full product."""

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


def make(lead: tuple[int, ...], m: int, r: int, n: int) -> FactoredMatrix:
    generator = torch.Generator().manual_seed(0)
    shapes = (*lead, m, r), (*lead, r, n)
    return FactoredMatrix(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))


def multiply(matrix: FactoredMatrix) -> Tensor:
    return torch.einsum("...mr,...rn->...mn", matrix.left, matrix.right)


@each_shape
class TestAgainstTheProduct:
    def test_full_shape_and_transpose(self, lead, m, r, n):
        matrix = make(lead, m, r, n)
        assert matrix.shape == (*lead, m, n)
        assert_exact(matrix.full(), multiply(matrix))
        assert matrix.T.shape == (*lead, n, m)
        assert_exact(matrix.T.full(), multiply(matrix).mT)

    def test_svd(self, lead, m, r, n):
        """U and V are orthonormal, U S Vh is the product, and S is sorted and equals that of torch.linalg."""
        matrix = make(lead, m, r, n)
        u, s, vh = matrix.svd()
        k = min(m, r, n)
        assert u.shape == (*lead, m, k)
        assert s.shape == (*lead, k)
        assert vh.shape == (*lead, k, n)
        identity = torch.eye(k, dtype=torch.float64).expand(*lead, k, k)
        assert_exact(u.mT @ u, identity)
        assert_exact(vh @ vh.mT, identity)
        assert_exact((u * s.unsqueeze(-2)) @ vh, multiply(matrix))
        assert bool((s.diff(dim=-1) <= 0).all())
        assert bool((s >= 0).all())
        expected = torch.linalg.svdvals(multiply(matrix))
        assert_exact(s, expected[..., :k])
        assert bool((expected[..., k:] < 1e-12).all())
        assert torch.equal(matrix.singular_values(), s)

    def test_norm_and_rank(self, lead, m, r, n):
        matrix = make(lead, m, r, n)
        assert matrix.norm().shape == lead
        assert_exact(matrix.norm(), torch.linalg.matrix_norm(multiply(matrix)))
        assert torch.equal(matrix.rank(), torch.linalg.matrix_rank(multiply(matrix)))
        assert torch.equal(matrix.rank(), torch.full(lead, min(m, r, n)))

    def test_eigenvalues(self, lead, m, r, n):
        """The eigenvalues besides 0 are those of the product; a matrix that is not square has none."""
        matrix = make(lead, m, r, n)
        if m != n:
            with pytest.raises(ValueError, match=rf"square.*{m}.*{n}"):
                matrix.eigenvalues()
            return
        eigenvalues = matrix.eigenvalues(), torch.linalg.eigvals(multiply(matrix))
        for values, expected in zip(*(x.reshape(-1, x.shape[-1]) for x in eigenvalues), strict=True):
            values, expected = values[values.abs() > 1e-9], expected[expected.abs() > 1e-9]
            assert len(values) == len(expected) == min(m, r)
            distance, partner = (values.unsqueeze(1) - expected).abs().min(1)
            assert distance.max() < 1e-9
            assert len(partner.unique()) == len(values)


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
