"""The graph that a language model needs: loss against the share of head x edge pairs which are left.

``python -m benchmarks.lm_graphs [--record FILE] [--picture FILE] [--text FILE]``

SmolLM2 (135 M parameters, float32) reads the first 1,024 tokens of a text; the loss is the mean over the
targets after position 256, along graphs of several choices run by ``use_graph``. Attribution sees the losses
of these same targets, so its graphs are those that this text needs, not those of any text. The record is
written after every point, and points that it holds are not measured again. It takes about 15 minutes of one
core. ``asked`` is the share that was asked for, or the number of the step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import lm, patterns, use_graph
from gnn_attention._support import atomic_files
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.huggingface import attending
from gnn_attention.interpret.trace import Attribution, PrunedGraphs, attribute
from gnn_attention.verify.report import environment

TOKENS, FIRST, PROJECTIONS = 1024, 256, 3
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
STEPS = (0.2, 0.12, 0.08, 0.065, 0.055, 0.05)  # shares of the refinement
REFINED = "attribution, again at each step"
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
        if record.exists():
            self.record["continued"] = environment("cpu")

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

    def losses(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the targets that count."""
        return functional.cross_entropy(logits[0, FIRST:-1], self.ids[0, FIRST + 1 :], reduction="none")

    @torch.no_grad()
    def loss(self, graph: Any) -> float:
        # graphs of heads run along their edges, the quickest that needs no plan of tiles
        backend = "rows" if isinstance(graph, PrunedGraphs) else "dense"
        with use_graph(self.model, graph), attending(backend):
            return float(self.losses(self.model(self.ids, use_cache=False).logits).mean())

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

    def missing(self, choice: str, shares: Sequence[float]) -> list[float]:
        return [share for share in shares if not self.has(choice, share)]

    def rank(self, choice: str, found: Callable[[], Attribution], shares: Sequence[float] = SHARES) -> None:
        """Points of the edges that lead in ``found()``, which is computed if a point is missing."""
        missing = self.missing(choice, shares)
        effects = found() if missing else None
        for share in missing:
            pruned = effects.keep(share)  # type: ignore[union-attr]
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


def refined(study: Study) -> None:
    """The slopes along the graph that is left, again at each step: edges may come back.

    Squares are means of the steps so far, the last with weight 1/2, so that random signs matter less.
    """
    if not study.missing(REFINED, range(len(STEPS))):
        return
    pruned: Any = study.causal
    squares: dict[int, torch.Tensor] = {}
    for step, share in enumerate(STEPS):
        with use_graph(study.model, pruned):
            found = attribute(
                study.model, study.ids, study.losses, study.causal, projections=PROJECTIONS, seed=step
            )
        for layer in found.layers:
            new = found.scores(layer, "slope").square()
            squares[layer] = (squares[layer] + new) / 2 if layer in squares else new
        pruned = Attribution(found.graphs, {"slope": squares}).keep(share)
        study.measure(REFINED, step, pruned.share, pruned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("lm-graphs.json"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--text", type=Path, default=Path(REFERENCE["file"]))
    args = parser.parse_args()
    study = Study(args.record, args.text)
    study.measure("causal", 1.0, 1.0, study.causal)
    windows(study)
    study.rank("by weight", lambda: weights(study))
    study.rank("random", lambda: random(study), (0.05, 0.2))
    refined(study)
    study.rank(
        "attribution, once", lambda: attribute(study.model, study.ids, study.losses, projections=PROJECTIONS)
    )
    if args.picture:
        draw(study.record, args.picture)


def lines_of(points: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By choice the shares in per cent and the losses, from few pairs to many."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        choice = "window | sinks(4)" if point["choice"].startswith("window") else point["choice"]
        lines.setdefault(choice, []).append((100 * point["share"], point["loss"]))
    return {choice: sorted(found) for choice, found in lines.items()}


def draw(record: dict[str, Any], file: Path) -> None:
    """Loss against the share, on a logarithmic axis; a line for each choice. White behind, for dark pages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained", facecolor="white")
    axes, lines = figure.subplots(), lines_of(record["points"])
    ((_, causal),) = lines.pop("causal")
    for (choice, points), marker in zip(lines.items(), "osx^v", strict=False):
        axes.plot(
            *zip(*points, strict=True),
            marker=marker,
            markersize=4,
            label=choice if min(points, key=lambda p: p[1])[1] < causal + 1 else f"{choice} (above)",
        )
    axes.axhline(causal, color="black", linewidth=0.8, label=f"causal, all pairs: {causal:.3f}")
    axes.axhline(1.01 * causal, color="black", linewidth=0.8, linestyle=":", label="1 % above")
    axes.set(xscale="log", ylim=(causal - 0.05, causal + 1), xticks=(1, 2, 5, 10, 20, 50))
    axes.set_xticklabels(["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set(xlabel="% of the pairs of head and edge that are left", ylabel=f"loss after position {FIRST}")
    axes.set_title("SmolLM2 on 1,024 tokens: which edges does this text need?", fontsize=11)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
