"""The command ``gnn-attention explore``: a page that shows a model's attention."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gnn_attention import explorer
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.explorer._html import is_ours


def add_explore(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``gnn-attention explore``."""
    about = "write a page that shows a text going through a model, edge by edge"
    command = commands.add_parser("explore", help=about)
    command.set_defaults(run=_explore)
    add = command.add_argument
    add("text", nargs="?", help="what the model reads (default: lines of Python, with a tour)")
    add("--file", metavar="FILE", help="read the text from a file (- for stdin)")
    add("-o", "--out", default="explorer.html", metavar="FILE", help="page to write (default %(default)s)")
    model = "a file of 'gnn-attention train', or name or folder of a Hugging Face model"
    add("--model", metavar="NAME", help=model)
    graph = "a first graph, e.g. 'window(n, 4) | sinks(n, 1)', n being tokens and room; may be repeated"
    add("--graph", action="append", metavar="EXPR", help=graph)
    add(
        "--room", type=int, default=16, metavar="N", help="how many tokens may be added (default %(default)s)"
    )
    add("--layers", type=int, nargs="+", metavar="L", help="of a Hugging Face model: only these layers")
    add("--title", help="of the page (default: the text)")
    add("--force", action="store_true", help="replace a file that is no such page, too")


def _explore(args: argparse.Namespace) -> int:
    out = Path(args.out)
    _check_out(out, args.force)
    if not (text := _text(args.text, args.file)):
        raise ValueError("the text is empty: give some, such as 'Llamas do not output words'")
    with Progress("explore") as progress:
        progress.advance(0, "the model reads the text")
        options = {"room": args.room, "title": args.title, "layers": args.layers}
        shown = explorer.page(text, args.model, args.graph, **options)
        shown.save(out)
    size = f"{shown.tokens} tokens, {len(shown.html) / 1e6:.1f} MB"
    print(f"{out}: {size}; open it in a browser, it needs no network")
    return 0


def _text(text: str | None, file: str | None) -> str:
    if file is None:
        return explorer.FIRST if text is None else text
    if text is not None:
        raise ValueError("give either a text, such as 'Llamas do not output words', or --file FILE")
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file {file} is no text in UTF-8: {error.reason} at byte {error.start}") from None


def _check_out(out: Path, force: bool) -> None:
    """ValueError where nothing can be written, or something else would be lost."""
    if out.is_dir():
        raise ValueError(f"-o {out} is a folder: give a file, such as {out / 'explorer.html'}")
    atomic_files.check_place("-o", str(out))
    if out.exists() and not force and not is_ours(out):
        advice = "give another name, or --force to replace it"
        raise ValueError(f"-o {out} exists and is no page of the explorer: {advice}")
