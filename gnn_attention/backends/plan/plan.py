"""A plan is a graph cut into pieces, each of which a kernel computes as a whole.

In a *rectangle*, all receivers may attend to the same senders. It has a mask unless all pairs, or
all causal pairs, are edges. A piece has rectangles of one size or lists edges (:class:`EdgeRows`).
No edge is in two pieces. If a receiver is in several pieces, its results are merged by log-sum-exp.

Custom operators receive a plan as tensors and integers (:func:`pack_plan`, :func:`unpack_plan`), so
that compiled and exported programs contain no object that could become stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.edge_ops.edge_lists import EdgeRows


@dataclass(frozen=True)
class Strided:
    """``count`` groups of ``size`` tokens; group g begins at ``start + g * stride``. Groups may overlap."""

    start: int
    stride: int
    count: int
    size: int

    def select_groups(self, first: int, stop: int) -> Strided:
        return Strided(self.start + first * self.stride, self.stride, stop - first, self.size)

    def select_tokens(self, first: int, stop: int) -> Strided:
        return Strided(self.start + first, self.stride, self.count, stop - first)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Groups of arbitrary tokens: group g has the tokens ``index[g]``."""

    index: Int[Tensor, "count size"]

    @property
    def count(self) -> int:
        return self.index.shape[0]

    @property
    def size(self) -> int:
        return self.index.shape[1]

    def select_groups(self, first: int, stop: int) -> Gathered:
        return Gathered(self.index[first:stop])

    def select_tokens(self, first: int, stop: int) -> Gathered:
        return Gathered(self.index[:, first:stop])


Groups = Strided | Gathered


@dataclass(frozen=True, eq=False)
class Masks:
    """Masks of rectangles: rectangle g has the mask ``table[index[g]]``, True for edges."""

    table: Bool[Tensor, "masks receivers senders"]
    index: Int[Tensor, " count"]


@dataclass(frozen=True, eq=False)
class Rectangles:
    """Rectangles of one size: the receivers ``dst`` of group g attend to the senders ``src`` of group g.

    Without ``masks``, all pairs are edges or, if ``causal``, those of the i-th receiver and j-th
    sender with i >= j. If ``is_first``, no earlier piece of the plan has these receivers. If
    ``has_empty_rows``, some receiver has no edge in its mask.
    """

    dst: Groups
    src: Groups
    masks: Masks | None = None
    causal: bool = False
    is_first: bool = True
    has_empty_rows: bool = False

    @property
    def num_cells(self) -> int:
        return self.dst.count * self.dst.size * self.src.size

    def split_receivers(self, max_size: int) -> Iterator[Rectangles]:
        """Split into rectangles of at most ``max_size`` receivers. Causal ones drop senders without edges."""
        if self.dst.size <= max_size:
            yield self
            return
        for first in range(0, self.dst.size, max_size):
            stop = min(first + max_size, self.dst.size)
            dst = self.dst.select_tokens(first, stop)
            src = self.src.select_tokens(0, stop) if self.causal else self.src
            masks = self.masks and Masks(self.masks.table[:, first:stop], self.masks.index)
            if self.causal:
                table = torch.ones(1, stop - first, stop, dtype=torch.bool).tril(first)
                masks = Masks(table, torch.zeros(self.dst.count, dtype=torch.int64))
            yield replace(self, dst=dst, src=src, masks=masks, causal=False)

    def split_groups(self, max_count: int) -> Iterator[Rectangles]:
        """Split into pieces of at most ``max_count`` rectangles."""
        # This early exit lets a compiled program guard a symbolic count by one comparison.
        if self.dst.count <= max_count:
            yield self
            return
        for first in range(0, self.dst.count, max_count):
            stop = min(first + max_count, self.dst.count)
            dst, src = self.dst.select_groups(first, stop), self.src.select_groups(first, stop)
            masks = self.masks and Masks(self.masks.table, self.masks.index[first:stop])
            yield replace(self, dst=dst, src=src, masks=masks)


Piece = Rectangles | EdgeRows


@dataclass(frozen=True, eq=False)
class Plan:
    """The pieces of a graph; if ``is_complete``, every receiver is in a piece that ``is_first``."""

    pieces: tuple[Piece, ...]
    is_complete: bool

    @cached_property
    def needs_merge(self) -> bool:
        return not all(piece.is_first for piece in self.pieces)

    @cached_property
    def rectangles(self) -> tuple[Rectangles, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Rectangles))


# The kinds of a packed plan. Tensors of PADDED edge rows may be longer than their ptr[-1] edges.
STRIDED, GATHERED, EDGES, PADDED = 0, 1, 2, 3
Packed = tuple[list[Tensor], list[int]]


def pack_plan(plan: Plan) -> Packed:
    """Convert a plan into tensors and integers, which :func:`unpack_plan` reads."""
    tensors: list[Tensor] = []
    metadata = [int(plan.is_complete)]
    for piece in plan.pieces:
        if isinstance(piece, EdgeRows):
            metadata += [EDGES, int(piece.is_first)]
            tensors += piece.tensors
            continue
        for groups in (piece.dst, piece.src):
            if isinstance(groups, Strided):
                metadata += [STRIDED, groups.start, groups.stride, groups.count, groups.size]
            else:
                metadata.append(GATHERED)
                tensors.append(groups.index)
        flags = piece.causal, piece.is_first, piece.has_empty_rows, piece.masks is not None
        # This is a list because torch.compile in torch 2.9 cannot add a map to a list.
        metadata += [int(flag) for flag in flags]
        if piece.masks is not None:
            tensors += [piece.masks.table, piece.masks.index]
    return tensors, metadata


def unpack_plan(tensors: Sequence[Tensor], metadata: Sequence[int]) -> Plan:
    tensor_iter, meta_iter = iter(tensors), iter(metadata)
    is_complete = bool(next(meta_iter))
    pieces: list[Piece] = []
    for kind in meta_iter:
        if kind in (EDGES, PADDED):
            ptr, src, dst, out_ptr, *out = islice(tensor_iter, 6)
            if kind == PADDED:
                num_edges = int(ptr[-1])
                src, dst, *out = (x[:num_edges] for x in (src, dst, *out))
            pieces.append(EdgeRows(ptr, src, dst, out_ptr, *out, is_first=bool(next(meta_iter))))
            continue
        dst_groups = _unpack_groups(kind, tensor_iter, meta_iter)
        src_groups = _unpack_groups(next(meta_iter), tensor_iter, meta_iter)
        causal, is_first, has_empty_rows, has_masks = (bool(next(meta_iter)) for _ in range(4))
        masks = Masks(next(tensor_iter), next(tensor_iter)) if has_masks else None
        pieces.append(Rectangles(dst_groups, src_groups, masks, causal, is_first, has_empty_rows))
    return Plan(tuple(pieces), is_complete)


def _unpack_groups(kind: int, tensors: Iterator[Tensor], metadata: Iterator[int]) -> Groups:
    return Gathered(next(tensors)) if kind == GATHERED else Strided(*islice(metadata, 4))
