"""The command ``gnn-attention explore``: write a page that shows a model's attention."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from gnn_attention import explorer
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.cli.attribute import describe_effect, load, read_text
from gnn_attention.explorer._html import is_explorer_page
from gnn_attention.explorer._masks import Choice
from gnn_attention.explorer._pack import check_length
from gnn_attention.interpret.trace import Attribution, attribute

# This model of gnn_attention.lm has a tokenizer. By default it reads DEFAULT_TEXT.
LANGUAGE_MODEL = "smollm2"
DEFAULT_TEXT = "The red box holds a key and the blue box holds a coin. To get the key, open the"
# Its page shows 4 layers by default, and graphs of these fractions of edges; 10 edges are printed.
NUM_LAYERS, NUM_EDGES, EDGE_FRACTIONS = 4, 10, (0.3, 0.1, 0.03)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gnn-attention explore``."""
    command.set_defaults(run=run_explore)
    add = command.add_argument
    add("text", nargs="?", help="the text to read, or @FILE (default: a few lines, with a tour)")
    add("-o", "--out", default="explorer.html", metavar="FILE", help="file to write (default %(default)s)")
    model = "smollm2, a file of gnn_attention.model.save, or a Hugging Face model's name or folder"
    add("--model", metavar="NAME", help=model)
    graph = "a graph to show, e.g. 'window(n, 4)', where n is tokens plus room; may be repeated"
    add("--graph", action="append", metavar="EXPR", help=graph)
    add("--room", type=int, default=16, metavar="N", help="number of tokens that may be added (default 16)")
    add("--layers", type=int, nargs="+", metavar="L", help="layers of a Hugging Face model to show")
    add("--title", help="title of the page (default: the text)")
    add("--force", action="store_true", help="replace FILE even if this command did not write it")


def run_explore(args: argparse.Namespace) -> int:
    atomic_files.check_output_path("-o", args.out)
    out = Path(args.out)
    if out.exists() and not args.force and not is_explorer_page(out):
        raise ValueError(f"-o {out} exists and is not an explorer page: use another name or --force")
    is_language_model = args.model == LANGUAGE_MODEL
    default_text = DEFAULT_TEXT if is_language_model else explorer.FIRST
    if not (text := default_text if args.text is None else read_text(args.text)):
        raise ValueError("text must not be empty: pass one such as 'Llamas do not output words'")
    with Progress("explore") as progress:
        progress.advance(0, "the model reads the text")
        if is_language_model:
            page, lines = _explore_language_model(text, args, progress)
        else:
            options = {"room": args.room, "title": args.title, "layers": args.layers}
            page = explorer.page(text, args.model, args.graph, **options)
            lines = list[str]()
        page.save(out)
    summary = f"{page.tokens} tokens, {len(page.html) / 1e6:.1f} MB"
    print("\n".join([f"{out}: {summary}; open it in a browser, it needs no network", *lines]))
    return 0


def _explore_language_model(
    text: str, args: argparse.Namespace, progress: Progress
) -> tuple[explorer.Page, list[str]]:
    """Return the page of a language model, and lines that link to its strongest edges.

    An edge's effect is the change in the likeliest next token's log probability if the edge is cut.
    The page shows the layers of ``--layers``, or those with the largest effects, and graphs of the
    strongest edges.
    """
    model, tokenizer, ids, tokens = load(args.model, text, progress)
    check_length(ids[0])
    progress.begin("measuring the effect of each edge on the next token")
    with torch.no_grad():
        log_p, token = model(ids, use_cache=False).logits[0, -1].float().log_softmax(-1).max(0)
    effects = attribute(model, ids, lambda logits: logits[0, -1].float().log_softmax(-1)[token])
    strengths = {layer: effects.scores(layer).double().square().sum(0) for layer in effects.layers}
    if missing := set(args.layers or ()) - set(strengths):
        raise IndexError(f"--layers must be some of 0 .. {max(strengths)}, got {sorted(missing)}")
    top_layers = sorted(strengths, key=lambda layer: -float(strengths[layer].sum()))[:NUM_LAYERS]
    layers = sorted(set(args.layers or top_layers))
    progress.begin(f"recording layers {' '.join(map(str, layers))}")
    total = torch.stack([strengths[layer] for layer in layers]).sum(0)
    choices = [_strongest_edges(effects.edge_index(layers[0]), total, x) for x in EDGE_FRACTIONS]
    options = {"room": args.room, "title": args.title, "layers": layers}
    page = explorer.page(text, (model, tokenizer), args.graph, choices, **options)
    next_token = f"next: {tokenizer.decode([token])!r}, p = {float(log_p.exp()):.3g}"
    title = f"{next_token}; what a cut adds to log p, and where to see it"
    return page, [title, *_link_edges(effects, layers, tokens, args.out)]


def _strongest_edges(edge_index: Tensor, strengths: Tensor, fraction: float) -> Choice:
    num_tokens = int(edge_index.max()) + 1
    num_edges = max(1, round(fraction * len(strengths)))
    src, dst = edge_index[:, strengths.topk(num_edges).indices]
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    mask[dst, src] = True
    meaning = f"The {num_edges:,} edges whose cuts change the next token most, in all heads of these layers."
    return Choice(f"the strongest {fraction:.0%} of edges", meaning, mask, num_tokens)


def _link_edges(effects: Attribution, layers: list[int], tokens: list[str], out: str) -> Iterator[str]:
    graphs = {layer: effects.graphs[layer] for layer in layers}
    for effect in Attribution(graphs, {"cut": {n: effects.scores(n) for n in layers}}).top(NUM_EDGES):
        edge_id = f"{layers.index(effect.layer)}.{effect.head}.{effect.dst}.{effect.src}"
        yield f"{describe_effect(effect, tokens)}; {out}#at=listen.{edge_id}.0"
