"""A language model trained on long windows, with attend and with SDPA and a mask:
``python -m benchmarks training``.

The shipped model's architecture learns the same windows from the same first weights twice, each time in a
process of its own: with ``backend="auto"``, and with what one writes without a graph,
``scaled_dot_product_attention`` given a float mask that holds the learned biases of distances and -inf. The
record, as ``--json`` writes it:

- ``bench``: "training"; ``schema`` 1; date, commit, processor, threads, versions, ...
- ``recipe``: what decides the result, see :class:`examples.training.Recipe`
- ``runs``: one for each method: ``method``, ``seconds`` of all steps, ``peak_memory_mb`` of the whole
  process, the ``losses`` of the steps and ``held_out_loss`` afterwards
- ``faster``: the seconds of SDPA over ours; ``smaller`` the same of the peak memory
- ``apart``: the largest difference between the two losses of a step, in nats
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import process
from benchmarks.records import Record, circumstances
from examples.training import Recipe, train
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import AttentionCall

__all__ = ["METHODS", "add_options", "measure", "run", "text"]

WINDOW = 256
REPORTED = ("seconds", "peak_memory_mb", "losses", "held_out_loss")


def _with_mask(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """SDPA with one float mask ``[1, H, dst, src]``: the biases of all pairs, -inf where there is no edge.

    It returns no lse; the few calls that need one, after training, are left to the dense backend.
    """
    if call.with_lse:
        return BACKENDS["dense"].run(call)
    q, graph = call.q, call.graph
    dst, src = torch.arange(graph.num_dst)[:, None], torch.arange(graph.num_src)
    logits = q.new_zeros(()).expand(1, q.shape[1], graph.num_dst, graph.num_src)
    mask = call.apply_score_mod(logits, dst, src).masked_fill(~graph.mask(), -torch.inf)
    return functional.scaled_dot_product_attention(q, call.k, call.v, mask, scale=call.scale), None


METHODS: dict[str, str | Backend] = {"auto": "auto", "SDPA mask": Backend("SDPA mask", _with_mask)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    parser.add_argument("--tokens", type=int, default=8192, help="of a window (default: 8192)")
    parser.add_argument("--steps", type=int, default=12, help="of each method (default: 12)")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")


def run(args: argparse.Namespace) -> Record:
    """Both methods, one after the other, as one record. ValueError for a size that makes no sense."""
    recipe = _recipe(args.tokens, args.steps)
    runs = []
    for method in ["auto"] if args.no_peers else METHODS:
        print(f"{args.steps} steps on {args.tokens} tokens, {method}", file=sys.stderr, flush=True)
        sizes = {"method": method, "tokens": args.tokens, "steps": args.steps}
        runs.append(process.in_a_process(__name__, "measure", sizes))
    record = {"bench": "training", "schema": 1, **circumstances(), "recipe": asdict(recipe), "runs": runs}
    if not args.no_peers:
        ours, theirs = runs
        record["faster"] = theirs["seconds"] / ours["seconds"]
        record["smaller"] = theirs["peak_memory_mb"] / ours["peak_memory_mb"]
        record["apart"] = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    return record


def measure(method: str, tokens: int, steps: int) -> Record:
    """One training, in this process."""
    _, _, report = train(_recipe(tokens, steps), backend=METHODS[method], progress=False)
    return {"method": method, **{name: report[name] for name in REPORTED}}


def _recipe(tokens: int, steps: int) -> Recipe:
    graph = f"window({tokens}, {min(WINDOW, tokens)})"
    return Recipe(steps=steps, batch=1, length=tokens, warmup=0, precision="float32", graph=graph)


def text(record: Record) -> str:
    """The record in some lines."""
    recipe = record["recipe"]
    lines = [f"{recipe['graph']}, {recipe['steps']} steps, {record['threads']} threads"]
    for run in record["runs"]:
        taken = f"{run['seconds'] / recipe['steps']:8.2f} s a step, peak memory {run['peak_memory_mb']:7,} MB"
        loss = f"loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}, held out {run['held_out_loss']:.4f}"
        lines.append(f"{run['method']:10} {taken}, {loss}")
    for name in ("faster", "smaller", "apart"):
        lines += [f"{name}: {record[name]:.4g}"] if name in record else []
    return "\n".join(lines)
