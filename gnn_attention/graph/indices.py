"""From an index ``[..., dst, K]`` of chosen senders, or blocks of senders, to edges.

The rows of an index, sorted and without repetition, are a sparse matrix in rows of all samples and heads, one
after the other. Nothing here is as large as tokens x tokens.
"""

from __future__ import annotations

import math
from functools import cached_property, partial

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.dynamo import eager_mode
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import edge_list, rules
from gnn_attention.graph.edge_list import SIGNED, elements
from gnn_attention.graph.edges import ChosenEdges, RuleEdges, log_count

# the word for coalesce
COUNT = "count"
# of tokens, of blocks: what a row of an index is
RECEIVERS = "receiver", "block of receivers"


def read_table(
    index: Tensor, num_src: int, count: Tensor | None, blocks: bool = False
) -> Int[Tensor, "batch heads dst most"]:
    """A copy of the checked index with four axes, int32 if it can be; ``num_src`` for what is none."""
    if not isinstance(index, Tensor) or index.dtype not in SIGNED:
        advice = "torch.as_tensor(index).long() makes one of other integers, convert.from_mask takes a mask"
        wanted = "a tensor of signed integers [..., dst, K]"
        raise TypeError(f"index must be {wanted}, got {quote(index)}; {advice}")
    index = elements("index", index)
    if not 2 <= index.dim() <= 4 or 0 in index.shape[:-2]:
        forms = "[dst, K], [heads, dst, K] or [batch, heads or 1, dst, K]"
        raise ValueError(f"index must be {forms}, got shape {list(index.shape)}")
    table = index.detach()[(None,) * (4 - index.dim())]
    if count is not None:
        table = table.masked_fill(~_valid_entries(index, count).view(table.shape), -1)
    lowest, highest = (int(x) for x in table.aminmax()) if table.numel() else (0, -1)
    if lowest < -1 or highest >= num_src:
        src, dst = _find_first(table, (table < -1) | (table >= num_src))
        senders = f"{num_src} blocks of senders" if blocks else f"num_src={num_src}"
        expected = f"0 .. {num_src - 1} ({senders}), or -1 for none"
        raise IndexError(f"index holds {src} for {RECEIVERS[blocks]} {dst}: expected {expected}")
    dtype = torch.int32 if num_src < 2**31 else torch.int64
    table = table.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return table.masked_fill_(table < 0, num_src) if lowest < 0 else table


def _valid_entries(index: Tensor, count: Tensor) -> Bool[Tensor, "..."]:
    """Which entries are valid: the first ``count`` of each receiver."""
    if not isinstance(count, Tensor) or count.dtype not in SIGNED:
        raise TypeError(f"count must be a tensor of signed integers, got {quote(count)}")
    count = elements("count", count)
    if count.shape != index.shape[:-1]:
        raise ValueError(f"count must be {list(index.shape[:-1])}, index without K, got {list(count.shape)}")
    most = index.shape[-1]
    if count.numel() and (int(count.min()) < 0 or int(count.max()) > most):
        got = f"{int(count.min())} .. {int(count.max())}"
        raise IndexError(f"count must be in 0 .. {most}, the K of index, got {got}")
    return torch.arange(most, device=index.device) < count.unsqueeze(-1)


def _find_first(table: Tensor, wrong: Tensor) -> tuple[int, str]:
    """The first wrong entry, and its receiver in words."""
    place = wrong.nonzero()[0].tolist()
    axes = zip(("sample", "head"), table.shape[:2], place, strict=False)
    of = "".join(f" of {word} {at}" for word, size, at in axes if size > 1)
    return int(table[tuple(place)]), f"{place[2]}{of}"


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
        src, dst = _find_first(self.sorted, self.repeats)
        sender = f"{'block' if self.blocks else 'sender'} {src}"
        what = f"{sender} more than once for {RECEIVERS[self.blocks]} {dst}"
        advice = "pass coalesce=True to take it once, or coalesce='count' to weigh it by its multiplicity"
        advice = "put -1 in the place of all but one" if self.blocks else advice
        repeats = f"(entries that repeat: {self.repeats.sum()})"
        raise ValueError(f"index holds {what} {repeats}, but a graph is a set: {advice}")

    def check_causal(self) -> None:
        """ValueError that names an edge from a later token."""
        table = self.sorted
        dst = torch.arange(table.shape[2], device=table.device, dtype=table.dtype).unsqueeze(-1)
        late = (table > dst).logical_and_(self.valid)
        if bool(late.any()):
            edge = "{} -> {}".format(*_find_first(table, late))
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
        return log_count.of(keys[self.valid], (*self.sorted.shape[:3], self.num_src))

    def choose(self) -> ChosenEdges:
        """The edges; of one sample and head in the order of the index."""
        # Slice by slice, because torch widens what it adds up.
        ends = torch.cat([edge.sum(-1) for edge in self.edge.flatten(0, 1)]).cumsum(0)
        ptr = torch.cat([ends.new_zeros(1), ends])
        whole = int(ptr[-1]) == self.edge.numel()
        src = self.sorted.flatten() if whole else self.sorted[self.edge]
        in_order = self.edges() if self.sorted.shape[:2] == (1, 1) else None
        return ChosenEdges(ptr, src, (*self.sorted.shape[:3], self.num_src), in_order)

    def edges(self) -> Int[Tensor, "2 edges"]:
        """The edges of one sample and head as they stand in the index, int64."""
        table, edge = self.given[0, 0], self.given[0, 0] < self.num_src
        if self.repeats is not None:
            order = table.sort(dim=-1, stable=True).indices
            edge = torch.zeros_like(edge).scatter(-1, order, self.edge[0, 0])
        dst = torch.arange(len(edge), device=edge.device).unsqueeze(-1).expand_as(edge)
        return torch.stack([table[edge].long(), dst[edge]])


def read_senders(
    index: Tensor, num_src: int, count: Tensor | None, coalesce: object, causal: bool
) -> tuple[ChosenEdges, log_count | None]:
    """The edges of ``TokenGraph.from_indices``, and the multiplicity if it is asked for."""
    if not isinstance(coalesce, bool) and coalesce != COUNT:
        raise ValueError(f"coalesce must be True, False or {COUNT!r}, got {quote(coalesce)}")
    num_src = checks.size("num_src", num_src)
    with eager_mode():
        rows = Rows(read_table(index, num_src, count), num_src)
        if not coalesce:
            rows.check_distinct()
        if causal:
            rows.check_causal()
        return rows.choose(), rows.multiplicity() if coalesce == COUNT else None


def read_blocks(index: Tensor, block_size: int, num_dst: int, num_src: int, causal: bool) -> RuleEdges:
    """The edges of ``TokenGraph.from_block_indices``: the rule of a table of blocks."""
    with eager_mode():
        blocks = rows_of_blocks(index, block_size, num_dst, num_src).choose()
        table = edge_list.mask(blocks.keys(), blocks.shape)[(0,) * (4 - index.dim())].cpu()
    return RuleEdges(rules.past(partial(rules.look_up_blocks, table, block_size, block_size), causal))


def rows_of_blocks(index: Tensor, block_size: int, num_dst: int, num_src: int) -> Rows:
    """The checked rows of chosen blocks, of which none stands twice."""
    num_dst, num_src = checks.size("num_dst", num_dst), checks.size("num_src", num_src)
    columns = -(-num_src // checks.size("block_size", block_size, 1))
    rows = Rows(read_table(index, columns, None, blocks=True), columns)
    rows.blocks = True
    check_blocks(index, block_size, num_dst)
    rows.check_distinct()
    return rows


def check_blocks(index: Tensor, block_size: int, num_dst: int) -> None:
    """ValueError unless there is a row for each block of receivers."""
    if index.shape[-2] != (due := -(-num_dst // block_size)):
        got = f"{index.shape[-2]} for {num_dst} receivers in blocks of {block_size}"
        raise ValueError(f"index must have a row for each of the {due} blocks of receivers, got {got}")


def varying_sizes(index: Tensor) -> tuple[int | None, int | None]:
    """``(batch, heads)`` by which the graph of an index differs."""
    heads = index.shape[-3] if index.dim() > 2 else 1
    return index.shape[0] if index.dim() == 4 else None, heads if index.dim() == 3 or heads > 1 else None
