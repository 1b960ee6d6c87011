"""A small language model, and layers of other models as heads."""

from gnn_attention.model.language_model import (
    TRAINED,
    Block,
    Config,
    LanguageModel,
    generate,
    induction_scores,
    load,
    load_trained,
    previous_token_scores,
    save,
)

__all__ = ["TRAINED", "Block", "Config", "LanguageModel", "generate", "induction_scores", "load"]
__all__ += ["load_trained", "previous_token_scores", "save"]
