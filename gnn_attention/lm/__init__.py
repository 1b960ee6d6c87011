"""Real language models from installed packages: ``load("smollm2")``, without a network."""

from gnn_attention.lm.models import MODELS, load

__all__ = ["MODELS", "load"]
