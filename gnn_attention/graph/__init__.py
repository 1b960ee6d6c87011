"""A mask as a graph: token graphs, what is asked of them, and forms in which kernels take them."""

from gnn_attention.graph.token_graph import Rule, TokenGraph, kept

__all__ = ["Rule", "TokenGraph", "kept"]
