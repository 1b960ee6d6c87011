"""The report of a training: its inputs, the losses of the model and the scores of its heads."""

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

_REPORT_WINDOWS = 512
_HISTORY_WINDOWS = 64
Tokens = Int[Tensor, "batch tokens"]
Logits = Float[Tensor, "batch tokens vocabulary"]


def predict(model: nn.Module, tokens: Tokens, graph: TokenGraph, precision: str) -> Logits:
    """Return the logits of the next tokens; matrix products may be in bfloat16, logits never are."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits: Tensor = model(tokens, graph)
    return logits if logits.dtype == torch.float64 else logits.float()


def mean_loss(model: nn.Module, window: Tokens, graph: TokenGraph, precision: str = "float32") -> Tensor:
    """Return the mean of ``-log p(next token)`` over the windows ``[B, T + 1]``, in nats."""
    logits = predict(model, window[:, :-1], graph, precision)
    return functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LanguageModel, tokens: Tensor, graph: TokenGraph, max_windows: int) -> float:
    """Return the mean loss over evenly spaced windows, of at most ``128 * max_windows`` tokens together."""
    length = graph.num_dst
    count = max(1, min(max_windows, max_windows * 128 // length))
    starts = torch.linspace(0, len(tokens) - length - 1, count).long()
    windows = tokens[starts.unsqueeze(1) + torch.arange(length + 1)].to(model.embedding.weight.device)
    batches = torch.split(windows, max(1, min(32, 32 * 128 // length)))
    return sum(mean_loss(model, batch, graph).item() * len(batch) for batch in batches) / count


def describe_inputs(recipe: Recipe, text: Corpus, minutes: float | None) -> dict[str, Any]:
    """Return the recipe, the command, the digest of the corpus, the versions and the date."""
    content = "".join((*text.training.values(), *text.held_out.values())).encode()
    changes = {key: value for key, value in asdict(recipe).items() if value != getattr(Recipe, key)}
    options = [f"--{key} {shlex.quote(str(value))}" for key, value in changes.items()]
    options += [f"--minutes {minutes:g}"] if minutes else []
    return {
        "recipe": asdict(recipe),
        "seed": recipe.seed,
        "command": " ".join(["python -m examples.training train", *options]),
        "corpus_files": len(text.training) + len(text.held_out),
        "corpus_held_out_files": len(text.held_out),
        "corpus_bytes": len(content),
        "corpus_sha256": hashlib.sha256(content).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def measure_progress(model: LanguageModel, held_out: Tensor, graph: TokenGraph) -> dict[str, float]:
    """Return the held-out loss and the scores of the strongest heads."""
    return {
        "held_out_loss": round_number(evaluate(model, held_out, graph, _HISTORY_WINDOWS)),
        "induction": round_number(induction_scores(model).max()),
        "previous_token": round_number(previous_token_scores(model)[0].max()),
    }


def measure(model: LanguageModel, tokens: Tensor, held_out: Tensor, graph: TokenGraph) -> dict[str, Any]:
    """Return the losses over text without artificial repeats, and the scores of all heads."""

    def table(scores: Tensor) -> list[list[float]]:
        return [[round_number(score) for score in layer] for layer in scores.tolist()]

    return {
        "training_loss": round_number(evaluate(model, tokens, graph, _REPORT_WINDOWS)),
        "held_out_loss": round_number(evaluate(model, held_out, graph, _REPORT_WINDOWS)),
        "uniform_loss": round_number(math.log(model.config.vocabulary_size)),
        "induction_scores": table(induction_scores(model)),
        "previous_token_scores": table(previous_token_scores(model)),
    }


def peak_memory() -> int:
    """Return the peak memory of this process in MB, on Linux and macOS."""
    import resource

    # macOS counts bytes, Linux KiB.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def round_number(number: float | Tensor) -> float:
    return round(float(number), 4)
