"""A Llama of Hugging Face as small as can be, from no file."""

from __future__ import annotations

import importlib
from typing import Any


def llama(vocabulary: int = 8, width: int = 8, layers: int = 1, heads: int = 1, **options: Any) -> Any:
    """With drawn weights, in evaluation mode; ``options`` are further ones of its configuration."""
    transformers = importlib.import_module("transformers")
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": width}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, **options)).eval()
