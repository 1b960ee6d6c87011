"""Training of the small language model, and comparisons of graphs by it."""

from examples.training.checkpoints import Checkpoints
from examples.training.parallel import Layout, Ranks
from examples.training.recipe import Recipe, add_recipe
from examples.training.text_corpus import Corpus, Encoded, check_corpus, corpus, encoded
from examples.training.trainer import add_arguments, run, train

__all__ = ["Checkpoints", "Corpus", "Encoded", "Layout", "Ranks", "Recipe", "add_arguments", "add_recipe"]
__all__ += ["check_corpus", "corpus", "encoded", "run", "train"]
