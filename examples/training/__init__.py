"""Train the small language model, and compare graphs by training it along each of them."""

from examples.training.checkpoints import Checkpoint
from examples.training.parallel import Layout, Ranks
from examples.training.recipe import Recipe
from examples.training.text_corpus import Corpus, Encoded, corpus, encoded
from examples.training.trainer import train

__all__ = ["Checkpoint", "Corpus", "Encoded", "Layout", "Ranks", "Recipe", "corpus", "encoded", "train"]
