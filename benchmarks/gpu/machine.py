"""The device that is measured: times of its work, peak memory, and its ceilings.

On CUDA time is taken by events on the stream. On a CPU the same path runs by the clock, for rehearsals: what it
gives there is no measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.process import peak_memory
from gnn_attention import TokenGraph

__all__ = ["Watch", "ceilings", "gather_rate", "peak_bytes"]

COPIED, SIDE = int(4.3e9), 8192  # bytes, and rows of a matrix
MOST_ROWS, EACH = 2**24, 64  # rows that are gathered, and added up together


class Watch:
    """Marks in the stream of a device, and the seconds between two of them."""

    def __init__(self, device: torch.device) -> None:
        """Of one device."""
        self.device, self.on_gpu = device, device.type == "cuda"

    def mark(self) -> Any:
        """A point in time, in the order of the device's own work."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Until everything that was started is done."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two marks, after :meth:`wait`."""
        return float(start.elapsed_time(stop)) / 1e3 if self.on_gpu else float(stop - start)

    def rate(self, work: Callable[[], object], amount: float) -> float:
        """The amount of each call over the median seconds of twenty, after three."""
        marks = []
        for _ in range(23):
            start = self.mark()
            work()
            marks.append((start, self.mark()))
        self.wait()
        return amount / statistics.median(self.seconds(*pair) for pair in marks[3:])


def peak_bytes(watch: Watch, work: Callable[[], object]) -> dict[str, float]:
    """What is allocated at most while ``work`` runs: ``bytes`` on CUDA, ``memory_mb`` of the process on a CPU."""
    if not watch.on_gpu:
        return {"memory_mb": peak_memory(work)}
    watch.wait()
    torch.cuda.reset_peak_memory_stats(watch.device)
    before = torch.cuda.memory_allocated(watch.device)
    work()
    watch.wait()
    return {"bytes": float(torch.cuda.max_memory_allocated(watch.device) - before)}


def ceilings(device: torch.device) -> dict[str, float]:
    """What the device does in this run; on a CPU with sizes that are thousands of times smaller.

    ``copy``: bytes a second, read and written. ``products``: floating point operations a second in products of
    matrices of 8192 in bfloat16. Gathers are measured for each workload (:func:`gather_rate`).
    """
    watch = Watch(device)
    size, side = (COPIED, SIDE) if watch.on_gpu else (COPIED // 2**12, SIDE // 64)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    copy = watch.rate(lambda: target.copy_(source), 2.0 * size)
    return {"copy": copy, "products": watch.rate(lambda: a @ b, 2.0 * side**3)}


def gather_rate(graph: TokenGraph, width: int, device: torch.device) -> float:
    """Bytes a second of a kernel that reads rows at a graph's own senders, in its order, and adds 64 of them up.

    A row holds the ``width`` channels of all heads of a token in 16 bits, as projections leave keys and values,
    so that the rate is the ceiling of every kernel that gathers along this graph, its locality included. On CUDA
    the kernel is what Inductor makes of these three operators.
    """
    src, dst = graph.edges_on(device)
    places = src[torch.argsort(dst, stable=True)[:MOST_ROWS]]
    # a graph of a few edges is gathered along several times
    places = places.repeat(-(-EACH // len(places)))
    places = places[: len(places) // EACH * EACH].view(-1, EACH)
    table = torch.randn(graph.num_src, width, device=device).bfloat16()
    sums = torch.compile(_sums) if device.type == "cuda" else _sums
    return Watch(device).rate(lambda: sums(table, places), 2.0 * places.numel() * width)


def _sums(table: Tensor, places: Tensor) -> Tensor:
    return table[places].float().sum(1)
