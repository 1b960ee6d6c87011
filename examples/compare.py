"""Compare the loss and speed of a pretrained model along several graphs, without training.

``python -m examples.compare --model smollm2 --graphs "causal; window(128) | sinks(4)"``
"""

import argparse
import collections
import inspect
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import gnn_attention as ga
from examples import commands
from examples.compare_graphs import GRAPHS_HELP, Contender, contenders
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Int, Tensor

GRAPHS = "causal; window(256); window(252) | sinks(4); window(64); window(60) | sinks(4)"


def compare_graphs(
    model: nn.Module, ids: Int[Tensor, "1 tokens"], graphs: Sequence[Contender]
) -> Iterator[dict[str, Any]]:
    """Yield the share of causal edges, the loss after a quarter of the tokens and the speed of each graph.

    ``ga.use_graph`` must accept ``model``. The speed is in tokens per second, of the faster of two passes.
    """
    tokens = ids.shape[1]
    for contender in graphs:
        share = contender.graph.num_edges / (contender.graph.heads or 1) / (tokens * (tokens + 1) / 2)
        with torch.no_grad(), ga.use_graph(model, contender.graph):
            (logits, first), (_, second) = _run_timed(model, ids), _run_timed(model, ids)
        loss = functional.cross_entropy(logits[0, tokens // 4 : -1].float(), ids[0, tokens // 4 + 1 :])
        yield {
            "graph": contender.text,
            "share": round(share, 6),
            "loss": round(float(loss), 4),
            "speed": round(tokens / min(first, second), 1),
        }


def _run_timed(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    start = time.perf_counter()
    return model(ids, use_cache=False).logits, time.perf_counter() - start


def _compare(args: argparse.Namespace) -> None:
    with Progress("compare", unit="graphs") as progress:
        progress.begin(f"loading {args.model}")
        model, tokenizer = ga.lm.load(args.model)
        if tokenizer is None:
            raise ValueError(f"--model {args.model} has no tokenizer for a text: use smollm2")
        text = Path(args.text).read_text(encoding="utf-8") if args.text else inspect.getsource(collections)
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]
        if (tokens := ids.shape[1]) < 8:
            raise ValueError(f"--text and --tokens must give at least 8 tokens, got {tokens}")
        rows = []
        graphs = contenders(args.graphs, tokens, model.config.num_attention_heads)
        progress.expect(len(graphs))
        for row in compare_graphs(model, ids, graphs):
            rows.append(row)
            progress.advance(1, row["graph"])
    record = {"model": args.model, "text": args.text or "collections.py", "tokens": tokens, "rows": rows}
    lines = [f"{row['loss']:8.4f} {row['share']:8.2%} {row['speed']:10.1f}  {row['graph']}" for row in rows]
    title = f"{args.model}, {tokens} tokens, untrained\n    loss    edges   tokens/s  graph"
    atomic_files.write_json(args.json, record, "\n".join([title, *lines]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, by default with the arguments of ``sys.argv``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.compare", description=__doc__)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--graphs", default=GRAPHS, metavar="LIST", help=f"{GRAPHS_HELP} {default}")
    add("--model", default="smollm2", metavar="NAME", help=f"name of a model of gnn_attention.lm {default}")
    add("--text", metavar="FILE", help="text to read (default: Python's collections.py)")
    add("--tokens", type=int, default=1024, help=f"maximum number of tokens of the text {default}")
    atomic_files.add_json(parser)
    return commands.run(parser, arguments, _compare)


if __name__ == "__main__":
    sys.exit(main())
