"""The command ``gnn-attention generate``: the trained model goes on with a text, along the edges of any graph.

Every token is computed once (``cache``): what others send is kept for as long as the graph says that somebody will hear it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from gnn_attention import model, patterns
from gnn_attention._support import atomic_files, checks
from gnn_attention._support.progress import Progress
from gnn_attention.backends import BACKENDS
from gnn_attention.cache import KeyValueCache
from gnn_attention.convert import expressions

__all__ = ["add_generate", "continued"]


def continued(
    prompt: str,
    tokens: int,
    graph: str | None = None,
    temperature: float = 0.7,
    seed: int = 0,
    file: Path | None = None,
    backend: str = "auto",
) -> dict[str, Any]:
    """A prompt continued by ``tokens`` more tokens, as a dict: ``text``, ``tokens``, ``graph``, ``kept`` senders, ``bytes``.

    ``graph`` is an expression (:func:`gnn_attention.convert.expressions.parse`), causal unless given; ``file`` holds another
    model than the one that ships with the package.

    Raises ValueError for an empty prompt, a graph with too few tokens and whatever is wrong with the expression or the file.

    >>> said = continued("def read(", tokens=3, graph="window(64, 16) | sinks(64, 4)", temperature=0.0)
    >>> said["text"].startswith("def read("), len(said["tokens"]) - said["prompt_tokens"]
    (True, 3)
    """
    return _continued(prompt, tokens, graph, temperature, seed, file, backend, Progress("generate", shown=False))


def _continued(
    prompt: str,
    tokens: int,
    graph: str | None,
    temperature: float,
    seed: int,
    file: Path | None,
    backend: str,
    shown: Progress,
) -> dict[str, Any]:
    """The same, followed by ``shown``."""
    tokens = checks.size("tokens", tokens)
    language_model, vocabulary, _ = model.load(model.TRAINED if file is None else file)
    language_model.backend = backend
    start = vocabulary.encode(prompt)
    if not start:
        raise ValueError("prompt must have at least one character, got none")
    edges = patterns.causal(len(start) + tokens) if graph is None else expressions.parse(graph)
    cache = KeyValueCache(edges, language_model.config.num_layers)
    shown.expect(tokens)
    shown.follow(lambda: max(cache.length - len(start), 0))
    found = model.generate(language_model, torch.tensor(start), tokens, temperature, seed, cache=cache).tolist()
    return {
        "text": vocabulary.decode(found),
        "tokens": found,
        "prompt_tokens": len(start),
        "graph": edges.name,
        "temperature": temperature,
        "seed": seed,
        "came": cache.length,
        "kept": len(cache.positions),
        "bytes": cache.nbytes,
    }


def add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``gnn-attention generate``."""
    command = commands.add_parser("generate", help="let the trained model go on with a text, along the edges of a graph")
    command.add_argument("prompt", help="the text to go on with, such as 'def read('")
    command.add_argument("--tokens", type=int, default=80, metavar="N", help="how many more (default %(default)s)")
    command.add_argument(
        "--graph", metavar="EXPR", help="who hears whom, e.g. 'window(512, 64) | sinks(512, 4)' (default: causal)"
    )
    command.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token (default %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    command.add_argument("--model", type=Path, metavar="FILE", help="weights of 'gnn-attention train' (default: those that ship)")
    command.add_argument("--backend", default="auto", choices=["auto", *BACKENDS], help="what attends (default %(default)s)")
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write it as JSON (without FILE: to stdout)")
    command.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    atomic_files.check_place("--json", args.json)
    with Progress("generate", unit="tokens") as shown:
        said = _continued(args.prompt, args.tokens, args.graph, args.temperature, args.seed, args.model, args.backend, shown)
    if args.json == "-":
        print(json.dumps(said, indent=2))
        return 0
    if args.json:
        atomic_files.write(args.json, json.dumps(said, indent=2) + "\n")
    print(said["text"])
    print("{came} tokens along {graph}: {kept} senders kept, {bytes:,} bytes".format_map(said), file=sys.stderr)
    return 0
