"""A mask as a graph: token graphs, their properties, and the formats of attention kernels (README.md)."""

from gnn_attention._support.memo import memoized
from gnn_attention.graph.rules import Rule
from gnn_attention.graph.token_graph import TokenGraph

__all__ = ["Rule", "TokenGraph", "memoized"]
