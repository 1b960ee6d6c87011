"""The command ``gnn-attention explore``: a page that shows a model's attention."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnn_attention import explorer
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.cli.attribute import in_words
from gnn_attention.explorer._html import is_ours
from gnn_attention.explorer._masks import Choice
from gnn_attention.explorer._pack import check_length
from gnn_attention.interpret.trace import Attribution, attribute

# models of gnn_attention.lm that read a text, what they read, how many layers, edges and graphs are shown
SHOWN = ("smollm2",)
SENTENCE = "The red box holds a key and the blue box holds a coin. To get the key, open the"
LAYERS, EDGES, SHARES = 4, 10, (0.3, 0.1, 0.03)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention explore``."""
    command.set_defaults(run=_explore)
    add = command.add_argument
    add("text", nargs="?", help="what the model reads (default: some lines, with a tour)")
    add("--file", metavar="FILE", help="read the text from a file (- for stdin)")
    add("-o", "--out", default="explorer.html", metavar="FILE", help="page to write (default %(default)s)")
    model = f"{', '.join(SHOWN)} (of gnn_attention.lm), a file of weights, or name or folder "
    model += "of a Hugging Face model"
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
    whole = args.model not in SHOWN
    if not (text := _text(args.text, args.file, explorer.FIRST if whole else SENTENCE)):
        raise ValueError("the text is empty: give some, such as 'Llamas do not output words'")
    with Progress("explore") as progress:
        progress.advance(0, "the model reads the text")
        options = {"room": args.room, "title": args.title, "layers": args.layers}
        strongest: Iterable[str] = ()
        if whole:
            shown = explorer.page(text, args.model, args.graph, **options)
        else:
            shown, strongest = attributed(text, args.model, args.graph, options, progress)
        shown.save(out)
    size = f"{shown.tokens} tokens, {len(shown.html) / 1e6:.1f} MB"
    print(f"{out}: {size}; open it in a browser, it needs no network")
    for line in strongest:
        print(line.replace("; #at=", f"; {out}#at="))
    return 0


def attributed(
    text: str, name: str, graphs: Any, options: dict[str, Any], progress: Progress
) -> tuple[explorer.Page, list[str]]:
    """The page of a model of ``gnn_attention.lm``, and lines with its strongest edges and their addresses.

    Edges are weighed by what a cut adds to log p, p that of the likeliest next token. Shown are the
    ``layers`` of the options, or those where edges weigh most; to choose from are graphs of the strongest
    edges there.
    """
    # optional: it needs transformers
    from gnn_attention import lm

    progress.begin(f"loading {name}")
    model, tokenizer = lm.load(name)
    ids = tokenizer(text, return_tensors="pt").input_ids
    check_length(ids[0])
    progress.begin("what cutting an edge does to the next token, for all edges")
    effects, p, token = _effects(model, ids)
    weights = {layer: effects.scores(layer).double().square().sum(0) for layer in effects.layers}
    layers = _layers(options["layers"], weights)
    progress.begin(f"layers {' '.join(map(str, layers))} are recorded")
    total = torch.stack([weights[layer] for layer in layers]).sum(0)
    masks = [_strongest(effects.edge_index(layers[0]), total, share) for share in SHARES]
    shown = explorer.page(text, (model, tokenizer), graphs, masks, **{**options, "layers": layers})
    said = f"next: {tokenizer.decode([token])!r}, p = {p:.3g}; what a cut adds to log p, and where to see it"
    return shown, [said, *_lines(effects, layers, [tokenizer.decode([one]) for one in ids[0].tolist()])]


def _effects(model: nn.Module, ids: Tensor) -> tuple[Attribution, float, int]:
    """Of edges on log p of the likeliest next token; with p and the token."""
    found: list[Tensor] = []

    def log_p(logits: Tensor) -> Tensor:
        best, token = logits[0, -1].float().log_softmax(-1).max(0)
        found[:] = best.detach(), token
        return best

    model.requires_grad_(False)
    effects = attribute(model, ids, log_p)
    return effects, float(found[0].exp()), int(found[1])


def _layers(wanted: list[int] | None, weights: dict[int, Tensor]) -> list[int]:
    if missing := set(wanted or ()) - set(weights):
        raise IndexError(f"--layers must be some of 0 .. {max(weights)}, got {sorted(missing)}")
    return sorted(set(wanted or sorted(weights, key=lambda layer: -float(weights[layer].sum()))[:LAYERS]))


def _strongest(pairs: Tensor, weights: Tensor, share: float) -> Choice:
    size, count = int(pairs.max()) + 1, max(1, round(share * len(weights)))
    src, dst = pairs[:, weights.topk(count).indices]
    mask = torch.zeros(size, size, dtype=torch.bool)
    mask[dst, src] = True
    meaning = f"The {count:,} edges whose cuts change the next token most, over the heads of these layers."
    return Choice(f"the strongest {share:.0%} of edges", meaning, mask, size)


def _lines(effects: Attribution, layers: list[int], words: list[str]) -> Iterator[str]:
    graphs = {layer: effects.graphs[layer] for layer in layers}
    for effect in Attribution(graphs, {"cut": {n: effects.scores(n) for n in layers}}).top(EDGES):
        place = f"{layers.index(effect.layer)}.{effect.head}.{effect.dst}.{effect.src}"
        yield f"{in_words(effect, words)}; #at=listen.{place}.0"


def _text(text: str | None, file: str | None, default: str) -> str:
    if file is None:
        return default if text is None else text
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
