"""The targets as data: what is promised of which workload, against what, and whether a record meets it.

Both numbers of a ratio are of one run; on a CPU times are paired, and "auto" is ``attend`` throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.methods import AUTO
from benchmarks.records import Record, case_of, value_of
from benchmarks.workloads import CAUSAL, FLEX, MASKED, MHA, PYG, SPARSE

__all__ = [
    "COMMON",
    "MEASURES",
    "TARGETS",
    "Measure",
    "Target",
    "judge",
    "judged",
    "pair_of_targets",
    "value_of_own",
]


@dataclass(frozen=True)
class Target:
    """A ``measure`` of a method on a workload and pass meets ``bound``.

    ``against`` is a peer, or "A|B": the faster.
    """

    workload: str
    which: str
    measure: str
    bound: float
    against: str = ""
    method: str = AUTO


@dataclass(frozen=True)
class Measure:
    """``value(record, target)`` in ``words``, None where it was not measured; ``at_least``: more is better."""

    at_least: bool
    words: str
    value: Callable[[Record, Target], float | None]


def judge(record: Record, targets: Sequence[Target], measures: Mapping[str, Measure]) -> list[Record]:
    """Every target with its ``value`` and whether it is ``met``; both None where it was not measured."""
    return [_judge(record, target, measures[target.measure]) for target in targets]


def _judge(record: Record, target: Target, measure: Measure) -> Record:
    value, bound = measure.value(record, target), target.bound
    return {
        "workload": target.workload,
        "pass": target.which,
        "method": target.method,
        "measure": target.measure,
        "against": target.against,
        "words": measure.words.format(against=target.against.replace("|", " or ")),
        "sense": "at least" if measure.at_least else "at most",
        "bound": bound,
        "value": value,
        "met": None if value is None else bool(value >= bound if measure.at_least else value <= bound),
    }


def value_of_own(record: Record, target: Target, name: str) -> float | None:
    """A number of the target's method on its workload."""
    return value_of(case_of(record, target.workload, target.method, target.which), name)


def _peer(record: Record, target: Target) -> Record | None:
    """The fastest of the peers that were measured."""
    peers = (case_of(record, target.workload, peer, target.which) for peer in target.against.split("|"))
    measured = [case for case in peers if case is not None and case["status"] == "measured"]
    return min(measured, key=lambda case: float(case["seconds"]), default=None)


def _faster(record: Record, target: Target) -> float | None:
    """How many times faster than the peer."""
    return value_of(_peer(record, target), "ratio")


def _time(record: Record, target: Target) -> float | None:
    return _ratio(1.0, _faster(record, target))


def _smaller(record: Record, target: Target) -> float | None:
    """The peer's memory over ours, which counts as at least 1 MB."""
    mine = value_of_own(record, target, "memory_mb")
    return _ratio(value_of(_peer(record, target), "memory_mb"), None if mine is None else max(mine, 1.0))


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or b == 0 else a / b


def _over_the_best(record: Record, target: Target) -> float | None:
    """The time of auto over that of the best backend (paired)."""
    own = {"workload": target.workload, "pass": target.which, "status": "measured", "ours": True}
    ratios = [case["ratio"] for case in record["cases"] if own.items() <= case.items() and case.get("ratio")]
    return None if value_of_own(record, target, "seconds") is None or not ratios else 1 / min(ratios)


def _over_a_call(record: Record, target: Target) -> float | None:
    """The first call along a new graph over a call, which counts as at least 2.5 ms: so 20 is 50 ms too."""
    seconds = value_of_own(record, target, "seconds")
    return (
        None if seconds is None else _ratio(value_of_own(record, target, "new_graph_s"), max(seconds, 2.5e-3))
    )


COMMON = {
    "faster": Measure(True, "times faster than {against}", _faster),
    "time": Measure(False, "of the time of {against}", _time),
}
MEASURES = {
    **COMMON,
    "smaller": Measure(True, "times less memory than {against}", _smaller),
    "roofline": Measure(
        True, "of the matrix-product rate", lambda record, target: value_of_own(record, target, "roofline")
    ),
    "first": Measure(False, "times a call, of 2.5 ms or more, for the first along a graph", _over_a_call),
    "best": Measure(False, "of the time of the best backend", _over_the_best),
}


def pair_of_targets(
    passes: tuple[str, str], workload: str, measure: str, *bounds: float | None, against: str = ""
) -> Iterator[Target]:
    """The targets of both passes that have a bound."""
    for which, bound in zip(passes, bounds, strict=True):
        if bound is not None:
            yield Target(workload, which, measure, bound, against)


def _pair(
    workload: str, measure: str, forward: float | None, both: float | None, against: str = ""
) -> Iterator[Target]:
    return pair_of_targets(("forward", "both"), workload, measure, forward, both, against=against)


TARGETS = (
    *_pair("a2048", "time", 1.05, 1.05, CAUSAL),
    *_pair("a8192", "time", 1.05, 1.05, CAUSAL),
    *_pair("b2048", "faster", 100, 60, PYG),
    *_pair("b2048", "smaller", 50, 50, PYG),
    *_pair("b2048", "time", 0.9, None, FLEX),
    *_pair("b8192", "faster", 25, 20, MASKED),
    *_pair("b8192", "faster", 1.3, None, FLEX),
    *_pair("b8192", "roofline", 0.55, 0.55),
    *_pair("c16384", "faster", 20, 20, MASKED),
    *_pair("c16384", "time", 1.1, None, FLEX),
    *_pair("d34", "faster", 30, 25, MASKED),
    *_pair("e16384", "faster", 30, 20, PYG),
    *_pair("e16384", "smaller", 40, 25, PYG),
    *_pair("e16384", "faster", 4, 15, SPARSE),
    *_pair("g100000", "faster", 25, None, PYG),
    *_pair("g100000", "smaller", 40, None, PYG),
    *_pair("f1024", "faster", 1.5, 2, MASKED),
    *_pair("f64", "time", 1.05, 1.05, MASKED),
    *_pair("g34", "time", 1.0, 1.0, MASKED),
    *_pair("h2048", "faster", 2.3, 2.3, MHA),
    *_pair("h2048", "faster", 40, 40, PYG),
)


def judged(record: Record) -> list[Record]:
    """Every target of the record's workloads, and two that hold for all of them.

    These are that auto is within 1.3 times the best backend, and the first call along a graph within 20 times
    a later one, or 50 ms.
    """
    names = [about["workload"] for about in record["workloads"]]
    every = [target for name in names for target in _pair(name, "best", 1.3, 1.3)]
    every += [target for name in names for target in _pair(name, "first", 20, None)]
    return judge(record, [target for target in (*TARGETS, *every) if target.workload in names], MEASURES)
