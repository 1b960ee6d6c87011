"""Select this rank's part of a graph, compute attention on it, and move tokens between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from gnn_attention._support import checks
from gnn_attention._support.checks import describe_type
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import check_backend, run_attention
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.distributed import collectives
from gnn_attention.distributed.attention import run
from gnn_attention.distributed.partition import Partition, Shares, check_world_size, resolve_partition
from gnn_attention.distributed.rank_graph import RankGraph, subgraph
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.score_mods import ScoreMod


def local(graph: TokenGraph, partition: Partition | str = "contiguous", group: Any = None) -> RankGraph:
    """Return this rank's part of ``graph``; pass it to layers with the states of the rank's tokens.

    ``partition`` is a :class:`Partition` or a name in :data:`PARTITIONS`; ``group`` is a
    ProcessGroup or a DeviceMesh of one axis, by default all ranks. The graph caches the result. Not
    a collective.

    Rotations, score_mods and dropout act as in one process. Layers need a backend other than
    "message_passing"; ``torch.compile`` breaks its graph at their attention. If a single rank
    passes a layer states of a wrong length, the other ranks wait until the group's timeout, whereas
    :func:`attend` raises on all ranks.

    Raises ValueError if torch.distributed is not initialised, this process is not in the group, or
    the partition does not fit the graph and group; TypeError unless ``graph`` is the whole graph.
    """
    group = _resolve_group(group)
    if not isinstance(graph, TokenGraph) or isinstance(graph, RankGraph):
        raise TypeError(f"graph must be the TokenGraph of all tokens, got {describe_type(graph)}")
    partition = resolve_partition(graph, partition, distributed.get_world_size(group))
    return memoized(_build_rank_graph, graph, partition, distributed.get_rank(group), group)


def attend(
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "batch kv_heads src dim"],
    v: Float[Tensor, "batch kv_heads src value_dim"],
    graph: TokenGraph,
    partition: Partition | str = "contiguous",
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    sink_logits: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    backend: str | Backend = "auto",
    group: Any = None,
) -> Float[Tensor, "batch heads dst value_dim"]:
    """Run ``gnn_attention.attend`` for this rank's receivers, without a bias. This is a collective.

    Args (for others see ``gnn_attention.attend``, for partition and group :func:`local`):
        q: queries of this rank's receivers ``[B, Hq, local dst, D]``, in order of position.
        k: keys of this rank's senders ``[B, Hkv, local src, D]``, in order of position.
        v: values of this rank's senders ``[B, Hkv, local src, Dv]``.
        graph: the whole graph, the same on every rank.
        score_mod: called with absolute positions.
        dropout: all ranks use the seed of rank 0, so that edges are dropped as in one process.

    Returns:
        ``out [B, Hq, local dst, Dv]``, empty on a rank without receivers. For lse call
        ``gnn_attention.attend(q, k, v, local(graph), return_info=True)``.

    Raises:
        ValueError: on every rank, if the arguments of any rank do not fit, or if ranks have different
            graphs, partitions, sizes or options. No tokens have been sent then, so the next call works.
    """
    process_group = _resolve_group(group)
    with collectives.raise_on_all_ranks(process_group, q):
        rank_graph = local(graph, partition, process_group)
        check_backend(backend)
        options: dict[str, Any] = {"score_mod": score_mod, "sink_logits": sink_logits, "dropout": dropout}
        call = AttentionCall.from_arguments(q, k, v, rank_graph, scale, **options)
    return run_attention(call, backend)[0]


def scatter(
    x: Float[Tensor, "..."], partition: Partition, axis: int = -2, side: str = "dst", group: Any = None
) -> Float[Tensor, "..."]:
    """Select this rank's tokens from ``x``, the tokens of all ranks. This is not a collective.

    ``axis`` is the axis of tokens, and ``side`` says whether they are receivers ("dst") or senders
    ("src"). Raises ValueError if the axis and the partition differ in length, IndexError if ``x``
    has no such axis.
    """
    group = _resolve_group(group)
    shares = _resolve_shares(partition, side, group)
    _check_length(x, axis, shares.num_tokens, f"{shares.num_tokens} tokens on axis {axis}")
    return x.index_select(axis, shares.tokens(distributed.get_rank(group)).to(x.device))


def gather(
    x: Float[Tensor, "..."], partition: Partition, axis: int = -2, side: str = "dst", group: Any = None
) -> Float[Tensor, "..."]:
    """Return the tokens of all ranks on every rank: the inverse of :func:`scatter`. A collective.

    The gradient of each rank's rows is summed over all ranks. Raises ValueError on every rank if a
    rank has a wrong number of tokens, or if ranks differ in the shape or dtype of a row.
    """
    group = _resolve_group(group)
    shares = _resolve_shares(partition, side, group)
    rank = distributed.get_rank(group)
    with collectives.raise_on_all_ranks(group, x):
        _check_length(x, axis, shares.sizes[rank], f"the rank's {shares.sizes[rank]} tokens on axis {axis}")
    rows = x.movedim(axis, 0)
    requires_grad = torch.is_grad_enabled() and x.requires_grad
    row_format = f"{list(rows.shape[1:])} in {x.dtype}"
    values = {"partition": shares, "row of x": row_format, "requires_grad": requires_grad}
    collectives.check_agreement(values, "", group, x.device)
    send_indices = [torch.arange(len(rows), device="cpu")] * shares.world_size
    # `all_rows` begins with the local rows, which are followed by the rows of all ranks.
    all_rows = collectives.exchange(rows.unsqueeze(-1).flatten(1), send_indices, shares.sizes, group)
    order = shares.owner.argsort(stable=True).argsort().to(x.device)
    return all_rows[len(rows) :][order].view(shares.num_tokens, *rows.shape[1:]).movedim(0, axis)


def _build_rank_graph(graph: TokenGraph, partition: Partition, rank: int, group: Any) -> RankGraph:
    dst, src = partition.dst.tokens(rank), partition.src.tokens(rank)
    local_graph, _ = subgraph(graph, dst, src)
    names = ("edges", "num_dst", "num_src", "heads", "batch", "name", "dst_offset", "src_offset")
    values: dict[str, Any] = {name: getattr(local_graph, name) for name in names}
    values |= {"dst_at": dst + graph.dst_offset, "src_at": src + graph.src_offset}
    return RankGraph(**values, whole=graph, partition=partition, rank=rank, group=group, run=run)


def _resolve_group(group: Any) -> Any:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError("torch.distributed is not initialised: use torchrun and init_process_group first")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must have one axis, got {group.ndim}: use mesh['tokens']")
        group = group.get_group()
    group = distributed.group.WORLD if group is None else group
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, got {describe_type(group)}")
    if distributed.get_rank(group) < 0:
        raise ValueError(f"group must contain this process, which is rank {distributed.get_rank()}")
    return group


def _check_length(x: Tensor, axis: int, length: int, expected: str) -> None:
    checks.instance("x", x, Tensor)
    if not -x.dim() <= checks.integer("axis", axis) < x.dim():
        raise IndexError(f"axis must be in {-x.dim()} .. {x.dim() - 1} for {list(x.shape)}, got {axis}")
    if x.shape[axis] != length:
        raise ValueError(f"x must have {expected}, got {list(x.shape)}")


def _resolve_shares(partition: Partition, side: str, group: Any) -> Shares:
    checks.instance("partition", partition, Partition)
    check_world_size(partition, distributed.get_world_size(group))
    return partition.dst if checks.choice("side", side, ("dst", "src")) == "dst" else partition.src
