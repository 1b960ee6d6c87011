"""A rule at a bounded number of pairs, drawn with a fixed seed: by which its edges and tiles are estimated.

Some rows of tiles are drawn, two near each other from each part of the graph, and some receivers in each.
Their senders are all tokens where these are few. Else they are those of some columns of tiles: the ones
nearest to the diagonal, the first, the last, those a power of two away, which regular graphs prefer, and
random others, each of which stands for several. Lists of edges inside a rule are read, not drawn.

A few receivers over many senders (hubs) would be missed or stand for many, so they are looked for first, by
some senders against all receivers of up to ``PROBED``. Their rows of tiles stand for themselves. Senders
that many receivers attend to are looked for in the same way where columns are drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.split_edge_lists import SplitRule, split_edge_lists
from gnn_attention.graph.rules import Rule

# pairs up to which more receivers are drawn than RECEIVERS
PAIRS = 2**18
# of them evaluated together, so that the numbers of a rule stay in the cache
AT_ONCE = 2**17
# rows of tiles, two by two
ROWS = 16
# columns of tiles up to which all are taken, else how many, of them on either side of the diagonal
COLUMNS, DRAWN, NEAR = 64, 72, 12
# receivers in a row of tiles, at least
RECEIVERS = 5
# tokens up to which hubs are looked for, in how many pairs about, at how many tokens at most for each of
# those that remain; which share of these is a hub's; how many pairs of rows of tiles with hubs are drawn
PROBED, PROBES, TOKENS, HUB, HUB_PAIRS = 2**16, 2**15, 32, 1 / 4, 2


class Sample(NamedTuple):
    """Tiles with an edge at a receiver that was drawn, of rows of tiles that come two by two.

    A tile lies in the row ``row`` of the list ``rows`` and in one of the ``columns``. It stands for
    ``weight`` tiles of its row; ``seen`` of the ``receivers`` drawn there, but for the first and the last,
    have an edge in it; about ``edges`` of its pairs are edges, all those drawn if ``full``. A row stands for
    ``stands_for`` rows of tiles; it has a ``hub`` or not.
    """

    block: int
    columns: int
    rows: Int[Tensor, " rows"]
    stands_for: Float[Tensor, " rows"]
    hub: Bool[Tensor, " rows"]
    receivers: int
    row: Int[Tensor, " tiles"]
    column: Int[Tensor, " tiles"]
    weight: Float[Tensor, " tiles"]
    edges: Float[Tensor, " tiles"]
    seen: Int[Tensor, " tiles"]
    full: Bool[Tensor, " tiles"]

    def unseen(self) -> Float[Tensor, " rows"]:
        """About how many more tiles each row has at receivers that were not drawn (Chao, 1987).

        Those of columns that stand for others are left out: their squares would stand for too many.
        """
        once, twice = (
            torch.zeros(len(self.rows), dtype=torch.float64, device="cpu").index_add_(
                0, self.row, ((self.weight == 1) & (self.seen == times)).double()
            )
            for times in (1, 2)
        )
        between = self.receivers - 2
        share = (between - 1) / between if self.receivers < self.block else 0.0
        more = torch.where(twice > 0, once**2 / (2 * twice), once * (once - 1).clamp(min=0) / 2)
        tiles = torch.zeros_like(once).index_add_(0, self.row, self.weight)
        return torch.minimum(share * more, (self.columns - tiles).clamp(min=0))


def sample_tiles(rule: Rule, num_dst: int, num_src: int, block: int, shift: int = 0) -> Sample:
    """The sample of a plain rule; its diagonal is ``src = dst + shift``, stretched where sizes differ."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    of_probes = torch.Generator(device="cpu").manual_seed(1)
    hubs = _draw_hubs(rule, num_dst, num_src, block, of_probes)
    rows, stands_for = _draw_rows(-(-num_dst // block), torch.unique(hubs // block).tolist(), generator)
    hub_columns: list[int] = []
    if num_src > COLUMNS * block:
        reverse = partial(rules.transposed, rule)
        hub_columns = torch.unique(_draw_hubs(reverse, num_src, num_dst, block, of_probes) // block).tolist()
    columns, weight = _draw_columns(rows, hub_columns, num_dst, num_src, block, shift, generator)
    pairs = len(rows) * columns.shape[1] * block
    receivers = min(block, max(RECEIVERS, PAIRS // max(pairs, 1)))
    place, each, hub = _draw_receivers(rows, hubs, receivers, block, generator)
    is_drawn = torch.zeros(-(-num_dst // block), dtype=torch.bool, device="cpu")
    is_drawn[rows] = True
    split = split_edge_lists(rule, num_dst, num_src, is_drawn, block)
    inside = rule if split is None else split.rule
    edge = _evaluate_rows(inside, rows, columns, place, num_dst, num_src, block)
    found = _tiles_of(edge, columns, weight, each, num_src)
    sample = Sample(block, -(-num_src // block), rows, stands_for, hub, receivers, *found)
    return sample if split is None else _with_lists(sample, rule, split)


def _draw_hubs(
    rule: Rule, num_dst: int, num_src: int, block: int, generator: torch.Generator
) -> Int[Tensor, " hubs"]:
    """Receivers with an edge to at least ``HUB`` of some random senders; none unless they are few."""
    hubs = torch.arange(num_dst if num_dst <= PROBED else 0, device="cpu")
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    for number in (min(TOKENS // 4, max(1, PROBES // max(num_dst, 1))), TOKENS):
        if len(hubs) * number > max(PROBES, num_dst):
            return hubs[:0]
        chance = torch.rand(number, generator=generator, dtype=torch.float64, device="cpu")
        src = ((chance + torch.arange(number, device="cpu")) * num_src / number).long()
        edge = enumerate_pairs.evaluate(rule, "this graph", zero, zero, hubs.unsqueeze(1), src)
        hubs = hubs[edge.expand(len(hubs), number).sum(1) >= HUB * number]
    # more are no hubs but blocks, which are drawn like other rows
    few = len(torch.unique(hubs // block)) * 8 <= -(-num_dst // block) and len(hubs) * 32 <= num_dst
    return hubs if few else hubs[:0]


def _draw_rows(rows: int, hubs: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of tiles two by two, the first and the last ones among them, and how many each stands for.

    The two are 1, 2 or 4 rows apart, in both halves of an aligned group of 2, 4 or 8 rows. The rows ``hubs``
    and their neighbours come last and stand for such rows alone.
    """
    if rows <= ROWS:
        return torch.arange(rows, device="cpu"), torch.ones(rows, dtype=torch.float64, device="cpu")
    pairs = sorted({min(hub - hub % 2, rows - 4) for hub in hubs if 2 <= hub < rows - 2})
    hubs = [row for start in pairs for row in (start, start + 1)]
    parts = ROWS // 2 - 2
    bounds = torch.linspace(2, rows - 2, parts + 1, dtype=torch.float64, device="cpu").round().long().tolist()
    chance = torch.rand(parts, generator=generator, dtype=torch.float64, device="cpu").tolist()
    drawn, each = [0, 1], [1.0, 1.0]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        apart = next(d for d in (2 ** (number % 3), 1) if d == 1 or 2 * d < stop - start)
        choices = [row for row in range(start, stop - apart) if row % (2 * apart) < apart] or [start]
        choices = [row for row in choices if row not in hubs and row + apart not in hubs]
        if choices:
            row = choices[int(chance[number] * len(choices))]
            drawn += [row, row + apart]
            each += [(stop - start - sum(start <= hub < stop for hub in hubs)) / 2] * 2
    step = max(1, -(-len(pairs) // HUB_PAIRS))
    some = pairs[(step - 1) // 2 :: step]
    drawn += [rows - 2, rows - 1, *(row for start in some for row in (start, start + 1))]
    each += [1.0, 1.0, *[len(pairs) / max(len(some), 1)] * 2 * len(some)]
    return torch.tensor(drawn, device="cpu"), torch.tensor(each, dtype=torch.float64, device="cpu")


def _draw_columns(
    rows: Tensor,
    hubs: list[int],
    num_dst: int,
    num_src: int,
    block: int,
    shift: int,
    generator: torch.Generator,
) -> tuple[Int[Tensor, "rows columns"], Float[Tensor, "rows columns"]]:
    """The same columns of tiles for both rows of a pair, and how many each stands for."""
    count = -(-num_src // block)
    if count <= COLUMNS:
        every = torch.arange(count, device="cpu").expand(len(rows), count)
        return every, torch.ones(len(rows), count, dtype=torch.float64, device="cpu")
    stretched = 1.0 if shift or num_dst == num_src else num_src / num_dst
    chance = torch.rand(len(rows), DRAWN, generator=generator, dtype=torch.float64, device="cpu").tolist()
    drawn = []
    for row, chances in zip(rows[::2].tolist(), chance, strict=False):
        middle = int((row * block * stretched + shift) // block)
        drawn.append(_columns_around(min(max(middle, 0), count - 1), count, hubs[: 2 * HUB_PAIRS], chances))
    columns, weight = zip(*drawn, strict=True)
    both = torch.tensor(columns, device="cpu"), torch.tensor(weight, dtype=torch.float64, device="cpu")
    each, stands_for = (part.repeat_interleave(2, 0)[: len(rows)] for part in both)
    return each, stands_for


def _columns_around(
    middle: int, count: int, hubs: list[int], chances: list[float]
) -> tuple[list[int], list[float]]:
    """``DRAWN`` columns, some for sure, and one from each of so many equal parts of the others."""
    near = {0, count - 1, *hubs, *range(middle - NEAR, middle + NEAR + 1)}
    near |= {middle + sign * 2**k for k in range(20) for sign in (-1, 1)}
    sure = sorted(column for column in near if 0 <= column < count)
    # how many of the others are before each of them
    before = [column - number for number, column in enumerate(sure)]
    number = DRAWN - len(sure)
    each = (count - len(sure)) / number
    places = [int((part + chances[part]) * each) for part in range(number)]
    others = [place + bisect_right(before, place) for place in places]
    return sure + others, [1.0] * len(sure) + [each] * number


def _draw_receivers(
    rows: Tensor, hubs: Tensor, receivers: int, block: int, generator: torch.Generator
) -> tuple[Int[Tensor, "rows receivers"], Float[Tensor, "rows receivers"], Bool[Tensor, " rows"]]:
    """Some receivers of each row of tiles, how many each stands for, and whether the row has a hub.

    They are the first and the last one, which may reach further than others, and some between. The first
    hub of a row takes the place of the first receiver and stands for all of them.
    """
    number = torch.bincount(hubs // block, minlength=int(rows.max()) + 1 if len(rows) else 0)[rows]
    each = torch.ones(len(rows), receivers, dtype=torch.float64, device="cpu")
    if receivers == block:
        return torch.arange(block, device="cpu").expand(len(rows), block), each, number > 0
    place = torch.rand(len(rows), receivers, generator=generator, dtype=torch.float64, device="cpu")
    between = receivers - 2
    place = 1 + ((place + torch.arange(-1, between + 1, device="cpu")) * (block - 2) / between).long()
    place[:, 0], place[:, -1] = 0, block - 1
    each[:, 1:-1] = (block - 2) / between
    for at in number.nonzero()[:, 0].tolist():
        inside = hubs[hubs // block == rows[at]] % block
        place[at, 0] = inside[0]
        other = ~torch.isin(place[at], inside)
        each[at] = other * ((block - len(inside)) / max(int(other.sum()), 1))
        each[at, 0] = len(inside)
    return place, each, number > 0


def _evaluate_rows(
    rule: Rule, rows: Tensor, columns: Tensor, place: Tensor, num_dst: int, num_src: int, block: int
) -> Bool[Tensor, "rows receivers columns block"]:
    receivers = place.shape[1]
    # rows of tiles over the same senders share what a rule computes about these
    shared, together = -(-num_src // block) <= COLUMNS, 2 - len(rows) % 2
    dst = (rows.unsqueeze(1) * block + place).view(len(rows) // together, together * receivers, 1)
    columns_of = columns[:1] if shared else columns[::together]
    src = columns_of.unsqueeze(2) * block + torch.arange(block, device="cpu")
    src = src.view(len(columns_of), 1, -1)
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    step = max(1, AT_ONCE // max(dst.shape[1] * src.shape[2], 1))
    edges = []
    for start in range(0, len(dst), step):
        to, of = dst[start : start + step], src if shared else src[start : start + step]
        ends = to.clamp(max=num_dst - 1), of.clamp(max=num_src - 1)
        edge = enumerate_pairs.evaluate(rule, "this graph", zero, zero, *ends)
        if num_dst % block or num_src % block:
            edge = edge & (to < num_dst) & (of < num_src)
        edges.append(edge.expand(len(to), dst.shape[1], src.shape[2]))
    return torch.cat(edges).view(len(rows), receivers, columns.shape[1], block)


def _tiles_of(
    edge: Tensor, columns: Tensor, weight: Tensor, each: Tensor, num_src: int
) -> tuple[Tensor, ...]:
    block = edge.shape[3]
    inside = edge.sum(3, dtype=torch.int32)
    row, place = (inside.sum(1) > 0).nonzero(as_tuple=True)
    column = columns[row, place]
    here = inside[row, :, place]
    width = (num_src - column * block).clamp(max=block)
    edges = (here * each[row]).sum(1)
    full = (here == width.unsqueeze(1)).all(1)
    # the first and the last receiver are not like the others
    return row, column, weight[row, place], edges, (here[:, 1:-1] > 0).sum(1), full


def _with_lists(sample: Sample, rule: Rule, split: SplitRule) -> Sample:
    """The sample of the whole rule: of its lists all pairs in its rows of tiles count."""
    dst, src = split.dst, split.src
    zero = torch.zeros_like(dst)
    at = partial(enumerate_pairs.evaluate, b=zero, h=zero, dst=dst, src=src)
    change = at(rule, "this graph").to(torch.int64) - at(split.rule, "this graph").to(torch.int64)
    columns = sample.columns
    order = sample.rows.argsort()
    strip = order[torch.searchsorted(sample.rows[order], dst // sample.block)]
    key = torch.cat([sample.row * columns + sample.column, strip * columns + src // sample.block])
    tile, place = torch.unique(key, return_inverse=True)
    old, new = place[: len(sample.row)], place[len(sample.row) :]
    edges = torch.zeros(len(tile), dtype=torch.float64, device="cpu").index_add_(
        0, old, sample.edges.double()
    )
    edges.index_add_(0, new, change.double())
    weight = torch.ones_like(edges).index_copy_(0, old, sample.weight)
    # a listed tile is known: no unseen one is like it
    seen = torch.full_like(tile, sample.receivers).index_copy_(0, old, sample.seen)
    full = torch.zeros_like(tile, dtype=torch.bool).index_copy_(0, old, sample.full)
    full[new] = False
    some = edges > 0
    return sample._replace(
        row=(tile // columns)[some],
        column=(tile % columns)[some],
        weight=weight[some],
        edges=edges[some],
        seen=seen[some],
        full=full[some],
    )
