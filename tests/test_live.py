"""The live figures of the site compute in node the numbers of their chapters and of torch."""

import importlib
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_engine import tool

# Each test starts node.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ASK = """
const live = require(process.argv[1]);
const answer = ([figure, change]) => {
  const state = Object.assign(live.start(figure), change);
  if (change && !change.mask && figure.size) state.mask = live.mask(figure, state);
  const numbers = live.numbers(figure, state);
  if (figure.size > 16) delete state.mask;
  return { state, numbers };
};
const answers = JSON.parse(require("fs").readFileSync(0)).map(answer);
process.stdout.write(JSON.stringify(answers, (_, x) => (x === Infinity ? "inf" : x)));
"""


@pytest.fixture(scope="module")
def live():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("live")


def ask(questions):
    """Return the state and numbers of each figure after a change, as the page computes them."""
    node = tool("node", shutil.which("node"), "apt-get install nodejs npm")
    command = [node, "-e", ASK, str(ROOT / "docs" / "site" / "live.js")]
    process = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def contains_number(text, number):
    """Return True if a text contains the number, rounded to the printed digits."""
    for match in re.findall(r"\d[\d,]*(?:\.\d+)?%?", text):
        digits = match.replace(",", "").rstrip("%")
        unit = 0.01 if match.endswith("%") else 1.0
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
        assert sum('class="live"' in cell["source"] for cell in live.insert_figure(path.stem, cells)) == 1
        outputs = [out for cell in cells for out in cell.get("outputs", [])]
        output_text = "".join("".join(out.get("text", [])) for out in outputs)
        for name, text in figure["said"].items():
            assert text in output_text, f"{path.stem} does not print {text!r}"
            number = answer["numbers"][name]
            assert contains_number(text, number), (path.stem, text, number)


def test_whatever_cells_are_chosen_the_weights_are_those_of_torch(live):
    """The figures compute the weights of torch for random masks; an isolated receiver has weights of 0."""
    rng, questions = random.Random(0), []
    for figure in (figure for figure in live.figures().values() if figure["kind"] == "attention"):
        size = figure["size"]
        mask = [[int(rng.random() < 0.4) for _ in range(size)] for _ in range(size)]
        questions += [(figure, {"mask": mask, "row": row}) for row in range(size)]
    for (figure, state), answer in zip(questions, ask(questions), strict=True):
        is_masked = ~torch.tensor(state["mask"]).bool()[state["row"]]
        logits = torch.tensor(figure["logits"], dtype=torch.float64)[state["row"]]
        weights = logits.masked_fill(is_masked, -torch.inf).softmax(-1).nan_to_num(0.0)
        output = [answer["numbers"][f"w{src}"] for src in range(len(weights))]
        assert_exact(torch.tensor(output, dtype=torch.float64), weights)
