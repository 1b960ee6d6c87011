"""Which backend ``backend="auto"`` takes, and why: the least estimated time of those that support the call.

A small graph goes to one dense call at once. For others what each backend would visit (pairs, cells of tiles,
edges, nodes) is counted once, without building anything, and weighed with the constants of
:mod:`gnn_attention.backends.cost_model`; on CUDA with those of ``gpu.roofline``, by bytes and products,
where kernels of our own count as longer as long as no record verified them on the device. On a CPU ``flex``,
which compiles before it runs, is taken only by name.
"""

from dataclasses import dataclass

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention.backends import BACKENDS, Backend, dense, first_use, nonfinite
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.cost_model import Work, costs
from gnn_attention.backends.gpu import devices
from gnn_attention.backends.gpu.devices import Device
from gnn_attention.backends.gpu.roofline import FORMS, HALF, Sizes, assigned, estimates, form_of, weighed
from gnn_attention.backends.gpu.workload import counted
from gnn_attention.backends.plan import planner
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.neighbours import neighbours_of

SMALL = 128 * 128  # pairs up to which one dense call is fastest
PLAIN, WITH_LSE, WRITTEN_OUT = "plain", "with lse or sinks", "with score_mod, bias or dropout"
# share of the time of the next best below which a split, whose parts take time to find, pays
WORTH_A_SPLIT = 0.9
SLOWER = {
    "dense": {PLAIN: 1.0, WITH_LSE: 4.0, WRITTEN_OUT: 4.0},
    "tiles": {WRITTEN_OUT: 2.5},
    "rows": {WRITTEN_OUT: 2.0},
}
FEW_PAIRS = "so few pairs are quickest in one dense call"
UNSUPPORTED = "the others do not support it"
VISITED = {
    "dense": "most pairs are edges",
    "tiles": "its edges lie in few, well filled tiles",
    "rows": "its edges are few and far between",
    "mixed": "some of its tiles are well filled, the other edges are few",
}

ON_DEVICE = {
    "dense": "one SDPA call",
    "varlen": "packed documents, or one window",
    "flex": "FlexAttention on its tiles of 128",
}


@dataclass(frozen=True)
class Explanation:
    """Which backend "auto" takes for a graph, and what each would cost in the forward pass; print it.

    ``rows``: for each backend its name, floating point operations, extra bytes, estimated seconds or None.
    """

    graph: str
    choice: str
    reason: str
    rows: tuple[tuple[str, int, int, float | None], ...]

    def __str__(self) -> str:
        wide = max(12, *(len(name) + 2 for name, *_ in self.rows))
        head = f"{'backend':<{wide}}{'GFLOP':>12}{'extra MB':>12}{'estimated ms':>16}"
        lines = [f"{self.graph}", f"auto takes {self.choice}: {self.reason}", head]
        for name, flops, extra, seconds in self.rows:
            time = "-" if seconds is None else f"{seconds * 1e3:.3f}"
            lines.append(f"{name:<{wide}}{flops / 1e9:>12.3f}{extra / 2**20:>12.1f}{time:>16}")
        return "\n".join(lines)


@dataclass(frozen=True)
class DeviceExplanation(Explanation):
    """The same for a GPU, at hand or not, with a row for each form of "triton" and the bytes that move.

    ``shares``: for each row the expected share of the device's own bound for this work, and what limits it.
    Everything is predicted; ``measured`` is when the constants were measured on the device ("": not yet),
    ``trust`` what verified our kernels there, and what "auto" does until something did.
    """

    device: str = ""
    measured: str = ""
    shares: tuple[tuple[float, str], ...] = ()
    trust: str = ""

    def __str__(self) -> str:
        trust = "not measured: `python -m benchmarks.gpu --calibrate` does"
        trust = f"constants measured {self.measured}" if self.measured else trust
        titles = f"{'GFLOP':>12}{'moved MB':>12}{'predicted ms':>14}{'of the bound':>14}"
        lines = [
            f"{self.graph}",
            f"auto takes {self.choice}: {self.reason}",
            f"predicted for {self.device} ({trust})",
            f"kernels of our own: {self.trust}",
            f"{'backend':<16}{titles}  limited by",
        ]
        for (name, flops, moved, seconds), (share, limit) in zip(self.rows, self.shares, strict=True):
            time = f"{(seconds or 0.0) * 1e3:>14.3f}{100 * share:>12.0f} %"
            lines.append(f"{name:<16}{flops / 1e9:>12.3f}{moved / 2**20:>12.1f}{time}  {limit}")
        return "\n".join(lines)


def explain(
    graph: TokenGraph,
    heads: int,
    dim: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Which backend ``backend="auto"`` takes for ``heads`` heads of width ``dim``, and why.

    ``device``: None or "cpu" for this machine's CPU (``dtype`` float32 unless given); "cuda" for its GPU, or
    the name of one ("H200", "H100", "A100"), which need not be there: the table is a prediction (``dtype``
    bfloat16 unless given). The costs are those of one sample, of ``graph.batch`` samples for a graph that
    differs by them. ValueError for an unknown device, TypeError for no graph or dtype.

    >>> from gnn_attention import patterns
    >>> [explain(patterns.window(n, 64), heads=8, dim=64).choice for n in (128, 512)]
    ['dense', 'tiles']
    >>> explain(patterns.causal(4096), heads=8, dim=64, device="H200").choice
    'dense'
    """
    heads, dim = checks.size("heads", heads, 1), checks.size("dim", dim, 1)
    checks.instance("graph", graph, TokenGraph)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating point dtype of torch, got {quoted(dtype)}")
    found = _device(device)
    if found is not None:
        return _explain_on(found, graph, heads, dim, dtype or torch.bfloat16)
    q = torch.empty(graph.batch or 1, heads, graph.num_dst, dim, device="meta", dtype=dtype)
    k = torch.empty(graph.batch or 1, heads, graph.num_src, dim, device="meta", dtype=dtype)
    call = AttentionCall.checked(q, k, k, graph)
    choice, slices = choose(call), (graph.batch or 1) * heads
    rows = []
    for name, backend in BACKENDS.items():
        extra = backend.bytes_needed(call) if backend.bytes_needed else 0
        rows.append((name, slices * dim * _flops(graph, name), extra, _seconds(graph, name, slices, dim)))
    return Explanation(repr(graph), choice.name, _reason(choice.name, call), tuple(rows))


def choose(call: AttentionCall) -> Backend:
    """The backend for a call; NotImplementedError if none supports it."""
    refusals = []
    for name in _by_time(call):
        reason = _too_large(call) if name == "dense" else BACKENDS[name].unsupported_reason(call)
        if reason is None and name in first_use.TRIED and call.q.device.type in nonfinite.ASYNCHRONOUS:
            reason = first_use.failure(first_use.configuration(name, call))
        if reason is None:
            return BACKENDS[name]
        refusals.append(f"{name}: {reason}")
    what = f"{call.graph!r} with {call.q.shape[1]} heads"
    raise NotImplementedError(f"no backend holds {what}: {'; '.join(refusals)}")


def _by_time(call: AttentionCall) -> tuple[str, ...]:
    graph = call.graph
    if call.q.device.type == "cuda":
        sizes = Sizes(call.q.shape[1], call.q.shape[3], call.v.shape[3], call.q.dtype)
        return memoized(_ordered_on_device, graph, sizes, _kind(call), call.q.device)
    if graph.num_dst * graph.num_src <= SMALL:
        return ("dense", "rows", "reference")
    return memoized(_ordered, graph, call.q.shape[1], call.q.shape[3], _kind(call))


def _ordered(graph: TokenGraph, heads: int, dim: int, kind: str) -> tuple[str, ...]:
    # the fastest first, by estimate; of equals the simpler one
    if neighbours_of(graph.rule) is not None:
        # what is chosen anew in every step is not counted tile by tile
        works = Work(masked_pairs=graph.num_dst * graph.num_src), planner.rows_work(graph)
        dense, rows = (costs().seconds(work, heads, dim) for work in works)
        first = ("dense", "rows") if dense < rows else ("rows", "dense")
        return (*first, "tiles", "reference")
    names = ("dense", "tiles", "rows") if kind == WRITTEN_OUT else ("dense", "tiles", "rows", "mixed")
    factors = {name: SLOWER.get(name, {}).get(kind, 1.0) for name in names}
    times = {name: (_seconds(graph, name, heads, dim) or 0.0) * factors[name] for name in names}
    return (*sorted(names, key=lambda name: times[name]), "reference")


def _kind(call: AttentionCall) -> str:
    if not call.is_plain:
        return WRITTEN_OUT
    return WITH_LSE if call.with_lse or call.sink_logits is not None else PLAIN


def _too_large(call: AttentionCall) -> str | None:
    needed = dense.bytes_needed(call)
    if needed <= dense.COMFORTABLE:
        return dense.unsupported_reason(call)
    limit = f"more than {dense.COMFORTABLE / 2**30:.0f}"
    return f"it would need {needed / 2**30:.1f} GiB of mask and logits, {limit}"


def _device(device: torch.device | str | None) -> Device | None:
    name = str(device or "cpu")
    if name.startswith("cpu"):
        return None
    if name.startswith("cuda"):
        return devices.device_of(torch.device(name)) if torch.cuda.is_available() else devices.GENERIC
    found = devices.named(name)
    if found.name == name and not found.measured and name not in devices.PRESETS:
        known = ", ".join(["cpu", "cuda", *devices.PRESETS])
        raise ValueError(f"device must be one of {known}, or one that was measured here, got {quoted(name)}")
    return found


def _ordered_on_device(graph: TokenGraph, sizes: Sizes, kind: str, device: torch.device) -> tuple[str, ...]:
    # those of a CPU, which run there too, come last
    if graph.num_dst * graph.num_src <= SMALL:
        return ("dense", "triton", "rows", "reference")
    constants = devices.device_of(device)
    sparse = form_of(one_of(graph, 0, 0), sizes, constants).name == "rows"
    others = ("rows", "mixed", "tiles") if sparse else ("tiles", "mixed", "rows")
    found = _fastest_first(constants, graph, sizes, kind)
    return (*found, *(name for name in others if not (name == "mixed" and kind == WRITTEN_OUT)), "reference")


def _fastest_first(device: Device, graph: TokenGraph, sizes: Sizes, kind: str) -> list[str]:
    plain = one_of(graph, 0, 0)
    found = estimates(plain, sizes, device)
    modified, whole = kind == WRITTEN_OUT, counted(plain).whole and sizes.dtype in HALF
    times = weighed(found, device, modified or (kind == WITH_LSE and not whole), modified)
    pieces = assigned(plain, sizes, device)
    ours = [piece.seconds for kernel, piece in pieces if kernel == "triton"]
    # the estimates of the other kernels are those of plain calls
    if pieces and (not modified or len(ours) == len(pieces)):
        split = found["split"].seconds + (device.doubt - 1.0) * sum(ours)
        times |= {"split": split} if split < WORTH_A_SPLIT * min(times.values()) else {}
    return sorted(times, key=lambda name: times[name])


def _explain_on(
    device: Device, graph: TokenGraph, heads: int, dim: int, dtype: torch.dtype
) -> DeviceExplanation:
    sizes, plain = Sizes((graph.batch or 1) * heads, dim, dim, dtype), one_of(graph, 0, 0)
    found, small = estimates(plain, sizes, device), graph.num_dst * graph.num_src <= SMALL
    choice = "dense" if small else _fastest_first(device, graph, sizes, PLAIN)[0]
    found = {name: estimate for name, estimate in found.items() if name not in ("written out", "modified")}
    rows = [(f"triton {name}" if name in FORMS else name, estimate) for name, estimate in found.items()]
    return DeviceExplanation(
        *(repr(graph), choice, _reason_on(choice, small, plain, sizes, device)),
        rows=tuple((name, round(e.flops), round(e.misses), e.seconds) for name, e in rows),
        device=f"{device.name}, {str(dtype).removeprefix('torch.')}",
        measured=device.measured,
        shares=tuple((estimate.share, estimate.limit) for _, estimate in rows),
        trust=_trust(device),
    )


def _trust(device: Device) -> str:
    if device.verified:
        return f"verified by tests/records/{device.verified}, counted {device.doubt:g} times as long"
    return (
        f"not verified on this class of device: those of torch are taken up to {device.doubt:g} times their "
        f"predicted time; the first use of a configuration compares {first_use.RECEIVERS} receivers with the "
        "formula; one that cannot be launched, or is wrong, is replaced, with a warning"
    )


def _reason_on(choice: str, small: bool, graph: TokenGraph, sizes: Sizes, device: Device) -> str:
    if choice == "triton":
        form = form_of(graph, sizes, device)
        return f"its form {form.name}; {form.reason}"
    if choice == "dense" and small:
        return FEW_PAIRS
    kernels = ", ".join(kernel for kernel, _ in assigned(graph, sizes, device))
    doubt = f", kernels of our own counted {device.doubt:g} times as long"
    taken = ON_DEVICE.get(choice, f"its parts by {kernels}, joined by log-sum-exp")
    return f"{taken}; the least predicted time{doubt if device.doubt > 1 else ''}"


def _work(graph: TokenGraph, name: str) -> Work | None:
    if name == "dense":
        return planner.dense_work(graph)
    # of a graph that differs by head or sample, its first stands for all
    return memoized(planner.WORK[name], one_of(graph, 0, 0)) if name in planner.WORK else None


def _seconds(graph: TokenGraph, name: str, heads: int, dim: int) -> float | None:
    work = _work(graph, name)
    return None if work is None else costs().seconds(work, heads, dim)


def _flops(graph: TokenGraph, name: str) -> int:
    """Multiplications and additions for a channel of a head, of logits and weighted sums."""
    work = _work(graph, name)
    if work is None:
        return 4 * one_of(graph, 0, 0).num_edges
    return 4 * (work.cells + work.edges + work.masked_pairs + work.plain_pairs)


def _reason(choice: str, call: AttentionCall) -> str:
    graph = call.graph
    if graph.num_dst * graph.num_src <= SMALL:
        return FEW_PAIRS if choice == "dense" else UNSUPPORTED
    if choice == "dense" and dense.bytes_needed(call) == 0:
        return "one SDPA call without a mask"
    return f"{VISITED.get(choice, UNSUPPORTED)}; the least estimated time"
