"""Format records as text: a table for each workload, and a table of the targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.records import Record, case_of, value_of

__all__ = ["TARGET_HEAD", "Columns", "cell", "format_number", "markdown", "methods_table", "target_cells"]
__all__ += ["targets_table"]

# The columns of a table, each with a field of a case, the factor of its unit, and a suffix.
Columns = Mapping[str, tuple[str, float, str]]
TARGET_HEAD = ("target", "pass", "promised", "measured", "met")


def methods_table(
    record: Record, workload: str, passes: Sequence[str], columns: Columns, digits: int = 2
) -> str:
    """Format a row for each method of a workload, whose cells have the numbers of both passes."""
    names = dict.fromkeys(case["method"] for case in record["cases"] if case["workload"] == workload)
    rows = []
    for name in names:
        cases = [case_of(record, workload, name, which) for which in passes]
        numbers = (_pair(cases, *column, digits=digits) for column in columns.values())
        rows.append([name, *numbers, _remark(cases)])
    return markdown(["method", *columns, "remark"], rows)


def _remark(cases: Iterable[Record | None]) -> str:
    """Return why cases were not measured, else the backend that auto took or the error of a peer."""
    existing = [case for case in cases if case is not None]
    reasons = (f"{case['status']}: {case['reason']}" for case in existing if case["status"] != "measured")
    notes = (f"takes {case['takes']}" if "takes" in case else case.get("reason", "") for case in existing)
    return ("; ".join(dict.fromkeys(reasons)) or next(iter(notes), ""))[:100]


def targets_table(record: Record) -> Iterator[str]:
    """Yield a table of the targets of a record, if it has any."""
    if record["targets"]:
        yield markdown(TARGET_HEAD, map(target_cells, record["targets"]))


def target_cells(row: Record) -> list[str]:
    """Return the cells of a target under ``TARGET_HEAD``."""
    value = "not measured" if row["value"] is None else f"{row['value']:.3g}"
    promise = row["words"] if row["bound"] is None else f"{row['sense']} {row['bound']:g} {row['words']}"
    met = {True: "yes", False: "NO", None: "-"}[row["met"]]
    return [row["workload"], row["pass"], promise, value, met]


def _pair(cases: Iterable[Record | None], name: str, factor: float, suffix: str = "", digits: int = 2) -> str:
    """Format a number of both passes, or one dash if neither has it."""
    cells = [cell(case, name, factor, suffix, digits) for case in cases]
    return "-" if set(cells) == {"-"} else " / ".join(cells)


def cell(case: Record | None, name: str, factor: float = 1.0, suffix: str = "", digits: int = 2) -> str:
    """Format a number of a measured case, or a dash."""
    value = value_of(case, name)
    return "-" if value is None else f"{format_number(value * factor, digits)}{suffix}"


def format_number(value: float, digits: int = 2) -> str:
    """Format a number with ``digits`` significant digits; an integer keeps all of its digits.

    >>> [format_number(x) for x in (0.0123, 1.234, 34.5, 12345.6)], format_number(34.56, 3)
    (['0.012', '1.2', '34', '12346'], '34.6')
    """
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown whose columns are also aligned as text."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = (
        " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines
    )
    header, *body = (f"| {line} |" for line in padded)
    return "\n".join([header, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])
