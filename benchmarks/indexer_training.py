"""Train a small language model whose layers choose their own graphs, from scratch (12 CPU minutes):
``python -m benchmarks.indexer_training --out RECORD``.

The model has two layers, each with an ``Indexer``, and reads the sources of the standard library. It first trains
with dense attention on short texts. Then it trains with dense attention on 2,048 tokens, while the indexers learn
from the KL divergence over all causal pairs. Three continuations follow, on the same data and from the same
parameters: dense attention (the control); attention along the 128 senders that the indexers select, while they keep
learning; and a window of as many senders, which shows what distant tokens are worth. Losses are measured on held-out
texts, and also on the second half of each text alone.

For the long texts the base of the rotary embedding is raised (Xiong et al. 2023, arXiv 2309.16039), and queries are
scaled with the logarithm of the number of tokens (Chiang and Cholak 2022, arXiv 2202.12172). Otherwise attention
trained on 512 tokens spreads out over 2,048, and a window beats full attention.

Keys are computed from a gated mix of the state of a token and the state before it, with a gate for each channel (the
"smeared key" of Olsson et al. 2022, arXiv 2209.11895). With them a layer can look up what followed the same token
earlier; without them a model of two layers learns this too late for a benchmark of minutes.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import gnn_attention as ga
from benchmarks.records import environment, write
from examples.training.text_corpus import corpus
from gnn_attention import StandardHeads, patterns
from gnn_attention.model import load_trained
from gnn_attention.rotary import Rotary
from gnn_attention.selectors import Indexer, recall

TOKENS, SENDERS, WIDTH, LAYERS, VOCABULARY = 2048, 128, 128, 2, 1024
SHORT, BRIEF = 1240, 512  # number of steps on short texts, and their tokens; a step has four of them
DENSE, CONTINUED, ROWS, HELD_OUT = 240, 120, 512, 12  # steps, steps, receivers of a KL step, texts
# Learning rates and the steps of their schedules; the short phase stops before its schedule ends.
RATES = {"short": (4e-3, 1560), "long": (1.5e-3, DENSE + CONTINUED), "indexers": (6e-3, DENSE + CONTINUED)}
BASES = {"short": 10_000.0, "long": 44_000.0}
CAUSAL = patterns.causal(TOKENS)
WINDOW = patterns.window(TOKENS, SENDERS - 4) | patterns.sinks(TOKENS, 4)
# Queries are scaled by position; the scale is 1 up to the length of the short texts.
GROWTH = (torch.arange(1, TOKENS + 1.0) / BRIEF).clamp(min=1).log() / math.log(BRIEF) + 1


class Block(nn.Module):
    def __init__(self, base: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.heads = StandardHeads(WIDTH, 4, rotary=Rotary(base))
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.indexer = Indexer(WIDTH, SENDERS, num_heads=4, head_dim=32)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, state: torch.Tensor, graph: Any) -> tuple[torch.Tensor, Any]:
        """Return the next state and the inputs of the indexer's loss; ``graph="chosen"`` uses its selection."""
        x = self.norms[0](state)
        previous = functional.pad(x, (0, 0, 1, 0))[:, :-1]
        senders = x + self.gate.sigmoid() * (previous - x)
        graph = self.indexer.select(x, senders) if graph == "chosen" else graph
        key, value = self.heads.send(senders)[0], self.heads.send(x)[1]
        query = self.heads.receive(x) * GROWTH[: x.shape[1], None]
        out, info = ga.attend(query, key, value, graph, return_info=True)
        state = state + self.heads.collect(out)
        return state + self.mlp(self.norms[1](state)), (x, senders, info)


class Model(nn.Module):
    def __init__(self, vocabulary: int, length: str = "long") -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(BASES[length]) for _ in range(LAYERS))
        self.norm, self.unembedding = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.unembedding.weight, std=0.5 * WIDTH**-0.5)

    @property
    def indexers(self) -> list[Any]:
        return [block.indexer for block in self.blocks]

    def forward(self, ids: torch.Tensor, graph: Any) -> tuple[torch.Tensor, list[Any]]:
        """Return the loss of each token ``[texts, tokens]`` and, for each layer, the inputs of its indexer's loss."""
        state = self.embedding(ids[:, :-1])
        records = []
        for block in self.blocks:
            state, record = block(state, graph)
            records.append(record)
        logits = self.unembedding(self.norm(state))
        return functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none"), records


class Trainer:
    """Separate optimizers and schedules for the model and its indexers.

    Gradients are also clipped separately, so that the indexers do not change how the model learns.
    """

    def __init__(self, model: Model, length: str) -> None:
        of_indexers = list(nn.ModuleList(model.indexers).parameters())
        ids = {id(parameter) for parameter in of_indexers}
        of_model = [parameter for parameter in model.parameters() if id(parameter) not in ids]
        self.groups: list[tuple[list[nn.Parameter], Any, Any]] = []
        for parameters, (rate, steps) in ((of_model, RATES[length]), (of_indexers, RATES["indexers"])):
            optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
            self.groups.append((parameters, optimizer, schedule))

    def step(self, loss: torch.Tensor) -> None:
        for _, optimizer, _ in self.groups:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameters, optimizer, schedule in self.groups:
            if parameters[0].grad is not None:
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()


def step(model: Model, trainer: Trainer, ids: torch.Tensor, graph: Any, number: int) -> tuple[float, float]:
    losses, records = model(ids, graph)
    loss, kl = losses.mean(), torch.zeros(())
    if graph is CAUSAL or graph == "chosen":
        # The divergence over all pairs is expensive, so each step takes it at some receivers only.
        rows = None if graph == "chosen" else (start := ROWS * (number % (TOKENS // ROWS)), start + ROWS)
        pairs = zip(model.indexers, records, strict=True)
        kl = torch.stack([indexer.loss(*states, info, rows=rows) for indexer, (*states, info) in pairs]).sum()
    trainer.step(loss + kl)
    return loss.item(), kl.item() / LAYERS


@torch.no_grad()
def held_out_loss(model: Model, texts: torch.Tensor, graph: Any) -> list[float]:
    """Return the mean loss of all tokens and that of the second halves of the texts."""
    losses = torch.cat([model(ids[None], graph)[0] for ids in texts])
    return [round(x.mean().item(), 4) for x in (losses, losses[:, TOKENS // 2 :])]


@torch.no_grad()
def recalls(model: Model, texts: torch.Tensor) -> list[float]:
    """Return, for each layer, the share of the dense attention weights that lies on the selected edges."""
    by_text = []
    for ids in texts[:2]:
        layers = zip(model.indexers, model(ids[None], CAUSAL)[1], strict=True)
        by_text.append([recall(info, indexer.select(*states)).mean() for indexer, (*states, info) in layers])
    return [round(float(sum(values)) / len(values), 4) for values in zip(*by_text, strict=True)]


def train(model: Model, trainer: Trainer, texts: torch.Tensor, graph: Any, first: int) -> list[Any]:
    """Train on the texts and return the curve: every 20 steps, the mean loss and divergence."""
    curve: list[Any] = []
    steps: list[tuple[float, float]] = []
    for number, ids in enumerate(texts, first):
        steps.append(step(model, trainer, ids, graph, number))
        if len(steps) == 20:
            curve.append([number + 1, *(round(sum(x) / 20, 4) for x in zip(*steps, strict=True))])
            print(time.strftime("%H:%M:%S"), round(time.process_time()), graph, curve[-1], flush=True)
            steps = []
    return curve


def split(text: str, vocabulary: Any, count: int | None) -> torch.Tensor:
    ids = torch.tensor(vocabulary.encode(text))
    size = TOKENS + 1
    return ids[: len(ids) // size * size].view(-1, size)[:count]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all phases, measure their losses, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    vocabulary, parts, began = load_trained()[1], corpus(), time.process_time()
    held_out = split("".join(parts.held_out.values())[: 8 * TOKENS * HELD_OUT], vocabulary, HELD_OUT)
    texts = split("".join(parts.training.values()), vocabulary, None)
    texts = texts[torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))]
    last = SHORT + DENSE
    torch.manual_seed(0)
    brief, model = Model(VOCABULARY, "short"), Model(VOCABULARY)
    result: dict[str, Any] = {
        "bench": "indexer-training",
        "command": "python -m benchmarks.indexer_training",
        "tokens": TOKENS,
        "senders": SENDERS,
        "steps": {f"{BRIEF} tokens": SHORT, "dense": DENSE, "continued": CONTINUED},
        "texts held out": HELD_OUT,
        "losses": "of all held-out tokens, of those of the second halves",
        "curve": "step, loss, KL of the indexers (mean of 20 steps)",
        "environment": environment("cpu"),
    }
    short = texts[:SHORT].unfold(1, BRIEF + 1, BRIEF)
    result["short"] = train(brief, Trainer(brief, "short"), short, patterns.causal(BRIEF), 0)
    model.load_state_dict(brief.state_dict())
    dense = model, Trainer(model, "long")
    result["dense"] = train(*dense, texts[SHORT:last].unsqueeze(1), CAUSAL, SHORT)
    models: dict[str, Model] = {}
    for name, graph in {"control": CAUSAL, "chosen": "chosen", "window": WINDOW}.items():
        # Model and optimizer are copied together, so that the copied optimizer updates the copied model.
        models[name], trainer = copy.deepcopy(dense)
        result[name] = train(models[name], trainer, texts[last : last + CONTINUED].unsqueeze(1), graph, last)
    result["cpu minutes of training"] = round((time.process_time() - began) / 60, 1)
    ways = {"control": ("control", CAUSAL), "chosen": ("chosen", "chosen"), WINDOW.name: ("window", WINDOW)}
    ways["control along its indexers' choice"] = "control", "chosen"
    ways[f"control along {WINDOW.name}"] = "control", WINDOW
    for way, (name, graph) in ways.items():
        result[f"loss of {way}"] = held_out_loss(models[name], held_out, graph)
    result["recall"] = recalls(models["chosen"], held_out)
    result["recall after the warm-up"] = recalls(model, held_out)
    write(args.out, result)
    print({name: value for name, value in result.items() if "loss" in name or "recall" in name}, flush=True)


if __name__ == "__main__":
    main()
