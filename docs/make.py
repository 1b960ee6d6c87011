"""Write the pages of docs/ that are made from the code and from the records of measurements.

    python docs/make.py          # write them
    python docs/make.py --check  # exit code 1 if one of them is not what would be written

``backends.md`` comes from ``list_backends()``, ``guarantees.md`` and ``benchmarks.md`` from the newest records
in ``tests/records``. ``explore.html`` is what ``gnn-attention explore``
writes, so that a link to it opens without an install. In ``glossary.md`` the table of views is made;
in ``sources.md`` the claims are written by hand, and the last column, where each is shown, is made here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from gnn_attention import explorer, list_backends
from gnn_attention.layer import glossary

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))  # for tests.guarantees
RECORDS = ROOT / "tests" / "records"
MADE = "<!-- Made by docs/make.py: change the code or the record, then run it. -->"
Record = dict[str, Any]


def newest(pattern: str) -> Path:
    """The newest record whose name, which begins with its date, fits."""
    return max(RECORDS.glob(pattern))


def read(path: Path) -> Record:
    """A record."""
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(table(["a", "b"], [["1", "x|y"]]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    lines = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, "|" + "---|" * len(head), *others])


def page(title: str, *parts: str) -> str:
    """A page: the note that it is made, its title, and its parts as paragraphs."""
    return "\n\n".join([MADE, f"# {title}", *parts]) + "\n"


def link(path: Path, text: str = "") -> str:
    """A link to a file of the repository, from a page in docs/."""
    target = Path(os.path.relpath(path, DOCS)).as_posix()
    return f"[{text or '`' + path.name + '`'}]({target})"


# ---- backends


def backends() -> str:
    """What each backend supports on the machine where the page is made."""
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
    """Each guarantee with its threshold and what was measured, then what is verified on a GPU."""
    # not of the package: found once the checkout is on the path
    from tests.guarantees.registry import GUARANTEES

    path = max(RECORDS.glob("*-guarantees.json"))
    record = read(path)
    # a record may hold guarantees that are no longer promised
    promised = [one for one in record["guarantees"] if one["name"] in GUARANTEES]
    rows = [[one["name"], one["promise"], one["bar"], format_result(one)] for one in promised]
    return page(
        "Guarantees",
        "Each promise of the library has a threshold. The results were measured with "
        f"{versions(record['environment'])} "
        f"({link(path)}). `python -m tests.guarantees` in a checkout measures all promises in a quarter of an "
        "hour, `python -m tests.guarantees F4` one of them. Two more promises are sampled by tests: invalid input "
        f"raises a clear error ({link(ROOT / 'tests' / 'test_malformed.py', '`tests/test_malformed.py`')}), and "
        f"threads do not disturb each other ({link(ROOT / 'tests' / 'guarantees' / 'test_threads.py')}).",
        table(["", "promise", "threshold", "measured"], rows),
        "## On a GPU",
        _gpus(),
    )


def format_result(one: Record) -> str:
    """What was measured, with a warning where that is not enough or not all of it."""
    part = "" if one["full"] else f"in part ({one['count']:,} cases): "
    return f"{part}{one['value']}" if one["holds"] else f"**fails**: {part}{one['value']}"


def versions(environment: Record) -> str:
    """The versions that a record names, of what decides its numbers."""
    names = ("python", "torch", "torch_geometric", "transformers", "triton")
    return ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))


# ---- benchmarks

PASSES = ("forward", "both")
UNITS = {"seconds": (1e3, ""), "memory_mb": (1.0, ""), "roofline": (100.0, " %")}


def benchmarks() -> str:
    """Every workload next to its peers, the targets that are missed, and training on long windows."""
    path, training = newest("*-bench-attention.json"), newest("*-bench-training.json")
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
    """The newest record of the workloads on a GPU: auto, and how each peer compares with it."""
    from benchmarks.gpu import table as gpu_table

    records = sorted(RECORDS.glob("*-bench-gpu.json"))
    if not records:
        yield "Nothing has been measured on a GPU yet."
        return
    record = read(records[-1])
    yield f"{record['device']}, torch {record['torch']}, triton {record['triton']} ({link(records[-1])})."
    yield gpu_table.table(record)


def chosen_graphs(path: Path) -> Iterator[str]:
    """The targets of graphs that are made, planned and run in every step."""
    from benchmarks.chosen_graphs import judge

    record = read(path)
    yield (
        "Every step makes a graph, plans it and runs it forward and backward, with 8 heads of 64 in float32. Numbers "
        "are the least CPU seconds of one thread; the methods ran in turns on a machine with other work "
        f"({link(path)}, `{record['command']}`)."
    )
    rows = [
        [
            *(one["row"], f"{one['value']:.3g} {one['words']}", f"{one['sense']} {one['bound']:g}"),
            "yes" if one["met"] else "no",
        ]
        for one in judge(record)
    ]
    yield table(["selection", "measured", "target", "met"], rows)


def pruning(path: Path) -> Iterator[str]:
    """The losses of SmolLM2 along what is left of its graph."""
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
    """How first-order effects of edges rank beside true ones."""
    models: Record = read(path)["models"]
    yield (
        "`ga.trace.attribute` estimates the effects of edges to first order. The table compares them with true effects, "
        "for which one edge of one head is cut or muted: Spearman's rank correlation over random edges and over those with the largest effects "
        f"({link(path)}, `python -m benchmarks.edge_cuts RECORD --model MODEL --edges EDGES`)."
    )
    ways = list(dict.fromkeys(way for model in models.values() for way in model["correlations"]))
    rows = [
        [name, str(one["tokens"]), f"{one['edges']:,} of {one['of']:,}"]
        + [f"{one['correlations'][way]:.3f}" for way in ways]
        for name, one in models.items()
    ]
    yield table(["model", "tokens", "edges", *ways], rows)


def indexer_training(path: Path) -> Iterator[str]:
    """The losses of a small model whose layers choose their graphs, by the graph of its last steps."""
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
    """What indexers that learned from SmolLM2's attention hold of it, by number of senders."""
    record = read(path)
    texts, mean, senders = record["texts"], record["mean over layers"], record["recall for k of"]
    yield (
        f"Indexers for each key head of SmolLM2 learned by the divergence alone from {texts['training']} texts "
        f"of {record['tokens']:,} tokens ({record['training']['steps']} steps). The table has the share of the attention on k "
        f"senders in {texts['held out']} held-out texts, as a mean over layers, beside the best selection for each key head "
        f"and the best one that all heads share ({link(path)}, `{record['command']} --out RECORD`)."
    )
    rows = [
        [name, *(f"{share:.3f}" for share in mean[name])]
        for name in ("indexer", "best", "best for all heads")
    ]
    yield table(["choice", *(f"k = {k}" for k in senders)], rows)


def influence(bound: Path) -> Iterator[str]:
    """The Jacobian of SmolLM2 over graphs with its prediction, and the bound on that of the model that ships."""
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
        [link(path, f"`{one['graph']}`"), f"{one['orders']:.1f}", *(f"{one[name]:.3f}" for name in names)]
        for path, one in zip(paths, map(read, paths), strict=True)
    ]
    yield table(["graph", "powers of ten", "pairs", "by pair, of distance alone", "by distance"], rows)
    record = read(bound)
    least = min(one["least_slack"] for one in record["graphs"])
    yield (
        f"`examples.bounds.influence_bound` is compared with the exact norms of the small model, for {record['tokens']} "
        f"tokens in float64: {record['violations']} of {record['pairs']:,} pairs over {len(record['graphs'])} graphs "
        f"exceed the bound, which is at least {least:.1f} times the norm ({link(bound)}, `{record['command']}`)."
    )


def against_peers(record: Record) -> str:
    """A row for each workload: what auto needs, and each peer in units of it."""
    cases = {
        (c["workload"], c["method"], c["pass"]): c for c in record["cases"] if c["allocator"] == "default"
    }
    peers = list(dict.fromkeys(c["method"] for c in record["cases"] if not c["ours"]))
    shown = [
        w for w in record["workloads"] if w["allocator"] == "default" and not w["workload"].startswith("x-")
    ]
    head = ["workload", "edges", "ours, ms", "MB", "roofline", *(f"{peer}: time, memory" for peer in peers)]
    return table(
        head,
        ([*auto_cells(cases, w), *(peer_cell(cases, w["workload"], peer) for peer in peers)] for w in shown),
    )


def auto_cells(cases: dict[tuple[str, str, str], Record], workload: Record) -> Iterator[str]:
    """Title and edges of a workload, and what ``backend="auto"`` needs for it."""
    yield workload["title"]
    yield f"{workload['edges']:,}" if "edges" in workload else "-"
    ours = [cases.get((workload["workload"], "auto", which)) for which in PASSES]
    for name, (factor, unit) in UNITS.items():
        numbers = (case.get(name) if case else None for case in ours)
        yield " / ".join("-" if x is None else round_digits(x * factor) + unit for x in numbers)


def peer_cell(cases: dict[tuple[str, str, str], Record], workload: str, peer: str) -> str:
    """``24x / 21x, 13x / 2x``: time, then memory; or why there is no number."""
    theirs = [cases.get((workload, peer, which)) for which in PASSES]
    ours = [cases.get((workload, "auto", which)) for which in PASSES]
    if not any(theirs):
        return "-"
    times = [times_of(case) for case in theirs]
    if not any(time.endswith("x") for time in times):
        return " / ".join(dict.fromkeys(times))
    return f"{' / '.join(times)}, {' / '.join(memory_of(*pair) for pair in zip(ours, theirs, strict=True))}"


def times_of(case: Record | None) -> str:
    """How many times the time of auto, or why it was not measured."""
    if case is None:
        return "-"
    if case["status"] != "measured":
        return str(case["status"]).removesuffix(" by estimate")
    return "-" if case.get("ratio") is None else f"{round_digits(case['ratio'])}x"


def memory_of(ours: Record | None, theirs: Record | None) -> str:
    """How many times the memory of auto."""
    if ours is None or theirs is None or any(case["status"] != "measured" for case in (ours, theirs)):
        return "-"
    return f"{round_digits(theirs['memory_mb'] / max(ours['memory_mb'], 1.0))}x"


def targets(record: Record) -> Iterator[str]:
    """How many targets are met, and each that is not."""
    tried = [row for row in record["targets"] if row["met"] is not None]
    missed = [row for row in tried if not row["met"]]
    yield "## Targets"
    yield f"{len(tried) - len(missed)} of {len(tried)} targets are met. These are not:"
    titles = {w["workload"]: w["title"] for w in record["workloads"]}
    rows = (
        [titles[r["workload"]], r["pass"], f"{r['sense']} {r['bound']:g} {r['words']}", f"{r['value']:.3g}"]
        for r in missed
    )
    yield table(["workload", "pass", "target", "measured"], rows)


def training_speed(record: Record, path: Path) -> str:
    """The shipped architecture on long windows, next to SDPA with a mask."""
    recipe, (ours, _) = record["recipe"], record["runs"]
    return (
        f"{recipe['steps']} training steps of {recipe['length']:,} tokens along `{recipe['graph']}` are {record['faster']:.1f} times "
        f"faster than with SDPA and a mask, and take {record['smaller']:.1f} times less memory "
        f"({ours['seconds'] / recipe['steps']:.1f} s and {ours['peak_memory_mb'] / 1e3:.1f} GB a step). The losses differ by "
        f"at most {record['apart']:g} ({link(path)})."
    )


def round_digits(value: float) -> str:
    """Two digits or whole numbers: differences below that are noise.

    >>> round_digits(0.0123), round_digits(1.234), round_digits(34.5)
    ('0.012', '1.2', '34')
    """
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


# ---- sources

ROW = re.compile(r"^\| (S\d\.\d+) \| (.*?) \| .*\|$", re.MULTILINE)
PAPER = re.compile(r"^\| (\d{4}\.\d{5}|Xiao 2025) \| (.*?) \| .*\|$", re.MULTILINE)
CITED = re.compile(r"\bS(\d)\.(\d+)(?: to S(\d)\.(\d+))?")


def sources() -> str:
    """The page as it is, the last column of its tables written anew."""
    text = (DOCS / "sources.md").read_text(encoding="utf-8")
    text = ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {', '.join(shown(row[1]))} |", text)
    return PAPER.sub(lambda row: f"| {row[1]} | {row[2]} | {', '.join(named(row[1]))} |", text)


def named(paper: str) -> Iterator[str]:
    """Where a paper is named: notebooks, then modules and tests."""
    yield from places(lambda path: paper in path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if paper in path.read_text(encoding="utf-8"):
            yield link(path, f"`{path.relative_to(ROOT).as_posix()}`")


def shown(source: str) -> Iterator[str]:
    """Where a claim is shown: its test, the notebooks that carry its id, and the modules that cite it."""
    prefix = f"test_{source.replace('.', '_')}_"
    yield from (link(path, f"`{name}`") for name, path in tests() if name.startswith(prefix))
    yield from places(lambda path: source in cited(path))


def places(has: Callable[[Path], bool]) -> Iterator[str]:
    """Links to the notebooks, then to the modules of the package, that have something."""
    for path in filter(has, sorted((ROOT / "notebooks").glob("[0-9]*.py"))):
        yield link(path.with_suffix(".ipynb"), f"notebook {path.name[:2]}")
    for path in filter(has, sorted((ROOT / "gnn_attention").rglob("*.py"))):
        yield link(path, f"`{path.relative_to(ROOT / 'gnn_attention').as_posix()}`")
    for path in filter(has, sorted((ROOT / "examples").rglob("*.py"))):
        yield link(path, f"`{path.relative_to(ROOT).as_posix()}`")


@cache
def tests() -> tuple[tuple[str, Path], ...]:
    """(name, file) of every test that is named after a claim."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    named = re.compile(r"^def (test_S\d_\d+_\w+)", re.MULTILINE)
    return tuple((name, path) for path in files for name in named.findall(path.read_text(encoding="utf-8")))


@cache
def cited(path: Path) -> frozenset[str]:
    """The ids of the claims that a file cites, those inside a range ("S0.4 to S0.6") too."""
    found = set()
    for text, first, _, last in CITED.findall(path.read_text(encoding="utf-8")):
        found |= {f"S{text}.{number}" for number in range(int(first), int(last or first) + 1)}
    return frozenset(found)


# ---- glossary


VIEWS_TABLE = re.compile(r"(?<=<!-- views -->\n\n).*?(?=\nAn empty cell)", re.DOTALL)


def glossary_page() -> str:
    """The glossary as it is, its table of views written anew."""
    head = ("here", "TransformerLens", *glossary.VIEWS)
    rows = [
        [
            term.name,
            f"`{term.hook}`" if term.hook else "",
            *(getattr(term, view.replace(" ", "_")) or "" for view in glossary.VIEWS),
        ]
        for term in glossary.GLOSSARY
    ]
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    return VIEWS_TABLE.sub(lambda _: table(head, rows) + "\n", text)


# ---- the line of the GPU

GPU_LINE = re.compile(r"(?<=<!-- gpu -->\n).*?(?=<!-- /gpu -->)", re.DOTALL)


def with_gpu_line(name: str) -> str:
    """A page written by hand whose line between two marks says what the record of a GPU says."""
    # not of the package: found once the checkout is on the path
    from tests.guarantees import gpu_record

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


def _gpus() -> str:
    """What is verified on GPUs."""
    # not of the package: found once the checkout is on the path
    from tests.guarantees import gpu_record

    return gpu_record.markdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or say which would change."""
    parser = argparse.ArgumentParser(
        description="Write the pages of docs/ that are made from code and records."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a page would change"
    )
    check = parser.parse_args(arguments).check
    changed = [name for name, make in PAGES.items() if not is_current(name, make())]
    for name in changed:
        print(f"docs/{name} is not current: run python docs/make.py" if check else f"wrote docs/{name}")
        if not check:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
    return 1 if check and changed else 0


def is_current(name: str, text: str) -> bool:
    """True if the page on disk holds this text."""
    path = DOCS / name
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
