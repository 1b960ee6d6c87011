"""The targets of a GPU as data: what is promised of which workload, and whether a record meets it.

A time is a share of what the ceilings of the same run allow (:func:`benchmarks.gpu.tasks.floor`), or a ratio to a
peer of the same record.
"""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.workloads import (
    ANEMOI,
    CUDNN,
    EFFICIENT,
    FLASH,
    PASSES,
    PYG_COMPILED,
    VARLEN,
)
from benchmarks.records import Record
from benchmarks.targets import COMMON, Measure, judge, pair_of_targets, value_of_own
from benchmarks.workloads import FLEX, PYG, SPARSE

__all__ = ["TARGETS", "judged"]

SDPA = f"{FLASH}|{CUDNN}|{EFFICIENT}"  # the fastest of those that ran
PYG_ANY = f"{PYG}|{PYG_COMPILED}"
_SHARE = Measure(
    True, "of the measured ceiling", lambda record, target: value_of_own(record, target, "share")
)
MEASURES = {**COMMON, "share": _SHARE}
_both = partial(pair_of_targets, PASSES)
TARGETS = (
    *_both("random1m", "share", 0.75, 0.75),
    *_both("random1m", "faster", 1.0, 1.0, against=ANEMOI),
    *_both("random1m", "faster", 5.0, 5.0, against=PYG_ANY),
    *_both("random1m", "faster", 1.0, 1.0, against=SPARSE),
    *_both("narrow1m", "share", 0.5, 0.5),
    *_both("narrow1m", "faster", 1.0, 1.0, against=ANEMOI),
    *_both("narrow1m", "faster", 5.0, 5.0, against=PYG_ANY),
    *_both("clusters", "share", 0.5, 0.5),
    *_both("clusters", "faster", 1.0, 1.0, against=ANEMOI),
    *_both("mesh", "faster", 1.0, 1.0, against=ANEMOI),
    *_both("mesh", "faster", 5.0, 5.0, against=PYG_ANY),
    *_both("bigbird131k", "faster", 0.9, 0.9, against=FLEX),
    *_both("window131k", "time", 1.05, 1.05, against=VARLEN),
    *_both("documents131k", "time", 1.05, 1.05, against=VARLEN),
    *_both("causal8k", "time", 1.02, 1.02, against=SDPA),
)


def judged(record: Record) -> list[Record]:
    """Every target of the record's workloads; a rehearsal meets and misses nothing."""
    names = {about["workload"] for about in record["workloads"]}
    rows = judge(record, [target for target in TARGETS if target.workload in names], MEASURES)
    if not record["measurement"]:
        return [{**row, "value": None, "met": None} for row in rows]
    return rows
