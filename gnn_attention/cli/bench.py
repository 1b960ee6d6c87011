"""The command ``gnn-attention bench``: time and memory of ``attend`` and of what is installed, as one table.

It takes about a minute. The whole suite (more graphs, sizes and peers, ceilings, targets, every GPU kernel)
is ``python -m benchmarks`` in the repository. ``gnn-attention bench calibrate`` fits the cost model behind
``backend="auto"`` to this machine.
"""

import argparse
import re
import time
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support import checks, json_option
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.cli import calibrate
from gnn_attention.cli.bench_methods import (
    DIM,
    HEADS,
    METHODS,
    OURS,
    PASSES,
    Anew,
    Comparison,
    largest_errors,
)
from gnn_attention.graph import TokenGraph
from gnn_attention.selectors import Indexer
from gnn_attention.verify.report import environment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENS, SECONDS = 2048, 50.0
Record = dict[str, Any]


def _documents(tokens: int) -> TokenGraph:
    """Eight packed documents of different lengths."""
    bounds = [tokens * part // 36 for part in (0, 1, 3, 6, 10, 15, 21, 28, 36)]
    return patterns.documents([stop - start for start, stop in pairwise(bounds)])


@lru_cache(maxsize=4)
def _random_edges(tokens: int, degree: int) -> Tensor:
    """Up to ``degree`` random in-edges for each token."""
    dst = torch.arange(tokens).repeat_interleave(min(degree, tokens))
    src = torch.randint(tokens, dst.shape, generator=torch.Generator().manual_seed(0))
    edges: Tensor = torch.unique(torch.stack([src, dst]), dim=1)
    return edges


def _edge_list(degree: int, tokens: int) -> TokenGraph:
    return TokenGraph.from_edges(_random_edges(tokens, degree), tokens, name="edge list")


def _window(tokens: int) -> TokenGraph:
    return patterns.window(tokens, min(128, tokens))


@lru_cache(maxsize=4)
def spread(heads: int, tokens: int, count: int) -> Tensor:
    """For each head and token one of each of ``count`` equal parts of those not after it, once."""
    dst, rng = torch.arange(tokens).unsqueeze(1), torch.Generator().manual_seed(0)
    place = torch.rand(heads, tokens, count, generator=rng) + torch.arange(count)
    found = (place * ((dst + 1) / count)).long().clamp(max=dst)
    return torch.where(found.diff(dim=-1, prepend=torch.full_like(found[..., :1], -1)) > 0, found, -1)


def _top(heads: int, tokens: int) -> TokenGraph:
    index = spread(heads, tokens, 64)
    return TokenGraph.from_indices(index if heads > 1 else index[0], tokens, causal=True)


@lru_cache(maxsize=4)
def _indexed(tokens: int) -> tuple[Indexer, Any, Tensor]:
    """An indexer, what it needs of the last token, and the keys that it has cached of all."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        indexer, states, places = Indexer(64, 512), torch.randn(1, tokens, 64), torch.arange(tokens)
        return indexer, indexer.receive(states[:, -1:], places[-1:]), indexer.send(states, places)


def _decoding(tokens: int) -> TokenGraph:
    indexer, received, keys = _indexed(tokens)
    return indexer.choose(received, keys, patterns.causal(tokens).rows(tokens - 1, tokens))


def _blocks(tokens: int) -> TokenGraph:
    return TokenGraph.from_block_indices(spread(HEADS, -(-tokens // 128), 4), 128, tokens, tokens, True)


GRAPHS: dict[str, Callable[[int], TokenGraph]] = {
    "causal": patterns.causal,
    "window 128": _window,
    "window 128, 4 sinks": lambda tokens: _window(tokens) | patterns.sinks(tokens, min(4, tokens)),
    "8 documents": _documents,
    "random edges, 32 each": partial(_edge_list, 32),
    "random edges, 4 each, a new list in every call": Anew(partial(_edge_list, 4)),
    "top 64 a head, chosen anew": Anew(partial(_top, HEADS)),
    "top 64 of all heads, chosen anew": Anew(partial(_top, 1)),
    "4 blocks of 128 a head, chosen anew": Anew(_blocks),
    "one token to 512 by an indexer": Anew(_decoding),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention bench``."""
    add, instead = command.add_argument, "fit the cost model behind backend='auto' to this machine instead"
    add("what", nargs="?", choices=["calibrate"], help=instead)
    add("--tokens", type=int, default=TOKENS, metavar="N", help="of every graph (default %(default)s)")
    add("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    add("--dtype", choices=list(DTYPES), help="of q, k, v (default: float32, on a GPU bfloat16)")
    add("--no-peers", action="store_true", help="attend alone")
    json_option.add_json(command)
    command.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    if args.what == "calibrate":
        record, text = _calibrated(args), calibrate.text
    else:
        tokens, device = checks.size("--tokens", args.tokens, 1), _device(args.device)
        dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
        with Progress("bench", unit="cases") as shown:
            record, text = measure(tokens, device, dtype, not args.no_peers, SECONDS, shown), table
    json_option.write_json(args.json, record, text(record))
    return 0 if all(row["passed"] for row in record.get("checks", ())) else 1


def _calibrated(args: argparse.Namespace) -> Record:
    if (args.tokens, args.device, args.dtype, args.no_peers) != (TOKENS, "cpu", None, False):
        why = "it measures graphs of its own on the CPU"
        raise ValueError(f"bench calibrate takes no option but --json: {why}")
    with Progress("bench calibrate", len(calibrate.CASES) + 1, "cases") as shown:
        return calibrate.run_calibration(shown.begin)


def _device(name: str) -> torch.device:
    """ValueError for one that is not there."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device must be cpu, cuda, cuda:1, ..., got {checks.quoted(name)}")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch finds {torch.cuda.device_count()} such devices")
    return device


def measure(
    tokens: int, device: torch.device, dtype: torch.dtype, with_peers: bool, seconds: float, shown: Progress
) -> Record:
    """Every graph with every method, forward and forward with backward: the record that ``--json`` writes.

    ``checks`` has one row a graph (is ``attend`` right on at most 512 tokens, by SDPA in float64), ``cases``
    one for each graph, pass and method: ``status`` "measured" with ``seconds``, ``bytes`` (the peak of a call
    beyond its inputs), both over those of attend (``time_ratio, memory_ratio``) and ``system``, the share of
    the processor's time that the system takes, or "skipped" with the ``reason``.
    """
    names = list(METHODS) if with_peers else [OURS]
    shown.expect(len(GRAPHS) * len(names))
    checked, cases = [], []
    end = time.monotonic() + seconds
    for position, (title, build) in enumerate(GRAPHS.items()):
        share = (end - time.monotonic()) / (len(GRAPHS) - position)
        compared = Comparison(build, tokens, device, dtype, max(share, 2.0))
        checked.append({"graph": title, **largest_errors(compared.small)})
        found = compared.cases(names, f"{title}: ", shown)
        cases += [{"graph": title, "edges": compared.graph.num_edges, **case} for case in found]
    sizes = {"tokens": tokens, "heads": HEADS, "dim": DIM, "dtype": str(dtype).removeprefix("torch.")}
    about = {"bench": "short", "schema": 1, **environment(str(device)), **sizes}
    return {**about, "checks": checked, "cases": cases}


def table(record: Record) -> str:
    """A row for each graph and pass: the time and memory of ``attend``, and how many times these of peers."""
    names = list(dict.fromkeys(case["method"] for case in record["cases"]))
    skipped = (case for case in record["cases"] if case["status"] == "skipped" and not case["needs"])
    reasons = list(dict.fromkeys(case["reason"] for case in skipped))
    rows = [["graph", "edges", "pass", "backend", "time", "memory", *names[1:]]]
    for title in dict.fromkeys(case["graph"] for case in record["cases"]):
        rows += [_row(record, title, which, names, reasons) for which in PASSES]
    notes = [f"[{number}] skipped: {reason}" for number, reason in enumerate(reasons, 1)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    head = "{tokens:,} tokens, {heads} heads of {dim}, {dtype}; {device}, torch {torch}".format(**record)
    return "\n".join([head, "", *lines, "", *_remarks(record, names), *notes])


def _row(record: Record, title: str, which: str, names: list[str], reasons: list[str]) -> list[str]:
    cases = (case for case in record["cases"] if (case["graph"], case["pass"]) == (title, which))
    wanted = {case["method"]: case for case in cases}
    ours, peers = wanted[OURS], [wanted[name] for name in names[1:]]
    cells = [title, f"{ours['edges']:,}"] if which == PASSES[0] else ["", ""]
    if ours["status"] == "skipped":
        cells += [which, "-", _shares(ours, reasons), "-"]
    else:
        taken = f"{_rounded(ours['seconds'] * 1e3)} ms", f"{_rounded(ours['bytes'] / 2**20)} MB"
        cells += [which, ours["backend"], *taken]
    return [*cells, *(_shares(peer, reasons) for peer in peers)]


def _shares(case: Record, reasons: list[str]) -> str:
    """Time and memory over those of attend, or why there are none."""
    if case["status"] == "skipped":
        return f"skipped, {case['needs']}" if case["needs"] else f"[{reasons.index(case['reason']) + 1}]"
    times, memory = case["time_ratio"], case["memory_ratio"]
    return "-" if times is None else f"{_rounded(times)}x, {_rounded(memory)}x"


def _rounded(value: float) -> str:
    """Two digits: what is less is noise.

    >>> _rounded(0.0123), _rounded(1.234), _rounded(34.5), _rounded(1234.5)
    ('0.012', '1.2', '34', '1,234')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _remarks(record: Record, names: list[str]) -> list[str]:
    """How the numbers are read, and whether the results are right."""
    wrong = [f"{row['graph']} ({row['worst']})" for row in record["checks"] if not row["passed"]]
    verdict = f"WRONG on {', '.join(wrong)}" if wrong else "equal to SDPA in float64 up to rounding"
    lines = [f"attend, results and gradients of at most 512 tokens: {verdict}."]
    if len(names) > 1:
        what = "twice the time and 30 times the memory of attend, the peak of a call without inputs"
        lines.append(f"2x, 30x: {what}.")
    shares = [_largest_system_share(record, name) for name in names]
    if any(shares):
        why = "mostly fresh pages of memory, under the same settings of the allocator for all"
        lines.append(f"system time, the largest share of a pass, {why}: {'; '.join(filter(None, shares))}.")
    if any(case.get("needs") for case in record["cases"]):
        lines.append("skipped, 16 GiB or 9 s: what a call would take, by a smaller graph of the same form.")
    return lines


def _largest_system_share(record: Record, name: str) -> str | None:
    cases = [case for case in record["cases"] if case["method"] == name and case["status"] == "measured"]
    if not cases:
        return None
    most = max(cases, key=lambda case: case["system"])
    return f"{name} {most['system']:.0%} ({most['graph']}, {most['pass']})"
