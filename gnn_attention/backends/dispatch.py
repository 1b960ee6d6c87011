"""Which backend ``backend="auto"`` takes, and why.

A small graph goes to one dense call at once. On a CPU what each backend would visit (pairs, cells of tiles,
edges, nodes) is counted once for other lists, and estimated once for other rules, without building anything
(:mod:`gnn_attention.backends.plan.work`), and weighed with the constants of
:mod:`gnn_attention.backends.cost_model`: the least estimated time of those that support the call. ``flex``,
which compiles before it runs, is taken there only by name.

On CUDA the backends stand in one list, and the first that supports the call is taken (:data:`ON_CUDA`).
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend, cost_model, dense, devices, failures, rows
from gnn_attention.backends.backend import CompilationError
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.cost_model import Work
from gnn_attention.backends.gpu import row_attention
from gnn_attention.backends.plan.work import WORK, dense_work, fill, is_estimated, rows_work
from gnn_attention.graph import TokenGraph, memoized

SMALL = 128 * 128  # pairs up to which one dense call is fastest
# edges x heads x channels up to which a plan of the edges takes longer than it saves
FEW_NUMBERS = 2**20
# pairs that a dense kernel visits while a mask is made from a list
PAIRS_OF_A_MASK = 2**15
# pairs up to which the operators of the message-passing formula take longer than one dense call and its mask
PAIRS_OF_MESSAGES = 2**12
PLAIN, WITH_LSE, WRITTEN_OUT = "plain", "with lse or sinks", "with score_mod, bias or dropout"
SLOWER = {
    "dense": {PLAIN: 1.0, WITH_LSE: 4.0, WRITTEN_OUT: 4.0},
    "tiles": {WRITTEN_OUT: 2.5},
    "rows": {WRITTEN_OUT: 2.0},
}
FEW_PAIRS = "so few pairs are quickest in one dense call"
BY_SIZE = (
    "by the number of its edges alone: a list is read anew in every call, and a TokenGraph is planned once"
)
FIRST_CALL = (
    "by the number of its edges alone, since it may be used once; from the third call along it, or after "
    "graph.prepare()"
)
UNSUPPORTED = "the others do not support it"
VISITED = {
    "dense": "most pairs are edges",
    "tiles": "its edges lie in few, well filled tiles",
    "rows": "its edges are few and far between",
    "mixed": "some of its tiles are well filled, the other edges are few",
    "message_passing": "its messages are so few that a plan of its edges would take longer",
}

TILE = 128  # tokens on the side of a tile of FlexAttention's kernels for CUDA
# The share of the pairs of its tiles that must be edges for FlexAttention to take less time than rows.
# `python -m benchmarks.gpu_run` measures it (workloads "fill").
FILLED = 1 / 8
# of the call or of memory: they say nothing about a kernel
ERRORS_OF_CALL = (ValueError, TypeError, IndexError, NotImplementedError, torch.OutOfMemoryError)
Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Explanation:
    """Which backend "auto" takes for a graph, and why; print it.

    ``rules``: each backend with what the forward pass would cost; for CUDA the backends in their order, each
    with why it is taken or passed over. ``estimated``: the edges and tiles behind the costs are those of a
    sample, not counted. ``obstacle``: why the rule of the graph cannot be evaluated on ranges of
    tokens, so that its pairs are visited one by one.
    """

    graph: str
    choice: str
    reason: str
    rules: tuple[tuple[str, str], ...] = ()
    estimated: bool = False
    obstacle: str | None = None

    def __str__(self) -> str:
        if not self.rules:
            return f"{self.graph}\n{self.choice}: {self.reason}"
        width = max(12, *(len(name) + 2 for name, _ in self.rules))
        lines = [self.graph, f"auto takes {self.choice}: {self.reason}"]
        lines += [f"{name:<{width}}{reason}" for name, reason in self.rules]
        if self.estimated:
            lines.append("edges and tiles are estimated from a sample of the rows, not counted")
        if self.obstacle is not None:
            lines.append(f"its rule is evaluated pair by pair, not on ranges of tokens ({self.obstacle})")
        return "\n".join(lines)


def explain(
    graph: TokenGraph,
    heads: int,
    dim: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Which backend ``backend="auto"`` takes for ``heads`` heads of width ``dim``, and why.

    ``device``: None or "cpu" for this machine's CPU (``dtype`` float32 unless given); "cuda" for a GPU, which
    need not be at hand (``dtype`` bfloat16 unless given): the answer lists the backends in the order in which
    they are asked. The costs are those of one sample, of ``graph.batch`` samples for a graph that differs by
    them. ValueError for another device, TypeError for no graph or dtype.

    >>> from gnn_attention import patterns
    >>> [explain(patterns.window(n, 64), heads=8, dim=64).choice for n in (128, 512)]
    ['dense', 'tiles']
    >>> explain(patterns.causal(4096), heads=8, dim=64, device="cuda").choice
    'dense'
    """
    heads, dim = checks.size("heads", heads, 1), checks.size("dim", dim, 1)
    checks.instance("graph", graph, TokenGraph)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating point dtype of torch, got {quote(dtype)}")
    kind = str(device or "cpu").partition(":")[0]
    if kind == "cuda":
        with FakeTensorMode():
            call = _empty_call(graph, heads, dim, "cuda", dtype or torch.bfloat16)
            planned = _explain_on_cuda(call, ON_CUDA)
            if not is_first_call(call):
                return planned
            first = _explain_on_cuda(call, _rules_of_first_call(call))
            return replace(first, reason=f"{FIRST_CALL}, {planned.choice}: {planned.reason}")
    if kind != "cpu":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {quote(device)}")
    call = _empty_call(graph, heads, dim, "meta", dtype)
    choice, slices = choose(call), (graph.batch or 1) * heads
    final_choice = _first_that_applies(_rules(call), call).name
    if has_few_pairs(graph):
        reason = FEW_PAIRS if final_choice == "dense" else UNSUPPORTED
    elif final_choice == "dense" and dense.bytes_needed(call) == 0:
        reason = "one SDPA call without a mask"
    else:
        reason = f"{VISITED.get(final_choice, UNSUPPORTED)}; the least estimated time"
    if is_first_call(call):
        reason = f"{FIRST_CALL}, {final_choice}: {reason}"
    table = []
    for name, backend in BACKENDS.items():
        seconds = _seconds(graph, name, slices, dim)
        extra = f"{(backend.bytes_needed(call) if backend.bytes_needed else 0) / 2**20:.1f} MB more memory"
        table.append((name, extra if seconds is None else f"about {seconds * 1e3:.3f} ms, {extra}"))
    by_sample = is_estimated(one_of(graph, 0, 0))
    obstacle = graph.edges.obstacle
    return Explanation(repr(graph), choice.name, reason, tuple(table), by_sample, obstacle)


def explain_by_size(graph: TokenGraph, heads: int, dim: int) -> Explanation:
    """Which backend a call takes along a list that is made for it, as a layer's is from an ``edge_index``."""
    choice = choose_by_size(_empty_call(graph, heads, dim, "meta", None))
    return Explanation(repr(graph), choice.name, BY_SIZE)


def choose(call: AttentionCall) -> Backend:
    """The backend for a call; NotImplementedError if none supports it."""
    return choose_by_size(call) if is_first_call(call) else _first_that_applies(_rules(call), call)


def run_or_replace(
    run: Callable[[Backend, AttentionCall], Result], backend: Backend, call: AttentionCall
) -> Result:
    """``run(backend, call)``; where its kernel cannot be compiled or launched, what ``auto`` takes instead.

    One warning names the backend, the device and the error. Calls of the same kind do not try it again.
    """
    if devices.is_program(call.q):
        return run(backend, call)
    failed_before = failures.reason(backend.name, call)
    try:
        return run(backend, call)
    except Exception as error:  # every compiler and driver has its own
        if isinstance(error, ERRORS_OF_CALL) and not isinstance(error, CompilationError):
            raise
        failures.record(backend.name, call, error)
        replacement = choose(call)
        if failed_before is not None and replacement is backend:
            raise
    if call.chosen is not None:
        call.chosen.pop("auto", None)
    if failed_before is None:
        warnings.warn(
            f"backend {backend.name!r} failed on {call.q.device} in {call.q.dtype} "
            f"({failures.reason(backend.name, call)}); backend='auto' takes {replacement.name!r} "
            "for such calls from now on",
            RuntimeWarning,
            stacklevel=4,
        )
    return run_or_replace(run, replacement, call)


class Rule(NamedTuple):
    """A backend that ``auto`` may take: what it is good at, and why it is passed over (None: it is not)."""

    backend: str
    strength: str
    passed_over: Callable[[AttentionCall], str | None] | None = None


def _several_receivers(call: AttentionCall) -> str | None:
    if rows.is_decoding_step(call) and not call.graph.is_full():
        return None
    return "it is no step of decoding: one receiver, without gradients, over some of the senders"


def _chosen_rows(call: AttentionCall) -> str | None:
    # to look at a graph that was chosen on a device is to wait for the device
    if call.graph.edges.has_structure:
        return None
    return "its senders were chosen row by row: its structure is not looked at"


def _written_pairs(call: AttentionCall) -> str | None:
    if has_few_pairs(call.graph):
        return None
    reason = _chosen_rows(call)
    needed = dense.bytes_needed(call) if reason is None else 0
    return f"it would write {needed / 2**30:.2g} GiB for all pairs" if needed else reason


def _empty_tiles(call: AttentionCall) -> str | None:
    reason = _chosen_rows(call)
    if reason is not None:
        return reason
    filled = memoized(fill, one_of(call.graph, 0, 0), TILE)
    if filled >= FILLED:
        return None
    about = "about " if is_estimated(one_of(call.graph, 0, 0)) else ""
    return f"{about}{filled:.2%} of the pairs in its tiles of {TILE} are edges, fewer than {FILLED:.1%}"


def _much_memory(call: AttentionCall) -> str | None:
    needed = dense.bytes_needed(call)
    if needed <= dense.COMFORTABLE:
        return None
    limit = f"more than {dense.COMFORTABLE / 2**30:.0f}"
    return f"it would need {needed / 2**30:.1f} GiB of mask and logits, {limit}"


ON_CUDA = (
    Rule("rows", "one receiver is a step of decoding", _several_receivers),
    Rule("dense", "few pairs, or one SDPA call without a mask", _written_pairs),
    Rule("varlen", "packed documents, or one window for all", _chosen_rows),
    Rule("flex", f"its tiles of {TILE} are well filled", _empty_tiles),
    Rule("rows", "edge by edge"),
    Rule("dense", "the logits of all pairs fit into memory", _much_memory),
    Rule("reference", "edge by edge, in chunks"),
)
ON_CPU = {
    name: Rule(name, VISITED.get(name, ""), _much_memory if name == "dense" else None)
    for name in ("dense", "tiles", "rows", "mixed", "message_passing", "reference")
}


def _rules(call: AttentionCall) -> tuple[Rule, ...]:
    """The rules to ask, the best first."""
    if call.q.device.type == "cuda":
        return ON_CUDA
    if has_few_pairs(call.graph):
        return ON_CPU["dense"], ON_CPU["rows"], ON_CPU["reference"]
    kind = WITH_LSE if call.with_lse or call.sink_logits is not None else PLAIN
    kind = kind if call.is_plain else WRITTEN_OUT
    names = memoized(_rank_backends, call.graph, call.q.shape[1], call.q.shape[3], kind)
    best, listed = (_work(call.graph, name) or Work() for name in (names[0], "rows"))
    if _has_few_messages(call, listed.edges, best.pairs or FEW_NUMBERS):
        names = ("message_passing", *names)
    return tuple(ON_CPU[name] for name in names)


def has_few_pairs(graph: TokenGraph) -> bool:
    return graph.num_dst * graph.num_src <= SMALL


def _has_few_messages(call: AttentionCall, edges: int, pairs: int, extra: int = 0) -> bool:
    """Whether the numbers of all messages are few, and fewer than the pairs that another kernel visits.

    ``edges`` and ``pairs`` are those of one head of one sample, ``extra`` those of the time that it takes
    besides.
    """
    batch, heads, _, dim = call.q.shape
    numbers = batch * heads * edges * max(dim, call.v.shape[3])
    return numbers <= min(FEW_NUMBERS, batch * heads * pairs + extra)


def choose_by_size(call: AttentionCall) -> Backend:
    """The backend for a call along a list that is used once, by its size alone."""
    return _first_that_applies(_rules_of_first_call(call), call)


def is_first_call(call: AttentionCall) -> bool:
    """Whether ``auto`` chooses by the numbers of tokens, edges, heads and channels alone.

    A list of edges that is seen for the first time may be used once, and to count its tiles would take longer
    than the call. A compiled program runs many times.
    """
    if torch.compiler.is_compiling() or call.graph.is_prepared or has_few_pairs(call.graph):
        return False
    # senders that were chosen row by row are never counted tile by tile
    return call.graph.edges.has_structure


def _rules_of_first_call(call: AttentionCall) -> tuple[Rule, ...]:
    if call.q.device.type == "cuda":
        return tuple(rule for rule in ON_CUDA if rule.backend not in ("varlen", "flex"))
    (batch, heads, num_dst, dim), num_src = call.q.shape, call.graph.num_src
    if num_dst * num_src <= PAIRS_OF_MESSAGES:
        names: tuple[str, ...] = ("dense", "rows", "reference")
    elif _has_few_messages(call, call.graph.num_edges, num_dst * num_src, PAIRS_OF_A_MASK):
        names = ("message_passing", "rows", "reference")
    else:
        by_pairs = Work(masked_pairs=num_dst * num_src)
        by_edges = Work(calls=4, edges=call.graph.num_edges, nodes=num_dst)
        dense, rows = (cost_model.costs().seconds(work, batch * heads, dim) for work in (by_pairs, by_edges))
        names = ("dense", "rows", "reference") if dense < rows else ("rows", "reference")
    return tuple(ON_CPU[name] for name in names)


def _first_that_applies(rules: Iterable[Rule], call: AttentionCall) -> Backend:
    return BACKENDS[_ask(rules, call)[0].backend]


def _ask(rules: Iterable[Rule], call: AttentionCall) -> tuple[Rule, list[tuple[str, str]]]:
    """The first rule that applies, and each one before it with why its backend is passed over."""
    refusals: list[tuple[str, str]] = []
    for rule in rules:
        reason = _refusal(rule, call)
        if reason is None:
            return rule, refusals
        refusals.append((rule.backend, reason))
    listed = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise NotImplementedError(f"no backend holds {call.graph!r} with {call.q.shape[1]} heads: {listed}")


def _refusal(rule: Rule, call: AttentionCall) -> str | None:
    """Why a rule does not apply to the call; None where its backend is taken."""
    if call.graph.has_parallel_edges and BACKENDS[rule.backend].capabilities.parallel_edges != "kept":
        return "it keeps no parallel edges"
    reason = None if rule.passed_over is None else rule.passed_over(call)
    reason = reason or BACKENDS[rule.backend].unsupported_reason(call)
    # rows go on by operators of torch where their kernel failed
    if reason is None and rule.backend != "rows":
        reason = failures.reason(rule.backend, call)
    return reason


def _empty_call(
    graph: TokenGraph, heads: int, dim: int, device: str, dtype: torch.dtype | None
) -> AttentionCall:
    """A plain call along the graph whose tensors hold no numbers."""
    q = torch.empty(graph.batch or 1, heads, graph.num_dst, dim, device=device, dtype=dtype)
    k = torch.empty(graph.batch or 1, heads, graph.num_src, dim, device=device, dtype=dtype)
    return AttentionCall.from_arguments(q, k, k, graph)


def _explain_on_cuda(call: AttentionCall, rules: Iterable[Rule]) -> Explanation:
    """Which of the rules applies on CUDA, with the reason of every backend that is passed over."""
    rule, refusals = _ask(rules, call)
    strength = rule.strength
    if rule.backend == "rows" and not rows.is_decoding_step(call):
        by = row_attention.unsupported_reason(call)
        strength += "; in the Triton kernel" if by is None else f"; by torch operators, {by}"
    answers = (*refusals, (rule.backend, "taken"))
    return Explanation(repr(call.graph), rule.backend, strength, rules=answers)


def _rank_backends(graph: TokenGraph, heads: int, dim: int, kind: str) -> tuple[str, ...]:
    # the fastest first, by estimate; of equals the simpler one
    if not graph.edges.has_structure:
        # what is chosen anew in every step is not counted tile by tile
        works = Work(masked_pairs=graph.num_dst * graph.num_src), rows_work(graph)
        dense, rows = (cost_model.costs().seconds(work, heads, dim) for work in works)
        first = ("dense", "rows") if dense < rows else ("rows", "dense")
        return (*first, "tiles", "reference")
    names = ("dense", "tiles", "rows") if kind == WRITTEN_OUT else ("dense", "tiles", "rows", "mixed")
    factors = {name: SLOWER.get(name, {}).get(kind, 1.0) for name in names}
    times = {name: (_seconds(graph, name, heads, dim) or 0.0) * factors[name] for name in names}
    return (*sorted(names, key=lambda name: times[name]), "reference")


def _work(graph: TokenGraph, name: str) -> Work | None:
    if name == "dense":
        return dense_work(graph)
    # of a graph that differs by head or sample, its first stands for all
    return memoized(WORK[name], one_of(graph, 0, 0)) if name in WORK else None


def _seconds(graph: TokenGraph, name: str, heads: int, dim: int) -> float | None:
    work = _work(graph, name)
    return None if work is None else cost_model.costs().seconds(work, heads, dim)
