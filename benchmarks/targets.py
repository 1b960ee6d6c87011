"""The targets of ``backend="auto"`` against its peers, and whether a record meets them.

Both numbers of a ratio come from the same run; on a CPU, ratios of times are paired by round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.methods import AUTO
from benchmarks.records import Record, case_of, value_of
from benchmarks.workloads import CAUSAL, FLEX, MASKED, MHA, PYG, SPARSE

__all__ = ["TARGETS", "Target", "judge", "judge_cpu", "target_row"]

# A workload, the promised field of a case, the method of the case ("A|B" is the faster of the two), and the lower
# bounds of both passes (None if there is no promise).
Target = tuple[str, str, str, float | None, float | None]
WORDS = {
    "ratio": "times faster than {}",
    "smaller": "times less memory than {}",
    "roofline": "of the matrix-product rate",
    "share": "of the measured ceiling",
}
TARGETS: list[Target] = [
    ("a2048", "ratio", CAUSAL, 0.95, 0.95),
    ("a8192", "ratio", CAUSAL, 0.95, 0.95),
    ("b2048", "ratio", PYG, 100, 60),
    ("b2048", "smaller", PYG, 50, 50),
    ("b2048", "ratio", FLEX, 1.1, None),
    ("b8192", "ratio", MASKED, 25, 20),
    ("b8192", "ratio", FLEX, 1.3, None),
    ("b8192", "roofline", AUTO, 0.55, 0.55),
    ("c16384", "ratio", MASKED, 20, 20),
    ("c16384", "ratio", FLEX, 0.9, None),
    ("d34", "ratio", MASKED, 30, 25),
    ("e16384", "ratio", PYG, 30, 20),
    ("e16384", "smaller", PYG, 40, 25),
    ("e16384", "ratio", SPARSE, 4, 15),
    ("g100000", "ratio", PYG, 25, None),
    ("g100000", "smaller", PYG, 40, None),
    ("f1024", "ratio", MASKED, 1.5, 2),
    ("f64", "ratio", MASKED, 0.95, 0.95),
    ("g34", "ratio", MASKED, 1.0, 1.0),
    ("h2048", "ratio", MHA, 2.3, 2.3),
    ("h2048", "ratio", PYG, 40, 40),
]


def judge(record: Record, targets: Iterable[Target], passes: Sequence[str]) -> list[Record]:
    """Return every target of the record's workloads as a row, with its ``value`` and whether it is ``met``."""
    names, rows = {about["workload"] for about in record["workloads"]}, []
    for workload, field, against, *bounds in targets:
        for which, bound in zip(passes, bounds, strict=True):
            if bound is not None and workload in names:
                words = WORDS[field].format(against.replace("|", " or "))
                value = _value(record, workload, field, against, which)
                rows.append(target_row(workload, which, "at least", bound, words, value))
    return rows


def target_row(
    workload: str, which: str, sense: str, bound: float | None, words: str, value: float | None
) -> Record:
    """Return a target as a row; ``met`` is None if its value was not measured or there is no bound."""
    met = None
    if value is not None and bound is not None:
        met = bool(value >= bound if sense == "at least" else value <= bound)
    row = {"workload": workload, "pass": which, "sense": sense, "bound": bound, "words": words}
    return {**row, "value": value, "met": met}


def _value(record: Record, workload: str, field: str, against: str, which: str) -> float | None:
    cases = [case_of(record, workload, name, which) for name in against.split("|")]
    case = min(cases, key=lambda case: value_of(case, "seconds") or float("inf"))
    if field != "smaller":
        return value_of(case, field)
    ours = value_of(case_of(record, workload, AUTO, which), "memory_mb")
    theirs = value_of(case, "memory_mb")
    # Memory below 1 MB is noise, so it counts as 1 MB.
    return None if ours is None or theirs is None else theirs / max(ours, 1.0)


def judge_cpu(record: Record) -> list[Record]:
    """Judge the targets of a CPU, and for each workload whether auto takes at most 1.3 times our best backend."""
    passes = ("forward", "both")
    rows = judge(record, TARGETS, passes)
    for about in record["workloads"]:
        for which in passes:
            key = {"workload": about["workload"], "pass": which, "status": "measured", "ours": True}
            cases = (case for case in record["cases"] if key.items() <= case.items())
            ratios = [case["ratio"] for case in cases if case["ratio"]]
            value = 1 / min(ratios) if ratios else None
            words = "of the time of the best backend"
            rows.append(target_row(about["workload"], which, "at most", 1.3, words, value))
    return rows
