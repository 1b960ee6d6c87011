"""Which backend ``backend="auto"`` takes: the one with the least estimated time among those that hold the call, and why.

A small graph goes to one dense call at once. For others what each backend would visit (pairs, cells of tiles, edges, nodes) is
counted without building anything, and weighed with the constants of :mod:`gnn_attention.cost_model`; once a graph. ``flex``,
which compiles before it runs, is taken only when it is asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnn_attention import _checks, _lowering
from gnn_attention._call import Call, one_of
from gnn_attention.backends import BACKENDS, Backend, dense
from gnn_attention.cost_model import Work, costs
from gnn_attention.graph import TokenGraph, kept

__all__ = ["Explanation", "choose", "explain"]

SMALL = 128 * 128  # pairs up to which nobody beats one dense call
PLAIN, WITH_LSE, WRITTEN_OUT = "plain", "with lse or sinks", "with score_mod, bias or dropout"
SLOWER = {"dense": {PLAIN: 1.0, WITH_LSE: 4.0, WRITTEN_OUT: 4.0}, "tiles": {WRITTEN_OUT: 2.5}, "rows": {WRITTEN_OUT: 2.0}}


@dataclass(frozen=True)
class Explanation:
    """Which backend "auto" takes for a graph, and what each would cost in the forward pass; print it.

    ``rows`` holds for each backend its name, floating point operations, extra bytes, and estimated seconds (None: no estimate).
    """

    graph: str
    choice: str
    reason: str
    rows: tuple[tuple[str, int, int, float | None], ...]

    def __str__(self) -> str:
        """A small table."""
        head = f"{'backend':<12}{'GFLOP':>12}{'extra MB':>12}{'estimated ms':>16}"
        lines = [f"{self.graph}", f"auto takes {self.choice}: {self.reason}", head]
        for name, flops, extra, seconds in self.rows:
            time = "-" if seconds is None else f"{seconds * 1e3:.3f}"
            lines.append(f"{name:<12}{flops / 1e9:>12.3f}{extra / 2**20:>12.1f}{time:>16}")
        return "\n".join(lines)


def explain(graph: TokenGraph, heads: int, dim: int) -> Explanation:
    """Which backend ``backend="auto"`` takes for ``heads`` heads of width ``dim`` in float32, and why.

    The costs are those of one sample, of ``graph.batch`` samples for a graph that differs by them.

    >>> from gnn_attention import patterns
    >>> explain(patterns.window(512, 64), heads=8, dim=64).choice, explain(patterns.window(64, 16), heads=8, dim=64).choice
    ('tiles', 'dense')
    """
    heads, dim = _checks.size("heads", heads, 1), _checks.size("dim", dim, 1)
    q = torch.empty(graph.batch or 1, heads, graph.num_dst, dim, device="meta")
    k = torch.empty(graph.batch or 1, heads, graph.num_src, dim, device="meta")
    call = Call.checked(q, k, k, graph)
    choice, slices = choose(call), (graph.batch or 1) * heads
    rows = tuple(
        (name, _flops(graph, name, slices, dim), _extra(backend, call), _seconds(graph, name, slices, dim))
        for name, backend in BACKENDS.items()
    )
    return Explanation(repr(graph), choice.name, _reason(choice.name, call), rows)


def choose(call: Call) -> Backend:
    """The backend for a call; NotImplementedError if none holds it."""
    refusals = []
    for name in _by_time(call):
        reason = _too_large(call) if name == "dense" else BACKENDS[name].refusal(call)
        if reason is None:
            return BACKENDS[name]
        refusals.append(f"{name}: {reason}")
    raise NotImplementedError(f"no backend holds {call.graph!r} with {call.q.shape[1]} heads: {'; '.join(refusals)}")


def _by_time(call: Call) -> tuple[str, ...]:
    graph = call.graph
    if graph.num_dst * graph.num_src <= SMALL:
        return ("dense", "rows", "reference")
    order: tuple[str, ...] = kept(_ordered, graph, call.q.shape[1], call.q.shape[3], _kind(call))
    return order


def _ordered(graph: TokenGraph, heads: int, dim: int, kind: str) -> tuple[str, ...]:
    """The backends from the fastest on, by estimate; of equals the simpler one."""
    names = [name for name in ("dense", "tiles", "rows", "mixed") if not (name == "mixed" and kind == WRITTEN_OUT)]
    times = {name: (_seconds(graph, name, heads, dim) or 0.0) * SLOWER.get(name, {}).get(kind, 1.0) for name in names}
    return (*sorted(names, key=lambda name: times[name]), "reference")


def _kind(call: Call) -> str:
    if not call.is_plain:
        return WRITTEN_OUT
    return WITH_LSE if call.with_lse or call.sink_logits is not None else PLAIN


def _too_large(call: Call) -> str | None:
    needed = dense.bytes_needed(call)
    if needed <= dense.COMFORTABLE:
        return None
    return f"it would need {needed / 2**30:.1f} GiB of mask and logits, more than {dense.COMFORTABLE / 2**30:.0f}"


# -- estimates --------------------------------------------------------------------------------------------------------


def _work(graph: TokenGraph, name: str) -> Work | None:
    """What one head visits; of a graph that differs by head or sample, its first stands for all but the mask."""
    if name == "dense":
        return _dense_work(graph)
    graph = one_of(graph, 0, 0)
    lower = _lowering.WORK.get(name)
    work: Work | None = None if lower is None else kept(lower, graph)
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


def _extra(backend: Backend, call: Call) -> int:
    return backend.bytes_needed(call) if backend.bytes_needed else 0


def _reason(choice: str, call: Call) -> str:
    graph = call.graph
    if graph.num_dst * graph.num_src <= SMALL:
        return "so few pairs are quickest in one dense call" if choice == "dense" else "the others do not hold it"
    if choice == "dense" and dense.bytes_needed(call) == 0:
        return "one SDPA call without a mask"
    visited = {
        "dense": "most pairs are edges",
        "tiles": "its edges lie in few, well filled tiles",
        "rows": "its edges are few and far between",
        "mixed": "some of its tiles are well filled, the other edges are few",
    }
    return f"{visited.get(choice, 'the others do not hold it')}; the least estimated time"
