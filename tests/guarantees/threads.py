"""Threads: one object used by eight threads at once gives, bit for bit, what it gives one after the other.

Every case makes its object (``together``: a graph, a layer, a model, ...) twice from the case number. On the
first the eight calls run one after the other: that is the truth. On the second they start together, so that
whatever is computed at its first use is first used by all at once. The filters of warnings and the
object's own state are afterwards as they were.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from gnn_attention._support.shapes import Tensor
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.together import KINDS, Shared

THREADS = 8
PATIENCE = 120.0  # seconds for the calls of a case, after which they hang
SWITCH = 1e-5  # seconds until Python lets another thread go on: many meetings

Found = list[Tensor] | str  # what a call returned, or the error that it raised


def measure(count: int, tell: Tell) -> Measured:
    """Run the cases ``0 .. count - 1``, one kind after the other."""
    names, compared = list(KINDS), 0
    failures: list[str] = []
    skipped = [f"no case of {kind}" for kind in names[max(count, 0) :]]
    for number in range(count):
        name = names[number % len(names)]
        tell(f"case {number} of {count}: {name}")
        try:
            found, wrong = case(number)
        except ImportError as error:
            skipped.append(f"case {number}, {name}: {error}")
            continue
        except Exception as error:  # before any thread began
            failures.append(f"case {number}, {name}: {type(error).__name__}: {error}"[:300])
            continue
        compared += found
        failures += [f"case {number}, {name}: {line}" for line in wrong]
    value = f"{len(failures)} differences in {compared:,} results of {count:,} objects, each in {THREADS} threads at once"
    return Measured(value, tuple(failures), tuple(skipped))


def case(number: int) -> tuple[int, list[str]]:
    """How many results of a case were compared, and in words whatever differed.

    >>> compared, different = case(0)
    >>> compared > 0, different
    (True, [])
    """
    with torch.random.fork_rng(devices=[]):
        return _compared(list(KINDS.values())[number % len(KINDS)], number)


def _compared(make: Callable[[random.Random], Shared], number: int) -> tuple[int, list[str]]:
    alone = [_caught(shared, thread) for shared in [_made(make, number)] for thread in range(THREADS)]
    shared = _made(make, number)
    before = list(warnings.filters), shared.state()
    with _many_switches():
        at_once = together([partial(_caught, shared, thread) for thread in range(THREADS)])
    wrong = [
        line for thread in range(THREADS) for line in _differences(thread, alone[thread], at_once[thread])
    ]
    if list(warnings.filters) != before[0]:
        wrong.append("the filters of warnings are not as they were")
        warnings.filters[:] = before[0]  # type: ignore[index]
    if shared.state() != before[1]:
        wrong.append(f"the object was {before[1]}, is {shared.state()}"[:300])
    return sum(len(found) for found in alone if not isinstance(found, str)), wrong


def together(calls: Sequence[Callable[[], Found]]) -> list[Found]:
    """What calls return that start at the same moment, each in its thread; one that hangs, in words."""
    start = threading.Barrier(len(calls))
    results: list[Found] = ["did not end" for _ in calls]

    def run(place: int) -> None:
        start.wait()
        results[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def _made(make: Callable[[random.Random], Shared], number: int) -> Shared:
    torch.manual_seed(number)
    return make(random.Random(number))


def _caught(shared: Shared, thread: int) -> Found:
    try:
        return shared.call(thread)
    except ImportError:
        raise
    except Exception as error:  # whatever it raises is compared
        return f"{type(error).__name__}: {error}"


def _differences(thread: int, alone: Found, at_once: Found) -> list[str]:
    if isinstance(alone, str) or isinstance(at_once, str):
        return [f"thread {thread}: {_shown(alone)} alone, {_shown(at_once)} at once"]
    if len(alone) != len(at_once):
        return [f"thread {thread}: {len(alone)} results alone, {len(at_once)} at once"]
    pairs = enumerate(zip(alone, at_once, strict=True))
    return [
        f"thread {thread}, result {place}: {_distance(x, y)}"
        for place, (x, y) in pairs
        if not torch.equal(x, y)
    ]


def _distance(x: Tensor, y: Tensor) -> str:
    if x.shape != y.shape:
        return f"{list(x.shape)} alone, {list(y.shape)} at once"
    return f"apart by {float((x.double() - y.double()).abs().max()):.3g}"


def _shown(found: Found) -> str:
    return found[:200] if isinstance(found, str) else f"{len(found)} results"


@contextmanager
def _many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


GUARANTEE = Guarantee(
    name="threads",
    promise=(
        "one graph, layer, model, cache or recorded module used by several threads at once gives what it "
        "gives alone"
    ),
    bar=f"0 differences, bit for bit, forward and backward, in {THREADS} threads that start together",
    quick=len(KINDS),
    full=100 * len(KINDS),
    measure=measure,
)
