"""Edges from an index ``[..., dst, K]`` of chosen senders, or of chosen blocks of senders.

The rows of all samples and heads, sorted and without repeats, are concatenated into one CSR matrix.
No tensor has tokens x tokens elements.
"""

import math
from functools import cached_property, partial

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.dynamo import eager_mode
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import edge_list, rules
from gnn_attention.graph.edge_list import SIGNED_DTYPES, unwrap_tensor
from gnn_attention.graph.edges import ChosenEdges, RuleEdges, log_count

# With this value of coalesce, repeated senders are counted.
COUNT_MODE = "count"


def read_index(
    index: Tensor, num_src: int, count: Tensor | None, blocks: bool = False
) -> Int[Tensor, "batch heads dst K"]:
    """Return a checked copy of an index with four axes, int32 if possible. ``num_src`` replaces -1."""
    if not isinstance(index, Tensor) or index.dtype not in SIGNED_DTYPES:
        raise TypeError(
            f"index must be a tensor of signed integers [..., dst, K], got {quote(index)}; use "
            "torch.as_tensor(index).long() for other integers, convert.from_mask for a mask"
        )
    index = unwrap_tensor("index", index)
    if not 2 <= index.dim() <= 4 or 0 in index.shape[:-2]:
        shape = list(index.shape)
        raise ValueError(
            f"index must be [dst, K], [heads, dst, K] or [batch, heads or 1, dst, K], got {shape}"
        )
    values = index.detach()[(None,) * (4 - index.dim())]
    if count is not None:
        values = values.masked_fill(~_valid_mask(index, count).view(values.shape), -1)
    min_src, max_src = (int(bound) for bound in values.aminmax()) if values.numel() else (0, -1)
    if min_src < -1 or max_src >= num_src:
        src, dst = _find_first_entry(values, (values < -1) | (values >= num_src))
        receiver = "block of receivers" if blocks else "receiver"
        senders = f"{num_src} blocks of senders" if blocks else f"num_src={num_src}"
        raise IndexError(
            f"index holds {src} for {receiver} {dst}: expected 0 .. {num_src - 1} ({senders}), or -1 for none"
        )
    dtype = torch.int32 if num_src < 2**31 else torch.int64
    values = values.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return values.masked_fill_(values < 0, num_src) if min_src < 0 else values


def _valid_mask(index: Tensor, count: Tensor) -> Bool[Tensor, "..."]:
    """Return which entries are valid: the first ``count`` of each receiver."""
    if not isinstance(count, Tensor) or count.dtype not in SIGNED_DTYPES:
        raise TypeError(f"count must be a tensor of signed integers, got {quote(count)}")
    count = unwrap_tensor("count", count)
    if count.shape != index.shape[:-1]:
        raise ValueError(f"count must have shape {list(index.shape[:-1])}, got {list(count.shape)}")
    width = index.shape[-1]
    low, high = (int(count.min()), int(count.max())) if count.numel() else (0, 0)
    if low < 0 or high > width:
        raise IndexError(f"count must be in 0 .. {width}, the K of index, got {low} .. {high}")
    return torch.arange(width, device=index.device) < count.unsqueeze(-1)


def _find_first_entry(values: Tensor, is_wrong: Tensor) -> tuple[int, str]:
    """Return the first wrong entry of an index, and its receiver, head and sample as text."""
    index = is_wrong.nonzero()[0].tolist()
    axes = zip(("sample", "head"), values.shape[:2], index, strict=False)
    location = "".join(f" of {axis} {position}" for axis, size, position in axes if size > 1)
    return int(values[tuple(index)]), f"{index[2]}{location}"


class Rows:
    """The sorted rows of an index, with masks of their valid and repeated entries."""

    def __init__(
        self, index: Int[Tensor, "batch heads dst K"], num_src: int, is_distinct: bool = False
    ) -> None:
        self.num_src = num_src
        # Only a graph of one slice needs the unsorted index, and a copy costs more than the sort.
        self.unsorted_index = index.clone() if index.shape[:2] == (1, 1) else index
        if index.device.type == "cpu":
            # torch takes twenty times as long as NumPy to sort many short rows.
            index.numpy().sort(axis=-1)
        self.index = index if index.device.type == "cpu" else index.sort(dim=-1).values
        self.is_valid = self.index < num_src
        self.is_repeat = None
        if not is_distinct:
            is_repeat = (self.index[..., 1:] == self.index[..., :-1]).logical_and_(self.is_valid[..., 1:])
            self.is_repeat = torch.nn.functional.pad(is_repeat, (1, 0)) if bool(is_repeat.any()) else None

    def check_distinct(self) -> None:
        """Raise ValueError if a receiver chose a sender more than once."""
        if self.is_repeat is None:
            return
        src, dst = _find_first_entry(self.index, self.is_repeat)
        raise ValueError(
            f"index holds sender {src} more than once for receiver {dst} (repeated entries in all: "
            f"{self.is_repeat.sum()}), but a graph is a set: pass coalesce=True to keep each sender "
            "once, or coalesce='count' to also get a score_mod that counts repeats"
        )

    def check_causal(self) -> None:
        """Raise ValueError if a receiver chose a later token."""
        index = self.index
        dst = torch.arange(index.shape[2], device=index.device, dtype=index.dtype).unsqueeze(-1)
        is_late = (index > dst).logical_and_(self.is_valid)
        if bool(is_late.any()):
            edge = "{} -> {}".format(*_find_first_entry(index, is_late))
            raise ValueError(
                f"index holds the edge {edge}, which is not causal (src <= dst): put -1 in its place, "
                "or omit causal=True"
            )

    @cached_property
    def is_edge(self) -> Bool[Tensor, "batch heads dst K"]:
        """True at each valid entry that does not repeat the entry before it."""
        return self.is_valid if self.is_repeat is None else self.is_valid & ~self.is_repeat

    def to_score_mod(self) -> log_count:
        """Return the score_mod ``score + log m`` for a sender that was chosen m times."""
        row = torch.arange(math.prod(self.index.shape[:3]), device=self.index.device)
        keys = row.view(*self.index.shape[:3], 1) * self.num_src + self.index
        return log_count.from_keys(keys[self.is_valid], (*self.index.shape[:3], self.num_src))

    def to_edges(self) -> ChosenEdges:
        # torch copies bools to int64 before it sums them. Summing slice by slice keeps the copies small.
        ends = torch.cat([edge.sum(-1) for edge in self.is_edge.flatten(0, 1)]).cumsum(0)
        ptr = torch.cat([ends.new_zeros(1), ends])
        is_full = int(ptr[-1]) == self.is_edge.numel()
        src = self.index.flatten() if is_full else self.index[self.is_edge]
        ordered_edges = self._order_edges_as_in_index() if self.index.shape[:2] == (1, 1) else None
        return ChosenEdges(ptr, src, (*self.index.shape[:3], self.num_src), ordered_edges)

    def _order_edges_as_in_index(self) -> Int[Tensor, "2 edges"]:
        index = self.unsorted_index[0, 0]
        is_edge = index < self.num_src
        if self.is_repeat is not None:
            order = index.sort(dim=-1, stable=True).indices
            is_edge = torch.zeros_like(is_edge).scatter(-1, order, self.is_edge[0, 0])
        dst = torch.arange(len(index), device=index.device).unsqueeze(-1).expand_as(index)
        return torch.stack([index[is_edge].long(), dst[is_edge]])


def read_senders(
    index: Tensor, num_src: int, count: Tensor | None, coalesce: object, causal: bool
) -> tuple[ChosenEdges, log_count | None]:
    """Return the edges and, for ``coalesce="count"``, the score_mod of ``TokenGraph.from_indices``."""
    if not isinstance(coalesce, bool) and coalesce != COUNT_MODE:
        raise ValueError(f"coalesce must be True, False or {COUNT_MODE!r}, got {quote(coalesce)}")
    num_src = checks.size("num_src", num_src)
    with eager_mode():
        rows = Rows(read_index(index, num_src, count), num_src)
        if not coalesce:
            rows.check_distinct()
        if causal:
            rows.check_causal()
        return rows.to_edges(), rows.to_score_mod() if coalesce == COUNT_MODE else None


def read_blocks(index: Tensor, block_size: int, num_dst: int, num_src: int, causal: bool) -> RuleEdges:
    """Return the edges of ``TokenGraph.from_block_indices`` as a rule that looks blocks up in a table."""
    with eager_mode():
        blocks = read_block_rows(index, block_size, num_dst, num_src).to_edges()
        table = edge_list.mask_from_keys(blocks.keys(), blocks.shape)[(0,) * (4 - index.dim())].cpu()
    return RuleEdges(rules.drop_future(partial(rules.look_up_blocks, table, block_size, block_size), causal))


def read_block_rows(index: Tensor, block_size: int, num_dst: int, num_src: int) -> Rows:
    """Return the rows of an index of blocks; ValueError if a row holds a block more than once."""
    num_dst, num_src = checks.size("num_dst", num_dst), checks.size("num_src", num_src)
    num_src_blocks = -(-num_src // checks.size("block_size", block_size, 1))
    rows = Rows(read_index(index, num_src_blocks, None, blocks=True), num_src_blocks)
    check_num_block_rows(index, block_size, num_dst)
    if rows.is_repeat is not None:
        src, dst = _find_first_entry(rows.index, rows.is_repeat)
        raise ValueError(
            f"index holds block {src} more than once for the block of receivers {dst} (repeated "
            f"entries in all: {rows.is_repeat.sum()}), but a graph is a set: replace repeats by -1"
        )
    return rows


def check_num_block_rows(index: Tensor, block_size: int, num_dst: int) -> None:
    """Raise ValueError unless the index has a row for each block of receivers."""
    num_rows, num_blocks = index.shape[-2], -(-num_dst // block_size)
    if num_rows != num_blocks:
        raise ValueError(
            f"index must have a row for each of the {num_blocks} blocks of receivers, got {num_rows} for "
            f"{num_dst} receivers in blocks of {block_size}"
        )


def varying_sizes(index: Tensor) -> tuple[int | None, int | None]:
    """Return ``(batch, heads)`` of an index's graph; None marks an axis along which it does not vary."""
    heads = index.shape[-3] if index.dim() > 2 else 1
    return index.shape[0] if index.dim() == 4 else None, heads if index.dim() == 3 or heads > 1 else None
