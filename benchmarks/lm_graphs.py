"""The graph that a language model needs: loss against the share of head x edge pairs which are left.

``python -m benchmarks.lm_graphs [--record FILE] [--picture FILE] [--text FILE]``

SmolLM2 (135 M parameters, float32) reads the first 1,024 tokens of a text; the loss is the mean over the
targets after position 256, along graphs of several choices run by ``use_graph``. Attribution reads the same
text, so its graphs are those that this text needs. The record is written after every point, and points that
it holds are not measured again. It takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import lm, patterns, use_graph
from gnn_attention._support import atomic_files
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.huggingface import attending
from gnn_attention.interpret.trace import Attribution, attribute
from gnn_attention.verify.circumstances import environment

TOKENS, FIRST, PROJECTIONS = 1024, 256, 3
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
STEPS = (0.2, 0.1, 0.07, 0.05, 0.035, 0.02, 0.01)  # shares of the refinement
REFERENCE = {"text": "GPL-3 of Debian's base-files", "file": "/usr/share/common-licenses/GPL-3"}


class Study:
    """A model, a text, and a record of losses by choice and share."""

    def __init__(self, record: Path, text: Path) -> None:
        self.file = record
        self.model, tokenizer = lm.load("smollm2")
        self.model.requires_grad_(False)
        self.ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[:, :TOKENS]
        self.causal = patterns.causal(TOKENS)
        self.pairs = self.causal.num_edges
        self.record = json.loads(record.read_text()) if record.exists() else self._empty(text)

    def _empty(self, text: Path) -> dict[str, Any]:
        about = {"tokens": TOKENS, "loss_after": FIRST, "model": "smollm2", "text": str(text)}
        command = "python -m benchmarks.lm_graphs"
        return {
            "bench": "lm-graphs",
            "command": command,
            **about,
            "points": [],
            "environment": environment("cpu"),
        }

    def token_losses(self, logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits[0, :-1], self.ids[0, 1:], reduction="none")

    @torch.no_grad()
    def loss(self, graph: Any) -> float:
        # masks of all heads are few here, and dense kernels need no plan for each
        with use_graph(self.model, graph), attending("dense"):
            return float(self.token_losses(self.model(self.ids, use_cache=False).logits)[FIRST:].mean())

    def has(self, choice: str, share: float) -> bool:
        return any((p["choice"], p["asked"]) == (choice, share) for p in self.record["points"])

    def measure(self, choice: str, asked: float, share: float, graph: Any) -> None:
        if self.has(choice, asked):
            return
        point = {
            "choice": choice,
            "asked": asked,
            "share": round(share, 6),
            "loss": round(self.loss(graph), 4),
        }
        self.record["points"].append(point)
        atomic_files.write(self.file, json.dumps(self.record, indent=1) + "\n")
        print(time.strftime("%H:%M:%S"), *point.values(), flush=True)

    def missing(self, choice: str, shares: tuple[float, ...]) -> list[float]:
        return [share for share in shares if not self.has(choice, share)]

    def rank(
        self, choice: str, found: Callable[[], Attribution], per: str = "model", without: str = "slope"
    ) -> None:
        """Points of the edges that lead in ``found()``, which is computed if a point is missing."""
        missing = self.missing(choice, SHARES)
        effects = found() if missing else None
        for share in missing:
            pruned = effects.keep(share, per=per, without=without)  # type: ignore[union-attr]
            self.measure(choice, share, pruned.share, pruned)


def weights(study: Study) -> Attribution:
    """The weight of each edge in the place of its effect."""
    found: dict[int, torch.Tensor] = {}
    src, dst = study.causal.edge_index

    def backend(module: Any) -> Backend:
        def run(call: AttentionCall) -> tuple[torch.Tensor, None]:
            k, v = (x.repeat_interleave(call.q.shape[1] // x.shape[1], 1) for x in (call.k, call.v))
            logits = (call.q @ k.mT * call.scale).masked_fill(~call.graph.mask(), -torch.inf)
            table = logits.softmax(-1)
            found[module.layer_idx] = table[0][:, dst, src]
            return table @ v, None

        return Backend("weights", run)

    with torch.no_grad(), attending(backend):
        study.model(study.ids, use_cache=False)
    return Attribution(dict.fromkeys(found, study.causal), {"slope": found})


def random(study: Study) -> Attribution:
    """Numbers in the place of effects."""
    signs = torch.Generator().manual_seed(0)
    layers, heads = study.model.config.num_hidden_layers, study.model.config.num_attention_heads
    found = {layer: torch.rand(heads, study.pairs, generator=signs) for layer in range(layers)}
    return Attribution(dict.fromkeys(found, study.causal), {"slope": found})


def windows(study: Study) -> None:
    """Windows with 4 sinks."""
    edges = {
        w: (patterns.window(TOKENS, w) | patterns.sinks(TOKENS, 4)) for w in (1, 2, 5, 9, 25, 50, 100, 300)
    }
    for width, graph in edges.items():
        share = graph.num_edges / study.pairs
        study.measure(f"window({width}) | sinks(4)", 0.0, share, graph)


def refined(study: Study, without: str) -> None:
    """Effects are computed again on the graph that is left, edges may come back, and fewer are left each time."""
    choice = f"attribution again at each step ({without})"
    if not study.missing(choice, STEPS):
        return
    pruned: Any = study.causal
    for number, share in enumerate(STEPS):
        with use_graph(study.model, pruned):
            found = attribute(
                study.model,
                study.ids,
                study.token_losses,
                study.causal,
                projections=PROJECTIONS,
                seed=number,
            )
        pruned = found.keep(share, without=without)
        study.measure(choice, share, pruned.share, pruned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("lm-graphs.json"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--text", type=Path, default=Path(REFERENCE["file"]))
    args = parser.parse_args()
    study = Study(args.record, args.text)
    study.measure("causal", 1.0, 1.0, study.causal)
    windows(study)
    once: list[Attribution] = []

    def attributed() -> Attribution:
        if not once:
            once.append(attribute(study.model, study.ids, study.token_losses, projections=PROJECTIONS))
        return once[0]

    for without in ("slope", "mute", "cut"):
        study.rank(f"attribution ({without})", attributed, without=without)
    study.rank("attribution, a budget for each head (slope)", attributed, per="head")
    once.clear()
    study.rank("by weight", lambda: weights(study))
    study.rank("random", lambda: random(study))
    refined(study, "slope")
    refined(study, "mute")
    if args.picture:
        draw(study.record, args.picture)


def draw(record: dict[str, Any], file: Path) -> None:
    """Loss against the share, on a logarithmic axis; a line for each choice."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in record["points"]:
        choice = "window | sinks(4)" if point["choice"].startswith("window") else point["choice"]
        lines.setdefault(choice, []).append((100 * point["share"], point["loss"]))
    causal = lines.pop("causal")[0][1]
    for choice, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=choice)
    axes.axhline(causal, color="black", linewidth=0.8, label="causal")
    axes.axhline(1.01 * causal, color="black", linewidth=0.8, linestyle=":", label="1 % above")
    axes.set(xscale="log", ylim=(causal - 0.1, causal + 1.6), xlabel="% of head x edge pairs left")
    axes.set(
        ylabel=f"loss after position {FIRST}", title="SmolLM2, 1,024 tokens: the edges that a text needs"
    )
    axes.legend(fontsize=7)
    figure.savefig(file)


if __name__ == "__main__":
    main()
