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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gnn_attention.backends.gpu.devices import Device
from gnn_attention.backends.gpu.workload import HEIGHTS, Counts, counted, members, packing
from gnn_attention.backends.plan import decompose
from gnn_attention.edges import accumulation_dtype
from gnn_attention.graph import TokenGraph, memoized

FORMS = ("rows", "windows", "tiles")
HALF = (torch.float16, torch.bfloat16)
TILE, LARGE_TILE = 64, 128
COMPILED = 1.25  # factor on FlexAttention's time, which takes seconds to compile: at par others are taken
MOST_CUT = 4  # large tiles with non-edges, in a row of tiles, of a graph whose parts are soon found


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

    ``bound`` are seconds at the full rates; ``limit`` names the device's constant that decides ``seconds``.
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
    """The form of least estimated time for a plain graph, memoized; the reason states all estimates."""
    found: Form = memoized(_form_of, graph, sizes, device)
    return found


def _form_of(graph: TokenGraph, sizes: Sizes, device: Device) -> Form:
    found = estimate_forms(counted(graph), sizes, device)
    best = min(found, key=lambda form: found[form].seconds)
    labels = {form: f"windows of {form[1]}" if form[0] == "windows" else form[0] for form in found}
    times = ", ".join(f"{labels[form]} {one.seconds * 1e3:.3g} ms" for form, one in found.items())
    return Form(*best, f"{_why(best, counted(graph))}; {_predicted(device)}: {times}")


def _why(best: tuple[str, int], counts: Counts) -> str:
    filled = f"{100 * counts.filled():.3g} % of the pairs in its tiles of {TILE} are edges"
    height = best[1] if best[0] == "windows" else HEIGHTS[-1]
    receivers = f"{height} neighbouring receivers"
    shared = f"{receivers} have {counts.shared(height):.3g} edges for each of their senders"
    return filled if best[0] == "tiles" else f"{shared}, {filled}"


def _predicted(device: Device) -> str:
    source = f"constants measured {device.measured}" if device.measured else "predicted, not measured"
    return f"on {device.name}, {source}"


def estimates(graph: TokenGraph, sizes: Sizes, device: Device, backward: bool = False) -> dict[str, Estimate]:
    """Of each way to compute a plain graph: dense, written out, varlen, flex, split, rows, windows, tiles.

    ``dense`` is SDPA, "written out" the formula on all logits; ``windows`` is that of the best height;
    "modified" is FlexAttention with a score_mod; ``split``, where it applies, takes each part of the graph by
    the kernel for it (:func:`assigned`).
    """
    found = _each(graph, sizes, device, backward)
    pieces = assigned(graph, sizes, device, backward)
    return found | ({"split": _merged(pieces, graph, sizes, device)} if pieces else {})


def weighed(
    found: Mapping[str, Estimate], device: Device, written_out: bool = False, modified: bool = False
) -> dict[str, float]:
    """Seconds by backend, ours as many times longer as they are in doubt.

    ``written_out``: the logits are, where dense is taken; ``modified``: with a score_mod, a bias or dropout.
    """
    flex = "modified" if modified else "flex"
    times = {"flex": COMPILED * found[flex].seconds} if flex in found else {}
    times |= {"varlen": found["varlen"].seconds} if "varlen" in found and not modified else {}
    times["dense"] = found["written out" if written_out else "dense"].seconds
    return times | {"triton": device.doubt * min(found[form].seconds for form in FORMS)}


def assigned(
    graph: TokenGraph, sizes: Sizes, device: Device, backward: bool = False
) -> tuple[tuple[str, Estimate], ...]:
    """The backend of each part of a plain graph, of the least weighed time, and what it takes; memoized.

    () where there is one part, or finding them would take seconds.
    """
    found: tuple[tuple[str, Estimate], ...] = memoized(_assigned, graph, sizes, device, backward)
    return found


def _assigned(
    graph: TokenGraph, sizes: Sizes, device: Device, backward: bool
) -> tuple[tuple[str, Estimate], ...]:
    counts = counted(graph)
    if counts.strays and counts.filled_tiles:
        # the parts of a list take seconds to find; the members of a union may share edges
        terms = members(graph)
        if len(terms) > 1:
            return tuple(_best(term, sizes, device, backward) for term in terms)
        return _Pass(counts, sizes, device, backward).split()
    rows = -(-counts.receivers // LARGE_TILE)
    if counts.strays or graph._listed is not None or counts.whole or counts.cut_tiles > MOST_CUT * rows:
        return ()
    one = decompose.shifted(graph)
    parts = decompose.parts(graph) if one is None else (one,)
    return tuple(_best(part.graph, sizes, device, backward) for part in parts if part.graph is not graph)


def _best(part: TokenGraph, sizes: Sizes, device: Device, backward: bool) -> tuple[str, Estimate]:
    found = _each(part, sizes, device, backward)
    # lse of other graphs or numbers comes from the formula
    written_out = not (counted(part).whole and sizes.dtype in HALF)
    times = weighed(found, device, written_out)
    best = min(times, key=lambda name: times[name])
    if best == "triton":
        return best, min((found[form] for form in FORMS), key=lambda estimate: estimate.seconds)
    return best, found["written out" if best == "dense" and written_out else best]


def _merged(
    pieces: Sequence[tuple[str, Estimate]], graph: TokenGraph, sizes: Sizes, device: Device
) -> Estimate:
    """One part after the other, and the merge: the results are read, their sum in float32 is written."""
    moved = 3.0 * sizes.slices * graph.num_dst * sizes.value_dim * (sizes.dtype.itemsize + 4)
    numbers = zip(*(estimate[:5] for _, estimate in pieces), strict=True)
    flops, misses, passed, seconds, bound = (float(sum(number)) for number in numbers)
    seconds += moved / device.copy + device.launch
    limit = max((estimate for _, estimate in pieces), key=lambda estimate: estimate.seconds).limit
    return Estimate(flops, misses + moved, passed, seconds, bound, limit)


def _each(graph: TokenGraph, sizes: Sizes, device: Device, backward: bool) -> dict[str, Estimate]:
    whole = _Pass(counted(graph), sizes, device, backward)
    found = {"dense": whole.dense(), "written out": whole.written_out()}
    if sizes.dtype in HALF and packing(graph) is not None:
        found["varlen"] = whole.tiled("varlen")
    if sizes.dtype != torch.float64:
        found |= {"flex": whole.tiled("flex"), "modified": whole.tiled("flex", modified=True)}
    windows = min(map(whole.windows, HEIGHTS), key=lambda estimate: estimate.seconds)
    return found | {"rows": whole.rows(), "windows": windows, "tiles": whole.tiles()}


def estimate_forms(
    counts: Counts, sizes: Sizes, device: Device, backward: bool = False
) -> Mapping[tuple[str, int], Estimate]:
    """Of our kernels, by (form, height): rows, windows of each height, and tiles."""
    whole = _Pass(counts, sizes, device, backward)
    windows = {("windows", height): whole.windows(height) for height in HEIGHTS}
    return {("rows", 1): whole.rows(), **windows, ("tiles", TILE): whole.tiles()}


class _Pass(NamedTuple):
    """One pass over a graph on a device; each method is what some kernel would take for it."""

    counts: Counts
    sizes: Sizes
    device: Device
    backward: bool

    def rows(self) -> Estimate:
        """A sender for each edge, through the cache; the matrix units are not used."""
        edges = float(self.counts.edges)
        passed = edges * self.sizes.row
        return self._estimate(edges, self._missed() + 4.0 * edges, passed, "gather", "", True)

    def windows(self, height: int) -> Estimate:
        """A sender for each window that attends to it, with a word of bits."""
        unique = float(self.counts.unique[HEIGHTS.index(height)])
        misses = self._missed() + unique * (4 + height / 8)
        return self._estimate(unique * height, misses, unique * self.sizes.row, "windows", "products")

    def tiles(self) -> Estimate:
        """All pairs of its tiles, of 64 receivers or of 128, which read a sender half as often."""
        small, tall = float(self.counts.small_tiles), float(self.counts.tall_tiles)
        found = [self._tiles_of(64, small), *([self._tiles_of(128, tall)] if tall else [])]
        return min(found, key=lambda estimate: estimate.seconds)

    def _tiles_of(self, height: int, count: float) -> Estimate:
        passed, row = count * TILE * self.sizes.row, self.sizes.row
        misses = min(passed, 2.0 * self.counts.senders * row) + self.counts.receivers * row
        return self._estimate(count * height * TILE, misses, passed, "", "products")

    def split(self) -> tuple[tuple[str, Estimate], ...]:
        """Of a list of edges: its filled tiles, and rows for the others."""
        counts = self.counts
        filled = self._with(small_tiles=counts.filled_tiles, tall_tiles=0.0).tiles()
        unique = tuple(min(counts.strays, count) for count in counts.unique)
        strays = self._with(edges=round(counts.strays), unique=unique).rows()
        return ("triton", filled), ("triton", strays)

    def _with(self, **counts: Any) -> _Pass:
        return self._replace(counts=self.counts._replace(**counts))

    def tiled(self, share: str, modified: bool = False) -> Estimate:
        """Other libraries on tiles of 128; FlexAttention evaluates its mask on those that are cut, and a
        score_mod on all.
        """
        counts, row = self.counts, self.sizes.row
        evaluated = counts.large_tiles * modified + (counts.cut_tiles if share == "flex" else 0.0)
        tiles = counts.large_tiles + 0.5 * evaluated
        misses, passed = (
            float((counts.senders + counts.receivers) * row),
            counts.large_tiles * LARGE_TILE * row,
        )
        return self._estimate(tiles * LARGE_TILE**2, misses, float(passed), "", share)

    def dense(self) -> Estimate:
        """SDPA: all pairs, of a causal graph half of them; with a mask where the graph is another."""
        counts, pairs = self.counts, float(self.counts.receivers * self.counts.senders)
        misses = float((counts.receivers + counts.senders) * self.sizes.row)
        mask = 0.0 if counts.whole else float(pairs * self.sizes.dtype.itemsize)
        share = "sdpa" if counts.whole else "masked"
        return self._estimate(pairs / 2 if counts.causal else pairs, misses, mask, "", share)

    def written_out(self) -> Estimate:
        """All logits in float32 or more: about six tensors of all pairs are written and read."""
        pairs = float(self.counts.receivers * self.counts.senders)
        moved = 12.0 * pairs * max(4, self.sizes.dtype.itemsize)
        return self._estimate(pairs, moved, moved, "", "masked", True)

    def _missed(self) -> float:
        """Bytes from memory: each sender once, and again for later windows where a head exceeds the cache."""
        row = self.sizes.row
        table, wanted = self.counts.senders * row, self.counts.unique[-1] * row
        again = max(0.0, 1.0 - self.device.cache_bytes / table) if table else 0.0
        return (1.0 - again) * min(table, wanted) + again * wanted + self.counts.receivers * row

    def _estimate(
        self, pairs: float, misses: float, passed: float, gather: str, matrix: str, in_sums: bool = False
    ) -> Estimate:
        """Of all slices. ``gather``, ``matrix``: the shares of memory and products reached, "" = all of it.

        ``in_sums``: multiplied in the dtype of sums. A backward pass reads twice as much (senders, then
        receivers over the transpose) and multiplies 2.5 times.
        """
        device, dtype, slices = self.device, self.sizes.dtype, self.sizes.slices
        products, reading = (2.5, 2.0) if self.backward else (1.0, 1.0)
        flops = slices * (2.0 * pairs * (self.sizes.dim + self.sizes.value_dim)) * products
        misses, passed = slices * misses * reading, slices * passed * reading
        rate = device.rate(accumulation_dtype(dtype) if in_sums else dtype)
        reads = getattr(device, gather) if gather else 1.0
        reached = getattr(device, matrix) * (device.backward if self.backward else 1.0) if matrix else 1.0
        seconds, limit = max(
            (misses / (device.copy * reads), gather or "copy"),
            (passed / (device.cache * reads), gather or "cache"),
            (flops / (rate * reached), matrix or "single"),
        )
        bound = max(misses / device.copy, passed / device.cache, flops / rate)
        return Estimate(flops, misses, passed, device.launch + seconds, bound, limit)
