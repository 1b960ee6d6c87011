"""Subspaces against projectors, angles and edits written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from support.bounds import assert_exact, error
from torch import Tensor

from gnn_attention.interpret.circuits.subspace import Subspace, rank_tolerance

WIDTH = 9


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projector_of(directions: Tensor) -> Tensor:
    """``A^T (A A^T)^+ A`` for directions as rows of length 1: the textbook's projector."""
    unit = directions / directions.norm(dim=-1, keepdim=True)
    return unit.mT @ torch.linalg.pinv(unit @ unit.mT) @ unit


SPANNING = {
    "a line": drawn(1, WIDTH),
    "a plane": drawn(2, WIDTH),
    "more directions than dimensions": drawn(7, 3, seed=1) @ drawn(3, WIDTH),
    "everything": drawn(12, WIDTH),
    "lengths far apart": drawn(3, WIDTH) * torch.tensor([[1e2], [1.0], [1e-2]], dtype=torch.float64),
}
DIMS = [1, 2, 3, 9, 3]
each_span = pytest.mark.parametrize(
    ("directions", "dim"), list(zip(SPANNING.values(), DIMS, strict=True)), ids=SPANNING
)


@each_span
class TestAgainstTheProjector:
    def test_sizes_and_projector(self, directions, dim):
        space = Subspace.spanned_by(directions)
        assert (space.dim, space.width) == (dim, WIDTH)
        assert repr(space) == f"Subspace(dim {dim} of 9)"
        lengths = torch.linalg.svdvals(directions)
        # an SVD is off by some eps of the largest singular value, and turns the space by that over the
        # smallest
        turned = 2 * WIDTH * torch.finfo(torch.float64).eps * float(lengths[0] / lengths[dim - 1])
        assert error(space.projector(), projector_of(directions)) <= 1e-12 + turned
        assert_exact(space.basis.mT @ space.basis, torch.eye(dim, dtype=torch.float64))

    def test_project_reject_and_coordinates(self, directions, dim):
        """x = project(x) + reject(x), at right angles; coordinates have the length of the projection."""
        space, x = Subspace.spanned_by(directions), drawn(4, 5, WIDTH, seed=2)
        assert_exact(space.project(x), x @ space.projector())
        assert_exact(space.project(x) + space.reject(x), x)
        products = (space.project(x) * space.reject(x)).sum(-1)
        assert_exact(
            products, torch.zeros(4, 5, dtype=torch.float64), largest=float(x.square().sum(-1).max())
        )
        assert space.coordinates(x).shape == (4, 5, dim)
        assert_exact(space.coordinates(x).norm(dim=-1), space.project(x).norm(dim=-1))
        assert_exact(space.coordinates(x) @ space.basis.mT, space.project(x))

    def test_contains(self, directions, dim):
        space, x = Subspace.spanned_by(directions), drawn(6, WIDTH, seed=3)
        assert space.contains(directions).all()
        assert space.contains(space.project(x)).all()
        assert not space.contains(x).any() or dim == WIDTH
        nearly = space.project(x) + 1e-3 * space.reject(x) / space.reject(x).norm(dim=-1, keepdim=True).clamp(
            min=1e-9
        )
        assert space.contains(nearly, tolerance=0.1).all()
        assert dim == WIDTH or not space.contains(nearly, tolerance=1e-6).any()

    def test_float32_and_half(self, directions, dim):
        """States and directions of any dtype; a basis of half directions is float32."""
        x = drawn(6, WIDTH, seed=3)
        assert Subspace.spanned_by(directions).project(x.float()).dtype == torch.float32
        assert Subspace.spanned_by(directions[:2].bfloat16()).basis.dtype == torch.float32


class TestEdit:
    """Seed S1.25: down to a line, change the number there, up again."""

    @pytest.mark.parametrize("value", [2.5, drawn(4, 5, seed=3)], ids=["one", "each"])
    def test_against_the_formula(self, value):
        space, x = Subspace.spanned_by(drawn(3, WIDTH)), drawn(4, 5, WIDTH, seed=1)
        line = space.basis @ drawn(3, seed=2)
        unit = line / line.norm()
        edited = space.edit(x, 7 * line, value)
        wanted = torch.as_tensor(value, dtype=torch.float64).expand(4, 5)
        assert_exact(edited, x - x @ torch.outer(unit, unit) + wanted.unsqueeze(-1) * unit)
        assert_exact(edited @ unit, wanted)

    def test_all_else_stays(self):
        space, x = Subspace.spanned_by(drawn(3, WIDTH)), drawn(5, WIDTH, seed=1)
        edited = space.edit(x, space.basis[:, 1], -4.0)
        assert_exact(space.reject(edited), space.reject(x))
        assert_exact(space.coordinates(edited)[:, [0, 2]], space.coordinates(x)[:, [0, 2]])
        assert (edited - x).norm(dim=-1).min() > 0.1
        assert_exact(space.edit(x, space.basis[:, 1], x @ space.basis[:, 1]), x)

    def test_a_direction_that_leaves_the_subspace_counts_within_it(self):
        space, x = Subspace.spanned_by(drawn(3, WIDTH)), drawn(5, WIDTH, seed=1)
        direction = drawn(WIDTH, seed=4)
        assert not space.contains(direction)
        assert_exact(space.edit(x, direction, 1.0), space.edit(x, space.project(direction), 1.0))

    def test_the_states_are_left_alone(self):
        space, x = Subspace.spanned_by(drawn(3, WIDTH)), drawn(5, WIDTH, seed=1)
        before = x.clone()
        space.edit(x, space.basis[:, 0], 1.0)
        assert torch.equal(x, before)


class TestTwoSubspaces:
    @pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-4, 0.3, 1.2, math.pi / 2])
    def test_angles_of_two_planes_in_space(self, angle):
        one = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
        two = torch.tensor([[1.0, 0.0, 0.0], [0.0, math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        angles = Subspace.spanned_by(one).angles(Subspace.spanned_by(two))
        assert_exact(
            angles, torch.tensor([0.0, angle], dtype=torch.float64), largest=1.0
        )  # the numbers of the bases

    @pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 5), (5, 2), (1, 8), (6, 6), (0, 3)])
    def test_angles_and_overlap_against_the_projectors(self, first, second):
        U, V = Subspace.spanned_by(drawn(first, WIDTH)), Subspace.spanned_by(drawn(second, WIDTH, seed=1))
        P, Q, smaller = U.projector(), V.projector(), min(first, second)
        squares = torch.linalg.eigvalsh(P @ Q @ P).flip(0)[:smaller].clamp(0, 1)
        assert_exact(U.angles(V).cos().square(), squares)
        assert_exact(U.angles(V), V.angles(U))
        assert U.angles(V).shape == (smaller,)
        assert_exact(U.overlap(V), float((P @ Q).trace() / max(smaller, 1)))
        assert_exact(U.overlap(V), V.overlap(U))

    def test_the_overlap_of_random_subspaces(self):
        """On average larger dim / width."""
        overlaps = [
            Subspace.spanned_by(drawn(3, 12, seed=s)).overlap(Subspace.spanned_by(drawn(5, 12, seed=999 + s)))
            for s in range(200)
        ]
        deviation = torch.tensor(overlaps).std().item() / 200**0.5  # of the mean of 200
        assert abs(sum(overlaps) / 200 - 5 / 12) < 4 * deviation < 0.03

    def test_the_extremes(self):
        x = torch.eye(6, dtype=torch.float64)
        some, more, others = (Subspace.spanned_by(x[rows]) for rows in ([0, 1], [0, 1, 2], [3, 4]))
        assert some.overlap(more) == more.overlap(some) == some.overlap(some) == 1.0
        assert some.overlap(others) == 0.0

    def test_the_sum(self):
        """A second line makes a plane of a line; what both hold counts once."""
        lines = drawn(2, WIDTH)
        plane = Subspace.spanned_by(lines[0]) + Subspace.spanned_by(lines[1])
        assert_exact(plane.projector(), projector_of(lines))
        assert (plane + Subspace.spanned_by(lines)).dim == 2
        assert (plane + Subspace.spanned_by(drawn(3, WIDTH, seed=5))).dim == 5


class TestRank:
    def test_tolerance_is_relative_to_the_largest(self):
        rows = torch.diag(torch.tensor([1e8, 1.0, 1e-3], dtype=torch.float64))
        assert [Subspace.spanned_by(rows, tolerance).dim for tolerance in (1e-12, 1e-9, 1e-7)] == [3, 2, 1]

    def test_rounding_of_the_dtype_is_no_direction(self):
        """A product of rank 2, rounded to float32 and to bfloat16."""
        product = drawn(40, 2) @ drawn(2, 60, seed=1)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            assert Subspace.spanned_by(product.to(dtype)).dim == 2
            assert rank_tolerance(product.to(dtype)) < 0.1

    def test_nothing_spans_nothing(self):
        for directions in (torch.zeros(3, WIDTH), torch.zeros(0, WIDTH), torch.zeros(WIDTH)):
            space = Subspace.spanned_by(directions)
            assert (space.dim, space.width) == (0, WIDTH)
            assert torch.equal(space.reject(torch.ones(2, WIDTH)), torch.ones(2, WIDTH))
            assert space.overlap(Subspace.spanned_by(torch.ones(WIDTH))) == 0.0


class TestRefusals:
    space = Subspace.spanned_by(drawn(2, WIDTH))

    @pytest.mark.parametrize(
        "basis",
        [torch.ones(4, 2), torch.eye(4)[0], torch.eye(3, 3, dtype=torch.int64), "basis", 2 * torch.eye(3)],
    )
    def test_a_basis_that_is_none(self, basis):
        with pytest.raises(ValueError, match=r"basis must be .*orthonormal columns, got .*spanned_by"):
            Subspace(basis)

    @pytest.mark.parametrize(
        "directions", [torch.ones(2, 3, 4), torch.ones(3, dtype=torch.int64), [1.0, 2.0], torch.tensor(1.0)]
    )
    def test_directions_of_another_kind(self, directions):
        with pytest.raises(
            ValueError, match=r"directions must be a float tensor \[count, width\] or \[width\], got"
        ):
            Subspace.spanned_by(directions)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_directions_that_are_not_finite(self, bad):
        with pytest.raises(ValueError, match="directions must be finite"):
            Subspace.spanned_by(torch.tensor([1.0, bad]))

    @pytest.mark.parametrize("method", ["coordinates", "project", "reject", "contains"])
    @pytest.mark.parametrize(
        "x", [torch.ones(4), torch.ones(2, 10), torch.ones(9, dtype=torch.int64), torch.tensor(1.0), "x"]
    )
    def test_states_of_another_width_or_kind(self, method, x):
        with pytest.raises(ValueError, match=r"x must be floats \[\*, 9\], as wide as the space, got"):
            getattr(self.space, method)(x)

    def test_an_edit_that_cannot_be(self):
        x, along = drawn(5, WIDTH), self.space.basis[:, 0]
        with pytest.raises(
            ValueError, match=r"direction must have a part in the subspace, got one of length"
        ):
            self.space.edit(x, self.space.reject(drawn(WIDTH, seed=7)), 1.0)
        with pytest.raises(ValueError, match="direction must have a part in the subspace"):
            self.space.edit(x, torch.zeros(WIDTH), 1.0)
        with pytest.raises(ValueError, match=r"direction must be one vector \[9\], got \[2, 9\]"):
            self.space.edit(x, self.space.basis.mT, 1.0)
        with pytest.raises(ValueError, match=r"direction must be floats \[\*, 9\]"):
            self.space.edit(x, torch.ones(4), 1.0)
        with pytest.raises(ValueError, match=r"x must be floats \[\*, 9\]"):
            self.space.edit(torch.ones(5, 4), along, 1.0)
        with pytest.raises(
            ValueError, match=r"value must be one number or one for each of \[5\] states, got \[4\]"
        ):
            self.space.edit(x, along, torch.ones(4))

    def test_subspaces_of_different_spaces(self):
        other = Subspace.spanned_by(torch.ones(4))
        for act in (self.space.angles, self.space.overlap, self.space.__add__):
            with pytest.raises(ValueError, match="two subspaces must be of one space, got widths 9 and 4"):
                act(other)
        with pytest.raises(TypeError, match="unsupported operand"):
            _ = self.space + 3
