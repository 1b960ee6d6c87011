"""Live figures, one for each chapter of the book: the reader changes a graph and sees numbers of the text change.

A figure is data for ``docs/site/live.js``, computed with the package. Its ``said`` has the numbers of the initial
state, as the chapter prints them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gnn_attention as ga
from gnn_attention import patterns

ROOT = Path(__file__).resolve().parent.parent
Figure = dict[str, Any]


def figures() -> dict[str, Figure]:
    """Return the figure of each chapter, by the name of the chapter without its number."""
    return {name: build() for name, (build, _) in FIGURES.items()}


def insert_figure(chapter: str, cells: list[Figure]) -> list[Figure]:
    """Split the cells of a chapter's notebook at headings, and insert its figure at the end of its section."""
    build, section = FIGURES[chapter.partition("_")[2]]
    parts: list[Figure] = []
    is_inside = False
    for cell in cells:
        text, is_text = "".join(cell["source"]), cell["cell_type"] == "markdown"
        for number, part in enumerate(re.split("^(?=## )", text, flags=re.MULTILINE) if is_text else [text]):
            if is_text and part.startswith("## "):
                if is_inside:
                    source = markup(build())
                    parts.append({"cell_type": "markdown", "id": "live", "metadata": {}, "source": source})
                is_inside = bool(re.match(rf"## (\d+\. )?{re.escape(section)}\n", part + "\n"))
            parts.append({**cell, "id": f"{cell['id']}-{number}", "source": part})
    return parts


def markup(figure: Figure) -> str:
    """Return the HTML element of a figure."""
    data = {name: value for name, value in figure.items() if name != "said"}
    return f'<figure class="live" data-figure="{html.escape(json.dumps(data), quote=True)}"></figure>'


def slider(name: str, label: str, least: int, value: float, most: int, **options: Any) -> Figure:
    """Return a slider for a number; with ``graph=True`` a change draws the mask anew."""
    return {"name": name, "label": label, "least": least, "value": value, "most": most, **options}


def window(value: int, most: int, label: str = "window") -> Figure:
    """Return a slider for the number of tokens to which a receiver attends, itself included."""
    return slider("window", label, 1, value, most, graph=True)


def sinks(value: int, most: int) -> Figure:
    """Return a slider for the number of first tokens to which all receivers attend."""
    return slider("sinks", "sinks", 0, value, most, graph=True)


LAYERS: Figure = {"name": "layers", "label": "layers", "least": 1, "most": 8}


# ---- attention


def by_hand() -> Figure:
    words = ["Llamas", "do", "not", "output", "words"]
    keys = torch.tensor([[1, 0], [0, 0], [0, 1], [0, 0], [0.8, 0]], dtype=torch.float64)
    queries = torch.tensor([[0, 0], [1, 1.5], [0, 0], [2, 3], [0, 0]], dtype=torch.float64)
    return {
        "kind": "attention",
        "say": "The head of this chapter. Click a cell to cut or add an edge; the numbers shown are then those of its receiver.",
        "size": 5,
        "row": 3,
        "tokens": words,
        "cells": patterns.causal(5).mask().int().tolist(),
        "logits": (queries @ keys.T / 2**0.5).tolist(),
        "values": [[1, 0], [0, 0], [0, 1], [0, 0], [1, 0]],
        "shows": [
            *((f"w{src}", f"weight of {word}", "%") for src, word in enumerate(words)),
            ("z0", "many", 2),
            ("z1", "denial", 2),
        ],
        "said": {"w0": "28.5%", "w1": "6.9%", "w2": "57.7%", "z0": "0.28", "z1": "0.58"},
    }


def head_of(text: str, layer: int, head: int) -> Figure:
    """Return the figure of a head of the shipped model on a text."""
    model, vocabulary = ga.model.load_trained()
    ids = vocabulary.encode(text)
    with torch.no_grad():
        call: Any = ga.trace.record(model.double(), torch.tensor([ids])).layers[layer]
    size = len(ids)
    logits = torch.zeros(size, size, dtype=torch.float64)
    src, dst = call.edge_index
    logits[dst, src] = call.logits()[0, :, head]
    return {
        "kind": "attention",
        "size": size,
        "tokens": [vocabulary.decode([token]) for token in ids],
        "cells": patterns.causal(size).mask().int().tolist(),
        "logits": logits.tolist(),
    }


def four_words() -> Figure:
    return head_of("Llamas do not output words", 1, 1) | {
        "say": "Layer 1, head 1. Cut an edge: the remaining weights of its receiver grow, and no other receiver changes.",
        "row": 6,
        "sender": 5,
        "shows": [
            ("w5", "share of ' not' in what the receiver attends to", "%"),
            ("column", "all that ' not' gets, from every receiver", 2),
        ],
        "said": {"w5": "0.81", "column": "2.76"},
    }


def one_edge() -> Figure:
    return head_of("for name in names:\n    print(name)\nfor name in", 1, 3) | {
        "say": "Layer 1, head 3, on which the answer hangs. Cut the edge from the second token ' name' to the last one.",
        "row": 15,
        "shows": [
            ("w3", "weight of token 3, ' name'", "%"),
            ("largest", "the largest weight of this receiver", "%"),
            ("edges", "edges of this head", 0),
        ],
        "said": {"w3": "0.59", "edges": "136 edges"},
    }


def two_hops() -> Figure:
    return graph(
        "A text of 32 tokens, repeated once, over a window: from how far back does information reach the last token?",
        64,
        [EDGES, ("back", "tokens back", 0), ("first", "layers until the last token knows of the first", 0)],
        {"back": "2 hops reach 14 tokens back"},
        sliders=[slider(**LAYERS, value=2), window(8, 64)],
    )


def competition() -> Figure:
    logits = ("0.5", "0", "1", "fit")
    total = " + ".join(f"Math.exp({logit})" for logit in logits)
    return {
        "kind": "formula",
        "say": "Four senders. Let the last one fit better or worse: nothing about the others changes except their shares.",
        "sliders": [slider("fit", "logit of the last", -3, 0.2, 5, step=0.1)],
        "formulas": {f"w{src}": f"Math.exp({logit}) / ({total})" for src, logit in enumerate(logits)},
        "shows": [(f"w{src}", f"share of sender {src}", 2) for src in range(4)],
        "said": {f"w{src}": "shares before: [0.25, 0.15, 0.41, 0.19]" for src in range(4)},
    }


def temperature() -> Figure:
    quantiles = torch.special.ndtri((torch.arange(16, dtype=torch.float64) + 0.5) / 16)
    logits = (quantiles / quantiles.std(correction=0)).tolist()
    return {
        "kind": "formula",
        "say": "Logits spread like the square root of d. Divided by it, they stay where a softmax can learn, whatever the width of a head.",
        "sliders": [slider("d", "d, the width of a head", 1, 64, 1024)],
        "formulas": {
            "variance": "d",
            "scale": "1 / Math.sqrt(d)",
            "largest": f"1 / {logits}.reduce((sum, x) => sum + Math.exp((x - {max(logits)}) * Math.sqrt(d)), 0)",
            "scaled": f"1 / {logits}.reduce((sum, x) => sum + Math.exp(x - {max(logits)}), 0)",
        },
        "shows": [
            ("variance", "variance of q . k", 0),
            ("scale", "scale, one over the root of d", 4),
            ("largest", "largest weight of 16 without a scale", 3),
            ("scaled", "largest weight with it", 3),
        ],
        "said": {"scale": "0.1250"},
    }


# ---- graphs


def graph(
    say: str, size: int, shows: list[tuple[str, str, int | str]], said: Figure, **options: Any
) -> Figure:
    """Return the figure of a graph and its counts."""
    return {"kind": "graph", "say": say, "size": size, "shows": shows, "said": said, **options}


EDGES = ("edges", "edges", 0)
EACH = ("each", "senders each", 1)


def hops() -> Figure:
    cells = torch.zeros(4, 4, dtype=torch.int64)
    for src, dst in ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (0, 3), (2, 3)):
        cells[dst, src] = 1
    return graph(
        "The graph of the matrix A. The product A A has an edge wherever two hops lead: click, and count.",
        4,
        [("edges", "edges of A: one hop", 0), ("hops", "edges of its power: that many hops", 0)],
        {},
        cells=cells.tolist(),
        sliders=[slider("layers", "hops", 1, 2, 4)],
    )


def zoo() -> Figure:
    return graph(
        "A window and sinks among 4,096 tokens.",
        4096,
        [EDGES, EACH, ("share", "of the pairs of a causal graph", "%")],
        {"each": "67.4"},
        sliders=[window(64, 4096), sinks(4, 64)],
    )


def hearsay() -> Figure:
    return graph(
        "A window of 12 tokens. More layers reach further back; one edge more may save some.",
        12,
        [
            ("reach", "tokens that this receiver knows of", 0),
            ("first", "layers until the last token knows of the first", 0),
            EDGES,
        ],
        {"reach": "7 tokens", "first": "6 layers"},
        sliders=[slider(**LAYERS, value=3), window(3, 12)],
    )


def within_reach() -> Figure:
    return graph(
        "A window among 256 tokens: in how many layers is the first within reach of the last? The chapter asks what arrives.",
        256,
        [
            ("first", "layers until the last token knows of the first", 0),
            ("reach", "tokens within reach of this receiver", 0),
            EDGES,
        ],
        {"first": "layers until everybody is reached: 17"},
        sliders=[slider("layers", "layers", 1, 30, 30), window(16, 256), sinks(0, 16)],
    )


def needle() -> Figure:
    return graph(
        "How often can the last of 64 tokens find its needle at best, if it guesses one of four symbols where it cannot know?",
        64,
        [EACH, ("reach", "of 64 in reach", 0), ("best", "at best right", "%")],
        {"each": "7.6", "reach": "22 of 64", "best": "51%"},
        classes=4,
        sliders=[window(8, 64), sinks(0, 8), slider(**LAYERS, value=3)],
    )


def talk() -> Figure:
    return graph(
        "The derivative has one nonzero block for each edge. Only attention has blocks off the diagonal.",
        8,
        [("edges", "of 64 blocks are not zero", 0), ("share", "of the causal ones", "%")],
        {"edges": "26 of 64 blocks"},
        sliders=[window(3, 8), sinks(1, 8)],
    )


def messages() -> Figure:
    return graph(
        "A message that depends on both ends is computed for each edge; attention computes one for each of the 64 senders and weights it.",
        64,
        [("edges", "messages are computed", 0), ("each", "times as many as in attention", 1)],
        {"edges": "484 messages"},
        sliders=[window(8, 64)],
    )


def templates() -> Figure:
    words = ["Llamas", "do", "not", "speak", ".", "Llamas", "do"]
    cells = [
        [int(dst > src > 0 and words[src - 1] == words[dst]) for src in range(len(words))]
        for dst in range(len(words))
    ]
    return graph(
        "The template of induction: from the token after the one that is like mine. Click what else a head might attend to.",
        7,
        [("edges", "edges of the template", 0), ("reach", "tokens that this receiver knows of", 0)],
        {},
        cells=cells,
        tokens=words,
        sliders=[slider(**LAYERS, value=1)],
    )


def relay() -> Figure:
    return {
        "kind": "formula",
        "say": "Four senders of 12 numbers each tell four receivers, through relays of 12 numbers.",
        "sliders": [slider("relays", "relays", 1, 1, 6)],
        "formulas": {"edges": "8 * relays", "passes": "Math.min(12 * relays, 48)"},
        "shows": [("edges", "edges", 0), ("passes", "of 48 numbers pass", 0)],
        "said": {"edges": "8 edges", "passes": "12 of 48"},
    }


def leaks() -> Figure:
    return graph(
        "Two layers over window(12, 3). Let one token attend to a later one, and count the leaks through both layers.",
        12,
        [("pairs", "pairs along which information flows", 0), ("leaks", "of them leaks", 0)],
        {"pairs": "all 38 allowed pairs", "leaks": "0 leaks"},
        sliders=[slider(**LAYERS, value=2), window(3, 12)],
    )


def sink() -> Figure:
    return graph(
        "A window of 127 and the first token have as many edges as a window of 128, and another loss.",
        768,
        [EDGES, ("share", "of the causal ones", "%")],
        {"edges": "90,176 edges"},
        sliders=[window(127, 768), sinks(1, 16)],
    )


def selected_senders() -> Figure:
    return graph(
        "Selecting k senders for each of 192 tokens gives as many edges as a window of k, wherever the senders are.",
        192,
        [EDGES, ("share", "of the causal ones", "%")],
        {"edges": "2952 of 18528 edges", "share": "0.159"},
        sliders=[window(16, 192, "k")],
    )


# ---- formulas, records, matrices


def forms() -> Figure:
    return {
        "kind": "formula",
        "say": "Multiplications for one message, through two thin matrices and through a square one.",
        "sliders": [
            slider("width", "width of a state", 64, 4096, 8192, step=64),
            slider("d", "width of a head", 1, 128, 512),
        ],
        "formulas": {"thin": "2 * width * d", "square": "width * width", "ratio": "width / (2 * d)"},
        "shows": [
            ("thin", "two thin matrices", 0),
            ("square", "one square matrix", 0),
            ("ratio", "ratio", 1),
        ],
        "said": {"thin": "1,048,576", "square": "16,777,216", "ratio": "ratio: 16"},
    }


def ranks() -> Figure:
    model, _ = ga.model.load_trained()
    names, spectra = [], []
    for number, layer in enumerate(model.layers):
        for which in ("pattern", "message"):
            matrices = getattr(layer.heads, f"{which}_matrix")()
            for head, values in enumerate(matrices.singular_values().double().tolist()):
                names.append(f"layer {number}, {which} matrix of head {head}")
                spectra.append(values)
    return {
        "kind": "spectrum",
        "say": "How much of a head's matrix remains if only its largest singular values are kept?",
        "spectra": spectra,
        "sliders": [
            slider("matrix", "matrix", 0, 0, len(names) - 1, names=names),
            slider("rank", "singular values", 0, 4, 32),
        ],
        "shows": [
            ("effective", "effective rank", 1),
            ("error", "lost, relative to the size of the matrix", "%"),
        ],
        "said": {"effective": "layer 0, pattern: 3.4"},
    }


def record(name: str) -> Figure:
    """Return the newest record of a benchmark."""
    path = max((ROOT / "tests" / "records").glob(f"*-{name}.json"))
    data: Figure = json.loads(path.read_text(encoding="utf-8"))
    return data


def pruned_graphs() -> Figure:
    points = sorted(record("lm-graphs")["points"], key=lambda point: (point["choice"], point["share"]))
    causal = next(point["loss"] for point in points if point["choice"] == "causal")
    rows = [{"share": p["share"], "loss": p["loss"], "above": p["loss"] / causal - 1} for p in points]
    first = next(index for index, point in enumerate(points) if point["choice"] == "causal")
    names = [f"{point['choice']}, {point['share']:.1%} of the pairs" for point in points]
    return {
        "kind": "points",
        "say": "SmolLM2 on 1,024 tokens: each point of the curve.",
        "points": rows,
        "sliders": [slider("point", "graph", 0, first, len(rows) - 1, names=names)],
        "shows": [("share", "of the pairs", "%"), ("loss", "loss", 3), ("above", "above causal", "%")],
        "said": {},
    }


def jobs() -> Figure:
    rows = [row for row in record("heads")["rows"] if row["model"] == "smollm2"]
    names = sorted({row["job"] for row in rows}, key=lambda job: -sum(row["job"] == job for row in rows))
    points = []
    for job in names:
        heads = [row for row in rows if row["job"] == job]
        matter, fall = (sum(row[claim]["p_holm"] <= 0.05 for row in heads) for claim in ("looks", "said"))
        hold = sum(row["holds"] for row in heads)
        points.append({"heads": len(heads), "matter": matter, "fall": fall, "hold": hold})
    return {
        "kind": "points",
        "say": "How many sentences about heads of SmolLM2 hold, job by job.",
        "points": points,
        "sliders": [slider("point", "job", 0, names.index("sink"), len(names) - 1, names=names)],
        "shows": [
            ("heads", "heads", 0),
            ("matter", "whose edges matter", 0),
            ("fall", "whose words fall", 0),
            ("hold", "whose sentence holds", 0),
        ],
        "said": {"heads": "81", "matter": "80", "hold": "80"},
    }


# For each chapter: the function that builds its figure, and the section that ends with it.
FIGURES: dict[str, tuple[Callable[[], Figure], str]] = {
    "attention_is_message_passing": (by_hand, "One receiver, by hand"),
    "many_heads_many_graphs": (two_hops, "A trained model"),
    "four_perspectives": (four_words, "A message exchange"),
    "three_forms": (competition, "What the softmax is for"),
    "matrix_multiplication_is_message_passing": (hops, "Second reading: what everybody is told"),
    "why_the_square_root": (temperature, "Large numbers make the softmax choose one"),
    "low_rank_and_subspaces": (ranks, "A head's matrices are nearly all zero, seen from the right angle"),
    "why_thin_factors": (forms, "What each form costs"),
    "the_zoo": (zoo, "What it costs"),
    "how_many_layers": (hearsay, "Hearsay"),
    "sparse_against_dense": (needle, "What the graphs permit"),
    "communication_and_computation": (talk, "Who depends on whom, step by step"),
    "one_limiting_case": (messages, "What attention saves"),
    "induction_heads": (templates, "A job is a graph"),
    "relay_through_a_middle_token": (relay, "A relay is narrow"),
    "change_the_graph": (one_edge, "One edge"),
    "audit_a_leak": (leaks, "The other direction: edges that nobody uses"),
    "sinks_are_one_edge": (sink, "The loss along five graphs"),
    "the_graph_a_model_needs": (pruned_graphs, "A curve that was measured before"),
    "reach_is_not_influence": (within_reach, "On paper: shares along walks"),
    "reading_278_heads": (jobs, "Do the edges matter?"),
    "the_graph_that_a_model_draws": (selected_senders, "The choice over time"),
    "attention_from_primitives": (competition, "Another normaliser"),
}
