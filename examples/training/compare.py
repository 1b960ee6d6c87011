"""One model trained over several graphs, all else equal: loss against edges.

The architecture is the shipped model's. For one seed every graph begins with the same weights and learns from
the same windows in the same order, so differences between graphs are taken seed by seed. Losses are those
along the graph itself; the speed of generation through a cache and its size are measured too.
"""

import argparse
import hashlib
import json
import math
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from examples.compare_graphs import GRAPHS_HELP, Contender, Graphs, contenders
from examples.training.compare_results import Outcome, plot, rows, table
from examples.training.recipe import Recipe, add_recipe
from examples.training.text_corpus import Corpus, Encoded, corpus, encoded
from examples.training.trainer import train
from gnn_attention import algebra
from gnn_attention._support import atomic_files, checks
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.analyse.cost import most_cached
from gnn_attention.cache import KeyValueCache
from gnn_attention.graph import TokenGraph
from gnn_attention.model import Config, LanguageModel, generate, induction_scores

__all__ = ["GRAPHS", "RECIPE", "add_arguments", "compare", "run"]

GRAPHS = "causal; window(64); window(16); window(16) | sinks(4); window(16) | strides(16)"
RECIPE = Recipe(steps=600, length=256, batch=4, warmup=60)
SEEDS = 3
# What a recipe says of one training alone.
_OWN = ("seed", "graph")
# The number of tokens that are generated, the last of a window.
_GENERATED = 128


def compare(
    graphs: Graphs = GRAPHS,
    recipe: Recipe = RECIPE,
    seeds: int = SEEDS,
    out: Path | None = None,
    text: Corpus | None = None,
    config: Config | None = None,
    progress: bool = False,
) -> list[Outcome]:
    """Train the shipped architecture over each graph from each seed.

    Args:
        graphs: expressions with ``;`` between them, or a list of expressions and graphs. An expression may
            leave out the number of tokens; ``file:NAME`` is the graph of a file, its first ``recipe.length``
            tokens (:mod:`gnn_attention.convert.files`).
        recipe: the settings; its ``seed`` and ``graph`` are replaced.
        seeds: how many trainings for each graph, from seeds 0, 1, ...
        out: a folder for what is finished, a JSON file for each training; what is there already is not
            trained again.
        text: what to learn from, :func:`examples.training.corpus` unless given.
        config: sizes of the model; its ``vocabulary_size`` is replaced.
        progress: whether stderr shows it.

    Raises ValueError for a graph of another number of tokens, with an edge from a later token, or twice the
    same, for a file that holds no result, and for a training that diverged, OSError where the folder cannot
    be made; all but a divergence before any training.

    >>> text = Corpus({"a.py": "def f(x): return x\\n" * 40}, {"b.py": "def g(y): return y\\n" * 40})
    >>> small = Config(1, width=16, num_heads=2, head_dim=8, mlp_width=32)
    >>> recipe = Recipe(steps=2, batch=2, length=16, pieces=260)
    >>> found = compare("causal; window(4)", recipe, seeds=1, text=text, config=small)
    >>> [(one.graph, one.edges_per_token, one.senders) for one in found]
    [('causal', 8.5, 16), ('window(4)', 3.625, 4)]
    """
    config, text = config or Config(1), text or corpus()
    compared = contenders(graphs, recipe.length, config.num_heads)
    # Seed by seed, so that an early stop leaves all graphs of some seeds.
    pairs = list(product(range(checks.size("seeds", seeds, 1)), compared))
    files: list[Path | None] = [None] * len(pairs)
    if out is not None:
        out.mkdir(exist_ok=True)
        plan = _plan(recipe, text, config)
        files = [out / f"{one.key}-{plan}-seed{seed}.json" for seed, one in pairs]
    outcomes = [_stored(file, one) for file, (_, one) in zip(files, pairs, strict=True)]
    if None in outcomes:
        with Progress("compare", outcomes.count(None) * recipe.steps, show=progress) as shown:
            known = encoded(text, recipe.pieces)
            for place, (seed, one) in enumerate(pairs):
                if outcomes[place] is None:
                    outcome = _trained(one, replace(recipe, seed=seed, graph=""), known, config, shown)
                    outcomes[place] = outcome
                    if file := files[place]:
                        atomic_files.write(file, json.dumps(asdict(outcome), indent=1) + "\n")
    return [outcome for outcome in outcomes if outcome is not None]


def _plan(recipe: Recipe, text: Corpus, config: Config) -> str:
    # A digest of all that decides the results except the graph and the seed.
    settings = [_shared(recipe), asdict(config), [sorted(part.items()) for part in text]]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]


def _shared(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in asdict(recipe).items() if name not in _OWN}


def _stored(file: Path | None, one: Contender) -> Outcome | None:
    if file is None or not file.exists():
        return None
    try:
        return replace(Outcome(**json.loads(file.read_text("utf-8"))), graph=one.text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} holds no result of a training: delete it to train anew") from error


def _trained(one: Contender, recipe: Recipe, known: Encoded, config: Config, shown: Progress) -> Outcome:
    def watch(step: int, loss: float) -> None:
        shown.advance(1, f"{one.text}, seed {recipe.seed}, loss {loss:.3f}")

    model, _, report = train(recipe, known, config, progress=False, graph=one.graph, watch=watch)
    if not math.isfinite(report["held_out_loss"]):
        advice = f"take a lower rate than {recipe.rate:g}"
        raise ValueError(f"{one.text}, seed {recipe.seed}: the training diverged; {advice}")
    return Outcome(
        graph=one.text,
        key=one.key,
        seed=recipe.seed,
        edges_per_token=one.graph.num_edges / (recipe.length * (one.graph.heads or 1)),
        held_out_loss=report["held_out_loss"],
        training_loss=report["training_loss"],
        induction=_induction(model, one.graph),
        seconds_per_step=report["seconds"] / recipe.steps,
        tokens_per_second=_tokens_per_second(model, one.graph, known.held_out),
        senders=most_cached(one.graph),
    )


def _induction(model: LanguageModel, graph: TokenGraph) -> float | None:
    # Of the best head, along the first tokens of the graph; None where heads have graphs of their own.
    if graph.heads is not None:
        return None
    half = min(64, graph.num_dst // 2)
    scores = induction_scores(model, half, graph=algebra.restrict(graph, range(2 * half)))
    return round(float(scores.max()), 4)


@torch.no_grad()
def _tokens_per_second(model: LanguageModel, graph: TokenGraph, text: Tensor) -> float:
    # Of the last tokens of a window, one by one; the better of two times.
    count, best = min(_GENERATED, graph.num_dst // 2), 0.0
    start = graph.num_dst - count - 1
    for _ in range(2):
        cache = KeyValueCache(graph, model.config.num_layers)
        model.proceed(text[None, :start], cache)
        began = time.perf_counter()
        generate(model, text[start : start + 1], count, cache=cache)
        best = max(best, count / (time.perf_counter() - began))
    return round(best, 1)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``python -m examples.training compare``."""
    add, shown = command.add_argument, "(default: %(default)s)"
    add("--graphs", default=GRAPHS, metavar="LIST", help=f"{GRAPHS_HELP} {shown}")
    add("--seeds", type=int, default=SEEDS, help=f"trainings for each graph {shown}")
    folder = f"folder for finished trainings, which a further call does not repeat {shown}"
    add("--out", type=Path, default=Path("comparison"), metavar="DIR", help=folder)
    atomic_files.add_json(command)
    add("--plot", metavar="FILE", help="draw loss against edges per token (.svg, .png, .pdf)")
    add_recipe(command, RECIPE, without=_OWN)


def run(args: argparse.Namespace) -> None:
    """Train what is not finished, and show all as a table, JSON or a plot."""
    recipe = Recipe(**{name: getattr(args, name) for name in _shared(RECIPE)})
    atomic_files.check_output_path("--plot", args.plot)
    try:
        outcomes = compare(args.graphs, recipe, args.seeds, args.out, progress=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command goes on from what is in {args.out}") from None
    found = rows(outcomes)
    facts = f"{recipe.steps} steps of {recipe.batch} windows of {recipe.length} tokens; {args.seeds} seeds"
    if args.plot is not None:
        plot(found, f"What a graph costs\n{facts}, a bar is the standard error").savefig(args.plot)
    record = {"recipe": _shared(recipe), "rows": [*map(asdict, found)], "outcomes": [*map(asdict, outcomes)]}
    atomic_files.write_json(args.json, record, f"{facts}, ± is the standard error\n{table(found)}")
