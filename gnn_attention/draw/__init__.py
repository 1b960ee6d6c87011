"""Draw pictures of graphs, masks and attention weights."""

from gnn_attention.draw.pictures import (
    arcs,
    degrees,
    graph,
    hops,
    layers,
    mask,
    over_time,
    side_by_side,
    weights,
)

__all__ = ["arcs", "degrees", "graph", "hops", "layers", "mask", "over_time", "side_by_side", "weights"]
