"""The sizes of published models' attention, each with its source."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gnn_attention._support import checks
from gnn_attention.cost.rate_table import LatentSizes, Sizes


@dataclass(frozen=True)
class ModelSizes:
    """The attention of one model: ``layers`` layers, of which ``window_layers`` have a window.

    ``window`` counts as :func:`gnn_attention.patterns.window` does, the token itself included. ``rotary``:
    rotated by position, between ``W_Q`` and ``W_K``.
    """

    name: str
    source: str
    layers: int
    heads: Sizes | LatentSizes
    rotary: bool = False
    window: int | None = None
    window_layers: int = 0

    @property
    def mergeable(self) -> bool:
        """False if something acts between ``W_Q`` and ``W_K``, so that their product is no single matrix."""
        return not self.rotary and isinstance(self.heads, Sizes) and not self.heads.qk_norm


def config(name: str) -> ModelSizes:
    """A model's sizes by its name; ValueError names the nearest.

    >>> config("llama-3-8b").heads.num_kv_heads
    8
    >>> config("lama-3-8b")
    Traceback (most recent call last):
    ValueError: there is no configuration 'lama-3-8b'; did you mean 'llama-3-8b'?
    """
    wanted = str(name).lower()
    if wanted in CONFIGS:
        return CONFIGS[wanted]
    near = difflib.get_close_matches(wanted, CONFIGS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(CONFIGS)}"
    raise ValueError(f"there is no configuration {checks.quoted(name)}; {hint}")


def custom(layers: int, heads: Sizes) -> ModelSizes:
    """A model of the given sizes."""
    return ModelSizes("the given sizes", "the command line", checks.size("layers", layers, 1), heads)


SOURCES = {
    "shipped": "the model that ships with this package (gnn_attention.model)",
    "transformer-base": "Vaswani et al. 2017 (arXiv 1706.03762), table 3, base",
    "gpt-2": "Radford et al. 2019, table 2, 117M; openai-community/gpt2",
    "llama-3-8b": "Llama 3 (arXiv 2407.21783), table 3, 8B",
    "llama-3-70b": "Llama 3 (arXiv 2407.21783), table 3, 70B",
    "mistral-7b": "Mistral 7B (arXiv 2310.06825), table 1; mistralai/Mistral-7B-v0.1",
    "qwen-2.5-7b": "Qwen2.5 (arXiv 2412.15115), table 1; Qwen/Qwen2.5-7B",
    "qwen-3-8b": "Qwen3 (arXiv 2505.09388), table 1; Qwen/Qwen3-8B",
    "gemma-2-2b": "Gemma 2 (arXiv 2408.00118), table 1, 2.6B: every other has a window; google/gemma-2-2b",
    "gemma-3-4b": "Gemma 3 (arXiv 2503.19786), section 2: every sixth has no window; google/gemma-3-4b-pt",
    "deepseek-v3": "DeepSeek-V3 (arXiv 2412.19437), section 4.2: latent attention",
}
# layers, heads, and if rotary, window and its layers
SIZES: dict[str, tuple[Any, ...]] = {
    "shipped": (2, Sizes.of(128, 4)),
    "transformer-base": (6, Sizes.of(512, 8)),
    "gpt-2": (12, Sizes.of(768, 12, bias="QKVO")),
    "llama-3-8b": (32, Sizes.of(4096, 32, num_kv_heads=8), True),
    "llama-3-70b": (80, Sizes.of(8192, 64, num_kv_heads=8), True),
    "mistral-7b": (32, Sizes.of(4096, 32, num_kv_heads=8), True, 4096, 32),
    "qwen-2.5-7b": (28, Sizes.of(3584, 28, num_kv_heads=4, bias="QKV"), True),
    "qwen-3-8b": (36, Sizes.of(4096, 32, num_kv_heads=8, qk_norm=True), True),
    "gemma-2-2b": (26, Sizes.of(2304, 8, head_dim=256, num_kv_heads=4), True, 4096, 13),
    "gemma-3-4b": (34, Sizes.of(2560, 8, head_dim=256, num_kv_heads=4, qk_norm=True), True, 1024, 29),
    "deepseek-v3": (61, LatentSizes.of(7168, 128, 128, 64, 512, value_dim=128, query_dim=1536), True),
}
CONFIGS: Mapping[str, ModelSizes] = {
    name: ModelSizes(name, source, *SIZES[name]) for name, source in SOURCES.items()
}
