"""Who owns which tokens: the ranks of a group, each with its receivers and its senders in ascending order.

Positions count from the graph's first receiver and first sender, as in ``edge_index``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.regions.quadtree import ragged

SHOWN = 4  # ranks, and runs of a rank, that are printed


@dataclass(frozen=True, eq=False, repr=False)
class Shares:
    """Which of ``num_tokens`` tokens each of ``world_size`` ranks owns, every token once.

    Run i is the tokens ``start[i] .. stop[i] - 1``, owned by ``rank[i]``; runs are sorted by rank, then by
    position, and no two runs of a rank touch. Hashable and compared by value. Made by :func:`of_ranges`,
    :func:`of_owners` and the constructors of partitions.

    >>> shares = of_ranges(7, [[(0, 2), (6, 7)], [(2, 6)]])
    >>> shares.ranges(0), shares.tokens(0).tolist(), shares.sizes
    ([(0, 2), (6, 7)], [0, 1, 6], (3, 4))
    >>> shares.owner(torch.tensor([1, 3, 6])).tolist(), shares.place(torch.tensor([1, 3, 6])).tolist()
    ([0, 1, 0], [1, 1, 2])
    """

    num_tokens: int
    world_size: int
    rank: Int[Tensor, " runs"]
    start: Int[Tensor, " runs"]
    stop: Int[Tensor, " runs"]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens each rank owns."""
        total = torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
        return tuple(total.index_add_(0, self.rank, self.stop - self.start).tolist())

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The runs ``(start, stop)`` of a rank, in ascending order."""
        own = self._runs(rank)
        return list(zip(self.start[own].tolist(), self.stop[own].tolist(), strict=True))

    def tokens(self, rank: int) -> Int[Tensor, " own"]:
        """The tokens of a rank, in ascending order."""
        own = self._runs(rank)
        run, number = ragged(self.stop[own] - self.start[own])
        return self.start[own][run] + number

    def owner(self, tokens: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """The rank that owns each of the given tokens."""
        return self.rank[self._run_of(tokens)]

    def place(self, tokens: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """Where each of the given tokens stands among those of its owner, counted from 0."""
        run, length = self._run_of(tokens), self.stop - self.start
        before = length.cumsum(0) - length
        own = before - torch.tensor((0, *self.sizes), device="cpu").cumsum(0)[self.rank]
        return own[run] + tokens.cpu() - self.start[run]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shares) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Shares({self._described('tokens')})"

    def _described(self, tokens: str) -> str:
        shown = [_shown(self.ranges(rank)) for rank in range(min(self.world_size, SHOWN))]
        more = f"; ... {self.world_size - SHOWN} more ranks" if self.world_size > SHOWN else ""
        return f"{self.num_tokens} {tokens} on {self.world_size} ranks: {'; '.join(shown)}{more}"

    @cached_property
    def _key(self) -> tuple[int, int, bytes]:
        runs = torch.stack([self.rank, self.start, self.stop])
        return self.num_tokens, self.world_size, hashlib.sha256(runs.numpy().tobytes()).digest()

    @cached_property
    def _by_position(self) -> tuple[Tensor, Tensor]:
        order = self.start.argsort()
        return order, self.start[order]

    def _run_of(self, tokens: Tensor) -> Tensor:
        order, first = self._by_position
        return order[torch.searchsorted(first, tokens.cpu().contiguous(), right=True) - 1]

    def _runs(self, rank: int) -> slice:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank must be in 0 .. {self.world_size - 1}, got {rank}")
        ends = torch.searchsorted(self.rank, torch.tensor([rank, rank + 1], device="cpu"))
        return slice(*ends.tolist())


@dataclass(frozen=True)
class Partition:
    """Which rank owns which receivers (``dst``) and senders (``src``): the same tokens of a square graph.

    ``name``: how it was made. Hashable, so that results for it are cached with a graph.
    """

    dst: Shares
    src: Shares
    name: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        if self.dst.world_size != self.src.world_size:
            got = f"{self.dst.world_size} ranks for the receivers and {self.src.world_size} for the senders"
            raise ValueError(f"dst and src must be owned by the same ranks, got {got}")

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.dst.world_size

    @property
    def is_square(self) -> bool:
        """True if receivers and senders are owned alike."""
        return self.dst == self.src

    def __repr__(self) -> str:
        if self.is_square:
            return f"Partition({self.name}: {self.dst._described('receivers and senders')})"
        return f"Partition({self.name}: {self.dst._described('receivers')}, {self.src._described('senders')})"


def of_ranges(num_tokens: int, ranges: Sequence[Iterable[tuple[int, int]]]) -> Shares:
    """The shares of ranks that own these ranges ``(start, stop)``, a list for each rank.

    ValueError unless every token 0 .. num_tokens - 1 is in exactly one of them.
    """
    num_tokens = checks.size("num_tokens", num_tokens)
    checks.check_order("ranges", ranges)
    if not ranges:
        raise ValueError("ranges must hold a list of (start, stop) for each rank, got none")
    flat = [(rank, int(start), int(stop)) for rank, own in enumerate(ranges) for start, stop in own]
    runs = torch.tensor([run for run in flat if run[1] != run[2]], dtype=torch.int64, device="cpu")
    return _of_runs(num_tokens, len(ranges), *runs.view(-1, 3).unbind(1))


def of_owners(owner: Int[Tensor, " tokens"], world_size: int) -> Shares:
    """The shares in which ``owner[t]`` is the rank of token t.

    TypeError for a table of another dtype, ValueError for an owner out of range.

    >>> of_owners(torch.tensor([0, 0, 1, 0]), 2).ranges(0)
    [(0, 2), (3, 4)]
    """
    world_size = checks.size("world_size", world_size, 1)
    if owner.dim() != 1 or owner.is_floating_point() or owner.dtype == torch.bool:
        raise TypeError(f"owner must be a list of ranks, an integer for each token, got {quoted(owner)}")
    owner = owner.to("cpu", torch.int64)
    if len(owner) and not 0 <= (least := int(owner.min())) <= (most := int(owner.max())) < world_size:
        raise ValueError(f"owner must hold ranks 0 .. {world_size - 1}, got {least} .. {most}")
    end = torch.full((1,), -1, dtype=torch.int64, device="cpu")
    # where a run begins or the last one ends
    edge = torch.cat([end, owner, end]).diff().nonzero().flatten()
    start, stop = edge[:-1], edge[1:]
    return _of_runs(len(owner), world_size, owner[start], start, stop)


def of_bounds(bounds: Sequence[int]) -> Shares:
    """One run for each rank: r owns ``bounds[r] .. bounds[r + 1] - 1``; the last bound is ``num_tokens``."""
    checks.check_order("bounds", bounds)
    return of_ranges(int(bounds[-1]), [[(start, stop)] for start, stop in pairwise(bounds)])


def _of_runs(num_tokens: int, world_size: int, rank: Tensor, start: Tensor, stop: Tensor) -> Shares:
    # sorted, checked to have every token once, and joined where they touch
    by_position = start.argsort()
    ends = torch.cat([start.new_zeros(1), stop[by_position]])
    begins = torch.cat([start[by_position], start.new_tensor([num_tokens])])
    wrong = (begins != ends).nonzero().flatten().tolist()
    if wrong or bool((stop < start).any()):
        i = wrong[0] if wrong else 0
        raise ValueError(
            f"every token of 0 .. {num_tokens - 1} must be owned once: after the tokens up to {int(ends[i])} "
            f"the next run starts at {int(begins[i])}"
        )
    order = (rank * max(num_tokens, 1) + start).argsort()
    rank, start, stop = rank[order], start[order], stop[order]
    fresh = torch.ones(len(rank), dtype=torch.bool, device="cpu")
    fresh[1:] = (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1])
    last = torch.cat([fresh[1:], fresh[:1]]) if len(fresh) else fresh
    return Shares(num_tokens, world_size, rank[fresh], start[fresh], stop[last])


def contiguous(graph: TokenGraph, world_size: int) -> Partition:
    """Equal ranges of neighbouring tokens, on some ranks one token less if their number is no multiple.

    >>> from gnn_attention import patterns
    >>> contiguous(patterns.cross(4, 7), 3)
    Partition(contiguous: 4 receivers on 3 ranks: 0..1; 2; 3, 7 senders on 3 ranks: 0..2; 3..4; 5..6)
    """
    world_size = checks.size("world_size", world_size, 1)
    dst, src = (of_bounds(_even(size, world_size)) for size in (graph.num_dst, graph.num_src))
    return Partition(dst, src, "contiguous")


def zigzag(graph: TokenGraph, world_size: int) -> Partition:
    """Rank r owns the chunks r and ``2 world_size - 1 - r`` of ``2 world_size``: causal edges are in balance.

    Of ``causal(T)`` a rank with chunks of c tokens has ``c (T + 1)`` edges, the same on all ranks where
    ``2 world_size`` divides T, else at most ``T + 1`` apart.

    >>> from gnn_attention import patterns
    >>> zigzag(patterns.causal(8), 2)
    Partition(zigzag: 8 receivers and senders on 2 ranks: 0..1 6..7; 2..5)
    """
    world_size = checks.size("world_size", world_size, 1)
    dst, src = (_mirrored(size, world_size) for size in (graph.num_dst, graph.num_src))
    return Partition(dst, src, "zigzag")


def _even(num_tokens: int, world_size: int) -> list[int]:
    # the larger shares first
    return [-(-rank * num_tokens // world_size) for rank in range(world_size + 1)]


def _mirrored(num_tokens: int, world_size: int) -> Shares:
    bounds = _even(num_tokens // 2, world_size)
    pairs = [[(start, stop), (num_tokens - stop, num_tokens - start)] for start, stop in pairwise(bounds)]
    # the middle token of an odd number, else an empty range
    pairs[-1].append((bounds[-1], num_tokens - bounds[-1]))
    return of_ranges(num_tokens, pairs)


def check_partition(partition: object, graph: TokenGraph) -> Partition:
    """The partition if it is one of the graph's tokens; TypeError or ValueError otherwise."""
    partition = checks.instance("partition", partition, Partition)
    sizes = partition.dst.num_tokens, partition.src.num_tokens
    if sizes != (graph.num_dst, graph.num_src):
        found = f"partition is of {sizes[0]} receivers and {sizes[1]} senders"
        raise ValueError(f"{found}, but {graph!r} has {graph.num_dst} and {graph.num_src}")
    return partition


def _shown(ranges: list[tuple[int, int]]) -> str:
    texts = [f"{start}..{stop - 1}" if stop - start > 1 else str(start) for start, stop in ranges[:SHOWN]]
    return " ".join(texts + ["..."] * (len(ranges) > SHOWN)) or "nothing"
