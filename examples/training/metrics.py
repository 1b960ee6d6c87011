"""The report of a training: how the model was made, its losses and the scores of its heads."""

import datetime
import hashlib
import math
import platform
import shlex
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from examples.training.recipe import Recipe
from examples.training.text_corpus import Corpus
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.model import LanguageModel, induction_scores, previous_token_scores

_WINDOWS_JUDGED = 512
_WINDOWS_LOOKED_AT = 64
Tokens = Int[Tensor, "batch tokens"]
Logits = Float[Tensor, "batch tokens vocabulary"]


def predicted(model: nn.Module, tokens: Tokens, graph: TokenGraph, precision: str) -> Logits:
    """The logits of the next tokens, in float32 or better; products in bfloat16 if ``precision`` says so."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits: Tensor = model(tokens, graph)
    return logits if logits.dtype == torch.float64 else logits.float()


def nats(model: nn.Module, window: Tokens, graph: TokenGraph, precision: str = "float32") -> Tensor:
    """The mean of ``-log p(next token)`` over the windows ``[B, T + 1]``, in nats."""
    logits = predicted(model, window[:, :-1], graph, precision)
    return functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def evaluated(model: LanguageModel, tokens: Tensor, graph: TokenGraph, most: int) -> float:
    """The mean loss over at most ``most`` evenly spaced windows (and ``128 * most`` tokens)."""
    length = graph.num_dst
    windows = max(1, min(most, most * 128 // length))
    starts = torch.linspace(0, len(tokens) - length - 1, windows).long()
    text = tokens[starts.unsqueeze(1) + torch.arange(length + 1)].to(model.embedding.weight.device)
    parts = torch.split(text, max(1, min(32, 32 * 128 // length)))
    return sum(nats(model, part, graph).item() * len(part) for part in parts) / windows


def description(recipe: Recipe, text: Corpus, minutes: float | None) -> dict[str, Any]:
    """The inputs: recipe, command, corpus, versions, date."""
    content = "".join((*text.training.values(), *text.held_out.values())).encode()
    # only what differs from the defaults is named
    options = {key: value for key, value in asdict(recipe).items() if value != getattr(Recipe, key)}
    words = [f"--{key} {shlex.quote(str(value))}" for key, value in options.items()]
    words += [f"--minutes {minutes:g}"] if minutes else []
    return {
        "recipe": asdict(recipe),
        "seed": recipe.seed,
        "command": " ".join(["python -m examples.training train", *words]),
        "corpus_files": len(text.training) + len(text.held_out),
        "corpus_held_out_files": len(text.held_out),
        "corpus_bytes": len(content),
        "corpus_sha256": hashlib.sha256(content).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def look(model: LanguageModel, held_out: Tensor, graph: TokenGraph) -> dict[str, float]:
    # the scores are those of the strongest heads
    return {
        "held_out_loss": rounded(evaluated(model, held_out, graph, _WINDOWS_LOOKED_AT)),
        "induction": rounded(induction_scores(model).max()),
        "previous_token": rounded(previous_token_scores(model)[0].max()),
    }


def measured(model: LanguageModel, tokens: Tensor, held_out: Tensor, graph: TokenGraph) -> dict[str, Any]:
    # the losses are those over text as it is
    def table(scores: Tensor) -> list[list[float]]:
        return [[rounded(score) for score in layer] for layer in scores.tolist()]

    return {
        "training_loss": rounded(evaluated(model, tokens, graph, _WINDOWS_JUDGED)),
        "held_out_loss": rounded(evaluated(model, held_out, graph, _WINDOWS_JUDGED)),
        "uniform_loss": rounded(math.log(model.config.vocabulary_size)),
        "induction_scores": table(induction_scores(model)),
        "previous_token_scores": table(previous_token_scores(model)),
    }


def peak_memory() -> int:
    """The peak memory of this process, in MB."""
    import resource  # not on Windows

    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def rounded(number: float | Tensor) -> float:
    return round(float(number), 4)
