"""Tokens on ranks: this rank's part of a graph, attention along it, and tokens to and from ranks."""

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
from gnn_attention.distributed.partition import Partition, Shares, check_world_size, partition_of
from gnn_attention.distributed.rank_graph import RankGraph, subgraph
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.score_mods import ScoreMod


def local(graph: TokenGraph, partition: Partition | str = "contiguous", group: Any = None) -> RankGraph:
    """The own part of ``graph``, for layers and models in its place, with the states of the own tokens.

    ``partition``: who owns which tokens, or the name of one of :data:`PARTITIONS`. ``group``: a ProcessGroup
    or a DeviceMesh of one axis, all ranks by default. Cached for each graph; no collective.

    Rotations, score_mods and dropout are those of one process. Layers need a backend other than
    "message_passing"; ``torch.compile`` breaks its graph at their attention. Where one rank alone gives a
    layer states of a wrong length, the others wait until the group's timeout; :func:`attend` raises on all.

    Raises ValueError where torch.distributed is not initialised, this process is not in the group, or the
    partition is of other tokens or ranks; TypeError for no graph.
    """
    group = _group(group)
    if not isinstance(graph, TokenGraph) or isinstance(graph, RankGraph):
        raise TypeError(f"graph must be the TokenGraph of all tokens, got {describe_type(graph)}")
    partition = partition_of(graph, partition, distributed.get_world_size(group))
    view: RankGraph = memoized(_local, graph, partition, distributed.get_rank(group), group)
    return view


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
    """``gnn_attention.attend`` for the receivers that this rank owns, without a per-edge bias. A collective.

    Args (others as of ``gnn_attention.attend``; partition and group as of :func:`local`):
        q: queries of the own receivers, ``[B, Hq, own dst, D]``, in ascending order.
        k: keys of the own senders ``[B, Hkv, own src, D]``, in ascending order.
        v: values of the own senders ``[B, Hkv, own src, Dv]``.
        graph: the whole graph, the same on every rank.
        score_mod: called at absolute positions.
        dropout: the first rank's seed serves all, so that the same edges are dropped as in one process.

    Returns:
        ``out [B, Hq, own dst, Dv]``, empty on a rank without receivers. For lse call
        ``gnn_attention.attend(q, k, v, local(graph), return_info=True)``.

    Raises:
        ValueError: on every rank, if arguments do not fit on any of them, or if ranks have different graphs,
            partitions, sizes or options. Nothing has travelled then, and the next call runs.
    """
    ranks = _group(group)
    with collectives.raised_on_all_ranks(ranks, q):
        view = local(graph, partition, ranks)
        check_backend(backend)
        call = AttentionCall.from_arguments(q, k, v, view, scale, score_mod, None, sink_logits, dropout)
    return run_attention(call, backend)[0]


def scatter(
    x: Float[Tensor, "..."], partition: Partition, axis: int = -2, side: str = "dst", group: Any = None
) -> Float[Tensor, "..."]:
    """The own tokens' part of ``x``, which every rank has whole: of its receivers, or of its senders ("src").

    No communication. ``axis`` is that of the tokens. Raises ValueError where it has another length than the
    partition, IndexError where there is none, TypeError for what is no tensor.
    """
    group = _group(group)
    shares = _shares(partition, side, group)
    _check_length(x, axis, shares.num_tokens, f"{shares.num_tokens} tokens on axis {axis}")
    return x.index_select(axis, shares.tokens(distributed.get_rank(group)).to(x.device))


def gather(
    x: Float[Tensor, "..."], partition: Partition, axis: int = -2, side: str = "dst", group: Any = None
) -> Float[Tensor, "..."]:
    """The tokens of all ranks in order, on every rank: the inverse of :func:`scatter`. A collective.

    The gradient of a rank's part is the sum of those of all ranks. ValueError, on every rank, where the part
    of one of them has another length than its own, or other rows than the rest.
    """
    group = _group(group)
    shares, rank = _shares(partition, side, group), distributed.get_rank(group)
    with collectives.raised_on_all_ranks(group, x):
        _check_length(x, axis, shares.sizes[rank], f"the {shares.sizes[rank]} own tokens on axis {axis}")
    rows = x.movedim(axis, 0)
    grad = "wanted" if torch.is_grad_enabled() and x.requires_grad else "not wanted"
    values = {"partition": shares, "a row of x": f"{list(rows.shape[1:])} in {x.dtype}", "gradients": grad}
    collectives.check_agreement(values, "", group, x.device)
    send = [torch.arange(len(rows), device="cpu")] * shares.world_size
    # the own rows come first, and once more among those of all ranks
    known = collectives.exchange(rows.unsqueeze(-1).flatten(1), send, shares.sizes, group)
    order = shares.owner.argsort(stable=True).argsort().to(x.device)
    return known[len(rows) :][order].view(shares.num_tokens, *rows.shape[1:]).movedim(0, axis)


def _local(graph: TokenGraph, partition: Partition, rank: int, group: Any) -> RankGraph:
    dst, src = partition.dst.tokens(rank), partition.src.tokens(rank)
    own, _ = subgraph(graph, dst, src)
    names = ("edges", "num_dst", "num_src", "heads", "batch", "name", "dst_offset", "src_offset")
    values: dict[str, Any] = {name: getattr(own, name) for name in names}
    values |= {"dst_at": dst + graph.dst_offset, "src_at": src + graph.src_offset}
    return RankGraph(**values, whole=graph, partition=partition, rank=rank, group=group, run=run)


def _group(group: Any) -> Any:
    if not (distributed.is_available() and distributed.is_initialized()):
        advice = "start the program with torchrun and call torch.distributed.init_process_group first"
        raise ValueError(f"torch.distributed is not initialised: {advice}")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a mesh of one axis, got {group.ndim}: take mesh['tokens']")
        group = group.get_group()
    group = distributed.group.WORLD if group is None else group
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup or a DeviceMesh of one axis, got {describe_type(group)}"
        )
    if distributed.get_rank(group) < 0:
        raise ValueError(f"this process, rank {distributed.get_rank()} of all, is not in the group")
    return group


def _check_length(x: Tensor, axis: int, length: int, expected: str) -> None:
    checks.instance("x", x, Tensor)
    if not -x.dim() <= checks.position("axis", axis) < x.dim():
        raise IndexError(f"axis must be in {-x.dim()} .. {x.dim() - 1}, one of x {list(x.shape)}, got {axis}")
    if x.shape[axis] != length:
        raise ValueError(f"x must have {expected}, got {list(x.shape)}")


def _shares(partition: Partition, side: str, group: Any) -> Shares:
    checks.instance("partition", partition, Partition)
    check_world_size(partition, distributed.get_world_size(group))
    return partition.dst if checks.choice("side", side, ("dst", "src")) == "dst" else partition.src
