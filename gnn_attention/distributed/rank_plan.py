"""What a graph costs on several ranks before any of them runs: edges, halo, bytes and balance, all exact.

A byte is counted where a row of a key or a value leaves the rank that owns it, in the forward pass: a sender
travels with all its key/value heads, in all samples. Gradients take the same way back in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gnn_attention._support import checks
from gnn_attention.distributed.halo_sets import halo_sizes
from gnn_attention.distributed.partition import Partition, partition_of, receiver_edges
from gnn_attention.graph import TokenGraph, memoized

MAX_RANKS = 4096  # the table of all pairs of ranks takes 128 MiB


@dataclass(frozen=True)
class RankLoad:
    """One rank: its receivers, its edges over all heads and samples, and its bytes.

    ``halo``: senders of other ranks that its receivers attend to. ``received``, ``sent``: bytes of keys and
    values in the forward pass.
    """

    rank: int
    receivers: int
    edges: int
    halo: int
    received: int
    sent: int


@dataclass(frozen=True)
class Plan:
    """Who owns what, and what travels; ``print`` shows it as a table. Every number is exact.

    ``row_bytes``: of a sender, with a key and a value for all key/value heads and samples.
    """

    graph: str
    partition: Partition
    row_bytes: int
    ranks: tuple[RankLoad, ...]

    @property
    def balance(self) -> float:
        """The most edges of a rank, as a multiple of the mean."""
        return _balance([load.edges for load in self.ranks])

    @property
    def token_balance(self) -> float:
        """The most receivers of a rank, as a multiple of the mean."""
        return _balance([load.receivers for load in self.ranks])

    @property
    def halo_bytes(self) -> int:
        """Bytes that all ranks receive in the forward pass; as many of gradients in the backward pass."""
        return sum(load.received for load in self.ranks)

    def __str__(self) -> str:
        count = f"{len(self.ranks)} {'rank' if len(self.ranks) == 1 else 'ranks'}"
        lines = [f"{self.graph} on {count}, {self.partition.name}"]
        lines += [f"{self.row_bytes:,} bytes a sender, {self.halo_bytes:,} bytes received by all ranks", ""]
        lines += [f"{'rank':>6}{'receivers':>14}{'edges':>24}{'halo':>14}{'MB in':>14}{'MB out':>14}"]
        for load in self.ranks:
            counts = f"{load.rank:>6}{load.receivers:>14,}{load.edges:>24,}{load.halo:>14,}"
            lines += [f"{counts}{load.received / 1e6:>14.2f}{load.sent / 1e6:>14.2f}"]
        balance = f"edges {self.balance:.3f}, receivers {self.token_balance:.3f}"
        return "\n".join([*lines, "", f"balance (most / mean): {balance}"])


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
    """What ``graph`` costs on ``world_size`` ranks with ``heads`` heads of ``dim`` channels: a :class:`Plan`.

    ``partition``: who owns which tokens, or the name of one of :data:`PARTITIONS`. Raises ValueError or
    TypeError for sizes, names and partitions that do not fit.

    >>> from gnn_attention import patterns
    >>> graph = patterns.window(1_000_000, 4096)
    >>> planned = plan(graph, 8, heads=32, dim=128, kv_heads=8)
    >>> planned.ranks[5].halo, planned.halo_bytes == 7 * 4095 * 8 * (128 + 128) * 2
    (4095, True)
    """
    checks.instance("graph", graph, TokenGraph)
    sizes = {"heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "dim": dim, "batch": batch}
    sizes["value_dim"] = dim if value_dim is None else value_dim
    sizes = {name: checks.size(name, size, 1) for name, size in sizes.items()}
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    for word, own in (("heads", graph.heads), ("batch", graph.batch)):
        if own not in (None, sizes[word]):
            raise ValueError(f"{word}={sizes[word]}, but {graph!r} differs by them and has {own}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point dtype of torch, got {checks.quote(dtype)}")
    world_size = checks.size("world_size", world_size, 1)
    if world_size > MAX_RANKS:
        limit = f"at most {MAX_RANKS}: a plan has a table of all pairs of ranks"
        raise ValueError(f"world_size must be {limit}, got {world_size}")
    partition = partition_of(graph, partition, world_size)
    row_bytes = sizes["batch"] * sizes["kv_heads"] * (sizes["dim"] + sizes["value_dim"]) * dtype.itemsize
    copies = (1 if graph.heads else sizes["heads"]) * (1 if graph.batch else sizes["batch"])
    edges = torch.zeros(partition.world_size, dtype=torch.int64, device="cpu")
    edges.index_add_(0, partition.dst.owner, receiver_edges(graph) * copies)
    halo = memoized(halo_sizes, graph, partition)
    columns = edges, halo.sum(1), halo.sum(1) * row_bytes, halo.sum(0) * row_bytes
    counts = zip(partition.dst.sizes, *(x.tolist() for x in columns), strict=True)
    ranks = tuple(RankLoad(rank, *numbers) for rank, numbers in enumerate(counts))
    return Plan(repr(graph), partition, row_bytes, ranks)


def _balance(loads: Sequence[int]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
