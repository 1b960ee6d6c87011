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
    rows = [[one["name"], one["promise"], one["bar"], measured(one)] for one in promised]
    return page(
        "Guarantees",
        "What the library promises, each with its threshold, measured with "
        f"{versions(record['environment'])} "
        f"({link(path)}). `python -m tests.guarantees` in a checkout measures all of them in a quarter of an "
        "hour, `python -m tests.guarantees F4` one. That malformed input is refused by name is sampled in "
        f"{link(ROOT / 'tests' / 'test_malformed.py', '`tests/test_malformed.py`')}, that threads do not "
        f"disturb each other in {link(ROOT / 'tests' / 'guarantees' / 'test_threads.py')}.",
        table(["", "promise", "threshold", "measured"], rows),
        "## On a GPU",
        _gpus(),
    )


def measured(one: Record) -> str:
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
        "machine, `python -m benchmarks` in a checkout measures all of this.",
        '`4x / 5x` is forward / forward and backward: how many times the time, then the memory, of `backend="auto"` a peer '
        "takes. Medians of interleaved runs; a dash was not run; the roofline is the share of what the "
        "machine can do.",
        against_peers(record),
        *targets(record),
        "## Training",
        trained(read(training), training),
        "## Graphs chosen by the data",
        *chosen_anew(newest("*-chosen-graphs.json")),
        "## The edges that a language model needs",
        *pruned(newest("*-lm-graphs.json")),
        *cut_alone(newest("*-edge-cuts.json")),
        "## Graphs that a model chooses",
        *choosing(newest("*-indexer-training.json")),
        *watching(newest("*-indexer-smollm2.json")),
        "## Reach, influence, bound",
        *reached(newest("*-influence-bound.json")),
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


def chosen_anew(path: Path) -> Iterator[str]:
    """The targets of graphs that are made, planned and run in every step."""
    from benchmarks.chosen_graphs import judged

    record = read(path)
    yield (
        "8 heads of 64, float32; a graph is made, planned and run, forward and backward, in every step. Least CPU "
        "seconds of one thread, in turns, on a machine with other work "
        f"({link(path)}, `{record['command']}`)."
    )
    rows = [
        [
            *(one["row"], f"{one['value']:.3g} {one['words']}", f"{one['sense']} {one['bound']:g}"),
            "yes" if one["met"] else "no",
        ]
        for one in judged(record)
    ]
    yield table(["selection", "measured", "asked", "met"], rows)


def pruned(path: Path) -> Iterator[str]:
    """The losses of SmolLM2 along what is left of its graph."""
    record = read(path)
    points = sorted(record["points"], key=lambda point: -point["share"])
    causal = next(point["loss"] for point in points if point["choice"] == "causal")
    fewest = min(point["share"] for point in points if point["loss"] <= 1.01 * causal)
    yield (
        f"SmolLM2 (135 M parameters, 30 layers of 9 heads) on the first {record['tokens']:,} tokens of "
        f"`{record['text']}`: the mean loss after position {record['loss_after']} along a share of the pairs of "
        "head and edge, run by `use_graph` without training. Attribution and weights are those of this same "
        f"text. The goal was a loss within 1 % of causal along 5 % of the pairs; the fewest pairs that reach it are "
        f"{fewest:.1%} ({link(path)}, `{record['command']}`)."
    )
    yield "![Loss against the share of the pairs of head and edge that are left](lm_graphs.png)"
    rows = [
        [p["choice"], f"{p['share']:.1%}", f"{p['loss']:.3f}", f"{p['loss'] / causal - 1:+.1%}"]
        for p in points
    ]
    yield table(["choice", "pairs left", "loss", "against causal"], rows)


def cut_alone(path: Path) -> Iterator[str]:
    """How first-order effects of edges rank beside true ones."""
    models: Record = read(path)["models"]
    yield (
        "First-order effects of edges (`ga.trace.attribute`) against true ones, where each edge of one head is cut or "
        "muted alone: Spearman's rank correlation over edges at random, and over those of the largest effects "
        f"({link(path)}, `python -m benchmarks.edge_cuts RECORD --model MODEL --edges EDGES`)."
    )
    ways = list(dict.fromkeys(way for model in models.values() for way in model["correlations"]))
    rows = [
        [name, str(one["tokens"]), f"{one['edges']:,} of {one['of']:,}"]
        + [f"{one['correlations'][way]:.3f}" for way in ways]
        for name, one in models.items()
    ]
    yield table(["model", "tokens", "edges", *ways], rows)


def choosing(path: Path) -> Iterator[str]:
    """The losses of a small model whose layers choose their graphs, by the graph of its last steps."""
    record = read(path)
    steps = record["steps"]
    yield (
        f"A model of two layers from nothing on the sources of the standard library: 512 tokens at first, then "
        f"{steps['dense']} steps of {record['tokens']:,} tokens along all causal pairs, from which its indexers learn, "
        f"then {steps['continued']} steps along {record['senders']} senders that they choose. The control goes on along "
        f"all pairs. Losses of {record['texts held out']} held-out texts "
        f"({link(path)}, `{record['command']} --out RECORD`)."
    )
    causal = record["loss of control"]
    rows = [
        [name.removeprefix("loss of ")]
        + [f"{loss:.3f} ({loss / base - 1:+.1%})" for loss, base in zip(losses, causal, strict=True)]
        for name, losses in record.items()
        if name.startswith("loss of ")
    ]
    yield table(["model", "loss", "of the second half of each text"], rows)


def watching(path: Path) -> Iterator[str]:
    """What indexers that learned from SmolLM2's attention hold of it, by number of senders."""
    record = read(path)
    texts, mean, senders = record["texts"], record["mean over layers"], record["recall for k of"]
    yield (
        f"Indexers for SmolLM2, one for each key head, learned by the divergence alone from {texts['training']} texts "
        f"of {record['tokens']:,} tokens ({record['training']['steps']} steps): the share of the attention on k senders, in "
        f"{texts['held out']} held-out texts, as a mean over layers. The best choice for each key head, and the best that "
        f"all heads share, stand beside it ({link(path)}, `{record['command']} --out RECORD`)."
    )
    rows = [
        [name, *(f"{share:.3f}" for share in mean[name])]
        for name in ("indexer", "best", "best for all heads")
    ]
    yield table(["choice", *(f"k = {k}" for k in senders)], rows)


def reached(bound: Path) -> Iterator[str]:
    """The Jacobian of SmolLM2 over graphs with its prediction, and the bound on that of the model that ships."""
    yield (
        "SmolLM2's `|d last state[dst] / d embedding[src]|` over 512 tokens, measured on one text in float64, and "
        "predicted from the graph and means over kinds of edges on another text (`analyse.influence`): rank "
        "correlations, and how many powers of ten the means by distance span (`python -m benchmarks.lm_influence "
        "--graph window`, `sinks` or `strided`). Over the strided graph two hops reach everything: what counts there "
        "is the text, and these means know little of it."
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
        f"`examples.bounds.influence_bound` against the exact norms of the model that ships, {record['tokens']} "
        f"tokens in float64: {record['violations']} of {record['pairs']:,} pairs over {len(record['graphs'])} graphs "
        f"are above it, and it is {least:.1f} times the norm at least ({link(bound)}, `{record['command']}`)."
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
        head, ([*own(cases, w), *(peer_cell(cases, w["workload"], peer) for peer in peers)] for w in shown)
    )


def own(cases: dict[tuple[str, str, str], Record], workload: Record) -> Iterator[str]:
    """Title and edges of a workload, and what ``backend="auto"`` needs for it."""
    yield workload["title"]
    yield f"{workload['edges']:,}" if "edges" in workload else "-"
    ours = [cases.get((workload["workload"], "auto", which)) for which in PASSES]
    for name, (factor, unit) in UNITS.items():
        numbers = (case.get(name) if case else None for case in ours)
        yield " / ".join("-" if x is None else rounded(x * factor) + unit for x in numbers)


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
    return "-" if case.get("ratio") is None else f"{rounded(case['ratio'])}x"


def memory_of(ours: Record | None, theirs: Record | None) -> str:
    """How many times the memory of auto."""
    if ours is None or theirs is None or any(case["status"] != "measured" for case in (ours, theirs)):
        return "-"
    return f"{rounded(theirs['memory_mb'] / max(ours['memory_mb'], 1.0))}x"


def targets(record: Record) -> Iterator[str]:
    """How many targets are met, and each that is not."""
    tried = [row for row in record["targets"] if row["met"] is not None]
    missed = [row for row in tried if not row["met"]]
    yield "## Targets"
    yield f"{len(tried) - len(missed)} of {len(tried)} are met. Missed:"
    titles = {w["workload"]: w["title"] for w in record["workloads"]}
    rows = (
        [titles[r["workload"]], r["pass"], f"{r['sense']} {r['bound']:g} {r['words']}", f"{r['value']:.3g}"]
        for r in missed
    )
    yield table(["workload", "pass", "target", "measured"], rows)


def trained(record: Record, path: Path) -> str:
    """The shipped architecture on long windows, next to SDPA with a mask."""
    recipe, (ours, _) = record["recipe"], record["runs"]
    return (
        f"{recipe['steps']} steps of {recipe['length']:,} tokens over `{recipe['graph']}`: {record['faster']:.1f} times faster "
        f"and {record['smaller']:.1f} times smaller than SDPA with a mask ({ours['seconds'] / recipe['steps']:.1f} s and "
        f"{ours['peak_memory_mb'] / 1e3:.1f} GB a step), losses apart by at most {record['apart']:g} ({link(path)})."
    )


def rounded(value: float) -> str:
    """Two digits or whole numbers: differences below that are noise.

    >>> rounded(0.0123), rounded(1.234), rounded(34.5)
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


VIEWED = re.compile(r"(?<=<!-- views -->\n\n).*?(?=\nA word that)", re.DOTALL)


def words() -> str:
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
    return VIEWED.sub(lambda _: table(head, rows) + "\n", text)


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
    "glossary.md": words,
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
