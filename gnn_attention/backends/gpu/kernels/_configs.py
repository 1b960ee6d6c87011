"""Tuned configurations of the kernels of blocks, by bytes of a number and channels (64, 128 or 256)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Config(NamedTuple):
    """Own tokens of a program, others that it visits in one step, its warps, stages of its pipeline."""

    own: int
    others: int
    warps: int
    stages: int

    def fitted(self, size: int, most: int) -> Config:
        """For blocks of ``size`` own tokens, visiting no more than ``most`` others in a step.

        Smaller blocks take as many warps fewer, and visit no more others than they have own tokens.
        """
        if size >= self.own:
            return self._replace(others=min(self.others, most))
        warps = max(2, self.warps * size // self.own)
        return Config(size, min(self.others, size, most), warps, self.stages)


class Configs(NamedTuple):
    """Of plain calls the forward pass and both backward passes; of all others by side."""

    forward: Config
    receivers: Config
    senders: Config
    other_receivers: Config
    other_senders: Config

    def of(self, step: str, plain: bool) -> Config:
        """The one for ``step``: "forward", "receivers" or "senders"."""
        other = self.other_senders if step == "senders" else self.other_receivers
        found: Config = getattr(self, step) if plain else other
        return found


def _table(
    rows: Mapping[tuple[int, int], Sequence[tuple[int, int, int, int]]],
) -> dict[tuple[int, int], Configs]:
    return {key: Configs(*(Config(*numbers) for numbers in row)) for key, row in rows.items()}


WINDOWS = _table({
    (2, 64): [(64, 64, 4, 3), (64, 64, 4, 3), (64, 32, 8, 2), (64, 32, 8, 2), (64, 16, 8, 2)],
    (2, 128): [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 16, 8, 1), (32, 32, 8, 1)],
    (2, 256): [(64, 32, 8, 2), (64, 16, 8, 2), *[(32, 16, 8, 1)] * 3],
    (4, 64): [(32, 32, 8, 2), (32, 32, 8, 2), (16, 16, 4, 2), (32, 16, 8, 1), (16, 16, 8, 1)],
    (4, 128): [(32, 16, 8, 2), (32, 32, 8, 2), *[(32, 16, 8, 2)] * 3],
    (8, 64): [(16, 16, 4, 1)] * 5,
    (8, 128): [(16, 16, 8, 1)] * 5,
})  # fmt: skip
TILES = _table({
    (2, 64): [(128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 8, 2), (64, 32, 8, 2), (64, 16, 8, 2)],
    (2, 128): [(128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (64, 16, 8, 1), (32, 32, 8, 1)],
    (2, 256): [*[(64, 32, 8, 2)] * 2, *[(32, 16, 8, 1)] * 3],
    (4, 64): [*[(32, 32, 8, 2)] * 3, *[(32, 16, 8, 1)] * 2],
    (4, 128): [*[(32, 32, 8, 2)] * 2, *[(32, 16, 8, 2)] * 3],
    (8, 64): [(16, 16, 4, 1)] * 5,
    (8, 128): [(16, 16, 8, 1)] * 5,
})  # fmt: skip
