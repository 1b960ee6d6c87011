"""Indexers that learn what SmolLM2 looks at: ``python -m benchmarks.indexer_smollm2 --out RECORD --folder CACHE``.

The model is never changed. Its states, queries and keys of some texts are recorded once; then for each key head
of each layer an ``Indexer`` learns by the KL divergence alone from the three heads that share its keys: one
selection for each group of heads, as in NSA (arXiv 2502.11089); ``--groups 1`` is one for all heads of a layer.
Over all causal pairs, 256 receivers a step, from weights that are made once for all steps (equal to
``Indexer.loss``, which is checked for each indexer). Reported on texts that it has not seen: the share of
attention on the chosen edges (``selectors.recall``) by layer and k, of the indexers, of the best graphs of as
many senders for each group (``TopK(per="group")``) and for all heads, and of a window with four sinks; and the
loss of the model along the chosen graphs. Resumable by layer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from examples.training.text_corpus import corpus
from gnn_attention import lm, patterns
from gnn_attention._support import atomic_files
from gnn_attention.attend import AttentionInfo, attended
from gnn_attention.backends import AttentionCall, Backend
from gnn_attention.huggingface.interface import attending
from gnn_attention.selectors import Indexer, TopK, recall
from gnn_attention.verify.report import environment

TOKENS, ROWS, STEPS, RATE = 1024, 256, 500, 1e-2
TRAINING, HELD_OUT = 40, 4  # texts
SENDERS = (16, 32, 64, 128, 256)
WINDOW = "window(60) | sinks(4)"
HEADS, HEAD_DIM = 12, 32  # of the indexers of a layer together

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


def info_of(
    one: dict[str, torch.Tensor], group: int = 0, groups: int = 1
) -> tuple[torch.Tensor, AttentionInfo]:
    """The states of a layer, and the attention of the heads of a group."""
    q, k = (one[name].float().chunk(groups, 1)[group] for name in "qk")
    call = AttentionCall.checked(q, k, k, CAUSAL, with_lse=True)
    # of the rounded queries and keys, as all that is compared with it
    return one["x"].float(), AttentionInfo(call, attended(call, "auto")[1])


def shares(info: AttentionInfo) -> torch.Tensor:
    """The sum over heads of the weights of all pairs, normalised, ``[1, T, T]`` in half precision."""
    parts = [info.weight_matrix(rows=(start, start + ROWS)).sum(1) for start in range(0, TOKENS, ROWS)]
    p = torch.cat(parts, 1)
    return (p / p.sum(-1, keepdim=True)).half()


def scores(indexer: Indexer, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """``I`` of the receivers ``start .. stop - 1`` and all tokens up to ``stop``, -inf at later ones."""
    positions = torch.arange(stop)
    queries, weights = indexer.receive(x[:, start:stop], positions[start:])
    keys = indexer.send(x[:, :stop], positions)
    found = torch.einsum("bhts,bht->bts", (queries @ keys.mT.unsqueeze(1)).relu(), weights)
    return found.masked_fill(positions > positions[start:, None], -torch.inf)


def divergence(indexer: Indexer, x: torch.Tensor, p: torch.Tensor, start: int) -> torch.Tensor:
    """``Indexer.loss`` of some receivers of a causal graph, from weights that are made once for all steps."""
    found = scores(indexer, x, start, start + ROWS)
    likely = found.log_softmax(-1).masked_fill(found == -torch.inf, 0.0)
    p = p[:, start : start + ROWS, : start + ROWS].float()
    return (torch.xlogy(p, p) - p * likely).sum() / ROWS


def indexer_of(width: int, groups: int, k: int = 64) -> Indexer:
    return Indexer(width, k, num_heads=HEADS // groups, head_dim=HEAD_DIM)


def trained(layer: int, group: int, groups: int, training: list[Recorded]) -> tuple[Indexer, list[float]]:
    torch.manual_seed(layer)
    indexer = indexer_of(training[0][layer]["x"].shape[-1], groups)
    data = [info_of(one[layer], group, groups) for one in training]
    made = [(x, shares(info)) for x, info in data]
    x, info = data[0]
    expected = indexer.loss(x, x, info, rows=(ROWS, 2 * ROWS))
    torch.testing.assert_close(divergence(indexer, *made[0], ROWS), expected, rtol=1e-3, atol=1e-3)
    optimizer = torch.optim.AdamW(indexer.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    curve = []
    for step in range(STEPS):
        # every text, then every text at other receivers
        start = ROWS * ((step + step // len(made)) % (TOKENS // ROWS))
        loss = divergence(indexer, *made[step % len(made)], start)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        curve.append(loss.item())
    return indexer, curve


@torch.no_grad()
def held(p: torch.Tensor, by: torch.Tensor) -> list[float]:
    """For each k the mean over receivers and heads of the weight on the k senders that are first ``by``."""
    mass = p.float().gather(2, by.sort(descending=True).indices).cumsum(2).mean((0, 1))
    return [mass[k - 1].item() for k in SENDERS]


def measured(indexer: Indexer, of: list[tuple[torch.Tensor, AttentionInfo]]) -> dict[str, list[float]]:
    """Mean recall over receivers, heads and texts: what ``selectors.recall`` says, of all k at once."""
    window = patterns.window(TOKENS, 60) | patterns.sinks(TOKENS, 4)
    found: dict[str, list[Any]] = {"indexer": [], "best": [], WINDOW: []}
    for number, (x, info) in enumerate(of):
        p = shares(info)
        found["indexer"].append(held(p, scores(indexer, x, 0, TOKENS)))
        found["best"].append(held(p, p.float()))
        found[WINDOW].append([recall(info, window).mean().item()])
        best = TopK(64, "all").select(info.call.q, info.call.k)
        for name, graph in (("indexer", indexer.select(x, x)), ("best", best)) if number == 0 else ():
            expected = recall(info, graph).mean().item()
            assert abs(found[name][0][SENDERS.index(64)] - expected) < 2e-3, (name, expected, found)
    return {name: means(of) for name, of in found.items()}


def means(of: Iterable[Sequence[float]]) -> list[float]:
    """Of lists of numbers the mean list."""
    return [round(sum(x) / len(x), 4) for x in zip(*of, strict=True)]


def along(model: Any, ids: torch.Tensor, indexers: list[list[Indexer]], k: int) -> float:
    """The loss where each group of heads attends to its choice."""

    def run(layer: int, states: torch.Tensor, call: AttentionCall) -> Any:
        own, found = indexers[layer], []
        for indexer, *qkv in zip(own, *(x.chunk(len(own), 1) for x in (call.q, call.k, call.v)), strict=True):
            indexer.k = k
            part = replace(call, **dict(zip("qkv", qkv, strict=True)), graph=indexer.select(states, states))
            found.append(attended(part, "auto")[0])
        return torch.cat(found, 1), None

    return running(model, ids, run)


def one_layer(
    layer: int, groups: int, folder: Path, training: list[Any], held_out: list[Any]
) -> dict[str, Any]:
    """What was measured of a layer, mean over its groups of heads; made once for the folder."""
    file = folder / f"{groups}-{layer}.json"
    if not file.exists():
        began, parts, curves, states = time.process_time(), [], [], []
        for group in range(groups):
            indexer, curve = trained(layer, group, groups, [one for one, _ in training])
            parts.append(measured(indexer, [info_of(one[layer], group, groups) for one, _ in held_out]))
            curves.append([sum(curve[i : i + 50]) / 50 for i in range(0, STEPS, 50)])
            states.append(indexer.state_dict())
        torch.save(states, folder / f"{groups}-{layer}.pt")
        found: dict[str, Any] = {name: means(part[name] for part in parts) for name in parts[0]}
        wholes = [shares(info_of(one[layer])[1]) for one, _ in held_out]
        found["best for all heads"] = means(held(p, p.float()) for p in wholes)
        found |= {"kl": means(curves), "cpu seconds": round(time.process_time() - began, 1)}
        atomic_files.write(file, json.dumps(found))
        print(layer, found, flush=True)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def loss_along(folder: Path, model: Any, ids: torch.Tensor, number: int, groups: int, k: int) -> float:
    """The loss of a held-out text along what its indexers choose, made once for the folder."""
    file = folder / f"loss-{groups}-{k}-{number}.json"
    if not file.exists():
        indexers = []
        for layer in range(model.config.num_hidden_layers):
            states = torch.load(folder / f"{groups}-{layer}.pt", weights_only=True)
            indexers.append([indexer_of(model.config.hidden_size, groups) for _ in states])
            for indexer, state in zip(indexers[-1], states, strict=True):
                indexer.load_state_dict(state)
        atomic_files.write(file, json.dumps(round(along(model, ids, indexers, k), 4)))
    return float(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--groups", type=int, default=3, help="selections of a layer; SmolLM2 has 3 key heads"
    )
    parser.add_argument("--layers", type=int, nargs=2, help="FIRST STOP: train these alone, without a record")
    args = parser.parse_args()
    model, tokenizer = lm.load("smollm2")
    model.requires_grad_(False)
    parts = corpus()
    ids = texts(tokenizer, dict(parts.training), TRAINING), texts(tokenizer, dict(parts.held_out), HELD_OUT)
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "recorded.pt"
    if not file.exists():
        torch.save([[record(model, one) for one in part] for part in ids], file)
    training, held_out = torch.load(file, weights_only=True, mmap=True)
    result = {
        "bench": "indexer-smollm2",
        "command": "python -m benchmarks.indexer_smollm2",
        "tokens": TOKENS,
        "recall": "mean over receivers, heads and texts of the share of the weights on the k chosen senders",
        "texts": {"training": TRAINING, "held out": HELD_OUT, "of": "the standard library's sources"},
        "selections of a layer": args.groups,
        "indexer": {"num_heads": HEADS // args.groups, "head_dim": HEAD_DIM},
        "training": {"steps": STEPS, "receivers a step": ROWS, "rate": RATE},
        "loss causal": [round(loss, 4) for _, loss in held_out],
        "environment": environment("cpu"),
    }
    layers = range(*args.layers) if args.layers else range(model.config.num_hidden_layers)
    kept = [one_layer(layer, args.groups, args.folder, training, held_out) for layer in layers]
    if args.layers:
        return
    result["recall for k of"] = SENDERS
    result["layers"] = kept
    names = ("indexer", "best", "best for all heads", WINDOW)
    result["mean over layers"] = {name: means(one[name] for one in kept) for name in names}
    result["loss"] = {
        f"k = {k}": [
            loss_along(args.folder, model, part, number, args.groups, k) for number, part in enumerate(ids[1])
        ]
        for k in (64, 128)
    }
    atomic_files.write(args.out, json.dumps(result, indent=1) + "\n")
    print(result["loss"], flush=True)


if __name__ == "__main__":
    main()
