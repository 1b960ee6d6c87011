"""Measure which edges a language model needs: its loss against the share of remaining pairs of head and edge.

``python -m benchmarks.lm_graphs [--record FILE] [--picture FILE] [--text FILE]``

SmolLM2 (135 M parameters, float32) reads the first 1,024 tokens of a text. The loss is the mean over the targets
after position 256, along graphs that are pruned in several ways and run by ``use_graph``. Attribution uses the losses
of the same targets, so its graphs fit this text and not every text. The benchmark takes about 15 minutes of one core.
In the record, ``asked`` is the requested share, or the number of the refinement step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.records import environment, write
from gnn_attention import lm, patterns, use_graph
from gnn_attention.attend import AttentionInfo, run_attention
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.huggingface import attending
from gnn_attention.interpret.trace import Attribution, PrunedGraphs, attribute

TOKENS, FIRST, PROJECTIONS = 1024, 256, 3
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
STEPS = (0.2, 0.12, 0.08, 0.065, 0.055, 0.05)  # share of pairs after each step of the refinement
REFINED = "attribution, again at each step"
WINDOWS = (1, 2, 5, 9, 25, 50, 100, 300)
TEXT = Path("/usr/share/common-licenses/GPL-3")  # in Debian's package base-files


class Study:
    """A model, the token ids of a text, and the measured points: choice, share and loss."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.model, self.ids, self.points = model.requires_grad_(False), ids, list[dict[str, Any]]()
        self.causal = patterns.causal(ids.shape[1])

    def losses(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the losses of the targets after position ``FIRST``."""
        return functional.cross_entropy(logits[0, FIRST:-1], self.ids[0, FIRST + 1 :], reduction="none")

    @torch.no_grad()
    def loss(self, graph: Any) -> float:
        # For graphs that vary by head, `rows` is the fastest backend that needs no plan of tiles.
        backend = "rows" if isinstance(graph, PrunedGraphs) else "dense"
        with use_graph(self.model, graph), attending(backend):
            return float(self.losses(self.model(self.ids, use_cache=False).logits).mean())

    def measure(self, choice: str, asked: float, graph: Any) -> None:
        """Measure the loss along a graph and add a point."""
        share = graph.share if isinstance(graph, PrunedGraphs) else graph.num_edges / self.causal.num_edges
        numbers = {"share": round(share, 6), "loss": round(self.loss(graph), 4)}
        self.points.append({"choice": choice, "asked": asked, **numbers})
        print(*self.points[-1].values(), flush=True)

    def rank(self, choice: str, effects: Attribution, shares: Sequence[float] = SHARES) -> None:
        """Add a point for each share of the edges with the largest effects."""
        for share in shares:
            self.measure(choice, share, effects.keep(share))


def score_by_weight(study: Study) -> Attribution:
    """Return an attribution whose scores are the attention weights."""
    by_layer: dict[int, torch.Tensor] = {}

    def backend(module: Any) -> Backend:
        def run(call: AttentionCall) -> Any:
            call = replace(call, with_lse=True)
            out, lse = run_attention(call, "auto")
            by_layer[module.layer_idx] = AttentionInfo(call, lse).weights()[0]
            return out, lse

        return Backend("weights", run)

    with torch.no_grad(), use_graph(study.model, study.causal), attending(backend):
        study.model(study.ids, use_cache=False)
    return Attribution(dict.fromkeys(by_layer, study.causal), {"slope": by_layer})


def score_randomly(study: Study) -> Attribution:
    """Return an attribution whose scores are random."""
    rng, config = torch.Generator().manual_seed(0), study.model.config
    sizes = config.num_attention_heads, study.causal.num_edges
    by_layer = {layer: torch.rand(sizes, generator=rng) for layer in range(config.num_hidden_layers)}
    return Attribution(dict.fromkeys(by_layer, study.causal), {"slope": by_layer})


def refine(study: Study) -> None:
    """Add a point for each step of repeated pruning, whose attribution runs along the last pruned graph.

    Scores cover all causal edges, so edges may return. Squared slopes are averaged over steps, the newest with
    weight 1/2, which reduces the noise of random signs.
    """
    graph: Any = study.causal
    squares: dict[int, torch.Tensor] = {}
    for step, share in enumerate(STEPS):
        with use_graph(study.model, graph):
            effects = attribute(
                study.model, study.ids, study.losses, study.causal, projections=PROJECTIONS, seed=step
            )
        for layer in effects.layers:
            square = effects.scores(layer, "slope").square()
            squares[layer] = (squares[layer] + square) / 2 if layer in squares else square
        graph = Attribution(effects.graphs, {"slope": squares}).keep(share)
        study.measure(REFINED, step, graph)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all points and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("lm-graphs.json"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--text", type=Path, default=TEXT)
    args = parser.parse_args(arguments)
    model, tokenizer = lm.load("smollm2")
    study = Study(model, tokenizer(args.text.read_text(), return_tensors="pt").input_ids[:, :TOKENS])
    study.measure("causal", 1.0, study.causal)
    for width in WINDOWS:
        graph = patterns.window(TOKENS, width) | patterns.sinks(TOKENS, 4)
        study.measure(f"window({width}) | sinks(4)", 0.0, graph)
    study.rank("by weight", score_by_weight(study))
    study.rank("random", score_randomly(study), (0.05, 0.2))
    refine(study)
    study.rank("attribution, once", attribute(model, study.ids, study.losses, projections=PROJECTIONS))
    record = {"bench": "lm-graphs", "command": "python -m benchmarks.lm_graphs", "tokens": TOKENS}
    record |= {"loss_after": FIRST, "model": "smollm2", "text": str(args.text), "points": study.points}
    write(args.record, {**record, "environment": environment("cpu")})
    if args.picture:
        draw(study.points, args.picture)


def draw(points: Sequence[dict[str, Any]], file: Path) -> None:
    """Plot the loss against the share on a logarithmic axis, with a line for each choice."""
    from matplotlib.figure import Figure

    # A white background keeps the axes legible on dark pages.
    figure = Figure(figsize=(7, 4), layout="constrained", facecolor="white")
    axes, lines = figure.subplots(), dict[str, list[tuple[float, float]]]()
    for point in points:
        choice = "window | sinks(4)" if point["choice"].startswith("window") else point["choice"]
        lines.setdefault(choice, []).append((100 * point["share"], point["loss"]))
    ((_, causal),) = lines.pop("causal")
    for (choice, line), marker in zip(lines.items(), "osx^v", strict=False):
        label = choice if min(loss for _, loss in line) < causal + 1 else f"{choice} (above)"
        axes.plot(*zip(*sorted(line), strict=True), marker=marker, markersize=4, label=label)
    axes.axhline(causal, color="black", linewidth=0.8, label=f"causal, all pairs: {causal:.3f}")
    axes.axhline(1.01 * causal, color="black", linewidth=0.8, linestyle=":", label="1 % above")
    axes.set(xscale="log", ylim=(causal - 0.05, causal + 1), ylabel=f"loss after position {FIRST}")
    axes.set_xticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
    axes.minorticks_off()
    axes.set(xlabel="% of the pairs of head and edge that are left")
    axes.set_title("SmolLM2 on 1,024 tokens: which edges does this text need?", fontsize=11)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
