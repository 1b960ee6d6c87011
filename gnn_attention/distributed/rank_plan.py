"""Compute exactly what a graph costs on several ranks: edges, halos, bytes and balance.

Bytes are counted for the keys and values that the forward pass sends, over all key/value heads and
samples of each sender. The backward pass sends as many bytes of gradients back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gnn_attention._support import checks
from gnn_attention.distributed.halo_sets import halo_sizes
from gnn_attention.distributed.partition import Partition, resolve_partition, total_in_degrees
from gnn_attention.graph import TokenGraph, memoized

# With this many ranks, the matrix of halo sizes takes 128 MiB.
MAX_RANKS = 4096


@dataclass(frozen=True)
class RankLoad:
    """The load of one rank: its receivers, its edges over all heads and samples, and its bytes.

    ``halo`` counts the senders of other ranks to which its receivers attend; ``received`` and
    ``sent`` are bytes of keys and values in the forward pass.
    """

    rank: int
    receivers: int
    edges: int
    halo: int
    received: int
    sent: int


@dataclass(frozen=True)
class Plan:
    """A partition and its cost for each rank; ``str()`` formats them as a table.

    ``row_bytes`` is the size of a sender's keys and values in all key/value heads and samples.
    """

    graph: str
    partition: Partition
    row_bytes: int
    ranks: tuple[RankLoad, ...]

    @property
    def balance(self) -> float:
        """The largest number of edges on a rank, divided by the mean over all ranks."""
        return _max_over_mean([load.edges for load in self.ranks])

    @property
    def token_balance(self) -> float:
        """The largest number of receivers on a rank, divided by the mean over all ranks."""
        return _max_over_mean([load.receivers for load in self.ranks])

    @property
    def halo_bytes(self) -> int:
        """The bytes that all ranks receive in the forward pass; the backward pass sends as many back."""
        return sum(load.received for load in self.ranks)

    def __str__(self) -> str:
        unit = "rank" if len(self.ranks) == 1 else "ranks"
        lines = [f"{self.graph} on {len(self.ranks)} {unit}, {self.partition.name}"]
        lines += [f"{self.row_bytes:,} bytes per sender, {self.halo_bytes:,} bytes received by all ranks", ""]
        lines += [f"{'rank':>6}{'receivers':>14}{'edges':>24}{'halo':>14}{'MB in':>14}{'MB out':>14}"]
        for load in self.ranks:
            row = f"{load.rank:>6}{load.receivers:>14,}{load.edges:>24,}{load.halo:>14,}"
            lines += [f"{row}{load.received / 1e6:>14.2f}{load.sent / 1e6:>14.2f}"]
        ratios = f"edges {self.balance:.3f}, receivers {self.token_balance:.3f}"
        return "\n".join([*lines, "", f"balance (most / mean): {ratios}"])


def plan(
    graph: TokenGraph,
    world_size: int,
    heads: int,
    dim: int,
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    partition: Partition | str = "contiguous",
) -> Plan:
    """Compute the cost of a graph on ``world_size`` ranks with ``heads`` heads of ``dim`` channels.

    ``partition`` is a :class:`Partition` or a name in :data:`PARTITIONS`. Raises TypeError or
    ValueError for a wrong argument, or sizes or a partition that do not fit the graph.

    >>> from gnn_attention import patterns
    >>> graph = patterns.window(1_000_000, 4096)
    >>> cost = plan(graph, 8, heads=32, dim=128, kv_heads=8)
    >>> cost.ranks[5].halo, cost.halo_bytes == 7 * 4095 * 8 * (128 + 128) * 2
    (4095, True)
    """
    checks.instance("graph", graph, TokenGraph)
    sizes = {"heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "dim": dim, "batch": batch}
    sizes["value_dim"] = dim if value_dim is None else value_dim
    sizes = {name: checks.size(name, size, 1) for name, size in sizes.items()}
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    for name, size in (("heads", graph.heads), ("batch", graph.batch)):
        if size not in (None, sizes[name]):
            raise ValueError(f"{name} must be {size} as in {graph!r}, got {sizes[name]}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {checks.quote(dtype)}")
    world_size = checks.size("world_size", world_size, 1)
    if world_size > MAX_RANKS:
        raise ValueError(f"world_size must be at most {MAX_RANKS}, got {world_size}")
    partition = resolve_partition(graph, partition, world_size)
    row_bytes = sizes["batch"] * sizes["kv_heads"] * (sizes["dim"] + sizes["value_dim"]) * dtype.itemsize
    num_copies = (1 if graph.heads else sizes["heads"]) * (1 if graph.batch else sizes["batch"])
    rank_edges = torch.zeros(partition.world_size, dtype=torch.int64, device="cpu")
    rank_edges.index_add_(0, partition.dst.owner, total_in_degrees(graph) * num_copies)
    halo = memoized(halo_sizes, graph, partition)
    columns = (partition.dst.sizes, rank_edges.tolist(), halo.sum(1).tolist(), halo.sum(0).tolist())
    ranks = tuple(
        RankLoad(rank, num_dst, num_edges, num_halo, num_halo * row_bytes, num_sent * row_bytes)
        for rank, (num_dst, num_edges, num_halo, num_sent) in enumerate(zip(*columns, strict=True))
    )
    return Plan(repr(graph), partition, row_bytes, ranks)


def _max_over_mean(counts: Sequence[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
