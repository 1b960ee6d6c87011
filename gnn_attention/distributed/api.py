"""Beyond one machine, on torch.distributed: tokens on ranks, heads as shards, and what either costs before it is run.

**Tokens on ranks.** Every rank owns some receivers and some senders (a :class:`Partition`) and holds their rows alone. The graph
says what must travel: ``attend`` fetches just the senders that a rank's receivers hear, forward and backward, and is otherwise
``gnn_attention.attend``. Two lines put a model on ranks, in a program that ``torchrun`` starts on each:

    mine = distributed.local(graph)                                              # what this rank sees of the graph
    logits = model(distributed.scatter(tokens, mine.partition, axis=-1), mine)   # of its own tokens

:func:`attend`, :func:`gather` and whatever hears along a :func:`local` graph are collectives: every rank of the group calls them,
in the same order. The loss is the sum of the ranks' losses; gradients of parameters, which all ranks hold, are summed by the
caller (or averaged by DDP). :func:`cache` decodes.

**Heads as shards.** :func:`shard_heads` gives each rank some heads of every layer, and one all-reduce sums what they say.

**What it costs** is told by :func:`plan` before anything runs, bytes exactly; :func:`traffic` counts what was sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed as _distributed
from torch.distributed.device_mesh import DeviceMesh

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import attended
from gnn_attention.backends import Backend
from gnn_attention.backends.call import Call
from gnn_attention.distributed import subgraphs
from gnn_attention.distributed.attention import EXCHANGES, check_backend, run, tell_trouble, with_bias
from gnn_attention.distributed.balance import by_edges, documents
from gnn_attention.distributed.collectives import Flight, Traffic, agree, finish, start, traffic
from gnn_attention.distributed.halo_sets import halo
from gnn_attention.distributed.head_parallel import HeadwiseParallel, heads_plan, shard_heads
from gnn_attention.distributed.locality import metis, rcm
from gnn_attention.distributed.partition import Partition, Shares, check_partition, contiguous, of_owners, of_ranges, zigzag
from gnn_attention.distributed.planner import PARTITIONS, Plan, best, plan
from gnn_attention.distributed.rank_cache import RankCache
from gnn_attention.distributed.rank_graph import RankGraph
from gnn_attention.graph import TokenGraph, kept
from gnn_attention.score_mods import ScoreMod

__all__ = [
    "PARTITIONS",
    "HeadwiseParallel",
    "Partition",
    "Plan",
    "RankCache",
    "RankGraph",
    "RankInfo",
    "Shares",
    "Traffic",
    "attend",
    "best",
    "by_edges",
    "cache",
    "contiguous",
    "documents",
    "gather",
    "halo",
    "heads_plan",
    "in_edges",
    "local",
    "metis",
    "of_owners",
    "of_ranges",
    "plan",
    "rcm",
    "scatter",
    "shard_heads",
    "traffic",
    "zigzag",
]

SIDES = ("dst", "src")
PARTS = ("partition", "a row of x", "gradients")  # what all ranks must give gather alike
REFUSALS = (TypeError, ValueError, IndexError, NotImplementedError)


@dataclass(frozen=True, eq=False)
class RankInfo:
    """What a call of :func:`attend` can tell beside its output: ``lse [B, Hq, own dst]``, sinks included."""

    lse: Tensor


def local(graph: TokenGraph, partition: Partition | str = "contiguous", group: Any = None, exchange: str = "auto") -> RankGraph:
    """What this rank sees of ``graph``: give it to layers and models in the graph's place, beside the states of its own tokens.

    ``partition``: who owns which tokens, or the name of one of :data:`PARTITIONS`. ``group``: a ProcessGroup or a DeviceMesh of
    one axis, all ranks unless given. ``exchange``: "halo" fetches the senders that are heard, "gather" all of them, "ring" hands
    all of them on from rank to rank; "auto" takes what :func:`plan` estimates to be the fastest. Worked out once for each graph;
    no collective.

    Positions are those of the whole graph: rotations, score_mods and dropout are what they are in one process. Where one rank
    alone gives a layer states of a wrong length, the others wait until the group's timeout; :func:`attend` would tell them.
    Layers need a backend other than None, the walk. ``torch.compile`` breaks its graph at their attention (``fullgraph=True`` is
    refused), which runs as it is.

    Raises ValueError where torch.distributed is not initialised, this process is not in the group, or the partition is of other
    tokens or ranks; TypeError for no graph.
    """
    group = _group(group)
    partition = _partition(_whole(graph), partition, group)
    exchange = checks.choice("exchange", exchange, EXCHANGES)
    view: RankGraph = kept(_local, graph, partition, _distributed.get_rank(group), group, exchange)
    return view


def attend(
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "batch kv_heads src dim"],
    v: Float[Tensor, "batch kv_heads src value_dim"],
    graph: TokenGraph,
    partition: Partition | str = "contiguous",
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    bias: Float[Tensor, "..."] | None = None,
    sink_logits: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    backend: str | Backend = "auto",
    exchange: str = "auto",
    group: Any = None,
    return_info: bool = False,
) -> Any:
    """``gnn_attention.attend`` for the receivers that this rank owns, of q, k and v that it holds alone. A collective.

    Args:
        q: queries of the own receivers, ``[B, Hq, own dst, D]``, in ascending order.
        k: keys of the own senders ``[B, Hkv, own src, D]``, in ascending order.
        v: values of the own senders ``[B, Hkv, own src, Dv]``.
        graph: the whole graph, the same on every rank.
        partition: who owns which tokens, or the name of one of :data:`PARTITIONS`.
        scale: as in ``gnn_attention.attend``, as are ``score_mod`` (told absolute positions), ``sink_logits`` and ``backend``.
        score_mod: as there.
        bias: a number for each edge of the own receivers, broadcastable to ``[B, Hq, E]``, in the order of :func:`in_edges`.
        sink_logits: as there.
        dropout: as there; the seed is the first rank's, so that the same edges are dropped as in one process with that seed.
        backend: as there.
        exchange: as in :func:`local`.
        group: as in :func:`local`.
        return_info: also return a :class:`RankInfo`.

    Returns:
        ``out [B, Hq, own dst, Dv]``, or ``(out, info)``; a rank without receivers gets none.

    Raises:
        ValueError: on every rank, where any of them was given what does not fit, or where they were given graphs, partitions,
            sizes or options that differ. Nothing has travelled then, and the next call is served.

    In training "ring" and "gather" keep the keys and values of all ranks for the backward pass, "halo" those that were heard.
    """
    ranks, trouble = _group(group), ""
    try:
        view = local(graph, partition, ranks, exchange)
        check_backend(backend)
        call = Call.checked(q, k, v, view, scale, score_mod, None, sink_logits, dropout, with_lse=True)
        call = with_bias(call, bias)
    except REFUSALS as error:
        trouble = f"{type(error).__name__}: {error}"
    if trouble:
        tell_trouble(trouble, ranks, q.device if isinstance(q, Tensor) else torch.device("cpu"))
    out, lse = attended(call, backend)
    return (out, RankInfo(lse)) if return_info else out


def cache(graph: TokenGraph, group: Any = None, layers: int = 1, block: int = 1) -> RankCache:
    """A cache for decoding whose tokens are spread over ranks: see :class:`RankCache`. ``group`` as in :func:`local`.

    ``block``: how many neighbouring tokens come to one rank before the next one's turn.
    """
    return RankCache(graph, _group(group), layers, block)


def in_edges(
    graph: TokenGraph, partition: Partition | str = "contiguous", group: Any = None, rank: int | None = None
) -> Int[Tensor, "2 edges"]:
    """The edges whose receivers a rank owns (this one unless given), as in ``graph.edge_index`` and in its order.

    ``graph.positions_of`` of them picks the rank's share of a per-edge bias.
    """
    group = _group(group)
    partition = _partition(_whole(graph), partition, group)
    return subgraphs.in_edges(graph, partition, _distributed.get_rank(group) if rank is None else rank)


def scatter(
    x: Float[Tensor, "..."], partition: Partition, axis: int = -2, side: str = "dst", group: Any = None
) -> Float[Tensor, "..."]:
    """The own tokens' part of ``x``, which every rank holds whole: of its receivers, or its senders (``side="src"``). Nothing
    travels.

    ``axis`` is the one of the tokens. Raises ValueError where it has another length than the partition, IndexError where there
    is none, TypeError for what is no tensor.
    """
    shares = _shares(partition, side, _group(group))
    if _length(x, axis) != shares.num_tokens:
        raise ValueError(f"x must have {shares.num_tokens} tokens on axis {axis}, those of {shares!r}, got {list(x.shape)}")
    return x.index_select(axis, shares.tokens(_distributed.get_rank(_group(group))).to(x.device))


def gather(
    x: Float[Tensor, "..."], partition: Partition, axis: int = -2, side: str = "dst", group: Any = None
) -> Float[Tensor, "..."]:
    """The tokens of all ranks in their order, from each rank's part: :func:`scatter` undone, on every rank. A collective.

    The gradient that reaches a rank's part is the sum of those of all ranks. ValueError, on every rank, where one of them gave a
    part of another length than its own, or of other rows than the others.
    """
    group = _group(group)
    shares, rank, trouble = _shares(partition, side, group), _distributed.get_rank(group), ""
    try:
        if _length(x, axis) != shares.sizes[rank]:
            raise ValueError(f"x must have the {shares.sizes[rank]} own tokens on axis {axis}, got {list(x.shape)}")
    except REFUSALS as error:
        trouble = f"{type(error).__name__}: {error}"
    if trouble:
        tell_trouble(trouble, group, x.device if isinstance(x, Tensor) else torch.device("cpu"), PARTS)
    rows = x.movedim(axis, 0)
    wanted = "wanted" if torch.is_grad_enabled() and x.requires_grad else "not wanted"
    agree(PARTS, (shares, f"{list(rows.shape[1:])} in {x.dtype}", wanted), "", group, x.device)
    flight = Flight(subgraphs.to_everyone(shares.sizes, rank), group, gather=True)
    others = finish(flight, start(flight, rows.flatten(1)))
    before = sum(shares.sizes[:rank])
    joined = torch.cat([others[:before], rows.flatten(1), others[before:]])
    order = torch.cat([shares.tokens(r) for r in range(shares.world_size)]).argsort()
    whole: Tensor = joined[order.to(x.device)].view(shares.num_tokens, *rows.shape[1:]).movedim(0, axis)
    return whole


# -- helpers ----------------------------------------------------------------------------------------------------------


def _local(graph: TokenGraph, partition: Partition, rank: int, group: Any, exchange: str) -> RankGraph:
    dst, src = partition.dst.tokens(rank), partition.src.tokens(rank)
    own = subgraphs.piece(graph, dst, src).graph
    names = ("rule", "num_dst", "num_src", "heads", "batch", "name", "dst_offset", "src_offset", "_listed")
    values: dict[str, Any] = {name: getattr(own, name) for name in names}
    values |= {"dst_at": dst + graph.dst_offset, "src_at": src + graph.src_offset}
    values |= {"whole": graph, "partition": partition, "rank": rank, "group": group, "exchange": exchange}
    return RankGraph(**values, run=run, again=partial(local, partition=partition, group=group, exchange=exchange))


def _group(group: Any) -> Any:
    """The process group that is meant."""
    if not (_distributed.is_available() and _distributed.is_initialized()):
        raise ValueError(
            "torch.distributed is not initialised: start the program with torchrun and call "
            "torch.distributed.init_process_group('gloo') (CPU) or ('nccl') (CUDA) first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a mesh of one axis, got {group.ndim} axes; take one of them, such as mesh['tokens']")
        group = group.get_group()
    group = _distributed.group.WORLD if group is None else group
    if not isinstance(group, _distributed.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh of one axis, got {type(group).__name__}")
    if _distributed.get_rank(group) < 0:
        raise ValueError(f"this process, rank {_distributed.get_rank()} of all, is not in the group")
    return group


def _whole(graph: TokenGraph) -> TokenGraph:
    if not isinstance(graph, TokenGraph) or isinstance(graph, RankGraph):
        raise TypeError(f"graph must be the TokenGraph of all tokens, got {type(graph).__name__}")
    return graph


def _partition(graph: TokenGraph, partition: Partition | str, group: Any) -> Partition:
    world = _distributed.get_world_size(group)
    if isinstance(partition, str):
        partition = kept(PARTITIONS[checks.choice("partition", partition, PARTITIONS)], graph, world)
    return _of_world(check_partition(partition, graph), world)


def _of_world(partition: Partition, world: int) -> Partition:
    if partition.world_size != world:
        raise ValueError(f"partition is for {partition.world_size} ranks, but the group has {world}: make one for {world}")
    return partition


def _length(x: Tensor, axis: int) -> int:
    """How many tokens ``x`` has."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    axis = checks.position("axis", axis)
    if not -x.dim() <= axis < x.dim():
        raise IndexError(f"axis must be in {-x.dim()} .. {x.dim() - 1}, one of x {list(x.shape)}, got {axis}")
    return x.shape[axis]


def _shares(partition: Partition, side: str, group: Any) -> Shares:
    if not isinstance(partition, Partition):
        raise TypeError(f"partition must be a Partition, got {type(partition).__name__}")
    _of_world(partition, _distributed.get_world_size(group))
    return partition.dst if checks.choice("side", side, SIDES) == "dst" else partition.src
