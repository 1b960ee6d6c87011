"""The table of theorems: a module for each of ``gnn_attention.patterns``, a row for each way to call a
builder.
"""

from support.zoo import (
    basic,
    blocks,
    content,
    decoding,
    expanders,
    grids,
    hierarchies,
    hubs,
    latents,
    local,
    sequences,
    streaming,
    strided,
    structure,
    trees,
)
from support.zoo.row import SIZES, Row

__all__ = ["ROWS", "SIZES", "Row"]

ROWS: list[Row] = [
    *basic.ROWS,
    *blocks.ROWS,
    *content.ROWS,
    *decoding.ROWS,
    *expanders.ROWS,
    *grids.ROWS,
    *hierarchies.ROWS,
    *hubs.ROWS,
    *latents.ROWS,
    *local.ROWS,
    *sequences.ROWS,
    *streaming.ROWS,
    *strided.ROWS,
    *structure.ROWS,
    *trees.ROWS,
]
