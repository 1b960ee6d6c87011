"""What the attention of published models costs, form by form, and what a graph saves.

``python -m examples.cost --model llama-3-8b --tokens 8192 --graph "window(4096)"``

The counts are those of ``gnn_attention.analyse.cost``, for all layers together. Most models rotate queries
and keys, so that their patterns are not ``W_Q W_K^T``: the columns "factored" and "merged" say what these
forms would cost without that. Biases and norms are left out.
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
    "shipped": Model("the model that ships with gnn_attention", 2, 128, 4, 4, 32),
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
    """The graphs of a model's layers over so many tokens, each with the number of its layers.

    >>> [(graph.name, layers) for graph, layers in graphs_of(MODELS["gemma-3-4b"], 8192)]
    [('window(8192, 1024)', 29), ('causal(8192)', 5)]
    """
    tokens, graphs = checks.size("tokens", tokens, 1), []
    if model.window is not None:
        graphs.append((patterns.window(tokens, model.window), model.window_layers))
    if model.layers > model.window_layers:
        graphs.append((patterns.causal(tokens), model.layers - model.window_layers))
    return graphs


def of_model(model: Model, layers: list[tuple[TokenGraph, int]]) -> dict[str, dict[str, int]]:
    """For each form the sums over all layers, by what is counted, with numbers in bfloat16.

    >>> model = MODELS["llama-3-8b"]
    >>> of_model(model, graphs_of(model, 10))["standard"]["cache of a token, key, value (bytes)"]
    131072
    """
    sums: dict[str, dict[str, int]] = {}
    for form in cost.FORMS:
        sums[form] = {}
        for graph, count in layers:
            sizes = model.width, model.heads, model.head_dim, None, model.kv_heads
            one = cost.of_form(form, *sizes, graph=graph, dtype=torch.bfloat16)
            for name, number in _counts(one).items():
                sums[form][name] = sums[form].get(name, 0) + count * number
    return sums


def _counts(one: cost.FormCost) -> dict[str, int]:
    counts = {"multiply-accumulates": one.macs.total, "... of these on edges": one.macs.edges}
    counts |= {"... of the last token alone": one.step.total, "parameters": one.parameters}
    counts |= {"activations (bytes)": one.activations, "weights of edges (bytes)": one.weights}
    counts |= {f"cache of a token, {way} (bytes)": size for way, size in one.cache_per_token.items()}
    return counts | {f"cache, {way} (bytes)": size for way, size in one.cache.items()}


def _cost(args: argparse.Namespace) -> None:
    model = MODELS[args.model]
    if args.graph is None:
        layers = graphs_of(model, args.tokens)
    else:
        layers = [(expressions.parse(args.graph, n=args.tokens), model.layers)]
    sums = of_model(model, layers)
    graphs = [cost.of_graph(graph) for graph, _ in layers]
    lines = [f"{args.model}: {model.source}; {args.tokens} tokens, bfloat16", ""]
    lines.append(f"{'':<44}" + "".join(f"{form:>22}" for form in sums))
    for name in dict.fromkeys(name for counts in sums.values() for name in counts):
        cells = (f"{counts[name]:,}" if name in counts else "-" for counts in sums.values())
        lines.append(f"{name:<44}" + "".join(f"{cell:>22}" for cell in cells))
    for graph, (tokens, count) in zip(graphs, layers, strict=True):
        share = f"{graph.of_causal:.3%} of the causal ones"
        lines += ["", f"{graph.name}, in {count} layers: {graph.edges:,} edges, {share};"]
        lines.append(f"decoding caches {graph.cached:,} of {tokens.num_src:,} senders")
    record: dict[str, Any] = {"model": args.model, **model._asdict(), "forms": sums}
    record["graphs"] = [vars(graph) for graph in graphs]
    atomic_files.write_json(args.json, record, "\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, by default with the arguments of ``sys.argv``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.cost", description=__doc__)
    add, default = parser.add_argument, "(default %(default)s)"
    add("--model", choices=list(MODELS), default="llama-3-8b", help=f"whose sizes {default}")
    add("--tokens", type=int, default=8192, help=f"that came so far {default}")
    add("--graph", metavar="EXPR", help="of all layers, such as 'window(4096)' (default: the model's)")
    atomic_files.add_json(parser)
    return commands.run(parser, arguments, _cost)


if __name__ == "__main__":
    sys.exit(main())
