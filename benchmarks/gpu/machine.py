"""Measure times, peak memory and ceilings of a device.

On CUDA, times come from events on the stream. On a CPU, the same code uses the clock for rehearsals, whose numbers
are no measurements.
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

COPIED, SIDE = int(4.3e9), 8192  # bytes that are copied, and rows of a matrix in a product
MOST_ROWS, GROUP = 2**24, 64  # rows that are gathered at most, and rows in each sum


class Watch:
    """Marks in the stream of a device, and the seconds between two of them."""

    def __init__(self, device: torch.device) -> None:
        """Watch ``device``."""
        self.device, self.on_gpu = device, device.type == "cuda"

    def mark(self) -> Any:
        """Mark the present point in the device's queue of work."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Wait until the device has finished all work that was started."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two marks; call :meth:`wait` before."""
        return float(start.elapsed_time(stop)) / 1e3 if self.on_gpu else float(stop - start)

    def rate(self, work: Callable[[], object], amount: float) -> float:
        """Return ``amount`` divided by the median seconds of twenty calls, after three calls of warm-up."""
        marks = []
        for _ in range(23):
            start = self.mark()
            work()
            marks.append((start, self.mark()))
        self.wait()
        return amount / statistics.median(self.seconds(*pair) for pair in marks[3:])


def peak_bytes(watch: Watch, work: Callable[[], object]) -> dict[str, float]:
    """Return the peak memory of ``work``: ``bytes`` allocated on CUDA, or ``memory_mb`` of the process on a CPU."""
    if not watch.on_gpu:
        return {"memory_mb": peak_memory(work)}
    watch.wait()
    torch.cuda.reset_peak_memory_stats(watch.device)
    before = torch.cuda.memory_allocated(watch.device)
    work()
    watch.wait()
    return {"bytes": float(torch.cuda.max_memory_allocated(watch.device) - before)}


def ceilings(device: torch.device) -> dict[str, float]:
    """Measure the peak rates of the device; a CPU gets much smaller sizes.

    ``copy`` is in bytes a second, read and written; ``products`` is in floating-point operations a second, for
    products of bfloat16 matrices with 8192 rows. Gathers are measured for each workload (:func:`gather_rate`).
    """
    watch = Watch(device)
    size, side = (COPIED, SIDE) if watch.on_gpu else (COPIED // 2**12, SIDE // 64)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    copy = watch.rate(lambda: target.copy_(source), 2.0 * size)
    return {"copy": copy, "products": watch.rate(lambda: a @ b, 2.0 * side**3)}


def gather_rate(graph: TokenGraph, width: int, device: torch.device) -> float:
    """Return the bytes a second of a kernel that gathers the rows of a graph's senders and sums groups of 64 rows.

    A row holds the ``width`` channels of all heads of a token in 16 bits, in the layout of projections. Edges are
    sorted by receiver, so the rate includes the locality of the graph and is a ceiling for every kernel that gathers
    along it. On CUDA, Inductor compiles the three operators into one kernel.
    """
    src, dst = graph.edges_on(device)
    index = src[torch.argsort(dst, stable=True)[:MOST_ROWS]]
    # A graph with fewer edges than one group is repeated.
    index = index.repeat(-(-GROUP // len(index)))
    index = index[: len(index) // GROUP * GROUP].view(-1, GROUP)
    table = torch.randn(graph.num_src, width, device=device).bfloat16()
    sum_rows = torch.compile(_sum_rows) if device.type == "cuda" else _sum_rows
    return Watch(device).rate(lambda: sum_rows(table, index), 2.0 * index.numel() * width)


def _sum_rows(table: Tensor, index: Tensor) -> Tensor:
    return table[index].float().sum(1)
