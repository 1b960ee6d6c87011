"""A record as text: the full report for a terminal, and the short markdown table of the README."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.methods import AUTO, PEERS
from benchmarks.records import Record, case_of, value_of

__all__ = [
    "README",
    "cell",
    "markdown",
    "reasons",
    "report",
    "rounded",
    "table",
    "targets_line",
    "targets_table",
]

PASSES = ("forward", "both")
# The rows of the README's table.
README = [
    "a2048",
    "b2048",
    "b8192",
    "b131072",
    "c16384",
    "d34",
    "e16384",
    "e65536",
    "f1024",
    "g34",
    "g100000",
    "h2048",
]
SHORT = {"out of memory by estimate": "out of memory", "too slow by estimate": "too slow"}


def table(record: Record, allocator: str = "default", only: Sequence[str] | None = None) -> str:
    """Markdown, a row for each workload: what auto needs, and how many times the time and the memory of it
    each peer takes.

    ``24x / 21x`` is forward / forward and backward; times are medians, ratios medians of paired ratios. A
    dash was not run. ``only`` names the workloads, :data:`README` for one; all but those of the density sweep
    unless given.
    """
    here = (w for w in record["workloads"] if w["allocator"] == allocator)
    shown = [w for w in here if (w["workload"][0] != "x" if only is None else w["workload"] in only)]
    names = [name for name in PEERS if any(case["method"] == name for case in record["cases"])]
    head = ["workload", "edges", "ours, ms", "MB", "roofline", *(f"{name}: time, memory" for name in names)]
    return markdown(
        head,
        (
            [*_own(record, w, allocator), *(_peer(record, w, name, allocator) for name in names)]
            for w in shown
        ),
    )


def targets_line(record: Record) -> str:
    """In a line: how many targets are met, of those that were measured, and each that is not, with what was
    measured.

    ``18 / 17 (at least 25 / 20 times ...)`` is forward / forward and backward, where both are missed.
    """
    measured = [row for row in record["targets"] if row["met"] is not None]
    missed = [row for row in measured if not row["met"]]
    alike: dict[tuple[str, str, str, str], list[Record]] = {}
    for row in missed:
        alike.setdefault((row["workload"], row.get("method", AUTO), row["sense"], row["words"]), []).append(
            row
        )
    each = "; ".join(_missed(*promise, rows) for promise, rows in alike.items())
    return f"{len(measured) - len(missed)} of {len(measured)} targets met" + (
        f", missed: {each}." if missed else "."
    )


def _missed(workload: str, method: str, sense: str, words: str, rows: Sequence[Record]) -> str:
    values, bounds = (" / ".join(f"{row[name]:.3g}" for row in rows) for name in ("value", "bound"))
    passes = f" {rows[0]['pass']}" if len(rows) == 1 else ""
    bounds = bounds if len({row["bound"] for row in rows}) > 1 else f"{rows[0]['bound']:g}"
    return f"{workload}{passes} {values} ({'' if method == AUTO else f'{method} '}{sense} {bounds} {words})"


def _own(record: Record, workload: Record, allocator: str) -> list[str]:
    cases = [case_of(record, workload["workload"], AUTO, which, allocator) for which in PASSES]
    units = {"seconds": (1e3, ""), "memory_mb": (1.0, ""), "roofline": (100.0, " %")}
    numbers = [[cell(case, name, *unit) for case in cases] for name, unit in units.items()]
    edges = f"{workload['edges']:,}" if "edges" in workload else "-"
    return [str(workload["title"]), edges, *(" / ".join(pair) for pair in numbers)]


def _peer(record: Record, workload: Record, name: str, allocator: str) -> str:
    """``24x / 21x, 13x / 2x``, or why there is no number."""
    both = [
        [case_of(record, workload["workload"], method, which, allocator) for which in PASSES]
        for method in (name, AUTO)
    ]
    theirs, ours = both
    if all(case is None for case in theirs):
        return "-"
    times = [_times(case) for case in theirs]
    if not any(time.endswith("x") for time in times):
        return " / ".join(dict.fromkeys(times))
    smaller = [_smaller(*pair) for pair in zip(ours, theirs, strict=True)]
    return f"{' / '.join(times)}, {' / '.join(smaller)}"


def _times(case: Record | None) -> str:
    if case is None:
        return "-"
    if case["status"] != "measured":
        return str(SHORT.get(case["status"], case["status"]))
    return "-" if case.get("ratio") is None else f"{rounded(case['ratio'])}x"


def _smaller(ours: Record | None, theirs: Record | None) -> str:
    if ours is None or theirs is None or any(case["status"] != "measured" for case in (ours, theirs)):
        return "-"
    return f"{rounded(theirs['memory_mb'] / max(ours['memory_mb'], 1.0))}x"


def report(record: Record) -> str:
    """Every workload with every method, then growth, crossover and targets."""
    parts = [_machine(record), *(_methods(record, workload) for workload in record["workloads"])]
    return "\n\n".join([*parts, *_conclusions(record)])


def _machine(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    machine = f"{record['processor']}, {record['threads']} threads, {record['memory_gib']} GiB"
    return f"{machine}; {versions}; {record['date']}, {record['took_s']:.0f} s"


def _methods(record: Record, workload: Record) -> str:
    name, allocator = workload["workload"], workload["allocator"]
    title = f"{name}: {workload['title']} ({allocator} allocator)"
    if "limits" not in workload:
        return f"{title}: {workload.get('reason', '')}"
    limits = workload["limits"]
    reached = f"{limits['gemm_gflops']:.0f} GFLOP/s, copies {limits['copy_gb_s']:.0f} GB/s"
    about = f"{workload['edges']:,} edges; {reached}"
    here = (case for case in record["cases"] if (case["workload"], case["allocator"]) == (name, allocator))
    methods = dict.fromkeys(case["method"] for case in here)
    head = ["method", "forward, ms", "fwd+bwd, ms", "of auto", "MB", "roofline", "samples (noisy)", "remark"]
    return (
        f"{title}: {about}\n{markdown(head, (_line(record, name, method, allocator) for method in methods))}"
    )


def _line(record: Record, workload: str, method: str, allocator: str) -> list[str]:
    found = [case_of(record, workload, method, which, allocator) for which in PASSES]
    times = [cell(case, "seconds", 1e3) for case in found]
    ratios = [cell(case, "ratio", suffix="x") for case in found]
    samples = [_counts(case) for case in found]
    shares = [cell(case, "roofline", 100, " %") for case in found]
    memory = [cell(case, "memory_mb") for case in found]
    return [method, *times, *(" / ".join(pair) for pair in (ratios, memory, shares, samples)), reasons(found)]


def _counts(case: Record | None) -> str:
    return "-" if case is None or "samples" not in case else f"{case['samples']} ({case['noisy']})"


def _conclusions(record: Record) -> Iterator[str]:
    if record["growth"]:
        head = ["growth of", "with", "over", "pass", "allocator", "exponent"]
        keys = ("quantity", "by", "family", "pass", "allocator")
        yield markdown(
            head, ([*(str(row[key]) for key in keys), f"{row['exponent']:.2f}"] for row in record["growth"])
        )
    if record["crossover"]:
        head = ["crossover with SDPA mask: random", "method", "pass", "density"]
        yield markdown(
            head, ([row["kind"], row["method"], row["pass"], _density(row)] for row in record["crossover"])
        )
    yield from targets_table(record)


def _density(row: Record) -> str:
    """The density of the crossing, or on which side of it everything was."""
    if row["density"] is not None:
        return f"{row['density']:.3f}"
    advantages = [advantage for _, advantage in row["points"]]
    return (
        "ours is faster at all"
        if min(advantages) > 1
        else "SDPA is faster at all"
        if max(advantages) < 1
        else "-"
    )


def targets_table(record: Record) -> Iterator[str]:
    """The targets of a record as one table, if it has any."""
    if record["targets"]:
        yield markdown(
            ["target", "pass", "promised", "measured", "met"], (_target(row) for row in record["targets"])
        )


def _target(row: Record) -> list[str]:
    value = "not measured" if row["value"] is None else f"{row['value']:.3g}"
    method = "" if row.get("method", AUTO) == AUTO else f"{row['method']} "
    met = {True: "yes", False: "NO", None: "-"}[row["met"]]
    return [
        row["workload"],
        row["pass"],
        f"{method}{row['sense']} {row['bound']:g} {row['words']}",
        value,
        met,
    ]


def reasons(cases: Iterable[Record | None]) -> str:
    """Why cases were not measured, at most 100 characters."""
    found = (f"{case['status']}: {case['reason']}" for case in cases if case and case["status"] != "measured")
    return "; ".join(dict.fromkeys(found))[:100]


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
    padded = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded[0], rule, *padded[1:]])
