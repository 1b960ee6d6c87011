"""Records as text: a table for each workload, and one of the targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.records import Record, case_of, value_of

__all__ = ["Columns", "cell", "markdown", "methods_table", "rounded", "targets_table"]

# of each column its field in a case, the factor of its unit, and what stands behind a number
Columns = Mapping[str, tuple[str, float, str]]


def methods_table(
    record: Record, workload: str, passes: Sequence[str], columns: Columns, digits: int = 2
) -> str:
    """A row for each method of a workload; a cell has the numbers of both passes."""
    names = dict.fromkeys(case["method"] for case in record["cases"] if case["workload"] == workload)
    rows = []
    for name in names:
        cases = [case_of(record, workload, name, which) for which in passes]
        numbers = (_pair(cases, *column, digits=digits) for column in columns.values())
        rows.append([name, *numbers, _remark(cases)])
    return markdown(["method", *columns, "remark"], rows)


def _remark(cases: Iterable[Record | None]) -> str:
    """Why cases were not measured, at most 100 characters; else which backend auto took, or how a peer is wrong."""
    known = [case for case in cases if case is not None]
    reasons = (f"{case['status']}: {case['reason']}" for case in known if case["status"] != "measured")
    notes = (f"takes {case['takes']}" if "takes" in case else case.get("reason", "") for case in known)
    return ("; ".join(dict.fromkeys(reasons)) or next(iter(notes), ""))[:100]


def targets_table(record: Record) -> Iterator[str]:
    """The targets of a record as one table, if it has any."""
    head = ["target", "pass", "promised", "measured", "met"]
    if record["targets"]:
        yield markdown(head, (_target(row) for row in record["targets"]))


def _target(row: Record) -> list[str]:
    value = "not measured" if row["value"] is None else f"{row['value']:.3g}"
    promise, met = f"{row['sense']} {row['bound']:g} {row['words']}", {True: "yes", False: "NO", None: "-"}
    return [row["workload"], row["pass"], promise, value, met[row["met"]]]


def _pair(cases: Iterable[Record | None], name: str, factor: float, suffix: str = "", digits: int = 2) -> str:
    """A number of both passes, or one dash."""
    words = [cell(case, name, factor, suffix, digits) for case in cases]
    return "-" if set(words) == {"-"} else " / ".join(words)


def cell(case: Record | None, name: str, factor: float = 1.0, suffix: str = "", digits: int = 2) -> str:
    """A number of a measured case, else a dash."""
    value = value_of(case, name)
    return "-" if value is None else f"{rounded(value * factor, digits)}{suffix}"


def rounded(value: float, digits: int = 2) -> str:
    """At least so many digits: differences below that are noise.

    >>> rounded(0.0123), rounded(1.234), rounded(34.5), rounded(12345.6), rounded(34.56, 3)
    ('0.012', '1.2', '34', '12346', '34.6')
    """
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are aligned in plain text too."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = (
        " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines
    )
    first, *others = (f"| {line} |" for line in padded)
    return "\n".join([first, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *others])
