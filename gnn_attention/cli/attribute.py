"""The command ``gnn-attention attribute``: the edges that a language model needs for a text.

Effects are those on the losses of all tokens (:func:`gnn_attention.interpret.trace.attribute`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.interpret.trace import Effect, attribute, prune


def find_edges(
    model: nn.Module, ids: Tensor, share: float, count: int, metric: str, progress: Progress
) -> tuple[list[Effect], dict[str, Any]]:
    """The ``count`` strongest edges, and the loss along all and along a ``share`` of the pairs.

    ``metric``: "losses" of all tokens, whose squared effects add up, or the loss of the "last" token, whose
    effects have signs. Raises ValueError for a text of fewer than two tokens.
    """
    # optional: it needs transformers
    from gnn_attention.huggingface import use_graph

    if ids.shape[1] < 2:
        raise ValueError(f"text must have at least two tokens, got {ids.shape[1]}")

    def losses(logits: Tensor) -> Tensor:
        each = functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
        return each[-1] if metric == "last" else each

    @torch.no_grad()
    def mean_loss() -> float:
        return float(losses(model(ids, use_cache=False).logits).mean())

    progress.begin("all edges")
    effects = attribute(model, ids, losses, projections=3)
    pairs = sum(effects.scores(layer).numel() for layer in effects.layers)
    watch = lambda part: progress.begin(f"{100 * part:g} % of pairs")  # noqa: E731
    pruned = prune(model, ids, losses, share, first=effects, watch=watch)
    loss = mean_loss()
    with use_graph(model, pruned):
        loss_of_these = mean_loss()
    numbers = {"tokens": ids.shape[1], "metric": metric, "pairs": pairs, "loss": loss}
    numbers |= {"pairs_left": pruned.count, "share": pruned.share, "loss_of_these": loss_of_these}
    return effects.top(count), numbers


def read_text(text: str) -> str:
    """The text, or what the file holds whose name follows an @."""
    return Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text


def load(name: str, text: str, progress: Progress) -> tuple[nn.Module, Any, Tensor, list[str]]:
    """A model of ``gnn_attention.lm``, its tokenizer, and the tokens of a text as ids and words."""
    # optional: it needs transformers
    from gnn_attention import lm

    progress.begin(f"loading {name}")
    model, tokenizer = lm.load(name)
    if tokenizer is None:
        raise ValueError(f"--model {name} has no tokenizer for a text: take smollm2")
    model.requires_grad_(False)
    ids = tokenizer(text, return_tensors="pt").input_ids
    return model, tokenizer, ids, [tokenizer.decode([token]) for token in ids[0].tolist()]


def in_words(effect: Effect, words: Sequence[str]) -> str:
    """``layer.head: receiver (place) <- sender (place), change``."""
    layer, head, src, dst, change = effect
    return f"{layer}.{head}: {words[dst]!r} ({dst}) <- {words[src]!r} ({src}), {change:+.4g}"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention attribute``."""
    add, default = command.add_argument, "(default %(default)s)"
    add("text", help="what the model reads, or @FILE")
    add("--model", default="smollm2", help=f"of gnn_attention.lm {default}")
    add("--keep", type=float, default=0.05, metavar="SHARE", help=f"of all pairs of head and edge {default}")
    add("--edges", type=int, default=10, metavar="N", help=f"how many are shown {default}")
    add("--metric", choices=["losses", "last"], default="losses", help="of all tokens, or of the last alone")
    add("--tokens", type=int, default=1024, metavar="N", help=f"of the text, at most {default}")
    atomic_files.add_json(command)
    command.set_defaults(run=_attribute)


def _attribute(args: argparse.Namespace) -> int:
    with Progress("attribute", unit="passes") as progress:
        model, _, ids, words = load(args.model, read_text(args.text), progress)
        edges, numbers = find_edges(
            model, ids[:, : args.tokens], args.keep, args.edges, args.metric, progress
        )
    texts = [in_words(edge, words) for edge in edges]
    numbers["edges"] = [{**edge._asdict(), "text": text} for edge, text in zip(edges, texts, strict=True)]
    whole = "loss {loss:.4f} along all {pairs:,} pairs of head and edge, "
    part = "{loss_of_these:.4f} along {pairs_left:,} ({share:.3%})"
    title = "layer.head: receiver <- sender, effect of the cut on the loss"
    lines = [title, *texts, (whole + part).format_map(numbers)]
    atomic_files.write_json(args.json, numbers, "\n".join(lines))
    return 0
