"""Loss and speed of a pretrained model along graphs, without training.

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
from examples.compare_graphs import LISTED, Contender, contenders
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Int, Tensor

GRAPHS = "causal; window(256); window(252) | sinks(4); window(64); window(60) | sinks(4)"


def along(
    model: nn.Module, ids: Int[Tensor, "1 tokens"], graphs: Sequence[Contender]
) -> Iterator[dict[str, Any]]:
    """By graph: its share of the causal edges, the loss after a quarter of the tokens, tokens per second.

    ``model`` is one for ``ga.use_graph``. The speed is that of the better of two passes over all tokens.
    """
    tokens = ids.shape[1]
    for one in graphs:
        share = one.graph.num_edges / (one.graph.heads or 1) / (tokens * (tokens + 1) / 2)
        with torch.no_grad(), ga.use_graph(model, one.graph):
            (logits, first), (_, second) = _timed(model, ids), _timed(model, ids)
        loss = functional.cross_entropy(logits[0, tokens // 4 : -1].float(), ids[0, tokens // 4 + 1 :])
        speed = round(tokens / min(first, second), 1)
        yield {"graph": one.text, "share": round(share, 6), "loss": round(float(loss), 4), "speed": speed}


def _timed(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    began = time.perf_counter()
    return model(ids, use_cache=False).logits, time.perf_counter() - began


def _compare(args: argparse.Namespace) -> None:
    with Progress("compare", unit="graphs") as progress:
        progress.begin(f"loading {args.model}")
        model, tokenizer = ga.lm.load(args.model)
        if tokenizer is None:
            raise ValueError(f"--model {args.model} has no tokenizer for a text: take smollm2")
        text = Path(args.text).read_text(encoding="utf-8") if args.text else inspect.getsource(collections)
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]
        if (tokens := ids.shape[1]) < 8:
            raise ValueError(f"--text must have at least 8 tokens, and --tokens too, got {tokens}")
        rows = []
        graphs = contenders(args.graphs, tokens, model.config.num_attention_heads)
        progress.expect(len(graphs))
        for row in along(model, ids, graphs):
            rows.append(row)
            progress.advance(1, row["graph"])
    about = {"model": args.model, "text": args.text or "collections.py", "tokens": tokens, "rows": rows}
    lines = [f"{row['loss']:8.4f} {row['share']:8.2%} {row['speed']:10.1f}  {row['graph']}" for row in rows]
    title = f"{args.model}, {tokens} tokens, untrained\n    loss    edges   tokens/s  graph"
    atomic_files.write_json(args.json, about, "\n".join([title, *lines]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, by default with the arguments of ``sys.argv``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.compare", description=__doc__)
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--graphs", default=GRAPHS, metavar="LIST", help=f"{LISTED} {shown}")
    add("--model", default="smollm2", metavar="NAME", help=f"of gnn_attention.lm {shown}")
    add("--text", metavar="FILE", help="what the model reads (default: Python's collections.py)")
    add("--tokens", type=int, default=1024, help=f"of the text, at most {shown}")
    atomic_files.add_json(parser)
    return commands.run(parser, arguments, _compare)


if __name__ == "__main__":
    sys.exit(main())
