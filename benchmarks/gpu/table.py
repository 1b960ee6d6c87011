"""Format a record of a GPU as text: the report of a run, and the tables of the documentation."""

from __future__ import annotations

from benchmarks.gpu.workloads import PASSES
from benchmarks.records import Record
from benchmarks.table import Columns, methods_table, targets_table

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
    """Format the ceilings of the device, a table of methods for each workload, and the targets."""
    parts = [] if record["measurement"] else ["A rehearsal on a CPU: its numbers are no measurement."]
    products, copies = (record["ceilings"][name] / 1e12 for name in ("products", "copy"))
    parts.append(f"{record['device']}: products {products:.3g} TFLOP/s, copies {copies:.3g} TB/s")
    parts += [table(record), *(f"{name}: {reason}" for name, reason in record["unbuilt"].items())]
    return "\n\n".join([*parts, *targets_table(record)])


def table(record: Record) -> str:
    """Format a Markdown table of methods (forward / backward) for each workload; "auto again" shows the noise."""
    parts = []
    for about in record["workloads"]:
        shape = f"{about['edges']:,} edges, {about['heads']} heads of {about['dim']}, {about['dtype']}"
        shape += f", gathers {about['gathers'] / 1e12:.3g} TB/s" if about["gathers"] else ""
        parts.append(f"{about['workload']}: {about['title']}, {shape}")
        parts.append(methods_table(record, about["workload"], PASSES, COLUMNS, digits=3))
    return "\n\n".join(parts)
