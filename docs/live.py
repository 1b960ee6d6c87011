"""Live figures, one for each chapter of the book: the reader changes a graph and sees numbers of the text change.

A figure is data for ``docs/site/live.js``, computed with the package. A figure with a ``size`` is drawn as a mask
beside its arcs, and ``picture`` names another drawing. Its ``said`` has the numbers of the initial state, as the
chapter prints them.
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
Shows = list[tuple[str, str, int | str]]


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


def make(kind: str, say: str, shows: Shows, said: Figure, **options: Any) -> Figure:
    """Return a figure: its kind, its text, the numbers it shows, and the texts that the chapter prints."""
    return {"kind": kind, "say": say, "shows": shows, "said": said, **options}


def graph(say: str, size: int, shows: Shows, said: Figure, **options: Any) -> Figure:
    """Return the figure of a graph and its counts."""
    return make("graph", say, shows, said, size=size, **options)


def curve(source: str, title: str, xlabel: str, ylabel: str, **options: Any) -> Figure:
    """Return the picture of a curve: from a sweep of a slider, from points, or from the influence by distance."""
    labels = {"title": title, "xlabel": xlabel, "ylabel": ylabel}
    return {"kind": "curve", "from": source, **labels, **options}


def slider(name: str, label: str, least: int, value: float, most: float, **options: Any) -> Figure:
    """Return a slider for a number; with ``graph=True`` a change replaces the mask."""
    return {"name": name, "label": label, "least": least, "value": value, "most": most, **options}


def window(value: int, most: int, label: str = "window") -> Figure:
    """Return a slider for the number of tokens to which a receiver attends, itself included."""
    return slider("window", label, 1, value, most, graph=True)


def sinks(value: int, most: int) -> Figure:
    """Return a slider for the number of first tokens to which all receivers attend."""
    return slider("sinks", "sinks", 0, value, most, graph=True)


def layers(value: int, most: int = 8) -> Figure:
    return slider("layers", "layers", 1, value, most)


EDGES = ("edges", "edges", 0)
EACH = ("each", "senders for each receiver, on average", 1)
FIRST = ("first", "layers until the first token reaches the last", 0)
REACH = ("reach", "tokens that reach this receiver", 0)
CAUSAL = ("share", "of the edges of a causal graph", "%")


# ---- attention


def by_hand() -> Figure:
    words = ["Llamas", "do", "not", "output", "words"]
    keys = torch.tensor([[1, 0], [0, 0], [0, 1], [0, 0], [0.8, 0]], dtype=torch.float64)
    queries = torch.tensor([[0, 0], [1, 1.5], [0, 0], [2, 3], [0, 0]], dtype=torch.float64)
    updates = [("z0", "added to the column plural", 2), ("z1", "added to the column negation", 2)]
    return make(
        "attention",
        "The head of this chapter. Cut or add an edge: the numbers are those of the receiver of the edge.",
        [*((f"w{src}", f"weight of {word}", "%") for src, word in enumerate(words)), *updates],
        {"w0": "28.5%", "w1": "6.9%", "w2": "57.7%", "z0": "0.28", "z1": "0.58"},
        size=5,
        row=3,
        tokens=words,
        cells=patterns.causal(5).mask().int().tolist(),
        logits=(queries @ keys.T / 2**0.5).tolist(),
        values=[[1, 0], [0, 0], [0, 1], [0, 0], [1, 0]],
    )


def head_of(text: str, layer: int, head: int, say: str, shows: Shows, said: Figure, **options: Any) -> Figure:
    """Return the figure of a head of the shipped model on a text."""
    model, vocabulary = ga.model.load_trained()
    ids = vocabulary.encode(text)
    with torch.no_grad():
        call: Any = ga.trace.record(model.double(), torch.tensor([ids])).layers[layer]
    options |= {"size": len(ids), "tokens": [vocabulary.decode([token]) for token in ids]}
    options |= {"logits": call.pair_logits()[0, head].tolist()}
    return make("attention", say, shows, said, cells=call.graph.mask().int().tolist(), **options)


def four_words() -> Figure:
    say = "Layer 1, head 1. Cut an edge: the other weights of its receiver grow. No other receiver changes."
    weight = ("w5", "weight of ' not' at this receiver", "%")
    column = ("column", "weight of ' not', summed over all receivers", 2)
    said = {"w5": "0.81", "column": "2.76"}
    return head_of("Llamas do not output words", 1, 1, say, [weight, column], said, row=6, sender=5)


def one_edge() -> Figure:
    text = "for name in names:\n    print(name)\nfor name in"
    say = "Layer 1, head 3, which carries the answer. Cut the edge from token 3, ' name', to the last token."
    third = ("w3", "weight of token 3, ' name'", "%")
    largest = ("largest", "largest weight of this receiver", "%")
    said = {"w3": "0.59", "edges": "136 edges"}
    return head_of(text, 1, 3, say, [third, largest, ("edges", "edges of this head", 0)], said, row=15)


def competition() -> Figure:
    return make(
        "attention",
        "Raise or lower the logit of one sender: the weights of the others change, although their logits do not.",
        [(f"w{src}", f"weight of sender {src}", "%") for src in range(4)],
        {f"w{src}": "shares before: [0.25, 0.15, 0.41, 0.19]" for src in range(4)},
        size=5,
        tokens=["sender 0", "sender 1", "sender 2", "sender 3", "receiver"],
        cells=[[0] * 5] * 4 + [[1, 1, 1, 1, 0]],
        logits=[[None] * 5] * 4 + [[0.5, 0.0, 1.0, 0.2, None]],
        set={"4,3": "fit"},
        sliders=[slider("fit", "logit of sender 3", -3, 0.2, 5, step=0.1)],
    )


def normalisers() -> Figure:
    """Return the competition of senders with the four normalisers of the chapter."""
    names = ["softmax", "sparsemax", "sigmoid", "stick-breaking"]
    figure = competition() | {"normalisers": names}
    figure["sliders"] += [slider("normaliser", "normaliser", 0, 0, 3, names=names)]
    figure["shows"] += [("total", "sum of the weights", 3)]
    return figure | {
        "say": "Change the logit of one sender, and the normaliser. When do the other weights change?"
    }


def strict_layer() -> Figure:
    keys = torch.tensor([0.5, -1.0, 1.5, 1.5, 0.0], dtype=torch.float64)
    queries = torch.tensor([1.0, 0.5, -0.5, 1.0, 1.5], dtype=torch.float64)
    return make(
        "attention",
        "One head on five letters. An edge carries exp(a) v and exp(a), a receiver adds up both, and the update is their quotient.",
        [("m0", "sum of exp(a) v", 3), ("mass", "sum of exp(a)", 3), ("z0", "quotient, the output", 3)],
        {},
        size=5,
        tokens=list("hello"),
        cells=patterns.causal(5).mask().int().tolist(),
        logits=torch.outer(queries, keys).tolist(),
        values=[[1.0], [-1.0], [0.5], [0.5], [-2.0]],
    )


# ---- graphs


def two_hops() -> Figure:
    say = "A text of 32 tokens, repeated once, over a window: how far back are the tokens that reach the last one?"
    said = {"back": "2 hops reach 14 tokens back"}
    return graph(
        say, 64, [EDGES, ("back", "tokens back", 0), FIRST], said, sliders=[layers(2), window(8, 64)]
    )


def hops() -> Figure:
    return graph(
        "The graph of the matrix A. Its power has an edge wherever that many hops lead from a sender to a receiver.",
        4,
        [("edges", "edges of A", 0), ("hops", "edges of its power", 0)],
        {},
        cells=[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]],
        power=True,
        sliders=[slider("layers", "hops", 1, 2, 4)],
    )


def zoo() -> Figure:
    say, sliders = "A window and sinks among 4,096 tokens.", [window(64, 4096), sinks(4, 64)]
    return graph(say, 4096, [EDGES, EACH, CAUSAL], {"each": "67.4"}, sliders=sliders)


def one_hop_per_layer() -> Figure:
    say = "A window among 12 tokens. A layer is one hop: with more layers, more tokens reach the receiver."
    said = {"first": "window(12, 3): 6 layers"}
    return graph(say, 12, [REACH, FIRST, EDGES], said, sliders=[layers(3), window(3, 12)])


def needle() -> Figure:
    return graph(
        "How often can the last of 64 tokens name its needle, if it guesses one of four symbols whenever the needle does not reach it?",
        64,
        [EACH, ("reach", "of 64 tokens reach this receiver", 0), ("best", "best possible accuracy", "%")],
        {"each": "7.6", "reach": "22 of 64", "best": "51%"},
        classes=4,
        sliders=[window(8, 64), sinks(0, 8), layers(3)],
    )


def blocks() -> Figure:
    say = "The derivative of an attention layer has a nonzero block for each edge, that of an MLP only on the diagonal."
    shows: Shows = [("edges", "of 64 blocks are not zero", 0), CAUSAL]
    return graph(say, 8, shows, {"edges": "26 of 64 blocks"}, sliders=[window(3, 8), sinks(1, 8)])


def messages() -> Figure:
    say = "A message that depends on both ends is computed for each edge; attention computes one for each of 64 senders."
    shows: Shows = [("edges", "messages, one for each edge", 0), ("each", "times as many as in attention", 1)]
    return graph(say, 64, shows, {"edges": "484 messages"}, sliders=[window(8, 64)])


def templates() -> Figure:
    words = ["Llamas", "do", "not", "speak", ".", "Llamas", "do"]
    copies = [[src > 0 and words[src - 1] == words[dst] for src in range(dst)] for dst in range(7)]
    return graph(
        "The template of induction: a token attends to the token that followed its own earlier copy. Add other edges.",
        7,
        [("edges", "edges of the template", 0), REACH],
        {},
        cells=[[int(is_copy) for is_copy in row] + [0] * (7 - len(row)) for row in copies],
        tokens=words,
        sliders=[layers(1)],
    )


def leaks() -> Figure:
    say = "Two layers over window(12, 3). Let one token attend to a later one, and count the leaks through both layers."
    shows: Shows = [("pairs", "pairs between which information flows", 0), ("leaks", "of them are leaks", 0)]
    said = {"pairs": "all 38 allowed pairs", "leaks": "0 leaks"}
    return graph(say, 12, shows, said, sliders=[layers(2), window(3, 12)])


def sink() -> Figure:
    say = "A window of 127 and the first token: as many edges as a window of 128, and another loss."
    said = {"edges": "90,176 edges"}
    return graph(say, 768, [EDGES, CAUSAL], said, sliders=[window(127, 768), sinks(1, 16)])


def selected_senders() -> Figure:
    say = "A chooser that keeps k senders for each of 192 tokens keeps as many edges as a window of k, drawn here."
    said = {"edges": "2952 of 18528 edges", "share": "0.159"}
    return graph(say, 192, [EDGES, CAUSAL], said, sliders=[window(16, 192, "k")])


# ---- repeated layers


def smoothing() -> Figure:
    masks = {"complete": patterns.full(8), "causal": patterns.causal(8), "window of 3": patterns.window(8, 3)}
    group = torch.arange(8) // 4
    masks["two groups"] = ga.convert.from_mask(group[:, None] == group)
    states = torch.rand(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    which = slider("graph", "graph", 0, 2, 3, names=list(masks), graph=True)
    residual = slider("residual", "residual share", 0, 0, 0.95, step=0.05)
    shows: Shows = [("spread", "spread of the directions", 3), ("distance", "mean distance of two states", 3)]
    picture = curve("sweep", "Spread", "layers", "spread", x="layers", y=["spread"], names=["spread"])
    return make(
        "smoothing",
        "A layer replaces each state by the mean of its senders' states. Add layers, change the graph, or keep a residual share.",
        shows,
        {},
        size=8,
        causal=False,
        graphs=[mask.mask().int().tolist() for mask in masks.values()],
        states=states.tolist(),
        sliders=[slider("layers", "layers", 0, 4, 32), which, residual],
        picture=picture | {"kind": "cloud", "note": "mean distance of the directions from their mean"},
    )


def influence() -> Figure:
    shows: Shows = [("home", "share of the token itself", "e"), ("peak", "distance of the largest share", 0)]
    shows += [("mean", "mean distance", 1), ("far", "share from beyond 64 tokens", "%")]
    residual = slider("residual", "residual share", 0, 0.5, 1, step=0.05)
    return make(
        "influence",
        "How much of each earlier token is in the state of the last one, in a text longer than all walks? The mask shows 64 of its tokens.",
        [*shows, ("longest", "distance that the layers reach", 0)],
        {"peak": "peak 110 back", "mean": "mean 112.5 back"},
        size=64,
        far=64,
        sliders=[residual, layers(30, 120), window(16, 32)],
        picture=curve("influence", "Influence on the last token", "distance back", "share", log=True, most=1),
    )


# ---- formulas, records, matrices


def temperature() -> Figure:
    quantiles = torch.special.ndtri((torch.arange(16, dtype=torch.float64) + 0.5) / 16)
    logits = (quantiles / quantiles.std(correction=0)).tolist()
    names = {"scaled": "with the scale", "largest": "without a scale"}
    shows: Shows = [("variance", "variance of q . k", 0), ("scale", "scale, 1 / sqrt(d)", 4)]
    return make(
        "formula",
        "The logits of random vectors grow like the square root of d. Divided by it, they stay where a softmax can learn.",
        [*shows, *((name, f"largest of 16 weights {how}", 3) for name, how in names.items())],
        {"scale": "0.1250"},
        sliders=[slider("d", "d, the width of a head", 1, 64, 1024)],
        formulas={
            "variance": "d",
            "scale": "1 / Math.sqrt(d)",
            "largest": f"1 / {logits}.reduce((sum, x) => sum + Math.exp((x - {max(logits)}) * Math.sqrt(d)), 0)",
            "scaled": f"1 / {logits}.reduce((sum, x) => sum + Math.exp(x - {max(logits)}), 0)",
        },
        picture=curve(
            "sweep", "The largest of 16 weights", "d, the width of a head", "largest weight", most=1
        )
        | {"x": "d", "y": list(names), "names": list(names.values()), "logx": True},
    )


def relay() -> Figure:
    passes, printed = "Math.min(12 * relays, 48)", "edges:  8, 12 of 48 numbers pass"
    return make(
        "formula",
        "Four senders with 12 numbers each reach four receivers through relays, whose states have 12 numbers.",
        [("edges", "edges", 0), ("passes", "of 48 numbers pass", 0), ("share", "as a share", "%")],
        {"edges": printed, "passes": printed},
        sliders=[slider("relays", "relays", 1, 1, 6)],
        formulas={"edges": "8 * relays", "passes": passes, "share": f"{passes} / 48"},
        picture={"kind": "relay"},
    )


def forms() -> Figure:
    return make(
        "formula",
        "Multiplications for one message, through two thin matrices and through a square one.",
        [("thin", "two thin matrices", 0), ("square", "one square matrix", 0), ("ratio", "ratio", 1)],
        {"thin": "1,048,576", "square": "16,777,216", "ratio": "ratio: 16"},
        sliders=[
            slider("width", "width", 64, 4096, 8192, step=64),
            slider("d", "width of a head", 1, 128, 512),
        ],
        formulas={"thin": "2 * width * d", "square": "width * width", "ratio": "width / (2 * d)"},
        picture={"kind": "shapes"},
    )


def ranks() -> Figure:
    model, _ = ga.model.load_trained()
    names, spectra = [], []
    for number, layer in enumerate(model.layers):
        for which in ("pattern", "message"):
            matrices = getattr(layer.heads, f"{which}_matrix")()
            for head, values in enumerate(matrices.singular_values().double().tolist()):
                names.append(f"layer {number}, {which} matrix of head {head}")
                spectra.append(values)
    matrix = slider("matrix", "matrix", 0, 0, len(names) - 1, names=names)
    return make(
        "spectrum",
        "How much of a head's matrix remains if only its largest singular values are kept?",
        [("effective", "effective rank", 1), ("error", "error, relative to the size of the matrix", "%")],
        {"effective": "layer 0, pattern: 3.4"},
        spectra=spectra,
        picture={"kind": "spectrum"},
        sliders=[matrix, slider("rank", "singular values kept", 0, 4, 32)],
    )


def record(name: str) -> Figure:
    """Return the newest record of a benchmark."""
    path = max((ROOT / "tests" / "records").glob(f"*-{name}.json"))
    data: Figure = json.loads(path.read_text(encoding="utf-8"))
    return data


def pruned_graphs() -> Figure:
    points = [
        {name: point[name] for name in ("choice", "share", "loss")} for point in record("lm-graphs")["points"]
    ]
    points = [point | {"group": re.sub(r"window\(\d+\)", "window(n)", point["choice"])} for point in points]
    points.sort(key=lambda point: (point["group"], point["share"]))
    first = next(index for index, point in enumerate(points) if point["choice"] == "causal")
    names = [f"{point['choice']}, {point['share']:.1%} of the pairs" for point in points]
    return make(
        "points",
        "The loss of SmolLM2 on 1,024 tokens along graphs that keep a part of all causal pairs.",
        [("share", "of the pairs", "%"), ("loss", "loss", 3), ("above", "above the causal graph", "%")],
        {},
        points=[point | {"above": point["loss"] / points[first]["loss"] - 1} for point in points],
        picture=curve(
            "points", "Loss", "share of the pairs", "loss", x="share", y="loss", logx=True, least=2.5
        ),
        sliders=[slider("point", "graph", 0, first, len(points) - 1, names=names)],
    )


def jobs() -> Figure:
    rows = [row for row in record("heads")["rows"] if row["model"] == "smollm2"]
    names = sorted({row["job"] for row in rows}, key=lambda job: -sum(row["job"] == job for row in rows))
    points = []
    for job in names:
        heads = [row for row in rows if row["job"] == job]
        matter, fall = (sum(row[claim]["p_holm"] <= 0.05 for row in heads) for claim in ("looks", "said"))
        hold = sum(row["holds"] for row in heads)
        points.append({"heads": len(heads), "matter": matter, "fall": fall, "hold": hold})
    note = "grey: heads, blue: heads whose sentence holds"
    shows: Shows = [("heads", "heads", 0), ("matter", "heads whose edges matter", 0)]
    shows += [("fall", "heads whose raised logits fall without the edges", 0)]
    return make(
        "points",
        "For how many heads of SmolLM2 does the sentence about their job hold?",
        [*shows, ("hold", "heads whose sentence holds", 0)],
        {"heads": "81", "matter": "80", "hold": "80"},
        points=points,
        picture={"kind": "rows", "whole": "heads", "part": "hold", "title": "Jobs", "note": note},
        sliders=[slider("point", "job", 0, names.index("sink"), len(names) - 1, names=names)],
    )


# For each chapter: the function that builds its figure, and the section that ends with it.
FIGURES: dict[str, tuple[Callable[[], Figure], str]] = {
    "attention_is_message_passing": (by_hand, "One receiver, by hand"),
    "many_heads_many_graphs": (two_hops, "A trained model"),
    "build_a_transformer": (strict_layer, "The layer as message passing"),
    "four_perspectives": (four_words, "A message exchange"),
    "three_forms": (competition, "What the softmax is for"),
    "matrix_multiplication_is_message_passing": (hops, "Second reading: what each node receives"),
    "why_the_square_root": (temperature, "Large numbers make the softmax choose one"),
    "low_rank_and_subspaces": (ranks, "A head's matrices are nearly all zero, seen from the right angle"),
    "why_thin_factors": (forms, "What each form costs"),
    "the_zoo": (zoo, "What it costs"),
    "how_many_layers": (one_hop_per_layer, "One hop per layer"),
    "sparse_against_dense": (needle, "What the graphs permit"),
    "communication_and_computation": (blocks, "Who depends on whom, step by step"),
    "one_limiting_case": (messages, "What attention saves"),
    "what_a_gnn_person_asks": (smoothing, "Over-smoothing"),
    "induction_heads": (templates, "A job is a graph"),
    "relay_through_a_middle_token": (relay, "A relay is narrow"),
    "change_the_graph": (one_edge, "One edge"),
    "audit_a_leak": (leaks, "The other direction: edges that nobody uses"),
    "sinks_are_one_edge": (sink, "The loss along five graphs"),
    "the_graph_a_model_needs": (pruned_graphs, "A curve that was measured before"),
    "reach_is_not_influence": (influence, "On paper: shares along walks"),
    "reading_278_heads": (jobs, "Do the edges matter?"),
    "the_graph_that_a_model_draws": (selected_senders, "The choice over time"),
    "attention_from_primitives": (normalisers, "Another normaliser"),
}
