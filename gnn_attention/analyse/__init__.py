"""What a graph lets information do: how far and how fast it travels, what is connected, how two differ.

Functions about layers take one graph, or a list with a graph for each layer.
"""

from gnn_attention.analyse.bottlenecks import curvature, effective_resistance
from gnn_attention.analyse.chosen import Choice, choice, overlap
from gnn_attention.analyse.compare import Difference, diff
from gnn_attention.analyse.expressive import YunConditions, yun_conditions
from gnn_attention.analyse.influence import HopInfluence, by_hop, horizon, influence, jacobian_norms
from gnn_attention.analyse.reach import (
    diameter,
    eccentricity,
    layers_between,
    layers_to_full_reach,
    never_hears,
    path_counts,
    receptive_field,
    witness,
)
from gnn_attention.analyse.spectrum import spectral_gap
from gnn_attention.analyse.structure import Degrees, Summary, components, summary

__all__ = ["Choice", "choice", "overlap"]
__all__ += ["Degrees", "Difference", "HopInfluence", "Summary", "YunConditions", "by_hop", "components"]
__all__ += ["curvature", "diameter", "diff", "eccentricity", "effective_resistance", "horizon", "influence"]
__all__ += ["jacobian_norms", "layers_between", "layers_to_full_reach", "never_hears", "path_counts"]
__all__ += ["receptive_field", "spectral_gap", "summary", "witness", "yun_conditions"]
