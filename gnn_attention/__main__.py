"""``gnn-attention verify | audit | bench | explore | graphs | draw | cost | generate | train | compare | reach``.

Exit code 0 if everything held, 1 if a check failed, 2 for wrong arguments, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from gnn_attention import (
    __version__,
    _audit_command,
    _cost_command,
    _files,
    bench,
    commands,
    experiment,
    generation,
    tasks,
    training,
    verify,
)
from gnn_attention.backends import BACKENDS
from gnn_attention.explorer import _command as _explore_command
from gnn_attention.verify.cases import GRAPHS
from gnn_attention.verify.check import DTYPES

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, a pager for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, IndexError, ImportError, OSError) as error:
        print(f"gnn-attention {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gnn-attention", description="Attention masks as graphs.")
    parser.add_argument("--version", action="version", version=f"gnn_attention {__version__}")
    added = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_verify(added)
    _audit_command.add_audit(added)
    bench.add_arguments(added.add_parser("bench", help="time and memory of graphs of a million tokens, beside peers"))
    commands.add_graphs(added)
    commands.add_draw(added)
    generation.add_generate(added)
    _explore_command.add_explore(added)
    train = added.add_parser("train", help="train the small language model on the standard library's sources")
    training.add_arguments(train)
    train.set_defaults(run=training.run)
    reach = added.add_parser("reach", help="a task that only reach can answer, learnt over several graphs")
    tasks.add_arguments(reach)
    reach.set_defaults(run=tasks.run)
    experiment.add_compare(added)
    _cost_command.add_cost(added)
    return parser


def _add_verify(added: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = added.add_parser("verify", help="check every form and backend against dense attention in float64")
    command.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    command.add_argument("--dtype", action="append", choices=list(DTYPES), help="only this dtype; may be repeated")
    command.add_argument("--backend", action="append", choices=list(BACKENDS), help="only this backend; may be repeated")
    command.add_argument(
        "--graph", action="append", choices=list(GRAPHS), help="only this graph; may be repeated", metavar="NAME"
    )
    command.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    command.add_argument("--no-trained", action="store_true", help="leave out the trained model")
    command.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write every case as JSON (without FILE: to stdout)"
    )
    command.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    _files.check_place("--json", args.json)
    report = verify.run(
        device=args.device,
        dtypes=args.dtype,
        backends=args.backend,
        graphs=args.graph,
        trained=not args.no_trained,
        seed=args.seed,
        progress=_show_progress if sys.stderr.isatty() else None,
    )
    if args.json == "-":
        print(report.to_json())
    elif args.json:
        _files.write(args.json, report.to_json() + "\n")
    print(report, file=sys.stderr if args.json == "-" else sys.stdout)
    return 0 if report.ok else 1


def _show_progress(done: int, result: verify.Result) -> None:
    if done % 50 == 0:
        print(f"\r{done} checks, now {result.group} {result.dtype} ...", end="\033[K\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
