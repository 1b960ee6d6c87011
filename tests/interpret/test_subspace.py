"""Compare subspaces with projectors, overlaps and edits written out in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.bounds import assert_exact, error
from support.refusals import assert_refusals
from support.traces import randn
from torch import Tensor

from gnn_attention.interpret.circuits import Subspace

WIDTH = 9


def projector_of(directions: Tensor) -> Tensor:
    """Return the textbook's projector ``A^T (A A^T)^+ A``, with directions as rows of length 1."""
    unit = directions / directions.norm(dim=-1, keepdim=True)
    return unit.mT @ torch.linalg.pinv(unit @ unit.mT) @ unit


SPANNING = {
    "a line": (randn(1, WIDTH), 1),
    "more directions than dimensions": (randn(7, 3, seed=1) @ randn(3, WIDTH), 3),
    "everything": (randn(12, WIDTH), 9),
    "lengths far apart": (randn(3, WIDTH) * torch.tensor([[1e2], [1.0], [1e-2]]).double(), 3),
}


@pytest.mark.parametrize(("directions", "dim"), SPANNING.values(), ids=SPANNING)
def test_against_the_projector(directions, dim):
    space, x = Subspace.spanned_by(directions), randn(4, 5, WIDTH, seed=2)
    assert (space.dim, space.width, repr(space)) == (dim, WIDTH, f"Subspace(dim {dim} of 9)")
    lengths = torch.linalg.svdvals(directions)
    # The error of an SVD rotates the space by some eps times the largest over the smallest value.
    rotated = 2 * WIDTH * torch.finfo(torch.float64).eps * float(lengths[0] / lengths[dim - 1])
    assert error(space.projector(), projector_of(directions)) <= 1e-12 + rotated
    assert_exact(space.basis.mT @ space.basis, torch.eye(dim, dtype=torch.float64))
    projection, rejection = space.project(x), space.reject(x)
    assert_exact(projection, x @ space.projector())
    assert_exact(projection + rejection, x)
    largest = float(x.square().sum(-1).max())
    assert_exact((projection * rejection).sum(-1), torch.zeros(4, 5, dtype=torch.float64), largest=largest)
    assert space.coordinates(x).shape == (4, 5, dim)
    assert_exact(space.coordinates(x).norm(dim=-1), projection.norm(dim=-1))
    assert_exact(space.coordinates(x) @ space.basis.mT, projection)
    assert space.project(x.float()).dtype == torch.float32
    assert Subspace.spanned_by(directions[:2].bfloat16()).basis.dtype == torch.float32


@pytest.mark.parametrize("value", [2.5, randn(4, 5, seed=3)], ids=["one", "each"])
def test_an_edit(value):
    """An edit changes the coordinate along the projected direction (seed S1.25)."""
    space, x = Subspace.spanned_by(randn(3, WIDTH)), randn(4, 5, WIDTH, seed=1)
    copy, line = x.clone(), space.basis @ randn(3, seed=2)
    unit = line / line.norm()
    output = space.edit(x, 7 * line + space.reject(randn(WIDTH, seed=4)), value)
    expected = torch.as_tensor(value, dtype=torch.float64).expand(4, 5)
    assert_exact(output, x - x @ torch.outer(unit, unit) + expected.unsqueeze(-1) * unit)
    assert_exact(output @ unit, expected)
    assert torch.equal(x, copy)


class TestTwoSubspaces:
    @pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 5), (5, 2), (1, 8), (6, 6), (0, 3)])
    def test_overlap_against_the_projectors(self, first, second):
        """The overlap is the mean eigenvalue of P1 P2 P1, which are the squared cosines of the angles."""
        U, V = Subspace.spanned_by(randn(first, WIDTH)), Subspace.spanned_by(randn(second, WIDTH, seed=1))
        P, Q, smaller = U.projector(), V.projector(), min(first, second)
        assert_exact(U.overlap(V), float((P @ Q).trace() / max(smaller, 1)))
        assert_exact(U.overlap(V), V.overlap(U))

    def test_the_extremes_and_the_sum(self):
        x, lines = torch.eye(6, dtype=torch.float64), randn(2, WIDTH)
        plane_01, space_012, plane_34 = (Subspace.spanned_by(x[rows]) for rows in ([0, 1], [0, 1, 2], [3, 4]))
        assert plane_01.overlap(space_012) == space_012.overlap(plane_01) == plane_01.overlap(plane_01) == 1.0
        assert plane_01.overlap(plane_34) == 0.0
        plane = Subspace.spanned_by(lines[0]) + Subspace.spanned_by(lines[1])
        assert_exact(plane.projector(), projector_of(lines))
        assert (plane + Subspace.spanned_by(lines)).dim == 2
        assert (plane + Subspace.spanned_by(randn(3, WIDTH, seed=5))).dim == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_of_the_dtype_is_no_direction(dtype):
    product = (randn(40, 2) @ randn(2, 60, seed=1)).to(dtype)
    assert Subspace.spanned_by(product).dim == 2


INTS, SPACE = torch.ones(9, dtype=torch.int64), Subspace.spanned_by(randn(2, WIDTH))
X, ALONG = randn(5, WIDTH), SPACE.basis[:, 0]
OTHER, ONES = Subspace.spanned_by(torch.ones(4)), torch.ones
BASIS = r"basis must be orthonormal columns, see spanned_by, got"
SPAN = r"directions must be floats \[count, width\] or \[width\], got"
STATES = r"x must be a float tensor \[\*, 9\], got"
ORTHOGONAL = "direction must not be orthogonal to the subspace, got"
WRONG = [
    *((Subspace, (basis,), BASIS) for basis in (INTS[:, None], 2 * torch.eye(3))),
    *((Subspace.spanned_by, (vectors,), SPAN) for vectors in (ONES(2, 3, 4), INTS)),
    (Subspace.spanned_by, (ONES(2) * math.nan,), "must be finite"),
    *((SPACE.project, (x,), STATES) for x in (ONES(4), INTS)),
    (SPACE.edit, (X, SPACE.reject(randn(WIDTH, seed=7)), 1.0), ORTHOGONAL),
    (SPACE.edit, (X, SPACE.basis.mT, 1.0), r"direction must be one vector \[9\], got \[2, 9\]"),
    (SPACE.edit, (X, ALONG, ONES(4)), r"value must be a scalar or \[.*\], got \[4\]"),
    (SPACE.overlap, (OTHER,), "same width, got 9 and 4"),
]


def test_refusals():
    assert_refusals((partial(call, *args), ValueError, match) for call, args, match in WRONG)
