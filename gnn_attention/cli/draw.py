"""The command ``gnn-attention draw``: an expression or a file as a picture."""

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
from gnn_attention.graph.text import LARGEST_PICTURE

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
    """The arguments of ``gnn-attention draw``."""
    add = command.add_argument
    add("expression", help="a file, or builders and | & - ^ ~ @ ** .T .rows(a, b) .select(batch, head)")
    add("--undirected", action="store_true", help="of a file that does not say it: edges go both ways")
    add("-o", "--out", metavar="FILE", help="picture to write (.svg, .png, .pdf; default: text, if small)")
    add("--kind", choices=list(KINDS), help="which picture (default mask)")
    add("--token", type=int, metavar="N", help="of layers and hops: whose reach (default: the last)")
    add("--layers", type=int, metavar="L", help="of layers and hops: how many (layers: default 3)")
    command.set_defaults(run=_draw)


def read_graph(text: str, undirected: bool = False) -> tuple[TokenGraph, list[str] | None]:
    """The graph of an expression, or of a file with its labels; stderr says what was read from a file."""
    # of a file with another ending, load says which it reads; Path.exists refuses a long text
    if Path(text).suffix.lower() not in files.READERS and not os.path.exists(text):  # noqa: PTH110
        if undirected:
            raise ValueError(f"--undirected belongs to a file of edges, not to {text!r}")
        return expressions.parse(text), None
    content = files.load(text, undirected or None)
    with suppress(OSError):  # a stderr without a reader
        print(content, file=sys.stderr)
    return content.graph, content.labels


def _draw(args: argparse.Namespace) -> int:
    graph, labels = read_graph(args.expression, args.undirected)
    given = {"token": args.token, "layers": args.layers}
    options = {name: value for name, value in given.items() if value is not None}
    if options and args.kind not in ("layers", "hops"):
        name = next(iter(options))
        raise ValueError(f"--{name} belongs to --kind layers and --kind hops, not to {args.kind or 'mask'}")
    if args.out is None:
        print(_in_text(graph, args.kind, labels))
        return 0
    atomic_files.check_output_path("-o", args.out)
    with Progress("draw"):
        if args.kind not in ("degrees", "hops"):
            options["labels"] = labels
        made = KINDS[args.kind or "mask"](graph, **options)
        with atomic_files.replace_file(args.out) as file:
            made.savefig(file, format=Path(args.out).suffix[1:].lower())
    print(f"{args.out}: {graph!r}")
    return 0


def _in_text(graph: TokenGraph, kind: str | None, labels: list[str] | None) -> str:
    """The picture in text; ValueError says what to do where there is none."""
    if kind not in (None, "mask"):
        raise ValueError(f"--kind {kind} needs a file to draw into, add for example -o picture.svg")
    text = str(graph)
    if text == repr(graph):
        limit = f"which is for one head and at most {LARGEST_PICTURE} tokens; add for example -o picture.svg"
        raise ValueError(f"{graph!r} has no picture in text, {limit}")
    if labels in (None, [str(token) for token in range(graph.num_dst)]):
        return text
    names = ", ".join(f"{token} {make_printable(label)}" for token, label in enumerate(labels or ()))
    return f"{text}\n{names}"
