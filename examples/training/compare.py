"""One model trained over several graphs, all else equal: loss against edges.

The architecture is the shipped model's. For one seed every graph begins with the same weights and learns from
the same windows in the same order, so differences between graphs are taken seed by seed. Losses are those
along the graph itself; the speed of generation through a cache and its size are measured too.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from examples.compare_graphs import LISTED, Contender, Graphs, contenders
from examples.training.compare_results import Outcome, check_plot, plot, rows, table
from examples.training.compare_store import Store
from examples.training.recipe import Recipe, add_recipe
from examples.training.text_corpus import Corpus, Encoded, check_corpus, corpus, encoded
from examples.training.trainer import train
from gnn_attention import algebra
from gnn_attention._support import atomic_files, checks, json_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.analyse.cost import most_cached
from gnn_attention.cache import KeyValueCache
from gnn_attention.graph import TokenGraph
from gnn_attention.model import Config, LanguageModel, generate, induction_scores

__all__ = ["GRAPHS", "RECIPE", "add_arguments", "compare"]

GRAPHS = "causal; window(64); window(16); window(16) | sinks(4); window(16) | strides(16)"
RECIPE = Recipe(steps=600, length=256, batch=4, warmup=60)
SEEDS = 3
_OWN = ("seed", "graph")  # what a recipe says of one training alone
_GENERATED = 128  # tokens, the last of a window
_SECONDS_BETWEEN_LINES = 0.5
_Pairs = list[tuple[int, Contender]]  # with their seeds


def compare(
    graphs: Graphs = GRAPHS,
    recipe: Recipe | None = None,
    seeds: int = SEEDS,
    out: Path | None = None,
    text: Corpus | None = None,
    config: Config | None = None,
    log: Callable[[str], None] | None = None,
) -> list[Outcome]:
    """Train the shipped architecture over each graph from each seed.

    Args:
        graphs: expressions with ``;`` between them, or a list of expressions and graphs. An expression may
            leave out the number of tokens; ``file:NAME`` is the graph of a file, its first ``recipe.length``
            tokens (:mod:`gnn_attention.convert.files`).
        recipe: the settings, ``RECIPE`` unless given; its ``seed`` and ``graph`` are replaced.
        seeds: how many trainings for each graph, from seeds 0, 1, ...
        out: a folder for what is finished; what is there already is not trained again.
        text: what to learn from, :func:`examples.training.corpus` unless given.
        config: sizes of the model; its ``vocabulary_size`` is replaced.
        log: called with a line of progress, about twice a second.

    Raises TypeError for an argument of another type; ValueError for a graph of another number of tokens, with
    an edge from a later token, or twice the same, for a folder of another comparison, and for a training that
    diverged; all but the last before any training.

    >>> text = Corpus({"a.py": "def f(x): return x\\n" * 40}, {"b.py": "def g(y): return y\\n" * 40})
    >>> small = Config(1, width=16, num_heads=2, head_dim=8, mlp_width=32)
    >>> recipe = Recipe(steps=2, batch=2, length=16, pieces=260)
    >>> found = compare("causal; window(4)", recipe, seeds=1, text=text, config=small)
    >>> [(one.graph, one.edges_per_token, one.senders) for one in found]
    [('causal', 8.5, 16), ('window(4)', 3.625, 4)]
    """
    recipe = checks.instance("recipe", RECIPE if recipe is None else recipe, Recipe)
    config = checks.instance("config", Config(1) if config is None else config, Config)
    if text is not None:
        check_corpus(text)
    if log is not None and not callable(log):
        raise TypeError(f"log must be a function of a line of text, got {checks.described(log)}")
    store = None if out is None else checks.path("out", out)
    pairs = _pairs(graphs, recipe, seeds, config)
    return list(_outcomes(pairs, recipe, store, text or corpus(), config, _LineProgress(log)))


def _pairs(graphs: Graphs, recipe: Recipe, seeds: int, config: Config) -> _Pairs:
    # seed by seed, so that an early stop leaves all graphs of some seeds
    numbers = range(checks.size("seeds", seeds, 1))
    return list(product(numbers, contenders(graphs, recipe.length, config.num_heads)))


def _outcomes(
    pairs: _Pairs, recipe: Recipe, out: Path | None, text: Corpus, config: Config, shown: Progress
) -> Iterator[Outcome]:
    # finished ones at once, the others when they are trained and stored
    store, known = Store(out, _plan(recipe, text, config)), None
    found = [store.find(one.text, one.key, seed) for seed, one in pairs]
    for (seed, one), outcome in zip(pairs, found, strict=True):
        if outcome is None:
            if known is None:
                shown.advance(0, "reading the text")
                known = encoded(text, recipe.pieces)
                shown.expect(found.count(None) * recipe.steps)
            outcome = _trained(one, replace(recipe, seed=seed, graph=""), known, config, shown)
            store.add(outcome)
        yield outcome


def _plan(recipe: Recipe, text: Corpus, config: Config) -> dict[str, Any]:
    # all that decides the results except the graph and the seed
    sizes = {name: value for name, value in asdict(config).items() if name != "vocabulary_size"}
    content = json.dumps([sorted(part.items()) for part in text]).encode()
    return {"schema": 1, **_shared(recipe), **sizes, "corpus": hashlib.sha256(content).hexdigest()[:16]}


def _shared(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in asdict(recipe).items() if name not in _OWN}


def _trained(one: Contender, recipe: Recipe, known: Encoded, config: Config, shown: Progress) -> Outcome:
    def watch(step: int, loss: float) -> None:
        shown.advance(1, f"{one.text}, seed {recipe.seed}, loss {loss:.3f}")

    model, _, report = train(recipe, known, config, progress=False, graph=one.graph, watch=watch)
    if not math.isfinite(report["held_out_loss"]):
        advice = f"take a lower rate than {recipe.rate:g}"
        raise ValueError(f"{one.text}, seed {recipe.seed}: the training diverged; {advice}")
    return Outcome(
        one.text,
        one.key,
        recipe.seed,
        one.graph.num_edges / (recipe.length * (one.graph.heads or 1)),
        report["held_out_loss"],
        report["training_loss"],
        _induction(model, one.graph),
        report["seconds"] / recipe.steps,
        _tokens_per_second(model, one.graph, known.held_out),
        most_cached(one.graph),
    )


def _induction(model: LanguageModel, graph: TokenGraph) -> float | None:
    # of the best head, along the first tokens of the graph; None where heads have graphs of their own
    if graph.heads is not None:
        return None
    half = min(64, graph.num_dst // 2)
    scores = induction_scores(model, half, graph=algebra.restrict(graph, range(2 * half)))
    return round(float(scores.max()), 4)


@torch.no_grad()
def _tokens_per_second(model: LanguageModel, graph: TokenGraph, text: Tensor) -> float:
    # of the last tokens of a window, one by one; the better of two times
    count, best = min(_GENERATED, graph.num_dst // 2), 0.0
    start = graph.num_dst - count - 1
    for _ in range(2):
        cache = KeyValueCache(graph, model.config.num_layers)
        model.proceed(text[None, :start], cache)
        began = time.perf_counter()
        generate(model, text[start : start + 1], count, cache=cache)
        best = max(best, count / (time.perf_counter() - began))
    return round(best, 1)


class _LineProgress(Progress):
    def __init__(self, log: Callable[[str], None] | None) -> None:
        super().__init__("compare", shown=False)
        self.log, self.last = log, -math.inf

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        super().advance(steps, note)
        if self.log is not None and time.monotonic() - self.last >= _SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.log(self.meter())


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``python -m examples.training compare``."""
    add, shown = command.add_argument, "(default: %(default)s)"
    add("--graphs", default=GRAPHS, metavar="LIST", help=f"{LISTED} {shown}")
    add("--seeds", type=int, default=SEEDS, help=f"trainings for each graph {shown}")
    folder = f"folder for finished trainings, which a further call does not repeat {shown}"
    add("--out", type=Path, default=Path("comparison"), metavar="DIR", help=folder)
    json_files.add_json(command)
    add("--plot", metavar="FILE", help="draw loss against edges per token (.svg, .png, .pdf)")
    add_recipe(command, RECIPE, without=_OWN)
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    recipe = Recipe(**{name: getattr(args, name) for name in _shared(RECIPE)})
    atomic_files.check_place("--plot", args.plot)
    if args.plot is not None:
        check_plot(args.plot)
    pairs, outcomes = _pairs(args.graphs, recipe, args.seeds, Config(1)), []
    try:
        with Progress("compare") as shown:
            for outcome in _outcomes(pairs, recipe, args.out, corpus(), Config(1), shown):
                outcomes.append(outcome)
    except KeyboardInterrupt:
        finished = f"{len(outcomes)} of {len(pairs)} trainings are in {args.out}"
        print(f"interrupted: {finished}, the same command goes on from there", file=sys.stderr)
        return 130
    found = rows(outcomes)
    if args.plot is not None:
        made = plot(found, "What a graph costs", _facts(recipe, args.seeds, "a bar"))
        with atomic_files.written(args.plot) as file:
            made.savefig(file, format=Path(args.plot).suffix[1:].lower())
    record = {"recipe": _shared(recipe), "rows": [*map(asdict, found)], "outcomes": [*map(asdict, outcomes)]}
    report = f"{_facts(recipe, args.seeds)}\n{table(found)}"
    json_files.write_json(args.json, record, report)
    return 0


def _facts(recipe: Recipe, seeds: int, sign: str = "±") -> str:
    counted = f"{seeds} seeds, {sign} is the standard error over them" if seeds > 1 else "1 seed"
    return f"{recipe.steps} steps of {recipe.batch} windows of {recipe.length} tokens; {counted}"
