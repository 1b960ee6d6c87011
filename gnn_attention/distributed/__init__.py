"""Attention over tokens and heads on several ranks, on torch.distributed.

**Tokens on ranks.** Every rank owns some receivers and some senders (a :class:`Partition`) and stores their
rows alone. ``attend`` fetches just the senders that a rank's receivers attend to, forward and backward, and
is otherwise ``gnn_attention.attend``. Two lines put a model on ranks that ``torchrun`` starts:

    mine = distributed.local(graph)  # this rank's part of the graph
    logits = model(distributed.scatter(tokens, mine.partition, axis=-1), mine)  # of its own tokens

:func:`attend`, :func:`gather` and every layer along a :func:`local` graph are collectives: every rank of the
group calls them, in the same order. The loss is the sum of the ranks' losses; gradients of parameters, which
all ranks have, are summed by the caller (or averaged by DDP). :func:`cache` decodes.

**Heads as shards.** :func:`shard_heads` gives each rank some heads of every layer; one all-reduce sums them.

**Cost.** :func:`plan` counts edges and bytes before anything runs; :func:`traffic` counts what was sent.
"""

from gnn_attention.distributed.api import RankInfo, attend, cache, gather, in_edges, local, scatter
from gnn_attention.distributed.collectives import Traffic, traffic
from gnn_attention.distributed.halo_sets import halo
from gnn_attention.distributed.head_parallel import HeadwiseParallel, heads_plan, shard_heads
from gnn_attention.distributed.partition import Partition, Shares, contiguous, of_owners, of_ranges, zigzag
from gnn_attention.distributed.partitioners import by_edges, documents, metis, rcm
from gnn_attention.distributed.rank_cache import RankCache
from gnn_attention.distributed.rank_graph import RankGraph
from gnn_attention.distributed.rank_plan import PARTITIONS, Plan, best, plan

# tokens on ranks
# tokens on ranks
__all__ = ["RankCache", "RankGraph", "RankInfo", "attend", "cache", "gather", "halo", "in_edges", "local"]
# who owns which tokens
__all__ += ["PARTITIONS", "Partition", "Shares", "best", "by_edges", "contiguous", "documents", "metis"]
__all__ += ["of_owners", "of_ranges", "rcm", "scatter", "zigzag"]
# heads as shards, and cost
__all__ += ["HeadwiseParallel", "Plan", "Traffic", "heads_plan", "plan", "shard_heads", "traffic"]
