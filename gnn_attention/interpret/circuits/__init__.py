"""Heads read as circuits: what each looks for and sends, in which subspaces, along which edges.

>>> from gnn_attention import circuits, model as lm
>>> trained, vocabulary = lm.load_trained()
>>> head = circuits.of(trained.blocks[1], 3)
>>> head.message.rank().item(), head.reads_as_sender
(32, Subspace(dim 32 of 128))
"""

from gnn_attention.interpret.circuits.composition import composition, compositions
from gnn_attention.interpret.circuits.head import Circuit, each, of
from gnn_attention.interpret.circuits.jobs import JOBS
from gnn_attention.interpret.circuits.lengths import PatternLengths, Split, pattern_lengths, split
from gnn_attention.interpret.circuits.reading import Effect, Reading, passages, readings
from gnn_attention.interpret.circuits.subspace import Subspace
from gnn_attention.interpret.circuits.templates import (
    TEMPLATES,
    detect,
    duplicate_token,
    induction,
    match,
    previous_token,
)
from gnn_attention.interpret.circuits.vocabulary import (
    TopTokens,
    VocabularyEffect,
    copying,
    copying_scores,
    effect_on_vocabulary,
    full_circuit,
    neuron_patterns,
    top_tokens,
)

__all__ = ["JOBS", "TEMPLATES", "Circuit", "Effect", "PatternLengths", "Reading", "Split", "Subspace"]
__all__ += ["TopTokens", "VocabularyEffect", "passages", "readings"]
__all__ += ["composition", "compositions", "copying", "copying_scores", "detect"]
__all__ += ["duplicate_token", "each", "effect_on_vocabulary", "full_circuit", "induction", "match"]
__all__ += ["neuron_patterns", "of", "pattern_lengths", "previous_token", "split", "top_tokens"]
