"""A rule at a bounded number of pairs, drawn with a fixed seed: by which its edges and tiles are estimated.

Some rows of tiles are drawn, one from each part of the graph, and some receivers in each. Their senders are
all tokens where these are few. Else they are those of some columns of tiles: the ones nearest to the
diagonal, the first, the last, those a power of two away, which regular graphs prefer, and random others, each
of which stands for several. Lists of edges inside a rule are read, not drawn.

Single receivers or senders with many edges, in the middle of the graph, are likely to be missed, and so are
tiles with few edges.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.split_edge_lists import SplitRule, split_edge_lists
from gnn_attention.graph.rules import Rule

# pairs up to which more receivers are drawn than RECEIVERS
PAIRS = 2**18
# of them evaluated together, so that the numbers of a rule stay in the cache
AT_ONCE = 2**17
# rows of tiles, and the receivers in each of them, at least
ROWS, RECEIVERS = 16, 5
# columns of tiles up to which all are taken, else how many, of them on either side of the diagonal
COLUMNS, DRAWN, NEAR = 64, 72, 12


class Sample(NamedTuple):
    """Tiles with an edge at a receiver that was drawn.

    A tile lies in the row ``row`` of the list ``rows`` and in one of the ``columns``. It stands for
    ``weight`` tiles of its row; about ``edges`` of its pairs are edges, all those drawn if ``full``. A row
    stands for ``stands_for`` rows of tiles.
    """

    block: int
    columns: int
    rows: Int[Tensor, " rows"]
    stands_for: Float[Tensor, " rows"]
    row: Int[Tensor, " tiles"]
    column: Int[Tensor, " tiles"]
    weight: Float[Tensor, " tiles"]
    edges: Float[Tensor, " tiles"]
    full: Bool[Tensor, " tiles"]


def sample_tiles(rule: Rule, num_dst: int, num_src: int, block: int, shift: int = 0) -> Sample:
    """The sample of a plain rule; its diagonal is ``src = dst + shift``, stretched where sizes differ."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows, stands_for = _draw_places(-(-num_dst // block), ROWS, (), generator)
    columns, weight = _draw_columns(rows, num_dst, num_src, block, shift, generator)
    pairs = len(rows) * columns.shape[1] * block
    receivers = min(block, max(RECEIVERS, PAIRS // max(pairs, 1)))
    place, each = _draw_places(block, receivers, (len(rows),), generator)
    is_drawn = torch.zeros(-(-num_dst // block), dtype=torch.bool, device="cpu")
    is_drawn[rows] = True
    split = split_edge_lists(rule, num_dst, num_src, is_drawn, block)
    inside = rule if split is None else split.rule
    dst = rows.unsqueeze(1) * block + place
    edge = _evaluate_rows(inside, dst, columns, num_dst, num_src, block)
    found = _tiles_of(edge, columns, weight, each, num_src)
    sample = Sample(block, -(-num_src // block), rows, stands_for, *found)
    return sample if split is None else _with_lists(sample, rule, split)


def _draw_places(
    count: int, number: int, lead: tuple[int, ...], generator: torch.Generator
) -> tuple[Int[Tensor, "... places"], Float[Tensor, " places"]]:
    """``number`` of ``count`` places, and how many each stands for.

    They are the first and the last one, which may be unlike the others, and one of each of equal parts
    between.
    """
    if count <= number:
        every = torch.arange(count, device="cpu").expand(*lead, count)
        return every, torch.ones(count, dtype=torch.float64, device="cpu")
    bounds = torch.linspace(1, count - 1, number - 1, dtype=torch.float64, device="cpu").round()
    sizes = torch.ones(number, dtype=torch.float64, device="cpu")
    sizes[1:-1] = bounds.diff()
    first = torch.cat([bounds.new_zeros(1), bounds])
    chance = torch.rand(*lead, number, generator=generator, dtype=torch.float64, device="cpu")
    return (first + chance * sizes).long(), sizes


def _draw_columns(
    rows: Tensor, num_dst: int, num_src: int, block: int, shift: int, generator: torch.Generator
) -> tuple[Int[Tensor, "rows columns"], Float[Tensor, "rows columns"]]:
    """The columns of tiles for each row, and how many each stands for."""
    count = -(-num_src // block)
    if count <= COLUMNS:
        every = torch.arange(count, device="cpu").expand(len(rows), count)
        return every, torch.ones(len(rows), count, dtype=torch.float64, device="cpu")
    stretched = 1.0 if shift or num_dst == num_src else num_src / num_dst
    middle = ((rows * block * stretched + shift) // block).long().clamp(0, count - 1)
    chance = torch.rand(len(rows), DRAWN, generator=generator, dtype=torch.float64, device="cpu")
    drawn = [_columns_around(*at, count) for at in zip(middle.tolist(), chance.tolist(), strict=True)]
    columns, weight = zip(*drawn, strict=True)
    return torch.tensor(columns, device="cpu"), torch.tensor(weight, dtype=torch.float64, device="cpu")


def _columns_around(middle: int, chances: list[float], count: int) -> tuple[list[int], list[float]]:
    """``DRAWN`` columns, some for sure, and one from each of so many equal parts of the others."""
    near = {0, count - 1, *range(middle - NEAR, middle + NEAR + 1)}
    near |= {middle + sign * 2**k for k in range(20) for sign in (-1, 1)}
    sure = sorted(column for column in near if 0 <= column < count)
    # how many of the others are before each of them
    before = [column - number for number, column in enumerate(sure)]
    number = DRAWN - len(sure)
    each = (count - len(sure)) / number
    places = [int((part + chances[part]) * each) for part in range(number)]
    others = [place + bisect_right(before, place) for place in places]
    return sure + others, [1.0] * len(sure) + [each] * number


def _evaluate_rows(
    rule: Rule, dst: Tensor, columns: Tensor, num_dst: int, num_src: int, block: int
) -> Bool[Tensor, "rows receivers columns block"]:
    # rows of tiles over the same senders share what a rule computes about these
    columns_of = columns[:1] if -(-num_src // block) <= COLUMNS else columns
    dst = dst.unsqueeze(2)
    src = (columns_of.unsqueeze(2) * block + torch.arange(block, device="cpu")).flatten(1).unsqueeze(1)
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    step = max(1, AT_ONCE // max(dst.shape[1] * src.shape[2], 1))
    edges = []
    for start in range(0, len(dst), step):
        to, of = dst[start : start + step], src if len(src) == 1 else src[start : start + step]
        ends = to.clamp(max=num_dst - 1), of.clamp(max=num_src - 1)
        edge = enumerate_pairs.evaluate(rule, "this graph", zero, zero, *ends)
        if num_dst % block or num_src % block:
            edge = edge & (to < num_dst) & (of < num_src)
        edges.append(edge.expand(len(to), dst.shape[1], src.shape[2]))
    return torch.cat(edges).view(*dst.shape[:2], columns.shape[1], block)


def _tiles_of(
    edge: Tensor, columns: Tensor, weight: Tensor, each: Tensor, num_src: int
) -> tuple[Tensor, ...]:
    block = edge.shape[3]
    inside = edge.sum(3, dtype=torch.int32)
    row, place = (inside.sum(1) > 0).nonzero(as_tuple=True)
    column = columns[row, place]
    here = inside[row, :, place]
    width = (num_src - column * block).clamp(max=block)
    edges = (here * each).sum(1)
    full = (here == width.unsqueeze(1)).all(1)
    return row, column, weight[row, place], edges, full


def _with_lists(sample: Sample, rule: Rule, split: SplitRule) -> Sample:
    """The sample of the whole rule: of its lists all pairs in its rows of tiles count."""
    dst, src = split.dst, split.src
    zero = torch.zeros_like(dst)
    at = partial(enumerate_pairs.evaluate, b=zero, h=zero, dst=dst, src=src)
    change = at(rule, "this graph").to(torch.int64) - at(split.rule, "this graph").to(torch.int64)
    columns = sample.columns
    strip = torch.searchsorted(sample.rows, dst // sample.block)
    key = torch.cat([sample.row * columns + sample.column, strip * columns + src // sample.block])
    tile, place = torch.unique(key, return_inverse=True)
    old, new = place[: len(sample.row)], place[len(sample.row) :]
    edges = torch.zeros(len(tile), dtype=torch.float64, device="cpu").index_add_(
        0, old, sample.edges.double()
    )
    edges.index_add_(0, new, change.double())
    weight = torch.ones_like(edges).index_copy_(0, old, sample.weight)
    full = torch.zeros_like(tile, dtype=torch.bool).index_copy_(0, old, sample.full)
    full[new] = False
    some = edges > 0
    return sample._replace(
        row=(tile // columns)[some],
        column=(tile % columns)[some],
        weight=weight[some],
        edges=edges[some],
        full=full[some],
    )
