"""How a graph stores its edges: as a rule, as a list, or as the senders that each receiver chose."""

from gnn_attention.graph.edges.chosen import ChosenEdges
from gnn_attention.graph.edges.edge_set import EdgeSet, on_device
from gnn_attention.graph.edges.listed import ListedEdges, Parallel, log_count
from gnn_attention.graph.edges.rule import CombinedEdges, RuleEdges

__all__ = ["ChosenEdges", "CombinedEdges", "EdgeSet", "ListedEdges", "Parallel", "RuleEdges"]
__all__ += ["log_count", "on_device"]
