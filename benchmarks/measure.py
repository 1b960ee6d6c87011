"""Time among neighbours: interleaved rounds in random order, a guard against noise, medians and paired
ratios, and limits.

On a shared machine a time alone says little. All methods of a workload run in one process, round after round,
each round in an order of its own; before and after every sample a small matrix product must come near its
best rate, else the sample is taken again. A ratio is the median over the rounds of the two times of the same
round.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Guard", "Settings", "Timing", "limits", "paired_ratio", "slope", "timed_rounds"]

PROBE = 768  # side of the guard's matrices: 4 ms on two cores, larger than a cache of the second level
LARGE = 2048


@dataclass(frozen=True)
class Settings:
    """How long to measure: ``budget`` seconds for a method and pass, ``fewest`` to ``most`` samples of at
    least ``shortest``.

    A sample is taken again up to ``retries`` times when the guard found the machine busy; ``patience``
    seconds are waited for calm before each, ``allowance`` seconds in all for a workload. A call of more than
    ``long`` seconds is timed once. A method that needs more than ``slowest`` seconds or ``memory`` bytes is
    left out.
    """

    budget: float = 3.0
    fewest: int = 3
    most: int = 30
    shortest: float = 0.01
    retries: int = 3
    patience: float = 0.5
    allowance: float = 20.0
    fraction: float = 0.8
    long: float = 4.0
    slowest: float = 20.0
    memory: float = 14 * 2**30

    @classmethod
    def quick(cls) -> Settings:
        """Fewer samples, shorter patience."""
        return cls(budget=0.3, most=9, retries=1, patience=0.1, allowance=3.0, slowest=4.0)


class Guard:
    """Says whether the machine is at rest: whether ``probe()``, a rate, reaches a ``fraction`` of the best it
    has seen.

    Asking and waiting may take ``allowance`` seconds in all, however busy the machine is; then the guard is
    ``exhausted``.
    """

    def __init__(
        self,
        fraction: float,
        patience: float,
        allowance: float = math.inf,
        probe: Callable[[], float] | None = None,
    ) -> None:
        """``probe`` is a product of two matrices unless given; ``patience`` are the seconds of one wait."""
        self.fraction, self.patience, self.left = fraction, patience, allowance
        self._probe = _Product(PROBE) if probe is None else probe
        self.best = max(self._probe() for _ in range(10))

    @property
    def exhausted(self) -> bool:
        """True when the allowance is spent."""
        return self.left <= 0

    def at_rest(self) -> bool:
        """Ask once; False, without asking, when exhausted."""
        if self.exhausted:
            return False
        start = time.perf_counter()
        rate = self._probe()
        self.left -= time.perf_counter() - start
        self.best = max(self.best, rate)
        return rate >= self.fraction * self.best

    def wait(self) -> bool:
        """Ask until the machine is at rest, for ``patience`` seconds at most."""
        end = time.perf_counter() + min(self.patience, self.left)
        while not (calm := self.at_rest()) and time.perf_counter() < end:
            time.sleep(0.02)
            self.left -= 0.02
        return calm


class _Product:
    """The rate of a matrix product in GFLOP/s."""

    def __init__(self, side: int) -> None:
        self.a, self.b, self.out = (torch.ones(side, side) for _ in range(3))

    def __call__(self) -> float:
        start = time.perf_counter()
        torch.mm(self.a, self.b, out=self.out)
        return 2e-9 * float(self.a.shape[0]) ** 3 / (time.perf_counter() - start)


def limits() -> dict[str, float]:
    """What this machine can do, here and now: matrix products in GFLOP/s and copies in GB/s (read and
    written), best of some.
    """
    product = _Product(LARGE)
    source, target = torch.ones(2**25), torch.ones(2**25)
    copies = []
    for _ in range(8):
        start = time.perf_counter()
        target.copy_(source)
        copies.append(2 * source.nbytes / (time.perf_counter() - start) / 1e9)
    return {"gemm_gflops": max(product() for _ in range(8)), "copy_gb_s": max(copies)}


@dataclass
class Timing:
    """Seconds of one call, by round; how often a sample was taken again, and how many samples were not seen
    to be calm.
    """

    calls: int
    wanted: int
    seconds: dict[int, float] = field(default_factory=dict)
    retries: int = 0
    noisy: int = 0
    error: BaseException | None = None

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.seconds.values())


def timed_rounds(
    calls: Mapping[str, Callable[[], object]],
    settings: Settings,
    guard: Guard,
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
            if timings[name].error is None and _takes_part(number, timings[name].wanted, rounds):
                _sample(calls[name], timings[name], number, settings, guard)
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


def _sample(
    call: Callable[[], object], timing: Timing, number: int, settings: Settings, guard: Guard
) -> None:
    """One sample, again while the guard objects; a sample that fills the budget alone is not repeated."""
    for attempt in range(settings.retries + 1):
        calm = guard.wait()
        try:
            seconds = _seconds(call, timing.calls)
        except Exception as error:
            timing.error = error
            return
        timing.seconds[number] = seconds / timing.calls
        calm = guard.at_rest() and calm
        if (
            calm
            or guard.exhausted
            or attempt == settings.retries
            or seconds * settings.fewest > settings.budget
        ):
            timing.noisy += not calm
            return
        timing.retries += 1


def _seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def paired_ratio(ours: Timing, theirs: Timing) -> float | None:
    """The median of ``theirs / ours`` over the rounds in which both took part: how many times faster ours is.

    >>> slow, fast = Timing(1, 3, {0: 4.0, 1: 9.0, 2: 5.0}), Timing(1, 2, {0: 2.0, 2: 2.0})
    >>> paired_ratio(fast, slow)
    2.25
    """
    both = [
        theirs.seconds[number] / ours.seconds[number] for number in theirs.seconds if number in ours.seconds
    ]
    return statistics.median(both) if both else None


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The exponent p of ``y ~ x^p``, by least squares on logarithms; None from fewer than two different x.

    >>> round(slope([(1, 5), (10, 500), (100, 50000)]), 6)
    2.0
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return statistics.linear_regression([x for x, _ in logs], [y for _, y in logs]).slope
