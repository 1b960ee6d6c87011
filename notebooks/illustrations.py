"""Draw the six illustrations of *Patterns and Messages*, part 2, by Chris McCormick, in our own way, as SVG files.

``python notebooks/illustrations.py`` writes docs/illustrations/*.svg. ``tests/test_illustrations.py`` evaluates each
formula as it stands in a picture. The sizes are those of Llama 3 8B.
"""

import math
import re
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "illustrations"
WIDTH, HEADS, KV_HEADS, HEAD_WIDTH = 4096, 32, 8, 128
WORDS = ["Llamas", "do", "not", "output", "words"]
WEIGHTS = [0.08, 0.21, 0.06, 0.51, 0.14]  # invented; their sum is 1
DRAWINGS = []  # title and function of each picture

PAGE = 560  # the width of each picture
LONG = 224  # the width of 4096 numbers, so that 128 are 7 wide
ROW, PITCH = 16, 19  # the height of one vector, and the distance of two
LEFT, RIGHT = 24, 312  # where the two columns begin
SIZES = f"Llama 3 8B: width {WIDTH}, {HEADS} heads, {KV_HEADS} key-value heads, head width d {HEAD_WIDTH}.\n"
NOTE = "Widths are to scale. A vector is one number high: it is drawn 16 high,\nsince to scale it could not be seen."
AREA = "Both sides of each matrix are to scale, so its area is its number of\nparameters. A vector is one number high: it is drawn 16 high."

STYLE = """
.pm{font-family:system-ui,sans-serif;font-size:15px}.pm text{fill:#18181b}.pm .pm-soft{fill:#52525b;font-size:13px}
.pm .pm-bold{font-weight:600}.pm .pm-in{font-size:13px}.pm .pm-on-pattern{fill:#fff}.pm .pm-on-message{fill:#18181b}
.pm .pm-math text{font-family:Cambria Math,STIX Two Math,Georgia,serif;font-size:17px}.pm .pm-small text{font-size:14px}
.pm-paper{fill:#fff;stroke:#d4d4d8}.pm-box{fill:#f4f4f5;stroke:#a1a1aa}.pm-line{fill:none;stroke:#52525b;stroke-width:1.5}
.pm-head{fill:#52525b}.pm-state{fill:#c4c4cb}.pm-pattern{fill:#0072b2}.pm-message{fill:#e69f00}.pm-weight{fill:#009e73}
.pm-under{fill:#fff}.pm-matrix{fill-opacity:.3;stroke-width:1.5}.pm-matrix.pm-pattern{stroke:#0072b2}
.pm-matrix.pm-message{stroke:#e69f00}.pm-new{fill:none;stroke:#18181b;stroke-width:2.5}
@media(prefers-color-scheme:dark){.pm text{fill:#fafafa}.pm .pm-soft{fill:#b4b4bd}.pm-paper{fill:#18181b;stroke:#3f3f46}
.pm-box{fill:#27272a;stroke:#71717a}.pm-line{stroke:#b4b4bd}.pm-head{fill:#b4b4bd}.pm-state{fill:#5f5f69}
.pm-new{stroke:#fafafa}.pm-under{fill:#18181b}.pm-matrix{fill-opacity:.4}.pm-matrix.pm-pattern{stroke:#56b4e9}}
"""


def typeset(text):
    """Return the markup of a text in which ``_`` begins a subscript, as in ``W_Q``."""
    subscript = r'<tspan class="pm-sub" dy="4" font-size="0.75em">\1</tspan><tspan dy="-4">\2</tspan>'
    return re.sub(r"_(heads|\w)([^_]*)", subscript, escape(text))


class Picture:
    """The elements of an illustration, in the order in which they are drawn."""

    # The width of the drawing, its scale in the file, its class, and the style sheet of the class.
    page, zoom, look, style = PAGE, 1, "pm", STYLE

    def __init__(self, name, title, description):
        self.name, self.title, self.description, self.parts = name, title, description, []
        self.text(LEFT, 32, title, "pm-bold")

    def text(self, x, y, text, style="", anchor="start"):
        for number, line in enumerate(text.split("\n")):
            place = f'x="{x:g}" y="{y + 18 * number:g}" text-anchor="{anchor}"'
            self.parts.append(f'<text class="{style}" {place}>{typeset(line)}</text>')

    def rect(self, x, y, width, height, style, extra=""):
        size = f'x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}"'
        self.parts.append(f'<rect class="{style}" {size}{extra}/>')

    def vector(self, x, y, numbers, kind, word="", width=None, height=ROW, opacity=1.0):
        """Draw a vector to scale, or ``width`` wide, which breaks the scale."""
        extra = f' data-numbers="{numbers}" fill-opacity="{opacity:.2f}"'
        self.rect(x, y, width or numbers * LONG / WIDTH, height, f"pm-vector pm-{kind}", extra)
        if word:
            self.text(x + 7, y + 12.5, word, f"pm-in pm-on-{kind}" if opacity > 0.9 else "pm-in")

    def rows(self, x, y, numbers, kind, words=WORDS, width=None, height=ROW):
        """Draw one vector for each token, with its word if it fits."""
        for number, word in enumerate(words):
            word = word if numbers == WIDTH and not width else ""
            self.vector(x, y + (height + 3) * number, numbers, kind, word, width, height)

    def weights(self, y, sign, length):
        """Draw the weights as bars, between the columns and with a sign before the rows on the right."""
        for number, weight in enumerate(WEIGHTS):
            self.vector(RIGHT - 14 - length * weight, y + PITCH * number, 1, "weight", width=length * weight)
            self.text(RIGHT - 7, y + PITCH * number + 13, sign, "pm-soft", "middle")

    def matrix(self, x, y, rows, columns, kind, name):
        """Draw a matrix to scale; a large one has its name and shape inside."""
        width, height = columns * LONG / WIDTH, rows * LONG / WIDTH
        self.rect(x, y, width, height, f"pm-matrix pm-{kind}", f' data-matrix="{name} {rows} {columns}"')
        if rows == columns:
            self.text(x + width / 2, y + 76, name, "", "middle")
            label = f"{rows} × {columns}\nrank at most {HEAD_WIDTH}"
            self.text(x + width / 2, y + 98, label, "pm-soft", "middle")

    def operation(self, x, y, width, kind, name, rows="", columns=""):
        """Draw a matrix as a box of any size, with its name and shape."""
        self.rect(x, y, width, 28, "pm-under", ' rx="6"')
        self.rect(x, y, width, 28, f"pm-matrix pm-{kind}", f' rx="6" data-matrix="{name} {rows} {columns}"')
        self.text(x + width / 2, y + 19, f"{name}: {rows} × {columns}" if rows else name, "pm-in", "middle")

    def formula(self, x, y, width, formula, style="pm-math", arrow=False):
        """Draw a formula in a box, below an arrow if asked for. The test reads the drawn text, and evaluates it."""
        if arrow:
            self.arrow((x + width / 2, y - 17), (x + width / 2, y - 2))
        self.parts.append(f'<g class="{style}" data-formula="{escape(formula)}">')
        self.rect(x, y, width, 30, "pm-box", ' rx="6"')
        self.text(x + width / 2, y + 20, formula, "", "middle")
        self.parts.append("</g>")

    def arrow(self, *points, has_head=True):
        """Draw a line through the points, with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="pm-line" points="{path}"/>')
        (x, y), (end_x, end_y) = points[-2:]
        angle = math.atan2(end_y - y, end_x - x)
        sides = [(end_x - 8 * math.cos(angle + t), end_y - 8 * math.sin(angle + t)) for t in (-0.45, 0.45)]
        head = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(end_x, end_y), *sides])
        self.parts.append(f'<polygon class="pm-head" points="{head}"/>' if has_head else "")

    def end_of_block(self, y):
        """Draw the sum over all heads and the residual."""
        self.text(LEFT, y + 10, "x_q, the residual", "pm-soft")
        self.text(RIGHT, y + 10, f"the outputs o of all {HEADS} heads", "pm-soft")
        self.vector(LEFT, y + 22, WIDTH, "state", WORDS[-1])
        self.text((LEFT + LONG + RIGHT) / 2, y + 36, "+", "pm-bold", "middle")
        for offset, opacity in ((8, 0.4), (4, 0.7), (0, 1.0)):
            self.vector(RIGHT - 4 + offset, y + 28 - offset, WIDTH, "message", opacity=opacity)
        self.arrow((136, y + 40), (136, y + 60))
        self.arrow((424, y + 46), (424, y + 60))
        self.formula(LEFT, y + 62, 512, "x′ = x_q + Σ_heads(α M)")
        self.arrow((280, y + 93), (280, y + 108))
        self.vector(168, y + 110, WIDTH, "state", "x′, the new state")

    def footer(self, y, notes):
        """Write the sizes and the remarks on the scale, and end the picture below them."""
        self.text(LEFT, y, SIZES + notes, "pm-soft")
        self.height = y + 18 * (notes.count("\n") + 1) + 18

    def svg(self):
        """Return the text of the file."""
        size = f'viewBox="0 0 {self.page} {self.height:g}" width="{self.zoom * self.page:g}" height="{self.zoom * self.height:g}"'
        parts = "\n".join(self.parts)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" class="{self.look}" {size} role="img" aria-labelledby="{self.name}-title">
<title id="{self.name}-title">{escape(self.title)}</title>
<desc>{escape(self.description)}</desc>
<style>{self.style}</style>
<rect class="pm-paper" x="0.5" y="0.5" width="{self.page - 1}" height="{self.height - 1:g}" rx="10"/>
{parts}
</svg>
"""


def illustration(title):
    """Register a function that draws a picture; its docstring is the description for those who cannot see it."""
    return lambda draw: DRAWINGS.append((title, draw)) or draw


@illustration("One head is two processes that meet once")
def two_processes(picture):
    """Left: states become queries and keys, and these become five weights. Right: states become values,
    and these become five messages. The weighted sum of the messages, added up over 32 heads, goes to the
    receiver's state.
    """
    picture.text(280, 60, f"X: five states of {WIDTH} numbers; x_q is the last", "pm-soft", "middle")
    picture.rows(168, 70, WIDTH, "state")
    picture.rect(168, 70 + 4 * PITCH, LONG, ROW, "pm-new")
    picture.text(LEFT, 106, "whom to\nattend to", "pm-bold")
    picture.text(536, 106, "what is\nsent", "pm-bold", "end")
    for points in ([(168, 154), (84, 154)], [(214, 162)], [(392, 116), (424, 116)]):
        picture.arrow(*points, (points[-1][0], 190))
    columns = (84, "pattern", "Q", 1), (214, "pattern", "K", 5), (424, "message", "V", 5)
    for center, kind, name, count in columns:
        picture.operation(center - 60, 192, 120, kind, f"W_{name}", WIDTH, HEAD_WIDTH)
        picture.arrow((center, 220), (center, 238))
        picture.rows(center - 3.5, 240, HEAD_WIDTH, kind, WORDS[-count:])
        picture.text(center + 12, 253, f"{name if count > 1 else 'q'}, {count} × {HEAD_WIDTH}", "pm-soft")
        picture.arrow((center, 239 + PITCH * count), (center, 352))
    picture.formula(LEFT, 354, 250, "α = softmax(q Kᵀ / √d)")
    picture.operation(364, 354, 120, "message", "W_O", HEAD_WIDTH, WIDTH)
    picture.arrow((149, 385), (149, 469), (238, 469))
    picture.text(LEFT, 489, "α: five weights with the sum 1", "pm-soft")
    picture.arrow((424, 382), (424, 402))
    picture.text(436, 399, f"M, 5 × {WIDTH}", "pm-soft")
    picture.weights(404, "×", 110)
    picture.rows(RIGHT, 404, WIDTH, "message")
    picture.formula(RIGHT, 513, LONG, "o = α M", arrow=True)
    picture.arrow((168, 146), (12, 146), (12, 590), (LEFT, 590), has_head=False)
    picture.end_of_block(560)
    picture.footer(714, "Four heads share one W_K and one W_V.\n" + NOTE)


def projection(picture, kind, result, words, first, second, square):
    """Draw states times two thin matrices, then states times one square matrix; return the y below."""
    middle, height, count = LEFT + LONG + 28, len(words) * PITCH, len(words)
    state = "X" if count > 1 else "x_q"
    for top in (50, 50 + LONG + height + 74):
        below = top + LONG + 16
        for x, look, name in ((LEFT, "state", state), (RIGHT, kind, result)):
            picture.rows(x, below, WIDTH, look, words)
            picture.text(x, below + height + 12, f"{name}, {count} × {WIDTH}", "pm-soft")
    picture.matrix(middle, 50, WIDTH, HEAD_WIDTH, kind, first)
    picture.matrix(RIGHT, 50 + LONG + 1, HEAD_WIDTH, WIDTH, kind, second)
    picture.rows(middle, 50 + LONG + 16, HEAD_WIDTH, kind, words)
    picture.text(middle - 10, 190, f"{first}:\n{WIDTH} × {HEAD_WIDTH}", anchor="end")
    picture.text(RIGHT, 50 + LONG - 10, f"{second}: {HEAD_WIDTH} × {WIDTH}")
    picture.matrix(RIGHT, top, WIDTH, WIDTH, kind, square)
    picture.text(LEFT, 66, "Two thin matrices", "pm-bold")
    picture.text(LEFT, 88, f"{2 * WIDTH * HEAD_WIDTH:,} multiplications\nfor each {kind}", "pm-soft")
    picture.text(RIGHT, 66, f"Between them is a bottleneck\nof {HEAD_WIDTH} numbers.", "pm-soft")
    picture.text(LEFT, top + 14, "One square matrix", "pm-bold")
    picture.text(LEFT, top + 36, f"{WIDTH * WIDTH:,} multiplications\nfor each {kind}", "pm-soft")
    picture.formula(RIGHT, 130, LONG, f"{result} = {state} {first} {second}")
    picture.formula(LEFT, top + 90, LONG, f"{square} = {first} {second}")
    picture.formula(LEFT, top + 130, LONG, f"{result} = {state} {square}")
    return below + height + 18


@illustration("Value and output merge into the message projection")
def message_projection(picture):
    """Above: states times the thin matrix W_V are short values, and these times the flat matrix W_O are
    messages as wide as a state. Below: states times one square matrix W_M are the same messages.
    """
    y = projection(picture, "message", "M", WORDS, "W_V", "W_O", "W_M")
    picture.footer(y + 24, AREA)


@illustration("Query and key merge into the pattern projection")
def pattern_projection(picture):
    """Above: a state times the thin matrix W_Q times the flat W_K transposed is a pattern. In the middle:
    one square matrix W_P makes it. Below: the pattern is compared with all states, which gives five
    weights.
    """
    y = projection(picture, "pattern", "p", WORDS[-1:], "W_Q", "W_Kᵀ", "W_P")
    picture.text(LEFT, y + 36, "The pattern p is compared\nwith all states X:", "pm-bold")
    picture.formula(LEFT, y + 72, LONG - 36, "α = softmax(p Xᵀ / √d)", "pm-math pm-small")
    picture.weights(y + 18, "·", 80)
    picture.rows(RIGHT, y + 18, WIDTH, "state")
    picture.footer(y + 142, AREA)


@illustration("Step 1: a new token enters the cache")
def cache_a_message(picture):
    """The state of a new token makes a pattern and a message, the last rows of the two caches."""
    picture.text(280, 60, "x_q, the state of the new token", "pm-soft", "middle")
    picture.vector(168, 70, WIDTH, "state", WORDS[-1])
    columns = (LEFT, "pattern", "p", "W_Pᵀ", "P"), (RIGHT, "message", "m", "W_M", "M")
    for x, kind, result, name, cached in columns:
        center = x + LONG / 2
        picture.arrow((168 if x == LEFT else 392, 78), (center, 78), (center, 100))
        picture.matrix(x, 104, WIDTH, WIDTH, kind, name)
        picture.formula(x + 20, 250, LONG - 40, f"{result} = x_q {name}")
        picture.arrow((center, 328), (center, 348))
        picture.vector(x, 350, WIDTH, kind, WORDS[-1])
        picture.arrow((center, 370), (center, 394))
        picture.text(center + 10, 388, "append", "pm-soft")
        picture.text(x, 414, f"{cached}: cached {kind}s, 5 × {WIDTH}", "pm-soft")
        picture.rows(x, 424, WIDTH, kind)
        picture.rect(x, 424 + 4 * PITCH, LONG, ROW, "pm-new")
    sizes = f"For each token, {HEADS} heads keep {HEADS * 2 * WIDTH:,} numbers. Keys and values would be\n"
    sizes += f"{KV_HEADS * 2 * HEAD_WIDTH:,}. A cached pattern is a sender's, hence the transpose of W_P.\n"
    picture.footer(546, sizes + NOTE)


@illustration("Steps 2 and 3: score the patterns, sum the messages")
def score_and_aggregate(picture):
    """Five cached patterns give five weights; the weighted messages, over 32 heads, go to the state."""
    picture.text(LEFT, 60, "x_q, the state of the new token", "pm-soft")
    picture.vector(LEFT, 70, WIDTH, "state", WORDS[-1])
    picture.arrow((136, 90), (136, 114))
    picture.text(146, 107, "five dot products", "pm-soft")
    picture.text(LEFT, 132, f"P: cached patterns, 5 × {WIDTH}", "pm-soft")
    picture.text(280, 132, "α", "", "middle")
    picture.text(RIGHT, 132, f"M: cached messages, 5 × {WIDTH}", "pm-soft")
    picture.rows(LEFT, 142, WIDTH, "pattern")
    picture.weights(142, "×", 84)
    for y, word, weight in zip(range(142, 999, PITCH), WORDS, WEIGHTS, strict=False):
        picture.vector(RIGHT, y, WIDTH, "message", word, opacity=0.18 + 1.6 * weight)
    picture.formula(LEFT, 254, LONG, "α = softmax(x_q Pᵀ / √d)")
    picture.text(LEFT, 304, "five weights with the sum 1", "pm-soft")
    picture.formula(RIGHT, 254, LONG, "o = α M", arrow=True)
    picture.arrow((424, 285), (424, 300))
    picture.vector(RIGHT, 302, WIDTH, "message", "o, the output of this head")
    picture.end_of_block(344)
    picture.footer(498, NOTE)


FORMS = {  # the formula, the matrices, their shorter side, what exists; for x_q|X|X: matrices and result
    "standard": ("(x_q W_Q (X W_K)ᵀ / √d) X W_V W_O", 4, HEAD_WIDTH, "no p, no M", "W_Q q|W_K K|W_V V"),
    "refactored": ("(x_q W_Q W_Kᵀ Xᵀ / √d) (X W_V W_O)", 4, HEAD_WIDTH, "p, M", "W_Q W_Kᵀ p||W_V W_O M"),
    "merged": ("(x_q W_P Xᵀ / √d) (X W_M)", 2, WIDTH, "p, M", "W_P p||W_M M"),
}
KINDS = "pattern", "pattern", "message"
WIDE, NARROW, FLAT = 48, 10, 10  # the sizes of vectors where the scale is broken


def draw_lane(picture, center, stop, names, kind, words):
    """Draw states, the matrices that they pass, and what comes out, if anything does."""
    *matrices, result = names.split() or [""]
    numbers, width = (HEAD_WIDTH, NARROW) if result in "qKV" else (WIDTH, WIDE)
    picture.text(center, 84, "X" if len(words) > 1 else "x_q", "", "middle")
    picture.rows(center - WIDE / 2, 92, WIDTH, "state", words, WIDE, FLAT)
    picture.arrow((center, 90 + 13 * len(words)), (center, 264 if result else stop))
    for step, name in enumerate(matrices):
        picture.operation(center - 25, 170 + 40 * step, 50, kind, name)
    if result:
        picture.text(center + 8, 261, result, "pm-bold" if result in "pM" else "")
        picture.rows(center - width / 2, 266, numbers, kind, words, width, FLAT)
        picture.arrow((center, 264 + 13 * len(words)), (center, stop))


@illustration("Three forms of one head")
def three_forms(picture):
    """Standard: queries meet keys, values are mixed, and W_O comes last. Refactored: W_Q and W_K make a
    pattern, W_V and W_O make messages. Merged: one matrix makes the pattern, one the messages.
    """
    for number, (form, (formula, matrices, side, exist, lanes)) in enumerate(FORMS.items()):
        x, is_standard = LEFT + 174 * number, form == "standard"
        picture.text(x + 82, 62, form, "pm-bold", "middle")
        for lane, (kind, names) in enumerate(zip(KINDS, lanes.split("|"), strict=True)):
            stop, words = 426 if lane == 2 else 342, WORDS if lane else WORDS[-1:]
            draw_lane(picture, x + 27 + 55 * lane, stop, names, kind, words)
        boxes = [("s = q Kᵀ / √d" if is_standard else "s = p Xᵀ / √d", 112), ("α = softmax(s)", 112)]
        boxes += [("c = α V", 164), ("o = c W_O", 164)] if is_standard else [("o = α M", 164)]
        for step, (text, width) in enumerate(boxes, 1):
            y = 302 + 42 * step
            picture.formula(x, y, width, text, "pm-math pm-small")
            picture.arrow((x + width / 2, y + 30), (x + width / 2, 510 if step == len(boxes) else y + 41))
        picture.vector(x + 82 - WIDE / 2, 512, WIDTH, "message", width=WIDE, height=FLAT)
        picture.text(x + 112, 522, "o")
        y = 612 + 58 * number
        picture.text(LEFT, y, form, "pm-bold")
        what = f"{matrices * side * WIDTH:,} numbers in {matrices} matrices; {exist}"
        picture.text(536, y, what, "pm-soft", "end")
        picture.formula(LEFT, y + 8, 512, "o = softmax" + formula)
        picture.arrow((x + 82, 523), (x + 82, 536))
    picture.formula(LEFT, 538, 512, "x′ = x_q + Σ_heads(o)")
    picture.text(280, 587, f"in all forms: sum over {HEADS} heads, and residual", "pm-soft", "middle")
    scale = f"The scale is broken: {WIDTH} numbers are {WIDE} wide, {HEAD_WIDTH} are {NARROW}, not 1.5.\n"
    picture.footer(800, scale + "Blue: whom to attend to (pattern p). Orange: what is sent (messages M).")


def draw_files(pictures):
    """Call each drawing function on its picture, and return the text of each file by its name."""
    texts = {}
    for picture, draw in pictures:
        draw(picture)
        texts[f"{picture.name}.svg"] = picture.svg()
    return texts


def describe(draw):
    """Return the description of a drawing: its docstring, in one line."""
    return " ".join(draw.__doc__.split())


def write_files(folder, texts):
    """Write the files of a folder."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def files():
    """Return the text of each illustration by the name of its file."""
    return draw_files(
        (Picture(draw.__name__.replace("_", "-"), title, describe(draw)), draw) for title, draw in DRAWINGS
    )


if __name__ == "__main__":
    write_files(FOLDER, files())
