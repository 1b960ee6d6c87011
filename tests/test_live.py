"""The live figures of the site: in node they compute what torch, the library and the chapter compute."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_engine import tool

import gnn_attention as ga
from gnn_attention import analyse, cost, patterns

pytestmark = pytest.mark.slow  # node is started

ROOT = Path(__file__).parents[1]
CHAPTERS = {path.stem.partition("_")[2]: path for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))}
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
def figures() -> dict[str, Any]:
    """Every figure of the site."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        found: dict[str, Any] = importlib.import_module("live").figures()
        return found


def ask(questions: list[tuple[Any, Any]]) -> list[Any]:
    """States and numbers of figures whose state is changed, as the page computes them."""
    node = tool("node", shutil.which("node"), "apt-get install nodejs npm")
    command = [node, "-e", ASK, str(ROOT / "docs" / "site" / "live.js")]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, check=True)
    answers: list[Any] = json.loads(done.stdout)
    return answers


def test_every_chapter_has_a_figure_that_starts_with_its_numbers(figures: dict[str, Any]) -> None:
    assert list(figures) == list(CHAPTERS)
    for (name, figure), answer in zip(
        figures.items(), ask([(one, None) for one in figures.values()]), strict=True
    ):
        cells = json.loads(CHAPTERS[name].read_text(encoding="utf-8"))["cells"]
        printed = "".join(
            "".join(out.get("text", [])) for cell in cells for out in cell.get("outputs", []) if "text" in out
        )
        for number, words in figure["said"].items():
            assert words in printed, f"{name}: the chapter does not print {words!r}"
            assert answer["found"][number] in numbers_in(words), (
                f"{name}: {words!r}, but {answer['found'][number]}"
            )


class Rounded(float):
    """A number as it was printed: equal to what rounds to it."""

    def __new__(cls, text: str) -> Rounded:
        made = super().__new__(cls, float(text.rstrip("%").replace(",", "")) / (100 if "%" in text else 1))
        made.half = 0.5 * 10.0 ** -(len(text.rstrip("%").partition(".")[2]) + 2 * ("%" in text))
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float) and abs(float(self) - other) <= self.half * (1 + 1e-9)

    __hash__ = None  # type: ignore[assignment]


def numbers_in(words: str) -> list[Rounded]:
    """The numbers of a text."""
    return [Rounded(found) for found in re.findall(r"\d[\d,]*(?:\.\d+)?%?", words)]


def changes(figure: dict[str, Any], seed: int) -> dict[str, Any]:
    """A state that a reader may reach: other sliders, or other cells."""
    rng, size = random.Random(seed), figure.get("size", 0)
    state = {one["name"]: rng.randint(one["least"], one["most"]) for one in figure.get("sliders", ())}
    if 0 < size <= 16:
        state |= {
            "mask": [[int(rng.random() < 0.4) for _ in range(size)] for _ in range(size)],
            "row": rng.randrange(size),
        }
    return state


def test_whatever_is_chosen_the_numbers_are_those_of_torch_and_the_library(figures: dict[str, Any]) -> None:
    questions = [(one, changes(one, seed)) for one in figures.values() for seed in range(6)]
    for (figure, _), answer in zip(questions, ask(questions), strict=True):
        expected = EXPECTED[figure["kind"]](figure, answer["state"])
        for name, value in expected.items():
            found = float(answer["found"][name])
            if found != value:  # both may be infinite
                assert_exact(found, float(value))


def attention(figure: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
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


def graph(figure: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Counts of a TokenGraph, and its reach."""
    size = figure["size"]
    if "window" in state and not (size <= 16):
        made = patterns.window(size, state["window"]) | patterns.sinks(size, state.get("sinks", 0))
    else:
        made = ga.convert.from_mask(torch.tensor(state["mask"]).bool())
    edges = made.num_edges
    numbers: dict[str, Any] = {
        "edges": edges,
        "each": edges / size,
        "share": edges / patterns.causal(size).num_edges,
    }
    if "layers" in state:
        field = analyse.receptive_field(made | patterns.self_loops(size), state["row"], state["layers"])
        numbers |= {"reach": len(field), "back": state["row"] - min(field)}
        waits = [0 in analyse.receptive_field(made, size - 1, layers) for layers in range(size)]
        numbers["first"] = waits.index(True) if True in waits else math.inf
        if size <= 16:
            ways = made ** state["layers"]
            within = (made | patterns.self_loops(size)) ** state["layers"]
            dst, src = within.mask().nonzero().T
            numbers |= {
                "hops": ways.num_edges,
                "pairs": within.num_edges - size,
                "leaks": int((src > dst).sum()),
            }
    return numbers


def formula(figure: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """What ``cost`` counts, or the formula in Python."""
    if "d" in state and "width" in state:
        sizes = {"num_heads": 1, "head_dim": state["d"]}
        thin, square = (
            cost.of_form(form, state["width"], **sizes).macs.send for form in ("factored", "merged")
        )
        return {"thin": thin, "square": square, "ratio": square / thin}
    if "fit" in state:
        shares = torch.tensor([0.5, 0.0, 1.0, state["fit"]], dtype=torch.float64).softmax(0)
        return {f"w{at}": share for at, share in enumerate(shares.tolist())}
    if "d" in state:
        quantiles = torch.special.ndtri((torch.arange(16, dtype=torch.float64) + 0.5) / 16)
        unit = quantiles / quantiles.std(correction=0)
        largest = (unit * state["d"] ** 0.5).softmax(0).max().item()
        return {"scale": state["d"] ** -0.5, "largest": largest, "scaled": unit.softmax(0).max().item()}
    return {"edges": 8 * state["relays"], "passes": min(48, 12 * state["relays"])}


def points(figure: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """The point itself."""
    chosen: dict[str, Any] = figure["points"][state["point"]]
    return chosen


def spectrum(figure: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Of a diagonal matrix, by torch: the exponential of the entropy, the norm of the rest."""
    values = torch.tensor(figure["spectra"][state["matrix"]], dtype=torch.float64)
    shares = values.square() / values.square().sum()
    lost = (values[state["rank"] :].norm() / values.norm()).item()
    return {"effective": torch.special.entr(shares).sum().exp().item(), "error": lost}


EXPECTED = {
    "attention": attention,
    "graph": graph,
    "formula": formula,
    "points": points,
    "spectrum": spectrum,
}
