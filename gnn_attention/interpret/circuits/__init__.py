"""Analyse heads as circuits: which subspaces they read and write, how they compose, their motifs.

>>> from gnn_attention import circuits, model as lm
>>> trained, vocabulary = lm.load_trained()
>>> head = circuits.of(trained.blocks[1], 3)
>>> head.message.rank().item(), head.reads_as_sender
(32, Subspace(dim 32 of 128))
"""

from gnn_attention.interpret.circuits.composition import composition, compositions
from gnn_attention.interpret.circuits.head import Circuit, TopTokens, each, of, top_tokens
from gnn_attention.interpret.circuits.subspace import Subspace
from gnn_attention.interpret.circuits.templates import (
    TEMPLATES,
    detect,
    duplicate_token,
    induction,
    previous_token,
)

__all__ = ["TEMPLATES", "Circuit", "Subspace", "TopTokens", "composition", "compositions", "detect"]
__all__ += ["duplicate_token", "each", "induction", "of", "previous_token", "top_tokens"]
