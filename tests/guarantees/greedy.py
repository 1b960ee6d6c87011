"""Greedy text of small Hugging Face models: token by token that of eager attention, with every cache and
padding.

The models are random and tiny, with weights large enough that attention decides: grouped heads with
rotations, learned positions, a softcap with windows, windows alone, sinks with windows. A token that
differs fails, however close the two best scores were; how close they come, and how far the scores are apart,
is reported.

No prompt ends in as many pads as a window is wide: an isolated row is exactly 0 here, in eager attention
the mean of all masked values.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor

VOCABULARY, PROMPT, NEW, WINDOW = 61, 12, 10, 5
OURS = "gnn_attention"

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
PADDINGS: dict[str, Sequence[Sequence[int]] | None] = {
    "no padding": None,
    "padding on the left": [[int(i >= PROMPT - length) for i in range(PROMPT)] for length in (PROMPT, 8, 5)],
    "padding on the right": [[int(i < length) for i in range(PROMPT)] for length in (PROMPT, 10, 8)],
    "mixed padding": HOLES,
}


@dataclass(frozen=True)
class Cell:
    architecture: str
    cache: str
    padding: str

    def __str__(self) -> str:
        return f"greedy text of {self.architecture}, {self.cache}, {self.padding}"


@dataclass(frozen=True)
class Compared:
    """What differs (or None), the closest two best scores, the largest difference of scores, tokens seen."""

    differs: str | None
    margin: float
    difference: float
    tokens: int


def available() -> str | None:
    """None, or why Hugging Face models cannot be run here."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'gnn_attention[hf]'"
    try:
        importlib.import_module("gnn_attention.huggingface")
    except ImportError as error:
        return str(error)
    return None


@torch.no_grad()
def compared(cell: Cell, seed: int) -> Compared:
    """Eager attention and this library's on the same prompts, with the same cache."""
    importlib.import_module("gnn_attention.huggingface")  # registers its attention
    model, given = _model(cell.architecture, seed), _prompts(cell.padding, seed)
    runs = []
    for attention in ("eager", OURS):
        model.set_attn_implementation(attention)
        runs.append(_generated(model, given, CACHES[cell.cache]))
    (wanted, scores), (found, found_scores) = runs
    best = scores.topk(2, dim=-1).values
    margin, difference = (
        float((best[..., 0] - best[..., 1]).min()),
        float((found_scores - scores).abs().max()),
    )
    return Compared(_difference(found, wanted, best, found_scores), margin, difference, wanted.numel())


def _difference(found: Tensor, wanted: Tensor, best: Tensor, scores: Tensor) -> str | None:
    """The first token that is another, or a score that is no number; ``best [steps, rows, 2]``."""
    if found.shape != wanted.shape:
        return f"{list(found.shape)} tokens, eager {list(wanted.shape)}"
    other = (found != wanted).nonzero()
    if len(other):
        row, step = other[other[:, 1].argmin()].tolist()
        gap = float(best[step, row, 0] - best[step, row, 1])
        return (
            f"row {row}, step {step}: token {int(found[row, step])}, eager {int(wanted[row, step])}, ahead "
            f"by {gap:.2g}"
        )
    return "a score is NaN" if bool(scores.isnan().any()) else None


@cache
def _model(architecture: str, seed: int) -> Any:
    """A random model in eval mode; the caller says which attention it takes."""
    transformers = importlib.import_module("transformers")
    config, kind, sizes = ARCHITECTURES[architecture]
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        return getattr(transformers, kind)(
            getattr(transformers, config)(**sizes, attn_implementation="eager")
        ).eval()


def _prompts(padding: str, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (len(HOLES), PROMPT), generator=torch.Generator().manual_seed(seed))
    given = PADDINGS[padding]
    mask = torch.ones_like(tokens) if given is None else torch.tensor(given)
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


def _generated(model: Any, given: Mapping[str, Tensor], how: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """New tokens ``[rows, steps]`` and their scores ``[steps, rows, vocabulary]``."""
    with _quiet():
        options = {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0, **how}
        out = model.generate(**given, **options, max_new_tokens=NEW, do_sample=False)
    return out.sequences[:, PROMPT:], torch.stack(out.scores)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without its warnings, of padding on the right among others, which is wanted here."""
    log = importlib.import_module("transformers.utils.logging")
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(before)


CELLS: Sequence[Cell] = [Cell(*each) for each in product(ARCHITECTURES, CACHES, PADDINGS)]
