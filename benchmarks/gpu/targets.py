"""The targets of a GPU as data: what is promised of which workload, and whether a record meets it.

Nothing is promised in milliseconds: a time is a share of what the ceilings allow that were measured on the same
device in the same run (:meth:`benchmarks.gpu.measuring.Bench.floor`), or a ratio. Peer and ours are of one
record, on the same inputs, else nothing is claimed. "ours" is the method that the target names.
"""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.methods import AGAIN
from benchmarks.gpu.workloads import ALL_PAIRS, ANEMOI, CUDNN, EFFICIENT, FLASH, PASSES, PYG_COMPILED, VARLEN
from benchmarks.methods import AUTO
from benchmarks.records import Record, case_of, value_of, workload_of
from benchmarks.targets import COMMON, Measure, Target, judge, own, pair_of_targets
from benchmarks.workloads import FLEX, PYG, SPARSE

__all__ = ["MEASURES", "TARGETS", "judged", "noise"]

FORWARD, BACKWARD = PASSES
SDPA = f"{FLASH}|{CUDNN}|{EFFICIENT}"  # the fastest of those that ran
PYG_ANY = f"{PYG}|{PYG_COMPILED}"
ROWS, TILES = "triton rows", "triton tiles"
WORKSPACE = 64 * 2**20


def noise(record: Record, workload: str, which: str) -> float | None:
    """How far apart auto and auto again are: their larger time over the smaller, less 1. A smaller difference
    is none.
    """
    found = (value_of(case_of(record, workload, method, which), "seconds") for method in (AUTO, AGAIN))
    times = [seconds for seconds in found if seconds is not None]
    return max(times) / min(times) - 1.0 if len(times) == 2 else None


def _beyond(record: Record, target: Target) -> float | None:
    """Bytes beyond results, lse and, of a training step, gradients and what delta takes."""
    peak, about = own(record, target, "bytes"), workload_of(record, target.workload)
    if peak is None or about is None:
        return None
    numbers = about["batch"] * about["heads"] * about["tokens"]
    size = 8 if about["dtype"] == "float64" else 4 if about["dtype"] == "float32" else 2
    tensors, sums = (1, 1) if target.which == FORWARD else (4, 2)
    results = numbers * (tensors * about["dim"] * size + sums * 4)
    return float(max(peak - results, 0.0) / WORKSPACE)


MEASURES = {
    **COMMON,
    "share": Measure(True, "of the measured ceiling", lambda record, target: own(record, target, "share")),
    "beyond": Measure(False, "times 64 MB beyond results and gradients", _beyond),
}


_both = partial(pair_of_targets, PASSES)
TARGETS = (
    *_both("causal8k", "time", 1.02, 1.02, against=SDPA),
    *_both("causal32k", "time", 1.02, 1.02, against=SDPA),
    *_both("window131k", "share", 0.66, None),
    *_both("window131k", "share", 0.5, None, method=TILES),
    *_both("window131k", "faster", 1.1, None, against=FLEX),
    *_both("documents131k", "share", 0.46, None, method=TILES),
    *_both("documents131k", "time", 1.02, 1.02, against=VARLEN),
    *_both("bigbird131k", "share", 0.46, None),
    *_both("bigbird131k", "faster", 1.05, None, against=FLEX),
    *_both("bigbird65k", "share", 0.69, None),
    *_both("bigbird65k", "faster", 5.0, None, against=ALL_PAIRS),
    *_both("random131k", "share", 0.65, None),
    *_both("random131k", "faster", 30.0, None, against=ALL_PAIRS),
    *_both("random131k", "faster", 5.0, 5.0, against=PYG_ANY),
    *_both("random100k", "faster", 5.0, 5.0, against=PYG_ANY),
    *_both("random100k", "smaller", 10.0, 10.0, against=PYG),
    *_both("random131k", "faster", 1.0, 1.0, against=ANEMOI),
    *_both("random1m", "share", 0.81, 0.77),
    *_both("random1m", "share", 0.75, 0.75, method=ROWS),
    *_both("random1m", "faster", 1.0, 1.0, against=SPARSE),
    *_both("barabasi1m", "share", 0.82, None),
    *_both("barabasi1m", "growth", 1.25, 1.25, against="random1m"),
    *_both("uniform2m", "share", 0.79, None),
)


def judged(record: Record) -> list[Record]:
    """Every target of the record's workloads; the last ones hold for all: at most 64 MB beyond results and
    gradients.

    A trial meets and misses nothing.
    """
    names = [w["workload"] for w in record["workloads"]]
    memory = (target for name in names for target in _both(name, "beyond", 1.0, 1.0))
    rows = judge(record, [target for target in (*TARGETS, *memory) if target.workload in names], MEASURES)
    if not record["measurement"]:
        return [{**row, "value": None, "met": None} for row in rows]
    return rows
