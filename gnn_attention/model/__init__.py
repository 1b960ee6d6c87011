"""A small language model; ``model.foreign`` copies attention layers of other models."""

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
