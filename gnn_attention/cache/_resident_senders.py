"""The senders in the buffers of a cache, the same for all layers, while tokens arrive in chunks.

Rows are sorted by position. A chunk that does not fit goes to a new buffer, after copies of the
rows that receivers still need. A buffer has at most ``4 * (rows in use + SPARE_ROWS)`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph, memoized, text
from gnn_attention.graph.edges import ListedEdges, Parallel, RuleEdges
from gnn_attention.graph.liveness import last_receivers, last_senders
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.rules import map_tokens

SPARE_ROWS = 16  # A new buffer for n rows has n // 4 + SPARE_ROWS spare rows.


@dataclass(frozen=True, eq=False)
class ResidentSenders:
    """The senders in the buffers after tokens ``0 .. stop - 1``; the last chunk began at ``start``.

    Row i holds token ``positions[i]``; positions ascend. The last chunk followed ``num_old_rows``
    rows or, unless ``moved_rows`` is None, copies of these in buffers of ``capacity`` rows.
    """

    graph: TokenGraph
    start: int
    stop: int
    positions: Int[Tensor, " rows"]
    capacity: int = 0
    num_old_rows: int = 0
    moved_rows: Int[Tensor, " moved"] | None = None

    @property
    def chunk_size(self) -> int:
        return self.stop - self.start

    @property
    def indices_in_use(self) -> Int[Tensor, " senders"]:
        last_dst: Tensor = memoized(last_receivers, self.graph)[self.positions]
        return (last_dst >= self.start).nonzero().flatten()

    def append(self, num_tokens: int) -> ResidentSenders:
        """Return the senders after one more chunk; raise ValueError if the graph forbids the chunk."""
        graph, start, stop = self.graph, self.stop, self.stop + num_tokens
        if stop > graph.num_dst:
            raise ValueError(
                f"{graph!r} has {graph.num_dst} receivers, and the cache has {start} of them: no room "
                f"for {num_tokens} more; use the graph of a longer sequence"
            )
        src, row = (int(x) for x in memoized(last_senders, graph)[start:stop].max(0))
        if src >= stop:
            raise ValueError(
                f"receiver {start + row} of {graph!r} attends to sender {src}, which is not in the "
                f"cache yet: the next chunk must have at least {src + 1 - start} tokens"
            )
        senders = replace(self, start=start, stop=stop, num_old_rows=len(self.positions))
        chunk = torch.arange(start, stop, device="cpu")
        moved_rows = senders.indices_in_use
        n = len(moved_rows) + num_tokens
        if len(self.positions) + num_tokens <= self.capacity <= 4 * (n + SPARE_ROWS):
            return replace(senders, positions=torch.cat([self.positions, chunk]), moved_rows=None)
        positions = torch.cat([self.positions[moved_rows], chunk])
        return replace(senders, positions=positions, capacity=n + n // 4 + SPARE_ROWS, moved_rows=moved_rows)

    def rewind(self, length: int) -> ResidentSenders:
        if length > self.stop:
            raise ValueError(f"rewind({length}): the cache has only {self.stop} tokens")
        last_dst: Tensor = memoized(last_receivers, self.graph)[:length]
        missing_senders = ((last_dst >= length) & (last_dst < self.start)).nonzero().flatten().tolist()
        if missing_senders:
            raise ValueError(
                f"rewind({length}): sender {missing_senders[0]} was dropped after its last receiver "
                f"{last_dst[missing_senders[0]]}, and would be needed again; rewind to {self.start} "
                "or later, or fork() the cache before tokens that may be rejected"
            )
        positions = self.positions[self.positions < length]
        return replace(self, start=min(self.start, length), stop=length, positions=positions)

    @cached_property
    def has_gap(self) -> bool:
        return int(self.positions[-1] - self.positions[0]) + 1 != len(self.positions)

    @property
    def has_few_pairs(self) -> bool:
        return self.chunk_size * len(self.positions) <= enumerate_pairs.MAX_ENUMERATED_PAIRS

    @cached_property
    def chunk_graph(self) -> TokenGraph:
        """The graph whose senders are the rows and whose receivers are the tokens of the last chunk."""
        graph, shape = self.graph, (self.chunk_size, len(self.positions))
        name = f"{text.parenthesize(graph.name)}.rows({self.start}, {self.stop})"
        if graph.has_parallel_edges or (graph.edges.listed() is not None and not self.has_few_pairs):
            src, dst = graph.rows(self.start, self.stop).edge_index
            index = torch.stack([torch.searchsorted(self.positions, src), dst])
            parallel: Parallel = "keep" if graph.has_parallel_edges else "error"
            chunk_graph = TokenGraph(ListedEdges(index, *shape, parallel), *shape, name=name)
        else:
            senders = self.positions if self.has_gap else int(self.positions[0])
            rule = partial(map_tokens, graph.edges.contains, self.start, senders)
            chunk_graph = replace(graph, edges=RuleEdges(rule), num_dst=shape[0], num_src=shape[1], name=name)
        # If the positions have a gap, a score_mod looks them up.
        src_offset = 0 if self.has_gap else graph.src_offset + int(self.positions[0])
        return replace(chunk_graph, dst_offset=graph.dst_offset + self.start, src_offset=src_offset)


def append_rows(buffer: Tensor | None, new_rows: Tensor, senders: ResidentSenders) -> Tensor:
    """Append the rows of the last chunk to a layer's buffer ``[B, H, capacity, D]``, and return it.

    Without autograd, new rows are written to the same buffer after all valid rows, so a caller may
    still discard the result. With autograd, the result is new and has exactly the resident rows.
    """
    old_rows = new_rows[:, :, :0] if buffer is None else buffer[:, :, : senders.num_old_rows]
    if senders.moved_rows is not None:
        old_rows = old_rows[:, :, senders.moved_rows.to(old_rows.device)]
    if torch.is_grad_enabled():
        return torch.cat([old_rows, new_rows], dim=2)
    num_old_rows, num_rows = old_rows.shape[2], old_rows.shape[2] + new_rows.shape[2]
    # An inference tensor cannot be written to outside inference mode.
    is_frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    must_copy = senders.moved_rows is not None or is_frozen
    if buffer is None or must_copy or buffer.shape[2] < num_rows or buffer.requires_grad:
        buffer = new_rows.new_empty(*new_rows.shape[:2], max(senders.capacity, num_rows), new_rows.shape[3])
        buffer[:, :, :num_old_rows] = old_rows
    buffer[:, :, num_old_rows:num_rows] = new_rows
    return buffer
