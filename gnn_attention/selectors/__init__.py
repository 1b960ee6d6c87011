"""Selectors: modules whose ``select(q, k, graph)`` returns a graph of senders chosen by the data.

A selector chooses among the edges of ``graph``, which is causal by default; documents and prefixes are
expressed by this graph. A decoding step passes ``graph.rows(start, stop)``; ``|`` adds fixed senders. Scores
are computed for a chunk of receivers at a time: nothing of size tokens x tokens is stored. A selection has
no gradient: an :class:`Indexer` learns by its loss, or by :meth:`Indexer.edge_scores` as a bias.
"""

from gnn_attention.selectors.indexer import Indexer
from gnn_attention.selectors.native_sparse import NativeSparseAttention
from gnn_attention.selectors.pooled_blocks import PooledBlocks
from gnn_attention.selectors.recall import recall
from gnn_attention.selectors.top_k import TopK

__all__ = ["Indexer", "NativeSparseAttention", "PooledBlocks", "TopK", "recall"]
