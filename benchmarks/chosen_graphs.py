"""Measure graphs that the data choose anew in every step: ``python -m benchmarks.chosen_graphs RECORD``.

All rows have 8 heads of 64 channels in float32. A step builds a graph, plans it, and runs it forward and backward.
Times are CPU seconds of one thread, the least of interleaved rounds, so that other programs on the machine
affect them as little as possible. All rows together take about ten CPU minutes and 8 GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gnn_attention as ga
from benchmarks.process import peak_memory
from benchmarks.records import environment, write
from gnn_attention.selectors import Indexer

HEADS, DIM, K = 8, 64, 64
BLOCK, TOP = 128, 4
CACHE, INDEXED, LAYERS, WIDTH = 32768, 512, 4, 512
Call = Callable[[], object]
Row = dict[str, Any]
# Each number of a row has its meaning in words and its target.
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


def least_seconds(calls: Mapping[str, Call], rounds: int) -> Row:
    """Return the least CPU seconds of each call over interleaved rounds, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number:
                times[name].append(time.process_time() - start)
    return {name: min(seconds) for name, seconds in times.items()}


def random_senders(heads: int, tokens: int) -> torch.Tensor:
    """Draw ``[heads, tokens, K]`` distinct senders at or before each receiver, unsorted, padded with -1."""
    dst = torch.arange(tokens).unsqueeze(1)
    offset = torch.rand(heads, tokens, K) + torch.arange(K)
    src = (offset * ((dst + 1) / K)).long().clamp(max=dst)
    # The senders come one from each of K equal ranges, so equal ones are neighbours and only the first is kept.
    src = torch.where(src.diff(dim=-1, prepend=torch.full_like(src[..., :1], -1)) > 0, src, -1)
    return src.gather(2, torch.rand(heads, tokens, K).argsort(-1))


def inputs(tokens: int) -> list[torch.Tensor]:
    """Draw q, k, v that need gradients, and the gradient of the output, in the layout of projections."""
    tensors = [torch.randn(1, tokens, HEADS, DIM).transpose(1, 2) for _ in range(4)]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


def step(attend: Callable[..., Any], tensors: Sequence[torch.Tensor], graph: Call | None = None) -> Any:
    """Run forward and backward, along the graph that ``graph()`` builds first, if it is given."""
    *leaves, gradient = tensors
    out = attend(*leaves) if graph is None else attend(*leaves, graph())
    return torch.autograd.grad(out, leaves, gradient)


class Problem:
    """Inputs and random senders; ``make()`` builds the graph, ``new()`` a step that builds it, ``same()`` reuses it."""

    def __init__(self, tokens: int, heads: int) -> None:
        index = random_senders(heads, tokens)
        index = index if heads > 1 else index[0]
        self.make = partial(ga.TokenGraph.from_indices, index, tokens, causal=True)
        self.inputs, self.graph = inputs(tokens), self.make()
        self.new = partial(step, ga.attend, self.inputs, self.make)
        self.same = partial(step, ga.attend, self.inputs, lambda: self.graph)


def top_64() -> Row:
    problem = Problem(4096, HEADS)
    dense = partial(step, partial(sdpa, attn_mask=problem.graph.mask()[None]), problem.inputs)
    seconds = least_seconds({"new": problem.new, "same": problem.same, "dense": dense}, 3)
    new = seconds["new"]
    return {"seconds": seconds, "of dense": new / seconds["dense"], "graph work": 1 - seconds["same"] / new}


def growth() -> Row:
    """Measure how the time grows with tokens, with possible causes: page faults and gathers of random rows."""
    seconds, pages, system, gather_rates = {}, {}, {}, {}
    memory = 0.0
    for tokens, rounds in ((4096, 6), (32768, 3)):
        problem = Problem(tokens, HEADS)
        q, k, v = (x.detach() for x in problem.inputs[:3])
        forward = partial(ga.attend, q, k, v, problem.graph)
        calls = {"make": problem.make, "forward": forward, "same": problem.same, "new": problem.new}
        seconds[tokens] = least_seconds(calls, rounds)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        problem.new()
        new_usage = resource.getrusage(resource.RUSAGE_SELF)
        pages[tokens] = new_usage.ru_minflt - usage.ru_minflt
        system[tokens] = new_usage.ru_stime - usage.ru_stime
        numbers = problem.graph.num_edges + tokens * HEADS * DIM
        memory = peak_memory(problem.new) * 2**20 / 4 / numbers
        table, rows = torch.randn(tokens, DIM), torch.randint(tokens, (2**21,))
        bag = partial(torch.nn.functional.embedding_bag, rows.view(-1, K), table, mode="sum")
        gather_rates[tokens] = len(rows) * DIM * 4 / 2**30 / least_seconds({"bag": bag}, 5)["bag"]
    small, large = seconds[4096], seconds[32768]
    return {
        "seconds": seconds,
        "growth": large["new"] / small["new"],
        "memory": memory,
        "growth of each": {name: large[name] / small[name] for name in small},
        "fresh pages": pages,
        "seconds in the system": system,
        "GiB/s of random rows of 256 bytes": gather_rates,
    }


def shared() -> Row:
    problem = Problem(16384, 1)
    seconds = least_seconds({"new": problem.new, "same": problem.same}, 5)
    return {"seconds": seconds, "of same": seconds["new"] / seconds["same"]}


def blocks() -> Row:
    """Compare with SDPA on one head, whose time counts eight times, because eight masks would take 2 GiB."""
    tokens, count = 16384, 16384 // BLOCK
    is_later = torch.ones(count, count).triu(1).bool()
    scores = torch.rand(HEADS, count, count).masked_fill(is_later, -1.0).topk(TOP)
    index = scores.indices.masked_fill(scores.values < 0, -1)
    make = partial(ga.TokenGraph.from_block_indices, index, BLOCK, tokens, tokens, causal=True)
    tensors, graph = inputs(tokens), make()
    first_head = [x[:, :1].detach().requires_grad_(number < 3) for number, x in enumerate(tensors)]
    dense = partial(sdpa, attn_mask=graph.select(0, 0).mask()[None, None])
    steps = {
        "new": partial(step, ga.attend, tensors, make),
        "dense, one head": partial(step, dense, first_head),
    }
    seconds = least_seconds(steps, 2)
    q, k, v = (x.detach() for x in tensors[:3])
    flex: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    mask = ga.convert.to_block_mask(graph)
    calls = {
        "ours": lambda: ga.attend(q, k, v, graph),
        "ours anew": lambda: ga.attend(q, k, v, make()),
        "flex": lambda: flex(q, k, v, block_mask=mask),
        "flex anew": lambda: flex(q, k, v, block_mask=ga.convert.to_block_mask(make())),
    }
    forward = least_seconds(calls, 5)
    return {
        "seconds": seconds,
        "forward": forward,
        "faster": HEADS * seconds["dense, one head"] / seconds["new"],
        "flex": forward["flex"] / forward["ours"],
        "flex anew": forward["flex anew"] / forward["ours anew"],
    }


def decoding() -> Row:
    """Decode one token through four layers, so that the processor's caches no longer hold keys and values.

    The dense time is the faster of SDPA and ours; a step selects from cached keys, builds the graph and attends.
    """
    row: Row = {"seconds a layer": {}}
    for name in ("float32", "bfloat16"):
        seconds = decode(getattr(torch, name))
        row["seconds a layer"][name] = seconds
        row[name] = min(seconds["dense, SDPA"], seconds["dense, ours"]) / seconds["chosen"]
    return row


@torch.no_grad()
def decode(dtype: torch.dtype) -> Row:
    """Return the mean seconds of a layer whose indexer keeps its cached keys in ``dtype``."""
    positions = torch.arange(CACHE)
    graphs_of_step: list[ga.TokenGraph] = []
    calls: dict[str, Call] = {}

    def graph_of(number: int) -> ga.TokenGraph:
        """Return the graph of the last token, which the first layer builds for all layers of a step."""
        if number == 0:
            graphs_of_step[:] = [ga.patterns.causal(CACHE).rows(CACHE - 1, CACHE)]
        return graphs_of_step[0]

    def choose(number: int, indexer: Indexer, keys: Any, x: Any, q: Any, k: Any, v: Any) -> None:
        queries = indexer.receive(x, positions[-1:])
        ga.attend(q, k, v, indexer.choose(queries, keys, graph_of(number)))

    for number in range(LAYERS):
        indexer = Indexer(WIDTH, INDEXED, num_heads=4, head_dim=32, dtype=dtype)
        past, q = torch.randn(1, CACHE, WIDTH), torch.randn(1, HEADS, 1, DIM)
        k, v = torch.randn(2, 1, HEADS, CACHE, DIM).unbind()
        keys = indexer.send(past, positions).to(dtype)
        calls[f"dense, SDPA {number}"] = partial(sdpa, q, k, v)
        calls[f"dense, ours {number}"] = lambda n=number, q=q, k=k, v=v: ga.attend(q, k, v, graph_of(n))  # type: ignore[misc]
        calls[f"chosen {number}"] = partial(choose, number, indexer, keys, past[:, -1:], q, k, v)
    # Sorting lets the layers of one method run one after another, as in a model.
    seconds = least_seconds(dict(sorted(calls.items())), 60)
    methods = ("dense, SDPA", "dense, ours", "chosen")
    return {name: sum(seconds[f"{name} {n}"] for n in range(LAYERS)) / LAYERS for name in methods}


MEASURES = dict(zip(TARGETS, (top_64, growth, shared, blocks, decoding), strict=True))


def judge(record: Row) -> list[Row]:
    """Return every target of the measured rows with its bound, its value and whether it is met."""
    targets = []
    for row, numbers in TARGETS.items():
        for name, (words, sense, bound) in numbers.items() if row in record["rows"] else ():
            value = record["rows"][row][name]
            met = value >= bound if sense == "at least" else value <= bound
            bounds = {"sense": sense, "bound": bound, "value": value, "met": met}
            targets.append({"row": row, "words": words, **bounds})
    return targets


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record: Row = {"bench": "chosen graphs", "command": "python -m benchmarks.chosen_graphs RECORD"}
    record |= {"environment": environment("cpu"), "rows": {}}
    for name, measure in MEASURES.items():
        torch.manual_seed(0)
        record["rows"][name] = {**measure(), "load": os.getloadavg()[0]}
    write(options.record, record)
    for target in judge(record):
        result = f"{target['row']}: {target['value']:.3g} {target['words']}"
        print(f"{result}, {target['sense']} {target['bound']:g}")


if __name__ == "__main__":
    main()
