"""The command ``gnn-attention draw``: draw the graph of an expression or a file."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gnn_attention import draw
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.text import make_printable
from gnn_attention.convert import expressions, files
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.text import MAX_PICTURE_TOKENS

KINDS: Mapping[str, Callable[..., Any]] = {
    "mask": draw.mask,
    "graph": draw.graph,
    "both": draw.side_by_side,
    "arcs": draw.arcs,
    "layers": partial(draw.layers, layers=3),
    "degrees": draw.degrees,
    "hops": draw.hops,
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gnn-attention draw``."""
    add = command.add_argument
    add("expression", help="file, or builders joined by | & - ^ ~ @ ** .T .rows(a, b) .select(batch, head)")
    add("--undirected", action="store_true", help="make edges undirected if the file does not say")
    add("-o", "--out", metavar="FILE", help=".svg, .png or .pdf file (default: print a mask)")
    add("--kind", choices=list(KINDS), help="kind of picture (default mask)")
    add("--token", type=int, metavar="N", help="receiver for --kind layers or hops (default: last)")
    add("--layers", type=int, metavar="L", help="number of layers in --kind layers (default 3) or hops")
    command.set_defaults(run=run_draw)


def read_graph(text: str, undirected: bool = False) -> tuple[TokenGraph, list[str] | None]:
    """Return the graph of an expression, or the graph and labels of a file; describe a file on stderr."""
    # Path.exists would raise for a long expression. files.load raises an error for files of other types.
    if Path(text).suffix.lower() not in files.READERS and not os.path.exists(text):  # noqa: PTH110
        if undirected:
            raise ValueError(f"--undirected needs a file of edges, got the expression {text!r}")
        return expressions.parse(text), None
    content = files.load(text, undirected or None)
    # stderr may have no reader.
    with suppress(OSError):
        print(content, file=sys.stderr)
    return content.graph, content.labels


def run_draw(args: argparse.Namespace) -> int:
    graph, labels = read_graph(args.expression, args.undirected)
    values = {"token": args.token, "layers": args.layers}
    options = {name: value for name, value in values.items() if value is not None}
    if options and args.kind not in ("layers", "hops"):
        name = next(iter(options))
        raise ValueError(f"--{name} belongs to --kind layers and --kind hops, not to {args.kind or 'mask'}")
    if args.out is None:
        print(_draw_as_text(graph, args.kind, labels))
        return 0
    atomic_files.check_output_path("-o", args.out)
    with Progress("draw"):
        if args.kind not in ("degrees", "hops"):
            options["labels"] = labels
        figure = KINDS[args.kind or "mask"](graph, **options)
        with atomic_files.replace_file(args.out) as file:
            figure.savefig(file, format=Path(args.out).suffix[1:].lower())
    print(f"{args.out}: {graph!r}")
    return 0


def _draw_as_text(graph: TokenGraph, kind: str | None, labels: list[str] | None) -> str:
    if kind not in (None, "mask"):
        raise ValueError(f"--kind {kind} needs a file to draw into, such as -o picture.svg")
    text = str(graph)
    # If a graph has no picture, str returns its repr.
    if text == repr(graph):
        raise ValueError(
            f"text shows one head and at most {MAX_PICTURE_TOKENS} tokens, got {graph!r}: add -o a.svg"
        )
    if labels in (None, [str(token) for token in range(graph.num_dst)]):
        return text
    names = ", ".join(f"{token} {make_printable(label)}" for token, label in enumerate(labels or ()))
    return f"{text}\n{names}"
