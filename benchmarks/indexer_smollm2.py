"""Indexers that learn what SmolLM2 looks at: ``python -m benchmarks.indexer_smollm2 --out RECORD`` (13 CPU minutes).

The model is never changed. Its states, queries and keys of some texts are recorded once; then for each key head
of each layer an ``Indexer`` learns by the KL divergence alone from the three heads that share its keys: one
selection for each group of heads, as in NSA (arXiv 2502.11089). Reported on texts that it has not seen: the share
of attention on the chosen edges (``selectors.recall``) by layer and k, of the indexers, of the best graphs of as
many senders for each group (``TopK(per="all")`` of its heads) and for all heads, and of a window with four sinks; and
the loss of the model along the chosen graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.records import environment, write
from examples.training.text_corpus import corpus
from gnn_attention import lm, patterns
from gnn_attention.attend import AttentionInfo, run_attention
from gnn_attention.backends import AttentionCall, Backend
from gnn_attention.huggingface.interface import attending
from gnn_attention.selectors import Indexer, TopK, recall

TOKENS, ROWS, STEPS, RATE = 1024, 256, 500, 1e-2
TRAINING, HELD_OUT = 40, 4  # texts
SENDERS = (16, 32, 64, 128, 256)
WINDOW = "window(60) | sinks(4)"
GROUPS = 3  # of heads that share a key head, and one indexer for each
INDEXER: dict[str, Any] = {"num_heads": 4, "head_dim": 32}

States = dict[str, torch.Tensor]
Attention = tuple[torch.Tensor, AttentionInfo]


def texts(tokenizer: Any, part: dict[str, str], count: int) -> list[torch.Tensor]:
    """The beginnings of ``count`` long files, spread over the corpus."""
    long = [text for text in part.values() if len(text) > 8 * TOKENS]
    spread = [long[place * len(long) // count] for place in range(count)]
    return [tokenizer(text[: 16 * TOKENS], return_tensors="pt").input_ids[:, :TOKENS] for text in spread]


@torch.no_grad()
def loss_with(model: Any, ids: torch.Tensor, run: Callable[[int, torch.Tensor, AttentionCall], Any]) -> float:
    """The loss of the model where ``run(layer, states, call)`` is its attention."""
    states: dict[int, torch.Tensor] = {}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        states[module.layer_idx] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def backend(module: Any) -> Backend:
        return Backend("own", lambda call: run(module.layer_idx, states[module.layer_idx], call))

    hooks = [x.self_attn.register_forward_pre_hook(before, with_kwargs=True) for x in model.model.layers]
    try:
        with attending(backend):
            logits = model(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()


def record(model: Any, ids: torch.Tensor) -> tuple[dict[int, States], float]:
    """The states, queries and keys of each layer in half precision, and the loss."""
    layers: dict[int, States] = {}

    def run(layer: int, states: torch.Tensor, call: AttentionCall) -> Any:
        layers[layer] = {"x": states.half(), "q": call.q.half(), "k": call.k.half()}
        return run_attention(call, "auto")

    loss = loss_with(model, ids, run)
    return layers, loss


def attention(states: States, group: int = 0, groups: int = 1) -> Attention:
    """The states of a layer, and the attention of a group of its heads, from the rounded queries and keys."""
    q, k = (states[name].float().chunk(groups, 1)[group] for name in "qk")
    call = AttentionCall.from_arguments(q, k, k, patterns.causal(q.shape[2]), with_lse=True)
    return states["x"].float(), AttentionInfo(call, run_attention(call, "auto")[1])


def train(training: list[Attention], seed: int) -> Indexer:
    """An indexer that learned from the divergence over ``ROWS`` receivers and all causal pairs of one text a step."""
    torch.manual_seed(seed)
    indexer = Indexer(training[0][0].shape[-1], 64, **INDEXER)
    optimizer = torch.optim.AdamW(indexer.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    for step in range(STEPS):
        # every text, then every text at other receivers
        start = ROWS * ((step + step // len(training)) % (TOKENS // ROWS))
        x, info = training[step % len(training)]
        loss = indexer.loss(x, x, info, rows=(start, start + ROWS))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return indexer


def share(info: AttentionInfo, graph: Any) -> float:
    """The mean recall over receivers and heads."""
    return recall(info, graph).mean().item()


def best(info: AttentionInfo) -> list[float]:
    """For each k the share of attention on the best k senders for all heads of ``info`` together."""
    return [share(info, TopK(k, "all").select(info.call.q, info.call.k)) for k in SENDERS]


@torch.no_grad()
def measure(indexer: Indexer, held_out: list[Attention]) -> dict[str, list[float]]:
    """The mean recall over texts, of the indexer and of the best choice, for each k, and of the window."""
    lists: dict[str, list[Any]] = {"indexer": [], "best": [], WINDOW: []}
    window = patterns.window(TOKENS, 60) | patterns.sinks(TOKENS, 4)
    for x, info in held_out:
        own = []
        for indexer.k in SENDERS:
            own.append(share(info, indexer.select(x, x)))
        lists["indexer"].append(own)
        lists["best"].append(best(info))
        lists[WINDOW].append([share(info, window)])
    return {name: means(some) for name, some in lists.items()}


def means(lists: Iterable[Sequence[float]]) -> list[float]:
    """The mean of each place of some lists of numbers."""
    return [round(sum(x) / len(x), 4) for x in zip(*lists, strict=True)]


def study_layer(
    layer: int, training: list[dict[int, States]], held_out: list[dict[int, States]]
) -> tuple[dict[str, Any], list[Indexer]]:
    """What was measured of a layer, mean over its groups of heads, and their indexers."""
    parts, indexers = [], []
    for group in range(GROUPS):
        own, other = ([attention(one[layer], group, GROUPS) for one in part] for part in (training, held_out))
        indexer = train(own, layer)
        parts.append(measure(indexer, other))
        indexers.append(indexer)
    found: dict[str, Any] = {name: means(part[name] for part in parts) for name in parts[0]}
    found["best for all heads"] = means(best(attention(one[layer])[1]) for one in held_out)
    print(layer, found, flush=True)
    return found, indexers


def loss_along(model: Any, ids: torch.Tensor, indexers: list[list[Indexer]], k: int) -> float:
    """The loss where each group of heads attends to its choice."""

    def run(layer: int, states: torch.Tensor, call: AttentionCall) -> Any:
        parts = []
        for indexer, *qkv in zip(
            indexers[layer], *(x.chunk(GROUPS, 1) for x in (call.q, call.k, call.v)), strict=True
        ):
            indexer.k = k
            part = replace(call, **dict(zip("qkv", qkv, strict=True)), graph=indexer.select(states, states))
            parts.append(run_attention(part, "auto")[0])
        return torch.cat(parts, 1), None

    return round(loss_with(model, ids, run), 4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, train and measure all layers, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    model, tokenizer = lm.load("smollm2")
    model.requires_grad_(False)
    parts = corpus()
    ids = texts(tokenizer, dict(parts.training), TRAINING), texts(tokenizer, dict(parts.held_out), HELD_OUT)
    training, held_out = ([record(model, one) for one in part] for part in ids)
    states = [layers for layers, _ in training], [layers for layers, _ in held_out]
    studies = [study_layer(layer, *states) for layer in range(model.config.num_hidden_layers)]
    layers, indexers = [found for found, _ in studies], [own for _, own in studies]
    names = ("indexer", "best", "best for all heads", WINDOW)
    result = {
        "bench": "indexer-smollm2",
        "command": "python -m benchmarks.indexer_smollm2",
        "tokens": TOKENS,
        "recall": "mean over receivers, heads and texts of the share of the weights on the k chosen senders",
        "texts": {"training": TRAINING, "held out": HELD_OUT, "of": "the standard library's sources"},
        "selections of a layer": GROUPS,
        "indexer": INDEXER,
        "training": {"steps": STEPS, "receivers a step": ROWS, "rate": RATE},
        "loss causal": [round(loss, 4) for _, loss in held_out],
        "environment": environment("cpu"),
        "recall for k of": SENDERS,
        "layers": layers,
        "mean over layers": {name: means(one[name] for one in layers) for name in names},
        "loss": {f"k = {k}": [loss_along(model, part, indexers, k) for part in ids[1]] for k in (64, 128)},
    }
    write(args.out, result)
    print(result["loss"], flush=True)


if __name__ == "__main__":
    main()
