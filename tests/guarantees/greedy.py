"""Greedy text of small Hugging Face models: token by token that of eager attention, with every cache and
padding.

The models are random and tiny, with weights large enough that attention decides: grouped heads with
rotations, learned positions, a softcap with windows, windows alone, sinks with windows. A token that
differs fails, however close the two best scores were.

No prompt ends in as many pads as a window is wide: an isolated row is exactly 0 here, in eager attention
the mean of all masked values.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor

VOCABULARY, PROMPT, NEW, WINDOW = 61, 12, 10, 5

DRAWN: Mapping[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "tie_word_embeddings": False}
IDS: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {**DRAWN, **IDS, **SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
GPT2 = {**DRAWN, **IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ARCHITECTURES: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "Gemma 2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**SMALL, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {**SMALL, "sliding_window": WINDOW}),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**SMALL, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
CACHES: dict[str, Mapping[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}
HOLES = (
    (1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1),
    (0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1),
    (0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
)
TOKENS = len(HOLES) * NEW  # of a text
PADDINGS: dict[str, Sequence[Sequence[int]] | None] = {
    "no padding": None,
    "padding on the left": [[int(i >= PROMPT - length) for i in range(PROMPT)] for length in (PROMPT, 8, 5)],
    "padding on the right": [[int(i < length) for i in range(PROMPT)] for length in (PROMPT, 10, 8)],
    "mixed padding": HOLES,
}


@dataclass(frozen=True)
class Case:
    """Text ``number``: twelve in a row meet every architecture, cache and padding."""

    number: int

    @property
    def architecture(self) -> str:
        return list(ARCHITECTURES)[self.number % len(ARCHITECTURES)]

    @property
    def cache(self) -> str:
        return list(CACHES)[self.number % len(CACHES)]

    @property
    def padding(self) -> str:
        return list(PADDINGS)[self.number % len(PADDINGS)]

    def __str__(self) -> str:
        return f"text {self.number} of {self.architecture}, {self.cache}, {self.padding}"

    @torch.no_grad()
    def difference(self) -> str | None:
        """Where our greedy text leaves that of eager attention on the same prompts, or None."""
        importlib.import_module("gnn_attention.huggingface")  # registers its attention
        log = importlib.import_module("transformers.utils.logging")
        verbosity = log.get_verbosity()
        log.set_verbosity_error()  # padding on the right is wanted here
        try:
            model, prompts = _model(self.architecture), _prompts(self.padding, self.number)
            texts = []
            for attention in ("eager", "gnn_attention"):
                model.set_attn_implementation(attention)
                texts.append(_generate(model, prompts, CACHES[self.cache]))
        finally:
            log.set_verbosity(verbosity)
        (eager, _), (ours, scores) = texts
        for step, row in (ours != eager).T.nonzero().tolist():
            return f"row {row}, step {step}: token {int(ours[row, step])}, eager {int(eager[row, step])}"
        return "a score is NaN" if bool(scores.isnan().any()) else None


def why_unavailable() -> str | None:
    """None, or why Hugging Face models cannot be run here."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'gnn_attention[hf]'"
    return None


@cache
def _model(architecture: str) -> Any:
    """A random model in eval mode; the caller says which attention it takes."""
    transformers = importlib.import_module("transformers")
    config, kind, sizes = ARCHITECTURES[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, config)(**sizes, attn_implementation="eager")
        return getattr(transformers, kind)(made).eval()


def _prompts(padding: str, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (len(HOLES), PROMPT), generator=rng)
    rows = PADDINGS[padding]
    mask = torch.ones_like(tokens) if rows is None else torch.tensor(rows)
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


def _generate(model: Any, prompts: Mapping[str, Tensor], how: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """New tokens ``[rows, steps]`` and their scores ``[steps, rows, vocabulary]``."""
    options = {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0, **how}
    out = model.generate(**prompts, **options, max_new_tokens=NEW, do_sample=False)
    return out.sequences[:, PROMPT:], torch.stack(out.scores)
