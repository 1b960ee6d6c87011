"""What a graph costs on several ranks, before any of them runs: edges, halo, bytes, balance, and predicted time.

What is counted is exact, from the graph itself, at any scale that its rule can be asked about: edges, senders that are heard,
bytes. Times are predictions from stated rates.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention.distributed import plan_table
from gnn_attention.distributed.balance import by_edges, documents
from gnn_attention.distributed.halo_sets import edges_between, halo_sizes
from gnn_attention.distributed.locality import metis, rcm
from gnn_attention.distributed.partition import Partition, check_partition, contiguous, zigzag
from gnn_attention.distributed.plan_devices import link_of, rates_of
from gnn_attention.distributed.plan_estimates import EXCHANGES, Estimate, Setting, Traffic, estimate
from gnn_attention.graph import TokenGraph

__all__ = ["PARTITIONS", "Exchange", "Plan", "RankLoad", "best", "plan"]

PARTITIONS: dict[str, Callable[[TokenGraph, int], Partition]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "documents": documents,
    "by_edges": by_edges,
    "rcm": rcm,
    "metis": metis,
}
MOST_RANKS = 4096  # whose tables, of all pairs of ranks, take 128 MiB each
LISTED = ("rcm", "metis")  # for graphs that are given as lists of edges
FEW_EDGES = 2**22  # up to which those are tried without being asked for
NEAR = 1.05  # an earlier partition is kept if it takes at most this times as long as the best
ENOUGH = 1.1  # nothing else is tried if a partition takes at most this times as long as perfect balance without exchange


@dataclass(frozen=True)
class RankLoad:
    """One rank: what it owns, its edges over all heads and samples, and what it exchanges in the way that was chosen.

    ``halo``: senders of other ranks that its receivers hear. ``received``, ``sent``: bytes of keys and values, forward.
    ``compute``, ``communication``: seconds of each alone; ``seconds``: of both, as far as they do not overlap.
    """

    rank: int
    receivers: int
    senders: int
    edges: int
    flops: int
    halo: int
    received: int
    sent: int
    compute: float
    communication: float
    seconds: float


@dataclass(frozen=True)
class Exchange:
    """One way of exchanging: bytes over all ranks, the most that one receives, the most it holds beside its own, seconds."""

    name: str
    received: int
    most_received: int
    most_held: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Who owns what, what travels, how, and how long it takes; print it, or take :meth:`to_dict`.

    ``alone``: seconds of one rank that owns everything. ``heard``: the share of all keys and values of other ranks that a rank
    hears, on average over the ranks.
    """

    graph: str
    partition: Partition
    setting: Setting
    exchange: str
    reason: str
    exchanges: tuple[Exchange, ...]
    ranks: tuple[RankLoad, ...]
    heard: float
    alone: float

    @property
    def seconds(self) -> float:
        """Until the last rank is done with the forward pass."""
        return max(load.seconds for load in self.ranks)

    @property
    def balance(self) -> float:
        """The most edges of a rank, as a multiple of the mean: 1 is perfect."""
        return _balance([load.edges for load in self.ranks])

    @property
    def token_balance(self) -> float:
        """The most receivers of a rank, as a multiple of the mean."""
        return _balance([load.receivers for load in self.ranks])

    @property
    def halo_bytes(self) -> int:
        """Bytes of the halo exchange over all ranks, whether it was chosen or not."""
        return next(each.received for each in self.exchanges if each.name == "halo")

    def to_dict(self) -> dict[str, Any]:
        """Every number, and which of them are exact."""
        setting = self.setting
        said = {name: getattr(setting, name) for name in ("heads", "kv_heads", "dim", "value_dim", "batch")}
        return {
            "graph": self.graph,
            "world_size": self.partition.world_size,
            "partition": self.partition.name,
            "setting": said
            | {
                "dtype": str(setting.dtype).removeprefix("torch."),
                "rates": setting.rates._asdict(),
                "link": setting.link._asdict(),
            },
            "exact": ["receivers", "senders", "edges", "flops", "halo", "received", "sent", "balance"],
            "estimated": ["compute", "communication", "seconds", "alone"],
            "exchange": self.exchange,
            "reason": self.reason,
            "exchanges": [asdict(each) for each in self.exchanges],
            "halo_bytes": self.halo_bytes,
            "heard": self.heard,
            "balance": self.balance,
            "token_balance": self.token_balance,
            "seconds": self.seconds,
            "alone": self.alone,
            "ranks": [asdict(load) for load in self.ranks],
        }

    def __str__(self) -> str:
        """Tables of at most 100 columns."""
        return plan_table.text(self)


def plan(
    graph: TokenGraph,
    world_size: int,
    heads: int,
    dim: int,
    link_bandwidth: str | float = "infiniband-ndr",
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str | float = "H200",
    partition: Partition | str | None = None,
) -> Plan:
    """What ``graph`` costs on ``world_size`` ranks with ``heads`` heads of ``dim`` channels, forward: see :class:`Plan`.

    ``link_bandwidth``: bytes a second that a rank sends (and receives at once), or the name of a link. ``device``: operations a
    second that a rank reaches, or the name of a GPU, or "cpu". ``partition``: one, or the name of one of :data:`PARTITIONS`; None
    takes :func:`best`. Of the three ways of exchanging the one with the least estimated time is chosen. Bytes are exact: the halo
    exchange sends ``halo_bytes`` in the forward pass, and as many gradients the other way in the backward pass.

    Raises ValueError or TypeError for sizes, names and partitions that do not fit.

    >>> from gnn_attention import patterns
    >>> found = plan(patterns.window(1_000_000, 4096), 64, heads=32, dim=128, kv_heads=8, partition="contiguous")
    >>> found.exchange, found.ranks[5].halo, found.halo_bytes == 63 * 4095 * 8 * (128 + 128) * 2
    ('halo', 4095, True)
    """
    setting = _setting(graph, heads, kv_heads, dim, value_dim, batch, dtype, device, link_bandwidth)
    world_size = checks.size("world_size", world_size, 1)
    if world_size > MOST_RANKS:
        raise ValueError(f"world_size must be at most {MOST_RANKS}: a plan holds a table of all pairs of ranks, got {world_size}")
    if partition is None:
        return _best(graph, world_size, setting)
    if isinstance(partition, str):
        partition = PARTITIONS[checks.choice("partition", partition, PARTITIONS)](graph, world_size)
    if check_partition(partition, graph).world_size != world_size:
        raise ValueError(f"partition is of {partition.world_size} ranks, but world_size is {world_size}")
    return _plan(graph, partition, setting)


def best(graph: TokenGraph, world_size: int, heads: int = 1, dim: int = 64, **how: Any) -> Partition:
    """The partition of the least predicted time; ``how`` as for :func:`plan`. Of nearly equal ones the simplest.

    Tried are contiguous ranges, zigzag, documents and ranges of equal edges; for lists of up to 2^22 edges RCM and METIS, too.

    >>> from gnn_attention import patterns
    >>> best(patterns.causal(65536), 8, heads=32).name, best(patterns.documents([4096] * 8), 8, heads=32).name
    ('zigzag', 'contiguous')
    """
    return plan(graph, world_size, heads, dim, **how, partition=None).partition


# -- choosing ---------------------------------------------------------------------------------------------------------


def _best(graph: TokenGraph, world_size: int, setting: Setting) -> Plan:
    found: list[Plan] = []
    for make in _candidates(graph):
        found.append(_plan(graph, make(graph, world_size), setting))
        if found[-1].seconds * world_size <= ENOUGH * found[-1].alone:
            break
    least = min(each.seconds for each in found)
    return next(each for each in found if each.seconds <= NEAR * least)


def _candidates(graph: TokenGraph) -> Iterator[Callable[[TokenGraph, int], Partition]]:
    for name, make in PARTITIONS.items():
        suits = name not in LISTED or (graph._listed is not None and graph.num_edges <= FEW_EDGES)
        square = name != "documents" or graph.num_dst == graph.num_src
        if suits and square and (name != "metis" or importlib.util.find_spec("pymetis") is not None):
            yield make


def _plan(graph: TokenGraph, partition: Partition, setting: Setting) -> Plan:
    copies = (1 if graph.heads else setting.heads) * (1 if graph.batch else setting.batch)
    traffic = Traffic(edges_between(graph, partition) * copies, halo_sizes(graph, partition), partition)
    estimates = [estimate(name, traffic, setting) for name in EXCHANGES]
    chosen = min(estimates, key=lambda each: each.slowest)
    others = partition.src.num_tokens * (partition.world_size - 1)
    heard = int(traffic.heard.sum()) / others if others else 0.0
    return Plan(
        graph=repr(graph),
        partition=partition,
        setting=setting,
        exchange=chosen.name,
        reason=_reason(chosen.name, heard),
        exchanges=tuple(_exchange(each) for each in estimates),
        ranks=tuple(_loads(traffic, chosen, setting)),
        heard=heard,
        alone=setting.seconds(int(traffic.edges.sum())),
    )


def _exchange(each: Estimate) -> Exchange:
    return Exchange(each.name, int(each.received.sum()), int(each.received.max()), int(each.held.max()), each.slowest)


def _loads(traffic: Traffic, chosen: Estimate, setting: Setting) -> Iterator[RankLoad]:
    columns = zip(
        traffic.partition.dst.sizes,
        traffic.partition.src.sizes,
        traffic.edges.sum(1).tolist(),
        traffic.heard.sum(1).tolist(),
        *(column.tolist() for column in (chosen.received, chosen.sent, chosen.communication, chosen.seconds)),
        strict=True,
    )
    for rank, (receivers, senders, edges, halo, received, sent, communication, seconds) in enumerate(columns):
        flops, compute = edges * setting.edge_flops, setting.seconds(edges)
        yield RankLoad(rank, receivers, senders, edges, flops, halo, received, sent, compute, communication, seconds)


def _reason(choice: str, heard: float) -> str:
    share = f"a rank hears {100 * heard:.3g} % of the others' keys and values"
    why = {
        "halo": "only those travel, while each rank computes on its own",
        "gather": "so all of them are fetched at once, without packing",
        "ring": "so all of them go round, each step hidden behind the computation of the one before",
    }
    return f"the least estimated time; {share}, {why[choice]}"


def _setting(
    graph: TokenGraph,
    heads: int,
    kv_heads: int | None,
    dim: int,
    value_dim: int | None,
    batch: int,
    dtype: torch.dtype,
    device: str | float,
    link: str | float,
) -> Setting:
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    heads, dim, batch = checks.size("heads", heads, 1), checks.size("dim", dim, 1), checks.size("batch", batch, 1)
    kv_heads = heads if kv_heads is None else checks.size("kv_heads", kv_heads, 1)
    value_dim = dim if value_dim is None else checks.size("value_dim", value_dim, 1)
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    for word, own, given in (("heads", graph.heads, heads), ("batch", graph.batch, batch)):
        if own not in (None, given):
            raise ValueError(f"{word}={given}, but {graph!r} differs by them and has {own}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point dtype of torch, got {quoted(dtype)}")
    return Setting(heads, kv_heads, dim, value_dim, batch, dtype, rates_of(device, dtype), link_of(link))


def _balance(loads: list[int]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
