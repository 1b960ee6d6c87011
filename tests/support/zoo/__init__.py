"""The table of theorems: a module for each of ``patterns``, a row for each way to call a builder."""

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
from support.zoo.row import SIZES, Row, read

__all__ = ["ROWS", "SIZES", "Row"]

FAMILIES = (basic, blocks, content, decoding, expanders, grids, hierarchies, hubs, latents, local)
MORE = (sequences, streaming, strided, structure, trees)
ROWS = [row for module in FAMILIES + MORE for row in read(module.ROWS, vars(module))]
