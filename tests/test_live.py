"""The live figures of the site compute in node and in Chromium the numbers of their chapters and of torch."""

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
from torch.nn import functional

from gnn_attention import analyse, patterns
from gnn_attention.convert import from_mask

# Each test starts node or Chromium.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT, TOOLS = ROOT / "docs" / "site" / "live.js", ROOT / "tests" / "explorer"


@pytest.fixture(scope="module")
def live():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("live")


def ask(questions):
    """Return the numbers of each figure after a change, as the page computes them."""
    node = tool("node", shutil.which("node"), "apt-get install nodejs npm")
    command = [node, TOOLS / "live_numbers.cjs", SCRIPT]
    return json.loads(subprocess.check_output(command, input=json.dumps(questions), text=True))


def contains_number(text, number):
    """Return True if a text contains the number, rounded to the printed digits."""
    for digits, decimals, percent in re.findall(r"(\d[\d,]*(?:\.(\d+))?)(%?)", text):
        difference = abs(number * (100 if percent else 1) - float(digits.replace(",", "")))
        if difference <= 0.5 * 10.0 ** -len(decimals) * (1 + 1e-9):
            return True
    return False


def test_every_chapter_has_a_figure_that_starts_with_its_numbers(live):
    chapters, figures = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), live.figures()
    assert list(figures) == [path.stem.partition("_")[2] for path in chapters]
    answers = ask([(figure, None) for figure in figures.values()])
    for path, figure, numbers in zip(chapters, figures.values(), answers, strict=True):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert sum('class="live"' in cell["source"] for cell in live.insert_figure(path.stem, cells)) == 1
        outputs = [out for cell in cells for out in cell.get("outputs", [])]
        output_text = "".join("".join(out.get("text", [])) for out in outputs)
        for name, text in figure["said"].items():
            assert text in output_text, f"{path.stem} does not print {text!r}"
            assert contains_number(text, numbers[name]), (path.stem, text, numbers[name])


def test_a_click_on_a_cell_changes_exactly_its_arc(live, tmp_path):
    chromium = tool("chromium", shutil.which("chromium"), "apt-get install chromium")
    figures = [figure for figure in live.figures().values() if figure.get("size", 17) <= 16]
    scripts = [f"<script>{path.read_text()}</script>" for path in (SCRIPT, TOOLS / "live_clicks.js")]
    page = tmp_path / "page.html"
    page.write_text('<meta charset="utf-8">' + "".join([*map(live.markup, figures), *scripts]))
    options = ["--headless", "--no-sandbox", f"--user-data-dir={tmp_path}", "--dump-dom"]
    dom = subprocess.check_output([chromium, *options, page.as_uri()], text=True, stderr=subprocess.DEVNULL)
    results = json.loads(dom.partition("<body>")[2].partition("</body>")[0])
    for figure, clicks in zip(figures, results, strict=True):
        rows = figure.get("logits", [[0] * figure["size"]] * figure["size"])
        assert len(clicks) == sum(logit is not None for row in rows for logit in row)
        for key, *changed_and_lit, is_restored in clicks:
            assert changed_and_lit == [[key]] * 3
            assert is_restored


def test_whatever_cells_are_chosen_the_weights_are_those_of_torch(live):
    """The figures compute the weights of torch for random masks; an isolated receiver has weights of 0."""
    rng, questions = random.Random(0), []
    for figure in (figure for figure in live.figures().values() if figure["kind"] == "attention"):
        mask = [[int(logit is not None and rng.random() < 0.4) for logit in row] for row in figure["logits"]]
        questions += [(figure, {"mask": mask, "row": row}) for row in range(figure["size"])]
    for (figure, state), numbers in zip(questions, ask(questions), strict=True):
        pairs = zip(figure["logits"][state["row"]], state["mask"][state["row"]], strict=True)
        logits = torch.tensor([logit if edge else -torch.inf for logit, edge in pairs], dtype=torch.float64)
        weights = logits.softmax(-1).nan_to_num(0.0).tolist()
        assert_exact([numbers[f"w{src}"] for src in range(len(weights))], weights)


def test_influence_and_smoothing_are_those_of_the_package(live):
    figures = live.figures()
    for a, layers, w in ((0.5, 30, 16), (0.9, 7, 5)):
        [numbers] = ask([(figures["reach_is_not_influence"], {"residual": a, "layers": layers, "window": w})])
        n = layers * (w - 1) + 1
        shares = analyse.influence(patterns.window(n, w), layers, a, receivers=[n - 1])[0].flip(0)
        expected = [float(shares[0]), int(shares.argmax()), float(shares @ torch.arange(n).double())]
        assert_exact([numbers[name] for name in ("home", "peak", "mean")], expected)
    figure = figures["what_a_gnn_person_asks"]
    for number, cells in enumerate(figure["graphs"]):
        [numbers] = ask([(figure, {"graph": number, "residual": 0.3, "layers": 5})])
        shares = analyse.influence(from_mask(torch.tensor(cells) > 0), 5, 0.3)
        x = functional.normalize(shares @ torch.tensor(figure["states"], dtype=torch.float64), dim=-1)
        assert_exact(numbers["spread"], float((x - x.mean(0)).norm(dim=-1).mean()), 1.0)
