"""Convert a TokenGraph from and to masks, edge lists, matrices and graphs of other libraries."""

from gnn_attention.convert.formats import (
    from_edge_index,
    from_networkx,
    from_pyg,
    from_scipy,
    to_networkx,
    to_pyg,
    to_scipy,
)
from gnn_attention.convert.masks import from_mask
from gnn_attention.graph.kernel_formats import (
    Varlen,
    from_block_mask,
    to_block_mask,
    to_sdpa_mask,
    to_varlen,
    to_window,
)

__all__ = ["Varlen", "from_block_mask", "from_edge_index", "from_mask", "from_networkx"]
__all__ += ["from_pyg", "from_scipy", "to_block_mask", "to_networkx", "to_pyg", "to_scipy", "to_sdpa_mask"]
__all__ += ["to_varlen", "to_window"]
