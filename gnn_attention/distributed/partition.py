"""Who owns which tokens: equal ranges, ranges of equally many edges, or METIS's partition of the edges.

Positions count from the graph's first receiver and first sender, as in ``edge_index``.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch_geometric.utils import remove_self_loops, to_undirected
from torch_geometric.utils.sparse import index2ptr

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph, memoized

SHOWN = 4  # ranks that are printed
MAX_EDGES = 2**25  # that METIS is given, in about 3 GB


@dataclass(frozen=True, eq=False, repr=False)
class Shares:
    """Which of ``world_size`` ranks owns each token: token t is owned by rank ``owner[t]``.

    Hashable and compared by value. TypeError for another table than one of integers, ValueError for an owner
    that is no rank.

    >>> shares = Shares(torch.tensor([0, 0, 1, 0]), 2)
    >>> shares.ranges(0), shares.tokens(0).tolist(), shares.sizes
    ([(0, 2), (3, 4)], [0, 1, 3], (3, 1))
    """

    owner: Int[Tensor, " tokens"]
    world_size: int

    def __post_init__(self) -> None:
        owner, world_size = self.owner, checks.size("world_size", self.world_size, 1)
        checks.instance("owner", owner, Tensor)
        if owner.dim() != 1 or owner.is_floating_point() or owner.dtype == torch.bool:
            raise TypeError(f"owner must be a list of ranks, an integer for each token, got {quote(owner)}")
        owner = owner.to("cpu", torch.int64)
        if len(owner) and not 0 <= (least := int(owner.min())) <= (most := int(owner.max())) < world_size:
            raise ValueError(f"owner must hold ranks 0 .. {world_size - 1}, got {least} .. {most}")
        object.__setattr__(self, "owner", owner)

    @property
    def num_tokens(self) -> int:
        """How many tokens all ranks own together."""
        return len(self.owner)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens each rank owns."""
        return tuple(torch.bincount(self.owner, minlength=self.world_size).tolist())

    def tokens(self, rank: int) -> Int[Tensor, " own"]:
        """The tokens of a rank, in ascending order."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank must be in 0 .. {self.world_size - 1}, got {rank}")
        return (self.owner == rank).nonzero().flatten()

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The runs of neighbouring tokens ``(start, stop)`` of a rank, in ascending order."""
        tokens = self.tokens(rank)
        cuts = (tokens.diff() != 1).nonzero().flatten() + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in tokens.tensor_split(cuts) if len(run)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shares) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.sizes[:SHOWN])) + ", ..." * (self.world_size > SHOWN)
        return f"Shares({self.num_tokens} tokens on {self.world_size} ranks: {sizes})"

    @cached_property
    def digest(self) -> str:
        """A short hash of all owners and their number, by which ranks compare what they were given."""
        table = torch.cat([self.owner, self.owner.new_tensor([self.world_size])])
        return hashlib.sha256(table.numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Partition:
    """Which rank owns which receivers (``dst``) and senders (``src``): the same tokens of a square graph.

    ``name``: how it was made. Hashable, so that results for it are cached with a graph.

    >>> owner = torch.tensor([0, 0, 1, 1, 1])
    >>> Partition(Shares(owner, 2), Shares(owner, 2)).src
    Shares(5 tokens on 2 ranks: 2, 3)
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


def contiguous(graph: TokenGraph, world_size: int) -> Partition:
    """Equal ranges of neighbouring tokens, on some ranks one token less if their number is no multiple.

    >>> from gnn_attention import patterns
    >>> partition = contiguous(patterns.cross(4, 7), 3)
    >>> partition.dst, partition.src
    (Shares(4 tokens on 3 ranks: 2, 1, 1), Shares(7 tokens on 3 ranks: 3, 2, 2))
    """
    return Partition(
        _even_shares(graph.num_dst, world_size), _even_shares(graph.num_src, world_size), "contiguous"
    )


def zigzag(graph: TokenGraph, world_size: int) -> Partition:
    """Rank r owns the chunks r and ``2 world_size - 1 - r`` of ``2 world_size``: causal edges are in balance.

    Of ``causal(T)`` a rank with chunks of c tokens has ``c (T + 1)`` edges, the same on all ranks where
    ``2 world_size`` divides T, else at most ``T + 1`` apart. The last rank owns the middle token of an odd
    number.

    >>> from gnn_attention import patterns
    >>> zigzag(patterns.causal(8), 2).dst.ranges(0)
    [(0, 2), (6, 8)]
    """
    dst, src = (_mirrored_shares(size, world_size) for size in (graph.num_dst, graph.num_src))
    return Partition(dst, src, "zigzag")


def by_edges(graph: TokenGraph, world_size: int) -> Partition:
    """Neighbouring receivers with as nearly as possible the same number of edges on each rank.

    No rank has more than its share ``E / world_size`` and the edges of one receiver. The senders of a square
    graph are owned alike, those of another one as :func:`contiguous` does.

    >>> from gnn_attention import patterns
    >>> by_edges(patterns.causal(10), 2).dst
    Shares(10 tokens on 2 ranks: 7, 3)
    """
    world_size, weight = checks.size("world_size", world_size, 1), receiver_edges(graph)
    total = int(weight.sum())
    if not total:
        weight, total = torch.ones_like(weight), len(weight)
    # a receiver goes to the rank in whose share of the edges the middle of its own lies
    twice_middle = 2 * weight.cumsum(0) - weight
    dst = Shares(((twice_middle * world_size - 1) // max(2 * total, 1)).clamp(min=0), world_size)
    src = dst if graph.num_src == graph.num_dst else contiguous(graph, world_size).src
    return Partition(dst, src, "by edges")


def metis(graph: TokenGraph, world_size: int) -> Partition:
    """METIS's k-way partition: the fewest senders that travel, the edges in balance; deterministic.

    Tokens of a square graph are nodes; of another one the receivers are, and then the senders. ImportError
    without pymetis (extra ``metis``), ValueError for a graph of more than 2^25 edges. Source: Karypis and
    Kumar 1998, A fast and high quality multilevel scheme for partitioning irregular graphs.
    """
    world_size = checks.size("world_size", world_size, 1)
    try:
        pymetis = importlib.import_module("pymetis")
    except ImportError:
        message = "metis needs pymetis: pip install 'gnn_attention[metis]', or take by_edges, which does not"
        raise ImportError(message) from None
    square = graph.num_dst == graph.num_src
    if graph.num_edges > MAX_EDGES:
        advice = "take contiguous, zigzag or by_edges"
        raise ValueError(f"{graph!r} has {graph.num_edges} edges, too many to list; {advice}")
    samples = ((b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1))
    src, dst = torch.cat([graph.select(b, h).edge_index for b, h in samples], dim=1)
    shift = 0 if square else graph.num_dst
    edge_index, _ = remove_self_loops(torch.stack([src + shift, dst]))
    # the neighbours of each node, whatever the direction, and where they start
    node, neighbours = to_undirected(edge_index, num_nodes=shift + graph.num_src)
    start, weight = index2ptr(node, shift + graph.num_src), receiver_edges(graph) + 1
    if not square:
        weight = torch.cat([weight, weight.new_ones(graph.num_src)])
    if world_size == 1 or len(weight) <= world_size or not len(neighbours):
        owner = torch.arange(len(weight), device="cpu") % world_size
    else:
        # objtype 1 minimises the volume that travels instead of the edges that are cut
        options = {"recursive": False, "options": pymetis.Options(objtype=1, seed=0)}
        table = pymetis.CSRAdjacency(start.numpy(), neighbours.numpy())
        parts = pymetis.part_graph(world_size, table, vweights=weight.numpy(), **options)
        owner = torch.as_tensor(parts.vertex_part, dtype=torch.int64, device="cpu")
    dst = Shares(owner[: graph.num_dst], world_size)
    return Partition(dst, dst if square else Shares(owner[graph.num_dst :], world_size), "metis")


PARTITIONS: dict[str, Callable[[TokenGraph, int], Partition]] = {
    make.__name__: make for make in (contiguous, zigzag, by_edges, metis)
}


def partition_of(graph: TokenGraph, partition: object, world_size: int | None = None) -> Partition:
    """The partition, made where it is a name; TypeError or ValueError for one of other tokens or ranks."""
    if isinstance(partition, str) and world_size is not None:
        make = PARTITIONS[checks.choice("partition", partition, PARTITIONS)]
        return memoized(make, graph, world_size)
    partition = checks.instance("partition", partition, Partition)
    sizes = partition.dst.num_tokens, partition.src.num_tokens
    if sizes != (graph.num_dst, graph.num_src):
        found = f"partition is of {sizes[0]} receivers and {sizes[1]} senders"
        raise ValueError(f"{found}, but {graph!r} has {graph.num_dst} and {graph.num_src}")
    if world_size is not None:
        check_world_size(partition, world_size)
    return partition


def check_world_size(partition: Partition, world_size: int) -> None:
    if partition.world_size != world_size:
        raise ValueError(f"partition is of {partition.world_size} ranks, but there are {world_size}")


def receiver_edges(graph: TokenGraph) -> Int[Tensor, " dst"]:
    """How many edges end in each receiver, over all heads and samples."""
    return graph.in_degree().reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst).sum(0)


def _even_shares(num_tokens: int, world_size: int) -> Shares:
    world_size = checks.size("world_size", world_size, 1)
    # the larger shares first
    return Shares(torch.arange(num_tokens, device="cpu") * world_size // max(num_tokens, 1), world_size)


def _mirrored_shares(num_tokens: int, world_size: int) -> Shares:
    half = _even_shares(num_tokens // 2, world_size)
    middle = half.owner.new_full((num_tokens % 2,), half.world_size - 1)
    return Shares(torch.cat([half.owner, middle, half.owner.flip(0)]), half.world_size)
