"""What attention would cost on a GPU, by bytes and products: the estimates behind ``backend="auto"`` on CUDA.

A kernel is bound by what it reads from memory, what passes through the cache, or what it multiplies:

    ``seconds = launch + max(misses / copy, passed / cache, flops / rate)``,  each rate times the share of it
    that is reached.

Rows gather a sender for every edge, windows gather each sender once for all receivers of a window and
multiply the whole window, tiles multiply whole tiles. On an H200 a tile of 64 is worth its price from about
one edge in a hundred pairs on, windows where neighbours share senders. All of these are predictions until a
record calibrates them (``python -m benchmarks.gpu --calibrate``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from gnn_attention.backends.gpu.devices import Device
from gnn_attention.backends.gpu.workload import HEIGHTS, Counts, counted, packing
from gnn_attention.graph import TokenGraph, memoized

FORMS = ("rows", "windows", "tiles")
HALF = (torch.float16, torch.bfloat16)
TILE, LARGE_TILE = 64, 128


class Sizes(NamedTuple):
    """``slices`` heads, times samples, of ``dim`` channels of queries and keys, ``value_dim`` of values."""

    slices: int
    dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def row(self) -> int:
        """Bytes of a sender's key and value, or of a receiver's query and output."""
        return (self.dim + self.value_dim) * self.dtype.itemsize


class Estimate(NamedTuple):
    """Of one pass: what is multiplied, read from memory and passed through the cache.

    ``bound`` are seconds at the full rates; ``limit`` names the constant of the device that decides
    ``seconds``.
    """

    flops: float
    misses: float
    passed: float
    seconds: float
    bound: float
    limit: str

    @property
    def share(self) -> float:
        """Of what the device could do at best with this work: ``bound / seconds``."""
        return self.bound / self.seconds if self.seconds else 1.0


class Form(NamedTuple):
    """How edges are stored for our kernels; ``height`` are the receivers of a window or tile, 1 for rows."""

    name: str
    height: int
    reason: str


def form_of(graph: TokenGraph, sizes: Sizes, device: Device) -> Form:
    """The form of least estimated time for a plain graph, memoized; the reason states all estimates.

    >>> from gnn_attention import patterns
    >>> from gnn_attention.backends.gpu.devices import named
    >>> sizes, device = Sizes(8, 64, 64), named("H200")
    >>> form_of(patterns.window(2048, 256), sizes, device).name
    'tiles'
    >>> form_of(patterns.random_senders(2048, 8, causal=False), sizes, device).name
    'rows'
    """
    found: Form = memoized(_form_of, graph, sizes, device)
    return found


def _form_of(graph: TokenGraph, sizes: Sizes, device: Device) -> Form:
    found = estimate_forms(counted(graph), sizes, device)
    best = min(found, key=lambda form: found[form].seconds)
    times = ", ".join(f"{_label(form)} {estimate.seconds * 1e3:.3g} ms" for form, estimate in found.items())
    return Form(*best, f"{_why(best, counted(graph))}; {_predicted(device)}: {times}")


def _label(form: tuple[str, int]) -> str:
    return f"windows of {form[1]}" if form[0] == "windows" else form[0]


def _why(best: tuple[str, int], counts: Counts) -> str:
    filled = f"{100 * counts.filled():.3g} % of the pairs in its tiles of {TILE} are edges"
    height = best[1] if best[0] == "windows" else HEIGHTS[-1]
    shared = (
        f"{height} neighbouring receivers have {counts.shared(height):.3g} edges for each of their senders"
    )
    return filled if best[0] == "tiles" else f"{shared}, {filled}"


def _predicted(device: Device) -> str:
    source = f"constants measured {device.measured}" if device.measured else "predicted, not measured"
    return f"on {device.name}, {source}"


def estimates(graph: TokenGraph, sizes: Sizes, device: Device, backward: bool = False) -> dict[str, Estimate]:
    """Of each way to compute a plain graph: dense, written out, varlen, flex, split, rows, windows, tiles.

    ``dense`` is SDPA, "written out" the formula on all logits; ``windows`` is that of the best height;
    ``split``, where it applies, takes tiles where they are filled and rows for all other edges.
    """
    counts = counted(graph)
    forms = estimate_forms(counts, sizes, device, backward)
    windows = min((form for form in forms if form[0] == "windows"), key=lambda form: forms[form].seconds)
    found = {
        "dense": _dense(counts, sizes, device, backward),
        "written out": _written_out(counts, sizes, device, backward),
    }
    if sizes.dtype in HALF and packing(graph) is not None:
        found["varlen"] = _tiled(counts, sizes, device, "varlen", backward)
    if sizes.dtype != torch.float64:
        found["flex"] = _tiled(counts, sizes, device, "flex", backward)
    if counts.filled_tiles and counts.strays:
        found["split"] = _split(counts, sizes, device, backward)
    return found | {"rows": forms["rows", 1], "windows": forms[windows], "tiles": forms["tiles", TILE]}


def estimate_forms(
    counts: Counts, sizes: Sizes, device: Device, backward: bool = False
) -> Mapping[tuple[str, int], Estimate]:
    """Of our kernels, by (form, height): rows, windows of each height, and tiles."""
    windows = {("windows", height): _windows(counts, sizes, device, height, backward) for height in HEIGHTS}
    return {
        ("rows", 1): _rows(counts, sizes, device, backward),
        **windows,
        ("tiles", TILE): _tiles(counts, sizes, device, backward),
    }


class _Work(NamedTuple):
    """What one slice multiplies, reads from memory, and passes through the cache."""

    flops: float
    misses: float
    passed: float


def _rows(counts: Counts, sizes: Sizes, device: Device, backward: bool) -> Estimate:
    """A sender for each edge, through the cache; the matrix units are not used."""
    flops = 2.0 * counts.edges * (sizes.dim + sizes.value_dim)
    work = _Work(flops, _missed(counts, sizes, device) + 4.0 * counts.edges, counts.edges * sizes.row)
    rate = device.double if sizes.dtype == torch.float64 else device.single
    return _estimate(work, sizes.slices, device, rate, "gather", "", backward)


def _windows(counts: Counts, sizes: Sizes, device: Device, height: int, backward: bool) -> Estimate:
    """A sender for each window that attends to it, with a word of bits."""
    unique = counts.unique[HEIGHTS.index(height)]
    flops = 2.0 * unique * height * (sizes.dim + sizes.value_dim)
    work = _Work(flops, _missed(counts, sizes, device) + unique * (4 + height / 8), unique * sizes.row)
    return _estimate(work, sizes.slices, device, device.rate(sizes.dtype), "windows", "products", backward)


def _tiles(counts: Counts, sizes: Sizes, device: Device, backward: bool) -> Estimate:
    """All pairs of its tiles, of 64 receivers or of 128, which read a sender half as often."""
    heights = [(64, counts.small_tiles), *([(128, counts.tall_tiles)] if counts.tall_tiles else [])]
    found = (_tiles_of(high, count, counts, sizes, device, backward) for high, count in heights)
    return min(found, key=lambda estimate: estimate.seconds)


def _tiles_of(
    high: int, count: float, counts: Counts, sizes: Sizes, device: Device, backward: bool
) -> Estimate:
    flops = 2.0 * count * high * TILE * (sizes.dim + sizes.value_dim)
    passed = count * TILE * sizes.row
    work = _Work(flops, min(passed, 2.0 * counts.senders * sizes.row) + counts.receivers * sizes.row, passed)
    return _estimate(work, sizes.slices, device, device.rate(sizes.dtype), "", "products", backward)


def _split(counts: Counts, sizes: Sizes, device: Device, backward: bool) -> Estimate:
    """One part after the other, and the merge: both results are read, their sum in float32 is written."""
    filled = _tiles(counts._replace(small_tiles=counts.filled_tiles, tall_tiles=0.0), sizes, device, backward)
    unique = tuple(min(counts.strays, count) for count in counts.unique)
    strays = _rows(counts._replace(edges=round(counts.strays), unique=unique), sizes, device, backward)
    merged = 3.0 * sizes.slices * counts.receivers * sizes.value_dim * (sizes.dtype.itemsize + 4)
    seconds = filled.seconds + strays.seconds + merged / device.copy + device.launch
    flops, misses, passed = (a + b for a, b in zip(filled[:3], strays[:3], strict=True))
    longer = max(filled, strays, key=lambda part: part.seconds)
    return Estimate(flops, misses + merged, passed, seconds, filled.bound + strays.bound, longer.limit)


def _tiled(counts: Counts, sizes: Sizes, device: Device, share: str, backward: bool) -> Estimate:
    """Kernels of other libraries on tiles of 128; FlexAttention evaluates its mask on those that are cut."""
    tiles = counts.large_tiles + (0.5 * counts.cut_tiles if share == "flex" else 0.0)
    flops = 2.0 * tiles * LARGE_TILE**2 * (sizes.dim + sizes.value_dim)
    misses = float((counts.senders + counts.receivers) * sizes.row)
    work = _Work(flops, misses, counts.large_tiles * LARGE_TILE * sizes.row)
    return _estimate(work, sizes.slices, device, device.rate(sizes.dtype), "", share, backward)


def _dense(counts: Counts, sizes: Sizes, device: Device, backward: bool) -> Estimate:
    """SDPA: all pairs, of a causal graph half of them; with a mask where the graph is another."""
    pairs = counts.receivers * counts.senders
    flops = 2.0 * (pairs / 2 if counts.causal else pairs) * (sizes.dim + sizes.value_dim)
    misses = float((counts.receivers + counts.senders) * sizes.row)
    work = _Work(flops, misses, 0.0 if counts.whole else float(pairs * sizes.dtype.itemsize))
    share = "sdpa" if counts.whole else "masked"
    return _estimate(work, sizes.slices, device, device.rate(sizes.dtype), "", share, backward)


def _written_out(counts: Counts, sizes: Sizes, device: Device, backward: bool) -> Estimate:
    """The formula on all logits in float32 or more: about six tensors of all pairs are written and read."""
    pairs = counts.receivers * counts.senders
    moved = 12.0 * pairs * max(4, sizes.dtype.itemsize)
    rate = device.double if sizes.dtype == torch.float64 else device.single
    work = _Work(2.0 * pairs * (sizes.dim + sizes.value_dim), moved, moved)
    return _estimate(work, sizes.slices, device, rate, "", "masked", backward)


def _missed(counts: Counts, sizes: Sizes, device: Device) -> float:
    """Bytes from memory: each sender once, and again for later windows where a head exceeds the cache."""
    table, wanted = counts.senders * sizes.row, counts.unique[-1] * sizes.row
    again = max(0.0, 1.0 - device.cache_bytes / table) if table else 0.0
    return (1.0 - again) * min(table, wanted) + again * wanted + counts.receivers * sizes.row


def _estimate(
    work: _Work, slices: int, device: Device, rate: float, gather: str, matrix: str, backward: bool
) -> Estimate:
    """Of all slices. ``gather`` and ``matrix`` name the shares of memory and products that are reached ("":
    all of it).

    A backward pass reads twice as much (senders, then receivers over the transpose) and multiplies 2.5 times.
    """
    more = _Work(2.5, 2.0, 2.0) if backward else _Work(1.0, 1.0, 1.0)
    flops, misses, passed = (slices * part * times for part, times in zip(work, more, strict=True))
    reads = getattr(device, gather) if gather else 1.0
    reached = (getattr(device, matrix) if matrix else 1.0) * (device.backward if backward and matrix else 1.0)
    seconds, limit = max(
        (misses / (device.copy * reads), gather or "copy"),
        (passed / (device.cache * reads), gather or "cache"),
        (flops / (rate * reached), matrix or "single"),
    )
    bound = max(misses / device.copy, passed / device.cache, flops / rate)
    return Estimate(flops, misses, passed, device.launch + seconds, bound, limit)
