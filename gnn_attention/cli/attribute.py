"""The command ``gnn-attention attribute``: find the edges that a language model needs."""

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
    model: nn.Module, ids: Tensor, fraction: float, num_edges: int, metric: str, progress: Progress
) -> tuple[list[Effect], dict[str, Any]]:
    """Find the ``num_edges`` strongest edges, and measure the loss on a ``fraction`` of all pairs.

    A pair is an edge in one head. Its effect is the root of the summed squares of its effects on
    all losses, or with the metric "last" its signed effect on the last loss. ValueError for a
    single token.
    """
    # Imported here because it needs transformers, an optional package.
    from gnn_attention.huggingface import use_graph

    if ids.shape[1] < 2:
        raise ValueError(f"text must have at least two tokens, got {ids.shape[1]}")

    def losses(logits: Tensor) -> Tensor:
        values = functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
        return values[-1] if metric == "last" else values

    @torch.no_grad()
    def mean_loss() -> float:
        return float(losses(model(ids, use_cache=False).logits).mean())

    progress.begin("all edges")
    effects = attribute(model, ids, losses, projections=3)
    num_pairs = sum(effects.scores(layer).numel() for layer in effects.layers)
    begin_step = lambda x: progress.begin(f"{100 * x:g} % of pairs")  # noqa: E731
    pruned = prune(model, ids, losses, fraction, first=effects, watch=begin_step)
    loss = mean_loss()
    with use_graph(model, pruned):
        pruned_loss = mean_loss()
    summary = {"tokens": ids.shape[1], "metric": metric, "pairs": num_pairs, "loss": loss}
    summary |= {"pairs_left": pruned.count, "share": pruned.share, "loss_of_these": pruned_loss}
    return effects.top(num_edges), summary


def read_text(text: str) -> str:
    """Return the text itself, or the content of FILE for ``@FILE``."""
    return Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text


def load(name: str, text: str, progress: Progress) -> tuple[nn.Module, Any, Tensor, list[str]]:
    """Load a model; return it, its tokenizer, and the tokens of ``text`` as ids and as strings."""
    # Imported here because it needs transformers, an optional package.
    from gnn_attention import lm

    progress.begin(f"loading {name}")
    model, tokenizer = lm.load(name)
    if tokenizer is None:
        raise ValueError(f"--model {name} has no tokenizer: use smollm2")
    model.requires_grad_(False)
    ids = tokenizer(text, return_tensors="pt").input_ids
    return model, tokenizer, ids, [tokenizer.decode([token]) for token in ids[0].tolist()]


def describe_effect(effect: Effect, tokens: Sequence[str]) -> str:
    """Format an effect as ``layer.head: receiver (position) <- sender (position), change``."""
    layer, head, src, dst, change = effect
    return f"{layer}.{head}: {tokens[dst]!r} ({dst}) <- {tokens[src]!r} ({src}), {change:+.4g}"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gnn-attention attribute``."""
    add = command.add_argument
    add("text", help="the text that the model reads, or @FILE")
    add("--model", default="smollm2", help="a model of gnn_attention.lm (default smollm2)")
    keep_help = "fraction of the (head, edge) pairs to keep (default 0.05)"
    add("--keep", type=float, default=0.05, metavar="FRACTION", help=keep_help)
    add("--edges", type=int, default=10, metavar="N", help="number of edges to print (default 10)")
    metric_help = "measure effects on the losses of all tokens (default), or on the last loss"
    add("--metric", choices=["losses", "last"], default="losses", help=metric_help)
    add("--tokens", type=int, default=1024, metavar="N", help="read at most N tokens (default 1024)")
    atomic_files.add_json(command)
    command.set_defaults(run=run_attribute)


def run_attribute(args: argparse.Namespace) -> int:
    with Progress("attribute", unit="passes") as progress:
        model, _, ids, tokens = load(args.model, read_text(args.text), progress)
        ids = ids[:, : args.tokens]
        effects, summary = find_edges(model, ids, args.keep, args.edges, args.metric, progress)
    lines = [describe_effect(effect, tokens) for effect in effects]
    summary["edges"] = [{**x._asdict(), "text": line} for x, line in zip(effects, lines, strict=True)]
    title = "layer.head: receiver <- sender, effect of the cut on the loss"
    totals = "loss {loss:.4f} with all {pairs:,} pairs of head and edge, "
    totals += "{loss_of_these:.4f} with {pairs_left:,} ({share:.3%})"
    atomic_files.write_json(args.json, summary, "\n".join([title, *lines, totals.format_map(summary)]))
    return 0
