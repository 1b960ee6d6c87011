"""A plan: a graph cut into pieces that a kernel takes whole, as values.

A *rectangle* is a set of receivers that may all attend to the same set of senders, with a mask where not all
pairs are edges; equal rectangles are taken together, ``count`` at a time. *EdgeRows* are a list, receiver by
receiver (CSR), with its transpose. Pieces of one plan share no edge; their results over the same receivers
are merged by log-sum-exp.

A plan crosses into a custom operator as tensors and integers (:func:`packed`, :func:`unpacked`), so that
compilers and exported programs have the graph itself and never an object that could grow stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor


@dataclass(frozen=True)
class Strided:
    """``count`` groups of ``size`` tokens, group g from ``start + g * stride`` on; they may overlap."""

    start: int
    stride: int
    count: int
    size: int

    def part(self, first: int, stop: int) -> Strided:
        """Groups ``first .. stop - 1``."""
        return Strided(self.start + first * self.stride, self.stride, stop - first, self.size)

    def band(self, first: int, stop: int) -> Strided:
        """Of every group the tokens ``first .. stop - 1``."""
        return Strided(self.start + first, self.stride, self.count, stop - first)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Groups of tokens by number: ``index[group]`` lists them."""

    index: Int[Tensor, "count size"]

    @property
    def count(self) -> int:
        return self.index.shape[0]

    @property
    def size(self) -> int:
        return self.index.shape[1]

    def part(self, first: int, stop: int) -> Gathered:
        return Gathered(self.index[first:stop])

    def band(self, first: int, stop: int) -> Gathered:
        return Gathered(self.index[:, first:stop])


Groups = Strided | Gathered


@dataclass(frozen=True, eq=False)
class Masks:
    """Which pairs of a rectangle are edges: ``table[which[group]]``."""

    table: Bool[Tensor, "masks receivers senders"]
    which: Int[Tensor, " count"]


@dataclass(frozen=True, eq=False)
class Rectangles:
    """``count`` rectangles: the receivers of group g attend to the senders of group g.

    ``masks`` says which pairs are edges (None: all), ``causal`` that receivers i >= j of a group attend to
    its sender j. ``fresh``: no piece before this one has these receivers. ``has_empty_rows``: a row of some
    mask is empty.
    """

    dst: Groups
    src: Groups
    masks: Masks | None = None
    causal: bool = False
    fresh: bool = True
    has_empty_rows: bool = False

    @property
    def cells(self) -> int:
        return self.dst.count * self.dst.size * self.src.size

    def bands(self, size: int) -> Iterator[Rectangles]:
        """The same rectangles, at most ``size`` receivers at a time; senders after a causal band go."""
        if self.dst.size <= size:
            yield self
            return
        for first in range(0, self.dst.size, size):
            stop = min(first + size, self.dst.size)
            dst, src = self.dst.band(first, stop), self.src.band(0, stop) if self.causal else self.src
            masks = self.masks and Masks(self.masks.table[:, first:stop], self.masks.which)
            if self.causal:
                table = torch.ones(1, stop - first, stop, dtype=torch.bool).tril(first)
                masks = Masks(table, torch.zeros(self.dst.count, dtype=torch.int64))
            yield replace(self, dst=dst, src=src, masks=masks, causal=False)

    def parts(self, count: int) -> Iterator[Rectangles]:
        # so a compiled program knows of a symbolic count only that it is large enough
        if self.dst.count <= count:
            yield self
            return
        for first in range(0, self.dst.count, count):
            stop = min(first + count, self.dst.count)
            masks = self.masks and Masks(self.masks.table, self.masks.which[first:stop])
            yield replace(self, dst=self.dst.part(first, stop), src=self.src.part(first, stop), masks=masks)


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """A list of edges receiver by receiver, and the same sender by sender.

    The in-edges of receiver i are the positions ``ptr[i] .. ptr[i + 1] - 1`` of ``src``; the out-edges of
    sender j are ``out_ptr[j] .. out_ptr[j + 1] - 1`` of ``out_dst``, and ``out_position`` says where each of
    these stands in ``src``. ``fresh``: no piece before this one has these receivers.
    """

    ptr: Int[Tensor, " receivers_and_one"]
    src: Int[Tensor, " edges"]
    dst: Int[Tensor, " edges"]
    out_ptr: Int[Tensor, " senders_and_one"]
    out_dst: Int[Tensor, " edges"]
    out_position: Int[Tensor, " edges"]
    fresh: bool = field(default=True, kw_only=True)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.ptr, self.src, self.dst, self.out_ptr, self.out_dst, self.out_position]


Piece = Rectangles | EdgeRows


@dataclass(frozen=True, eq=False)
class Plan:
    """The pieces of a graph in their order; ``complete``: every receiver is in a fresh one."""

    pieces: tuple[Piece, ...]
    complete: bool

    @cached_property
    def all_fresh(self) -> bool:
        # no receiver is in two pieces: nothing is to be merged
        return all(piece.fresh for piece in self.pieces)

    @cached_property
    def rectangles(self) -> tuple[Rectangles, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Rectangles))


# padded edges: their lists are longer than ptr says
STRIDED, GATHERED, EDGES, PADDED = 0, 1, 2, 3
Packed = tuple[list[Tensor], list[int]]


def pack_plan(plan: Plan) -> Packed:
    """The plan as tensors and integers; :func:`unpacked` undoes it."""
    tensors: list[Tensor] = []
    numbers = [int(plan.complete)]
    for piece in plan.pieces:
        if isinstance(piece, EdgeRows):
            numbers += [EDGES, int(piece.fresh)]
            tensors += piece.tensors
            continue
        for groups in (piece.dst, piece.src):
            if isinstance(groups, Strided):
                numbers += [STRIDED, groups.start, groups.stride, groups.count, groups.size]
            else:
                numbers.append(GATHERED)
                tensors.append(groups.index)
        flags = piece.causal, piece.fresh, piece.has_empty_rows, piece.masks is not None
        # the compiler of torch 2.9 cannot add a map to a list
        numbers += [int(flag) for flag in flags]
        if piece.masks is not None:
            tensors += [piece.masks.table, piece.masks.which]
    return tensors, numbers


def unpack_plan(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Plan:
    parts, words = iter(tensors), iter(numbers)
    complete = bool(next(words))
    pieces: list[Piece] = []
    for kind in words:
        if kind in (EDGES, PADDED):
            ptr, src, dst, out_ptr, *out = islice(parts, 6)
            if kind == PADDED:
                count = int(ptr[-1])
                src, dst, *out = (x[:count] for x in (src, dst, *out))
            pieces.append(EdgeRows(ptr, src, dst, out_ptr, *out, fresh=bool(next(words))))
            continue
        dst_groups = _unpack_groups(kind, parts, words)
        src_groups = _unpack_groups(next(words), parts, words)
        causal, fresh, has_empty_rows, masked = (bool(next(words)) for _ in range(4))
        masks = Masks(next(parts), next(parts)) if masked else None
        pieces.append(Rectangles(dst_groups, src_groups, masks, causal, bool(fresh), has_empty_rows))
    return Plan(tuple(pieces), complete)


def _unpack_groups(kind: int, parts: Iterator[Tensor], words: Iterator[int]) -> Groups:
    return Gathered(next(parts)) if kind == GATHERED else Strided(*islice(words, 4))
