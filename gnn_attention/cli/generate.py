"""The command ``gnn-attention generate``: the trained model continues a text, along the edges of any graph.

Every token is computed once (``cache``): the cache holds a sender while the graph has receivers for it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from gnn_attention import model, patterns
from gnn_attention._support import checks, json_option
from gnn_attention._support.progress import Progress
from gnn_attention.backends import BACKENDS
from gnn_attention.cache import KeyValueCache
from gnn_attention.convert import expressions


def continued(
    prompt: str,
    tokens: int,
    graph: str | None = None,
    temperature: float = 0.7,
    seed: int = 0,
    file: Path | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """A prompt continued by ``tokens`` tokens, as a dict: ``text``, ``cached`` senders, ``bytes``, ...

    ``graph`` is an expression (:func:`gnn_attention.convert.expressions.parse`), causal unless given;
    ``file`` holds another model than the one that ships with the package; ``progress`` shows how far it is.

    Raises ValueError for an empty prompt, a graph with too few tokens and a faulty expression or file.

    >>> result = continued("def read(", tokens=3, graph="window(64, 16) | sinks(64, 4)", temperature=0.0)
    >>> result["text"].startswith("def read("), len(result["tokens"]) - result["prompt_tokens"]
    (True, 3)
    """
    tokens, progress = checks.size("tokens", tokens), progress or Progress("generate", shown=False)
    language_model, vocabulary, _ = model.load(model.TRAINED if file is None else file)
    language_model.backend = backend
    start = vocabulary.encode(prompt)
    if not start:
        raise ValueError("prompt must have at least one character, got none")
    edges = patterns.causal(len(start) + tokens) if graph is None else expressions.parse(graph)
    cache = KeyValueCache(edges, language_model.config.num_layers)
    progress.begin(f"{tokens} tokens")
    found = model.generate(language_model, torch.tensor(start), tokens, temperature, seed, cache=cache)
    about = {"text": vocabulary.decode(found.tolist()), "tokens": found.tolist(), "prompt_tokens": len(start)}
    about |= {"graph": edges.name, "temperature": temperature, "seed": seed, "computed": cache.length}
    return about | {"cached": len(cache.positions), "bytes": cache.nbytes}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention generate``."""
    add, default, file = command.add_argument, "(default %(default)s)", "weights that model.save wrote"
    add("prompt", help="the text to continue, such as 'def read('")
    add("--tokens", type=int, default=80, metavar="N", help=f"how many more {default}")
    add("--graph", metavar="EXPR", help="e.g. 'window(512, 64) | sinks(512, 4)' (default: causal)")
    add("--temperature", type=float, default=0.7, help=f"0 takes the likeliest token {default}")
    add("--seed", type=int, default=0, help=f"of the draws {default}")
    add("--model", type=Path, metavar="FILE", help=f"{file} (default: those that ship)")
    add("--backend", default="auto", choices=["auto", *BACKENDS], help=f"what attends {default}")
    json_option.add_json(command)
    command.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    options = (args.graph, args.temperature, args.seed, args.model, args.backend)
    with Progress("generate", unit="tokens") as progress:
        result = continued(args.prompt, args.tokens, *options, progress)
    json_option.write_json(args.json, result, result["text"])
    if args.json != "-":
        summary = "{computed} tokens along {graph}: {cached} senders cached, {bytes:,} bytes"
        print(summary.format_map(result), file=sys.stderr)
    return 0
