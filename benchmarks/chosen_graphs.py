"""Graphs that the data choose anew in every step: ``python -m benchmarks.chosen_graphs RECORD [--rows NAME ...]``.

8 heads of 64, float32. A step is: the graph is made, planned and run, forward and backward. Times are CPU seconds
of one thread, the least of interleaved rounds, so that what else runs on the machine counts as little as it
can; those of decoding with two threads are wall-clock. Rows that are named replace those of the record, which
is written after each of them. All take some ten CPU minutes and 8 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gnn_attention as ga
from gnn_attention.cli.bench import spread
from gnn_attention.cli.bench_methods import peak_bytes
from gnn_attention.selectors import Indexer
from gnn_attention.verify.report import environment

HEADS, DIM, K = 8, 64, 64
BLOCK, TOP = 128, 4
CACHE, INDEXED, LAYERS, WIDTH = 32768, 512, 4, 512
Call = Callable[[], object]
Row = dict[str, Any]
# of a row which number, in words, and what is asked
TARGETS: dict[str, dict[str, tuple[str, str, float]]] = {
    "top-64 a head, T=4096": {
        "of dense": ("of the time of SDPA with the mask", "at most", 0.35),
        "graph work": ("of the step is work on the graph", "at most", 0.4),
    },
    "top-64 a head, T=32768": {
        "growth": ("times the time of T=4096", "at most", 10.0),
        "memory": ("times edges x heads + tokens x heads x channels numbers", "at most", 6.0),
    },
    "top-64 of all heads, T=16384": {"of same": ("times the same fixed graph", "at most", 1.3)},
    "4 blocks of 128 a head, T=16384": {
        "faster": ("times faster than SDPA with the mask", "at least", 6.0),
        "flex": ("of our forward time is FlexAttention's, on one fixed graph", "at least", 1.0),
        "flex anew": ("of our forward time is FlexAttention's, with a new graph", "at least", 1.0),
    },
    "one token to 512 of 32768": {
        "bfloat16": ("times faster than dense decoding, an indexer in bfloat16", "at least", 4.0),
        "float32": ("times faster, in float32", "at least", 4.0),
    },
}


def least(calls: Mapping[str, Call], rounds: int, clock: Callable[[], float] = time.process_time) -> Row:
    """The least seconds of each call, which take turns; each is called once before."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            call()
            if turn:
                found[name].append(clock() - start)
    return {name: min(seconds) for name, seconds in found.items()}


def chosen(heads: int, tokens: int) -> torch.Tensor:
    """``[heads, tokens, K]``: distinct random senders of each receiver, none after it, in no order."""
    return spread(heads, tokens, K).gather(2, torch.rand(heads, tokens, K).argsort(-1))


def inputs(tokens: int, heads: int = HEADS) -> list[torch.Tensor]:
    """q, k, v with gradients and the gradient of the output, as projections lay them out."""
    drawn = [torch.randn(1, tokens, heads, DIM).transpose(1, 2) for _ in range(4)]
    return [*(x.requires_grad_() for x in drawn[:3]), drawn[3]]


def step(
    attend: Callable[..., torch.Tensor], given: Sequence[torch.Tensor], graph: Call | None = None
) -> Any:
    """Forward and backward, along a graph that is made first."""
    *leaves, gradient = given
    out = attend(*leaves) if graph is None else attend(*leaves, graph())
    return torch.autograd.grad(out, leaves, gradient)


def listed(tokens: int, heads: int) -> tuple[Call, list[torch.Tensor], Any]:
    index = chosen(heads, tokens)
    make = partial(ga.TokenGraph.from_indices, index if heads > 1 else index[0], tokens, causal=True)
    return make, inputs(tokens), make()


def _same(graph: ga.TokenGraph) -> ga.TokenGraph:
    return graph


def top_64() -> Row:
    make, given, graph = listed(4096, HEADS)
    dense = partial(sdpa, attn_mask=graph.mask()[None])
    calls = {
        "new": partial(step, ga.attend, given, make),
        "same": partial(step, ga.attend, given, partial(_same, graph)),
    }
    found = least({**calls, "dense": partial(step, dense, given)}, 3)
    return {
        "seconds": found, "of dense": found["new"] / found["dense"],
        "graph work": 1 - found["same"] / found["new"],
    }  # fmt: skip


def growth() -> Row:
    """With what bounds it: passes over 8 x 2 rows, pages of fresh memory, random rows of one head's keys."""
    seconds, pages, system, memory, gathered = {}, {}, {}, 0.0, {}
    for tokens, rounds in ((4096, 6), (32768, 3)):
        make, given, graph = listed(tokens, HEADS)
        new, same = (partial(step, ga.attend, given, of) for of in (make, partial(_same, graph)))
        forward = torch.no_grad()(partial(ga.attend, given[0], given[1], given[2], graph))
        seconds[tokens] = least({"make": make, "forward": forward, "same": same, "new": new}, rounds)
        before = resource.getrusage(resource.RUSAGE_SELF)
        new()
        after = resource.getrusage(resource.RUSAGE_SELF)
        pages[tokens], system[tokens] = after.ru_minflt - before.ru_minflt, after.ru_stime - before.ru_stime
        numbers = graph.num_edges + tokens * HEADS * DIM
        memory = peak_bytes(new, torch.device("cpu")) / 4 / numbers
        table, rows = torch.randn(tokens, DIM), torch.randint(tokens, (2**21,))
        bag = partial(torch.nn.functional.embedding_bag, rows.view(-1, K), table, mode="sum")
        gathered[tokens] = len(rows) * DIM * 4 / 2**30 / least({"bag": bag}, 5)["bag"]
    small, large = seconds[4096], seconds[32768]
    return {
        "seconds": seconds, "growth": large["new"] / small["new"], "memory": memory,
        "growth of each": {name: large[name] / small[name] for name in small}, "fresh pages": pages,
        "seconds in the system": system, "GiB/s of random rows of 256 bytes": gathered,
    }  # fmt: skip


def shared() -> Row:
    make, given, graph = listed(16384, 1)
    calls = {
        "new": partial(step, ga.attend, given, make),
        "same": partial(step, ga.attend, given, partial(_same, graph)),
    }
    found = least(calls, 5)
    return {"seconds": found, "of same": found["new"] / found["same"]}


def blocks() -> Row:
    """SDPA on one head, whose time counts eight times: a mask of eight would take 2 GiB."""
    tokens, count = 16384, 16384 // BLOCK
    scores = (
        torch.rand(HEADS, count, count).masked_fill(torch.ones(count, count).triu(1).bool(), -1.0).topk(TOP)
    )
    index = scores.indices.masked_fill(scores.values < 0, -1)
    make = partial(ga.TokenGraph.from_block_indices, index, BLOCK, tokens, tokens, causal=True)
    given, graph = inputs(tokens), make()
    new = partial(step, ga.attend, given, make)
    one = [x[:, :1].detach().requires_grad_(number < 3) for number, x in enumerate(given)]
    dense = partial(sdpa, attn_mask=graph.select(0, 0).mask()[None, None])
    found = least({"new": new, "dense, one head": partial(step, dense, one)}, 2)
    flex, q, k, v = _flex(), *(x.detach() for x in given[:3])
    mask = ga.convert.to_block_mask(graph)
    forward = least(
        {
            "ours": lambda: ga.attend(q, k, v, graph),
            "ours anew": lambda: ga.attend(q, k, v, make()),
            "flex": lambda: flex(q, k, v, block_mask=mask),
            "flex anew": lambda: flex(q, k, v, block_mask=ga.convert.to_block_mask(make())),
        },
        5,
    )
    ratios = {
        "flex": forward["flex"] / forward["ours"],
        "flex anew": forward["flex anew"] / forward["ours anew"],
    }
    faster = HEADS * found["dense, one head"] / found["new"]
    return {"seconds": found, "forward": forward, "faster": faster, **ratios}


def _flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def decoding() -> Row:
    """A token through four layers, whose keys and values are no longer in a cache of the processor.

    Dense is the faster of SDPA and ours; the step chooses from cached keys, makes the graph and attends.
    """
    row: Row = {"seconds a layer": {}}
    for dtype in (torch.float32, torch.bfloat16):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found = _decoded(dtype, time.process_time if threads == 1 else time.perf_counter)
            name = str(dtype).removeprefix("torch.") + (f", {threads} threads" if threads > 1 else "")
            row["seconds a layer"][name] = found
            row[name] = min(found["dense, SDPA"], found["dense, ours"]) / found["chosen"]
    torch.set_num_threads(1)
    return row


@torch.no_grad()
def _decoded(dtype: torch.dtype, clock: Callable[[], float]) -> Row:
    places = torch.arange(CACHE)
    layers = [_layer(dtype, places) for _ in range(LAYERS)]
    now: list[ga.TokenGraph] = []

    def step_of(number: int) -> ga.TokenGraph:
        """Of all tokens so far, made by the first layer for all."""
        if number == 0:
            now[:] = [ga.patterns.causal(CACHE).rows(CACHE - 1, CACHE)]
        return now[0]

    def chosen(n: int, indexer: Indexer, keys: Any, x: Any, q: Any, k: Any, v: Any) -> None:
        found = indexer.choose(indexer.receive(x, places[-1:]), keys, step_of(n))
        ga.attend(q, k, v, found)

    ways: dict[str, Callable[..., object]] = {
        "dense, SDPA": lambda n, indexer, keys, x, q, k, v: sdpa(q, k, v),
        "dense, ours": lambda n, indexer, keys, x, q, k, v: ga.attend(q, k, v, step_of(n)),
        "chosen": chosen,
    }
    calls = {
        (name, n): partial(way, n, *layer) for name, way in ways.items() for n, layer in enumerate(layers)
    }
    found = least(calls, 60, clock)  # type: ignore[arg-type]
    return {name: sum(found[name, n] for n in range(LAYERS)) / LAYERS for name in ways}  # type: ignore[index]


def _layer(dtype: torch.dtype, places: torch.Tensor) -> tuple[Any, ...]:
    """An indexer, its cached keys, the token's state, query, and the cached keys and values."""
    indexer, past = (
        Indexer(WIDTH, INDEXED, num_heads=4, head_dim=32, dtype=dtype),
        torch.randn(1, CACHE, WIDTH),
    )
    cached = torch.randn(2, 1, HEADS, CACHE, DIM).unbind()
    return indexer, indexer.send(past, places).to(dtype), past[:, -1:], torch.randn(1, HEADS, 1, DIM), *cached


MEASURES = dict(zip(TARGETS, (top_64, growth, shared, blocks, decoding), strict=True))


def judged(record: Row) -> list[Row]:
    """Every target of the measured rows: what was asked, what came, and whether it is met."""
    found = []
    for row, numbers in TARGETS.items():
        for name, (words, sense, bound) in numbers.items() if row in record["rows"] else ():
            value = record["rows"][row][name]
            met = value >= bound if sense == "at least" else value <= bound
            found.append(
                {"row": row, "words": words, "sense": sense, "bound": bound, "value": value, "met": met}
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--rows", nargs="+", choices=list(MEASURES), default=list(MEASURES), metavar="NAME")
    options = parser.parse_args(arguments)
    known = json.loads(options.record.read_text("utf-8"))["rows"] if options.record.exists() else {}
    for name in options.rows:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        known[name] = {**MEASURES[name](), "load": os.getloadavg()[0]}
        record = {
            "bench": "chosen graphs", "command": "python -m benchmarks.chosen_graphs RECORD",
            "environment": environment("cpu"), "rows": {row: known[row] for row in MEASURES if row in known},
        }  # fmt: skip
        options.record.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for one in judged(record):
        print(f"{one['row']}: {one['value']:.3g} {one['words']}, {one['sense']} {one['bound']:g}")


if __name__ == "__main__":
    main()
