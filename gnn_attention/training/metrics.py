"""What a training tells of itself: how it was made, what it reached and what its heads do."""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.model import LanguageModel, induction_scores, previous_token_scores
from gnn_attention.training.recipe import Recipe
from gnn_attention.training.text_corpus import Corpus

__all__ = ["description", "evaluated", "look", "measured", "nats", "peak_memory", "predicted", "rounded", "told_before"]

_WINDOWS_JUDGED = 512
_WINDOWS_LOOKED_AT = 64
LOOK = ("step", "training_loss", "held_out_loss", "induction", "previous_token")  # what the history has of each look


def predicted(
    model: nn.Module, tokens: Int[Tensor, "batch tokens"], graph: TokenGraph, precision: str
) -> Float[Tensor, "batch tokens vocabulary"]:
    """The logits of the tokens that come next, in float32 or better; products in bfloat16 if ``precision`` says so."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits: Tensor = model(tokens, graph)
    return logits if logits.dtype == torch.float64 else logits.float()


def nats(model: nn.Module, window: Int[Tensor, "batch tokens"], graph: TokenGraph, precision: str = "float32") -> Tensor:
    """The mean of ``-log p(next token)`` over the windows ``[B, T + 1]``, in nats."""
    logits = predicted(model, window[:, :-1], graph, precision)
    return functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def evaluated(model: LanguageModel, tokens: Tensor, graph: TokenGraph, most: int) -> float:
    """The mean loss over windows that lie evenly in the text: at most so many, and no more tokens than so many of 128 have."""
    length = graph.num_dst
    windows = max(1, min(most, most * 128 // length))
    starts = torch.linspace(0, len(tokens) - length - 1, windows).long()
    text = tokens[starts.unsqueeze(1) + torch.arange(length + 1)].to(model.embedding.weight.device)
    parts = [nats(model, part, graph).item() * len(part) for part in torch.split(text, max(1, min(32, 32 * 128 // length)))]
    return sum(parts) / windows


def description(recipe: Recipe, text: Corpus, minutes: float | None) -> dict[str, Any]:
    """What went in: recipe, command, corpus, versions, date."""
    content = "".join((*text.training.values(), *text.held_out.values())).encode()
    return {
        "recipe": asdict(recipe),
        "seed": recipe.seed,
        "command": _command(recipe, minutes),
        "corpus_files": len(text.training) + len(text.held_out),
        "corpus_held_out_files": len(text.held_out),
        "corpus_bytes": len(content),
        "corpus_sha256": hashlib.sha256(content).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _command(recipe: Recipe, minutes: float | None) -> str:
    """The command that trains by this recipe: only what differs from the defaults is named."""
    changed = [f"--{key} {shlex.quote(str(value))}" for key, value in asdict(recipe).items() if value != getattr(Recipe, key)]
    return " ".join(["gnn-attention train", *changed, *([f"--minutes {minutes:g}"] if minutes else [])])


def look(model: LanguageModel, held_out: Tensor, graph: TokenGraph) -> dict[str, float]:
    """Where a training stands: its loss on what it does not learn from, and the strongest induction and previous-token head."""
    return {
        "held_out_loss": rounded(evaluated(model, held_out, graph, _WINDOWS_LOOKED_AT)),
        "induction": rounded(induction_scores(model).max()),
        "previous_token": rounded(previous_token_scores(model)[0].max()),
    }


def told_before(path: os.PathLike[str], told: Mapping[str, Any]) -> tuple[list[float], list[dict[str, float]], float]:
    """Losses, looks and seconds that a checkpoint tells of the training so far; ValueError names what is not as written."""
    losses, history, seconds = (told.get(name) for name in ("losses", "history", "seconds"))
    if not isinstance(losses, list) or not all(map(_is_number, losses)):
        raise ValueError(f"{path} is no checkpoint of a training: losses must be a list of numbers, got {quoted(losses)}")
    if not isinstance(history, list) or not all(_is_look(one) for one in history):
        expected = ", ".join(LOOK)
        raise ValueError(
            f"{path} is no checkpoint of a training: each of history must hold numbers {expected}, got {quoted(history)}"
        )
    if not _is_number(seconds) or not 0 <= float(seconds or 0) < math.inf:
        raise ValueError(f"{path} is no checkpoint of a training: seconds must be a time, got {quoted(seconds)}")
    return losses, history, float(seconds or 0)


def _is_look(value: object) -> bool:
    return isinstance(value, dict) and set(LOOK) == set(value) and all(map(_is_number, value.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def measured(model: LanguageModel, tokens: Tensor, held_out: Tensor, graph: TokenGraph) -> dict[str, Any]:
    """What came out: losses over text as it is, and what the heads do."""
    return {
        "training_loss": rounded(evaluated(model, tokens, graph, _WINDOWS_JUDGED)),
        "held_out_loss": rounded(evaluated(model, held_out, graph, _WINDOWS_JUDGED)),
        "uniform_loss": rounded(math.log(model.config.vocabulary_size)),
        "induction_scores": _table(induction_scores(model)),
        "previous_token_scores": _table(previous_token_scores(model)),
    }


def peak_memory() -> int:
    """The most that this process ever held, in MB."""
    import resource  # not on Windows

    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def _table(scores: Tensor) -> list[list[float]]:
    return [[rounded(score) for score in layer] for layer in scores.tolist()]


def rounded(number: float | Tensor) -> float:
    """To the four digits that a report keeps."""
    return round(float(number), 4)
