"""Which senders are resident while tokens come in chunks, the same for all layers.

Rows of a buffer are in the order of their positions; a chunk is appended. A sender without later receivers is
dropped when room is needed: the copy is amortised over the rows written since, and a buffer stays within a
constant factor of what is needed.
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

SPARE = 16  # rows more than a quarter of those needed


@dataclass(frozen=True, eq=False)
class ResidentSenders:
    """The senders in the buffers after the tokens ``0 .. stop - 1``; the last chunk began at ``start``.

    ``positions``: the tokens of the rows, ascending. Of the ``before`` rows that preceded the chunk, those at
    ``stay`` were moved to new buffers of ``room`` rows; None: all of them stayed where they were.
    """

    graph: TokenGraph
    start: int
    stop: int
    positions: Int[Tensor, " rows"]
    room: int = 0
    before: int = 0
    stay: Int[Tensor, " stay"] | None = None

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def indices_in_use(self) -> Int[Tensor, " senders"]:
        last: Tensor = memoized(last_receivers, self.graph)[self.positions]
        return (last >= self.start).nonzero().flatten()

    def append(self, count: int) -> ResidentSenders:
        """After a further chunk of ``count`` tokens; ValueError where the graph has no room for it."""
        graph, start, stop = self.graph, self.stop, self.stop + count
        if stop > graph.num_dst:
            short = f"{graph.num_dst} receivers, of which {start} have come: no room for {count} more"
            raise ValueError(f"{graph!r} has {short}; take the graph of a longer sequence")
        furthest: Tensor = memoized(last_senders, graph)
        latest, dst = (int(found) for found in furthest[start:stop].max(0))
        if latest >= stop:
            edge = f"receiver {start + dst} of {graph!r} attends to sender {latest}"
            advice = f"give at least {latest + 1 - start} tokens in the next chunk"
            raise ValueError(f"{edge}, which has not come: {advice}")
        later = replace(self, start=start, stop=stop, before=len(self.positions))
        new, stay = torch.arange(start, stop, device="cpu"), later.indices_in_use
        rows = len(stay) + count
        if len(self.positions) + count <= self.room <= 4 * (rows + SPARE):
            return replace(later, positions=torch.cat([self.positions, new]), stay=None)
        room = rows + rows // 4 + SPARE
        return replace(later, positions=torch.cat([self.positions[stay], new]), room=room, stay=stay)

    def rewind(self, length: int) -> ResidentSenders:
        if length > self.stop:
            raise ValueError(f"rewind({length}): only {self.stop} tokens have come")
        last: Tensor = memoized(last_receivers, self.graph)[:length]
        lost = ((last >= length) & (last < self.start)).nonzero().flatten()
        if len(lost):
            gone = f"sender {lost[0]} was dropped after its last receiver {last[lost[0]]}, and is needed"
            advice = f"the last chunk can be taken back, down to {self.start}, or fork() before it comes"
            raise ValueError(f"rewind({length}): {gone} again; {advice}")
        positions = self.positions[self.positions < length]
        return replace(self, start=min(self.start, length), stop=length, positions=positions)

    @cached_property
    def gap(self) -> bool:
        return int(self.positions[-1] - self.positions[0]) + 1 != len(self.positions)

    @property
    def has_few_pairs(self) -> bool:
        """True for so few pairs that evaluating all of them is cheaper than a plan."""
        return self.count * len(self.positions) <= enumerate_pairs.FEW_PAIRS

    @cached_property
    def view(self) -> TokenGraph:
        """The edges of the last chunk. Few pairs are looked up; the edges of a list are renumbered."""
        graph, count, rows, first = self.graph, self.count, len(self.positions), int(self.positions[0])
        name = f"{text.parenthesize(graph.name)}.rows({self.start}, {self.stop})"
        if graph.has_parallel_edges or (graph.edges.stored_list() is not None and not self.has_few_pairs):
            src, dst = graph.rows(self.start, self.stop).edge_index
            listed = torch.stack([torch.searchsorted(self.positions, src), dst])
            parallel: Parallel = "keep" if graph.has_parallel_edges else "error"
            view = TokenGraph(ListedEdges(listed, count, rows, parallel), count, rows, name=name)
        else:
            senders = self.positions if self.gap else first
            edges = RuleEdges(partial(map_tokens, graph.edges.contains, self.start, senders))
            view = replace(graph, edges=edges, num_dst=count, num_src=rows, name=name)
        # in rows with gaps a score_mod looks its senders up
        src_offset = 0 if self.gap else graph.src_offset + first
        return replace(view, dst_offset=graph.dst_offset + self.start, src_offset=src_offset)


def append_rows(rows: Tensor | None, new: Tensor, resident: ResidentSenders) -> Tensor:
    """The buffer ``[B, H, room, D]`` of a layer with the rows of the last chunk behind those before.

    Without autograd they are written into the same buffer, behind all valid rows: if the result is dropped,
    nothing has changed. Where autograd records, a new tensor is made of exactly the resident rows.
    """
    old = new[:, :, :0] if rows is None else rows[:, :, : resident.before]
    old = old if resident.stay is None else old[:, :, resident.stay.to(old.device)]
    if torch.is_grad_enabled():
        return torch.cat([old, new], dim=2)
    used = old.shape[2] + new.shape[2]
    frozen = rows is not None and rows.is_inference() and not torch.is_inference_mode_enabled()
    if rows is None or resident.stay is not None or rows.shape[2] < used or rows.requires_grad or frozen:
        rows = new.new_empty(*new.shape[:2], max(resident.room, used), new.shape[3])
        rows[:, :, : old.shape[2]] = old
    rows[:, :, old.shape[2] : used] = new
    return rows
