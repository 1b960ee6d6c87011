"""Print what the attention of published models costs in each form of heads, and what a graph saves.

``python -m examples.cost --model llama-3-8b --tokens 8192 --graph "window(4096)"``

``gnn_attention.analyse.cost`` counts for all layers together. Most models rotate queries and keys, so their
patterns are not ``W_Q W_K^T``; the columns "factored" and "merged" are the cost of these forms without
rotation. Biases and norms are not counted.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from examples import commands
from gnn_attention import patterns
from gnn_attention._support import atomic_files, checks
from gnn_attention.analyse import cost
from gnn_attention.convert import expressions
from gnn_attention.graph import TokenGraph


class Model(NamedTuple):
    """The sizes of a model's attention; ``window_layers`` of its layers have a ``window``."""

    source: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    window_layers: int = 0


MODELS = {
    "shipped": Model("the model in the wheel of gnn_attention", 2, 128, 4, 4, 32),
    "transformer-base": Model("Vaswani et al. 2017 (arXiv 1706.03762), table 3", 6, 512, 8, 8, 64),
    "gpt-2": Model("Radford et al. 2019, table 2, 117M", 12, 768, 12, 12, 64),
    "llama-3-8b": Model("Llama 3 (arXiv 2407.21783), table 3, 8B", 32, 4096, 32, 8, 128),
    "llama-3-70b": Model("Llama 3 (arXiv 2407.21783), table 3, 70B", 80, 8192, 64, 8, 128),
    "mistral-7b": Model("Mistral 7B (arXiv 2310.06825), table 1", 32, 4096, 32, 8, 128, 4096, 32),
    "qwen-2.5-7b": Model("Qwen2.5 (arXiv 2412.15115), table 1", 28, 3584, 28, 4, 128),
    "qwen-3-8b": Model("Qwen3 (arXiv 2505.09388), table 1", 36, 4096, 32, 8, 128),
    "gemma-2-2b": Model("Gemma 2 (arXiv 2408.00118), table 1", 26, 2304, 8, 4, 256, 4096, 13),
    "gemma-3-4b": Model("Gemma 3 (arXiv 2503.19786), section 2", 34, 2560, 8, 4, 256, 1024, 29),
}


def graphs_of(model: Model, tokens: int) -> list[tuple[TokenGraph, int]]:
    """Return the graphs of a model's layers for ``tokens`` tokens, each with its number of layers.

    >>> [(graph.name, layers) for graph, layers in graphs_of(MODELS["gemma-3-4b"], 8192)]
    [('window(8192, 1024)', 29), ('causal(8192)', 5)]
    """
    tokens, graphs = checks.size("tokens", tokens, 1), []
    if model.window is not None:
        graphs.append((patterns.window(tokens, model.window), model.window_layers))
    if model.layers > model.window_layers:
        graphs.append((patterns.causal(tokens), model.layers - model.window_layers))
    return graphs


def count_model(model: Model, layers: list[tuple[TokenGraph, int]]) -> dict[str, dict[str, int]]:
    """Return the counts of each form, summed over all layers, with numbers in bfloat16.

    >>> model = MODELS["llama-3-8b"]
    >>> count_model(model, graphs_of(model, 10))["standard"]["cache of a token, key, value (bytes)"]
    131072
    """
    sums: dict[str, dict[str, int]] = {}
    for form in cost.FORMS:
        sums[form] = {}
        for graph, count in layers:
            options: dict[str, Any] = {
                "num_kv_heads": model.kv_heads,
                "graph": graph,
                "dtype": torch.bfloat16,
            }
            form_cost = cost.of_form(form, model.width, model.heads, model.head_dim, **options)
            for name, number in _counts(form_cost).items():
                sums[form][name] = sums[form].get(name, 0) + count * number
    return sums


def _counts(form: cost.FormCost) -> dict[str, int]:
    counts = {"multiply-accumulates": form.macs.total, "... of these on edges": form.macs.edges}
    counts |= {"... of the last token alone": form.step.total, "parameters": form.parameters}
    counts |= {"activations (bytes)": form.activations, "weights of edges (bytes)": form.weights}
    counts |= {f"cache of a token, {way} (bytes)": size for way, size in form.cache_per_token.items()}
    return counts | {f"cache, {way} (bytes)": size for way, size in form.cache.items()}


def _cost(args: argparse.Namespace) -> None:
    model = MODELS[args.model]
    if args.graph is None:
        layers = graphs_of(model, args.tokens)
    else:
        layers = [(expressions.parse(args.graph, n=args.tokens), model.layers)]
    sums = count_model(model, layers)
    graphs = [cost.of_graph(graph) for graph, _ in layers]
    lines = [f"{args.model}: {model.source}; {args.tokens} tokens, bfloat16", ""]
    lines.append(f"{'':<44}" + "".join(f"{form:>22}" for form in sums))
    for name in dict.fromkeys(name for counts in sums.values() for name in counts):
        cells = (f"{counts[name]:,}" if name in counts else "-" for counts in sums.values())
        lines.append(f"{name:<44}" + "".join(f"{cell:>22}" for cell in cells))
    for graph, (tokens, count) in zip(graphs, layers, strict=True):
        share = f"{graph.of_causal:.3%} of the causal edges"
        lines += ["", f"{graph.name}, in {count} layers: {graph.edges:,} edges, {share};"]
        lines.append(f"decoding caches {graph.cached:,} of {tokens.num_src:,} senders")
    record: dict[str, Any] = {"model": args.model, **model._asdict(), "forms": sums}
    record["graphs"] = [vars(graph) for graph in graphs]
    atomic_files.write_json(args.json, record, "\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, by default with the arguments of ``sys.argv``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.cost", description=__doc__)
    add, default = parser.add_argument, "(default %(default)s)"
    add("--model", choices=list(MODELS), default="llama-3-8b", help=f"model {default}")
    add("--tokens", type=int, default=8192, help=f"length of the sequence {default}")
    add("--graph", metavar="EXPR", help="graph of all layers, such as 'window(4096)' (default: the model's)")
    atomic_files.add_json(parser)
    return commands.run(parser, arguments, _cost)


if __name__ == "__main__":
    sys.exit(main())
