"""Run the attention of transformers models on token graphs."""

from gnn_attention.huggingface._contexts import NAME, GraphFunction
from gnn_attention.huggingface.interface import attending, attention, mask, use_graph

__all__ = ["NAME", "GraphFunction", "attending", "attention", "mask", "use_graph"]
