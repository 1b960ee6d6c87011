"""The command ``gnn-attention audit``: whether information in a language model flows exactly along a graph."""

from __future__ import annotations

import argparse
import sys

from gnn_attention import model
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.convert import expressions
from gnn_attention.interpret import audit as auditor

__all__ = ["add_audit"]

LONGEST = 512  # tokens: every pair is looked at, in a model of any size


def add_audit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``gnn-attention audit``: exit code 1 if information leaks."""
    command = commands.add_parser("audit", help="does information in a language model flow exactly along a graph?")
    command.add_argument("expression", help="the declared graph, such as 'window(32, 8) | sinks(32, 2)'")
    command.add_argument("--model", metavar="FILE", help="of gnn_attention.model.save (default: the one that ships)")
    command.add_argument("--run-over", metavar="EXPRESSION", help="the graph that the model is given (default: the declared one)")
    command.add_argument("--layers", type=int, metavar="L", help="how often the graph may be used (default: as the model does)")
    command.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write it as JSON (without FILE: to stdout)")
    command.set_defaults(run=_audit)


def _audit(args: argparse.Namespace) -> int:
    atomic_files.check_place("--json", args.json)
    graph = expressions.parse(args.expression)
    if graph.num_dst > LONGEST:
        raise ValueError(f"{graph!r} is too long for an audit of a model: take at most {LONGEST} tokens, the rule is the same")
    given = graph if args.run_over is None else expressions.parse(args.run_over)
    audited, _, _ = model.load(model.TRAINED if args.model is None else args.model)
    with Progress("audit", unit="passes") as shown:
        size, watch = (graph.num_src,), shown.reach
        verdict = auditor.audit(
            audited, graph, size, args.layers, call=lambda module, ids: module(ids, given), seed=args.seed, watch=watch
        )
    if args.json == "-":
        print(verdict.to_json())
    elif args.json:
        atomic_files.write(args.json, verdict.to_json() + "\n")
    print(verdict, file=sys.stderr if args.json == "-" else sys.stdout)
    return 0 if verdict.ok else 1
