"""The senders of each receiver as rows of numbers, one graph for each sample and head: all of a chosen graph.

A selection gives every receiver a list of senders. Sorted and without what stands twice that is a sparse
matrix in rows, of all samples and heads one after the other; nothing here is as large as tokens x tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.dynamo import eagerly
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.edge_list import SIGNED, elements
from gnn_attention.graph.regions.enumerate_pairs import Shape
from gnn_attention.graph.rules import Rule

# the word for coalesce
COUNT = "count"
# of tokens, of blocks: what a row of an index is
RECEIVERS = "receiver", "block of receivers"
# a pinned rule has one sample and head already
MADE_OF_RULES = (rules.or_, rules.and_, rules.minus, rules.xor, rules.not_, rules.transposed, rules.shifted)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The senders of receiver ``dst`` of sample b and head h are ``src[ptr[r]] .. src[ptr[r + 1] - 1]``.

    ``r = (b * heads + h) * num_dst + dst``; they ascend, and none stands twice. ``shape`` is ``(batch, heads,
    num_dst, num_src)``, with 1 where the graph does not differ. ``listed`` are the edges of one sample and
    head in the order of the index that they came from; without it they are listed by receiver, then sender.
    """

    ptr: Int[Tensor, " rows_and_one"]
    src: Int[Tensor, " edges"]
    shape: Shape
    listed: Int[Tensor, "2 edges"] | None = None

    @classmethod
    def of_edges(cls, row: Int[Tensor, " edges"], src: Int[Tensor, " edges"], shape: Shape) -> Neighbours:
        """Those of edges in order, without duplicates; ``row`` is r."""
        ends = torch.bincount(row, minlength=math.prod(shape[:3])).cumsum(0)
        return cls(torch.cat([ends.new_zeros(1), ends]), src.to(torch.int32), shape)

    @property
    def slices(self) -> int:
        """Samples times heads."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def keys(self) -> Int[Tensor, " edges_and_one"]:
        """``r * num_src + src`` of every edge, ascending, and the largest int64."""
        row = torch.repeat_interleave(self.ptr.diff())
        # so that every search ends inside the table
        last = row.new_tensor([torch.iinfo(torch.int64).max])
        return torch.cat([row.mul_(self.shape[3]).add_(self.src), last])

    @cached_property
    def bounds(self) -> list[int]:
        """Where the edges of each slice begin, and where the last end."""
        num_dst = self.shape[2]
        return self.ptr[::num_dst].tolist() if num_dst else [0] * (self.slices + 1)

    def degrees(self) -> Int[Tensor, "batch heads dst"]:
        """How many senders each receiver has, on the CPU."""
        return self.ptr.diff().view(self.shape[:3]).cpu()

    def rows(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """``ptr`` and ``src`` of some rows, counted through samples and heads."""
        ptr = self.ptr[first : stop + 1]
        begin, end = ptr[[0, -1]].tolist()
        return ptr - begin, self.src[begin:end]

    def at(self, batch: int, head: int) -> Neighbours:
        """Those of one sample and head."""
        slice_, num_dst = batch * self.shape[1] + head, self.shape[2]
        rows = self.rows(slice_ * num_dst, (slice_ + 1) * num_dst)
        return Neighbours(*rows, (1, 1, *self.shape[2:]))

    def between(self, start: int, stop: int) -> Neighbours:
        """Those of the receivers ``start .. stop - 1`` of every sample and head."""
        first = range(0, self.slices * self.shape[2], self.shape[2])
        parts = [self.rows(row + start, row + stop) for row in first]
        count = torch.cat([ptr.diff() for ptr, _ in parts]).cumsum(0)
        src = torch.cat([src for _, src in parts])
        listed = self.listed
        if listed is not None:
            listed = listed[:, (listed[1] >= start) & (listed[1] < stop)] - listed.new_tensor([[0], [start]])
        shape = (*self.shape[:2], stop - start, self.shape[3])
        return Neighbours(torch.cat([count.new_zeros(1), count]), src, shape, listed)

    def edges(self) -> Int[Tensor, "2 edges"]:
        """The edges of one sample and head in the order of ``edge_index``, int64 on the CPU."""
        if self.listed is not None:
            return self.listed.cpu()
        count = self.ptr.diff().cpu()
        dst = torch.repeat_interleave(torch.arange(len(count), device="cpu"), count)
        return torch.stack([self.src.to("cpu", torch.int64), dst])


def is_neighbour(of: Neighbours, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """The rule of a chosen graph."""
    return rules.is_listed(of.keys, of.shape[3], b, h, _row(of.shape, b, h, dst), src)


def _row(shape: Shape, b: Tensor, h: Tensor, dst: Tensor) -> Tensor:
    batch, heads, num_dst, _ = shape
    row = dst if heads == 1 else h * num_dst + dst
    return row if batch == 1 else b * (heads * num_dst) + row


@dataclass(frozen=True, eq=False)
class log_count:  # noqa: N801 (a score_mod, named as those of score_mods)
    """``score + log m`` where src stands m times for dst, of sample b and head h of a graph of this shape.

    ``keys`` are those of :class:`Neighbours` with m > 1, ascending, and the largest int64; ``logs`` theirs.
    """

    keys: Int[Tensor, " repeated_and_one"]
    logs: Float[Tensor, " repeated_and_one"]
    shape: Shape

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        keys, logs = self.keys.to(score.device), self.logs.to(score.device, score.dtype)
        key = _row(self.shape, b, h, dst).to(torch.int64) * self.shape[3] + src
        place = torch.searchsorted(keys, key)
        return score + torch.where(keys[place] == key, logs[place], 0.0)


def neighbours_of(rule: Rule) -> Neighbours | None:
    """What the rule of a chosen graph looks up; None for another rule."""
    return rule.args[0] if isinstance(rule, partial) and rule.func is is_neighbour else None


def pinned_at(rule: Rule, batch: int, head: int) -> Rule:
    """The rule for one sample and head; what it looks up is that of these alone."""
    if not isinstance(rule, partial) or not has_neighbours(rule):
        return partial(rules.pinned, rule, batch, head)
    if (of := neighbours_of(rule)) is not None:
        # an index of one head serves all
        return partial(is_neighbour, of.at(batch if of.shape[0] > 1 else 0, head if of.shape[1] > 1 else 0))
    parts = (pinned_at(part, batch, head) if callable(part) else part for part in rule.args)
    return partial(rule.func, *parts)


def keys_of(rule: Rule) -> tuple[Int[Tensor, " edges"], int] | None:
    """``(dst * width + src, width)`` of the edges that a rule of one list looks up; None for another rule."""
    if isinstance(rule, partial) and rule.func is rules.is_listed:
        return rule.args[0][:-1], rule.args[1]
    of = neighbours_of(rule)
    return None if of is None or of.slices > 1 else (of.keys[:-1].cpu(), of.shape[3])


def has_neighbours(rule: Rule) -> bool:
    """Whether the rule of a chosen graph is in what operators and methods of graphs made."""
    if not isinstance(rule, partial) or rule.func not in MADE_OF_RULES:
        return neighbours_of(rule) is not None
    return any(has_neighbours(part) for part in rule.args if callable(part))


def listed(
    index: Tensor, num_src: int, count: Tensor | None, blocks: bool = False
) -> Int[Tensor, "batch heads dst most"]:
    """A copy of the checked index with four axes, int32 if it can be; ``num_src`` for what is none."""
    if not isinstance(index, Tensor) or index.dtype not in SIGNED:
        advice = "torch.as_tensor(index).long() makes one of other integers, convert.from_mask takes a mask"
        wanted = "a tensor of signed integers [..., dst, K]"
        raise TypeError(f"index must be {wanted}, got {quoted(index)}; {advice}")
    index = elements("index", index)
    if not 2 <= index.dim() <= 4 or 0 in index.shape[:-2]:
        forms = "[dst, K], [heads, dst, K] or [batch, heads or 1, dst, K]"
        raise ValueError(f"index must be {forms}, got shape {list(index.shape)}")
    table = index.detach()[(None,) * (4 - index.dim())]
    if count is not None:
        table = table.masked_fill(~_counted(index, count).view(table.shape), -1)
    lowest, highest = (int(x) for x in table.aminmax()) if table.numel() else (0, -1)
    if lowest < -1 or highest >= num_src:
        raise IndexError(_outside(table, num_src, blocks))
    dtype = torch.int32 if num_src < 2**31 else torch.int64
    table = table.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return table.masked_fill_(table < 0, num_src) if lowest < 0 else table


def _counted(index: Tensor, count: Tensor) -> Bool[Tensor, "..."]:
    """Which entries are valid: the first ``count`` of each receiver."""
    if not isinstance(count, Tensor) or count.dtype not in SIGNED:
        raise TypeError(f"count must be a tensor of signed integers, got {quoted(count)}")
    count = elements("count", count)
    if count.shape != index.shape[:-1]:
        raise ValueError(f"count must be {list(index.shape[:-1])}, index without K, got {list(count.shape)}")
    most = index.shape[-1]
    if count.numel() and (int(count.min()) < 0 or int(count.max()) > most):
        got = f"{int(count.min())} .. {int(count.max())}"
        raise IndexError(f"count must be in 0 .. {most}, the K of index, got {got}")
    return torch.arange(most, device=index.device) < count.unsqueeze(-1)


def _outside(table: Tensor, num_src: int, blocks: bool) -> str:
    place = ((table < -1) | (table >= num_src)).nonzero()[0].tolist()
    what = f"{int(table[tuple(place)])} for {RECEIVERS[blocks]} {place[2]}{_slice_named(table, place)}"
    senders = f"{num_src} blocks of senders" if blocks else f"num_src={num_src}"
    return f"index holds {what}: expected 0 .. {num_src - 1} ({senders}), or -1 for none"


def _slice_named(table: Tensor, place: list[int]) -> str:
    axes = zip(("sample", "head"), table.shape[:2], place, strict=False)
    return "".join(f" of {word} {at}" for word, size, at in axes if size > 1)


class Rows:
    """Sorted rows of an index, what is an edge in them, and how often: ``once`` if that is known."""

    blocks = False

    def __init__(self, table: Int[Tensor, "batch heads dst most"], num_src: int, once: bool = False) -> None:
        # what is as large as the index is written once: of fresh memory pages cost more than the work
        self.num_src, self.given = num_src, table.clone() if table.shape[:2] == (1, 1) else table
        if table.device.type == "cpu":
            # torch takes twenty times as long for many short rows
            table.numpy().sort(axis=-1)
        self.sorted = table if table.device.type == "cpu" else table.sort(dim=-1).values
        self.valid, self.repeats = self.sorted < num_src, None
        if once:
            return
        repeats = (self.sorted[..., 1:] == self.sorted[..., :-1]).logical_and_(self.valid[..., 1:])
        self.repeats = torch.nn.functional.pad(repeats, (1, 0)) if bool(repeats.any()) else None

    def check_distinct(self) -> None:
        """ValueError that names a sender that stands twice."""
        if self.repeats is None:
            return
        place = self.repeats.nonzero()[0].tolist()
        src = int(self.sorted[tuple(place)])
        what = f"{'block' if self.blocks else 'sender'} {src} more than once for {RECEIVERS[self.blocks]}"
        what += f" {place[2]}{_slice_named(self.sorted, place)} (entries that repeat: {self.repeats.sum()})"
        advice = "pass coalesce=True to take it once, or coalesce='count' to weigh it by its multiplicity"
        advice = "put -1 in the place of all but one" if self.blocks else advice
        raise ValueError(f"index holds {what}, but a graph is a set: {advice}")

    def check_causal(self) -> None:
        """ValueError that names an edge from a later token."""
        table = self.sorted
        dst = torch.arange(table.shape[2], device=table.device, dtype=table.dtype).unsqueeze(-1)
        late = (self.sorted > dst).logical_and_(self.valid)
        if bool(late.any()):
            place = late.nonzero()[0].tolist()
            edge = f"{int(self.sorted[tuple(place)])} -> {place[2]}{_slice_named(self.sorted, place)}"
            advice = "put -1 in its place, or leave causal out"
            raise ValueError(f"index holds the edge {edge}, which is not causal (src <= dst): {advice}")

    @cached_property
    def edge(self) -> Bool[Tensor, "batch heads dst most"]:
        """Which entries are edges: valid, and the first of their kind."""
        return self.valid if self.repeats is None else self.valid & ~self.repeats

    def multiplicity(self) -> log_count:
        """What weighs each sender by how often it stands."""
        row = torch.arange(math.prod(self.sorted.shape[:3]), device=self.sorted.device)
        keys = row.view(*self.sorted.shape[:3], 1) * self.num_src + self.sorted
        once, number = torch.unique_consecutive(keys[self.valid], return_counts=True)
        often = number > 1
        last = once.new_tensor([torch.iinfo(torch.int64).max])
        logs = torch.nn.functional.pad(number[often].double().log(), (0, 1))
        return log_count(torch.cat([once[often], last]), logs, (*self.sorted.shape[:3], self.num_src))

    def neighbours(self) -> Neighbours:
        # slice by slice, for torch widens what it adds up
        ends = torch.cat([edge.sum(-1) for edge in self.edge.flatten(0, 1)]).cumsum(0)
        ptr = torch.cat([ends.new_zeros(1), ends])
        whole = int(ptr[-1]) == self.edge.numel()
        src = self.sorted.flatten() if whole else _where(self.sorted, self.edge)
        return Neighbours(ptr, src, (*self.sorted.shape[:3], self.num_src))

    def table(self) -> Bool[Tensor, "batch heads dst src"]:
        """The mask: where few tokens, or blocks of them, are chosen."""
        cells = self.edge.new_zeros(*self.edge.shape[:3], self.num_src + 1)
        return cells.scatter_(-1, self.sorted.long(), self.valid)[..., :-1]

    def edges(self) -> Int[Tensor, "2 edges"]:
        """The edges of one sample and head as they stand in the index, int64."""
        table, edge = self.given[0, 0], self.given[0, 0] < self.num_src
        if self.repeats is not None:
            order = table.sort(dim=-1, stable=True).indices
            edge = torch.zeros_like(edge).scatter(-1, order, self.edge[0, 0])
        dst = torch.arange(len(edge), device=edge.device).unsqueeze(-1).expand_as(edge)
        return torch.stack([table[edge].long(), dst[edge]])


def _where(x: Tensor, chosen: Bool[Tensor, "..."]) -> Int[Tensor, " chosen"]:
    # torch numbers all entries in int64 first
    on_cpu = x.device.type == "cpu"
    return torch.from_numpy(x.numpy()[chosen.numpy()]) if on_cpu else torch.masked_select(x, chosen)


def of_tokens(
    index: Tensor, num_src: int, count: Tensor | None, coalesce: object, causal: bool
) -> tuple[dict[str, Any], log_count | None]:
    """The fields of ``TokenGraph.from_indices``, and the multiplicity if it is asked for."""
    if not isinstance(coalesce, bool) and coalesce != COUNT:
        raise ValueError(f"coalesce must be True, False or {COUNT!r}, got {quoted(coalesce)}")
    num_src = checks.size("num_src", num_src)
    with eagerly():
        rows = Rows(listed(index, num_src, count), num_src)
        if not coalesce:
            rows.check_distinct()
        if causal:
            rows.check_causal()
        chosen, on_cpu = rows.neighbours(), index.device.type == "cpu"
        if index.dim() == 2 and not on_cpu:
            # a list for the host would wait for the device; most calls need none
            chosen = replace(chosen, listed=rows.edges())
        fields = fields_of(chosen, *varying_sizes(index))
        if index.dim() == 2 and on_cpu:
            fields["_listed"] = rows.edges()
        return fields, rows.multiplicity() if coalesce == COUNT else None


def of_blocks(index: Tensor, block_size: int, num_dst: int, num_src: int, causal: bool) -> dict[str, Any]:
    """The fields of ``TokenGraph.from_block_indices``."""
    with eagerly():
        rows = rows_of_blocks(index, block_size, num_dst, num_src)
        table = rows.table()[(0,) * (4 - index.dim())].cpu()
    batch, heads = varying_sizes(index)
    rule = rules.past(partial(rules.chosen, table, block_size, block_size), causal)
    return {"rule": rule, "num_dst": num_dst, "num_src": num_src, "heads": heads, "batch": batch}


def rows_of_blocks(index: Tensor, block_size: int, num_dst: int, num_src: int) -> Rows:
    """The checked rows of chosen blocks, of which none stands twice."""
    num_dst, num_src = checks.size("num_dst", num_dst), checks.size("num_src", num_src)
    columns = -(-num_src // checks.size("block_size", block_size, 1))
    rows = Rows(listed(index, columns, None, blocks=True), columns)
    rows.blocks = True
    check_blocks(index, block_size, num_dst)
    rows.check_distinct()
    return rows


def check_blocks(index: Tensor, block_size: int, num_dst: int) -> None:
    """ValueError unless there is a row for each block of receivers."""
    if index.shape[-2] != (due := -(-num_dst // block_size)):
        got = f"{index.shape[-2]} for {num_dst} receivers in blocks of {block_size}"
        raise ValueError(f"index must have a row for each of the {due} blocks of receivers, got {got}")


def fields_of(of: Neighbours, batch: int | None, heads: int | None) -> dict[str, Any]:
    """Those of a graph of chosen senders, without a list."""
    sizes = {"num_dst": of.shape[2], "num_src": of.shape[3], "heads": heads, "batch": batch}
    return {"rule": partial(is_neighbour, of), **sizes}


def varying_sizes(index: Tensor) -> tuple[int | None, int | None]:
    """``(batch, heads)`` by which the graph of an index differs."""
    heads = index.shape[-3] if index.dim() > 2 else 1
    return index.shape[0] if index.dim() == 4 else None, heads if index.dim() == 3 or heads > 1 else None
