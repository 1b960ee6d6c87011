"""Choice of the backend for ``backend="auto"``, with its reasons.

A small graph runs in one dense call. For larger graphs on a CPU, :mod:`gnn_attention.backends.plan.work`
counts what each backend would visit (pairs, cells of tiles, edges and nodes), exactly for lists and roughly
for rules, and :mod:`gnn_attention.backends.cost_model` turns the counts into times. The fastest backend that
supports the call is chosen, but ``flex``, which compiles before it runs, is used on a CPU only by name.

On CUDA the choice is the first backend in :data:`ON_CUDA` with no reason against it.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gnn_attention._support import checks, devices
from gnn_attention._support.autograd import has_forward_derivative
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Tensor
from gnn_attention.analyse.tile_counts import fill, is_estimated
from gnn_attention.backends import BACKENDS, Backend, cost_model, dense, failures, rows
from gnn_attention.backends.backend import CompilationError
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cost_model import Work
from gnn_attention.backends.gpu import row_attention
from gnn_attention.backends.plan.work import WORK, dense_work, rows_work
from gnn_attention.edge_ops.edge_lists import select_slice
from gnn_attention.graph import TokenGraph, memoized

MAX_SMALL_GRAPH_PAIRS = 128 * 128  # Up to this many pairs, one dense call is fastest.
MAX_MESSAGE_ELEMENTS = 2**20  # If all messages have at most this many elements, making a plan does not pay.
MASK_COST_IN_PAIRS = 2**15  # Building a mask from a list costs as much as a dense kernel for this many pairs.
MAX_DENSE_PAIRS = 2**12  # Up to this many pairs, a dense call and its mask beat message passing.
PLAIN, WITH_LSE, WRITTEN_OUT = "plain", "with lse or sinks", "with score_mod, bias or dropout"
FORWARD_MODE = "in forward mode"
SLOWDOWN_FACTORS = {
    # Forward mode takes 20 times as long as a plain call with dense, and 4 times with the others.
    "dense": {WITH_LSE: 4.0, WRITTEN_OUT: 10.0, FORWARD_MODE: 5.0},
    "tiles": {WRITTEN_OUT: 3.5},
    "rows": {WRITTEN_OUT: 1.7},
}
SIZE_REASON = "by the number of its edges alone: a list is read in every call, a TokenGraph is planned once"
FIRST_CALL_REASON = (
    "by the number of its edges alone, since it may be used only once; "
    "from the third call on, or after graph.prepare()"
)
UNSUPPORTED_REASON = "the others do not support it"
STRENGTHS = {
    "dense": "most pairs are edges",
    "tiles": "its edges lie in few, well filled tiles",
    "rows": "its edges are few and far between",
    "mixed": "some of its tiles are well filled, the other edges are few",
    "message_passing": "it has so few messages that planning its edges would take longer",
}

TILE_SIZE = 128  # FlexAttention's kernels for CUDA have tiles of 128 x 128 pairs.
# FlexAttention is faster than rows if at least this fraction of the pairs in its tiles are edges.
# `python -m benchmarks.gpu_run` measures it (workloads "fill").
MIN_FILL = 1 / 8
# These errors are due to the call or to memory, and say nothing about a kernel.
CALL_ERRORS = (ValueError, TypeError, IndexError, NotImplementedError, torch.OutOfMemoryError)
Result = tuple[Tensor, Tensor | None]
Refusals = list[tuple[str, str]]  # Each refusal names a backend and the reason against it.


@dataclass(frozen=True)
class Explanation:
    """The backend that "auto" chooses for a graph, and why; printing it shows a table.

    ``rules`` lists each backend with the cost of its forward pass; for CUDA it lists the backends
    in the order in which they are tried, each with the reason for or against it. ``estimated`` is
    True if edges and tiles were counted in a sample of the rows. ``obstacle`` says why the graph's
    rule is evaluated pair by pair, not on ranges of tokens.
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
    """Explain which backend ``backend="auto"`` chooses for ``heads`` heads of width ``dim``.

    ``device`` is None or "cpu" for this machine's CPU, or "cuda" for any GPU, present or not. The
    default ``dtype`` is float32 on a CPU and bfloat16 on a GPU. Costs are for one sample, or for
    ``graph.batch`` samples if the graph varies by sample. For "cuda", backends are listed in the
    order in which they are tried, without costs. Raises ValueError for another device, and
    TypeError if ``graph`` or ``dtype`` has the wrong type.

    >>> from gnn_attention import patterns
    >>> [explain(patterns.window(n, 64), heads=8, dim=64).choice for n in (128, 512)]
    ['dense', 'tiles']
    >>> explain(patterns.causal(4096), heads=8, dim=64, device="cuda").choice
    'dense'
    """
    heads, dim = checks.size("heads", heads, 1), checks.size("dim", dim, 1)
    checks.instance("graph", graph, TokenGraph)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {quote(dtype)}")
    device_type = str(device or "cpu").partition(":")[0]
    if device_type == "cuda":
        with FakeTensorMode():
            call = _make_empty_call(graph, heads, dim, "cuda", dtype or torch.bfloat16)
            final = _explain_on_cuda(call, ON_CUDA)
            if not is_first_call(call):
                return final
            by_size = _explain_on_cuda(call, _candidates_by_size(call))
            return replace(by_size, reason=f"{FIRST_CALL_REASON}, {final.choice}: {final.reason}")
    if device_type != "cpu":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {quote(device)}")
    call = _make_empty_call(graph, heads, dim, "meta", dtype)
    final_choice = _choose_supported(_rank_candidates(call), call).name
    if has_few_pairs(graph):
        reason = "one dense call is fastest for few pairs" if final_choice == "dense" else UNSUPPORTED_REASON
    elif final_choice == "dense" and dense.bytes_needed(call) == 0:
        reason = "one SDPA call without a mask"
    else:
        reason = f"{STRENGTHS.get(final_choice, UNSUPPORTED_REASON)}; the least estimated time"
    if is_first_call(call):
        reason = f"{FIRST_CALL_REASON}, {final_choice}: {reason}"
    rules = []
    for name, backend in BACKENDS.items():
        seconds = _estimate_seconds(graph, name, (graph.batch or 1) * heads, dim)
        num_bytes = backend.bytes_needed(call) if backend.bytes_needed else 0
        extra = f"{num_bytes / 2**20:.1f} MiB more memory"
        rules.append((name, extra if seconds is None else f"about {seconds * 1e3:.3f} ms, {extra}"))
    estimated = is_estimated(select_slice(graph, 0, 0))
    return Explanation(repr(graph), choose(call).name, reason, tuple(rules), estimated, graph.edges.obstacle)


def explain_by_size(graph: TokenGraph, heads: int, dim: int) -> Explanation:
    """Explain the backend for edges that are used once, such as the ``edge_index`` passed to a layer."""
    choice = choose_by_size(_make_empty_call(graph, heads, dim, "meta", None))
    return Explanation(repr(graph), choice.name, SIZE_REASON)


def choose(call: AttentionCall) -> Backend:
    """Choose the backend for a call; raise NotImplementedError if none supports it."""
    return choose_by_size(call) if is_first_call(call) else _choose_supported(_rank_candidates(call), call)


def run_or_replace(
    run: Callable[[Backend, AttentionCall], Result], backend: Backend, call: AttentionCall
) -> Result:
    """Return ``run(backend, call)``; if the backend's kernel fails, run another backend instead.

    One warning names the backend, the device and the error. Later calls of the same kind do not try
    the failed backend again.
    """
    if devices.is_compiling_or_capturing(call.q):
        return run(backend, call)
    failed_before = failures.reason(backend.name, call)
    try:
        return run(backend, call)
    except Exception as error:  # Every compiler and driver has its own types of errors.
        if isinstance(error, CALL_ERRORS) and not isinstance(error, CompilationError):
            raise
        failures.record(backend.name, call, error)
        replacement = choose(call)
        if failed_before is not None and replacement is backend:
            raise
    if call.backend_names is not None:
        call.backend_names.pop("auto", None)
    if failed_before is None:
        warnings.warn(
            f"backend {backend.name!r} failed on {call.q.device} in {call.q.dtype} "
            f"({failures.reason(backend.name, call)}); backend='auto' takes {replacement.name!r} "
            "for such calls from now on",
            RuntimeWarning,
            stacklevel=4,
        )
    return run_or_replace(run, replacement, call)


class Candidate(NamedTuple):
    """A backend that ``auto`` may choose, its strength, and a function that returns a reason against it."""

    backend: str
    strength: str
    reject: Callable[[AttentionCall], str | None] | None = None


def _reject_decoding(call: AttentionCall) -> str | None:
    if rows.is_decoding_step(call) and not call.graph.is_full():
        return None
    return "it is not a decoding step: one receiver of some of the senders, without gradients"


def _reject_chosen_rows(call: AttentionCall) -> str | None:
    # Reading senders that were chosen on a device would make the host wait for the device.
    if call.graph.edges.has_structure:
        return None
    return "its senders were chosen row by row, so its structure is not examined"


def _reject_sdpa(call: AttentionCall) -> str | None:
    if has_few_pairs(call.graph):
        return None
    reason = _reject_chosen_rows(call)
    num_bytes = dense.bytes_needed(call) if reason is None else 0
    return f"it would write {num_bytes / 2**30:.2g} GiB for all pairs" if num_bytes else reason


def _reject_tiles(call: AttentionCall) -> str | None:
    reason = _reject_chosen_rows(call)
    if reason is not None:
        return reason
    graph = select_slice(call.graph, 0, 0)
    fraction = memoized(fill, graph, TILE_SIZE)
    if fraction >= MIN_FILL:
        return None
    ratio = f"{'about ' if is_estimated(graph) else ''}{fraction:.2%}"
    return f"{ratio} of the pairs in its tiles of {TILE_SIZE} are edges, fewer than {MIN_FILL:.1%}"


def _reject_dense(call: AttentionCall) -> str | None:
    gib = dense.bytes_needed(call) / 2**30
    limit = dense.AUTO_MAX_BYTES / 2**30
    if gib <= limit:
        return None
    return f"it would need {gib:.1f} GiB of mask and logits, more than {limit:.0f} GiB"


ON_CUDA = (
    Candidate("rows", "one receiver is a decoding step", _reject_decoding),
    Candidate("dense", "few pairs, or one SDPA call without a mask", _reject_sdpa),
    Candidate("varlen", "packed documents, or one window for all", _reject_chosen_rows),
    Candidate("flex", f"its tiles of {TILE_SIZE} are well filled", _reject_tiles),
    Candidate("rows", "edge by edge"),
    Candidate("dense", "the logits of all pairs fit into memory", _reject_dense),
    Candidate("reference", "edge by edge, in chunks"),
)
ON_CPU = {
    name: Candidate(name, STRENGTHS.get(name, ""), _reject_dense if name == "dense" else None)
    for name in ("dense", "tiles", "rows", "mixed", "message_passing", "reference")
}


def _rank_candidates(call: AttentionCall) -> tuple[Candidate, ...]:
    if call.q.device.type == "cuda":
        return ON_CUDA
    if has_few_pairs(call.graph):
        return ON_CPU["dense"], ON_CPU["rows"], ON_CPU["reference"]
    kind = WITH_LSE if call.with_lse or call.sink_logits is not None else PLAIN
    kind = FORWARD_MODE if has_forward_derivative((call.q, call.k, call.v)) else kind
    kind = kind if call.is_plain else WRITTEN_OUT
    names = memoized(_rank_backends, call.graph, call.q.shape[1], call.q.shape[3], kind)
    num_pairs = (_count_work(call.graph, names[0]) or Work()).pairs
    num_edges = (_count_work(call.graph, "rows") or Work()).edges
    if _has_few_messages(call, num_edges, num_pairs or MAX_MESSAGE_ELEMENTS):
        names = ("message_passing", *names)
    return tuple(ON_CPU[name] for name in names)


def has_few_pairs(graph: TokenGraph) -> bool:
    return graph.num_dst * graph.num_src <= MAX_SMALL_GRAPH_PAIRS


def _has_few_messages(call: AttentionCall, num_edges: int, num_pairs: int, extra_pairs: int = 0) -> bool:
    """True if the messages have few elements, at most one for each pair another kernel visits."""
    batch, heads, _, dim = call.q.shape
    num_elements = batch * heads * num_edges * max(dim, call.v.shape[3])
    return num_elements <= min(MAX_MESSAGE_ELEMENTS, batch * heads * num_pairs + extra_pairs)


def choose_by_size(call: AttentionCall) -> Backend:
    """Choose the backend for a list of edges that is used once, by the size of the call alone."""
    return _choose_supported(_candidates_by_size(call), call)


def is_first_call(call: AttentionCall) -> bool:
    """True if ``auto`` chooses by the numbers of tokens, edges, heads and channels alone.

    A new list of edges may be used only once, and counting its tiles would take longer than the
    call. A compiled program runs many times, so none of its calls counts as the first.
    """
    if torch.compiler.is_compiling() or call.graph.is_prepared or has_few_pairs(call.graph):
        return False
    # Tiles are never counted for senders that were chosen row by row.
    return call.graph.edges.has_structure


def _candidates_by_size(call: AttentionCall) -> tuple[Candidate, ...]:
    if call.q.device.type == "cuda":
        return tuple(candidate for candidate in ON_CUDA if candidate.backend not in ("varlen", "flex"))
    batch, heads, num_dst, dim = call.q.shape
    num_pairs = num_dst * call.graph.num_src
    if num_pairs <= MAX_DENSE_PAIRS:
        names: tuple[str, ...] = ("dense", "rows", "reference")
    elif _has_few_messages(call, call.graph.num_edges, num_pairs, MASK_COST_IN_PAIRS):
        names = ("message_passing", "rows", "reference")
    else:
        costs = cost_model.costs()
        dense_seconds = costs.seconds(Work(masked_pairs=num_pairs), batch * heads, dim)
        edge_work = Work(calls=4, edges=call.graph.num_edges, nodes=num_dst)
        is_dense_faster = dense_seconds < costs.seconds(edge_work, batch * heads, dim)
        names = ("dense", "rows", "reference") if is_dense_faster else ("rows", "reference")
    return tuple(ON_CPU[name] for name in names)


def _choose_supported(candidates: Iterable[Candidate], call: AttentionCall) -> Backend:
    return BACKENDS[_try_candidates(candidates, call)[0].backend]


def _try_candidates(candidates: Iterable[Candidate], call: AttentionCall) -> tuple[Candidate, Refusals]:
    """Return the first candidate that supports the call, and the reasons against all earlier ones."""
    refusals: Refusals = []
    for candidate in candidates:
        backend = BACKENDS[candidate.backend]
        if call.graph.has_parallel_edges and backend.capabilities.parallel_edges != "kept":
            refusals.append((backend.name, "it keeps no parallel edges"))
            continue
        reason = None if candidate.reject is None else candidate.reject(call)
        reason = reason or backend.unsupported_reason(call)
        # If its Triton kernel failed, rows still runs with torch operators.
        if reason is None and backend.name != "rows":
            reason = failures.reason(backend.name, call)
        if reason is None:
            return candidate, refusals
        refusals.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise NotImplementedError(f"no backend supports {call.graph!r} with {call.q.shape[1]} heads: {reasons}")


def _make_empty_call(
    graph: TokenGraph, heads: int, dim: int, device: str, dtype: torch.dtype | None
) -> AttentionCall:
    """Return a plain call on the graph, whose tensors have no values."""
    q = torch.empty(graph.batch or 1, heads, graph.num_dst, dim, device=device, dtype=dtype)
    k = torch.empty(graph.batch or 1, heads, graph.num_src, dim, device=device, dtype=dtype)
    return AttentionCall.from_arguments(q, k, k, graph)


def _explain_on_cuda(call: AttentionCall, candidates: Iterable[Candidate]) -> Explanation:
    candidate, refusals = _try_candidates(candidates, call)
    strength = candidate.strength
    if candidate.backend == "rows" and not rows.is_decoding_step(call):
        reason = row_attention.unsupported_reason(call)
        strength += "; in the Triton kernel" if reason is None else f"; by torch operators, {reason}"
    rules = (*refusals, (candidate.backend, "taken"))
    return Explanation(repr(call.graph), candidate.backend, strength, rules=rules)


def _rank_backends(graph: TokenGraph, heads: int, dim: int, kind: str) -> tuple[str, ...]:
    """Rank the backends by estimated time; ties go to the simpler backend."""
    if not graph.edges.has_structure:
        # If senders are chosen in every step, counting their tiles does not pay.
        costs = cost_model.costs()
        dense_seconds = costs.seconds(Work(masked_pairs=graph.num_dst * graph.num_src), heads, dim)
        is_dense_faster = dense_seconds < costs.seconds(rows_work(graph), heads, dim)
        fastest = ("dense", "rows") if is_dense_faster else ("rows", "dense")
        return (*fastest, "tiles", "reference")
    names = ("dense", "tiles", "rows") if kind == WRITTEN_OUT else ("dense", "tiles", "rows", "mixed")
    factors = {name: SLOWDOWN_FACTORS.get(name, {}).get(kind, 1.0) for name in names}
    times = {name: (_estimate_seconds(graph, name, heads, dim) or 0.0) * factors[name] for name in names}
    return (*sorted(names, key=lambda name: times[name]), "reference")


def _count_work(graph: TokenGraph, name: str) -> Work | None:
    if name == "dense":
        return dense_work(graph)
    # If the graph varies by sample or head, the first slice represents all of them.
    return memoized(WORK[name], select_slice(graph, 0, 0)) if name in WORK else None


def _estimate_seconds(graph: TokenGraph, name: str, heads: int, dim: int) -> float | None:
    work = _count_work(graph, name)
    return None if work is None else cost_model.costs().seconds(work, heads, dim)
