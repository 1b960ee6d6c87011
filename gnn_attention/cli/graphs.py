"""The commands ``gnn-attention graphs`` (the zoo) and ``gnn-attention draw`` (an expression)."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gnn_attention import draw
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.cli import json_option
from gnn_attention.convert import catalogue, expressions
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.token_graph import LARGEST_PICTURE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


REACH = frozenset({"token", "layers"})
# the picture, and the options that belong to it
KINDS: Mapping[str, tuple[Callable[..., Figure], frozenset[str]]] = {
    "mask": (draw.mask, frozenset()),
    "graph": (draw.graph, frozenset()),
    "both": (draw.side_by_side, frozenset()),
    "arcs": (draw.arcs, frozenset()),
    "layers": (draw.layers, REACH),
    "degrees": (draw.degrees, frozenset()),
    "hops": (draw.hops, REACH),
}


def add_graphs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``gnn-attention graphs``."""
    command = commands.add_parser("graphs", help="list the zoo: every builder, its definition, an example")
    command.add_argument("name", nargs="*", help="only these builders")
    json_option.add_json(command)
    command.set_defaults(run=_graphs)


def add_draw(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``gnn-attention draw``."""
    command = commands.add_parser("draw", help="draw a graph, e.g. 'window(64, 8) | sinks(64, 2)'")
    command.add_argument("expression", help="builders and | & - ^ ~ @ ** .T .rows(a, b) .select(batch, head)")
    out = "picture to write (.svg, .png, .pdf; default: text, if small)"
    command.add_argument("-o", "--out", metavar="FILE", help=out)
    command.add_argument("--kind", choices=list(KINDS), help="which picture (default mask)")
    token = "of layers and hops: whose reach (default: the last)"
    command.add_argument("--token", type=int, metavar="N", help=token)
    layers = "of layers and hops: how many (layers: default 3)"
    command.add_argument("--layers", type=int, metavar="L", help=layers)
    command.set_defaults(run=_draw)


def _graphs(args: argparse.Namespace) -> int:
    found = catalogue.entries(args.name or None)
    atomic_files.check_place("--json", args.json)
    if args.json is None:
        print(catalogue.listing(found, min(shutil.get_terminal_size((100, 0)).columns, 120)))
        return 0
    listed = [asdict(entry) | {"edges_per_token": entry.edges_per_token} for entry in found]
    json_option.write_json(args.json, json.dumps(listed, indent=2))
    return 0


def _draw(args: argparse.Namespace) -> int:
    graph = expressions.parse(args.expression)
    picture, own = KINDS[args.kind or "mask"]
    options = {name: value for name in ("token", "layers") if (value := getattr(args, name)) is not None}
    for name in options.keys() - own:
        raise ValueError(f"--{name} belongs to --kind layers and --kind hops, not to {args.kind or 'mask'}")
    if args.out is None:
        print(_in_text(graph, args.kind))
        return 0
    if not Path(args.out).suffix:
        wanted = "expected a file name whose ending says what to write, such as picture.svg"
        raise ValueError(f"-o {args.out}: {wanted}")
    atomic_files.check_place("-o", args.out)
    if args.kind == "layers":
        options.setdefault("layers", 3)
    with Progress("draw"):
        made = picture(graph, **options)
        with atomic_files.written(args.out) as file:
            made.savefig(file, format=Path(args.out).suffix[1:].lower())
    print(f"{args.out}: {graph!r}")
    return 0


def _in_text(graph: TokenGraph, kind: str | None) -> str:
    """The picture in text; ValueError says what to do where there is none."""
    if kind not in (None, "mask"):
        raise ValueError(f"--kind {kind} needs a file to draw into, add for example -o picture.svg")
    text = str(graph)
    if text == repr(graph):
        limit = f"which is for one head and at most {LARGEST_PICTURE} tokens; add for example -o picture.svg"
        raise ValueError(f"{graph!r} has no picture in text, {limit}")
    return text
