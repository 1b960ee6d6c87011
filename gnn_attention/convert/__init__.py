"""Graphs from masks, edge lists, networkx, torch_geometric, files and texts, and back."""

from gnn_attention.convert.formats import (
    from_edge_index,
    from_mask,
    from_networkx,
    from_pyg,
    to_networkx,
    to_pyg,
)
from gnn_attention.graph.kernel_formats import Varlen, to_block_mask, to_sdpa_mask, to_varlen, to_window

__all__ = ["Varlen", "from_edge_index", "from_mask", "from_networkx", "from_pyg", "to_block_mask"]
__all__ += ["to_networkx", "to_pyg", "to_sdpa_mask", "to_varlen", "to_window"]
