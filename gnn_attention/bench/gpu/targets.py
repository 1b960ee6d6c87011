"""The targets of a GPU as data: what is promised of which workload on an H200, and whether a record keeps it.

Peer and ours are of one record, on the same inputs, else nothing is claimed. "ours" is the method that the target names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gnn_attention.bench.gpu.methods import AGAIN, AUTO
from gnn_attention.bench.gpu.workloads import ALL_PAIRS, CUDNN, EFFICIENT, FLASH, FLEX, PASSES, PYG, SPARSE, VARLEN

__all__ = ["MEASURES", "TARGETS", "Target", "case_of", "judged", "noise"]

Record = dict[str, Any]
FORWARD, BACKWARD = PASSES
SDPA = f"{FLASH}|{CUDNN}|{EFFICIENT}"  # the fastest of those that ran
ROWS, TILES = "triton rows", "triton tiles"
WORKSPACE = 64 * 2**20


@dataclass(frozen=True)
class Target:
    """``measure`` of a method on a workload and pass, against a peer, or another workload, is at least or at most ``bound``."""

    workload: str
    which: str
    measure: str
    bound: float
    method: str = AUTO
    against: str = ""

    @property
    def at_least(self) -> bool:
        """True where more is better."""
        return MEASURES[self.measure][0]


def case_of(record: Record, workload: str, method: str, which: str) -> Record | None:
    """One case, measured or not; None if it is not in the record."""
    wanted = (workload, method, which)
    return next((case for case in record["cases"] if (case["workload"], case["method"], case["pass"]) == wanted), None)


def noise(record: Record, workload: str, which: str) -> float | None:
    """How far apart auto and auto again are: their larger time over the smaller, less 1. Differences within it are none."""
    found = (_value(case_of(record, workload, method, which), "seconds") for method in (AUTO, AGAIN))
    times = [seconds for seconds in found if seconds is not None]
    return max(times) / min(times) - 1.0 if len(times) == 2 else None


# -- measures ---------------------------------------------------------------------------------------------------------


def _value(case: Record | None, name: str) -> float | None:
    measured = case is not None and case["status"] == "measured" and case.get(name) is not None
    return float(case[name]) if measured and case is not None else None


def _own(record: Record, target: Target, name: str) -> float | None:
    return _value(case_of(record, target.workload, target.method, target.which), name)


def _peer(record: Record, target: Target, name: str) -> float | None:
    """The least of those that are named."""
    found = (_value(case_of(record, target.workload, peer, target.which), name) for peer in target.against.split("|"))
    return min((value for value in found if value is not None), default=None)


def _milliseconds(record: Record, target: Target) -> float | None:
    seconds = _own(record, target, "seconds")
    return None if seconds is None else seconds * 1e3


def _time(record: Record, target: Target) -> float | None:
    return _ratio(_own(record, target, "seconds"), _peer(record, target, "seconds"))


def _faster(record: Record, target: Target) -> float | None:
    return _ratio(_peer(record, target, "seconds"), _own(record, target, "seconds"))


def _smaller(record: Record, target: Target) -> float | None:
    return _ratio(_peer(record, target, "bytes"), _own(record, target, "bytes"))


def _share(record: Record, target: Target) -> float | None:
    return _own(record, target, "share")


def _growth(record: Record, target: Target) -> float | None:
    there = _value(case_of(record, target.against, target.method, target.which), "seconds")
    return _ratio(_own(record, target, "seconds"), there)


def _beyond(record: Record, target: Target) -> float | None:
    """Bytes beyond results, lse and, of a training step, gradients and what delta takes."""
    held, about = _own(record, target, "bytes"), _about(record, target.workload)
    if held is None or about is None:
        return None
    numbers = about["batch"] * about["heads"] * about["tokens"]
    size = 8 if about["dtype"] == "float64" else 4 if about["dtype"] == "float32" else 2
    tensors, sums = (1, 1) if target.which == FORWARD else (4, 2)
    results = numbers * (tensors * about["dim"] * size + sums * 4)
    return float(max(held - results, 0.0) / WORKSPACE)


def _about(record: Record, workload: str) -> Record | None:
    return next((w for w in record["workloads"] if w["workload"] == workload), None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or b == 0 else a / b


MEASURES: dict[str, tuple[bool, str, Callable[[Record, Target], float | None]]] = {
    "milliseconds": (False, "ms", _milliseconds),
    "time": (False, "of the time of {against}", _time),
    "faster": (True, "times faster than {against}", _faster),
    "smaller": (True, "times less memory than {against}", _smaller),
    "share": (True, "of the measured ceiling", _share),
    "growth": (False, "times the time of {against}", _growth),
    "beyond": (False, "times 64 MB beyond results and gradients", _beyond),
}  # more is better, in words, how

# -- the table --------------------------------------------------------------------------------------------------------


def _both(
    workload: str, measure: str, forward: float | None, backward: float | None, method: str = AUTO, against: str = ""
) -> Iterator[Target]:
    for which, bound in ((FORWARD, forward), (BACKWARD, backward)):
        if bound is not None:
            yield Target(workload, which, measure, bound, method, against)


TARGETS = (
    *_both("causal8k", "time", 1.02, 1.02, AUTO, SDPA),
    *_both("causal32k", "time", 1.02, 1.02, AUTO, SDPA),
    *_both("window131k", "milliseconds", 2.1, None),
    *_both("window131k", "milliseconds", 2.8, None, TILES),
    *_both("window131k", "faster", 1.1, None, AUTO, FLEX),
    *_both("documents131k", "milliseconds", 5.0, None, TILES),
    *_both("documents131k", "time", 1.02, 1.02, AUTO, VARLEN),
    *_both("bigbird131k", "milliseconds", 0.95, None),
    *_both("bigbird131k", "faster", 1.05, None, AUTO, FLEX),
    *_both("bigbird65k", "milliseconds", 3.2, None),
    *_both("bigbird65k", "faster", 5.0, None, AUTO, ALL_PAIRS),
    *_both("random131k", "milliseconds", 2.2, None),
    *_both("random131k", "faster", 30.0, None, AUTO, ALL_PAIRS),
    *_both("random131k", "faster", 5.0, 5.0, AUTO, PYG),
    *_both("random100k", "faster", 5.0, 5.0, AUTO, PYG),
    *_both("random100k", "smaller", 10.0, 10.0, AUTO, PYG),
    *_both("random1m", "milliseconds", 19.0, 42.0),
    *_both("random1m", "share", 0.75, 0.75, ROWS),
    *_both("random1m", "faster", 1.0, 1.0, AUTO, SPARSE),
    *_both("barabasi1m", "milliseconds", 18.0, None),
    *_both("barabasi1m", "growth", 1.25, 1.25, AUTO, "random1m"),
    *_both("uniform2m", "milliseconds", 18.6, None),
)


def judged(record: Record) -> list[Record]:
    """Every target of the record's workloads with its measured ``value`` (None where something was not) and ``met`` (likewise).

    The last ones hold for every workload: no more than 64 MB beyond results and gradients. A trial meets and misses nothing.
    """
    names = [w["workload"] for w in record["workloads"]]
    memory = (target for name in names for target in _both(name, "beyond", 1.0, 1.0))
    return [_judge(record, target) for target in (*TARGETS, *memory) if target.workload in names]


def _judge(record: Record, target: Target) -> Record:
    at_least, words, measure = MEASURES[target.measure]
    value = measure(record, target) if record["measurement"] else None
    met = None if value is None else bool(value >= target.bound if at_least else value <= target.bound)
    said = {"workload": target.workload, "pass": target.which, "method": target.method, "measure": target.measure}
    against = target.against.replace("|", " or ")
    promise = {"sense": "at least" if at_least else "at most", "bound": target.bound}
    return {**said, "against": target.against, "words": words.format(against=against), **promise, "value": value, "met": met}
