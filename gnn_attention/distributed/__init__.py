"""Attention over tokens and heads on several ranks, on torch.distributed.

**Tokens on ranks.** Every rank owns some receivers and some senders (a :class:`Partition`) and stores their
rows alone. ``attend`` fetches just the senders that a rank's receivers attend to (their :func:`halo`), and is
otherwise ``gnn_attention.attend``. Two lines put a model on ranks that ``torchrun`` starts:

    mine = distributed.local(graph)  # this rank's part of the graph
    logits = model(distributed.scatter(tokens, mine.partition, axis=-1), mine)  # of its own tokens

:func:`attend`, :func:`gather` and every layer along a :func:`local` graph are collectives: every rank of the
group calls them, in the same order. The loss is the sum of the ranks' losses; gradients of parameters, which
all ranks have, are summed by the caller (or averaged by DDP).

**Heads as shards.** :func:`shard_heads` gives each rank some heads of every layer; one all-reduce sums them.

**Cost.** :func:`plan` counts edges and bytes before anything runs.
"""

from gnn_attention.distributed.api import attend, gather, local, scatter
from gnn_attention.distributed.halo_sets import halo
from gnn_attention.distributed.head_parallel import HeadwiseParallel, shard_heads
from gnn_attention.distributed.partition import (
    PARTITIONS,
    Partition,
    Shares,
    by_edges,
    contiguous,
    metis,
    zigzag,
)
from gnn_attention.distributed.rank_graph import RankGraph
from gnn_attention.distributed.rank_plan import Plan, plan

# tokens on ranks
__all__ = ["RankGraph", "attend", "gather", "halo", "local", "scatter"]
# who owns which tokens, and what that costs
__all__ += ["PARTITIONS", "Partition", "Plan", "Shares", "by_edges", "contiguous", "metis", "plan", "zigzag"]
# heads as shards
__all__ += ["HeadwiseParallel", "shard_heads"]
