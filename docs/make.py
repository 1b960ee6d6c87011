"""Generate pages of docs/ from the code and from records of measurements.

    python docs/make.py          # write the pages
    python docs/make.py --check  # write nothing; exit code 1 if a page is out of date

``backends.md`` comes from ``list_backends()``, ``guarantees.md`` and ``benchmarks.md`` come from the newest records
in ``tests/records``, and ``explore.html`` from ``gnn-attention explore``, so that a reader can open it without
installing anything. In ``glossary.md`` only the table of views is generated. In ``sources.md`` the claims are written
by hand, and only the last column, which says where each claim is shown, is generated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# The benchmarks and tests are not installed.
sys.path.insert(0, str(ROOT))

from benchmarks import primitives  # noqa: E402
from benchmarks.chosen_graphs import judge  # noqa: E402
from benchmarks.gpu import table as gpu_table  # noqa: E402
from gnn_attention import explorer, list_backends  # noqa: E402
from gnn_attention.layer import glossary  # noqa: E402
from tests.guarantees import gpu_record  # noqa: E402
from tests.guarantees.registry import GUARANTEES  # noqa: E402

RECORDS = ROOT / "tests" / "records"
MADE = "<!-- Made by docs/make.py: change the code or the record, then run it. -->"
Record = dict[str, Any]


def newest(pattern: str) -> Path:
    """Return the newest record whose name matches; names begin with the date."""
    return max(RECORDS.glob(pattern))


def read(path: Path) -> Record:
    """Read a record."""
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown.

    >>> print(table(["a", "b"], [["1", "x|y"]]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    lines = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    header, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([header, "|" + "---|" * len(head), *body])


def page(title: str, *parts: str) -> str:
    """Join a page from a note that it is generated, its title, and its parts as paragraphs."""
    return "\n\n".join([MADE, f"# {title}", *parts]) + "\n"


def link(path: Path, text: str = "") -> str:
    """Link to a file of the repository from a page in docs/."""
    target = Path(os.path.relpath(path, DOCS)).as_posix()
    return f"[{text or '`' + path.name + '`'}]({target})"


# ---- backends


def backends() -> str:
    """Return the page of what each backend supports on this machine."""
    rows = [[f"`{name}`", text] for name, text in list_backends().items()]
    return page(
        "Backends",
        '`attend(..., backend="auto")` takes the cheapest that supports the call; `ga.explain(graph, heads, dim)` prints the '
        "estimate of each. A backend that is named never falls back to another: where it does not support a call it raises "
        "`RefusalError` with the reason. `ga.list_backends()` gives this table for your machine.",
        table(["backend", "what it supports"], rows),
        f"The table is {link(ROOT / 'gnn_attention' / 'backends' / '__init__.py', '`gnn_attention/backends`')}; "
        "how to add a row is in [CONTRIBUTING.md](../CONTRIBUTING.md#a-backend).",
    )


# ---- guarantees


def guarantees() -> str:
    """Return the page of guarantees, with thresholds and measurements, and of what is verified on a GPU."""
    path = max(RECORDS.glob("*-guarantees.json"))
    record = read(path)
    # A record may contain guarantees that no longer exist.
    entries = [entry for entry in record["guarantees"] if entry["name"] in GUARANTEES]
    rows = [[entry["name"], entry["promise"], entry["bar"], format_result(entry)] for entry in entries]
    return page(
        "What is tested",
        "Each promise of the library has a threshold. The results were measured with "
        f"{versions(record['environment'])} "
        f"({link(path)}). `python -m tests.guarantees` in a checkout measures all promises in a quarter of an "
        "hour, `python -m tests.guarantees F4` one of them. Two more promises are sampled by tests: invalid input "
        f"raises a clear error ({link(ROOT / 'tests' / 'test_malformed.py', '`tests/test_malformed.py`')}), and "
        f"threads do not disturb each other ({link(ROOT / 'tests' / 'guarantees' / 'test_threads.py')}).",
        table(["", "promise", "threshold", "measured"], rows),
        "## On a GPU",
        gpu_record.markdown(),
    )


def format_result(guarantee: Record) -> str:
    """Format the measurement of a guarantee, with a warning if it fails or is incomplete."""
    part = "" if guarantee["full"] else f"in part ({guarantee['count']:,} cases): "
    result = f"{part}{guarantee['value']}"
    return result if guarantee["holds"] else f"**fails**: {result}"


def versions(environment: Record) -> str:
    """Format the versions of Python and packages that a record names."""
    names = ("python", "torch", "torch_geometric", "transformers", "triton")
    return ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))


# ---- benchmarks

PASSES = ("forward", "both")
UNITS = {"seconds": (1e3, ""), "memory_mb": (1.0, ""), "roofline": (100.0, " %")}


def benchmarks() -> str:
    """Return the page of benchmarks: peers, missed targets, primitives, training, chosen graphs, influence and GPU."""
    path, training, rows = map(newest, (f"*-bench-{x}.json" for x in ("attention", "training", "primitives")))
    record = read(path)
    return page(
        "Benchmarks",
        f"{record['processor']}, {record['cores']} cores, {record['memory_gib']} GiB; "
        f"{versions(record['versions'])}; "
        f"8 heads of 64, float32 ({link(path)}, {record['date'][:10]}). `gnn-attention bench` prints a "
        "short table for your "
        "machine; `python -m benchmarks` in a checkout measures all of these tables.",
        "A peer's `4x / 5x` means that it takes 4 times the time (or memory) of "
        '`backend="auto"` forward, and 5 times forward and backward. Numbers are medians of interleaved runs. A dash '
        "was not run. The roofline is the share of the peak rate of the machine.",
        against_peers(record),
        *targets(record),
        "## Edge features, derivatives, primitives",
        f"`python -m benchmarks primitives` measures other calls of `attend` ({link(rows)}). {primitives.text(read(rows))}",
        "## Training",
        training_speed(read(training), training),
        "## Graphs chosen by the data",
        *chosen_graphs(newest("*-chosen-graphs.json")),
        "## The edges that a language model needs",
        *pruning(newest("*-lm-graphs.json")),
        *edge_cuts(newest("*-edge-cuts.json")),
        "## Graphs that a model chooses",
        *indexer_training(newest("*-indexer-training.json")),
        *indexer_recall(newest("*-indexer-smollm2.json")),
        "## Reach, influence, bound",
        *influence(newest("*-influence-bound.json")),
        "## On a GPU",
        *on_a_gpu(),
    )


def on_a_gpu() -> Iterator[str]:
    """Yield the newest record of the workloads on a GPU, with how each peer compares with auto."""
    record = read(path := newest("*-bench-gpu.json"))
    yield f"{record['device']}, torch {record['torch']}, triton {record['triton']} ({link(path)})."
    yield gpu_table.table(record)


def chosen_graphs(path: Path) -> Iterator[str]:
    """Yield the targets for graphs that are built, planned and run in every step."""
    record = read(path)
    yield (
        "Every step makes a graph, plans it and runs it forward and backward, with 8 heads of 64 in float32. Numbers "
        "are the least CPU seconds of one thread; the methods ran in turns on a machine with other work "
        f"({link(path)}, `{record['command']}`)."
    )
    rows = [
        [t["row"], f"{t['value']:.3g} {t['words']}", f"{t['sense']} {t['bound']:g}", ("no", "yes")[t["met"]]]
        for t in judge(record)
    ]
    yield table(["selection", "measured", "target", "met"], rows)


def pruning(path: Path) -> Iterator[str]:
    """Yield the losses of SmolLM2 along pruned graphs."""
    record = read(path)
    points = sorted(record["points"], key=lambda point: -point["share"])
    causal = next(point["loss"] for point in points if point["choice"] == "causal")
    fewest = min(point["share"] for point in points if point["loss"] <= 1.01 * causal)
    yield (
        f"SmolLM2 (135 M parameters, 30 layers of 9 heads) on the first {record['tokens']:,} tokens of "
        f"`{record['text']}`: the table has the mean loss after position {record['loss_after']} along a share of the pairs "
        "of head and edge, with `use_graph` and without training. Attribution and weights come from the same "
        f"text. The goal was a loss within 1 % of causal along 5 % of the pairs; it takes at least {fewest:.1%} of them "
        f"({link(path)}, `{record['command']}`)."
    )
    yield "![Loss against the share of the remaining pairs of head and edge](lm_graphs.png)"
    rows = [
        [p["choice"], f"{p['share']:.1%}", f"{p['loss']:.3f}", f"{p['loss'] / causal - 1:+.1%}"]
        for p in points
    ]
    yield table(["choice", "remaining pairs", "loss", "change from causal"], rows)


def edge_cuts(path: Path) -> Iterator[str]:
    """Yield the rank correlations of first-order effects of edges with true ones."""
    models: Record = read(path)["models"]
    yield (
        "`ga.trace.attribute` estimates the effects of edges to first order. The table compares them with true effects, "
        "for which one edge of one head is cut or muted: Spearman's rank correlation over random edges and over those with the largest effects "
        f"({link(path)}, `python -m examples.edge_cuts RECORD --model MODEL --edges EDGES`)."
    )
    ways = list(dict.fromkeys(way for model in models.values() for way in model["correlations"]))
    rows = [
        [name, str(model["tokens"]), f"{model['edges']:,} of {model['of']:,}"]
        + [f"{model['correlations'][way]:.3f}" for way in ways]
        for name, model in models.items()
    ]
    yield table(["model", "tokens", "edges", *ways], rows)


def indexer_training(path: Path) -> Iterator[str]:
    """Yield the losses of a small model whose layers choose their graphs, by the graph of its last steps."""
    record = read(path)
    steps = record["steps"]
    yield (
        f"A model of two layers is trained from scratch on the sources of the standard library: first with 512 tokens, then "
        f"for {steps['dense']} steps with {record['tokens']:,} tokens along all causal pairs, while its indexers learn, and "
        f"then for {steps['continued']} steps along {record['senders']} senders that they choose. The control continues along "
        f"all pairs. The losses are those of {record['texts held out']} held-out texts "
        f"({link(path)}, `{record['command']} --out RECORD`)."
    )
    causal = record["loss of control"]
    rows = [
        [name.removeprefix("loss of ")]
        + [f"{loss:.3f} ({loss / base - 1:+.1%})" for loss, base in zip(losses, causal, strict=True)]
        for name, losses in record.items()
        if name.startswith("loss of ")
    ]
    yield table(["model", "loss", "loss of the second half of each text"], rows)


def indexer_recall(path: Path) -> Iterator[str]:
    """Yield the share of SmolLM2's attention that trained indexers cover, by number of senders."""
    record = read(path)
    texts, mean, senders = record["texts"], record["mean over layers"], record["recall for k of"]
    yield (
        f"Indexers for each key head of SmolLM2 learned by the divergence alone from {texts['training']} texts "
        f"of {record['tokens']:,} tokens ({record['training']['steps']} steps). The table has the share of the attention on k "
        f"senders in {texts['held out']} held-out texts, as a mean over layers, beside the best selection for each key head "
        f"and the best one that all heads share ({link(path)}, `{record['command']} --out RECORD`)."
    )
    choices = ("indexer", "best", "best for all heads")
    rows = [[choice, *(f"{share:.3f}" for share in mean[choice])] for choice in choices]
    yield table(["choice", *(f"k = {k}" for k in senders)], rows)


def influence(bound: Path) -> Iterator[str]:
    """Yield how well the Jacobian of SmolLM2 is predicted, and how tight the bound is for the shipped model."""
    yield (
        "`|d last state[dst] / d embedding[src]|` of SmolLM2 over 512 tokens is measured on one text in float64. "
        "`analyse.influence` predicts it from the graph and from means over kinds of edges on another text. The table has "
        "rank correlations, and how many powers of ten the means by distance span (`python -m benchmarks.lm_influence "
        "--graph window`, `sinks` or `strided`). Along the strided graph, two hops reach every token, so the influence "
        "depends on the text, which the means describe poorly."
    )
    names = ("spearman_by_pair", "spearman_by_pair_of_distance_alone", "spearman_by_distance")
    paths = [newest(f"*-influence{name}.json") for name in ("", "-sinks", "-strided")]
    rows = [
        [link(path, f"`{r['graph']}`"), f"{r['orders']:.1f}", *(f"{r[name]:.3f}" for name in names)]
        for path, r in zip(paths, map(read, paths), strict=True)
    ]
    yield table(["graph", "powers of ten", "pairs", "by pair, of distance alone", "by distance"], rows)
    record = read(bound)
    least = min(graph["least_slack"] for graph in record["graphs"])
    yield (
        f"`examples.bounds.influence_bound` is compared with the exact norms of the small model, for {record['tokens']} "
        f"tokens in float64: {record['violations']} of {record['pairs']:,} pairs over {len(record['graphs'])} graphs "
        f"exceed the bound, which is at least {least:.1f} times the norm ({link(bound)}, `{record['command']}`)."
    )


def against_peers(record: Record) -> str:
    """Format a row for each workload: time and memory of auto, and of each peer as multiples of these."""
    cases = {
        (c["workload"], c["method"], c["pass"]): c for c in record["cases"] if c["allocator"] == "default"
    }
    peers = list(dict.fromkeys(c["method"] for c in record["cases"] if not c["ours"]))
    workloads = [
        w for w in record["workloads"] if w["allocator"] == "default" and not w["workload"].startswith("x-")
    ]
    head = ["workload", "edges", "ours, ms", "MB", "roofline", *(f"{peer}: time, memory" for peer in peers)]
    rows = ([*auto_cells(cases, w), *(peer_cell(cases, w["workload"], p) for p in peers)] for w in workloads)
    return table(head, rows)


def auto_cells(cases: dict[tuple[str, str, str], Record], workload: Record) -> Iterator[str]:
    """Yield title and edges of a workload, and time, memory and roofline of ``backend="auto"``."""
    yield workload["title"]
    yield f"{workload['edges']:,}" if "edges" in workload else "-"
    ours = [cases.get((workload["workload"], "auto", which)) for which in PASSES]
    for name, (factor, unit) in UNITS.items():
        numbers = (case.get(name) if case else None for case in ours)
        yield " / ".join("-" if x is None else round_digits(x * factor) + unit for x in numbers)


def peer_cell(cases: dict[tuple[str, str, str], Record], workload: str, peer: str) -> str:
    """Format time, then memory, as in ``24x / 21x, 13x / 2x``, or the reason why nothing was measured."""
    theirs = [cases.get((workload, peer, which)) for which in PASSES]
    ours = [cases.get((workload, "auto", which)) for which in PASSES]
    if not any(theirs):
        return "-"
    times = [times_of(case) for case in theirs]
    if not any(time.endswith("x") for time in times):
        return " / ".join(dict.fromkeys(times))
    return f"{' / '.join(times)}, {' / '.join(memory_of(*pair) for pair in zip(ours, theirs, strict=True))}"


def times_of(case: Record | None) -> str:
    """Format the time as a multiple of auto's, or the reason why it was not measured."""
    if case is None:
        return "-"
    if case["status"] != "measured":
        return str(case["status"]).removesuffix(" by estimate")
    return "-" if case.get("ratio") is None else f"{round_digits(case['ratio'])}x"


def memory_of(ours: Record | None, theirs: Record | None) -> str:
    """Format the memory as a multiple of auto's."""
    if ours is None or theirs is None or any(case["status"] != "measured" for case in (ours, theirs)):
        return "-"
    return f"{round_digits(theirs['memory_mb'] / max(ours['memory_mb'], 1.0))}x"


def targets(record: Record) -> Iterator[str]:
    """Yield how many targets are met, and a table of the others."""
    rows = [row for row in record["targets"] if row["met"] is not None]
    missed_rows = [row for row in rows if not row["met"]]
    yield "## Targets"
    yield f"{len(rows) - len(missed_rows)} of {len(rows)} targets are met. These are not:"
    titles = {w["workload"]: w["title"] for w in record["workloads"]}
    cells = (
        [titles[r["workload"]], r["pass"], f"{r['sense']} {r['bound']:g} {r['words']}", f"{r['value']:.3g}"]
        for r in missed_rows
    )
    yield table(["workload", "pass", "target", "measured"], cells)


def training_speed(record: Record, path: Path) -> str:
    """Compare training on long windows with ``attend`` and with SDPA and a mask."""
    recipe, (ours, _) = record["recipe"], record["runs"]
    return (
        f"{recipe['steps']} training steps of {recipe['length']:,} tokens along `{recipe['graph']}` are {record['faster']:.1f} times "
        f"faster than with SDPA and a mask, and take {record['smaller']:.1f} times less memory "
        f"({ours['seconds'] / recipe['steps']:.1f} s and {ours['peak_memory_mb'] / 1e3:.1f} GB a step). The losses differ by "
        f"at most {record['apart']:g} ({link(path)})."
    )


def round_digits(value: float) -> str:
    """Format a number with two significant digits, or as an integer: smaller differences are noise.

    >>> round_digits(0.0123), round_digits(1.234), round_digits(34.5)
    ('0.012', '1.2', '34')
    """
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


# ---- sources

ROW = re.compile(r"^\| (S\d\.\d+) \| (.*) \| [^|]*\|$", re.MULTILINE)
PAPER = re.compile(r"^\| (\d{4}\.\d{5}|Xiao 2025) \| (.*?) \| .*\|$", re.MULTILINE)
CITED = re.compile(r"\bS(\d)\.(\d+)(?: to S(\d)\.(\d+))?")


def sources() -> str:
    """Return the page with the last column of its tables replaced."""
    text = (DOCS / "sources.md").read_text(encoding="utf-8")
    text = ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {', '.join(links_of_claim(row[1]))} |", text)
    return PAPER.sub(lambda row: f"| {row[1]} | {row[2]} | {', '.join(links_of_paper(row[1]))} |", text)


def links_of_paper(paper: str) -> Iterator[str]:
    """Yield links to the notebooks, modules and tests that name a paper."""
    yield from links_where(lambda path: paper in path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if paper in path.read_text(encoding="utf-8"):
            yield link(path, path.relative_to(ROOT).as_posix())


def links_of_claim(claim: str) -> Iterator[str]:
    """Yield links to the test of a claim, and to the notebooks and modules that cite it."""
    prefix = f"test_{claim.replace('.', '_')}_"
    yield from (link(path, "test") for name, path in tests() if name.startswith(prefix))
    yield from links_where(lambda path: claim in cited_claims(path))


def links_where(has: Callable[[Path], bool]) -> Iterator[str]:
    """Yield links to the notebooks, modules and examples for which ``has(path)`` is True."""
    for path in filter(has, sorted((ROOT / "notebooks").glob("[0-9]*.py"))):
        yield link(path.with_suffix(".ipynb"), f"notebook {path.name[:2]}")
    for path in filter(has, sorted((ROOT / "gnn_attention").rglob("*.py"))):
        yield link(path, path.relative_to(ROOT / "gnn_attention").as_posix())
    for path in filter(has, sorted((ROOT / "examples").rglob("*.py"))):
        yield link(path, path.relative_to(ROOT).as_posix())


@cache
def tests() -> tuple[tuple[str, Path], ...]:
    """Return (name, file) of every test that is named after a claim."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    name_of = re.compile(r"^def (test_S\d_\d+_\w+)", re.MULTILINE)
    return tuple((name, path) for path in files for name in name_of.findall(path.read_text(encoding="utf-8")))


@cache
def cited_claims(path: Path) -> frozenset[str]:
    """Return the ids of the claims that a file cites, including those inside a range ("S0.4 to S0.6")."""
    claims = set()
    for text, first, _, last in CITED.findall(path.read_text(encoding="utf-8")):
        claims |= {f"S{text}.{number}" for number in range(int(first), int(last or first) + 1)}
    return frozenset(claims)


# ---- glossary


VIEWS_TABLE = re.compile(r"(?<=<!-- views -->\n\n).*?(?=\nAn empty cell)", re.DOTALL)


def glossary_page() -> str:
    """Return the glossary with its table of views replaced."""
    head = ("here", "TransformerLens", *glossary.VIEWS)
    terms = [replace(term, hook=term.hook and f"`{term.hook}`") for term in glossary.GLOSSARY]
    rows = [[part or "" for part in astuple(term)] for term in terms]
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    return VIEWS_TABLE.sub(lambda _: table(head, rows) + "\n", text)


# ---- the line of the GPU

GPU_LINE = re.compile(r"(?<=<!-- gpu -->\n).*?(?=<!-- /gpu -->)", re.DOTALL)


def with_gpu_line(name: str) -> str:
    """Return a page with the line between its GPU marks replaced by the status of the GPU record."""
    return GPU_LINE.sub(lambda _: f"{gpu_record.status()}\n", (DOCS / name).read_text(encoding="utf-8"))


# ---- writing

PAGES: dict[str, Callable[[], str]] = {
    "backends.md": backends,
    "guarantees.md": guarantees,
    "benchmarks.md": benchmarks,
    "sources.md": sources,
    "glossary.md": glossary_page,
    "explore.html": lambda: explorer.page().html,
    **{name: partial(with_gpu_line, name) for name in ("limits.md", "../README.md", "../CONTRIBUTING.md")},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with ``--check`` print which would change."""
    parser = argparse.ArgumentParser(description="Generate pages of docs/ from code and records.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page changes")
    check = parser.parse_args(arguments).check
    outdated = [name for name, make in PAGES.items() if not is_current(name, make())]
    for name in outdated:
        print(f"docs/{name} is not current: run python docs/make.py" if check else f"wrote docs/{name}")
        if not check:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
    return 1 if check and outdated else 0


def is_current(name: str, text: str) -> bool:
    """Return whether the page on disk has this text."""
    path = DOCS / name
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
