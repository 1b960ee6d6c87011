"""F12: a call takes memory in proportion to its edges and tokens, and refuses first what would exhaust memory.

Each pass of a call may take ``6 (E H + N H C) itemsize`` beyond its inputs, where ``itemsize`` is that of the
dtype of sums (float32 or wider), or the workspace that its backend states (``Backend.bytes_needed``), if that is
more. ``E`` is the number of edges; for ``dense`` it is that of all pairs, and for ``tiles`` too if edges are
random, because they lie in all tiles. No single tensor has ``E H C`` numbers, except in ``reference``, which must
keep to its stated workspace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gnn_attention import convert, draw, edge_softmax, patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend, explain
from gnn_attention.backends import BACKENDS
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import choose
from gnn_attention.explorer import page
from gnn_attention.graph import TokenGraph
from tests.guarantees.guarantee import Finding, Guarantee, Tell, Verdict, run_cases

HEADS, DIM, FACTOR = 8, 64, 6
TOKENS, MAX_DENSE_TOKENS = 2048, 1024  # the second limits calls that visit all pairs
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, eq=False)
class Allocations:
    """The result or exception of a run, its peak of additional bytes, and its largest allocation."""

    result: Any
    error: Exception | None
    peak: int
    largest: int


def record_allocations(work: Callable[[], Any]) -> Allocations:
    """Run ``work`` once on a CPU and record every allocation of torch.

    >>> one_by_one = record_allocations(lambda: [torch.ones(1000).sum().item() for _ in range(5)])
    >>> 4000 <= one_by_one.peak < 8000, one_by_one.largest
    (True, 4000)
    """
    # Without this variable, torch's profiler prints a line to stderr at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    result, error = None, None
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        try:
            result = work()
        except Exception as exception:  # the caller judges it
            error = exception
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    total, peak, largest = 0, 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total, largest = total + event.nbytes(), max(largest, event.nbytes())
        peak = max(peak, total)
    return Allocations(result, error, peak, largest)


# ---- calls


def _make_list(n: int) -> TokenGraph:
    """Return a graph of at most 64 random senders for each token."""
    src = torch.randint(n, (64 * n,), generator=torch.Generator().manual_seed(n))
    edges = torch.stack([src, torch.arange(n).repeat_interleave(64)])
    return TokenGraph.from_edges(edges, n, coalesce=True, name="listed")


def _windows_by_head(n: int) -> TokenGraph:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (dst - src <= 64 + 8 * h)

    return TokenGraph.from_rule(rule, n, heads=HEADS, name="by head")


GRAPHS: dict[str, Callable[[int], TokenGraph]] = {
    "window": lambda n: patterns.window(n, 128),
    "documents": lambda n: patterns.documents([n // 16] * 16),
    "list": _make_list,
    "by head": _windows_by_head,
}
CALLS = (
    *(("auto", "window", "plain"), ("auto", "list", "sinks"), ("auto", "documents", "score_mod")),
    *(("rows", "list", "plain"), ("rows", "by head", "sinks"), ("rows", "window", "bias")),
    *(("tiles", "window", "plain"), ("tiles", "documents", "dropout"), ("tiles", "list", "sinks")),
    *(("mixed", "window", "plain"), ("mixed", "list", "sinks"), ("mixed", "by head", "plain")),
    *(("dense", "window", "plain"), ("dense", "by head", "score_mod"), ("reference", "window", "plain")),
)


def _options(kind: str, graph: TokenGraph, dtype: torch.dtype) -> dict[str, Any]:
    if kind == "sinks":
        return {"sink_logits": torch.zeros(HEADS, dtype=dtype)}
    if kind == "score_mod":
        return {"score_mod": score_mods.alibi(score_mods.alibi_slopes(HEADS))}
    if kind == "bias":
        return {"bias": torch.zeros(HEADS, graph.num_edges, dtype=dtype)}
    return {"dropout": 0.1} if kind == "dropout" else {}


def check_call(
    name: str, family: str, kind: str, dtype: torch.dtype, tokens: int = TOKENS
) -> Iterator[Finding]:
    """Yield the memory of both passes as shares of the allowed one, and the largest tensor as a share of ``E H C``.

    The second call is measured, because the first fills the caches of the graph.

    >>> [share <= 1 for _, share, _ in check_call("rows", "window", "plain", torch.float32, tokens=256)]
    [True, True, True]
    """
    all_pairs = name == "dense" or (name, family) == ("tiles", "list")
    n = min(tokens, MAX_DENSE_TOKENS) if all_pairs or name == "reference" else tokens
    graph, rng = GRAPHS[family](n), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, DIM, generator=rng, dtype=dtype).requires_grad_() for _ in range(3))
    options = _options(kind, graph, dtype)
    call = AttentionCall.from_arguments(q, k, v, graph, **options)
    backend = choose(call) if name == "auto" else BACKENDS[name]

    def forward() -> Tensor:
        out: Tensor = attend(q, k, v, graph, backend=backend, **options)
        return out

    def backward(out: Tensor) -> Any:
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    backward(forward())
    first = _raise_error(record_allocations(forward))
    second = _raise_error(record_allocations(partial(backward, first.result)))
    edges = HEADS * n * n if all_pairs else graph.num_edges * (1 if graph.heads else HEADS)
    wide_itemsize = edge_softmax.accumulation_dtype(dtype).itemsize
    formula = 0 if name == "reference" else FACTOR * (edges + n * HEADS * DIM) * wide_itemsize
    workspace = backend.bytes_needed(call) if backend.bytes_needed is not None else 0
    # The results need memory beside a workspace: out and logits in one pass, three gradients in the other.
    result_bytes = n * HEADS * DIM * (wide_itemsize + dtype.itemsize)
    allowed = [max(formula, workspace + count * result_bytes) for count in (2, 4)]
    largest = 0 if name == "reference" else max(first.largest, second.largest)
    for direction, share in (("forward", first.peak / allowed[0]), ("backward", second.peak / allowed[1])):
        yield direction, share, f"{share:.2f} of what is allowed {direction}" if share > 1 else ""
    share = largest / (edges * DIM * dtype.itemsize)
    yield "largest", share, f"{share:.2f} of E H C in a tensor" if share >= 1 else ""


def _raise_error(outcome: Allocations) -> Allocations:
    if outcome.error is not None:
        raise outcome.error
    return outcome


# ---- refusals

MILLION, TRILLION = 10**6, 10**12
MAX_BYTES = 2**28  # a refusal or an answer may take a few numbers for each of a million tokens
ESTIMATE = re.compile(r"[\d,.]+ GiB|at most \d+|limit is \d+|holds at most \d+")


def _attend_to(graph: TokenGraph, backend: str) -> Tensor:
    q, k = (torch.zeros(1, 1, n, 1) for n in (graph.num_dst, graph.num_src))
    out: Tensor = attend(q, k, k, graph, backend=backend)
    return out


def _all_pairs_through_a_hub() -> TokenGraph:
    """Join every pair of a million tokens in two hops, through a hub that attends to all."""
    star = torch.stack([torch.zeros(MILLION, dtype=torch.int64), torch.arange(MILLION)])
    return TokenGraph.from_edges(star, MILLION) @ TokenGraph.from_edges(star.flip(0), MILLION)


def _scattered_rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst * 7 + src * src) % 11 == 0


REFUSALS: dict[str, Callable[[], Any]] = {
    "the mask of a million tokens": lambda: patterns.causal(MILLION).mask(),
    "the mask of a rule": lambda: TokenGraph.from_rule(_scattered_rule, MILLION, heads=2).mask(),
    "the list of half a trillion edges": lambda: patterns.causal(MILLION).edge_index,
    "the in-degrees of a trillion tokens": lambda: patterns.causal(TRILLION).in_degree(),
    "two hops between all of a million tokens": _all_pairs_through_a_hub,
    "SDPA's mask of a million tokens": lambda: convert.to_sdpa_mask(patterns.window(MILLION, 4)),
    "a networkx graph": lambda: convert.to_networkx(patterns.causal(MILLION)),
    "dense over a window of a million": lambda: _attend_to(patterns.window(MILLION, 4), "dense"),
    "rows of half a trillion edges": lambda: _attend_to(patterns.causal(MILLION), "rows"),
    "the reference on a million tokens": lambda: _attend_to(patterns.causal(MILLION), "reference"),
    "a drawing of a million tokens": lambda: draw.mask(patterns.causal(MILLION)),
    "nodes and links of a million tokens": lambda: draw.graph(patterns.causal(MILLION)),
    "a page of a million tokens": lambda: page([5] * MILLION),
}
ANSWERS: dict[str, Callable[[], Any]] = {
    "explain for 100,000 tokens": lambda: explain(patterns.causal(MILLION // 10), 8, 64),
    "edges of a causal graph": lambda: patterns.causal(MILLION).num_edges,
    "decoding rows": lambda: patterns.causal(MILLION).rows(MILLION - 2, MILLION).mask(),
    "edges of a list between 2^31 tokens": lambda: (
        convert.from_edge_index(torch.tensor([[0, 1], [0, 2**30]]), 2**31).num_edges
    ),
    "a page with a graph of a million": lambda: page("ab", graph=f"full({MILLION})", room=2),
}


def fault_of(work: Callable[[], Any], is_refused: bool) -> str | None:
    """Return the fault of ``work``, which must be answered, or refused with an estimate, within little memory."""
    outcome = record_allocations(work)
    if is_refused and outcome.error is None:
        return "not refused"
    if not isinstance(outcome.error, (ValueError, NotImplementedError) if is_refused else type(None)):
        return f"{type(outcome.error).__name__}: {outcome.error}"[:200]
    if is_refused and not ESTIMATE.search(str(outcome.error)):
        return f"without an estimate or a limit: {outcome.error}"[:200]
    return f"{outcome.peak / 2**20:.0f} MiB were taken" if outcome.peak > MAX_BYTES else None


# ---- the guarantee


def _check_limit(work: Callable[[], Any], is_refused: bool) -> Iterator[Finding]:
    yield "refused" if is_refused else "answered", 0.0, fault_of(work, is_refused) or ""


def _measure(count: int, tell: Tell) -> Verdict:
    """Measure ``count`` calls, and all refusals and answers."""
    cases: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        (", ".join(call), partial(check_call, *call, DTYPES[number % 3]))
        for number, call in enumerate(CALLS[:count])
    ]
    cases += [(name, partial(_check_limit, work, True)) for name, work in REFUSALS.items()]
    cases += [(name, partial(_check_limit, work, False)) for name, work in ANSWERS.items()]
    tally = run_cases(cases, [""], lambda check, subject: check(), tell)
    forward, backward, largest = (tally.largest.get(kind, 0.0) for kind in ("forward", "backward", "largest"))
    value = (
        f"{min(count, len(CALLS))} calls took at most {forward:.2f} and {backward:.2f} of what is allowed to each "
        f"pass, largest tensor {largest:.2f} of E H C; {len(REFUSALS)} refused and {len(ANSWERS)} answered, "
        f"{len(tally.failures)} failures"
    )
    return tally.outcome(value, [("forward", "")])


GUARANTEE = Guarantee(
    name="F12",
    promise="a call takes memory by its edges and tokens, and what would exhaust memory is refused by name",
    bar=(
        "forward and backward within 6 (E H + N H C) numbers, or within the workspace that a backend states "
        "where that is more; never a tensor of E H C outside of the reference; what cannot fit refused with "
        "an estimate or a limit"
    ),
    quick=4,
    full=len(CALLS),
    measure=_measure,
)
