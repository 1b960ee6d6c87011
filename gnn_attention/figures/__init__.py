"""Figures of trust: what the library promises, each measured by a command and printed with its bar.

``equality``: random draws of graph, sizes, numbers and options through every backend, against the float64 formula.
"""

from gnn_attention.figures import equality
from gnn_attention.figures.draws import Draw
from gnn_attention.figures.equality import Mismatch, Tally

__all__ = ["Draw", "Mismatch", "Tally", "equality"]
