"""Indexers that learn what SmolLM2 looks at: ``python -m benchmarks.indexer_smollm2 --out RECORD --folder CACHE``.

The model is never changed. Its states, queries and keys of some texts are recorded once; then for each layer
an ``Indexer`` learns by the KL divergence alone, over all causal pairs, 256 receivers a step. Reported on
texts that it has not seen: the share of attention on the chosen edges (``selectors.recall``) by layer and k,
of the indexer, of the best graph of as many senders for all heads (``TopK(per="all")``), and of a window with
four sinks; and the loss of the model along the chosen graphs. Resumable by layer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import lm, patterns
from gnn_attention._support import atomic_files
from gnn_attention.attend import AttentionInfo, attended
from gnn_attention.backends import AttentionCall, Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface.interface import attending
from gnn_attention.selectors import Indexer, TopK, recall
from gnn_attention.training.text_corpus import corpus
from gnn_attention.verify.circumstances import environment

TOKENS, ROWS, STEPS, RATE = 1024, 256, 160, 3e-3
TRAINING, HELD_OUT = 10, 2  # texts
SENDERS = (16, 32, 64, 128, 256)
SIZES: dict[str, Any] = {"num_heads": 8, "head_dim": 32}

Recorded = dict[int, dict[str, torch.Tensor]]
CAUSAL = patterns.causal(TOKENS)


def texts(tokenizer: Any, part: dict[str, str], count: int) -> list[torch.Tensor]:
    """The beginnings of ``count`` long files, spread over the corpus."""
    long = [text for text in part.values() if len(text) > 8 * TOKENS]
    found = [long[place * len(long) // count] for place in range(count)]
    return [tokenizer(text[: 16 * TOKENS], return_tensors="pt").input_ids[:, :TOKENS] for text in found]


def running(model: Any, ids: torch.Tensor, run: Callable[[int, torch.Tensor, AttentionCall], Any]) -> float:
    """The loss of the model where ``run(layer, states, call)`` is its attention."""
    states: dict[int, torch.Tensor] = {}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        states[module.layer_idx] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def backend(module: Any) -> Backend:
        return Backend("own", lambda call: run(module.layer_idx, states[module.layer_idx], call))

    hooks = [x.self_attn.register_forward_pre_hook(before, with_kwargs=True) for x in model.model.layers]
    try:
        with torch.no_grad(), attending(backend):
            logits = model(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()


def record(model: Any, ids: torch.Tensor) -> tuple[Recorded, float]:
    found: Recorded = {}

    def run(layer: int, states: torch.Tensor, call: AttentionCall) -> Any:
        out, lse = attended(replace(call, with_lse=True), "auto")
        found[layer] = {"x": states.half(), "q": call.q.half(), "k": call.k.half()}
        return out, lse

    loss = running(model, ids, run)
    return found, loss


def info_of(one: dict[str, torch.Tensor]) -> tuple[torch.Tensor, AttentionInfo]:
    q, k = one["q"].float(), one["k"].float()
    call = AttentionCall.checked(q, k, k, CAUSAL, with_lse=True)
    # of the rounded queries and keys, as all that is compared with it
    return one["x"].float(), AttentionInfo(call, attended(call, "auto")[1])


def trained(layer: int, training: list[Recorded]) -> tuple[Indexer, list[float]]:
    torch.manual_seed(layer)
    indexer = Indexer(training[0][layer]["x"].shape[-1], k=64, **SIZES)
    data = [info_of(one[layer]) for one in training]
    optimizer = torch.optim.AdamW(indexer.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    curve = []
    for step in range(STEPS):
        (x, info), start = data[step % len(data)], ROWS * (step // len(data) % (TOKENS // ROWS))
        loss = indexer.loss(x, x, info, rows=(start, start + ROWS))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        curve.append(loss.item())
    return indexer, curve


def measured(indexer: Indexer, layer: int, held_out: list[Recorded]) -> dict[str, Any]:
    """Mean recall over receivers, heads and texts."""
    chosen: dict[str, dict[int, float]] = {"indexer": {}, "best": {}}
    data = [info_of(one[layer]) for one in held_out]

    def mean(graph_of: Callable[[torch.Tensor, AttentionInfo], TokenGraph]) -> float:
        found = [recall(info, graph_of(x, info)).mean().item() for x, info in data]
        return round(sum(found) / len(found), 4)

    for k in SENDERS:
        indexer.k = k
        chosen["indexer"][k] = mean(lambda x, info: indexer.select(x, x))
        chosen["best"][k] = mean(lambda x, info, k=k: TopK(k, "all").select(info.call.q, info.call.k))  # type: ignore[misc]
    window = patterns.window(TOKENS, 60) | patterns.sinks(TOKENS, 4)
    return {**chosen, "window(60) | sinks(4)": mean(lambda x, info: window)}


def along(model: Any, ids: torch.Tensor, indexers: list[Indexer], k: int, dense: int) -> float:
    """The loss where each layer with an indexer, but the first ``dense``, attends to what it chooses."""

    def run(layer: int, states: torch.Tensor, call: AttentionCall) -> Any:
        if layer < dense or layer >= len(indexers):
            return attended(call, "auto")
        indexers[layer].k = k
        return attended(replace(call, graph=indexers[layer].select(states, states)), "auto")

    return running(model, ids, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=30, help="the first so many")
    args = parser.parse_args()
    began = time.process_time()
    model, tokenizer = lm.load("smollm2")
    model.requires_grad_(False)
    parts = corpus()
    ids = texts(tokenizer, dict(parts.training), TRAINING), texts(tokenizer, dict(parts.held_out), HELD_OUT)
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "recorded.pt"
    if not file.exists():
        torch.save([[record(model, one) for one in part] for part in ids], file)
    training, held_out = torch.load(file, weights_only=True)
    result = {
        "bench": "indexer-smollm2",
        "command": "python -m benchmarks.indexer_smollm2",
        "tokens": TOKENS,
        "texts": {"training": TRAINING, "held out": HELD_OUT, "of": "the standard library's sources"},
        "indexer": {**SIZES, "steps": STEPS, "receivers a step": ROWS},
        "loss causal": [round(loss, 4) for _, loss in held_out],
        "layers": json.loads(args.out.read_text())["layers"] if args.out.exists() else [],
        "environment": environment("cpu"),
    }
    for layer in range(len(result["layers"]), args.layers):
        indexer, curve = trained(layer, [one for one, _ in training])
        torch.save(indexer.state_dict(), args.folder / f"{layer}.pt")
        found = measured(indexer, layer, [one for one, _ in held_out])
        result["layers"].append(
            {**found, "kl": [round(sum(curve[i : i + 20]) / 20, 4) for i in range(0, STEPS, 20)]}
        )
        atomic_files.write(args.out, json.dumps(result, indent=1) + "\n")
        print(layer, round(time.process_time() - began), result["layers"][-1], flush=True)
    indexers = [Indexer(model.config.hidden_size, k=64, **SIZES) for _ in result["layers"]]
    for layer, indexer in enumerate(indexers):
        indexer.load_state_dict(torch.load(args.folder / f"{layer}.pt", weights_only=True))
    result["loss"] = {
        f"k = {k}, the first {dense} layers dense": [
            round(along(model, one, indexers, k, dense), 4) for one in ids[1]
        ]
        for k, dense in ((64, 0), (64, 1), (128, 0))
    }
    result["cpu minutes"] = round((time.process_time() - began) / 60, 1)
    atomic_files.write(args.out, json.dumps(result, indent=1) + "\n")
    print(result["loss"], flush=True)


if __name__ == "__main__":
    main()
