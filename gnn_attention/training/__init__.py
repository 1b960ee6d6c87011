"""Training of the small language model, and comparisons of graphs by it."""

from gnn_attention.training.checkpoints import Checkpoints
from gnn_attention.training.parallel import Layout, Ranks
from gnn_attention.training.recipe import Recipe, add_recipe
from gnn_attention.training.text_corpus import Corpus, Encoded, check_corpus, corpus, encoded
from gnn_attention.training.trainer import add_arguments, run, train

__all__ = ["Checkpoints", "Corpus", "Encoded", "Layout", "Ranks", "Recipe", "add_arguments", "add_recipe"]
__all__ += ["check_corpus", "corpus", "encoded", "run", "train"]
