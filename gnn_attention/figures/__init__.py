"""Figures of trust: what the library promises, each measured by ``gnn-attention verify --figures`` and printed with its bar.

``FIGURES`` holds them by name; ``FIGURES["F1"].measure(100, print)`` measures a hundred cases of one.
"""

from gnn_attention.figures import equality, results
from gnn_attention.figures._figure import Figure, Measured
from gnn_attention.figures._table import FIGURES
from gnn_attention.figures.draws import Draw
from gnn_attention.figures.equality import Mismatch, Tally
from gnn_attention.figures.results import Result, Results

__all__ = ["FIGURES", "Draw", "Figure", "Measured", "Mismatch", "Result", "Results", "Tally", "equality", "results"]
