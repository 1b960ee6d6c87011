"""The command ``gnn-attention bench``: time ``attend`` and installed peers on a few graphs.

The command takes one or two minutes. ``python -m benchmarks`` in the repository also measures
memory, more graphs and more peers; ``gnn-attention verify`` checks that the results are right.
"""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import convert, patterns
from gnn_attention._support import atomic_files, checks, memory
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import choose
from gnn_attention.graph import TokenGraph

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_HEADS, DIM, NUM_TOKENS = 8, 64, 2048
PASSES = ("forward", "with backward")
# Each graph and pass is timed for at most this many seconds and rounds.
MAX_SECONDS, MAX_ROUNDS = 2.0, 15
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def _random_edge_list(degree: int, n: int) -> TokenGraph:
    return TokenGraph.from_edges(patterns.random_senders(n, min(degree, n)).edge_index, n)


NEW_LIST_TITLE = "random edges, 4 each, a new list in every call"
GRAPHS: dict[str, Callable[[int], TokenGraph]] = {
    "causal": patterns.causal,
    "window 256": lambda n: patterns.window(n, 256),
    "window 252, 4 sinks": lambda n: patterns.window(n, 252) | patterns.sinks(n, 4),
    "documents of 256": lambda n: patterns.documents([256] * (n // 256) + [n % 256]),
    "random edges, 32 each": partial(_random_edge_list, 32),
    NEW_LIST_TITLE: partial(_random_edge_list, 4),
}


@dataclass(frozen=True)
class Problem:
    """A graph, and q, k, v ``[3, 1, H, T, D]`` in the memory layout of a projection's output."""

    title: str
    graph: TokenGraph
    inputs: Tensor
    backward: bool

    def bind(self, function: Function) -> Callable[[], object]:
        """Return a call of ``function`` on the inputs, followed by a backward pass if ``backward``."""
        leaves = [x.detach().requires_grad_(self.backward) for x in self.inputs]
        if self.backward:
            return lambda: torch.autograd.grad(function(*leaves), leaves, self.inputs[0])
        return torch.no_grad()(lambda: function(*leaves))

    def lacks_memory(self, num_bytes: int) -> bool:
        """Return whether ``num_bytes`` are more than half of the free memory."""
        is_cuda = self.inputs.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.inputs.device)[0] if is_cuda else memory.available()
        return 2 * num_bytes > free


def _prepare_attend(problem: Problem) -> Function:
    if problem.title != NEW_LIST_TITLE:
        return partial(attend, graph=problem.graph)
    edge_index, num_tokens = problem.graph.edge_index, problem.graph.num_dst
    return lambda q, k, v: attend(q, k, v, TokenGraph.from_edges(edge_index, num_tokens))


def _prepare_sdpa(problem: Problem) -> Function | str:
    sdpa = functional.scaled_dot_product_attention
    if problem.graph.is_causal():
        return partial(sdpa, is_causal=True)
    if problem.lacks_memory(8 * NUM_HEADS * problem.graph.num_dst * problem.graph.num_src):
        return "SDPA with a mask needs more than half of the free memory"
    return partial(sdpa, attn_mask=problem.graph.mask(problem.inputs.device))


def _prepare_flex(problem: Problem) -> Function | str:
    if problem.backward and problem.inputs.device.type == "cpu":
        return "FlexAttention has no backward pass on a CPU"
    if problem.graph.edges.listed() is not None:
        return "FlexAttention takes a rule, not an edge list"
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask = convert.to_block_mask(problem.graph, device=problem.inputs.device)
    return partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=mask)


def _prepare_conv(problem: Problem) -> Function | str:
    """Prepare ``propagate`` of PyG's TransformerConv, without its projections."""
    if problem.lacks_memory(20 * NUM_HEADS * DIM * problem.graph.num_edges):
        return "TransformerConv needs more than half of the free memory"
    edges = problem.graph.edges_on(problem.inputs.device)
    conv_class = importlib.import_module("torch_geometric.nn").TransformerConv
    conv = conv_class(NUM_HEADS * DIM, DIM, NUM_HEADS, root_weight=False, bias=False)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = conv.propagate(edges, size=(len(k), len(q)), edge_attr=None, query=q, key=k, value=v)
        return out.transpose(0, 1).unsqueeze(0)  # type: ignore[no-any-return]

    return function


# A peer prepares what users reuse (mask, edges, kernel). It returns f(q, k, v) or why to skip it.
PEERS: dict[str, Callable[[Problem], Function | str]]
PEERS = {"SDPA": _prepare_sdpa, "FlexAttention": _prepare_flex, "TransformerConv": _prepare_conv}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gnn-attention bench``."""
    add = command.add_argument
    add("--tokens", type=int, default=NUM_TOKENS, metavar="N", help="number of tokens (default %(default)s)")
    gpu_names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    devices = ["cpu", "cuda", *gpu_names] if gpu_names else ["cpu"]
    add("--device", default="cpu", choices=devices, help="where to run (default %(default)s)")
    add("--dtype", choices=list(DTYPES), help="dtype of q, k and v (default: float32, or bfloat16 on a GPU)")
    add("--no-peers", action="store_true", help="time attend alone")
    atomic_files.add_json(command)
    command.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    num_tokens = checks.size("--tokens", args.tokens, 1)
    device = torch.device(args.device)
    dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    peers = [] if args.no_peers else list(PEERS)
    with Progress("bench", len(GRAPHS) * len(PASSES) * (1 + len(peers)), "cases") as progress:
        record = measure(num_tokens, device, dtype, peers, progress)
    atomic_files.write_json(args.json, record, table(record))
    return 0


def measure(
    num_tokens: int, device: torch.device, dtype: torch.dtype, peers: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """Time every method on every graph, with and without backward; return the record of ``--json``.

    ``cases`` has a row for each graph, pass and method. A row has the ``seconds`` of a call, their
    ``ratio`` to those of attend, and ``system``, the system's fraction of processor time. If a
    method was skipped, its row has the reason as ``skipped``. Rows of attend also have the
    ``backend``.
    """
    cases = list[dict[str, Any]]()
    rng = torch.Generator(device).manual_seed(0)
    for (title, build), pass_name in product(GRAPHS.items(), PASSES):
        inputs = torch.randn(3, 1, num_tokens, NUM_HEADS, DIM, generator=rng, device=device, dtype=dtype)
        problem = Problem(title, build(num_tokens), inputs.transpose(2, 3), pass_name == PASSES[1])
        case = {"graph": title, "edges": problem.graph.num_edges, "pass": pass_name}
        progress.begin(f"{title}, {pass_name}: attend")
        baseline = Timing(problem.bind(_prepare_attend(problem)))
        baseline.call()
        timings: dict[str, Timing | str] = {"attend": baseline}
        for name in peers:
            progress.begin(f"{title}, {pass_name}: {name}")
            timings[name] = _prepare_timing(name, problem)
        valid_timings = [timing for timing in timings.values() if isinstance(timing, Timing)]
        end = time.monotonic() + MAX_SECONDS
        while len(baseline.seconds) < MAX_ROUNDS and time.monotonic() < end:
            # The methods alternate, so that each ratio compares calls made at about the same time.
            for timing in valid_timings:
                timing.measure_round()
        rows = [{**case, "method": name, **_summarise(x, baseline)} for name, x in timings.items()]
        q, k, v = problem.inputs
        rows[0]["backend"] = choose(AttentionCall.from_arguments(q, k, v, problem.graph)).name
        cases += rows
    sizes = {"tokens": num_tokens, "heads": NUM_HEADS, "dim": DIM, "dtype": str(dtype).removeprefix("torch.")}
    machine = {"device": str(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    return {"bench": "short", "schema": 2, **machine, **sizes, "cases": cases}


@dataclass
class Timing:
    """A call, its mean seconds in each round, and its processor seconds in total and in the system."""

    call: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    processor_seconds: float = 0.0
    system_seconds: float = 0.0

    def measure_round(self) -> None:
        """Repeat the call for 10 ms, at least once, and append its mean time."""
        num_calls = 0
        times_before, start = os.times(), time.perf_counter()
        while not num_calls or time.perf_counter() - start < 0.01:
            self.call()
            num_calls += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append((time.perf_counter() - start) / num_calls)
        times_after = os.times()
        self.system_seconds += times_after.system - times_before.system
        self.processor_seconds += sum(times_after[:2]) - sum(times_before[:2])


def _prepare_timing(name: str, problem: Problem) -> Timing | str:
    """Prepare a peer and call it once to compile its kernels, or return the reason to skip it."""
    try:
        if isinstance(function := PEERS[name](problem), str):
            return function
        call = problem.bind(function)
        call()
    # A peer may fail in any way, and the others must still be measured.
    except Exception as error:
        return f"{name} failed: {type(error).__name__}: {error}".splitlines()[0][:150]
    return Timing(call)


def _summarise(timing: Timing | str, baseline: Timing) -> dict[str, Any]:
    if isinstance(timing, str):
        return {"skipped": timing}
    ratio = statistics.median(a / b for a, b in zip(timing.seconds, baseline.seconds, strict=True))
    system = timing.system_seconds / timing.processor_seconds if timing.processor_seconds else 0.0
    return {"seconds": statistics.median(timing.seconds), "ratio": ratio, "system": system}


def table(record: dict[str, Any]) -> str:
    """Format a record as a table, with rows for graphs and passes and columns for methods."""
    cases = record["cases"]
    names = list(dict.fromkeys(case["method"] for case in cases))
    reasons = list(dict.fromkeys(case["skipped"] for case in cases if "skipped" in case))
    rows = [["graph", "edges", "pass", "backend", *names]]
    for case in cases:
        if case["method"] == "attend":
            rows.append([case["graph"], f"{case['edges']:,}", case["pass"], case["backend"]])
        if "skipped" in case:
            rows[-1].append(f"[{reasons.index(case['skipped']) + 1}]")
        else:
            rows[-1].append(f"{case['seconds'] * 1e3:.3g} ({case['ratio']:.2g}x), {case['system']:.0%}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    title = "{tokens:,} tokens, {heads} heads of {dim}, {dtype}; "
    title += "{device}, {threads} threads, torch {torch}"
    notes = ["cells: ms (ratio to attend), share of system time, mostly spent on new memory pages"]
    notes += [f"[{number}] skipped: {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([title.format_map(record), "", *lines, "", *notes])
