"""Attention heads in standard, factored and merged form; ``latent`` has a fourth form."""

from gnn_attention.heads.model_space import FactoredHeads, MergedHeads
from gnn_attention.heads.standard import StandardHeads

__all__ = ["FactoredHeads", "MergedHeads", "StandardHeads"]
