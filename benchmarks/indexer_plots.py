"""The picture of what indexers learned, from both records: ``python -m benchmarks.indexer_plots TRAINING SMOLLM2 FILE``.

On the left the loss of the small model that chooses its graphs, beside its continuations along all causal pairs
and along a window; on the right the share of SmolLM2's attention that lies on k chosen senders, a thin line for
each layer. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASES = {"short": "512 tokens", "dense": "all causal pairs", "control": "all causal pairs, on"}
PHASES |= {"chosen": "128 senders, chosen", "window": "128 senders, a window"}
COLOURS = {"short": "#999999", "dense": "black", "control": "black", "chosen": "#0072B2", "window": "#D55E00"}


def losses(axes: Axes, record: dict[str, Any]) -> None:
    """The curve of each phase, from where differences can be seen."""
    for phase, label in PHASES.items():
        points = [(step, loss) for step, loss, _ in record[phase] if step > 1000]
        style = ":" if phase == "control" else "-"
        axes.plot(*zip(*points, strict=True), style, color=COLOURS[phase], label=label, linewidth=1.3)
    axes.set(xlabel="step", ylabel="loss in training, mean of 20 steps")
    axes.set_title("A small model from nothing, 2,048 tokens", fontsize=11)
    axes.legend(fontsize=8)


def recalls(axes: Axes, record: dict[str, Any]) -> None:
    """The share on k senders, the mean over layers thick."""
    senders = record["recall for k of"]
    for layer in record["layers"]:
        axes.plot(senders, layer["indexer"], color="#0072B2", linewidth=0.5, alpha=0.5)
    means = record["mean over layers"]
    axes.plot(senders, means["indexer"], "o-", color="#0072B2", label="indexers, mean of 30 layers")
    axes.plot(senders, means["best"], "s--", color="black", markersize=4, label="best for each key head")
    axes.axhline(0.9, color="black", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="k", ylabel="share of the attention")
    axes.set_xticks(senders, [str(k) for k in senders])
    axes.minorticks_off()
    axes.set_title("SmolLM2, 1,024 tokens of text not seen", fontsize=11)
    axes.legend(fontsize=8, loc="lower right")


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("training", "smollm2", "file"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    # white behind, for dark pages
    figure = Figure(figsize=(10, 4), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    losses(left, json.loads(args.training.read_text()))
    recalls(right, json.loads(args.smollm2.read_text()))
    figure.savefig(args.file, dpi=150)


if __name__ == "__main__":
    main()
