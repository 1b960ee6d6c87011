"""The live figures of the site: in node they compute what torch, the library and the chapter compute."""

import importlib
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_engine import tool

import gnn_attention as ga
from gnn_attention import analyse, cost, patterns

pytestmark = pytest.mark.slow  # node is started

ROOT = Path(__file__).parents[1]
ASK = """
const live = require(process.argv[1]);
const answer = ([figure, change]) => {
  const state = Object.assign(live.start(figure), change);
  if (change && !change.mask && figure.size) state.mask = live.mask(figure, state);
  const found = live.numbers(figure, state);
  if (figure.size > 16) delete state.mask;
  return { state, found };
};
const questions = JSON.parse(require("fs").readFileSync(0));
const text = JSON.stringify(questions.map(answer), (_, x) => (x === Infinity ? "inf" : x));
process.stdout.write(text);
"""


@pytest.fixture(scope="module")
def live():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("live")


def ask(questions):
    """States and numbers of figures whose state is changed, as the page computes them."""
    node = tool("node", shutil.which("node"), "apt-get install nodejs npm")
    command = [node, "-e", ASK, str(ROOT / "docs" / "site" / "live.js")]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def fits(number, words):
    """Whether a text holds the number, as it was rounded when it was printed."""
    for text in re.findall(r"\d[\d,]*(?:\.\d+)?%?", words):
        digits = text.replace(",", "").rstrip("%")
        unit = 0.01 if text.endswith("%") else 1.0
        half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
        if abs(number / unit - float(digits)) <= half * (1 + 1e-9):
            return True
    return False


def test_every_chapter_has_a_figure_that_starts_with_its_numbers(live):
    chapters, figures = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), live.figures()
    assert list(figures) == [path.stem.partition("_")[2] for path in chapters]
    answers = ask([(figure, None) for figure in figures.values()])
    for path, figure, answer in zip(chapters, figures.values(), answers, strict=True):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert sum('class="live"' in cell["source"] for cell in live.placed(path.stem, cells)) == 1
        outputs = [out for cell in cells for out in cell.get("outputs", [])]
        printed = "".join("".join(out.get("text", [])) for out in outputs)
        for number, words in figure["said"].items():
            assert words in printed, f"{path.stem} does not print {words!r}"
            assert fits(answer["found"][number], words), (path.stem, words, answer["found"][number])


def changes(figure, seed):
    """A state that a reader may reach: other sliders, or other cells."""
    rng, size = random.Random(seed), figure.get("size", 0)
    state = {one["name"]: rng.randint(one["least"], one["most"]) for one in figure.get("sliders", ())}
    if 0 < size <= 16:
        mask = [[int(rng.random() < 0.4) for _ in range(size)] for _ in range(size)]
        state |= {"mask": mask, "row": rng.randrange(size)}
    return state


def test_whatever_is_chosen_the_numbers_are_those_of_torch_and_the_library(live):
    questions = [(one, changes(one, seed)) for one in live.figures().values() for seed in range(6)]
    for (figure, _), answer in zip(questions, ask(questions), strict=True):
        expected = EXPECTED[figure["kind"]](figure, answer["state"])
        for name, value in expected.items():
            found = float(answer["found"][name])
            if found != value:  # both may be infinite
                assert_exact(found, float(value))


def attention(figure, state):
    """Weights by torch's softmax; a receiver of nobody has none."""
    mask, row = torch.tensor(state["mask"]).bool(), state["row"]
    logits = torch.tensor(figure["logits"], dtype=torch.float64).masked_fill(~mask, -torch.inf)
    table = logits.softmax(-1).nan_to_num(0.0)
    numbers = {f"w{src}": weight for src, weight in enumerate(table[row].tolist())}
    if "values" in figure:
        mixed = table[row] @ torch.tensor(figure["values"], dtype=torch.float64)
        numbers |= {f"z{channel}": value for channel, value in enumerate(mixed.tolist())}
    if "sender" in figure:
        numbers["column"] = table[:, figure["sender"]].sum().item()
    return numbers | {"largest": table[row].max().item(), "edges": mask.sum().item()}


def graph(figure, state):
    """Counts of a TokenGraph, and its reach."""
    size = figure["size"]
    if "window" in state and size > 16:
        made = patterns.window(size, state["window"]) | patterns.sinks(size, state.get("sinks", 0))
    else:
        made = ga.convert.from_mask(torch.tensor(state["mask"]).bool())
    edges = made.num_edges
    numbers = {"edges": edges, "each": edges / size, "share": edges / patterns.causal(size).num_edges}
    if "layers" in state:
        loops = patterns.self_loops(size)
        field = analyse.receptive_field(made | loops, state["row"], state["layers"])
        waits = [0 in analyse.receptive_field(made, size - 1, layers) for layers in range(size)]
        numbers |= {"reach": len(field), "back": state["row"] - min(field)}
        numbers["first"] = waits.index(True) if True in waits else math.inf
        if size <= 16:
            within = (made | loops) ** state["layers"]
            dst, src = within.mask().nonzero().T
            numbers |= {"hops": (made ** state["layers"]).num_edges, "pairs": within.num_edges - size}
            numbers["leaks"] = int((src > dst).sum())
    return numbers


def formula(figure, state):
    """What ``cost`` counts, or torch computes; of the other formulas the first state is tested alone."""
    if "width" in state:
        forms = [cost.of_form(form, state["width"], 1, state["d"]) for form in ("factored", "merged")]
        thin, square = (form.macs.send for form in forms)
        return {"thin": thin, "square": square, "ratio": square / thin}
    shares = torch.tensor([0.5, 0.0, 1.0, state.get("fit", 0.0)], dtype=torch.float64).softmax(0)
    return {f"w{at}": share for at, share in enumerate(shares.tolist()) if "fit" in state}


def spectrum(figure, state):
    """Of a diagonal matrix, by torch: the exponential of the entropy, the norm of the rest."""
    values = torch.tensor(figure["spectra"][state["matrix"]], dtype=torch.float64)
    shares = values.square() / values.square().sum()
    lost = (values[state["rank"] :].norm() / values.norm()).item()
    return {"effective": torch.special.entr(shares).sum().exp().item(), "error": lost}


EXPECTED = {"attention": attention, "graph": graph, "formula": formula, "spectrum": spectrum}
EXPECTED["points"] = lambda figure, state: figure["points"][state["point"]]
