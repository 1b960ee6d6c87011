"""Pieces: a graph cut into parts that a kernel takes whole, as values.

A *rectangle* is a set of receivers that all may hear the same set of senders, with a mask where not all pairs
are edges; equal rectangles are taken together, ``count`` at a time. *Edges* are a list, receiver by receiver
(CSR), with its transpose. Pieces of one plan share no edge; their results over the same receivers are merged
by log-sum-exp.

A plan crosses into a custom operator as tensors and integers (:func:`packed`, :func:`unpacked`), so that
compilers and exported programs hold the graph itself and never an object that could grow stale.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor


@dataclass(frozen=True)
class Strided:
    """``count`` groups of ``size`` tokens in a row, group g from token ``start + g * stride`` on; they may
    overlap.
    """

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
        """Number of groups."""
        return self.index.shape[0]

    @property
    def size(self) -> int:
        """Tokens in each."""
        return self.index.shape[1]

    def part(self, first: int, stop: int) -> Gathered:
        """Groups ``first .. stop - 1``."""
        return Gathered(self.index[first:stop])

    def band(self, first: int, stop: int) -> Gathered:
        """Of every group the tokens ``first .. stop - 1``."""
        return Gathered(self.index[:, first:stop])


Groups = Strided | Gathered


@dataclass(frozen=True, eq=False)
class Masks:
    """Which pairs of a rectangle are edges: one of the ``table``'s masks for each,
    ``table[which[group]]``.
    """

    table: Bool[Tensor, "masks receivers senders"]
    which: Int[Tensor, " count"]

    def part(self, first: int, stop: int) -> Masks:
        """Those of the groups ``first .. stop - 1``."""
        return Masks(self.table, self.which[first:stop])


@dataclass(frozen=True, eq=False)
class Rectangles:
    """``count`` rectangles: the receivers of group g hear the senders of group g.

    ``masks`` says which pairs are edges (None: all), ``causal`` that sender j is heard by receivers i >= j of
    its group. ``fresh``: no piece before this one has these receivers. ``silent``: some receiver of a mask
    hears nobody in it.
    """

    dst: Groups
    src: Groups
    masks: Masks | None = None
    causal: bool = False
    fresh: bool = True
    silent: bool = False

    @property
    def cells(self) -> int:
        """Pairs visited."""
        return self.dst.count * self.dst.size * self.src.size

    def bands(self, size: int) -> Iterator[Rectangles]:
        """The same rectangles, at most ``size`` receivers of each at a time; senders stay, but for those
        after a causal band.
        """
        if self.dst.size <= size:
            yield self
            return
        for first in range(0, self.dst.size, size):
            stop = min(first + size, self.dst.size)
            src = self.src.band(0, stop) if self.causal else self.src
            yield Rectangles(
                self.dst.band(first, stop),
                src,
                self._masks_of_band(first, stop),
                fresh=self.fresh,
                silent=self.silent,
            )

    def _masks_of_band(self, first: int, stop: int) -> Masks | None:
        if self.masks is not None:
            return Masks(self.masks.table[:, first:stop], self.masks.which)
        if not self.causal:
            return None
        table = torch.ones(1, stop - first, stop, dtype=torch.bool).tril(first)
        return Masks(table, torch.zeros(self.dst.count, dtype=torch.int64))

    def parts(self, count: int) -> Iterator[Rectangles]:
        """At most ``count`` rectangles at a time. Of a symbolic count a program then knows only that it is
        large enough.
        """
        if self.dst.count <= count:
            yield self
            return
        for first in range(0, self.dst.count, count):
            stop = min(first + count, self.dst.count)
            masks = None if self.masks is None else self.masks.part(first, stop)
            dst, src = self.dst.part(first, stop), self.src.part(first, stop)
            yield Rectangles(dst, src, masks, self.causal, self.fresh, self.silent)


@dataclass(frozen=True, eq=False)
class Edges:
    """A list of edges receiver by receiver, and the same sender by sender.

    The in-edges of receiver i are the positions ``ptr[i] .. ptr[i + 1] - 1`` of ``src``; the out-edges of
    sender j are ``out_ptr[j] .. out_ptr[j + 1] - 1`` of ``out_dst``, and ``out_position`` says where each of
    these stands in ``src``.
    """

    ptr: Int[Tensor, " receivers_and_one"]
    src: Int[Tensor, " edges"]
    dst: Int[Tensor, " edges"]
    out_ptr: Int[Tensor, " senders_and_one"]
    out_dst: Int[Tensor, " edges"]
    out_position: Int[Tensor, " edges"]
    fresh: bool = True


Piece = Rectangles | Edges


@dataclass(frozen=True, eq=False)
class Plan:
    """The pieces of a graph, in the order in which they are taken. ``complete``: every receiver is in a fresh
    one of them.
    """

    pieces: tuple[Piece, ...]
    complete: bool

    @functools.cached_property
    def all_fresh(self) -> bool:
        """No receiver is in two pieces: nothing is to be merged."""
        return all(piece.fresh for piece in self.pieces)

    @functools.cached_property
    def has_blocks(self) -> bool:
        """Not all pieces are lists of edges."""
        return any(isinstance(piece, Rectangles) for piece in self.pieces)

    @functools.cached_property
    def visits_non_edges(self) -> bool:
        """Some piece has a mask."""
        return any(
            isinstance(piece, Rectangles) and (piece.causal or piece.masks is not None)
            for piece in self.pieces
        )

    @functools.cached_property
    def narrowest(self) -> int:
        """The fewest senders of a rectangle."""
        return min(piece.src.size for piece in self.pieces if isinstance(piece, Rectangles))


STRIDED, GATHERED, EDGES = 0, 1, 2
Packed = tuple[list[Tensor], list[int]]


def packed(plan: Plan) -> Packed:
    """The plan as tensors and integers; :func:`unpacked` undoes it."""
    tensors: list[Tensor] = []
    numbers = [int(plan.complete)]
    for piece in plan.pieces:
        _pack_piece(piece, tensors, numbers)
    return tensors, numbers


def unpacked(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Plan:
    """The plan that was :func:`packed`."""
    held, said = iter(tensors), iter(numbers)
    complete, pieces = bool(next(said)), []
    for kind in said:
        pieces.append(_unpack_edges(held, said) if kind == EDGES else _unpack_rectangles(kind, held, said))
    return Plan(tuple(pieces), complete)


def _pack_piece(piece: Piece, tensors: list[Tensor], numbers: list[int]) -> None:
    if isinstance(piece, Edges):
        numbers += [EDGES, int(piece.fresh)]
        tensors += [piece.ptr, piece.src, piece.dst, piece.out_ptr, piece.out_dst, piece.out_position]
        return
    for groups in (piece.dst, piece.src):
        if isinstance(groups, Strided):
            numbers += [STRIDED, groups.start, groups.stride, groups.count, groups.size]
        else:
            numbers.append(GATHERED)
            tensors.append(groups.index)
    numbers += [int(flag) for flag in (piece.causal, piece.fresh, piece.silent, piece.masks is not None)]
    if piece.masks is not None:
        tensors += [piece.masks.table, piece.masks.which]


def _unpack_edges(held: Iterator[Tensor], said: Iterator[int]) -> Edges:
    return Edges(next(held), next(held), next(held), next(held), next(held), next(held), bool(next(said)))


def _unpack_rectangles(kind: int, held: Iterator[Tensor], said: Iterator[int]) -> Rectangles:
    dst = _unpack_groups(kind, held, said)
    src = _unpack_groups(next(said), held, said)
    causal, fresh, silent, masked = (bool(next(said)) for _ in range(4))
    return Rectangles(dst, src, Masks(next(held), next(held)) if masked else None, causal, fresh, silent)


def _unpack_groups(kind: int, held: Iterator[Tensor], said: Iterator[int]) -> Groups:
    if kind == GATHERED:
        return Gathered(next(held))
    return Strided(next(said), next(said), next(said), next(said))
