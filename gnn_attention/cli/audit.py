"""The command ``gnn-attention audit``: check that information flows exactly along a graph."""

import argparse
import sys

from gnn_attention import model
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.cli.draw import read_graph
from gnn_attention.interpret import audit as auditor

# An audit checks every pair of tokens, so longer graphs would take too long.
MAX_TOKENS = 512


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gnn-attention audit``, which exits with 1 if information leaks."""
    add = command.add_argument
    add("expression", help="the declared graph, e.g. 'window(32, 8) | sinks(32, 2)', or a file")
    add("--model", metavar="FILE", help="a file of gnn_attention.model.save (default: the shipped model)")
    add("--run-over", metavar="EXPRESSION", help="the graph that the model uses (default: expression)")
    add("--layers", type=int, metavar="L", help="number of layers (default: that of the model)")
    add("--seed", type=int, default=0, help="seed of the random inputs (default 0)")
    atomic_files.add_json(command)
    command.set_defaults(run=run_audit)


def run_audit(args: argparse.Namespace) -> int:
    graph = read_graph(args.expression)[0]
    if graph.num_dst > MAX_TOKENS:
        raise ValueError(f"an audit takes at most {MAX_TOKENS} tokens, got {graph!r}")
    model_graph = graph if args.run_over is None else read_graph(args.run_over)[0]
    language_model, _, _ = model.load(model.TRAINED if args.model is None else args.model)
    with Progress("audit", unit="passes") as progress:
        options = {"call": lambda lm, ids: lm(ids, model_graph), "seed": args.seed, "watch": progress.reach}
        verdict = auditor.audit(language_model, graph, (graph.num_src,), args.layers, **options)
    if args.json == "-":
        print(verdict, file=sys.stderr)
    atomic_files.write_json(args.json, verdict.to_json(), verdict)
    return 0 if verdict.ok else 1
