"""Train indexers on the attention of SmolLM2: ``python -m benchmarks.indexer_smollm2 --out RECORD`` (13 CPU minutes).

The model itself is never changed. Its states, queries and keys on some texts are recorded once. Then, for each key
head of each layer, an ``Indexer`` learns from the three heads that share these keys, with the KL divergence as its
only loss: one selection for each group of heads, as in NSA (arXiv 2502.11089). The record reports, on held-out texts,
the share of attention on the selected edges (``selectors.recall``) by layer and k: for the indexers, for the best
graphs with as many senders for each group (``TopK(per="all")`` of its heads) and for all heads, and for a window with
four sinks. It also reports the loss of the model along the selected graphs.
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
TRAINING, HELD_OUT = 40, 4  # numbers of texts
SENDERS = (16, 32, 64, 128, 256)
WINDOW = "window(60) | sinks(4)"
GROUPS = 3  # groups of heads that share a key head; each group has an indexer
INDEXER: dict[str, Any] = {"num_heads": 4, "head_dim": 32}

States = dict[str, torch.Tensor]
Attention = tuple[torch.Tensor, AttentionInfo]


def texts(tokenizer: Any, part: dict[str, str], count: int) -> list[torch.Tensor]:
    """Return the first tokens of ``count`` long files that are spread evenly over the corpus."""
    long = [text for text in part.values() if len(text) > 8 * TOKENS]
    selection = [long[index * len(long) // count] for index in range(count)]
    return [tokenizer(text[: 16 * TOKENS], return_tensors="pt").input_ids[:, :TOKENS] for text in selection]


@torch.no_grad()
def loss_with(model: Any, ids: torch.Tensor, run: Callable[[int, torch.Tensor, AttentionCall], Any]) -> float:
    """Return the loss of the model with ``run(layer, states, call)`` as its attention."""
    states: dict[int, torch.Tensor] = {}

    def save_states(module: Any, args: Any, kwargs: Any) -> None:
        states[module.layer_idx] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def backend(module: Any) -> Backend:
        return Backend("own", lambda call: run(module.layer_idx, states[module.layer_idx], call))

    hooks = [x.self_attn.register_forward_pre_hook(save_states, with_kwargs=True) for x in model.model.layers]
    try:
        with attending(backend):
            logits = model(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()


def record(model: Any, ids: torch.Tensor) -> tuple[dict[int, States], float]:
    """Record the states, queries and keys of each layer in half precision, and the loss."""
    layers: dict[int, States] = {}

    def run(layer: int, states: torch.Tensor, call: AttentionCall) -> Any:
        layers[layer] = {"x": states.half(), "q": call.q.half(), "k": call.k.half()}
        return run_attention(call, "auto")

    loss = loss_with(model, ids, run)
    return layers, loss


def attention(states: States, group: int = 0, groups: int = 1) -> Attention:
    """Return the states of a layer and the attention of a group of its heads, from rounded queries and keys."""
    q, k = (states[name].float().chunk(groups, 1)[group] for name in "qk")
    call = AttentionCall.from_arguments(q, k, k, patterns.causal(q.shape[2]), with_lse=True)
    return states["x"].float(), AttentionInfo(call, run_attention(call, "auto")[1])


def train(training: list[Attention], seed: int) -> Indexer:
    """Train an indexer; each step has the divergence over ``ROWS`` receivers of one text and all causal pairs."""
    torch.manual_seed(seed)
    indexer = Indexer(training[0][0].shape[-1], 64, **INDEXER)
    optimizer = torch.optim.AdamW(indexer.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    for step in range(STEPS):
        # After a pass over all texts, the next pass uses other receivers of each text.
        start = ROWS * ((step + step // len(training)) % (TOKENS // ROWS))
        x, info = training[step % len(training)]
        loss = indexer.loss(x, x, info, rows=(start, start + ROWS))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return indexer


def mean_recall(info: AttentionInfo, graph: Any) -> float:
    """Return the mean recall over receivers and heads."""
    return recall(info, graph).mean().item()


def best_recall(info: AttentionInfo) -> list[float]:
    """Return, for each k, the share of attention on the best k senders that all heads of ``info`` share."""
    return [mean_recall(info, TopK(k, "all").select(info.call.q, info.call.k)) for k in SENDERS]


@torch.no_grad()
def measure(indexer: Indexer, held_out: list[Attention]) -> dict[str, list[float]]:
    """Return the mean recall over texts of the indexer and the best selection for each k, and of the window."""
    lists: dict[str, list[Any]] = {"indexer": [], "best": [], WINDOW: []}
    window = patterns.window(TOKENS, 60) | patterns.sinks(TOKENS, 4)
    for x, info in held_out:
        recalls = []
        for indexer.k in SENDERS:
            recalls.append(mean_recall(info, indexer.select(x, x)))
        lists["indexer"].append(recalls)
        lists["best"].append(best_recall(info))
        lists[WINDOW].append([mean_recall(info, window)])
    return {name: means(recalls) for name, recalls in lists.items()}


def means(lists: Iterable[Sequence[float]]) -> list[float]:
    """Return the elementwise mean of lists of numbers."""
    return [round(sum(x) / len(x), 4) for x in zip(*lists, strict=True)]


def study_layer(
    layer: int, training: list[dict[int, States]], held_out: list[dict[int, States]]
) -> tuple[dict[str, Any], list[Indexer]]:
    """Train the indexers of a layer; return recalls, as means over its groups of heads, and the indexers."""
    results, indexers = [], []
    for group in range(GROUPS):
        indexer = train([attention(text[layer], group, GROUPS) for text in training], layer)
        results.append(measure(indexer, [attention(text[layer], group, GROUPS) for text in held_out]))
        indexers.append(indexer)
    recalls: dict[str, Any] = {name: means(result[name] for result in results) for name in results[0]}
    recalls["best for all heads"] = means(best_recall(attention(text[layer])[1]) for text in held_out)
    print(layer, recalls, flush=True)
    return recalls, indexers


def loss_along(model: Any, ids: torch.Tensor, indexers: list[list[Indexer]], k: int) -> float:
    """Return the loss of the model when each group of heads attends to the senders of its indexer."""

    def run(layer: int, states: torch.Tensor, call: AttentionCall) -> Any:
        outputs = []
        for indexer, *qkv in zip(
            indexers[layer], *(x.chunk(GROUPS, 1) for x in (call.q, call.k, call.v)), strict=True
        ):
            indexer.k = k
            group = replace(call, **dict(zip("qkv", qkv, strict=True)), graph=indexer.select(states, states))
            outputs.append(run_attention(group, "auto")[0])
        return torch.cat(outputs, 1), None

    return round(loss_with(model, ids, run), 4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record the model, train and measure the indexers of all layers, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    model, tokenizer = lm.load("smollm2")
    model.requires_grad_(False)
    parts = corpus()
    ids = texts(tokenizer, dict(parts.training), TRAINING), texts(tokenizer, dict(parts.held_out), HELD_OUT)
    training, held_out = ([record(model, text) for text in part] for part in ids)
    states = [layers for layers, _ in training], [layers for layers, _ in held_out]
    studies = [study_layer(layer, *states) for layer in range(model.config.num_hidden_layers)]
    layers = [recalls for recalls, _ in studies]
    indexers = [indexers_of_layer for _, indexers_of_layer in studies]
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
        "mean over layers": {name: means(recalls[name] for recalls in layers) for name in names},
        "loss": {f"k = {k}": [loss_along(model, text, indexers, k) for text in ids[1]] for k in (64, 128)},
    }
    write(args.out, result)
    print(result["loss"], flush=True)


if __name__ == "__main__":
    main()
