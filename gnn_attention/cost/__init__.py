"""Exact counts of multiplications, numbers and bytes."""

from gnn_attention.cost.configs import CONFIGS, ModelSizes, config
from gnn_attention.cost.forms import FormCost, Macs, graphs_of, of_config, of_form, of_ranks, of_sizes
from gnn_attention.cost.graph_cost import GraphCost, of_graph
from gnn_attention.cost.rate_table import FORMS, LATENT_FORMS, LatentSizes, Rates, Sizes, rates

__all__ = ["FormCost", "GraphCost", "Macs", "graphs_of", "of_config", "of_form", "of_graph", "of_ranks"]
__all__ += ["CONFIGS", "FORMS", "LATENT_FORMS", "LatentSizes", "ModelSizes", "Rates", "Sizes", "config"]
__all__ += ["of_sizes", "rates"]
