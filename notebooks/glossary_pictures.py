"""Draw one small picture for each word of the glossary, as SVG files.

``python -m notebooks.glossary_pictures`` writes docs/glossary/*.svg. ``tests/test_glossary.py`` compares the edges of
every graph in a picture with those of the library, and evaluates the formula of every computed number.
"""

import math
from contextlib import contextmanager
from itertools import pairwise

from notebooks.illustrations import FOLDER as ILLUSTRATIONS
from notebooks.illustrations import STYLE, Picture, describe, draw_files, escape, write_files

FOLDER = ILLUSTRATIONS.parent / "glossary"
DRAWINGS = []  # the word and the function of each picture
CAUSAL, WINDOW = (
    [(s, d) for d in range(4) for s in range(d + 1)],
    [(s, d) for d in range(4) for s in (d - 1, d) if s >= 0],
)
RADIUS = 9  # of a node
# Orange marks the edge that is spoken of, blue what is looked for, green a weight, and red a fault.
SMALL = """.gl{font-size:12px}.gl .pm-soft{font-size:11px}.gl .pm-in{font-size:11px}.gl .pm-math{font-size:12px}
.gl-node{fill:#e4e4e7;stroke:#71717a}.gl-pattern{fill:#0072b2;stroke:#0072b2}.gl-message{fill:#e69f00;stroke:#e69f00}
.gl-line{fill:none;stroke:#71717a;stroke-width:1.5}.gl-head{fill:#71717a}.gl-cell{fill:#f4f4f5;stroke:#d4d4d8}
.gl-line.hot{stroke:#e69f00;stroke-width:2.5}.gl-head.hot{fill:#e69f00}.gl-cell.on{fill:#0072b2}.gl-cell.hot{fill:#e69f00}
.gl-line.blue{stroke:#0072b2;stroke-width:2}.gl-head.blue{fill:#0072b2}.gl-line.red{stroke:#d55e00;stroke-width:2.5}
.gl-head.red{fill:#d55e00}.gl-line.thin{stroke-width:1;stroke-opacity:.6}.gl .gl-on{fill:#fff}
.gl-line.cut{stroke-dasharray:3 3}.gl-new{fill:none;stroke:#18181b;stroke-width:1.5}
@media(prefers-color-scheme:dark){.gl-node{fill:#3f3f46;stroke:#a1a1aa}.gl-line{stroke:#a1a1aa}.gl-head{fill:#a1a1aa}
.gl-cell{fill:#27272a;stroke:#52525b}.gl-pattern,.gl-cell.on{fill:#56b4e9;stroke:#56b4e9}.gl .gl-on{fill:#18181b}
.gl-line.blue{stroke:#56b4e9}.gl-head.blue{fill:#56b4e9}.gl-new{stroke:#fafafa}.gl .pm-pattern{fill:#56b4e9}}
"""


class SmallPicture(Picture):
    """A picture of 160 x 96, without a title of its own."""

    page, zoom, look, style, height = 160, 1.5, "pm gl", STYLE + SMALL, 96

    def __init__(self, name, title, description):
        super().__init__(name, title, description)
        self.parts.clear()

    @contextmanager
    def graph(self, expression):
        """Everything that is drawn inside shows this graph: one mark for each of its edges."""
        self.parts.append(f'<g data-graph="{escape(expression)}">')
        yield
        self.parts.append("</g>")

    def number(self, x, y, text, formula, anchor="middle"):
        """Write a number together with the formula that the test evaluates."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" data-formula="{escape(formula)}">{text}</text>'
        )

    def node(self, x, y, label="", look="gl-node"):
        self.parts.append(f'<circle class="{look}" cx="{x:g}" cy="{y:g}" r="{RADIUS}"/>')
        self.text(x, y + 4, label, "pm-in" if look == "gl-node" else "pm-in gl-on", "middle")

    def nodes(self, y=72, labels="0123", left=24, pitch=37, looks=None):
        """Draw nodes on a line and return where they are."""
        places = [(left + pitch * number, y) for number in range(len(labels))]
        for number, (place, label) in enumerate(zip(places, labels, strict=True)):
            self.node(*place, label, (looks or {}).get(number, "gl-node"))
        return places

    def head(self, x, y, angle, look=""):
        sides = [(x - 7 * math.cos(angle + turn), y - 7 * math.sin(angle + turn)) for turn in (-0.45, 0.45)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *sides])
        self.parts.append(f'<polygon class="gl-head {look}" points="{points}"/>')

    def line(self, start, end, look="", gap=0.0, has_head=True, width=None):
        """Draw a straight arrow that leaves a gap at both ends, such as the radius of a node."""
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        x, y = start[0] + gap * math.cos(angle), start[1] + gap * math.sin(angle)
        end_x, end_y = end[0] - gap * math.cos(angle), end[1] - gap * math.sin(angle)
        extra = f' style="stroke-width:{width:g}"' if width else ""
        path = f"M{x:.1f} {y:.1f}L{end_x:.1f} {end_y:.1f}"
        self.parts.append(f'<path class="gl-line {look}" d="{path}"{extra}/>')
        if has_head:
            self.head(end_x, end_y, angle, look)

    def arc(self, places, src, dst, look=""):
        """Draw an edge as an arc above the nodes, or as a loop."""
        (x, y), (end_x, _) = places[src], places[dst]
        span, top = abs(dst - src), y - RADIUS - 1
        if span:
            sign = 1 if end_x > x else -1
            x, end_x, rise = x + 3 * sign, end_x - 3 * sign, 9 + 15 * span
            path = f"M{x} {top}Q{(x + end_x) / 2} {top - rise} {end_x} {top}"
            angle = math.atan2(2 * rise, end_x - x)
        else:
            end_x, angle = x + 4, 1.9
            path = f"M{x - 4} {top}C{x - 13} {top - 15} {x + 13} {top - 15} {end_x} {top}"
        self.parts.append(f'<path class="gl-line {look}" d="{path}" data-edge="{src} {dst}"/>')
        self.head(end_x, top, angle, look)

    def arcs(self, places, edges, hot=(), look=""):
        """Draw the edges, and those in ``hot`` in orange and last."""
        for edge in sorted(edges, key=lambda edge: edge in hot):
            self.arc(places, *edge, look="hot" if edge in hot else look)

    def mask(self, x, y, edges, size=4, cell=15, hot=(), transposed=False):
        """Draw the table of a graph, with receivers in rows unless it is transposed."""
        for row in range(size):
            for column in range(size):
                edge = (row, column) if transposed else (column, row)
                look = "hot" if edge in hot else "on" if edge in edges else ""
                extra = f' data-edge="{edge[0]} {edge[1]}"' if look else ""
                self.rect(x + cell * column, y + cell * row, cell - 1, cell - 1, f"gl-cell {look}", extra)

    def bar(self, x, y, width, height, kind, opacity=1.0):
        self.rect(x, y, width, height, f"pm-{kind}", f' rx="1.5" fill-opacity="{opacity:g}"')

    def cells(self, x, y, numbers, kind, width=20):
        """Draw a vector of few numbers."""
        for place, number in enumerate(numbers):
            self.rect(x + width * place, y, width - 1, 17, f"pm-{kind}", ' fill-opacity="0.45"')
            self.text(x + width * place + width / 2, y + 13, str(number), "pm-in", "middle")

    def axis(self, x, y, width):
        self.line((x, y), (x + width, y), "thin", has_head=False)


def word(title):
    """Register a function that draws the picture of a word; its docstring is the description."""
    return lambda draw: DRAWINGS.append((title, draw)) or draw


# ---- graph and mask


@word("token")
def token(picture):
    """Three words, each of which is a node below it."""
    for x, width, text in ((8, 58, "Llamas"), (72, 32, "do"), (110, 42, "not")):
        picture.rect(x, 16, width, 24, "pm-box", ' rx="4"')
        picture.text(x + width / 2, 32, text, "", "middle")
        picture.line((x + width / 2, 42), (x + width / 2, 60), "thin", has_head=False)
        picture.node(x + width / 2, 70)


@word("edge")
def edge(picture):
    """An arrow from one node to another."""
    picture.line((36, 34), (124, 34), "hot", RADIUS + 3)
    for x, name in ((36, "src"), (124, "dst")):
        picture.node(x, 34)
        picture.text(x, 60, name, "", "middle")
    picture.text(80, 84, "dst attends to src", "pm-soft", "middle")


@word("sender")
def sender(picture):
    """An orange node on the left with arrows to three others."""
    picture.node(32, 48, "", "gl-message")
    for y in (18, 48, 78):
        picture.node(128, y)
        picture.line((32, 48), (128, y), "hot", RADIUS + 3)


@word("receiver")
def receiver(picture):
    """A blue node on the right with arrows from three others."""
    picture.node(128, 48, "", "gl-pattern")
    for y in (18, 48, 78):
        picture.node(32, y)
        picture.line((32, y), (128, 48), "blue", RADIUS + 3)


@word("mask")
def mask(picture):
    """A table with a row for each receiver and a column for each sender; the cells of edges are filled."""
    with picture.graph("ga.patterns.causal(4)"):
        picture.mask(62, 26, CAUSAL, hot=[(0, 3)])
    picture.text(92, 19, "senders", "pm-soft", "middle")
    picture.text(56, 60, "receivers", "pm-soft", "end")


@word("adjacency matrix")
def adjacency_matrix(picture):
    """The table of a mask, and beside it the transposed table, with senders in rows."""
    for x, name, transposed in ((12, "mask", False), (88, "adjacency", True)):
        with picture.graph("ga.patterns.causal(4)"):
            picture.mask(x, 26, CAUSAL, hot=[(0, 3)], transposed=transposed)
        picture.text(x + 30, 19, name, "pm-soft", "middle")


@word("causal")
def causal(picture):
    """Arcs from every token to itself and to all later tokens."""
    places = picture.nodes()
    with picture.graph("ga.patterns.causal(4)"):
        picture.arcs(places, CAUSAL)


@word("window")
def window(picture):
    """Arcs from every token to itself and to the next one only."""
    places = picture.nodes()
    with picture.graph("ga.patterns.window(4, 2)"):
        picture.arcs(places, WINDOW)


@word("sparse")
def sparse(picture):
    """A large mask in which few cells are filled."""
    edges = [(src, dst) for dst in range(8) for src in range(8) if dst - 1 <= src <= dst]
    with picture.graph("ga.patterns.window(8, 2)"):
        picture.mask(10, 8, edges, 8, 10)
    picture.number(124, 36, "15", "ga.patterns.window(8, 2).num_edges")
    picture.text(124, 52, "of 64 pairs", "pm-soft", "middle")


@word("in-edge")
def in_edge(picture):
    """Three of six edges end at the last token and are orange."""
    places = picture.nodes()
    edges = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    with picture.graph("ga.patterns.causal(4) - ga.patterns.self_loops(4)"):
        picture.arcs(places, edges, [edge for edge in edges if edge[1] == 3])


# ---- one head


def project(picture, matrix, kind, name, text, width=16):
    """Draw a state, the matrix that it passes, and the vector that comes out."""
    left = 36 - width / 2
    picture.bar(left, 34, 44, 14, "state")
    picture.text(left + 22, 27, "state", "pm-soft", "middle")
    picture.line((left + 48, 41), (left + 84, 41))
    picture.text(left + 65, 33, matrix, "", "middle")
    picture.bar(left + 88, 34, width, 14, kind)
    picture.text(left + 88 + width / 2, 27, name, "pm-bold", "middle")
    picture.text(80, 78, text, "pm-soft", "middle")


@word("query")
def query(picture):
    """A state times the matrix W_Q is a short blue vector q."""
    project(picture, "W_Q", "pattern", "q", "what I look for")


@word("key")
def key(picture):
    """A state times the matrix W_K is a short blue vector k."""
    project(picture, "W_K", "pattern", "k", "what I offer")


@word("value")
def value(picture):
    """A state times the matrix W_V is a short orange vector v."""
    project(picture, "W_V", "message", "v", "what I send")


@word("logit")
def logit(picture):
    """A query and a key of four numbers, and their scaled dot product 1.5."""
    picture.text(34, 25, "q", "pm-bold", "end")
    picture.cells(42, 12, [1, 0, 2, 1], "pattern")
    picture.text(34, 49, "k", "pm-bold", "end")
    picture.cells(42, 36, [1, 3, 1, 0], "pattern")
    picture.text(112, 78, "q · k / √4 =", "pm-math", "end")
    picture.number(
        118, 78, "1.5", "torch.tensor([1, 0, 2, 1]) @ torch.tensor([1, 3, 1, 0]) / 4**0.5", "start"
    )


@word("scale")
def scale(picture):
    """Dot products of width 64 spread as far as 8; divided by the root of 64, they spread as far as 1."""
    for y, half, text, formula in ((26, 56, "±8", "64**0.5"), (62, 7, "±1", "64**0.5 / 64**0.5")):
        picture.bar(68 - half, y, 2 * half, 10, "weight")
        picture.axis(8, y + 12, 120)
        picture.number(140, y + 10, text, formula)
    picture.text(68, 20, "q · k", "pm-soft", "middle")
    picture.text(68, 90, "q · k / √d", "pm-soft", "middle")


@word("softmax")
def softmax(picture):
    """The logits 1, 2 and 0 become the weights 0.24, 0.67 and 0.09."""
    for row, (logit, weight) in enumerate(((1, "0.24"), (2, "0.67"), (0, "0.09"))):
        y = 26 + 22 * row
        picture.text(22, y + 11, str(logit), "", "middle")
        picture.bar(64, y, 58 * float(weight), 14, "weight")
        picture.number(140, y + 11, weight, f"torch.tensor([1.0, 2, 0]).softmax(0)[{row}]")
    picture.line((34, 54), (56, 54))
    picture.text(22, 18, "logits", "pm-soft", "middle")
    picture.text(130, 18, "weights", "pm-soft", "middle")


WEIGHTS = (0.2, 0.5, 0.3)


@word("weight")
def weight(picture):
    """Three arrows into one receiver, as thick as their weights 0.2, 0.5 and 0.3, whose sum is 1."""
    picture.node(118, 48, "", "gl-pattern")
    for y, share in zip((16, 48, 80), WEIGHTS, strict=True):
        picture.node(28, y, str(share)[1:])
        picture.line((28, y), (118, 48), "hot", RADIUS + 3, width=8 * share)
    picture.text(116, 82, "sum", "pm-soft", "middle")
    picture.number(138, 82, "1", "0.2 + 0.5 + 0.3")


@word("message")
def message(picture):
    """A state times the matrix W_M is an orange vector as wide as a state."""
    project(picture, "W_M", "message", "message", "as wide as a state", 44)


@word("pattern")
def pattern(picture):
    """A state times the matrix W_P is a blue vector as wide as a state."""
    project(picture, "W_P", "pattern", "pattern", "as wide as a state", 44)


@word("aggregate")
def aggregate(picture):
    """Three vectors, times their weights, are added up to one."""
    for y, share in zip((14, 42, 70), WEIGHTS, strict=True):
        picture.text(12, y + 11, f"{share} ×", "", "start")
        picture.bar(46, y, 34, 13, "message", 0.35 + share)
        picture.line((84, y + 6), (106, 44 + (y - 42) / 4), "thin", has_head=False)
    picture.text(114, 54, "Σ", "pm-bold", "middle")
    picture.line((122, 48), (134, 48))
    picture.bar(138, 41, 16, 14, "message")


@word("update")
def update(picture):
    """The new state is the old state plus the update."""
    for x, kind, text in ((8, "state", "old"), (62, "message", "update"), (116, "state", "new")):
        picture.bar(x, 38, 36, 15, kind)
        picture.text(x + 18, 72, text, "pm-soft", "middle")
    picture.bar(116, 47, 36, 6, "message")
    picture.text(53, 50, "+", "", "middle")
    picture.text(107, 50, "=", "", "middle")


@word("head")
def head(picture):
    """Three stacked boxes, each half blue and half orange; their outputs are added."""
    for number in (2, 1, 0):
        x, y = 16 + 9 * number, 34 - 9 * number
        picture.rect(x, y, 88, 40, "pm-box", ' rx="4"')
        picture.bar(x + 5, y + 5, 37, 30, "pattern", 0.75)
        picture.bar(x + 46, y + 5, 37, 30, "message", 0.75)
    picture.text(40, 88, "whom", "pm-soft", "middle")
    picture.text(82, 88, "what", "pm-soft", "middle")
    picture.line((126, 46), (138, 46))
    picture.text(146, 51, "Σ", "pm-bold", "middle")


@word("rank")
def rank(picture):
    """A tall thin matrix times a flat one is a square matrix of the same rank."""
    picture.bar(10, 20, 12, 52, "pattern", 0.7)
    picture.text(28, 50, "·", "pm-bold", "middle")
    picture.bar(34, 40, 52, 12, "pattern", 0.7)
    picture.text(93, 50, "=", "", "middle")
    picture.bar(100, 20, 52, 52, "pattern", 0.35)
    picture.text(16, 88, "d", "pm-soft", "middle")
    picture.text(126, 88, "rank ≤ d", "pm-soft", "middle")


# ---- the model


@word("state")
def state(picture):
    """A node holds a vector of numbers."""
    picture.node(28, 44)
    picture.text(28, 72, "not", "", "middle")
    picture.line((40, 44), (56, 44), "thin", has_head=False)
    picture.cells(60, 35, ["0.3", "−1", "0.7"], "state", 28)


@word("residual stream")
def residual_stream(picture):
    """Three vertical lines, one for each token; what blocks write is added to them."""
    for x in (40, 80, 120):
        picture.line((x, 90), (x, 8))
    for x, y in ((80, 58), (120, 58)):
        picture.line((x - 40, 74), (x - 4, y + 2), "hot")
    picture.line((120, 42), (142, 42), has_head=False)
    picture.line((142, 42), (142, 28), has_head=False)
    picture.line((142, 28), (124, 28))
    for x, y in ((80, 58), (120, 58), (120, 28)):
        picture.parts.append(f'<circle class="gl-node" cx="{x}" cy="{y}" r="5"/>')
        picture.text(x, y + 4, "+", "pm-in", "middle")


@word("MLP")
def mlp(picture):
    """Three numbers are connected with five, and these with three."""
    layers = [
        [(x, 48 + 18 * (place - (count - 1) / 2)) for place in range(count)]
        for x, count in ((34, 3), (80, 5), (126, 3))
    ]
    for left, right in pairwise(layers):
        for start in left:
            for end in right:
                picture.line(start, end, "thin", has_head=False)
    for number, layer in enumerate(layers):
        for x, y in layer:
            look = "gl-message" if number == 1 else "gl-node"
            picture.parts.append(f'<circle class="{look}" cx="{x}" cy="{y:g}" r="5"/>')


@word("norm")
def norm(picture):
    """Three vectors of different lengths become equally long."""
    for y, length in ((24, 20), (46, 50), (68, 34)):
        picture.line((12, y), (12 + length, y))
        picture.line((104, y), (138, y), "blue")
    picture.line((74, 46), (92, 46), "thin")


@word("embedding")
def embedding(picture):
    """One row of a table with a row for each token is the first state."""
    for row in range(5):
        picture.bar(48, 10 + 16 * row, 40, 13, "state", 1.0 if row == 2 else 0.35)
    picture.text(42, 53, "not", "", "end")
    picture.line((92, 48), (108, 48))
    picture.bar(112, 42, 40, 13, "state")


@word("unembedding")
def unembedding(picture):
    """A state times the matrix W_U is one number for each word."""
    picture.bar(8, 42, 36, 13, "state")
    picture.line((48, 48), (76, 48))
    picture.text(62, 40, "W_U", "", "middle")
    for y, text, length in ((16, "do", 8), (42, "not", 30), (68, "output", 14)):
        picture.text(118, y + 11, text, "pm-soft", "end")
        picture.bar(122, y, length, 13, "weight")


@word("loss")
def loss(picture):
    """The curve of minus the logarithm of a probability; at one half it is 0.69."""
    points = [(24 + 110 * p, 78 - 24 * -math.log(p)) for p in (step / 40 for step in range(3, 41))]
    picture.parts.append(
        f'<polyline class="gl-line blue" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
    )
    picture.axis(24, 78, 116)
    picture.parts.append(f'<circle class="gl-message" cx="79" cy="{78 - 24 * math.log(2):.1f}" r="4"/>')
    picture.text(84, 40, "−log 0.5 =", "pm-soft", "start")
    picture.number(84, 54, "0.69", "-torch.tensor(0.5).log()", "start")
    picture.text(79, 91, "0.5", "pm-soft", "middle")
    picture.text(134, 91, "1", "pm-soft", "middle")


@word("rotation")
def rotation(picture):
    """The same vector at the positions 0, 1 and 2, turned by a fixed angle at each step."""
    for position, angle in enumerate((-0.2, -0.9, -1.6)):
        end = 56 + 58 * math.cos(angle), 82 + 58 * math.sin(angle)
        picture.line((56, 82), end, "blue")
        picture.text(56 + 72 * math.cos(angle), 84 + 68 * math.sin(angle), str(position), "", "middle")


@word("cache")
def cache(picture):
    """The keys and values of the tokens so far; those of a new token are appended."""
    for row, (name, kind) in enumerate((("k", "pattern"), ("v", "message"))):
        picture.text(16, 38 + 26 * row, name, "pm-bold", "middle")
        for token in range(5):
            picture.bar(28 + 25 * token, 26 + 26 * row, 20, 15, kind, 1.0 if token == 4 else 0.55)
    picture.rect(125, 22, 26, 49, "gl-new", ' rx="4"')
    picture.text(138, 88, "new", "pm-soft", "middle")


# ---- across layers


def unrolled(picture, edges, tokens, layers, looks=None, hot=()):
    """Draw the tokens once for each layer, from the bottom, with the edges from one row to the next."""
    pitch, rise = 128 / (tokens - 1), 66 / layers
    places = {
        (token, layer): (16 + pitch * token, 80 - rise * layer)
        for token in range(tokens)
        for layer in range(layers + 1)
    }
    for layer in range(layers):
        for src, dst in edges:
            look = "hot" if (src, dst, layer) in hot else "thin"
            picture.line(places[src, layer], places[dst, layer + 1], look, 8, has_head=look == "hot")
    for place, (x, y) in places.items():
        look = (looks or {}).get(place, "gl-node")
        picture.parts.append(f'<circle class="{look}" cx="{x:g}" cy="{y:g}" r="6"/>')


@word("path")
def path(picture):
    """Two layers of a window of two; two orange edges lead from the second token to the last."""
    unrolled(picture, WINDOW, 4, 2, hot=[(1, 2, 0), (2, 3, 1)])


@word("reach")
def reach(picture):
    """Two layers of a window of two; the three tokens that reach the last one are blue."""
    looks = {(3, 2), (3, 1), (2, 1), (3, 0), (2, 0), (1, 0)}
    unrolled(picture, WINDOW, 4, 2, dict.fromkeys(looks, "gl-pattern"))


@word("influence")
def influence(picture):
    """After two layers, 0.06, 0.38 and 0.56 of a state come from the last three tokens."""
    for place, share in enumerate(("0.06", "0.38", "0.56")):
        x, exact = 62 + 38 * place, (1 / 16, 6 / 16, 9 / 16)[place]
        picture.bar(x - 10, 66 - 72 * exact, 20, 72 * exact, "weight")
        picture.number(
            x, 60 - 72 * exact, share, f"ga.analyse.influence(ga.patterns.window(4, 2), 2)[3, {place + 1}]"
        )
    for place in range(4):
        picture.node(24 + 38 * place, 80, "", "gl-pattern" if place == 3 else "gl-node")


@word("relay")
def relay(picture):
    """An edge from the first token to the second in layer 1, and one from there to the third in layer 2."""
    places = picture.nodes(66, ["", "", ""], 28, 52, {1: "gl-message"})
    for layer in (1, 2):
        picture.arc(places, layer - 1, layer, "hot")
        picture.text(2 + 52 * layer, 34, f"layer {layer}", "pm-soft", "middle")


# ---- what heads do, and how to find out


@word("sink")
def sink(picture):
    """Orange arcs lead from the first token to all later ones."""
    places = picture.nodes(74, looks={0: "gl-message"})
    with picture.graph("ga.patterns.causal(4) & ga.patterns.sinks(4, 1)"):
        picture.arcs(places, [(0, token) for token in range(4)], [(0, token) for token in range(4)])


@word("induction head")
def induction_head(picture):
    """In the text a b c a, the second a attends to the b that followed the first one."""
    places = picture.nodes(72, "abca", looks={1: "gl-message"})
    picture.arc(places, 0, 1)
    picture.arc(places, 1, 3, "hot")
    picture.text(42, 40, "layer 0", "pm-soft", "middle")
    picture.text(98, 24, "layer 1", "pm-soft", "middle")


@word("cut")
def cut(picture):
    """Three edges have the weights 0.6, 0.2 and 0.2; without the last one, the others have 0.75 and 0.25."""
    picture.node(80, 48, "", "gl-pattern")
    rows = (
        (16, "0.6", "0.75", "0.6 / (1 - 0.2)"),
        (48, "0.2", "0.25", "0.2 / (1 - 0.2)"),
        (80, "0.2", "0", "0.0"),
    )
    for y, before, after, formula in rows:
        picture.text(18, y + 4, before, "", "middle")
        picture.line((34, y), (80, 48), "cut" if after == "0" else "hot", 11, has_head=after != "0")
        picture.number(132, y + 4, after, formula)
    picture.line((96, 48), (112, 48), "thin")
    picture.line((50, 60), (60, 76), "red", has_head=False)


@word("leak")
def leak(picture):
    """A red arc leads backwards, from the last token to the second one."""
    places = picture.nodes()
    picture.arcs(places, [(0, 1), (1, 2), (2, 3)])
    picture.arc(places, 3, 1, "red")


def files():
    """Return the text of each picture by the name of its file."""
    return draw_files(
        (SmallPicture(title.lower().replace(" ", "-"), title, describe(draw)), draw)
        for title, draw in DRAWINGS
    )


if __name__ == "__main__":
    write_files(FOLDER, files())
