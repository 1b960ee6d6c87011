"""Graphs chosen by the data: modules whose ``select(q, k, graph)`` returns a graph of chosen senders.

Each chooses among the edges of ``graph`` (None: all tokens up to the receiver; a decoding step is
``graph.rows(start, stop)``), so documents and prefixes come from there, and what is always attended to by
``|``. Scores are made for some receivers at a time: nothing of tokens x tokens is stored. A choice has no
gradient: an :class:`Indexer` learns by its loss, or through :meth:`Indexer.edge_scores` as a bias.
"""

from gnn_attention.selectors.indexer import Indexer
from gnn_attention.selectors.native_sparse import NativeSparseAttention
from gnn_attention.selectors.pooled_blocks import PooledBlocks
from gnn_attention.selectors.recall import recall
from gnn_attention.selectors.top_k import TopK

__all__ = ["Indexer", "NativeSparseAttention", "PooledBlocks", "TopK", "recall"]
