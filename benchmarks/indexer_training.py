"""A language model whose layers choose their graphs, from nothing: ``python -m benchmarks.indexer_training --out RECORD`` (12 CPU minutes).

Two layers with an ``Indexer`` each, the sources of the standard library. First short texts and dense attention
alone; then 2,048 tokens and dense attention, from which the indexers learn by the KL divergence over all causal
pairs; then three continuations on the same data from the same weights: dense attention (the control), attention
along the 128 senders that the indexers choose, from which they learn on, and along a window of as many senders:
what reading far is worth. Losses are of held-out text, also of the second half of each text alone.

For the long texts the base of the rotary embedding is raised (Xiong et al. 2023, arXiv 2309.16039), and logits
grow with the logarithm of the number of tokens (Chiang and Cholak 2022, arXiv 2202.12172): else attention that
learned from 512 tokens is spread over 2,048, and a window is better than all that it leaves out.

A key is of its token's state mixed with the one before, by a gate for each channel (the "smeared key" of Olsson
et al. 2022, arXiv 2209.11895): so that a layer can look for what followed the same token earlier, which a
model of two layers learns too late for a benchmark of minutes otherwise.
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
SHORT, BRIEF = 1240, 512  # steps on texts of so many tokens, four at a time
DENSE, CONTINUED, ROWS, HELD_OUT = 240, 120, 512, 12  # steps, steps, receivers of a KL step, texts
# rates, with the steps that each is planned for: the first ends early, at an eighth
RATES = {"short": (4e-3, 1560), "long": (1.5e-3, DENSE + CONTINUED), "indexers": (6e-3, DENSE + CONTINUED)}
BASES = {"short": 10_000.0, "long": 44_000.0}
CAUSAL = patterns.causal(TOKENS)
WINDOW = patterns.window(TOKENS, SENDERS - 4) | patterns.sinks(TOKENS, 4)
# 1 for as many tokens as the short texts have
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
        """The next state, and what the indexer learns from. ``graph`` "chosen": the indexer's."""
        x = self.norms[0](state)
        before = functional.pad(x, (0, 0, 1, 0))[:, :-1]
        senders = x + self.gate.sigmoid() * (before - x)
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
        """The loss of each token ``[texts, tokens]``, and for each layer what its indexer learns from."""
        state, found = self.embedding(ids[:, :-1]), []
        for block in self.blocks:
            state, one = block(state, graph)
            found.append(one)
        logits = self.unembedding(self.norm(state))
        return functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none"), found


class Learning:
    """An optimizer and a schedule of the model, and of the indexers: how these learn changes nothing of how
    the model does, not through the norm of the gradient either.
    """

    def __init__(self, model: Model, length: str) -> None:
        chosen = list(nn.ModuleList(model.indexers).parameters())
        own = {id(one) for one in chosen}
        rest = [one for one in model.parameters() if id(one) not in own]
        self.parts: list[tuple[list[nn.Parameter], Any, Any]] = []
        for parameters, (rate, steps) in ((rest, RATES[length]), (chosen, RATES["indexers"])):
            optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
            self.parts.append((parameters, optimizer, schedule))

    def step(self, loss: torch.Tensor) -> None:
        for _, optimizer, _ in self.parts:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameters, optimizer, schedule in self.parts:
            if parameters[0].grad is not None:
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()


def step(model: Model, learning: Learning, ids: torch.Tensor, graph: Any, number: int) -> tuple[float, float]:
    losses, found = model(ids, graph)
    loss, kl = losses.mean(), torch.zeros(())
    if graph is CAUSAL or graph == "chosen":
        # of all pairs, some receivers at each step
        rows = None if graph == "chosen" else (start := ROWS * (number % (TOKENS // ROWS)), start + ROWS)
        pairs = zip(model.indexers, found, strict=True)
        kl = torch.stack([indexer.loss(*states, info, rows=rows) for indexer, (*states, info) in pairs]).sum()
    learning.step(loss + kl)
    return loss.item(), kl.item() / LAYERS


@torch.no_grad()
def held_out_loss(model: Model, texts: torch.Tensor, graph: Any) -> list[float]:
    """Of all tokens, and of those of the second halves."""
    losses = torch.cat([model(ids[None], graph)[0] for ids in texts])
    return [round(x.mean().item(), 4) for x in (losses, losses[:, TOKENS // 2 :])]


@torch.no_grad()
def recalls(model: Model, texts: torch.Tensor) -> list[float]:
    """For each layer the share of the weights over all pairs that lies on chosen edges."""
    found = []
    for ids in texts[:2]:
        layers = zip(model.indexers, model(ids[None], CAUSAL)[1], strict=True)
        found.append([recall(info, indexer.select(*states)).mean() for indexer, (*states, info) in layers])
    return [round(float(sum(one)) / len(one), 4) for one in zip(*found, strict=True)]


def train(model: Model, learning: Learning, texts: torch.Tensor, graph: Any, first: int) -> list[Any]:
    """The curve: for every 20 steps the mean loss and divergence."""
    curve: list[Any] = []
    part: list[tuple[float, float]] = []
    for number, ids in enumerate(texts, first):
        part.append(step(model, learning, ids, graph, number))
        if len(part) == 20:
            curve.append([number + 1, *(round(sum(x) / 20, 4) for x in zip(*part, strict=True))])
            print(time.strftime("%H:%M:%S"), round(time.process_time()), graph, curve[-1], flush=True)
            part = []
    return curve


def split(text: str, vocabulary: Any, count: int | None) -> torch.Tensor:
    ids = torch.tensor(vocabulary.encode(text))
    size = TOKENS + 1
    return ids[: len(ids) // size * size].view(-1, size)[:count]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all phases, measure what they lose, and write the record."""
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
    result["short"] = train(brief, Learning(brief, "short"), short, patterns.causal(BRIEF), 0)
    model.load_state_dict(brief.state_dict())
    dense = model, Learning(model, "long")
    result["dense"] = train(*dense, texts[SHORT:last].unsqueeze(1), CAUSAL, SHORT)
    models: dict[str, Model] = {}
    for name, graph in {"control": CAUSAL, "chosen": "chosen", "window": WINDOW}.items():
        # model and optimizer are copied together, so that the copy of one trains the copy of the other
        models[name], learning = copy.deepcopy(dense)
        result[name] = train(models[name], learning, texts[last : last + CONTINUED].unsqueeze(1), graph, last)
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
