"""A record of a GPU as text: the full report for a terminal, and the short markdown table of the README."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gnn_attention.bench.gpu import records
from gnn_attention.bench.gpu.methods import AGAIN, AUTO, PEERS
from gnn_attention.bench.gpu.targets import case_of, noise
from gnn_attention.bench.gpu.workloads import PASSES
from gnn_attention.bench.table import markdown
from gnn_attention.verify.record import RECORDS

__all__ = ["newest", "readme", "report", "table"]

Record = dict[str, Any]


def newest(folder: Path = RECORDS) -> tuple[Path, Record] | None:
    """The newest record of a measurement in a folder; None while there is none.

    >>> newest(Path("no such folder")) is None
    True
    """
    for path in sorted(folder.glob("*-bench-gpu-*.json"), reverse=True):
        record = records.read(path)
        if record["measurement"] and not record["quick"]:
            return path, record
    return None


def readme(folder: Path = RECORDS) -> str:
    """What the README shows of the benchmark on a GPU: nothing while there is no record."""
    found = newest(folder)
    if found is None:
        return ""
    path, record = found
    told = f"`gnn-attention bench gpu` on {record['device']}, torch {record['torch']} (`tests/records/{path.name}`)"
    return f"{told}; forward / backward:\n\n{table(record)}\n\n{kept_targets(record)}"


def table(record: Record) -> str:
    """Markdown, a row for each workload: what auto takes and needs, and how many times its time each peer does."""
    names = [name for name in PEERS if any(case["method"] == name and case["status"] == "measured" for case in record["cases"])]
    head = ["workload", "edges", "auto takes", "ms", "GB", "of the ceiling", *names]
    return markdown(head, (_row(record, about, names) for about in record["workloads"]))


def _row(record: Record, about: Record, names: list[str]) -> list[str]:
    name = about["workload"]
    own = [case_of(record, name, AUTO, which) for which in PASSES]
    took = next((case["takes"] for case in own if case and "takes" in case), "-")
    figures = [_pair(own, key, factor) for key, factor in (("seconds", 1e3), ("bytes", 1e-9))]
    share = _pair(own, "share", 100.0, " %")
    return [about["title"], f"{about['edges']:,}", took, *figures, share, *(_against(record, name, peer) for peer in names)]


def _against(record: Record, workload: str, peer: str) -> str:
    """``2.1x / 1.8x``: the peer's time over that of auto; or why there is no figure."""
    told = []
    for which in PASSES:
        theirs, ours = (case_of(record, workload, method, which) for method in (peer, AUTO))
        if theirs is None:
            told.append("-")
        elif theirs["status"] != "measured" or ours is None or ours["status"] != "measured":
            told.append(theirs["status"] if theirs["status"] != "measured" else "-")
        else:
            told.append(f"{_rounded(theirs['seconds'] / ours['seconds'])}x")
    return " / ".join(dict.fromkeys(told)) if not told[0].endswith("x") else " / ".join(told)


def kept_targets(record: Record) -> str:
    """In a line: how many targets are met, of those that were measured, and those that are not."""
    measured = [row for row in record["targets"] if row["met"] is not None]
    missed = "; ".join(
        f"{row['workload']} {row['pass']} {row['value']:.3g} ({_promise(row)})" for row in measured if not row["met"]
    )
    told = f"{sum(row['met'] for row in measured)} of {len(measured)} targets met"
    return f"{told}, missed: {missed}." if missed else f"{told}."


def _promise(row: Record) -> str:
    return f"{row['method']} {row['sense']} {row['bound']:g} {row['words']}"


# -- the full report --------------------------------------------------------------------------------------------------


def report(record: Record) -> str:
    """The device and its ceilings, every workload with every method, then the targets."""
    return "\n\n".join([*_head(record), *(_methods(record, about) for about in record["workloads"]), *_conclusions(record)])


def _head(record: Record) -> Iterator[str]:
    if not record["measurement"]:
        yield "A trial of the benchmark on a CPU: its figures are no measurement."
    ceilings = record["ceilings"]
    terabytes = ", ".join(f"{words} {ceilings[name] / 1e12:.3g} TB/s" for name, words in CEILINGS.items())
    yield (
        f"{record['device']}, driver {record['driver']}, torch {record['torch']}, triton {record['triton']}; {record['date']}\n"
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
    shape = f"{about['edges']:,} edges, {about['batch']} x {about['heads']} heads of {about['dim']}, {about['dtype']}"
    bands = [noise(record, name, which) for which in PASSES]
    band = " / ".join("-" if band is None else f"{100 * band:.1f} %" for band in bands)
    methods = dict.fromkeys(case["method"] for case in record["cases"] if case["workload"] == name)
    head = ["method", "ms", "p10 .. p90, ms", "predicted, ms", "of the ceiling", "GB", "first call, s", "remark"]
    rows = (_line(record, name, method) for method in methods if method != AGAIN)
    return f"{name}: {about['title']}, {shape}; noise {band}\n{markdown(head, rows)}"


def _line(record: Record, workload: str, method: str) -> list[str]:
    found = [case_of(record, workload, method, which) for which in PASSES]
    spread = " / ".join(_spread(case) for case in found)
    reasons = dict.fromkeys(f"{case['status']}: {case['reason']}" for case in found if case and case["status"] != "measured")
    remark = "; ".join(reasons)[:100] or next((f"takes {case['takes']}" for case in found if case and "takes" in case), "")
    predicted = " / ".join(
        "-" if not case or "predicted_s" not in case else _rounded(case["predicted_s"] * 1e3) for case in found
    )
    share, held, first = _pair(found, "share", 100.0, " %"), _pair(found, "bytes", 1e-9), _pair(found[:1], "first_s", 1.0)
    return [method, _pair(found, "seconds", 1e3), spread, predicted, share, held, first, remark]


def _spread(case: Record | None) -> str:
    if case is None or case["status"] != "measured":
        return "-"
    return f"{_rounded(case['p10'] * 1e3)} .. {_rounded(case['p90'] * 1e3)}"


def _conclusions(record: Record) -> Iterator[str]:
    if record["targets"]:
        head = ["target", "pass", "promised", "measured", "met"]
        yield markdown(head, (_target(row) for row in record["targets"]))
    if record.get("stopped"):
        yield f"Stopped: {record['stopped']}; carry on with --resume."
    elif record["waiting"]:
        yield f"{record['waiting']} methods wait for more time; carry on with --resume."


def _target(row: Record) -> list[str]:
    value = "not measured" if row["value"] is None else f"{row['value']:.3g}"
    return [row["workload"], row["pass"], _promise(row), value, {True: "yes", False: "NO", None: "-"}[row["met"]]]


# -- cells ------------------------------------------------------------------------------------------------------------


def _pair(cases: list[Record | None], name: str, factor: float, suffix: str = "") -> str:
    found = [case.get(name) if case is not None and case["status"] == "measured" else None for case in cases]
    told = ["-" if value is None else f"{_rounded(float(value) * factor)}{suffix}" for value in found]
    return "-" if set(told) == {"-"} else " / ".join(told)


def _rounded(value: float) -> str:
    """Three digits.

    >>> _rounded(0.012345), _rounded(1.2345), _rounded(34.56), _rounded(1234.5)
    ('0.0123', '1.23', '34.6', '1234')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
