"""Time among neighbours: interleaved rounds in random order, the least and the median, and paired ratios.

On a shared machine a time alone says little. All methods of a workload run in one process, round after round,
each round in an order of its own. A ratio is the median over the rounds of the two times of the same round.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["Settings", "Timing", "paired_ratio", "product_rate", "seconds_of", "timed_rounds"]


@dataclass(frozen=True)
class Settings:
    """How long to measure: ``budget`` seconds for a method and pass, ``fewest`` to ``most`` samples.

    A sample takes at least ``shortest`` seconds, in as many calls as that needs. A call of more than ``long``
    seconds is timed once. A method that needs more than ``slowest`` seconds or ``memory`` bytes is left out.
    """

    budget: float = 3.0
    fewest: int = 3
    most: int = 30
    shortest: float = 0.01
    long: float = 4.0
    slowest: float = 20.0
    memory: float = 14 * 2**30


@dataclass
class Timing:
    """Seconds of one call by round, of ``wanted`` samples of ``calls`` each, until an error ends them."""

    calls: int
    wanted: int
    seconds: dict[int, float] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.seconds.values())


def timed_rounds(
    calls: Mapping[str, Callable[[], object]],
    settings: Settings,
    estimates: Mapping[str, float],
    seed: int = 0,
) -> dict[str, Timing]:
    """Time every call, in rounds of random order; ``estimates`` are the seconds that a call took before.

    A method takes part in as many rounds as its budget allows, spread evenly. One that raises is left out
    from then on, with its error.
    """
    timings = {name: _planned(estimates[name], settings) for name in calls}
    rounds = max((timing.wanted for timing in timings.values()), default=0)
    order, rng = list(calls), random.Random(seed)
    for number in range(rounds):
        rng.shuffle(order)
        for name in order:
            timing = timings[name]
            if timing.error is not None or not _takes_part(number, timing.wanted, rounds):
                continue
            try:
                timing.seconds[number] = seconds_of(calls[name], timing.calls)
            except Exception as error:
                timing.error = error
    return timings


def _planned(estimate: float, settings: Settings) -> Timing:
    calls = max(1, math.ceil(settings.shortest / max(estimate, 1e-7)))
    wanted = int(settings.budget / max(calls * estimate, 1e-7))
    fewest = settings.fewest if estimate <= settings.long else 1
    return Timing(calls, min(max(wanted, fewest), settings.most))


def _takes_part(number: int, wanted: int, rounds: int) -> bool:
    """True for ``wanted`` of the ``rounds``, evenly spread.

    >>> [number for number in range(9) if _takes_part(number, 3, 9)]
    [2, 5, 8]
    """
    return (number + 1) * wanted // rounds > number * wanted // rounds


def seconds_of(call: Callable[[], object], calls: int = 1) -> float:
    """The mean seconds of so many calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def paired_ratio(ours: Timing, theirs: Timing) -> float | None:
    """The median of ``theirs / ours`` over the rounds in which both took part: how many times faster ours is.

    >>> slow, fast = Timing(1, 3, {0: 4.0, 1: 9.0, 2: 5.0}), Timing(1, 2, {0: 2.0, 2: 2.0})
    >>> paired_ratio(fast, slow)
    2.25
    """
    rounds = theirs.seconds.keys() & ours.seconds.keys()
    return statistics.median(theirs.seconds[n] / ours.seconds[n] for n in rounds) if rounds else None


def product_rate(side: int = 2048) -> float:
    """The best rate of eight products of square matrices, in GFLOP/s: what this machine can do here and now."""
    a, b, out = (torch.ones(side, side) for _ in range(3))
    return 2e-9 * float(side) ** 3 / min(seconds_of(lambda: torch.mm(a, b, out=out)) for _ in range(8))
