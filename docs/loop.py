"""The picture at the top: cells of a mask become arcs, one edge is cut, and the next word has another probability.

    python docs/loop.py     # writes docs/loop.svg, from the model that ships

Eight seconds, over and over, by rules of CSS inside the file; who asks for less motion sees the graph, still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import gnn_attention as ga

FILE = Path(__file__).resolve().parent / "loop.svg"
TEXT = "for name in names:\n    print(name)\nfor name in"
EDGE, LAYER = (3, 15), 1  # " name" after the first "in" -> the last token
CELL, LEFT, TOP = 11, 22, 72  # the mask
START, STEP, LINE = 258, 38.5, 268  # the tokens
STYLE = """
svg{font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:13px}
.paper{fill:#fff;stroke:#d4d4d8}.ink{fill:#18181b}.soft{fill:#52525b}.big{font-size:17px;font-family:system-ui,sans-serif}
.cell{fill:#2563eb;animation:fly 8s infinite ease-in-out}.arc{fill:none;stroke:#2563eb;animation:arc 8s infinite}
.cut{stroke:#d97706;animation:cut 8s infinite}.x{stroke:#dc2626;stroke-width:3;animation:x 8s infinite}
.bar{fill:#d97706;transform-origin:0 0;animation:bar 8s infinite}.one{animation:one 8s infinite}.two{animation:two 8s infinite}
.three{animation:three 8s infinite}.before{animation:before 8s infinite}.after{animation:after 8s infinite}
@keyframes fly{0%,14%{transform:none;opacity:1}36%{opacity:1}42%,96%{transform:var(--to);opacity:0}97%{transform:none;opacity:0}100%{opacity:1}}
@keyframes arc{0%,34%{opacity:0}44%,95%{opacity:var(--w)}99%,100%{opacity:0}}
@keyframes cut{0%,34%{opacity:0}44%,64%{opacity:1}68%,95%{opacity:.12}99%,100%{opacity:0}}
@keyframes x{0%,60%{opacity:0}63%,95%{opacity:1}99%,100%{opacity:0}}
@keyframes bar{0%,40%{transform:scaleX(0)}48%,66%{transform:scaleX(var(--before))}74%,95%{transform:scaleX(var(--after))}99%,100%{transform:scaleX(0)}}
@keyframes one{0%,20%{opacity:1}24%,97%{opacity:0}100%{opacity:1}}
@keyframes two{0%,22%{opacity:0}28%,58%{opacity:1}61%,100%{opacity:0}}
@keyframes three{0%,59%{opacity:0}63%,95%{opacity:1}98%,100%{opacity:0}}
@keyframes before{0%,44%{opacity:0}48%,66%{opacity:1}70%,100%{opacity:0}}
@keyframes after{0%,69%{opacity:0}74%,95%{opacity:1}98%,100%{opacity:0}}
@media(prefers-color-scheme:dark){.paper{fill:#18181b;stroke:#3f3f46}.ink{fill:#fafafa}.soft{fill:#a1a1aa}.cell{fill:#60a5fa}.arc{stroke:#60a5fa}.cut{stroke:#f59e0b}.bar{fill:#f59e0b}}
@media(prefers-reduced-motion:reduce){*{animation:none!important}.cell,.one,.two,.before{opacity:0}.arc{opacity:var(--w)}.cut{opacity:.4}.bar{transform:scaleX(var(--after))}}
"""


@dataclass(frozen=True)
class Numbers:
    """What the model says: its tokens, each edge's weight (mean over heads), the next word with the edge and without."""

    tokens: tuple[str, ...]
    weights: tuple[tuple[int, int, float], ...]
    word: str
    before: float
    after: float


@torch.no_grad()
def numbers() -> Numbers:
    """Run the model that ships, whole and with one edge of one layer cut."""
    model, vocabulary = ga.model.load_trained()
    ids = vocabulary.encode(TEXT)
    tokens = torch.tensor([ids])
    whole = model(tokens)[0, -1].softmax(-1)
    with ga.trace.operate(model, ga.trace.cut([EDGE], layers=LAYER)):
        without = model(tokens)[0, -1].softmax(-1)
    edges = ga.patterns.causal(len(ids)).edge_index.T.tolist()
    weights = ga.trace.record(model, tokens).layers[LAYER].weights([tuple(edge) for edge in edges])
    mean = weights[0].mean(-1).tolist()
    best = int(whole.argmax())
    return Numbers(
        tuple(vocabulary.decode([one]) for one in ids),
        tuple((src, dst, weight) for (src, dst), weight in zip(edges, mean, strict=True)),
        vocabulary.decode([best]),
        float(whole[best]),
        float(without[best]),
    )


def picture(found: Numbers) -> str:
    """The file."""
    words = (
        f"The cells of an attention mask become arcs between tokens. One edge is cut, and the next word,"
        f"{found.word}, falls from {percent(found.before)} to {percent(found.after)}."
    )
    return "".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 345" role="img">',
            f"<title>{words}</title><style>{STYLE}</style>",
            '<rect class="paper" x=".5" y=".5" width="879" height="344" rx="10"/>',
            *captions(),
            *cells(found),
            *arcs(found),
            *labels(found),
            *next_word(found),
            "</svg>\n",
        ]
    )


def captions() -> Iterator[str]:
    """What is said at each time."""
    said = {"one": "An attention mask …", "two": "… is a graph", "three": "Cut one edge"}
    for name, text in said.items():
        yield f'<text class="ink big {name}" x="22" y="38">{text}</text>'


def cells(found: Numbers) -> Iterator[str]:
    """A cell for each edge, and where it flies: to the top of its arc."""
    for src, dst, _ in found.weights:
        x, y = LEFT + src * CELL, TOP + dst * CELL
        to_x, to_y = (place(src) + place(dst)) / 2 - x - 5, LINE - 14 - 0.75 * height(src, dst) - y - 5
        style = f"--to:translate({to_x:.0f}px,{to_y:.0f}px)"
        yield f'<rect class="cell" x="{x}" y="{y}" width="9" height="9" rx="2" style="{style}"/>'


def arcs(found: Numbers) -> Iterator[str]:
    """An arc for each edge, as strong as its weight; the one that is cut in its own colour, on top."""
    for src, dst, weight in sorted(found.weights, key=lambda edge: edge[:2] == EDGE):
        cut = (src, dst) == EDGE
        look = (
            'class="arc cut" stroke-width="3.5"'
            if cut
            else f'class="arc" stroke-width="{1 + 2 * weight:.1f}"'
        )
        strength = f' style="--w:{min(1.0, 0.08 + weight):.2f}"'
        yield f'<path {look}{strength} d="{arc(src, dst)}"/>'
    src, dst = EDGE
    x, y = (place(src) + place(dst)) / 2, LINE - 14 - 0.75 * height(src, dst)
    yield f'<path class="x" d="M{x - 8:.0f} {y - 8:.0f}l16 16m0-16l-16 16"/>'


def labels(found: Numbers) -> Iterator[str]:
    """The tokens under the arcs."""
    for number, token in enumerate(found.tokens):
        shown = "⏎" if token == "\n" else token.strip() or "␣"
        yield f'<text class="ink" text-anchor="middle" x="{place(number):.0f}" y="{LINE + 4}">{shown}</text>'


def next_word(found: Numbers) -> Iterator[str]:
    """The bar of the next word, before the cut and after it."""
    y = LINE + 34
    yield f'<text class="soft" x="{START - 12}" y="{y + 12}">next word</text><text class="ink" x="{START + 68}" y="{y + 12}">{found.word.strip()}</text>'
    scale = f"--before:{found.before:.3f};--after:{found.after:.3f}"
    yield f'<g transform="translate({START + 112} {y})"><rect class="bar" width="380" height="16" rx="3" style="{scale}"/></g>'
    for name, share in (("before", found.before), ("after", found.after)):
        yield f'<text class="ink {name}" x="{START + 120 + 380 * share:.0f}" y="{y + 13}">{percent(share)}</text>'


def percent(share: float) -> str:
    """A share as it is written.

    >>> percent(0.744)
    '74 %'
    """
    return f"{100 * share:.0f} %"


def place(token: int) -> float:
    """The middle of a token on its line."""
    return START + STEP * token + 12


def height(src: int, dst: int) -> float:
    """How far the handles of an arc stand above the line; an arc rises to three quarters of it."""
    return 18 + 16.5 * (dst - src)


def arc(src: int, dst: int) -> str:
    """The path of an arc: from sender to receiver, or a small loop."""
    y, spread = LINE - 14, 7 if src == dst else 0
    x1, x2, top = place(src) - spread, place(dst) + spread, LINE - 14 - height(src, dst)
    return f"M{x1:.0f} {y}C{x1:.0f} {top:.0f} {x2:.0f} {top:.0f} {x2:.0f} {y}"


if __name__ == "__main__":
    FILE.write_text(picture(numbers()), encoding="utf-8")
    print(f"{FILE}: {FILE.stat().st_size / 1e3:.0f} kB")
