"""Selectors: modules whose ``select(q, k, graph)`` returns a graph of senders chosen by the data.

A selector chooses among the edges of ``graph``, which is causal by default. For documents or a
prefix, pass their graph; for a decoding step, pass ``graph.rows(start, stop)``. ``|`` adds fixed
senders to a selection. Scores are computed for a chunk of receivers at a time, so no tokens x
tokens tensor is stored. A selection has no gradient: an :class:`Indexer` is trained by its loss, or
by its ``edge_scores`` as a bias.
"""

from gnn_attention.selectors.indexer import Indexer
from gnn_attention.selectors.native_sparse import NativeSparseAttention
from gnn_attention.selectors.pooled_blocks import PooledBlocks
from gnn_attention.selectors.recall import recall
from gnn_attention.selectors.top_k import TopK

__all__ = ["Indexer", "NativeSparseAttention", "PooledBlocks", "TopK", "recall"]
