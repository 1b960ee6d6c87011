"""Graphs of a million tokens: time and memory of building, counting and tiling them, and of torch's
``create_block_mask``.

Every case runs once in a process of its own, so that the memory is its own; peers run in the same manner in
the same call. Times are those of this machine; ratios travel better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import process
from benchmarks.records import circumstances
from gnn_attention import convert, patterns
from gnn_attention._support import checks
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.tiling import tiles

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["GRAPHS", "MILLION", "PEER_SIZES", "measure", "measure_block_mask", "run_graphs", "text"]

MILLION = 1_000_000
PEER_SIZES = (4096, 16384)  # create_block_mask makes tokens x tokens, so the peer gets fewer


def _lengths(n: int) -> list[int]:
    """Document lengths between 1 and 2,000, drawn with a fixed seed."""
    drawn = torch.randint(1, 2001, (n,), generator=torch.Generator().manual_seed(0))
    inside = drawn[: int((drawn.cumsum(0) < n).sum())].tolist()
    return [*inside, n - sum(inside)]


def _random_edges(n: int, edges: int) -> TokenGraph:
    drawn = torch.randint(0, n, (2, edges), generator=torch.Generator().manual_seed(0))
    return TokenGraph.from_edges(drawn, n, coalesce=True, name=f"{edges} random edges")


GRAPHS: dict[str, Callable[[int], TokenGraph]] = {
    "causal": patterns.causal,
    "window 4096": lambda n: patterns.window(n, 4096),
    "sinks 4": lambda n: patterns.sinks(n, 4),
    "dilated 256 x 16": lambda n: patterns.dilated(n, 256, 16),
    "documents": lambda n: patterns.documents(_lengths(n)),
    "window | sinks": lambda n: patterns.window(n, 4096) | patterns.sinks(n, 4),
    "documents & window | sinks": lambda n: (
        (patterns.documents(_lengths(n)) & patterns.window(n, 256)) | patterns.sinks(n, 4)
    ),
    "global tokens": lambda n: (
        patterns.global_tokens(n, [0, n // 2], causal=False) | patterns.window(n, 128, causal=False)
    ),
    "listed, n edges": lambda n: _random_edges(n, n),
    "listed, 4 n edges": lambda n: _random_edges(n, 4 * n),
}


def measure(case: str, n: int) -> dict[str, Any]:
    """Build one graph of n tokens, count its edges, tile it: seconds of each, and the memory it took beyond
    the imports.
    """
    before = process.forget_peak()
    marks = [time.perf_counter()]
    graph = GRAPHS[case](n)
    marks.append(time.perf_counter())
    edges = graph.num_edges
    marks.append(time.perf_counter())
    parts = tiles(graph)
    marks.append(time.perf_counter())
    seconds = dict(zip(("build_s", "count_s", "tile_s"), (b - a for a, b in pairwise(marks)), strict=True))
    found = {"edges": edges, "full_tiles": parts.num_full, "partial_tiles": parts.num_partial}
    return {
        "case": case,
        "tokens": n,
        **found,
        **seconds,
        "total_s": marks[-1] - marks[0],
        "memory_mb": process.peak() - before,
    }


def measure_block_mask(who: str, n: int) -> dict[str, Any]:
    """FlexAttention's BlockMask of a causal window of 1,024 tokens, by ``to_block_mask`` or by torch's
    ``create_block_mask``.

    A small one is made first, so that what is loaded or set up once does not count.
    """
    make = _MAKERS[who]
    make(patterns.window(256, 64))
    graph, before = patterns.window(n, 1024), process.forget_peak()
    start = time.perf_counter()
    mask = make(graph)
    seconds = time.perf_counter() - start
    full = mask.full_kv_num_blocks
    visited = int(mask.kv_num_blocks.sum()) + (0 if full is None else int(full.sum()))
    return {
        "case": "BlockMask",
        "who": who,
        "tokens": n,
        "tiles": visited,
        "total_s": seconds,
        "memory_mb": process.peak() - before,
    }


def _create_block_mask(graph: TokenGraph) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(graph.rule, None, None, graph.num_dst, graph.num_src, "cpu")


_MAKERS: dict[str, Callable[[TokenGraph], BlockMask]] = {
    "gnn_attention": convert.to_block_mask,
    "create_block_mask": _create_block_mask,
}


def run_graphs(
    tokens: int = MILLION, peers: bool = True, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """All cases, each in a process of its own, as what ``--json`` writes. OSError where this is not Linux."""
    tokens = checks.size("tokens", tokens, 1)
    process.forget_peak()  # OSError before anything is measured
    results, compared = [], []
    for case in GRAPHS:
        (progress or _silent)(case)
        results.append(_in_a_process("measure", case=case, n=tokens))
    for n in PEER_SIZES if peers else ():
        (progress or _silent)(f"BlockMask of {n} tokens")
        compared += [_in_a_process("measure_block_mask", who=who, n=n) for who in _MAKERS]
    return {"bench": "graphs", "schema": 1, **circumstances(), "results": results, "peers": compared}


def _silent(case: str) -> None:
    pass


def _in_a_process(function: str, **arguments: Any) -> dict[str, Any]:
    result: dict[str, Any] = process.in_a_process(__name__, function, arguments)
    return result


def text(record: dict[str, Any]) -> str:
    """The record as text, a line for each graph."""
    return "\n".join(_lines(record))


def _lines(record: dict[str, Any]) -> Iterator[str]:
    times = " ".join(f"{name:>8}" for name in ("build", "count", "tile", "total"))
    yield f"{'graph':28} {'tokens':>9} {'edges':>16} {times} {'memory':>9}"
    for r in record["results"]:
        times = " ".join(f"{r[name]:6.2f} s" for name in ("build_s", "count_s", "tile_s", "total_s"))
        yield f"{r['case']:28} {r['tokens']:>9,} {r['edges']:>16,} {times} {r['memory_mb']:6.0f} MB"
    for ours, theirs in zip(record["peers"][::2], record["peers"][1::2], strict=True):
        faster, smaller = theirs["total_s"] / ours["total_s"], theirs["memory_mb"] / max(ours["memory_mb"], 1)
        taken = [f"{row['total_s']:.3f} s, {row['memory_mb']:.0f} MB" for row in (ours, theirs)]
        ratios = f"{faster:.1f} x the time, {smaller:.1f} x the memory"
        tokens = f"{ours['tokens']:,} tokens"
        yield f"BlockMask of {tokens}: {taken[0]}; create_block_mask {taken[1]}: {ratios}"
