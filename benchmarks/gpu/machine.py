"""The device that is measured: a watch for its own time, peak memory, its ceilings, and its description.

On CUDA time is taken by events on the stream. On a CPU the same path runs by the clock, for trials of the
benchmark itself: what it gives there is no measurement.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.verify.circumstances import environment
from gnn_attention.verify.record import sources

__all__ = ["Ceilings", "Watch", "ceilings", "chosen_device", "described", "peak_memory"]

TABLE_IN_CACHE, TABLE = 2**24, 2**32  # bytes of the tables from which rows are gathered
COPIED, SIDE, ROWS = int(4.3e9), 8192, 2**24
SMALLER = 2**12  # times smaller on a CPU
REPEATS = 20


def chosen_device(name: str, quick: bool) -> torch.device:
    """The device of a benchmark. ValueError without a GPU, but for ``cpu`` with ``quick``, which tries the
    benchmark out.
    """
    device = torch.device(name)
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu" and quick:
        return device
    if device.type == "cpu":
        raise ValueError(
            "benchmarks.gpu on --device cpu is a trial of the benchmark, not a measurement: give --quick too"
        )
    found = f"benchmarks.gpu needs a GPU, and torch finds none for --device {name}"
    raise ValueError(f"{found}; --device cpu --quick is a trial without one")


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

    def times(self, work: Callable[[int], object], repeats: int) -> list[float]:
        """Of ``work(0), work(1), ...``, each between its own marks."""
        marks = []
        for number in range(repeats):
            start = self.mark()
            work(number)
            marks.append((start, self.mark()))
        self.wait()
        return [self.seconds(*pair) for pair in marks]


def peak_memory(device: torch.device, work: Callable[[], object]) -> float | None:
    """Bytes that are allocated at most while ``work`` runs, its results included, beyond those before; None
    on a CPU.
    """
    if device.type != "cuda":
        work()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    del result
    return float(torch.cuda.max_memory_allocated(device) - before)


@dataclass(frozen=True)
class Ceilings:
    """What the device can do, here and now: bytes and floating point operations a second, medians.

    ``copy``: 8.6 GB read and written. ``products``: of matrices of 8192 in bfloat16. Gathers read random rows
    and add them up: ``cache_rows`` rows of 128 bytes from a table that the cache holds, ``short_rows`` of 128
    bytes and ``long_rows`` of 2048 from one that it does not. ``by``: what gathered.
    """

    copy: float
    products: float
    cache_rows: float
    short_rows: float
    long_rows: float
    by: str


def ceilings(device: torch.device) -> Ceilings:
    """Measured; on a CPU with sizes that are thousands of times smaller."""
    shrink = 1 if device.type == "cuda" else SMALLER
    watch, (sums, by) = Watch(device), _gather_of(device)
    return Ceilings(
        copy=_copies(watch, COPIED // shrink),
        products=_products(watch, SIDE if shrink == 1 else SIDE // 64),
        cache_rows=_gathers(watch, sums, TABLE_IN_CACHE // shrink, 64, ROWS // shrink),
        short_rows=_gathers(watch, sums, TABLE // shrink, 64, ROWS // shrink),
        long_rows=_gathers(watch, sums, TABLE // shrink, 1024, ROWS // 16 // shrink),
        by=by,
    )


def _rate(watch: Watch, work: Callable[[int], object], amount: float) -> float:
    watch.times(work, 3)
    return amount / statistics.median(watch.times(work, REPEATS))


def _copies(watch: Watch, size: int) -> float:
    source, target = (torch.ones(size, dtype=torch.uint8, device=watch.device) for _ in range(2))
    return _rate(watch, lambda _: target.copy_(source), 2.0 * size)


def _products(watch: Watch, side: int) -> float:
    a, b = (torch.randn(side, side, device=watch.device).bfloat16() for _ in range(2))
    return _rate(watch, lambda _: a @ b, 2.0 * side**3)


def _gathers(
    watch: Watch, sums: Callable[[Tensor, Tensor], Tensor], size: int, width: int, count: int
) -> float:
    """Bytes of the rows that are read; their places are read as well, and one sum is written for many
    rows.
    """
    table = torch.randn(max(size // (2 * width), 1), width, device=watch.device).bfloat16()
    number = max(count // 64, 1) * 64
    places = torch.randint(len(table), (number,), device=watch.device, dtype=torch.int32)
    return _rate(watch, lambda _: sums(table, places), 2.0 * number * width)


def _gather_of(device: torch.device) -> tuple[Callable[[Tensor, Tensor], Tensor], str]:
    """A kernel of ours that does nothing else, else torch's own."""
    if importlib.util.find_spec("triton") is not None and device.type == "cuda":
        return importlib.import_module("benchmarks.gpu.gather_kernel").sums, "a kernel that only gathers"
    return _bags, "embedding_bag"


def _bags(table: Tensor, places: Tensor) -> Tensor:
    return torch.nn.functional.embedding_bag(places.view(-1, 64), table, mode="sum")


def described(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """Device, versions, flags, commit, sources of the kernels and the command line: what figures are worth
    little without.

    ``measurement`` is False for a trial on a CPU.
    """
    about = {**environment(str(device)), "sources": sources(), "arguments": list(arguments)}
    about |= {"measurement": device.type == "cuda", "memory": None, "cache": None}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        about |= {"memory": found.total_memory, "cache": getattr(found, "L2_cache_size", None)}
    return about
