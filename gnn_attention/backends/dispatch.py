"""Which backend ``backend="auto"`` takes: the one with the least estimated time among those that hold the
call, and why.

A small graph goes to one dense call at once. For others what each backend would visit (pairs, cells of tiles,
edges, nodes) is counted without building anything, and weighed with the constants of
:mod:`gnn_attention.backends.cost_model`; once a graph. On CUDA the weights are those of ``gpu.roofline``, by
bytes and products. ``flex``, which compiles before it runs, is taken only when it is asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention.backends import BACKENDS, Backend, dense
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.cost_model import Work, costs
from gnn_attention.backends.gpu import devices
from gnn_attention.backends.gpu.devices import Device
from gnn_attention.backends.gpu.roofline import FORMS, Sizes, estimates, form_of
from gnn_attention.backends.gpu.workload import counted
from gnn_attention.backends.plan import planner
from gnn_attention.graph import TokenGraph, memoized

SMALL = 128 * 128  # pairs up to which nobody beats one dense call
PLAIN, WITH_LSE, WRITTEN_OUT = "plain", "with lse or sinks", "with score_mod, bias or dropout"
WORTH_A_SPLIT = (
    0.9  # of the time of the next best must a split take: its parts are worked out by going through the graph
)
UNMEASURED = 1.25  # times its estimate is a kernel of ours taken for until the constants were measured: at par torch's are taken
SLOWER = {
    "dense": {PLAIN: 1.0, WITH_LSE: 4.0, WRITTEN_OUT: 4.0},
    "tiles": {WRITTEN_OUT: 2.5},
    "rows": {WRITTEN_OUT: 2.0},
}


@dataclass(frozen=True)
class Explanation:
    """Which backend "auto" takes for a graph, and what each would cost in the forward pass; print it.

    ``rows`` holds for each backend its name, floating point operations, extra bytes, and estimated seconds
    (None: no estimate).
    """

    graph: str
    choice: str
    reason: str
    rows: tuple[tuple[str, int, int, float | None], ...]

    def __str__(self) -> str:
        """A small table."""
        wide = max(12, *(len(name) + 2 for name, *_ in self.rows))
        head = f"{'backend':<{wide}}{'GFLOP':>12}{'extra MB':>12}{'estimated ms':>16}"
        lines = [f"{self.graph}", f"auto takes {self.choice}: {self.reason}", head]
        for name, flops, extra, seconds in self.rows:
            time = "-" if seconds is None else f"{seconds * 1e3:.3f}"
            lines.append(f"{name:<{wide}}{flops / 1e9:>12.3f}{extra / 2**20:>12.1f}{time:>16}")
        return "\n".join(lines)


@dataclass(frozen=True)
class DeviceExplanation(Explanation):
    """The same for a GPU, at hand or not; the bytes of ``rows`` are those that move, its forms of "triton"
    stand apart.

    ``shares`` holds for each row which share of the device's own bound for this work is expected, and what
    limits it. Everything is predicted; ``measured`` says when the constants behind it were measured on the
    device ("": they were not).
    """

    device: str = ""
    measured: str = ""
    shares: tuple[tuple[float, str], ...] = ()

    def __str__(self) -> str:
        """A table, with how far it may be trusted."""
        trust = (
            f"constants measured {self.measured}"
            if self.measured
            else "not measured: `python -m benchmarks.gpu --calibrate` does"
        )
        head = f"{'backend':<16}{'GFLOP':>12}{'moved MB':>12}{'predicted ms':>14}{'of the bound':>14}  limited by"
        lines = [
            f"{self.graph}",
            f"auto takes {self.choice}: {self.reason}",
            f"predicted for {self.device} ({trust})",
            head,
        ]
        for (name, flops, moved, seconds), (share, limit) in zip(self.rows, self.shares, strict=True):
            figures = f"{flops / 1e9:>12.3f}{moved / 2**20:>12.1f}{(seconds or 0.0) * 1e3:>14.3f}{100 * share:>12.0f} %"
            lines.append(f"{name:<16}{figures}  {limit}")
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
    >>> explain(patterns.window(512, 64), heads=8, dim=64).choice, explain(patterns.window(64, 16), heads=8, dim=64).choice
    ('tiles', 'dense')
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
    rows = tuple(
        (name, _flops(graph, name, slices, dim), _extra(backend, call), _seconds(graph, name, slices, dim))
        for name, backend in BACKENDS.items()
    )
    return Explanation(repr(graph), choice.name, _reason(choice.name, call), rows)


def choose(call: AttentionCall) -> Backend:
    """The backend for a call; NotImplementedError if none holds it."""
    refusals = []
    for name in _by_time(call):
        reason = _too_large(call) if name == "dense" else BACKENDS[name].unsupported_reason(call)
        if reason is None:
            return BACKENDS[name]
        refusals.append(f"{name}: {reason}")
    raise NotImplementedError(
        f"no backend holds {call.graph!r} with {call.q.shape[1]} heads: {'; '.join(refusals)}"
    )


def _by_time(call: AttentionCall) -> tuple[str, ...]:
    graph = call.graph
    if call.q.device.type == "cuda":
        sizes = Sizes(call.q.shape[1], call.q.shape[3], call.v.shape[3], call.q.dtype)
        on_device: tuple[str, ...] = memoized(_ordered_on_device, graph, sizes, _kind(call), call.q.device)
        return on_device
    if graph.num_dst * graph.num_src <= SMALL:
        return ("dense", "rows", "reference")
    order: tuple[str, ...] = memoized(_ordered, graph, call.q.shape[1], call.q.shape[3], _kind(call))
    return order


def _ordered(graph: TokenGraph, heads: int, dim: int, kind: str) -> tuple[str, ...]:
    """The backends from the fastest on, by estimate; of equals the simpler one."""
    names = [
        name for name in ("dense", "tiles", "rows", "mixed") if not (name == "mixed" and kind == WRITTEN_OUT)
    ]
    times = {
        name: (_seconds(graph, name, heads, dim) or 0.0) * SLOWER.get(name, {}).get(kind, 1.0)
        for name in names
    }
    return (*sorted(names, key=lambda name: times[name]), "reference")


def _kind(call: AttentionCall) -> str:
    if not call.is_plain:
        return WRITTEN_OUT
    return WITH_LSE if call.with_lse or call.sink_logits is not None else PLAIN


def _too_large(call: AttentionCall) -> str | None:
    needed = dense.bytes_needed(call)
    if needed <= dense.COMFORTABLE:
        return dense.unsupported_reason(call)
    return f"it would need {needed / 2**30:.1f} GiB of mask and logits, more than {dense.COMFORTABLE / 2**30:.0f}"


def _device(device: torch.device | str | None) -> Device | None:
    """The constants that are meant; None for a CPU."""
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
    """The backends from the fastest on, by estimate; those of a CPU, which run there too, after them."""
    if graph.num_dst * graph.num_src <= SMALL:
        return ("dense", "triton", "rows", "reference")
    constants = devices.device_of(device)
    sparse = form_of(one_of(graph, 0, 0), sizes, constants).name == "rows"
    others = ("rows", "mixed", "tiles") if sparse else ("tiles", "mixed", "rows")
    found = _fastest_first(constants, graph, sizes, kind)
    return (*found, *(name for name in others if not (name == "mixed" and kind == WRITTEN_OUT)), "reference")


def _fastest_first(device: Device, graph: TokenGraph, sizes: Sizes, kind: str) -> list[str]:
    """The backends that auto may take on CUDA; ``flex`` is none of them."""
    plain = one_of(graph, 0, 0)
    found = estimates(plain, sizes, device)
    written_out = kind == WRITTEN_OUT or (kind == WITH_LSE and not counted(plain).whole)
    ours = 1.0 if device.measured else UNMEASURED
    times = {"dense": found["written out" if written_out else "dense"].seconds}
    if "varlen" in found and kind != WRITTEN_OUT:
        times["varlen"] = found["varlen"].seconds
    times["triton"] = ours * min(found[form].seconds for form in FORMS)
    if "split" in found and ours * found["split"].seconds < WORTH_A_SPLIT * min(times.values()):
        times["split"] = ours * found["split"].seconds
    return sorted(times, key=lambda name: times[name])


def _explain_on(
    device: Device, graph: TokenGraph, heads: int, dim: int, dtype: torch.dtype
) -> DeviceExplanation:
    """What auto would take there, were every backend at hand."""
    sizes, plain = Sizes((graph.batch or 1) * heads, dim, dim, dtype), one_of(graph, 0, 0)
    found, small = estimates(plain, sizes, device), graph.num_dst * graph.num_src <= SMALL
    choice = "dense" if small else _fastest_first(device, graph, sizes, PLAIN)[0]
    rows = [
        (f"triton {name}" if name in FORMS else name, estimate)
        for name, estimate in found.items()
        if name != "written out"
    ]
    return DeviceExplanation(
        *(repr(graph), choice, _reason_on(choice, small, plain, sizes, device)),
        rows=tuple((name, round(e.flops), round(e.misses), e.seconds) for name, e in rows),
        device=f"{device.name}, {str(dtype).removeprefix('torch.')}",
        measured=device.measured,
        shares=tuple((estimate.share, estimate.limit) for _, estimate in rows),
    )


def _reason_on(choice: str, small: bool, graph: TokenGraph, sizes: Sizes, device: Device) -> str:
    if choice == "triton":
        form = form_of(graph, sizes, device)
        return f"its form {form.name}; {form.reason}"
    if choice == "dense":
        return "so few pairs are quickest in one dense call" if small else f"one SDPA call; {_least(device)}"
    said = {
        "varlen": "packed documents, or one window",
        "split": "some of its tiles are well filled, the other edges are few",
    }
    return f"{said[choice]}; {_least(device)}"


def _least(device: Device) -> str:
    doubt = (
        ""
        if device.measured
        else f", kernels of our own counted {UNMEASURED:g} times while nobody has measured them there"
    )
    return f"the least predicted time{doubt}"


def _work(graph: TokenGraph, name: str) -> Work | None:
    """What one head visits; of a graph that differs by head or sample, its first stands for all but the
    mask.
    """
    if name == "dense":
        return _dense_work(graph)
    graph = one_of(graph, 0, 0)
    lower = planner.WORK.get(name)
    work: Work | None = None if lower is None else memoized(lower, graph)
    return work


def _dense_work(graph: TokenGraph) -> Work:
    pairs = graph.num_dst * graph.num_src
    if graph.is_full() or graph.is_causal():
        return Work(plain_pairs=pairs if graph.is_full() else pairs // 2)
    return Work(masked_pairs=pairs)


def _seconds(graph: TokenGraph, name: str, heads: int, dim: int) -> float | None:
    work = _work(graph, name)
    return None if work is None else costs().seconds(work, heads, dim)


def _flops(graph: TokenGraph, name: str, heads: int, dim: int) -> int:
    """Multiplications and additions of logits and weighted sums over all that is visited."""
    work = _work(graph, name)
    if work is None:
        return 4 * heads * dim * one_of(graph, 0, 0).num_edges
    return 4 * heads * dim * (work.cells + work.edges + work.masked_pairs + work.plain_pairs)


def _extra(backend: Backend, call: AttentionCall) -> int:
    return backend.bytes_needed(call) if backend.bytes_needed else 0


def _reason(choice: str, call: AttentionCall) -> str:
    graph = call.graph
    if graph.num_dst * graph.num_src <= SMALL:
        return (
            "so few pairs are quickest in one dense call"
            if choice == "dense"
            else "the others do not hold it"
        )
    if choice == "dense" and dense.bytes_needed(call) == 0:
        return "one SDPA call without a mask"
    visited = {
        "dense": "most pairs are edges",
        "tiles": "its edges lie in few, well filled tiles",
        "rows": "its edges are few and far between",
        "mixed": "some of its tiles are well filled, the other edges are few",
    }
    return f"{visited.get(choice, 'the others do not hold it')}; the least estimated time"
