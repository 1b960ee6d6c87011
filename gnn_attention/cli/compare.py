"""``gnn-attention compare``: loss and speed of a pretrained model along graphs, without training."""

import argparse
import inspect
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gnn_attention._support import json_option
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.cli.compare_graphs import LISTED, Contender, contenders

GRAPHS = "causal; window(256); window(252) | sinks(4); window(64); window(60) | sinks(4)"


def along(
    model: nn.Module, ids: Int[Tensor, "1 tokens"], graphs: Sequence[Contender]
) -> Iterator[dict[str, Any]]:
    """By graph: its share of the causal edges, the loss after a quarter of the tokens, tokens per second.

    ``model`` is one for ``use_graph``. The speed is that of the better of two passes over all tokens.
    """
    # optional: it needs transformers
    from gnn_attention.huggingface import use_graph

    tokens = ids.shape[1]
    for one in graphs:
        share = one.graph.num_edges / (one.graph.heads or 1) / (tokens * (tokens + 1) / 2)
        with torch.no_grad(), use_graph(model, one.graph):
            (logits, first), (_, second) = _timed(model, ids), _timed(model, ids)
        loss = functional.cross_entropy(logits[0, tokens // 4 : -1].float(), ids[0, tokens // 4 + 1 :])
        speed = round(tokens / min(first, second), 1)
        yield {"graph": one.text, "share": round(share, 6), "loss": round(float(loss), 4), "speed": speed}


def _timed(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    began = time.perf_counter()
    return model(ids, use_cache=False).logits, time.perf_counter() - began


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention compare``."""
    add, shown = command.add_argument, "(default: %(default)s)"
    add("--graphs", default=GRAPHS, metavar="LIST", help=f"{LISTED} {shown}")
    add("--model", default="smollm2", metavar="NAME", help=f"of gnn_attention.lm {shown}")
    add("--text", metavar="FILE", help="what the model reads (default: Python's collections.py)")
    add("--tokens", type=int, default=1024, help=f"of the text, at most {shown}")
    json_option.add_json(command)
    command.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    # optional: it needs transformers
    from gnn_attention import lm

    with Progress("compare", unit="graphs") as progress:
        progress.begin(f"loading {args.model}")
        model, tokenizer = lm.load(args.model)
        if tokenizer is None:
            raise ValueError(f"--model {args.model} has no tokenizer for a text: take smollm2")
        ids = tokenizer(text_of(args.text), return_tensors="pt").input_ids[:, : args.tokens]
        if (tokens := ids.shape[1]) < 8:
            raise ValueError(f"--text must have at least 8 tokens, and --tokens too, got {tokens}")
        found = []
        graphs = contenders(args.graphs, tokens, model.config.num_attention_heads)
        progress.expect(len(graphs))
        for row in along(model, ids, graphs):
            found.append(row)
            progress.advance(1, row["graph"])
    about = {"model": args.model, "text": args.text or "collections.py", "tokens": tokens, "rows": found}
    lines = [f"{row['loss']:8.4f} {row['share']:8.2%} {row['speed']:10.1f}  {row['graph']}" for row in found]
    title = f"{args.model}, {tokens} tokens, untrained\n    loss    edges   tokens/s  graph"
    json_option.write_json(args.json, about, "\n".join([title, *lines]))
    return 0


def text_of(file: str | None) -> str:
    """The text of a file; of Python's collections.py without one."""
    if file is None:
        return inspect.getsource(inspect.getmodule(OrderedDict))  # type: ignore[arg-type]
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {file} is no text in UTF-8: {error.reason} at byte {error.start}") from None
