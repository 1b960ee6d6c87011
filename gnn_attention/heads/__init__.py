"""The weights of attention heads, in three forms: standard, factored, merged."""

from gnn_attention.heads.model_space import FactoredHeads, MergedHeads
from gnn_attention.heads.standard import StandardHeads

__all__ = ["FactoredHeads", "MergedHeads", "StandardHeads"]
