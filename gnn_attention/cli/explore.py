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
    command = commands.add_parser(
        "explore", help="write a page that shows a text going through a model, edge by edge"
    )
    command.add_argument("text", nargs="?", help="what the model reads, such as 'Llamas do not output words'")
    command.add_argument("--file", metavar="FILE", help="read the text from a file (- for stdin)")
    command.add_argument(
        "-o", "--out", default="explorer.html", metavar="FILE", help="page to write (default %(default)s)"
    )
    command.add_argument(
        "--model",
        metavar="NAME",
        help="a file of 'gnn-attention train', or name or folder of a Hugging Face model",
    )
    command.add_argument(
        "--graph",
        action="append",
        metavar="EXPR",
        help="a first graph, e.g. 'window(n, 4) | sinks(n, 1)', n being tokens and room; may be repeated",
    )
    command.add_argument(
        "--room", type=int, default=16, metavar="N", help="how many tokens may be added (default %(default)s)"
    )
    command.add_argument(
        "--layers", type=int, nargs="+", metavar="L", help="of a Hugging Face model: only these layers"
    )
    command.add_argument("--title", help="of the page (default: the text)")
    command.add_argument("--force", action="store_true", help="replace a file that is no such page, too")
    command.set_defaults(run=_explore)


def _explore(args: argparse.Namespace) -> int:
    out = Path(args.out)
    _check_out(out, args.force)
    text = _text(args.text, args.file)
    with Progress("explore") as progress:
        progress.advance(0, "the model reads the text")
        shown = explorer.page(
            text, args.model, args.graph, room=args.room, title=args.title, layers=args.layers
        )
        shown.save(out)
    print(
        f"{out}: {shown.tokens} tokens, {len(shown.html) / 1e6:.1f} MB; open it in a browser, it needs no "
        "network"
    )
    return 0


def _text(text: str | None, file: str | None) -> str:
    if (text is None) == (file is None):
        raise ValueError("give either a text, such as 'Llamas do not output words', or --file FILE")
    if file is None:
        assert text is not None
        return text
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
        raise ValueError(
            f"-o {out} exists and is no page of the explorer: give another name, or --force to replace it"
        )
