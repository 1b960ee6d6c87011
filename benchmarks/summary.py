"""What a record says beyond its cases: how cost grows with tokens and edges, and where sparse overtakes
dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from benchmarks.measure import slope
from benchmarks.methods import AUTO
from benchmarks.records import Record, case_of, cases_of, workload_of
from benchmarks.workloads import MASKED

__all__ = ["crossing", "summary"]


def summary(record: Record) -> Record:
    """``growth`` and ``crossover`` of a record that has workloads and cases."""
    return {"growth": list(_growth(record)), "crossover": list(_crossovers(record))}


def _growth(record: Record) -> Iterator[Record]:
    """Exponents of time and memory of auto: with tokens over windows, with edges at one number of tokens, by
    pass.
    """
    for allocator in dict.fromkeys(w["allocator"] for w in record["workloads"]):
        for which in ("forward", "both"):
            for quantity in ("seconds", "memory_mb"):
                for family, by, belongs in (("b", "tokens", _any), ("e", "edges", _at_16384)):
                    points = list(_points(record, family, by, quantity, which, allocator, belongs))
                    place = {
                        "family": family,
                        "by": by,
                        "quantity": quantity,
                        "pass": which,
                        "allocator": allocator,
                    }
                    exponent = slope(points)
                    if exponent is not None:
                        yield {**place, "exponent": exponent, "points": points}


def _any(workload: Record) -> bool:
    return True


def _at_16384(workload: Record) -> bool:
    return bool(workload["tokens"] == 16384)


def _points(
    record: Record,
    family: str,
    by: str,
    quantity: str,
    which: str,
    allocator: str,
    belongs: Callable[[Record], bool],
) -> Iterator[tuple[float, float]]:
    for case in cases_of(record, method=AUTO, allocator=allocator, **{"pass": which}):
        workload = workload_of(record, case["workload"], allocator)
        if workload is not None and workload["workload"][0] == family and belongs(workload):
            yield workload[by], case[quantity]


def _crossovers(record: Record) -> Iterator[Record]:
    """For random tiles and random edges: the density at which auto, or a backend of ours, is as fast as SDPA
    with a mask.
    """
    names = list(
        dict.fromkeys(
            case["method"] for case in record["cases"] if case["workload"][0] == "x" and case.get("ours")
        )
    )
    for kind in ("tiles", "edges"):
        for which in ("forward", "both"):
            for name in names:
                points = sorted(_advantages(record, kind, which, name))
                if points:
                    place = {"kind": kind, "pass": which, "method": name}
                    yield {**place, "density": crossing(points), "points": points}


def _advantages(record: Record, kind: str, which: str, method: str) -> Iterator[tuple[float, float]]:
    """(density, SDPA's time over ours) for each density."""
    for case in cases_of(record, method=method, **{"pass": which}):
        if not case["workload"].startswith(f"x-{kind}-"):
            continue
        peer = case_of(record, case["workload"], MASKED, which, case["allocator"])
        workload = workload_of(record, case["workload"], case["allocator"])
        if peer is not None and peer["status"] == "measured" and workload is not None:
            yield workload["edges"] / workload["tokens"] ** 2, _ratio(peer, case)


def _ratio(peer: Record, case: Record) -> float:
    """Paired where both were paired with auto, else from the medians."""
    both = peer.get("ratio") is not None and case.get("ratio") is not None
    return float(peer["ratio"] / case["ratio"] if both else peer["seconds"] / case["seconds"])


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The first x at which y, from above 1, comes down to 1: between two points on straight lines of
    logarithms; None if never.

    >>> crossing([(0.1, 4.0), (0.4, 1.0), (1.0, 0.5)])
    0.4
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 > 1.0 >= y1:
            share = math.log(y0) / (math.log(y0) - math.log(y1))
            return round(math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0))), 6)
    return None
