"""Attention heads in three forms: standard, factored and merged; ``latent`` holds a fourth."""

from gnn_attention.heads.model_space import FactoredHeads, MergedHeads
from gnn_attention.heads.standard import StandardHeads

__all__ = ["FactoredHeads", "MergedHeads", "StandardHeads"]
