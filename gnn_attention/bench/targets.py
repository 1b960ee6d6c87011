"""The targets as data: what is promised of which workload, against what, and whether a record keeps it.

A measure takes the record and the target and returns the value, or None where something was not measured. All ratios are
paired in one run; "auto" is ours throughout, with the default allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gnn_attention.bench.methods import AUTO
from gnn_attention.bench.summary import Record, case_of, cases_of, workload_of
from gnn_attention.bench.workloads import CAUSAL, FLEX, MASKED, MHA, PYG, SPARSE

__all__ = ["MEASURES", "TARGETS", "Target", "judged"]

FORWARD, BOTH = "forward", "both"


@dataclass(frozen=True)
class Target:
    """``measure`` of auto on a workload and pass, against a peer or another workload, is at least or at most ``bound``."""

    workload: str
    which: str
    measure: str
    bound: float
    against: str = ""

    @property
    def at_least(self) -> bool:
        """True where more is better."""
        return MEASURES[self.measure][0]


# -- measures ---------------------------------------------------------------------------------------------------------


def _measured(record: Record, target: Target, method: str = AUTO, workload: str | None = None) -> Record | None:
    case = case_of(record, workload or target.workload, method, target.which)
    return case if case is not None and case["status"] == "measured" else None


def _faster(record: Record, target: Target) -> float | None:
    """How many times faster than the peer, paired."""
    peer = _measured(record, target, target.against)
    return None if peer is None or peer.get("ratio") is None else float(peer["ratio"])


def _time_ratio(record: Record, target: Target) -> float | None:
    """Our time over that of the peer, paired."""
    faster = _faster(record, target)
    return None if faster is None else 1 / faster


def _smaller(record: Record, target: Target) -> float | None:
    """The peer's memory over ours (of which at least 1 MB counts)."""
    auto, peer = _measured(record, target), _measured(record, target, target.against)
    return None if auto is None or peer is None else float(peer["memory_mb"] / max(auto["memory_mb"], 1.0))


def _share(record: Record, target: Target) -> float | None:
    """The share of the matrix-product rate."""
    auto = _measured(record, target)
    return None if auto is None else float(auto["roofline"])


def _growth(record: Record, target: Target) -> float | None:
    """Our time over our time on the workload ``against``."""
    here, there = _measured(record, target), _measured(record, target, workload=target.against)
    return None if here is None or there is None else float(here["seconds"] / there["seconds"])


def _over_outputs(record: Record, target: Target) -> float | None:
    """Our memory over the bytes of the output, with the backward pass of output and the three gradients."""
    auto, workload = _measured(record, target), workload_of(record, target.workload)
    if auto is None or workload is None:
        return None
    tensors = 4 if target.which == BOTH else 1
    return float(auto["memory_mb"] / (tensors * workload["tokens"] * workload["heads"] * workload["dim"] * 4 / 2**20))


def _seconds(record: Record, target: Target) -> float | None:
    auto = _measured(record, target)
    return None if auto is None else float(auto["seconds"])


def _megabytes(record: Record, target: Target) -> float | None:
    auto = _measured(record, target)
    return None if auto is None else float(auto["memory_mb"])


def _runs_alone(record: Record, target: Target) -> float | None:
    """1 if ours was measured where the peer was not, else 0."""
    peer = case_of(record, target.workload, target.against, target.which)
    if peer is None:
        return None
    return float(_measured(record, target) is not None and peer["status"] != "measured")


def _beside_the_best(record: Record, target: Target) -> float | None:
    """The time of auto over that of the best backend (paired)."""
    auto = _measured(record, target)
    wanted = {"workload": target.workload, "pass": target.which, "allocator": "default", "ours": True}
    ratios = [case["ratio"] for case in cases_of(record, **wanted) if case.get("ratio")]
    return None if auto is None or not ratios else 1 / min(ratios)


MEASURES: dict[str, tuple[bool, str, Callable[[Record, Target], float | None]]] = {
    "faster": (True, "times faster than {against}", _faster),
    "time": (False, "of the time of {against}", _time_ratio),
    "smaller": (True, "times less memory than {against}", _smaller),
    "roofline": (True, "of the matrix-product rate", _share),
    "growth": (False, "times the time of {against}", _growth),
    "outputs": (False, "times the memory of outputs and gradients", _over_outputs),
    "seconds": (False, "seconds", _seconds),
    "megabytes": (False, "MB", _megabytes),
    "alone": (True, "runs where {against} does not", _runs_alone),
    "best": (False, "of the time of the best backend", _beside_the_best),
}  # more is better, in words, how

# -- the table --------------------------------------------------------------------------------------------------------


def _pair(workload: str, measure: str, forward: float | None, both: float | None, against: str = "") -> Iterator[Target]:
    for which, bound in ((FORWARD, forward), (BOTH, both)):
        if bound is not None:
            yield Target(workload, which, measure, bound, against)


TARGETS = (
    *_pair("a2048", "time", 1.05, 1.05, CAUSAL),
    *_pair("a8192", "time", 1.05, 1.05, CAUSAL),
    *_pair("b2048", "faster", 100, 60, PYG),
    *_pair("b2048", "smaller", 50, 50, PYG),
    *_pair("b8192", "faster", 25, 20, MASKED),
    *_pair("b8192", "faster", 1.3, None, FLEX),
    *_pair("b8192", "roofline", 0.55, 0.55),
    *_pair("b131072", "growth", 17, 19, "b8192"),
    *_pair("b131072", "outputs", 1.1, 1.2),
    *_pair("c16384", "faster", 20, 20, MASKED),
    *_pair("c16384", "time", 1.1, None, FLEX),
    *_pair("d34", "faster", 30, 25, MASKED),
    *_pair("e16384", "faster", 30, 20, PYG),
    *_pair("e16384", "smaller", 40, 25, PYG),
    *_pair("e16384", "faster", 4, 15, SPARSE),
    *_pair("e65536", "seconds", 0.2, 0.9),
    *_pair("e65536", "megabytes", 250, 800),
    *_pair("e65536", "alone", 1, 1, PYG),
    *_pair("g100000", "faster", 25, None, PYG),
    *_pair("g100000", "smaller", 40, None, PYG),
    *_pair("g100000", "alone", None, 1, PYG),
    *_pair("f1024", "faster", 1.5, 2, MASKED),
    *_pair("f64", "time", 1.05, 1.05, MASKED),
    *_pair("g34", "time", 1.0, 1.0, MASKED),
    *_pair("h2048", "faster", 2.3, 2.3, MHA),
    *_pair("h2048", "faster", 40, 40, PYG),
)


def judged(record: Record) -> list[dict[str, Any]]:
    """Every target with its measured ``value`` (None where something was not measured) and ``met`` (None likewise).

    The last ones hold for every workload of the record: auto within 1.3 times the best backend.
    """
    names = dict.fromkeys(w["workload"] for w in record["workloads"])
    best = (target for name in names for target in _pair(name, "best", 1.3, 1.3))
    return [_judge(record, target) for target in (*TARGETS, *best) if target.workload in names]


def _judge(record: Record, target: Target) -> dict[str, Any]:
    at_least, words, measure = MEASURES[target.measure]
    value = measure(record, target)
    met = None if value is None else bool(value >= target.bound if at_least else value <= target.bound)
    said = {"workload": target.workload, "pass": target.which, "measure": target.measure, "against": target.against}
    promise = {"sense": "at least" if at_least else "at most", "bound": target.bound}
    return {**said, "words": words.format(against=target.against), **promise, "value": value, "met": met}
