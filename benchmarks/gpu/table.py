"""A record of a GPU as text: the report of a run, and the markdown table of the documentation."""

from __future__ import annotations

from benchmarks.gpu.targets import fill_ratios, noise
from benchmarks.gpu.workloads import AGAIN, PASSES
from benchmarks.methods import AUTO
from benchmarks.records import Record, case_of
from benchmarks.table import Columns, markdown, methods_table, pair, rounded, targets_table

__all__ = ["report", "table"]

COLUMNS: Columns = {
    "ms": ("seconds", 1e3, ""),
    "least, ms": ("least", 1e3, ""),
    "of auto": ("ratio", 1.0, "x"),
    "of the ceiling": ("share", 100.0, " %"),
    "GB": ("bytes", 1e-9, ""),
    "first call, s": ("first_s", 1.0, ""),
}


def report(record: Record) -> str:
    """The ceilings of the device, every workload with every method, the fill of tiles, then the targets."""
    parts = [] if record["measurement"] else ["A rehearsal on a CPU: its numbers are no measurement."]
    products, copies = (record["ceilings"][name] / 1e12 for name in ("products", "copy"))
    parts.append(f"{record['device']}: products {products:.3g} TFLOP/s, copies {copies:.3g} TB/s")
    for about in record["workloads"]:
        parts.append(
            f"{_title(record, about)}\n{methods_table(record, about['workload'], PASSES, COLUMNS, 3)}"
        )
    parts += [f"{name}: {reason}" for name, reason in record["unbuilt"].items()]
    begun = {about["workload"] for about in record["workloads"]} | record["unbuilt"].keys()
    parts += [f"{name}: not begun, no time was left" for name in record["due"] if name not in begun]
    if ratios := fill_ratios(record):
        words = ", ".join(f"1/{one_in}: {ratio:.2f}" for one_in, ratio in ratios.items())
        parts.append(f"flex over rows, forward, by the filled share of the tiles: {words}")
    return "\n\n".join([*parts, *targets_table(record)])


def _title(record: Record, about: Record) -> str:
    shape = f"{about['edges']:,} edges, {about['heads']} heads of {about['dim']}, {about['dtype']}"
    shape += f", gathers {about['gathers'] / 1e12:.3g} TB/s" if about["gathers"] else ""
    bands = [noise(record, about["workload"], which) for which in PASSES]
    band = " / ".join("-" if band is None else f"{100 * band:.1f} %" for band in bands)
    return f"{about['workload']}: {about['title']}, {shape}; noise {band}"


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
    columns = (COLUMNS[column] for column in ("ms", "GB", "of the ceiling"))
    ratios = (_ratios(record, name, other) for other in others)
    return [
        about["title"],
        f"{about['edges']:,}",
        takes,
        *(pair(own, *column, digits=3) for column in columns),
        *ratios,
    ]


def _ratios(record: Record, workload: str, other: str) -> str:
    """``2.1x / 1.8x``: the time of a method over that of auto; or why there is no number."""
    words = []
    for which in PASSES:
        case = case_of(record, workload, other, which)
        if case is None or case["status"] == "measured":
            ratio = None if case is None else case.get("ratio")
            words.append("-" if ratio is None else f"{rounded(ratio, 3)}x")
        else:
            words.append(case["status"])
    return " / ".join(words if any(word.endswith("x") for word in words) else dict.fromkeys(words))
