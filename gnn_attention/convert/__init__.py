"""Graphs from masks, edge lists, networkx, torch_geometric, files and texts, and back."""

from gnn_attention.convert.formats import (
    Varlen,
    from_edge_index,
    from_mask,
    from_networkx,
    from_pyg,
    to_block_mask,
    to_networkx,
    to_pyg,
    to_sdpa_mask,
    to_varlen,
    to_window,
)

__all__ = [
    "Varlen",
    "from_edge_index",
    "from_mask",
    "from_networkx",
    "from_pyg",
    "to_block_mask",
    "to_networkx",
    "to_pyg",
    "to_sdpa_mask",
    "to_varlen",
    "to_window",
]
