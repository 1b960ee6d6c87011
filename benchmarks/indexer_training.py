"""A language model whose layers choose their graphs, from nothing: ``python -m benchmarks.indexer_training --out RECORD --folder CACHE``.

Two layers with an ``Indexer`` each, the sources of the standard library. First short texts and dense attention
alone; then 2,048 tokens and dense attention, from which the indexers learn by the KL divergence over all causal
pairs; then two continuations on the same data from the same weights: dense attention (the control), and
attention along the 128 senders that the indexers choose, from which they learn on. Losses are of held-out text,
also of the second half of each text alone, and along a window of as many senders: what reading far is worth. Resumable by phase.

A key is of its token's state mixed with the one before, by a gate for each channel (the "smeared key" of Olsson
et al. 2022, arXiv 2209.11895): so that a layer can look for what followed the same token earlier, which a
model of two layers learns too late for a benchmark of minutes otherwise.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import gnn_attention as ga
from examples.training.text_corpus import corpus
from gnn_attention import StandardHeads, patterns
from gnn_attention._support import atomic_files
from gnn_attention.model import load_trained
from gnn_attention.rotary import Rotary
from gnn_attention.selectors import Indexer, recall
from gnn_attention.verify.circumstances import environment

TOKENS, SENDERS, WIDTH, LAYERS, RATE, VOCABULARY = 2048, 128, 128, 2, 4e-3, 1024
SHORT, BRIEF = 1240, 512  # steps on texts of so many tokens, four at a time
DENSE, CONTINUED, ROWS, HELD_OUT = 200, 120, 512, 12  # steps, steps, receivers of a KL step, texts
STEPS = SHORT + DENSE + CONTINUED
CAUSAL = patterns.causal(TOKENS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.heads = StandardHeads(WIDTH, 4, rotary=Rotary())
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
        out, info = ga.attend(self.heads.receive(x), key, value, graph, return_info=True)
        state = state + self.heads.collect(out)
        return state + self.mlp(self.norms[1](state)), (x, senders, info)


class Model(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
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


def step(model: Model, optimizer: Any, ids: torch.Tensor, graph: Any, number: int) -> tuple[float, float]:
    losses, found = model(ids, graph)
    loss, kl = losses.mean(), torch.zeros(())
    if ids.shape[1] > TOKENS:
        # of all pairs, some receivers at each step
        rows = None if graph == "chosen" else (start := ROWS * (number % (TOKENS // ROWS)), start + ROWS)
        pairs = zip(model.indexers, found, strict=True)
        kl = torch.stack([indexer.loss(*states, info, rows=rows) for indexer, (*states, info) in pairs]).sum()
    optimizer.zero_grad()
    (loss + kl).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
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


def train(
    model: Model, optimizer: Any, schedule: Any, texts: torch.Tensor, graph: Any, first: int
) -> list[Any]:
    """The curve: for every 20 steps the mean loss and divergence."""
    curve: list[Any] = []
    part: list[tuple[float, float]] = []
    for number, ids in enumerate(texts, first):
        part.append(step(model, optimizer, ids, graph, number))
        schedule.step()
        if len(part) == 20:
            curve.append([number + 1, *(round(sum(x) / 20, 4) for x in zip(*part, strict=True))])
            print(time.strftime("%H:%M:%S"), round(time.process_time()), graph, curve[-1], flush=True)
            part = []
    return curve


def split(text: str, vocabulary: Any, count: int | None) -> torch.Tensor:
    ids = torch.tensor(vocabulary.encode(text))
    size = TOKENS + 1
    return ids[: len(ids) // size * size].view(-1, size)[:count]


def optimizer_of(model: Model) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)


def phase(name: str, after: str | None, folder: Path, texts: torch.Tensor, first: int, graph: Any) -> Any:
    """The model and the curve of a phase that begins where another ended; made once for the folder."""
    torch.manual_seed(0)
    model, file = Model(VOCABULARY), folder / f"{name}.pt"
    optimizer, schedule = optimizer_of(model)
    if not file.exists():
        for what, state in zip((model, optimizer, schedule), _saved(folder, after)[0], strict=False):
            what.load_state_dict(state)
        began = time.process_time()
        curve = train(model, optimizer, schedule, texts, graph, first)
        states = [what.state_dict() for what in (model, optimizer, schedule)]
        torch.save((states, curve, time.process_time() - began), file)
    (state, *_), curve, seconds = _saved(folder, name)
    model.load_state_dict(state)
    return model, curve, seconds


def _saved(folder: Path, name: str | None) -> Any:
    return ((), [], 0.0) if name is None else torch.load(folder / f"{name}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of what each phase made, to go on from")
    parser.add_argument("--last", help="the phase to end with")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    vocabulary, parts = load_trained()[1], corpus()
    held_out = split("".join(parts.held_out.values())[: 8 * TOKENS * HELD_OUT], vocabulary, HELD_OUT)
    texts = split("".join(parts.training.values()), vocabulary, None)
    texts = texts[torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))][:STEPS]
    long, last = texts[SHORT:].unsqueeze(1), SHORT + DENSE
    phases: dict[str, tuple[Any, ...]] = {
        "short": (None, texts[:SHORT].unfold(1, BRIEF + 1, BRIEF), 0, patterns.causal(BRIEF)),
        "dense": ("short", long[:DENSE], SHORT, CAUSAL),
        "control": ("dense", long[DENSE:], last, CAUSAL),
        "chosen": ("dense", long[DENSE:], last, "chosen"),
    }
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
    models, seconds = {}, 0.0
    for name, (after, *of_phase) in phases.items():
        models[name], result[name], taken = phase(name, after, args.folder, *of_phase)
        seconds += taken
        if name == args.last:
            return
    result |= measured(models["control"], models["chosen"], held_out)
    result["recall after the warm-up"] = recalls(models["dense"], held_out)
    result["cpu minutes of training"] = round(seconds / 60, 1)
    atomic_files.write(args.out, json.dumps(result, indent=1) + "\n")
    print({name: value for name, value in result.items() if "loss" in name or "recall" in name}, flush=True)


def measured(control: Model, chosen: Model, held_out: torch.Tensor) -> dict[str, Any]:
    """What each of the two loses on held-out text, and the control along other graphs too."""
    window = patterns.window(TOKENS, SENDERS - 4) | patterns.sinks(TOKENS, 4)
    return {
        "loss of control": held_out_loss(control, held_out, CAUSAL),
        "loss of chosen": held_out_loss(chosen, held_out, "chosen"),
        "loss of control along its indexers' choice": held_out_loss(control, held_out, "chosen"),
        f"loss of control along window({SENDERS - 4}) | sinks(4)": held_out_loss(control, held_out, window),
        "recall": recalls(chosen, held_out),
    }


if __name__ == "__main__":
    main()
