"""Rotary positions against complex numbers: a turn of a pair of channels is a product with e^(i angle)."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from support.bounds import assert_exact, error, summation_bound
from support.inputs import drawn
from torch import Tensor

from gnn_attention.rotary import Rotary

ROTARIES = [Rotary(), Rotary(base=100.0, interleaved=True)]
each_rotary = pytest.mark.parametrize("rotary", ROTARIES, ids=repr)


def complex_turn(x: Tensor, positions: list[int], base: float, interleaved: bool) -> Tensor:
    """One token and one pair of channels at a time."""
    dim, result = x.shape[-1], x.double().clone()
    for t, position in enumerate(positions):
        for i in range(dim // 2):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
            angle = position * base ** (-2 * i / dim)
            pair = torch.complex(x[..., t, first].double(), x[..., t, second].double())
            turned = pair * complex(math.cos(angle), math.sin(angle))
            result[..., t, first], result[..., t, second] = turned.real, turned.imag
    return result


@each_rotary
class TestTurn:
    @pytest.mark.parametrize("positions", [[100_000, 3, 3], [-2, 4, 1]], ids=str)
    def test_against_complex_numbers(self, rotary, positions):
        x = drawn(2, 3, 3, 8)
        expected = complex_turn(x, positions, rotary.base, rotary.interleaved)
        turned = rotary.turn(x, torch.tensor(positions))
        assert turned.dtype == torch.float64
        # a frequency is a power, off by an ulp; so is an angle, its product with a position, and the cosine
        # of that
        ulps = torch.finfo(torch.float64).eps * (2 * max(map(abs, positions)) + 4)
        assert error(turned, expected) <= ulps * 2**0.5 * float(x.abs().max())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_other_dtypes(self, rotary, dtype):
        """The dtype comes back; angles are exact even at position 100,000, where a half has no digits."""
        x, positions = drawn(3, 8).to(dtype), [100_000, 99_999, 1]
        turned = rotary.turn(x, torch.tensor(positions))
        assert turned.dtype == dtype
        # in float32 cosine and sine are rounded, multiplied and added; the sum of a pair, at most this long,
        # is rounded once more
        length = 2**0.5 * float(x.double().abs().max())
        allowed = summation_bound(4, 2**0.5 * length, torch.float32) + summation_bound(1, length, dtype)
        assert error(turned, complex_turn(x, positions, rotary.base, rotary.interleaved)) <= allowed

    @pytest.mark.parametrize("distance", [1, -3, 50_000])
    def test_matrix(self, rotary, distance):
        """(R_dst q) . (R_src k) = q^T R k, and R is a rotation: R^T R = 1, R(-d) = R(d)^T."""
        q, k = drawn(6), drawn(6, seed=1)
        matrix = rotary.matrix(distance, 6)
        src = 60_000
        turned_q = rotary.turn(q.unsqueeze(0), torch.tensor([src + distance]))[0]
        turned_k = rotary.turn(k.unsqueeze(0), torch.tensor([src]))[0]
        assert matrix.dtype == torch.float64
        assert matrix.shape == (6, 6)
        # three angles, rounded each: those of src, of src + distance and of distance, in radians at most
        # these numbers
        angles = 2 * (src + abs(distance)) * torch.finfo(torch.float64).eps / 2
        assert error(q @ matrix @ k, turned_q @ turned_k) <= (angles + 1e-12) * float(q.norm() * k.norm())
        assert_exact(matrix.T @ matrix, torch.eye(6).double())
        assert_exact(rotary.matrix(-distance, 6), matrix.T)


class TestFrequencies:
    def test_each_pair_turns_by_its_own(self):
        """Any frequencies, zero and negative ones too, against complex numbers: one pair at a time."""
        x, positions, frequencies = drawn(3, 6), torch.tensor([0, 3, 100]), (0.5, 0.0, -2.0)
        for interleaved in (False, True):
            turned = Rotary(interleaved=interleaved, frequencies=frequencies).turn(x, positions)
            for i, frequency in enumerate(frequencies):
                pair = [2 * i, 2 * i + 1] if interleaved else [i, i + 3]
                angles = positions * torch.tensor(frequency, dtype=torch.float64)
                turn = torch.polar(torch.ones_like(angles), angles)
                expected = torch.view_as_complex(x[:, pair].contiguous()) * turn
                assert_exact(turned[:, pair], torch.view_as_real(expected))

    def test_something_else_than_a_tuple_becomes_one(self):
        rotary = Rotary(frequencies=[1, 0.5])
        assert rotary == pickle.loads(pickle.dumps(rotary)) == Rotary(frequencies=(1.0, 0.5))
        assert hash(rotary) == hash(Rotary(frequencies=(1.0, 0.5)))
        assert rotary != Rotary()


WRONG = [
    (
        lambda: turned_zeros(2, 6, frequencies=(1.0, 0.5)),
        "frequencies must be one for each of 3 pairs of channels",
    ),
    (lambda: Rotary(frequencies=(1.0, math.nan)), "frequencies must be finite, got"),
    (lambda: turned_zeros(2, 3), "rotary turns pairs of channels: head_dim must be even, got 3"),
    (lambda: Rotary().matrix(1, 5), "must be even, got 5"),
    # one position is not spread over all tokens by guess
    (lambda: turned_zeros(4, 6, count=1), "positions must be one for each of the 4 tokens"),
    (lambda: Rotary(base=0.0), "base must be positive"),
]


def turned_zeros(tokens: int, dim: int, count: int | None = None, **options) -> Tensor:
    return Rotary(**options).turn(torch.zeros(tokens, dim), torch.arange(tokens if count is None else count))


@pytest.mark.parametrize(("call", "match"), WRONG)
def test_what_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
