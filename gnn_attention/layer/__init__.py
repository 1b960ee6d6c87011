"""Attention as a torch_geometric layer."""

from gnn_attention.layer.attention import MessagePassingAttention

__all__ = ["MessagePassingAttention"]
