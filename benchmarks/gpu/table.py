"""A record of a GPU as text: the report of a run, and the markdown table of the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.methods import AGAIN
from benchmarks.gpu.targets import fill_ratios, noise
from benchmarks.gpu.workloads import PASSES
from benchmarks.methods import AUTO
from benchmarks.records import Record, case_of
from benchmarks.table import cell, markdown, reasons, rounded, targets_table

__all__ = ["report", "table"]

DIGITS = 3


def report(record: Record) -> str:
    """The ceilings of the device, every workload with every method, the fill of tiles, then the targets."""
    ceilings = record["ceilings"]
    products, copies = (ceilings[name] / 1e12 for name in ("products", "copy"))
    head = f"{record['device']}: products {products:.3g} TFLOP/s, copies {copies:.3g} TB/s"
    trial = [] if record["measurement"] else ["A rehearsal on a CPU: its numbers are no measurement."]
    methods = [_methods(record, about) for about in record["workloads"]]
    unbuilt = [f"{name}: {reason}" for name, reason in record["unbuilt"].items()]
    begun = {about["workload"] for about in record["workloads"]} | record["unbuilt"].keys()
    late = [f"{name}: not begun, no time was left" for name in record["due"] if name not in begun]
    return "\n\n".join([*trial, head, *methods, *unbuilt, *late, *_fills(record), *targets_table(record)])


def table(record: Record) -> str:
    """Markdown, a row for each workload: what auto takes and needs, and how each method compares with it."""
    measured = [case["method"] for case in record["cases"] if case["status"] == "measured"]
    others = [name for name in dict.fromkeys(measured) if name not in (AUTO, AGAIN)]
    head = ["workload", "edges", "auto takes", "ms", "GB", "of the ceiling", *others]
    return markdown(head, (_row(record, about, others) for about in record["workloads"]))


def _row(record: Record, about: Record, others: list[str]) -> list[str]:
    name = about["workload"]
    own = [case_of(record, name, AUTO, which) for which in PASSES]
    takes = next((case["takes"] for case in own if case and "takes" in case), "-")
    numbers = [_pair(own, "seconds", 1e3), _pair(own, "bytes", 1e-9), _pair(own, "share", 100.0, " %")]
    ratios = [_ratio(record, name, other) for other in others]
    return [about["title"], f"{about['edges']:,}", takes, *numbers, *ratios]


def _ratio(record: Record, workload: str, other: str) -> str:
    """``2.1x / 1.8x``: the time of a method over that of auto; or why there is no number."""
    words = []
    for which in PASSES:
        theirs, ours = (case_of(record, workload, method, which) for method in (other, AUTO))
        if theirs is None:
            words.append("-")
        elif theirs["status"] != "measured" or ours is None or ours["status"] != "measured":
            words.append("-" if theirs["status"] == "measured" else theirs["status"])
        else:
            words.append(f"{rounded(theirs['seconds'] / ours['seconds'], DIGITS)}x")
    return " / ".join(words if any(word.endswith("x") for word in words) else dict.fromkeys(words))


def _methods(record: Record, about: Record) -> str:
    name = about["workload"]
    shape = f"{about['edges']:,} edges, {about['heads']} heads of {about['dim']}, {about['dtype']}"
    shape += f", gathers {about['gathers'] / 1e12:.3g} TB/s" if about["gathers"] else ""
    bands = [noise(record, name, which) for which in PASSES]
    band = " / ".join("-" if band is None else f"{100 * band:.1f} %" for band in bands)
    methods = dict.fromkeys(case["method"] for case in record["cases"] if case["workload"] == name)
    head = ["method", "ms", "least, ms", "of auto", "of the ceiling", "GB", "first call, s", "remark"]
    rows = (_line(record, name, method) for method in methods)
    return f"{name}: {about['title']}, {shape}; noise {band}\n{markdown(head, rows)}"


def _line(record: Record, workload: str, method: str) -> list[str]:
    cases = [case_of(record, workload, method, which) for which in PASSES]
    times = [_pair(cases, "seconds", 1e3), _pair(cases, "least", 1e3), _ratio(record, workload, method)]
    sizes = [
        _pair(cases, "share", 100.0, " %"),
        _pair(cases, "bytes", 1e-9),
        _pair(cases[:1], "first_s", 1.0),
    ]
    return [method, *times, *sizes, reasons(cases) or _remark(cases)]


def _remark(cases: list[Record | None]) -> str:
    """Which backend auto took; how far off a peer is that was timed all the same."""
    for case in cases:
        if case and "takes" in case:
            return f"takes {case['takes']}"
        if case and "reason" in case:
            return f"less exact: {case['reason']}"
    return ""


def _fills(record: Record) -> Iterator[str]:
    ratios = fill_ratios(record)
    if ratios:
        words = ", ".join(f"1/{one_in}: {ratio:.2f}" for one_in, ratio in ratios.items())
        yield f"flex over rows, forward, by the filled share of the tiles: {words}"


def _pair(cases: list[Record | None], name: str, factor: float, suffix: str = "") -> str:
    words = [cell(case, name, factor, suffix, DIGITS) for case in cases]
    return "-" if set(words) == {"-"} else " / ".join(words)
