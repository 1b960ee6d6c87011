"""Language models from installed packages: ``load("smollm2")`` needs no network."""

from gnn_attention.lm.models import MODELS, load

__all__ = ["MODELS", "load"]
