"""A record of a GPU as text: the full report for a terminal, and the short markdown table of the README."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.methods import AGAIN, PEERS
from benchmarks.gpu.targets import noise
from benchmarks.gpu.workloads import PASSES
from benchmarks.methods import AUTO
from benchmarks.records import Record, case_of
from benchmarks.table import cell, markdown, reasons, rounded, targets_table

__all__ = ["report", "table"]

DIGITS = 3


def table(record: Record) -> str:
    """Markdown, a row for each workload: what auto takes and needs, and how many times its time each peer
    does.
    """
    names = [
        name
        for name in PEERS
        if any(case["method"] == name and case["status"] == "measured" for case in record["cases"])
    ]
    head = ["workload", "edges", "auto takes", "ms", "GB", "of the ceiling", *names]
    return markdown(head, (_row(record, about, names) for about in record["workloads"]))


def _row(record: Record, about: Record, names: list[str]) -> list[str]:
    name = about["workload"]
    own = [case_of(record, name, AUTO, which) for which in PASSES]
    took = next((case["takes"] for case in own if case and "takes" in case), "-")
    numbers = [_pair(own, key, factor) for key, factor in (("seconds", 1e3), ("bytes", 1e-9))]
    share = _pair(own, "share", 100.0, " %")
    return [
        about["title"],
        f"{about['edges']:,}",
        took,
        *numbers,
        share,
        *(_against(record, name, peer) for peer in names),
    ]


def _against(record: Record, workload: str, peer: str) -> str:
    """``2.1x / 1.8x``: the peer's time over that of auto; or why there is no number."""
    found = []
    for which in PASSES:
        theirs, ours = (case_of(record, workload, method, which) for method in (peer, AUTO))
        if theirs is None:
            found.append("-")
        elif theirs["status"] != "measured" or ours is None or ours["status"] != "measured":
            found.append(theirs["status"] if theirs["status"] != "measured" else "-")
        else:
            found.append(f"{rounded(theirs['seconds'] / ours['seconds'], DIGITS)}x")
    return " / ".join(dict.fromkeys(found)) if not found[0].endswith("x") else " / ".join(found)


def report(record: Record) -> str:
    """The device and its ceilings, every workload with every method, then the targets."""
    return "\n\n".join(
        [*_head(record), *(_methods(record, about) for about in record["workloads"]), *_conclusions(record)]
    )


def _head(record: Record) -> Iterator[str]:
    if not record["measurement"]:
        yield "A trial of the benchmark on a CPU: its numbers are no measurement."
    ceilings = record["ceilings"]
    terabytes = ", ".join(f"{words} {ceilings[name] / 1e12:.3g} TB/s" for name, words in CEILINGS.items())
    versions = ", ".join(f"{name} {record[name]}" for name in ("driver", "torch", "triton"))
    yield (
        f"{record['device']}, {versions}; {record['date']}\n"
        f"products {ceilings['products'] / 1e12:.3g} TFLOP/s, {terabytes} (by {ceilings['by']})"
    )


CEILINGS = {
    "copy": "copies",
    "cache_rows": "rows of 128 bytes from the cache",
    "short_rows": "from memory",
    "long_rows": "of 2 KB from memory",
}


def _methods(record: Record, about: Record) -> str:
    name = about["workload"]
    heads = f"{about['batch']} x {about['heads']} heads of {about['dim']}"
    shape = f"{about['edges']:,} edges, {heads}, {about['dtype']}"
    bands = [noise(record, name, which) for which in PASSES]
    band = " / ".join("-" if band is None else f"{100 * band:.1f} %" for band in bands)
    methods = dict.fromkeys(case["method"] for case in record["cases"] if case["workload"] == name)
    head = [
        "method",
        "ms",
        "p10 .. p90, ms",
        "predicted, ms",
        "of the ceiling",
        "GB",
        "first call, s",
        "remark",
    ]
    rows = (_line(record, name, method) for method in methods if method != AGAIN)
    return f"{name}: {about['title']}, {shape}; noise {band}\n{markdown(head, rows)}"


def _line(record: Record, workload: str, method: str) -> list[str]:
    found = [case_of(record, workload, method, which) for which in PASSES]
    remark = reasons(found) or _remark(found)
    predicted = " / ".join(_predicted(case) for case in found)
    share, memory, first = (
        _pair(found, "share", 100.0, " %"),
        _pair(found, "bytes", 1e-9),
        _pair(found[:1], "first_s", 1.0),
    )
    return [method, _pair(found, "seconds", 1e3), _spreads(found), predicted, share, memory, first, remark]


def _remark(cases: list[Record | None]) -> str:
    """Which backend auto took; how far off a peer is that was timed all the same."""
    for case in cases:
        if case and "takes" in case:
            return f"takes {case['takes']}"
        if case and "reason" in case:
            return f"less exact: {case['reason']}"
    return ""


def _predicted(case: Record | None) -> str:
    return "-" if not case or "predicted_s" not in case else rounded(case["predicted_s"] * 1e3, DIGITS)


def _spreads(cases: list[Record | None]) -> str:
    ends = [[cell(case, name, 1e3, digits=DIGITS) for name in ("p10", "p90")] for case in cases]
    return " / ".join("-" if low == "-" else f"{low} .. {high}" for low, high in ends)


def _conclusions(record: Record) -> Iterator[str]:
    yield from targets_table(record)
    if record.get("stopped"):
        yield f"Stopped: {record['stopped']}; carry on with --resume."
    elif record["waiting"]:
        yield f"{record['waiting']} methods wait for more time; carry on with --resume."


def _pair(cases: list[Record | None], name: str, factor: float, suffix: str = "") -> str:
    found = [cell(case, name, factor, suffix, DIGITS) for case in cases]
    return "-" if set(found) == {"-"} else " / ".join(found)
