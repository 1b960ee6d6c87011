"""Analyse graphs: how information travels, what is connected, and how two graphs differ.

Functions that model layers accept one graph for all layers, or a list with one for each layer.
"""

from gnn_attention.analyse.chosen import Choice, choice, overlap
from gnn_attention.analyse.compare import Difference, diff
from gnn_attention.analyse.influence import HopInfluence, by_hop, influence, jacobian_norms
from gnn_attention.analyse.reach import (
    diameter,
    layers_between,
    layers_to_full_reach,
    never_hears,
    path_counts,
    receptive_field,
    witness,
)
from gnn_attention.analyse.structure import Degrees, Summary, components, summary

__all__ = ["Choice", "Degrees", "Difference", "HopInfluence", "Summary", "by_hop", "choice", "components"]
__all__ += ["diameter", "diff", "influence", "jacobian_norms", "layers_between", "never_hears"]
__all__ += ["layers_to_full_reach", "overlap", "path_counts", "receptive_field", "summary", "witness"]
