"""What a graph costs on several ranks before any of them runs: edges, halo, bytes and balance, all exact.

A byte is counted where a row of a key or a value leaves the rank that owns it, in the forward pass: a sender
travels with all its key/value heads, in all samples. Gradients take the same way back in the backward pass.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.distributed.halo_sets import edges_between, halo_sizes
from gnn_attention.distributed.partition import Partition, check_partition, contiguous, zigzag
from gnn_attention.distributed.partitioners import by_edges, documents, metis, rcm
from gnn_attention.graph import TokenGraph

_MAKERS = (contiguous, zigzag, documents, by_edges, rcm, metis)
PARTITIONS: dict[str, Callable[[TokenGraph, int], Partition]] = {make.__name__: make for make in _MAKERS}
EXCHANGES = ("halo", "ring", "gather")
REASONS = {
    "halo": "only those travel, while each rank computes on its own",
    "ring": "so the blocks of all ranks go round, and a rank stores two of them at a time",
}
MAX_RANKS = 4096  # the tables of all pairs of ranks take 128 MiB each
FEW_EDGES = {"rcm": 2**20, "metis": 2**22}  # of a list, up to which these are tried by default
BALANCED = 1.1  # a load (most over mean) that counts as even, or as near to the least
FEW_ROWS = 0.1  # of the senders: with so small a halo a balanced partition is taken at once
WIDTH, SHOWN_RANKS = 100, 16  # of the printed plan


@dataclass(frozen=True)
class RankLoad:
    """One rank: its tokens, its edges over all heads and samples, and its bytes under the chosen exchange.

    ``halo``: senders of other ranks that its receivers attend to. ``received``, ``sent``: bytes of keys and
    values in the forward pass.
    """

    rank: int
    receivers: int
    senders: int
    edges: int
    flops: int
    halo: int
    received: int
    sent: int


@dataclass(frozen=True)
class Exchange:
    """One exchange: bytes over all ranks, the most that one receives, the most it stores of other ranks."""

    name: str
    received: int
    most_received: int
    most_stored: int


@dataclass(frozen=True)
class Setting:
    """Heads, samples and dtype: what bytes of a sender and operations of an edge follow from."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    batch: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        # a key and a value, for all key/value heads and samples
        return self.batch * self.kv_heads * (self.dim + self.value_dim) * self.dtype.itemsize

    @property
    def edge_flops(self) -> int:
        # of one head: a logit and a term of the weighted sum
        return 2 * (self.dim + self.value_dim)


@dataclass(frozen=True)
class Plan:
    """Who owns what, what travels, and how; print it, or take :meth:`to_dict`. Every number is exact.

    ``halo_share``: the share of the other ranks' keys and values that a rank attends to, on average.
    ``balance``, ``token_balance``: the most edges, or receivers, of a rank, as a multiple of the mean.
    """

    graph: str
    partition: Partition
    setting: Setting
    exchange: str
    reason: str
    exchanges: tuple[Exchange, ...]
    ranks: tuple[RankLoad, ...]
    halo_share: float

    @property
    def balance(self) -> float:
        return _balance([load.edges for load in self.ranks])

    @property
    def token_balance(self) -> float:
        return _balance([load.receivers for load in self.ranks])

    @property
    def halo_bytes(self) -> int:
        """Bytes of the halo exchange over all ranks, whether it was chosen or not."""
        return next(each.received for each in self.exchanges if each.name == "halo")

    def to_dict(self) -> dict[str, Any]:
        """Every number, for JSON."""
        named = {"partition": self.partition.name, "world_size": self.partition.world_size}
        named |= {"setting": asdict(self.setting) | {"dtype": str(self.setting.dtype).removeprefix("torch.")}}
        listed = {name: [asdict(each) for each in getattr(self, name)] for name in ("exchanges", "ranks")}
        derived = {name: getattr(self, name) for name in ("halo_bytes", "balance", "token_balance")}
        return vars(self) | named | listed | derived

    def __str__(self) -> str:
        return "\n".join([*_head(self), "", *_exchange_table(self), "", *_rank_table(self)])


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
    partition: Partition | str | None = None,
) -> Plan:
    """What ``graph`` costs on ``world_size`` ranks with ``heads`` heads of ``dim`` channels: a :class:`Plan`.

    ``partition``: one, or the name of one of :data:`PARTITIONS`; None takes :func:`best`. The exchange is
    "halo" where that moves at most half of the bytes of a ring, else "ring", which stores two blocks at a
    time. ``halo_bytes`` are sent in the forward pass, and as many of gradients in the backward pass. Raises
    ValueError or TypeError for sizes, names and partitions that do not fit.

    >>> from gnn_attention import patterns
    >>> graph = patterns.window(1_000_000, 4096)
    >>> found = plan(graph, 64, heads=32, dim=128, kv_heads=8, partition="contiguous")
    >>> found.exchange, found.ranks[5].halo, found.halo_bytes == 63 * 4095 * 8 * (128 + 128) * 2
    ('halo', 4095, True)
    """
    checks.instance("graph", graph, TokenGraph)
    sizes = {"heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "dim": dim, "batch": batch}
    sizes["value_dim"] = dim if value_dim is None else value_dim
    setting = Setting(**{name: checks.size(name, size, 1) for name, size in sizes.items()}, dtype=dtype)
    _check_setting(setting, graph)
    world_size = checks.size("world_size", world_size, 1)
    if world_size > MAX_RANKS:
        limit = f"at most {MAX_RANKS}: a plan has a table of all pairs of ranks"
        raise ValueError(f"world_size must be {limit}, got {world_size}")
    if partition is None:
        partition = best(graph, world_size)
    elif isinstance(partition, str):
        partition = PARTITIONS[checks.choice("partition", partition, PARTITIONS)](graph, world_size)
    if check_partition(partition, graph).world_size != world_size:
        raise ValueError(f"partition is of {partition.world_size} ranks, but world_size is {world_size}")
    halo, share = halo_sizes(graph, partition), _halo_share(graph, partition)
    rows, chosen = volumes(halo, partition), choose_exchange(graph, partition)
    return Plan(
        graph=repr(graph),
        partition=partition,
        setting=setting,
        exchange=chosen,
        reason=f"a rank attends to {100 * share:.3g} % of the others' keys and values: {REASONS[chosen]}",
        exchanges=tuple(_exchange(name, rows[name], setting.row_bytes) for name in EXCHANGES),
        ranks=tuple(_rank_loads(graph, partition, halo, rows[chosen], setting)),
        halo_share=share,
    )


def best(graph: TokenGraph, world_size: int) -> Partition:
    """The partition with the smallest halo among those balanced best; of nearly equal ones the simplest.

    Balanced: the most edges or receivers of a rank over their mean, within 10 % of the least. Candidates are
    contiguous, zigzag, documents and by_edges; for lists RCM (up to 2^20 edges) and METIS (2^22) too.

    >>> from gnn_attention import patterns
    >>> best(patterns.causal(65536), 8).name, best(patterns.documents([4096] * 8), 8).name
    ('zigzag', 'contiguous')
    """
    checks.instance("graph", graph, TokenGraph)
    world_size, found = checks.size("world_size", world_size, 1), list[tuple[Partition, float, int]]()
    for make in _candidates(graph):
        partition = make(graph, world_size)
        edges = edges_between(graph, partition).sum(1).tolist()
        load, rows = max(map(_balance, (edges, partition.dst.sizes))), int(halo_sizes(graph, partition).sum())
        found.append((partition, load, rows))
        if load <= BALANCED and rows <= FEW_ROWS * graph.num_src:
            break
    least = min(load for _, load, _ in found)
    balanced = [(partition, rows) for partition, load, rows in found if load <= BALANCED * least]
    fewest = min(rows for _, rows in balanced)
    return next(partition for partition, rows in balanced if rows <= BALANCED * fewest)


def choose_exchange(graph: TokenGraph, partition: Partition) -> str:
    """The exchange of "auto": "halo" where it moves at most half of the rows of a ring, else "ring"."""
    return "halo" if _halo_share(graph, partition) <= 0.5 else "ring"


class Volume(NamedTuple):
    """Rows that each rank receives, sends, and stores of other ranks, under one exchange."""

    received: Int[Tensor, " ranks"]
    sent: Int[Tensor, " ranks"]
    stored: Int[Tensor, " ranks"]


def volumes(halo: Int[Tensor, "ranks ranks"], partition: Partition) -> dict[str, Volume]:
    """The rows of every exchange; ``halo`` is that of :func:`halo_sizes`.

    A ring passes each block on, and stores the one that it computes on and the one that arrives.
    """
    own = torch.tensor(partition.src.sizes, device="cpu")
    world, largest, others = len(own), int(own.max()), own.sum() - own
    two_blocks = torch.full_like(own, 2 * largest if world > 1 else 0)
    return {
        "halo": Volume(halo.sum(1), halo.sum(0), halo.sum(1)),
        "gather": Volume(others, own * (world - 1), others),
        "ring": Volume(others, others.roll(-1), two_blocks),
    }


def _candidates(graph: TokenGraph) -> Iterator[Callable[[TokenGraph, int], Partition]]:
    for name, make in PARTITIONS.items():
        few = graph._listed is not None and graph.num_edges <= FEW_EDGES.get(name, 0)
        suits = few if name in FEW_EDGES else name != "documents" or graph.num_dst == graph.num_src
        if suits and (name != "metis" or importlib.util.find_spec("pymetis") is not None):
            yield make


def _halo_share(graph: TokenGraph, partition: Partition) -> float:
    others = partition.src.num_tokens * (partition.world_size - 1)
    return int(halo_sizes(graph, partition).sum()) / others if others else 0.0


def _check_setting(setting: Setting, graph: TokenGraph) -> None:
    if setting.heads % setting.kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {setting.heads} and {setting.kv_heads}")
    for word, own, size in (("heads", graph.heads, setting.heads), ("batch", graph.batch, setting.batch)):
        if own not in (None, size):
            raise ValueError(f"{word}={size}, but {graph!r} differs by them and has {own}")
    if not isinstance(setting.dtype, torch.dtype) or not setting.dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point dtype of torch, got {checks.quoted(setting.dtype)}")


def _balance(loads: Sequence[int]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _exchange(name: str, rows: Volume, row_bytes: int) -> Exchange:
    sizes = (rows.received.sum(), rows.received.max(), rows.stored.max())
    return Exchange(name, *(int(size) * row_bytes for size in sizes))


def _rank_loads(
    graph: TokenGraph, partition: Partition, halo: Tensor, rows: Volume, setting: Setting
) -> Iterator[RankLoad]:
    copies = (1 if graph.heads else setting.heads) * (1 if graph.batch else setting.batch)
    edges, size = edges_between(graph, partition).sum(1) * copies, setting.row_bytes
    columns = (edges, edges * setting.edge_flops, halo.sum(1), rows.received * size, rows.sent * size)
    counts = zip(partition.dst.sizes, partition.src.sizes, *(x.tolist() for x in columns), strict=True)
    return (RankLoad(rank, *numbers) for rank, numbers in enumerate(counts))


def _head(plan: Plan) -> list[str]:
    setting, ranks = plan.setting, len(plan.ranks)
    values = "" if setting.value_dim == setting.dim else f" (values of {setting.value_dim})"
    dtype = str(setting.dtype).removeprefix("torch.")
    texts = (
        f"{plan.graph} on {ranks} {'rank' if ranks == 1 else 'ranks'}, {plan.partition.name}",
        f"{setting.heads} heads of {setting.dim}{values}, {setting.kv_heads} for keys and values, "
        f"batch {setting.batch}, {dtype}, {setting.row_bytes:,} bytes a sender",
        f"exchange: {plan.exchange}, {plan.reason}",
    )
    return list(chain.from_iterable(textwrap.wrap(text, WIDTH) for text in texts))


def _exchange_table(plan: Plan) -> Iterator[str]:
    yield f"{'exchange':<12}{'bytes received':>24}{'most by one rank':>24}{'most stored':>24}"
    for each in plan.exchanges:
        name = f"{each.name} <-" if each.name == plan.exchange else each.name
        yield f"{name:<12}{each.received:>24,}{each.most_received:>24,}{each.most_stored:>24,}"


def _rank_table(plan: Plan) -> Iterator[str]:
    yield f"{'rank':>6}{'receivers':>14}{'edges':>24}{'halo':>14}{'MB in':>14}{'MB out':>14}"
    ranks, ends = len(plan.ranks), SHOWN_RANKS // 2
    for load in plan.ranks:
        if ranks <= SHOWN_RANKS or not ends <= load.rank < ranks - ends:
            counts = f"{load.rank:>6}{load.receivers:>14,}{load.edges:>24,}{load.halo:>14,}"
            yield f"{counts}{load.received / 1e6:>14.2f}{load.sent / 1e6:>14.2f}"
        elif load.rank == ends:
            yield f"{'...':>6}  {ranks - SHOWN_RANKS} more"
    balance = f"edges {plan.balance:.3f}, receivers {plan.token_balance:.3f}"
    yield from ("", f"balance (most / mean): {balance}; bytes of the forward pass")
