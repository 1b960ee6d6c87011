"""Train a language model on long windows, with ``attend`` and with SDPA and a mask: ``python -m benchmarks training``.

The shipped model's architecture is trained twice on the same windows from the same initial parameters, each time in a
fresh process: once with ``backend="auto"``, and once with ``scaled_dot_product_attention`` and a float mask, which
holds the learned biases of distances and -inf for missing edges. The record that ``--json`` writes has the keys

- ``bench``: "training"; ``schema`` 1; date, commit, processor, threads, versions, ...
- ``recipe``: the settings of the training, see :class:`examples.training.Recipe`
- ``runs``: one for each method: ``method``, ``seconds`` of all steps, ``peak_memory_mb`` of the whole
  process, the ``losses`` of the steps, and ``held_out_loss`` afterwards
- ``faster``: the seconds of SDPA divided by ours; ``smaller``: the same for peak memory
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
from benchmarks.records import Record, describe_machine
from examples.training import Recipe, train
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import AttentionCall

__all__ = ["METHODS", "add_options", "measure", "run", "text"]

WINDOW = 256
REPORTED = ("seconds", "peak_memory_mb", "losses", "held_out_loss")


def _attend_with_mask(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Run SDPA with a float mask ``[1, H, dst, src]`` that has the biases of all edges, and -inf elsewhere."""
    if call.with_lse:
        # SDPA returns no lse, which only a few calls after training need.
        return BACKENDS["dense"].run(call)
    q, graph = call.q, call.graph
    dst, src = torch.arange(graph.num_dst)[:, None], torch.arange(graph.num_src)
    logits = q.new_zeros(()).expand(1, q.shape[1], graph.num_dst, graph.num_src)
    mask = call.apply_score_mod(logits, dst, src).masked_fill(~graph.mask(), -torch.inf)
    return functional.scaled_dot_product_attention(q, call.k, call.v, mask, scale=call.scale), None


METHODS: dict[str, str | Backend] = {"auto": "auto", "SDPA mask": Backend("SDPA mask", _attend_with_mask)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a window (default: 8192)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each method (default: 12)")
    parser.add_argument("--no-peers", action="store_true", help="train only with backend='auto'")


def run(args: argparse.Namespace) -> Record:
    """Train with both methods, one after the other, and return one record; an invalid size raises ValueError."""
    recipe = _recipe(args.tokens, args.steps)
    runs = []
    for method in ["auto"] if args.no_peers else METHODS:
        print(f"{args.steps} steps on {args.tokens} tokens, {method}", file=sys.stderr, flush=True)
        sizes = {"method": method, "tokens": args.tokens, "steps": args.steps}
        runs.append(process.run_in_process(__name__, "measure", sizes))
    record = {"bench": "training", "schema": 1, **describe_machine(), "recipe": asdict(recipe), "runs": runs}
    if not args.no_peers:
        ours, theirs = runs
        record["faster"] = theirs["seconds"] / ours["seconds"]
        record["smaller"] = theirs["peak_memory_mb"] / ours["peak_memory_mb"]
        record["apart"] = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    return record


def measure(method: str, tokens: int, steps: int) -> Record:
    """Train with one method in this process."""
    _, _, report = train(_recipe(tokens, steps), backend=METHODS[method], progress=False)
    return {"method": method, **{name: report[name] for name in REPORTED}}


def _recipe(tokens: int, steps: int) -> Recipe:
    graph = f"window({tokens}, {min(WINDOW, tokens)})"
    return Recipe(steps=steps, batch=1, length=tokens, warmup=0, precision="float32", graph=graph)


def text(record: Record) -> str:
    """Format the record, with a line for each run."""
    recipe = record["recipe"]
    lines = [f"{recipe['graph']}, {recipe['steps']} steps, {record['threads']} threads"]
    for run in record["runs"]:
        cost = f"{run['seconds'] / recipe['steps']:8.2f} s a step, peak memory {run['peak_memory_mb']:7,} MB"
        loss = f"loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}, held out {run['held_out_loss']:.4f}"
        lines.append(f"{run['method']:10} {cost}, {loss}")
    for name in ("faster", "smaller", "apart"):
        lines += [f"{name}: {record[name]:.4g}"] if name in record else []
    return "\n".join(lines)
