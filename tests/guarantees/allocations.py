"""What torch allocates while something runs, on a CPU: the most at a time, and the largest single piece."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# torch's profiler says on stderr that it began, unless this is set before its first use
LOG = "KINETO_LOG_LEVEL"


@dataclass(frozen=True, eq=False)
class Allocated:
    """The result or the exception, the peak of bytes beyond those before, and the largest piece."""

    result: Any
    error: Exception | None
    peak: int
    largest: int


def allocated(work: Callable[[], Any]) -> Allocated:
    """Run it once and watch every allocation of torch; whatever it raises is returned.

    >>> found = allocated(lambda: torch.ones(1000).add(1.0).sum())
    >>> found.peak >= 8000, found.largest
    (True, 4000)
    """
    gc.collect()  # what cycles of an earlier call hold would be freed during this one
    os.environ.setdefault(LOG, "99")
    result, error = None, None
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        try:
            result = work()
        except Exception as raised:  # it is the caller's to judge
            error = raised
    current, peak, largest = 0, 0, 0
    for change in _changes(profile):
        current, largest = current + change, max(largest, change)
        peak = max(peak, current)
    return Allocated(result, error, peak, largest)


def _changes(profile: Any) -> list[int]:
    """Bytes taken (above 0) and given back, in the order of time."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
