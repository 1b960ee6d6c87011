"""Compute attention with tokens or heads spread over several ranks, using torch.distributed.

**Tokens on ranks.** A :class:`Partition` assigns receivers and senders to ranks, which store their rows.
``attend`` fetches the senders of other ranks to which this rank's receivers attend (the :func:`halo`), and
then does what ``gnn_attention.attend`` does. Two lines run a model on the ranks that ``torchrun`` starts:

    mine = distributed.local(graph)  # the part of this rank
    logits = model(distributed.scatter(tokens, mine.partition, axis=-1), mine)  # of these tokens

:func:`attend`, :func:`gather` and every layer on a :func:`local` graph are collectives: every rank
of the group must call them in the same order. The loss is the sum of the ranks' losses. All ranks
have all parameters, and the caller must sum their gradients over ranks (DDP averages them instead).

**Heads as shards.** :func:`shard_heads` splits the heads of each layer over ranks and adds their outputs.

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

__all__ = ["RankGraph", "attend", "gather", "halo", "local", "scatter"]
__all__ += ["PARTITIONS", "Partition", "Plan", "Shares", "by_edges", "contiguous", "metis", "plan"]
__all__ += ["HeadwiseParallel", "shard_heads", "zigzag"]
