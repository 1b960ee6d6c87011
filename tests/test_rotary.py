"""Rotary positions rotate a pair of channels like a product of complex numbers with e^(i angle)."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from support.bounds import assert_exact, error, summation_bound
from support.inputs import randn
from torch import Tensor

from gnn_attention.rotary import Rotary

ROTARIES = [Rotary(), Rotary(base=100.0, interleaved=True)]
each_rotary = pytest.mark.parametrize("rotary", ROTARIES, ids=repr)


def complex_rotate(x: Tensor, positions: list[int], base: float, interleaved: bool) -> Tensor:
    """Rotate x by complex numbers, one token and one pair of channels at a time."""
    dim, result = x.shape[-1], x.double().clone()
    for t, position in enumerate(positions):
        for i in range(dim // 2):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
            angle = position * base ** (-2 * i / dim)
            pair = torch.complex(x[..., t, first].double(), x[..., t, second].double())
            rotated = pair * complex(math.cos(angle), math.sin(angle))
            result[..., t, first], result[..., t, second] = rotated.real, rotated.imag
    return result


@each_rotary
class TestTurn:
    @pytest.mark.parametrize("positions", [[100_000, 3, 3], [-2, 4, 1]], ids=str)
    def test_against_complex_numbers(self, rotary, positions):
        x = randn(2, 3, 3, 8)
        expected = complex_rotate(x, positions, rotary.base, rotary.interleaved)
        rotated = rotary.turn(x, torch.tensor(positions))
        assert rotated.dtype == torch.float64
        # The frequency, which is a power, its product with a position, and the cosine are each off by an ulp.
        ulps = torch.finfo(torch.float64).eps * (2 * max(map(abs, positions)) + 4)
        assert error(rotated, expected) <= ulps * 2**0.5 * float(x.abs().max())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_other_dtypes(self, rotary, dtype):
        """The dtype is kept, and angles are exact even at position 100,000, beyond the digits of a half."""
        x, positions = randn(3, 8).to(dtype), [100_000, 99_999, 1]
        rotated = rotary.turn(x, torch.tensor(positions))
        assert rotated.dtype == dtype
        # In float32, cosine and sine are rounded, multiplied and added. The sum is at most ``length`` and is
        # rounded once more, to the dtype.
        length = 2**0.5 * float(x.double().abs().max())
        bound = summation_bound(4, 2**0.5 * length, torch.float32) + summation_bound(1, length, dtype)
        assert error(rotated, complex_rotate(x, positions, rotary.base, rotary.interleaved)) <= bound

    @pytest.mark.parametrize("distance", [1, -3, 50_000])
    def test_matrix(self, rotary, distance):
        """(R_dst q) . (R_src k) = q^T R k, and R is a rotation: R^T R = 1, R(-d) = R(d)^T."""
        q, k = randn(6), randn(6, seed=1)
        matrix = rotary.matrix(distance, 6)
        src = 60_000
        rotated_q = rotary.turn(q.unsqueeze(0), torch.tensor([src + distance]))[0]
        rotated_k = rotary.turn(k.unsqueeze(0), torch.tensor([src]))[0]
        assert matrix.dtype == torch.float64
        assert matrix.shape == (6, 6)
        # Three angles are rounded, those of src, src + distance and distance; in radians they are at most the
        # positions themselves.
        angles = 2 * (src + abs(distance)) * torch.finfo(torch.float64).eps / 2
        assert error(q @ matrix @ k, rotated_q @ rotated_k) <= (angles + 1e-12) * float(q.norm() * k.norm())
        assert_exact(matrix.T @ matrix, torch.eye(6).double())
        assert_exact(rotary.matrix(-distance, 6), matrix.T)


class TestFrequencies:
    def test_each_pair_rotates_by_its_frequency(self):
        """Each pair rotates by its own frequency, which may be zero or negative."""
        x, positions, frequencies = randn(3, 6), torch.tensor([0, 3, 100]), (0.5, 0.0, -2.0)
        for interleaved in (False, True):
            rotated = Rotary(interleaved=interleaved, frequencies=frequencies).turn(x, positions)
            for i, frequency in enumerate(frequencies):
                pair = [2 * i, 2 * i + 1] if interleaved else [i, i + 3]
                angles = positions * torch.tensor(frequency, dtype=torch.float64)
                rotation = torch.polar(torch.ones_like(angles), angles)
                expected = torch.view_as_complex(x[:, pair].contiguous()) * rotation
                assert_exact(rotated[:, pair], torch.view_as_real(expected))

    def test_something_else_than_a_tuple_becomes_one(self):
        rotary = Rotary(frequencies=[1, 0.5])
        assert rotary == pickle.loads(pickle.dumps(rotary)) == Rotary(frequencies=(1.0, 0.5))
        assert hash(rotary) == hash(Rotary(frequencies=(1.0, 0.5)))
        assert rotary != Rotary()


WRONG = [
    (lambda: rotate_zeros(2, 6, frequencies=(1.0, 0.5)), "expected 3 frequencies, one per pair of channels"),
    (lambda: Rotary(frequencies=(1.0, math.nan)), "frequencies must be finite, got"),
    (lambda: rotate_zeros(2, 3), "rotary rotates pairs of channels: head_dim must be even, got 3"),
    (lambda: Rotary().matrix(1, 5), "must be even, got 5"),
    # One position must not be broadcast to all tokens.
    (lambda: rotate_zeros(4, 6, count=1), "positions must have shape .4., one for each token"),
    (lambda: Rotary(base=0.0), "base must be positive"),
]


def rotate_zeros(tokens: int, dim: int, count: int | None = None, **options) -> Tensor:
    return Rotary(**options).turn(torch.zeros(tokens, dim), torch.arange(tokens if count is None else count))


@pytest.mark.parametrize(("call", "match"), WRONG)
def test_what_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
