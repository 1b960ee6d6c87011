"""Partition tokens over ranks: equally, in mirrored chunks, by number of edges, or with METIS.

Tokens are counted from the graph's first receiver and first sender, as in ``edge_index``.
"""

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

# The repr of shares shows the sizes of at most this many ranks.
MAX_IN_REPR = 4
# METIS needs about 3 GB for this many edges.
MAX_METIS_EDGES = 2**25


@dataclass(frozen=True, eq=False, repr=False)
class Shares:
    """The owners of tokens among ``world_size`` ranks: rank ``owner[t]`` owns token t.

    Shares are hashable and compared by value. Raises TypeError unless ``owner`` is a tensor of
    integers with one axis, and ValueError if one of the integers is not a rank.

    >>> shares = Shares(torch.tensor([0, 0, 1, 0]), 2)
    >>> shares.ranges(0), shares.tokens(0).tolist(), shares.sizes
    ([(0, 2), (3, 4)], [0, 1, 3], (3, 1))
    """

    owner: Int[Tensor, " tokens"]
    world_size: int

    def __post_init__(self) -> None:
        owner = self.owner
        world_size = checks.size("world_size", self.world_size, 1)
        checks.instance("owner", owner, Tensor)
        if owner.dim() != 1 or owner.is_floating_point() or owner.dtype == torch.bool:
            raise TypeError(f"owner must be a 1-D tensor of integers, a rank per token, got {quote(owner)}")
        owner = owner.to("cpu", torch.int64)
        if len(owner) and not 0 <= (low := int(owner.min())) <= (high := int(owner.max())) < world_size:
            raise ValueError(f"owner must hold ranks 0 .. {world_size - 1}, got {low} .. {high}")
        object.__setattr__(self, "owner", owner)

    @property
    def num_tokens(self) -> int:
        """Total number of tokens on all ranks."""
        return len(self.owner)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(torch.bincount(self.owner, minlength=self.world_size).tolist())

    def tokens(self, rank: int) -> Int[Tensor, " tokens"]:
        """Return the tokens of a rank in ascending order."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank must be in 0 .. {self.world_size - 1}, got {rank}")
        return (self.owner == rank).nonzero().flatten()

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the ranges ``(start, stop)`` of tokens of a rank in ascending order."""
        tokens = self.tokens(rank)
        run_starts = (tokens.diff() != 1).nonzero().flatten() + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in tokens.tensor_split(run_starts) if len(run)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shares) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.sizes[:MAX_IN_REPR])) + ", ..." * (self.world_size > MAX_IN_REPR)
        return f"Shares({self.num_tokens} tokens on {self.world_size} ranks: {sizes})"

    @cached_property
    def digest(self) -> str:
        """A short hash of owners and ``world_size``, by which ranks compare their arguments."""
        hashed_values = torch.cat([self.owner, self.owner.new_tensor([self.world_size])])
        return hashlib.sha256(hashed_values.numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Partition:
    """The owners of receivers (``dst``) and of senders (``src``), which are the same in a square graph.

    ``name`` says how it was computed. A partition is hashable, so a graph can cache results for it.

    >>> owner = torch.tensor([0, 0, 1, 1, 1])
    >>> Partition(Shares(owner, 2), Shares(owner, 2)).src
    Shares(5 tokens on 2 ranks: 2, 3)
    """

    dst: Shares
    src: Shares
    name: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        if self.dst.world_size != self.src.world_size:
            sizes = f"{self.dst.world_size} and {self.src.world_size}"
            raise ValueError(f"dst and src must have the same number of ranks, got {sizes}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dst.world_size


def contiguous(graph: TokenGraph, world_size: int) -> Partition:
    """Split tokens into ranges of equal size, or of two sizes that differ by one token.

    >>> from gnn_attention import patterns
    >>> partition = contiguous(patterns.cross(4, 7), 3)
    >>> partition.dst, partition.src
    (Shares(4 tokens on 3 ranks: 2, 1, 1), Shares(7 tokens on 3 ranks: 3, 2, 2))
    """
    dst, src = (_even_shares(size, world_size) for size in (graph.num_dst, graph.num_src))
    return Partition(dst, src, "contiguous")


def zigzag(graph: TokenGraph, world_size: int) -> Partition:
    """Balance causal edges: rank r owns chunks r and ``2 world_size - 1 - r`` of ``2 world_size`` chunks.

    In ``causal(T)`` a rank with chunks of c tokens has ``c (T + 1)`` edges. Ranks differ by at most
    ``T + 1`` edges, or by 0 if ``2 world_size`` divides T. The last rank owns the middle token of
    an odd T.

    >>> from gnn_attention import patterns
    >>> zigzag(patterns.causal(8), 2).dst.ranges(0)
    [(0, 2), (6, 8)]
    """
    dst, src = (_mirrored_shares(size, world_size) for size in (graph.num_dst, graph.num_src))
    return Partition(dst, src, "zigzag")


def by_edges(graph: TokenGraph, world_size: int) -> Partition:
    """Split receivers into ranges with nearly equal numbers of edges.

    No rank has more edges than its share ``E / world_size`` plus the edges of one receiver. In a
    square graph senders have the same owners as receivers, otherwise those of :func:`contiguous`.

    >>> from gnn_attention import patterns
    >>> by_edges(patterns.causal(10), 2).dst
    Shares(10 tokens on 2 ranks: 7, 3)
    """
    world_size = checks.size("world_size", world_size, 1)
    degree = total_in_degrees(graph)
    # In a graph without edges, each receiver counts as one edge.
    degree = degree if degree.any() else torch.ones_like(degree)
    # A receiver goes to the rank whose share of the edges contains the middle of its own edges.
    twice_middle = 2 * degree.cumsum(0) - degree
    dst = Shares(((twice_middle * world_size - 1) // max(2 * int(degree.sum()), 1)).clamp(min=0), world_size)
    src = dst if graph.num_src == graph.num_dst else contiguous(graph, world_size).src
    return Partition(dst, src, "by edges")


def metis(graph: TokenGraph, world_size: int) -> Partition:
    """Compute METIS's k-way partition. It is deterministic, balances edges and keeps halos small.

    Receivers and senders are the same nodes only in a square graph. ImportError without pymetis
    (extra ``metis``), ValueError for more than 2^25 edges. Source: Karypis and Kumar 1998, A fast
    and high quality multilevel scheme for partitioning irregular graphs.
    """
    world_size = checks.size("world_size", world_size, 1)
    try:
        pymetis = importlib.import_module("pymetis")
    except ImportError:
        raise ImportError("metis needs pymetis: pip install 'gnn_attention[metis]' or use by_edges") from None
    is_square = graph.num_dst == graph.num_src
    if graph.num_edges > MAX_METIS_EDGES:
        raise ValueError(f"{graph!r} has {graph.num_edges} edges, too many for metis; use by_edges")
    slices = ((b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1))
    src, dst = torch.cat([graph.select(b, h).edge_index for b, h in slices], dim=1)
    src_shift = 0 if is_square else graph.num_dst
    edge_index, _ = remove_self_loops(torch.stack([src + src_shift, dst]))
    nodes, neighbours = to_undirected(edge_index, num_nodes=src_shift + graph.num_src)
    neighbour_ptr = index2ptr(nodes, src_shift + graph.num_src)
    node_weights = total_in_degrees(graph) + 1
    if not is_square:
        node_weights = torch.cat([node_weights, node_weights.new_ones(graph.num_src)])
    if world_size == 1 or len(node_weights) <= world_size or not len(neighbours):
        owner = torch.arange(len(node_weights), device="cpu") % world_size
    else:
        # objtype 1 minimises the total size of the halos, not the number of edges between ranks.
        options = {"recursive": False, "options": pymetis.Options(objtype=1, seed=0)}
        adjacency = pymetis.CSRAdjacency(neighbour_ptr.numpy(), neighbours.numpy())
        result = pymetis.part_graph(world_size, adjacency, vweights=node_weights.numpy(), **options)
        owner = torch.as_tensor(result.vertex_part, dtype=torch.int64, device="cpu")
    dst = Shares(owner[: graph.num_dst], world_size)
    return Partition(dst, dst if is_square else Shares(owner[graph.num_dst :], world_size), "metis")


PARTITIONS: dict[str, Callable[[TokenGraph, int], Partition]] = {
    build.__name__: build for build in (contiguous, zigzag, by_edges, metis)
}


def resolve_partition(graph: TokenGraph, partition: object, world_size: int | None = None) -> Partition:
    """Return a partition or compute it by name; TypeError or ValueError unless it fits the graph."""
    if isinstance(partition, str) and world_size is not None:
        build = PARTITIONS[checks.choice("partition", partition, PARTITIONS)]
        return memoized(build, graph, world_size)
    partition = checks.instance("partition", partition, Partition)
    num_dst, num_src = partition.dst.num_tokens, partition.src.num_tokens
    if (num_dst, num_src) != (graph.num_dst, graph.num_src):
        raise ValueError(f"partition must fit {graph!r}, got {num_dst} receivers and {num_src} senders")
    if world_size is not None:
        check_world_size(partition, world_size)
    return partition


def check_world_size(partition: Partition, world_size: int) -> None:
    if partition.world_size != world_size:
        raise ValueError(f"partition must have {world_size} ranks, got {partition.world_size}")


def total_in_degrees(graph: TokenGraph) -> Int[Tensor, " dst"]:
    """Count the in-edges of each receiver over all heads and samples."""
    return graph.in_degree().reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst).sum(0)


def _even_shares(num_tokens: int, world_size: int) -> Shares:
    world_size = checks.size("world_size", world_size, 1)
    return Shares(torch.arange(num_tokens, device="cpu") * world_size // max(num_tokens, 1), world_size)


def _mirrored_shares(num_tokens: int, world_size: int) -> Shares:
    half = _even_shares(num_tokens // 2, world_size)
    middle = half.owner.new_full((num_tokens % 2,), half.world_size - 1)
    return Shares(torch.cat([half.owner, middle, half.owner.flip(0)]), half.world_size)
