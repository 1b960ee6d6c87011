"""All figures, by name, in the order in which they are printed."""

from __future__ import annotations

from gnn_attention.figures import equality
from gnn_attention.figures._figure import Figure

__all__ = ["FIGURES"]

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (equality.FIGURE,)}
