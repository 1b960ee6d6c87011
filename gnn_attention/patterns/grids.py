"""Graphs on a grid of tokens: neighbourhoods, shifted windows, haloed blocks, axes and video tiles.

A grid has any number of axes, and its tokens are in row-major order: the last axis varies fastest,
as in ``tensor.flatten()``. In most of these graphs a receiver attends to a box, which has one
interval of coordinates along each axis. A small table for each axis holds the intervals. Only
``natten`` has an option ``causal``; in all other graphs a sender may come after its receiver.
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
# For each coordinate of an axis, the first and the last coordinate to which it attends.
Intervals = tuple[Int[Tensor, " _"], Int[Tensor, " _"]]
PerAxis = int | Sizes
Flags = bool | Sequence[bool]


@builder()
def natten(shape: Sequence[int], kernel: PerAxis, dilation: PerAxis = 1, causal: Flags = False) -> TokenGraph:
    """Neighbourhood attention: each token attends to a window of ``kernel`` tokens along each axis.

    The window is centred on the receiver's coordinate x (an even window has its longer half before x).
    At the border it is moved inside the grid: ``first = clamp(x - kernel // 2, 0, size - kernel)``.
    So every token attends to ``prod(kernel)`` tokens. Each option is one value, or one value for each axis:

    - ``dilation`` d places the same window on the coordinates that are equal to x modulo d; these
      are numbered by ``x // d``;
    - ``causal`` ends the window at x and begins it ``kernel - 1`` before x, or at the border.

    Source: Hassani et al., Neighborhood Attention Transformer (arXiv 2204.07143), dilated
    (2209.15001), causal (2403.04690). attention-gym's ``generate_natten`` agrees for odd kernels
    (its even ones have ``kernel + 1`` tokens). Raises ValueError if ``kernel * dilation`` exceeds
    the grid.

    >>> natten((5,), 3).in_degree().tolist()
    [3, 3, 3, 3, 3]
    """
    sizes = _check_shape(shape)
    kernels = _expand_per_axis("kernel", kernel, sizes)
    dilations = _expand_per_axis("dilation", dilation, sizes)
    flags = _expand_per_axis("causal", causal, sizes, None)
    axes = zip(range(len(sizes)), sizes, kernels, dilations, flags, strict=True)
    intervals = [_make_windows("kernel * dilation", *axis) for axis in axes]
    return TokenGraph.from_rule(_is_in_box(sizes, intervals, dilations), math.prod(sizes))


@builder()
def swin(shape: Sequence[int], window: PerAxis, shift: PerAxis = 0) -> TokenGraph:
    """Windowed attention: each token attends to the tokens of its window.

    Along every axis ``(x - shift) // window`` is the same for sender and receiver. With a ``shift``
    the border windows are smaller. This is Swin's cyclic shift *with* its mask, which separates tokens
    that only the roll makes neighbours. If ``window`` does not divide the grid, the last windows
    are smaller. Layers alternate ``swin(shape, m)`` and ``swin(shape, m, m // 2)``. Source: Liu et
    al. 2021, Swin Transformer (arXiv 2103.14030). Raises ValueError unless ``0 <= shift < window``.

    >>> swin((6,), 3, 1).in_degree().tolist()
    [1, 3, 3, 3, 2, 2]
    """
    sizes = _check_shape(shape)
    windows, shifts = _expand_per_axis("window", window, sizes), _expand_per_axis("shift", shift, sizes, 0)
    for i, (w, s) in enumerate(zip(windows, shifts, strict=True)):
        if s >= w:
            raise ValueError(f"shift must be less than window, got {s} for a window of {w} along axis {i}")
    intervals = [_make_blocks(*axis) for axis in zip(sizes, windows, shifts, strict=True)]
    return TokenGraph.from_rule(_is_in_box(sizes, intervals), math.prod(sizes))


@builder()
def haloed_blocks(shape: Sequence[int], block: PerAxis, halo: PerAxis) -> TokenGraph:
    """Each token attends to its block and a margin of ``halo`` tokens around it, cut at the border.

    For sender y and receiver x the edges are
    ``block * (x // block) - halo <= y < block * (x // block + 1) + halo`` along every axis, so
    inner tokens attend to ``prod(block + 2 halo)`` tokens. The graph is not symmetric. With
    ``block=1`` it is a window around every token. Source: Vaswani et al. 2021, HaloNet (arXiv 2103.12731).

    >>> haloed_blocks((6,), 2, 1).in_degree().tolist()
    [3, 3, 4, 4, 3, 3]
    """
    sizes = _check_shape(shape)
    blocks, halos = _expand_per_axis("block", block, sizes), _expand_per_axis("halo", halo, sizes, 0)
    intervals = [_make_blocks(size, b, 0, h) for size, b, h in zip(sizes, blocks, halos, strict=True)]
    return TokenGraph.from_rule(_is_in_box(sizes, intervals), math.prod(sizes))


@builder()
def axial(shape: Sequence[int], axis: int | None = None) -> TokenGraph:
    """Each token attends to itself and to tokens that differ from it along one axis only.

    In an image these are its row and its column. By default tokens may differ along any axis, as in
    xformers' ``axial_2d_pattern``; the in-degree is ``sum(shape) - len(shape) + 1``. ``axis=a`` allows only
    axis a, as in a layer of Axial Transformers (Ho et al. 2019, arXiv 1912.12180). With one layer
    for each axis, any token reaches any other. Raises IndexError for an axis outside ``0 .. len(shape) - 1``.

    >>> axial((2, 3)).in_degree().tolist()
    [4, 4, 4, 4, 4, 4]
    """
    sizes = _check_shape(shape)
    axes = list(zip(row_major_strides(sizes), sizes, strict=True))
    if axis is not None:
        axes = [axes[checks.index("axis", axis, len(sizes))]]
    line_rules = (
        (dst // (stride * size) == src // (stride * size)) & ((dst - src) % stride == 0)
        for stride, size in axes
    )
    return TokenGraph.from_rule(any_of(line_rules), math.prod(sizes))


@builder()
def image_local_2d(shape: Sequence[int], block: PerAxis, memory: PerAxis) -> TokenGraph:
    """Each pixel attends to its own block so far and to the memory above and beside that block.

    The image is generated block by block; the blocks, and the pixels within a block, are in raster
    order. Outside its block a pixel attends to pixels that were generated before. These are in the
    ``memory[0]`` rows above the block, which extend ``memory[1]`` columns beyond it on both sides,
    and in the ``memory[1]`` columns on its left. Tokens are in row-major order of the image, so an
    edge may come from a later position (in the block to the left), but apart from self loops the
    graph is acyclic. In one dimension it is ``segment_recurrence``. Source: Parmar et al. 2018,
    Image Transformer (arXiv 1802.05751), as in tensor2tensor's ``masked_local_attention_2d``.

    >>> image_local_2d((2, 4), (2, 2), (1, 1)).in_degree().tolist()
    [1, 2, 3, 4, 3, 4, 5, 6]
    """
    sizes = _check_shape(shape)
    if len(sizes) != 2:
        raise ValueError(f"shape must be (height, width), got {sizes}")
    height, width = _expand_per_axis("block", block, sizes)
    rows_above, columns_beside = _expand_per_axis("memory", memory, sizes, 0)
    row, column = src // sizes[1], src % sizes[1]
    top, left = dst // sizes[1] // height * height, dst % sizes[1] // width * width
    bottom, right = top + height, left + width
    is_in_rows = (top - rows_above <= row) & (row < bottom)
    is_in_columns = (left - columns_beside <= column) & (column < right + columns_beside)
    is_generated = (row < top) | (column < left) | ((column < right) & (src <= dst))
    rule = is_in_rows & is_in_columns & is_generated
    return TokenGraph.from_rule(rule, math.prod(sizes))


@builder()
def sliding_tile(shape: Sequence[int], tile: PerAxis, window: PerAxis, tiled: bool = False) -> TokenGraph:
    """All tokens of a tile attend to the same ``window`` tiles along each axis.

    This is ``natten`` between tiles: tile ``t = x // tile`` attends to the ``window`` tiles from
    ``clamp(t - window // 2, 0, size // tile - window)`` on. With ``tiled=True`` the tokens are
    ordered tile by tile, as kernels need, so every block of the mask is empty or full. ``window``
    counts tiles as in FastVideo, while attention-gym's ``kernel_hw`` counts tokens. Source: Zhang
    et al. 2025, Fast Video Generation with Sliding Tile Attention (arXiv 2502.04507). Raises
    ValueError if a tile does not divide the grid or a window has more tiles than an axis.

    >>> sliding_tile((6,), 2, 2).in_degree().tolist()
    [4, 4, 4, 4, 4, 4]
    """
    sizes = _check_shape(shape)
    tiles, windows = _expand_per_axis("tile", tile, sizes), _expand_per_axis("window", window, sizes)
    for axis, (size, t) in enumerate(zip(sizes, tiles, strict=True)):
        if size % t:
            raise ValueError(f"tile must divide the grid, got {t} along axis {axis}, which has {size}")
    num_tiles = tuple(size // t for size, t in zip(sizes, tiles, strict=True))
    intervals = [_make_windows("window", axis, num_tiles[axis], windows[axis]) for axis in range(len(sizes))]
    if tiled:
        # The tokens of a tile are successive here, so each token can have the coordinates of its tile.
        return TokenGraph.from_rule(_is_in_box(num_tiles, intervals, (), math.prod(tiles)), math.prod(sizes))
    for axis, t in enumerate(tiles):
        first, last = (bound.repeat_interleave(t) * t for bound in intervals[axis])
        intervals[axis] = (first, last + t - 1)
    return TokenGraph.from_rule(_is_in_box(sizes, intervals), math.prod(sizes))


@builder(frame_size=1)
def svg_spatial(frames: int, frame_size: int, w: int) -> TokenGraph:
    """Each token of a video attends to tokens less than ``w`` away in the sequence.

    There are ``frames * frame_size`` tokens, and the edges are ``|dst - src| < w``.
    ``memory_tokens(graph, prompt, causal=False)`` adds a prompt. attention-gym's ``width`` counts
    frames: w is ``width * token_per_frame``. Source: the spatial head of Sparse VideoGen (2025,
    arXiv 2502.01776).

    >>> svg_spatial(2, 2, 2).in_degree().tolist()
    [2, 3, 3, 2]
    """
    return TokenGraph.from_rule(abs(dst - src) < w, frames * frame_size)


@builder(frame_size=1)
def svg_temporal(frames: int, frame_size: int, w: int) -> TokenGraph:
    """In every frame, a token of a video attends to the places less than ``w`` away from its own.

    The edges are ``|p(dst) - p(src)| < w``, where ``p(i) = i % frame_size`` is the place in the frame. The
    in-degree is ``frames`` times that of ``window(frame_size, w, causal=False)``. A prompt is added
    as in :func:`svg_spatial`. attention-gym's ``width`` means ``w = width * token_per_frame // num_frames``.
    Source: the temporal head of Sparse VideoGen (2025, arXiv 2502.01776).

    >>> svg_temporal(2, 2, 1).in_degree().tolist()
    [2, 2, 2, 2]
    """
    return TokenGraph.from_rule(abs(dst % frame_size - src % frame_size) < w, frames * frame_size)


def row_major_strides(sizes: Sequence[int]) -> list[int]:
    """Return the distance between neighbours along each axis, counted in row-major order."""
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a grid; raise ValueError if it has no axis or an axis without tokens."""
    sizes = tuple(checks.sizes("shape", shape, 1))
    if not sizes:
        raise ValueError("shape must have at least one axis, got ()")
    return sizes


def _expand_per_axis(name: str, value: Any, sizes: Sizes, minimum: int | None = 1) -> tuple[int, ...]:
    """Return one value for each axis; repeat a single value. With ``minimum=None`` values are flags."""
    checks.check_order(name, value)
    is_list = isinstance(value, Iterable)
    entries = list(value) if is_list else [value] * len(sizes)
    entry_name = f"each entry of {name}" if is_list else name
    if minimum is None:
        values: tuple[int, ...] = tuple(checks.instance(entry_name, entry, bool) for entry in entries)
    else:
        values = tuple(checks.size(entry_name, entry, minimum) for entry in entries)
    if len(values) != len(sizes):
        raise ValueError(
            f"{name} must be one value or {len(sizes)}, one for each axis of {tuple(sizes)}, got {values}"
        )
    return values


def _is_in_box(sizes: Sizes, intervals: Sequence[Intervals], steps: Sizes = (), tile_size: int = 1) -> Any:
    """Return the rule that on every axis the sender is whole steps away, in the receiver's interval."""
    rule = (dst >= 0) & (src >= 0)
    steps = steps or (1,) * len(sizes)
    axes = zip(row_major_strides(sizes), sizes, intervals, steps, strict=True)
    for stride, size, (first, last), step in axes:
        i, j = dst // (stride * tile_size) % size, src // (stride * tile_size) % size
        rule = rule & (look_up(first, i) <= j) & (j <= look_up(last, i))
        rule = rule & ((i - j) % step == 0) if step > 1 else rule
    return rule


def _make_windows(name: str, axis: int, size: int, kernel: int, step: int = 1, causal: int = 0) -> Intervals:
    """Return the window of each coordinate: ``kernel`` coordinates, each ``step`` after the last."""
    if kernel * step > size:
        raise ValueError(f"{name} must fit into the grid, got {kernel * step} along axis {axis} of {size}")
    x = torch.arange(size, device="cpu")
    remainder, index = x % step, x // step
    last_index = (size - 1 - remainder) // step
    if causal:
        return remainder + step * (index - kernel + 1).clamp(min=0), x
    first = torch.minimum((index - kernel // 2).clamp(min=0), last_index - kernel + 1)
    return remainder + step * first, remainder + step * (first + kernel - 1)


def _make_blocks(size: int, block: int, shift: int, halo: int = 0) -> Intervals:
    first = (torch.arange(size, device="cpu") - shift) // block * block + shift
    return (first - halo).clamp(min=0), (first + block - 1 + halo).clamp(max=size - 1)
