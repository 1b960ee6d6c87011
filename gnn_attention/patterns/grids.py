"""Tokens on a grid: neighbourhoods, shifted windows, haloed blocks, rows and columns, tiles of a video.

A grid has any number of axes; its tokens stand in row-major order: the last axis runs fastest, as
``tensor.flatten()`` leaves them. Most of these graphs are boxes: along each axis a receiver attends to an
interval of coordinates, which a small table holds, and an edge needs all the axes.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.symbols import any_of, dst, look_up, src
from gnn_attention.patterns._builder import builder

__all__ = ["axial", "haloed_blocks", "image_local_2d", "natten", "sliding_tile", "svg_spatial"]
__all__ += ["svg_temporal", "swin"]

Sizes = Sequence[int]
# for each coordinate, the first and the last that it attends to
Interval = tuple[Int[Tensor, " _"], Int[Tensor, " _"]]
PerAxis = int | Sizes
Flags = bool | Sequence[bool]


@builder()
def natten(shape: Sequence[int], kernel: PerAxis, dilation: PerAxis = 1, causal: Flags = False) -> TokenGraph:
    """Neighbourhood attention: ``kernel`` coordinates along each axis, pushed inwards at the border.

    The window is centred on the receiver's coordinate x (an even one has its longer half before x) and moved
    until it lies in the grid: ``first = clamp(x - kernel // 2, 0, size - kernel)``, so that every token
    attends to ``prod(kernel)`` tokens. Each parameter is one value, or one for each axis:

    - ``dilation`` d: the same inside the coordinates that leave x's remainder modulo d, counted ``x // d``;
    - ``causal``: the window ends at x and starts ``kernel - 1`` before it.

    NATTEN's definition; attention-gym's ``generate_natten`` agrees for odd kernels (its even ones attend to
    ``kernel + 1``). Hassani et al., Neighborhood Attention Transformer (arXiv 2204.07143), dilated
    (2209.15001), causal (2403.04690). Raises ValueError where ``kernel * dilation`` exceeds the grid.

    >>> natten((5,), 3).in_degree().tolist()
    [3, 3, 3, 3, 3]
    """
    sizes = _shape(shape)
    kernels, steps = _per_axis("kernel", kernel, sizes), _per_axis("dilation", dilation, sizes)
    ends = _per_axis("causal", causal, sizes, None)
    axes = enumerate(zip(sizes, kernels, steps, ends, strict=True))
    spans = [_neighbours("kernel", axis, *numbers) for axis, numbers in axes]
    return TokenGraph.from_rule(_in_box(sizes, spans, steps), math.prod(sizes))


@builder()
def swin(shape: Sequence[int], window: PerAxis, shift: PerAxis = 0) -> TokenGraph:
    """Windowed attention: each token attends to its window.

    The partition into windows is moved by ``shift`` along each axis. ``(x - shift) // window`` is the same
    for sender and receiver along every axis. The shifted partition has smaller windows at the border: this is
    what the cyclic shift *with* its mask computes, since tokens that only the roll brings together do not
    attend to each other. A grid that ``window`` does not divide keeps its smaller last windows. Layers
    alternate ``swin(shape, m)`` and ``swin(shape, m, m // 2)``. Liu et al. 2021, Swin Transformer (arXiv
    2103.14030). Raises ValueError unless ``0 <= shift < window``.

    >>> swin((6,), 3, 1).in_degree().tolist()
    [1, 3, 3, 3, 2, 2]
    """
    sizes = _shape(shape)
    windows, shifts = _per_axis("window", window, sizes), _per_axis("shift", shift, sizes, 0)
    for axis, (size, by) in enumerate(zip(windows, shifts, strict=True)):
        if by >= size:
            got = f"got {by} for a window of {size} along axis {axis}"
            raise ValueError(f"shift must be less than window, {got}")
    spans = [_blocks(*axis) for axis in zip(sizes, windows, shifts, strict=True)]
    return TokenGraph.from_rule(_in_box(sizes, spans), math.prod(sizes))


@builder()
def haloed_blocks(shape: Sequence[int], block: PerAxis, halo: PerAxis) -> TokenGraph:
    """Each token attends to its block and a margin of ``halo`` around it, cut at the border.

    ``block * (x // block) - halo <= y < block * (x // block + 1) + halo`` for sender y and receiver x along
    every axis, so an inner token attends to ``prod(block + 2 halo)``. Not symmetric. Vaswani et al. 2021,
    HaloNet (arXiv 2103.12731); ``block=1`` is a window around every token.

    >>> haloed_blocks((6,), 2, 1).in_degree().tolist()
    [3, 3, 4, 4, 3, 3]
    """
    sizes = _shape(shape)
    blocks, halos = _per_axis("block", block, sizes), _per_axis("halo", halo, sizes, 0)
    spans = [_blocks(size, each, 0, by) for size, each, by in zip(sizes, blocks, halos, strict=True)]
    return TokenGraph.from_rule(_in_box(sizes, spans), math.prod(sizes))


@builder()
def axial(shape: Sequence[int], axis: int | None = None) -> TokenGraph:
    """Each token attends to the tokens that differ from it along one axis only.

    In a picture its row and its column. ``axis``: along this axis alone, one layer of Ho et al. 2019, Axial
    Transformers (arXiv 1912.12180), which take the axes in turn: as many layers as axes reach everything.
    None: along any axis, in-degree ``sum(shape) - len(shape) + 1`` (xformers' ``axial_2d_pattern``). Raises
    IndexError for an axis that the grid does not have.

    >>> axial((2, 3)).in_degree().tolist()
    [4, 4, 4, 4, 4, 4]
    """
    sizes = _shape(shape)
    lines = list(zip(places(sizes), sizes, strict=True))
    if axis is not None:
        lines = [lines[checks.index("axis", axis, len(sizes))]]
    along = (
        (dst // (place * size) == src // (place * size)) & ((dst - src) % place == 0) for place, size in lines
    )
    return TokenGraph.from_rule(any_of(along), math.prod(sizes))


@builder()
def image_local_2d(shape: Sequence[int], block: PerAxis, memory: PerAxis) -> TokenGraph:
    """Each pixel attends to its own block so far and the memory above and next to that block.

    A picture generated block by block. Of the memory around its block each token attends to what was
    generated before, the blocks and the tokens of each in raster order: ``memory[0]`` rows above and,
    ``memory[1]`` wide, the tokens to the left and above to the left and right. The tokens stand in row-major
    order of the picture, not in the order of generation: an edge may come from a later position (below, in
    the block to the left), and the graph is acyclic all the same. In one dimension it is
    ``segment_recurrence``. Parmar et al. 2018, Image Transformer (arXiv 1802.05751), as tensor2tensor's
    ``masked_local_attention_2d``.

    >>> image_local_2d((2, 4), (2, 2), (1, 1)).in_degree().tolist()
    [1, 2, 3, 4, 3, 4, 5, 6]
    """
    sizes = _shape(shape)
    if len(sizes) != 2:
        raise ValueError(f"shape must be (height, width), got {sizes}")
    (tall, wide), (above, beside) = _per_axis("block", block, sizes), _per_axis("memory", memory, sizes, 0)
    row, column = src // sizes[1], src % sizes[1]
    top, left = dst // sizes[1] // tall * tall, dst % sizes[1] // wide * wide
    right = left + wide
    around = (top - above <= row) & (row < top + tall) & (left - beside <= column) & (column < right + beside)
    rule = around & ((row < top) | (column < left) | ((column < right) & (src <= dst)))
    return TokenGraph.from_rule(rule, math.prod(sizes))


@builder()
def sliding_tile(shape: Sequence[int], tile: PerAxis, window: PerAxis, tiled: bool = False) -> TokenGraph:
    """All tokens of a tile attend to the same ``window`` tiles along each axis.

    It is ``natten`` between tiles: tile ``t = x // tile`` attends to the ``window`` tiles from
    ``clamp(t - window // 2, 0, size // tile - window)`` on. ``tiled=True``: the tokens stand tile by tile, as
    the kernels want them, so that every block of the mask is empty or full. ``window`` counts tiles, as in
    FastVideo; attention-gym's ``kernel_hw`` counts tokens. Zhang et al. 2025, Fast Video Generation with
    Sliding Tile Attention (arXiv 2502.04507). ValueError where a tile does not divide the grid, or for a
    large window.

    >>> sliding_tile((6,), 2, 2).in_degree().tolist()
    [4, 4, 4, 4, 4, 4]
    """
    sizes = _shape(shape)
    tiles, windows = _per_axis("tile", tile, sizes), _per_axis("window", window, sizes)
    for axis, (size, each) in enumerate(zip(sizes, tiles, strict=True)):
        if size % each:
            raise ValueError(f"tile must divide the grid, got {each} along axis {axis}, which has {size}")
    counts = tuple(size // each for size, each in zip(sizes, tiles, strict=True))
    axes = enumerate(zip(counts, windows, strict=True))
    spans = [_neighbours("window", axis, *numbers) for axis, numbers in axes]
    if tiled:
        box = _in_box(counts, spans, unit=math.prod(tiles))
    else:
        box = _in_box(sizes, list(map(_spread, spans, tiles)))
    return TokenGraph.from_rule(box, math.prod(sizes))


@builder(frame_size=1)
def svg_spatial(frames: int, frame_size: int, w: int) -> TokenGraph:
    """A token of a video attends to those less than ``w`` away in the sequence: ``|dst - src| < w``.

    Sparse VideoGen's spatial head, on ``frames * frame_size`` tokens. A prompt before the video, joined to
    all both ways, is ``memory_tokens(graph, prompt, causal=False)``. attention-gym's ``width`` counts frames
    and rounds: w is its ``width * token_per_frame``. Sparse VideoGen (2025, arXiv 2502.01776).

    >>> svg_spatial(2, 2, 2).in_degree().tolist()
    [2, 3, 3, 2]
    """
    return TokenGraph.from_rule(abs(dst - src) < w, frames * frame_size)


@builder(frame_size=1)
def svg_temporal(frames: int, frame_size: int, w: int) -> TokenGraph:
    """A token of a video attends to those less than ``w`` away inside their frame, in every frame.

    ``|p(dst) - p(src)| < w``. Sparse VideoGen's temporal head. ``p`` is the position inside the frame,
    ``i % frame_size``. In-degree: ``frames`` times that of ``window(frame_size, w, causal=False)``. A prompt
    is joined as in :func:`svg_spatial`. attention-gym's ``width`` is
    ``w = width * token_per_frame // num_frames``. Sparse VideoGen (2025, arXiv 2502.01776).

    >>> svg_temporal(2, 2, 1).in_degree().tolist()
    [2, 2, 2, 2]
    """
    return TokenGraph.from_rule(abs(dst % frame_size - src % frame_size) < w, frames * frame_size)


def places(sizes: Sequence[int]) -> list[int]:
    """How many tokens lie between neighbours along each axis, in row-major order."""
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The checked sizes of a grid: one axis at least, one token at least along each."""
    sizes = tuple(checks.sizes("shape", shape, 1))
    if not sizes:
        raise ValueError("shape must have at least one axis, got ()")
    return sizes


def _per_axis(name: str, value: Any, sizes: Sequence[int], minimum: int | None = 1) -> tuple[int, ...]:
    """One value for each axis, the same for all where a single one was given; flags for no minimum."""
    single = not isinstance(value, Iterable)
    checks.check_order(name, value)
    values = [value] * len(sizes) if single else list(value)
    word = name if single else f"each of {name}"
    if minimum is None:
        checked: tuple[int, ...] = tuple([checks.instance(word, each, bool) for each in values])
    else:
        checked = tuple(checks.size(word, each, minimum) for each in values)
    if len(checked) != len(sizes):
        wanted = f"one value or {len(sizes)}, one for each axis of {tuple(sizes)}"
        raise ValueError(f"{name} must be {wanted}, got {checked}")
    return checked


def _in_box(sizes: Sequence[int], spans: Sequence[Interval], steps: Sequence[int] = (), unit: int = 1) -> Any:
    """Whether the sender stands in the receiver's span along every axis, at a multiple of the axis's step.

    A coordinate is that of ``unit`` tokens in a row.
    """
    inside = (dst >= 0) & (src >= 0)
    steps = steps or (1,) * len(sizes)
    for place, size, (first, last), step in zip(places(sizes), sizes, spans, steps, strict=True):
        own, other = dst // (place * unit) % size, src // (place * unit) % size
        inside = inside & (look_up(first, own) <= other) & (other <= look_up(last, own))
        inside = inside & ((own - other) % step == 0) if step > 1 else inside
    return inside


def _neighbours(
    word: str, axis: int, size: int, kernel: int, dilation: int = 1, causal: int = False
) -> Interval:
    """The window of each coordinate among those that leave its remainder; ``word`` names it in errors."""
    if kernel * dilation > size:
        times = f" * dilation = {kernel} * {dilation}" if dilation > 1 else f" = {kernel}"
        got = f"got {word}{times} along axis {axis}, which has {size}"
        raise ValueError(f"{word} must fit into the grid, {got}")
    x = torch.arange(size, device="cpu")
    remainder, place = x % dilation, x // dilation
    last = (size - 1 - remainder) // dilation
    if causal:
        return remainder + dilation * (place - kernel + 1).clamp(min=0), x
    first = torch.minimum((place - kernel // 2).clamp(min=0), last - kernel + 1)
    return remainder + dilation * first, remainder + dilation * (first + kernel - 1)


def _blocks(size: int, block: int, shift: int, halo: int = 0) -> Interval:
    first = (torch.arange(size, device="cpu") - shift) // block * block + shift
    return (first - halo).clamp(min=0), (first + block - 1 + halo).clamp(max=size - 1)


def _spread(span: Interval, tile: int) -> Interval:
    first, last = (bound.repeat_interleave(tile) * tile for bound in span)
    return first, last + tile - 1
