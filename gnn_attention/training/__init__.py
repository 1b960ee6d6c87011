"""Training of the small language model, and comparisons of graphs by it."""

from gnn_attention.training.trainer import (
    Checkpoints,
    Corpus,
    Encoded,
    Layout,
    Ranks,
    Recipe,
    add_arguments,
    add_recipe,
    check_corpus,
    corpus,
    encoded,
    run,
    train,
)

__all__ = [
    "Checkpoints",
    "Corpus",
    "Encoded",
    "Layout",
    "Ranks",
    "Recipe",
    "add_arguments",
    "add_recipe",
    "check_corpus",
    "corpus",
    "encoded",
    "run",
    "train",
]
