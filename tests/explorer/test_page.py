"""Test in Chromium and Firefox that the explorer's page shows Python's numbers and its controls work.

``explorer/*.mjs`` drive the page by playwright-core; each scenario returns what it saw, for these tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_browser import assert_quiet, run_jobs
from support.explorer_engine import HOSTILE, TEXT, data_of, edit

from gnn_attention import algebra, convert, explorer, patterns
from gnn_attention import model as lm
from gnn_attention.convert import expressions
from gnn_attention.interpret import trace

pytestmark = pytest.mark.slow  # a browser is started

HERE = Path(__file__).parent
HEADS = max((HERE.parent / "records").glob("*-heads.json"))
Files, Results = Callable[[str], str], dict[str, Any]
LAYER, HEAD = 1, 2
SIZES = {"a desk": {"width": 1280, "height": 800}, "a phone": {"width": 390, "height": 844}}
VIEWS = ["listen", *(f"step {step}" for step in range(7)), "reach", "write", "typing"]
PLAN = {"light": VIEWS[0::3], "dark": VIEWS[1::3], "phone": VIEWS[2::3]}
TYPED = "class Größe:\n    def size(self):\n        return self.size"
# These have letters, marks and blanks in the same places, so that the words are the same.
HARMLESS = [re.sub(r"[\w\u0301]", "a", re.sub(r"[^\s\w\u0301]", ".", text)) for text in HOSTILE]


def make_page_of(texts: list[str], title: str) -> explorer.Page:
    """Make a page whose tokens, vocabulary, graphs and model have these texts."""
    model, vocabulary = lm.load_trained()
    page = explorer.page(list(range(len(texts))), (model, vocabulary), room=2, title=title)
    data = data_of(page)
    for token, text in zip(data["tokens"], texts, strict=True):
        token["text"] = text
    data["model"]["vocabulary"][: len(texts)] = texts
    data["model"]["name"] = data["masks"][1]["name"] = data["masks"][0]["meaning"] = texts[0]
    return explorer.Page(explorer._html.assemble_page(title, data), title, len(texts))


class Oracle:
    """The shipped model in float64 along any graph, with the values that the page must show."""

    def __init__(self) -> None:
        model, self.vocabulary = lm.load_trained()
        self.model = model.double()
        self.ids = self.vocabulary.encode(TEXT)

    @torch.no_grad()
    def run(self, graph: Any = None, interventions: Any = (), ids: list[int] | None = None) -> trace.Run:
        tokens, graphs = torch.tensor([self.ids if ids is None else ids]), [] if graph is None else [graph]
        return trace.record(self.model, tokens, *graphs, interventions=interventions)

    def dense(self, run: trace.Run) -> torch.Tensor:
        """Return the weights ``[layers, heads, dst, src]``."""
        count, heads = run.output.shape[1], run.layers[0].q.shape[1]
        weights = torch.zeros(len(run.layers), heads, count, count, dtype=torch.float64)
        for layer, call in enumerate(run.layers):
            src, dst = call.edge_index
            weights[layer, :, dst, src] = call.weights()[0].mT
        return weights

    def chances(self, run: trace.Run, token: int) -> torch.Tensor:
        return run.output[0, token].softmax(-1)

    @torch.no_grad()
    def check(self, result: dict[str, Any], run: trace.Run, dst: int) -> None:
        """Check rows of the table, numbers of the steps, the update and the next tokens."""
        layer = run.layers[LAYER]
        senders = [row[0] for row in result["rows"]]
        edges = layer.edge_index[:, layer.edge_index[1] == dst]
        weights = layer.weights(edges)[0, :, HEAD]
        assert senders == sorted(edges[0][weights > 0].tolist())
        pairs = [(src, dst) for src in senders]
        if pairs:
            rows = torch.tensor([row[1:] for row in result["rows"]], dtype=torch.float64)
            lengths = layer.messages(pairs, heads=HEAD)[0, :, 0].norm(dim=-1)
            assert_exact(rows[:, 0], layer.logits(pairs)[0, :, HEAD], layer.logits().abs().max().item())
            assert_exact(rows[:, 1], layer.weights(pairs)[0, :, HEAD])
            assert_exact(rows[:, 2], lengths)
        by_sender = dict(zip(senders, layer.weights(pairs)[0, :, HEAD].tolist(), strict=True))
        lines = [by_sender.get(src, 0.0) for src, _ in result["lines"]]
        assert_exact([weight for _, weight in result["lines"]], lines)
        assert {src for src, _ in result["lines"]} >= set(senders)
        assert_exact(torch.tensor(result["update"], dtype=torch.float64), layer.update[0, dst])
        self.check_chances(result["chances"], run, dst, int(self.chances(self.run(), dst).argmax()))
        steps, phase = result["steps"], run.phases[2 * LAYER]
        assert_exact(steps["3"]["total"], 1.0 if pairs else 0.0)
        for name, tensor in {"before": phase.before, "update": phase.update, "after": phase.after}.items():
            assert_exact(steps["6"][name], tensor[0, dst].norm().item())
        assert_exact(steps["6"]["thought"], run.phases[2 * LAYER + 1].update[0, dst].norm().item())

    def check_chances(self, result: Any, run: trace.Run, dst: int, plain_token: int | None = None) -> None:
        expected = self.chances(run, dst)
        # The page lists the likeliest first, and may add the token that was likeliest before any edit.
        likeliest = expected.topk(7 if plain_token is not None else len(result)).indices.tolist()
        if plain_token not in (None, *likeliest):
            likeliest.append(plain_token)
        assert [name for name, _ in result] == [f"chance-{token}" for token in likeliest]
        chances = [expected[int(name.removeprefix("chance-"))].item() for name, _ in result]
        assert_exact([chance for _, chance in result], chances)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Files:
    """Return the path of a page, which is written when a test first needs it."""
    folder = tmp_path_factory.mktemp("pages")
    long_ids = (oracle.ids * 60)[:512]
    makers: dict[str, Callable[[], explorer.Page]] = {
        "demo": lambda: explorer.page(TEXT),
        "first": lambda: explorer.page(),
        "one": lambda: explorer.page([oracle.ids[0]], room=1),
        "64": lambda: explorer.page(long_ids[:64], room=8),
        "512": lambda: explorer.page(long_ids, room=4),
        "hostile": lambda: make_page_of(HOSTILE, HOSTILE[0]),
        "harmless": lambda: make_page_of(HARMLESS, "word"),
    }

    def file(name: str) -> str:
        path = folder / f"{name}.html"
        if not path.exists():
            makers[name]().save(path)
        return str(path)

    return file


@pytest.fixture(scope="module")
def masks(files: Files) -> dict[str, int]:
    """Return the numbers of the demo page's graphs by the first word of their names."""
    data = data_of(Path(files("demo")))
    entries = reversed([*enumerate(data["masks"])])
    return {mask["name"].split("(")[0] + " ahead" * (not mask["causal"]): n for n, mask in entries}


@pytest.fixture(scope="module")
def visits(files: Files, masks: dict[str, int]) -> Results:
    """Run all quick scenarios together, and return their results by name."""
    demo, ahead = files("demo"), next(number for name, number in masks.items() if name.endswith(" ahead"))
    options = {"file": demo, "layer": LAYER, "head": HEAD}
    toggle = {"scenario": "toggled", **options}
    jobs: dict[str, dict[str, Any]] = {
        "cut": {**toggle, "token": 10, "src": 0, "reset": True},
        "cut in one head": {**toggle, "token": 4, "src": 4, "scope": "head", "again": True},
        "added": {**toggle, "token": 2, "src": 7},
        "window": {"scenario": "mask", **options, "token": 10, "mask": masks["window"]},
        "readings": {"scenario": "readings", "file": demo},
        "arc": {"scenario": "arc", "file": demo},
        "glance": {"scenario": "glance", "file": demo},
        "words": {"scenario": "words", **options},
        "typed": {"scenario": "typed", "file": demo, "text": TYPED},
        "keys": {"scenario": "keys", "file": demo},
        "haste": {"scenario": "haste", "file": demo},
        "noted": {"scenario": "noted", "file": demo, "ahead": ahead, "strict": masks["strict_causal"]},
        "hostile": {"scenario": "hostile", "hostile": files("hostile"), "harmless": files("harmless")},
        "axe": {"scenario": "axe", "file": demo, "plan": PLAN},
        "axe, 64 tokens": {"scenario": "axe", "file": files("64"), "plan": {"dark": ["listen"]}},
    }
    return dict(zip(jobs, run_jobs(list(jobs.values())), strict=True))


def test_after_an_edit_the_page_shows_what_python_computes(visits: Results, oracle: Oracle) -> None:
    size, one_head = len(oracle.ids), trace.cut([(4, 4)], layers=LAYER, heads=HEAD)
    added = convert.from_edge_index(torch.tensor([[7], [2]]), size)
    oracle.check(visits["cut"], oracle.run(interventions=trace.cut([(0, 10)])), 10)
    oracle.check(visits["cut"]["reset"], oracle.run(), 10)
    oracle.check(visits["cut in one head"], oracle.run(interventions=one_head), 4)
    oracle.check(visits["cut in one head"]["again"], oracle.run(), 4)
    oracle.check(visits["added"], oracle.run(patterns.causal(size) | added), 2)
    names = "cut", "cut in one head", "added"
    labels = [visits[name]["promised"].partition(" →")[0] for name in names]
    assert labels == ["Cut 0", "Cut 4", "Add 7"]
    assert visits["cut in one head"]["again"]["promised"].startswith("Put back 4 → 4 ")
    window = expressions.parse(visits["window"]["name"])
    oracle.check(visits["window"], oracle.run(algebra.restrict(window, range(size))), 10)


def test_readings_change_words_and_no_numbers(visits: Results) -> None:
    result = visits["readings"]
    assert [view["view"] for view in result] == ["search", "routing", "transforms", "message exchange"]
    assert all(view["numbers"] == result[0]["numbers"] and len(view["numbers"][0]) > 3 for view in result)
    assert len({tuple(view["steps"]) for view in result}) == 4
    assert result[0]["steps"][0] == "1 query"
    exchange = ["receiving channel", "sending channel", "channel overlap", "listening distribution"]
    assert [step[2:] for step in result[3]["steps"][:4]] == exchange


def test_a_click_on_an_arc_selects_it_a_button_cuts_it_and_everything_leads_back(
    visits: Results, oracle: Oracle
) -> None:
    result = visits["arc"]
    selected = result["selected"]
    assert selected["edits"] == []
    layer, pair = oracle.run().layers[LAYER], [(selected["sender"], selected["token"])]
    numbers = dict(selected["numbers"])
    assert_exact(numbers["weight"], layer.weights(pair)[0, 0, selected["head"]].item())
    assert_exact(numbers["logit"], layer.logits(pair)[0, 0, selected["head"]].item())
    assert_exact(numbers["message"], layer.messages(pair, heads=selected["head"])[0, 0, 0].norm().item())
    # The label of the button says what a click will do.
    assert result["promised"] == f"Cut {selected['sender']} → {selected['token']} in layer {LAYER}, all heads"
    (cut,) = result["steps"][0]
    assert cut == edit(*pair[0], layer=LAYER)
    # The next steps are undo, redo, and removal from the list of edits.
    assert result["steps"][1:] == [[], [cut], []]
    assert result["restored"] == [cut]
    assert re.match(rf"{cut['src']} .*weight", result["readout"], re.DOTALL)
    assert_quiet(result["seen"])


def test_a_typed_text_is_read_in_the_page(visits: Results, oracle: Oracle) -> None:
    result, ids = visits["typed"], oracle.vocabulary.encode(TYPED)
    (pieces, read, cut), last = (result[name] for name in ("pieces", "read", "cutting")), len(ids) - 1
    assert (result["offered"], result["counted"]) == (TEXT, f"{len(ids)} tokens of at most 80")
    assert len(pieces) == len(read["ids"])
    assert (read["ids"], result["restored"], result["back"]) == (ids, ids, oracle.ids)
    assert (read["title"], read["focus"]) == ("class Größe: ⏎ def size(self): ⏎ return self.size", str(last))
    plain = oracle.run(ids=ids)
    oracle.check_chances(read["chances"], plain, last, likeliest := int(plain.output[0, last].argmax()))
    assert cut["edits"] == [edit(0, last, layer=LAYER)]
    cut_run = oracle.run(interventions=trace.cut([(0, last)], layers=LAYER), ids=ids)
    oracle.check_chances(cut["chances"], cut_run, last, likeliest)
    too_many = len(oracle.vocabulary.encode("name " * 90))
    assert result["long"] == [f"{too_many} tokens, {too_many - 80} too many", True]
    assert_quiet(result["seen"])


def test_keys_and_clicks_that_come_before_the_next_frame_all_count(visits: Results, oracle: Oracle) -> None:
    """Keys and buttons act on the newest state, not on the picture, which may be older."""
    result = visits["haste"]
    where = {name: [result[name][key] for key in ("token", "sender")] for name in ("walk", "ports")}
    assert where == {"walk": [8, 1], "ports": [8, 2]}
    edits = {name: result[name]["work"]["edits"] for name in ("walk", "again", "button", "ports")}
    first, second = edit(1, 8, layer=LAYER), edit(2, 8, layer=LAYER)
    # Two more keys put the edge back and cut it; three clicks put it back, cut it and put it back.
    assert edits == {"walk": [first], "again": [first], "button": [], "ports": [second]}
    assert (result["steps"]["step"], result["drag"]["token"], result["reach"]["reachLayers"]) == (3, 8, 2)
    ids = list(oracle.ids)
    for _ in range(2):
        ids.append(int(oracle.run(ids=ids).output[0, -1].argmax()))
    assert result["ids"] == ids
    assert_quiet(result["seen"])


def check_head(result: dict[str, Any], row: dict[str, Any], weights: torch.Tensor) -> None:
    """Check the weights, shown as integer opacities, and the recorded claims with their marks."""
    where = f"layer {row['layer']}, head {row['head']}"
    label = where if row["job"] == "none of these" else f"{where} (on average: {row['job']})"
    assert (result["layer"], result["head"], result["label"]) == (row["layer"], row["head"], label)
    assert (result["allHeads"], result["chosen"]) == (False, 1)
    opacities = torch.tensor(result["picture"]).view_as(weights)
    assert (opacities - 255 * weights.sqrt()).abs().max() <= 0.5 + 1e-6
    for (text, holds), effect in zip(result["halves"], (row["looks"], row["said"]), strict=True):
        is_supported = effect["p_holm"] <= 0.05
        assert (holds, "not supported" in text) == (is_supported, not is_supported)


def test_every_head_at_a_glance_and_who_attends_to_a_token(visits: Results, oracle: Oracle) -> None:
    result, dense = visits["glance"], oracle.dense(oracle.run())
    rows = [row for row in json.loads(HEADS.read_text("utf-8"))["rows"] if row["model"] == "trained"]
    for head, row in zip(result["heads"], rows, strict=True):
        check_head(head, row, dense[row["layer"], row["head"]])
    selection = result["selected"]
    weights = dense[selection["layer"], selection["head"]]
    for sender, bars in zip((1, 4), result["receivers"], strict=True):
        largest = weights[sender:, sender].sort(descending=True)
        assert [name for name, _ in bars] == [f"heard-by-{sender + index}" for index in largest.indices[:10]]
        assert_exact([value for _, value in bars], largest.values[:10])
    assert (selection["sender"], f"heard-by-{selection['token']}") == (4, selection["first"])
    assert_quiet(result["seen"])


def test_S1_13_five_words_are_five_nodes(visits: Results, oracle: Oracle) -> None:
    """Weights add up over the tokens of a sender word, and average over those of a receiver word."""
    result, tokens = visits["words"], [oracle.vocabulary.decode([token]) for token in oracle.ids]
    assert result["words"] == TEXT.split() == ["Llamas", "do", "not", "output", "words"]
    word_of = torch.tensor([sum(token[0] == " " for token in tokens[: n + 1]) for n in range(len(tokens))])
    belongs = torch.nn.functional.one_hot(word_of).double()
    weights = oracle.dense(oracle.run())[LAYER, HEAD]
    expected = (belongs / belongs.sum(0)).T @ weights @ belongs
    for number, (token, bars) in enumerate(result["heard"]):
        assert word_of[token] == number
        assert [name for name, _ in bars] == [f"word-{sender}" for sender in range(number + 1)]
        assert_exact([value for _, value in bars], expected[number, : number + 1])
    assert result["arcs"] == 5
    assert_quiet(result["seen"])


def test_a_visit_without_a_mouse(visits: Results) -> None:
    result = visits["keys"]
    states = [(step["token"], step["sender"], step["edits"]) for step in result["shown"]]
    assert states[:4] == [(token, None, 0) for token in range(4)]
    assert states[4:] == [(3, 0, 0), (3, 0, 1), (3, 1, 1), (3, 1, 2), (3, 1, 1), (3, 1, 0), (10, None, 0)]
    assert [step["focus"] for step in result["shown"] if step["key"].startswith("Arrow")] == ["1", "2", "3"]
    assert result["label"].startswith("edge from 0 ")
    selected, cut = result["pressed"]
    assert (selected[0], selected[1][:12]) == ("true", "edge from 0 ")
    assert (cut[0], cut[1][:15]) == ("true", "no edge from 0 ")
    assert "attends most to" in result["said"]
    assert "The model now predicts" in result["said"]
    assert_quiet(result["seen"])


def test_what_must_not_be_missed_is_said(visits: Results) -> None:
    result = visits["noted"]
    assert len(result["ahead"]) == len(result["added"]) == 1
    assert "later ones" in result["ahead"][0]
    assert "exactly 0" in result["isolated"]
    assert result["edges"] == 0
    assert_quiet(result["seen"])


def test_texts_are_inert_and_visible(visits: Results) -> None:
    result = visits["hostile"]
    hostile, harmless = result["hostile"], result["harmless"]
    assert hostile["ran"] is None
    assert hostile["elements"] == harmless["elements"]
    assert not hostile["raw"], "control characters and marks of direction stand in the page as they are"
    assert [hostile["texts"][number] for number in (9, 11, 15)] == ["⇥⏎␍␣", "⟨D83D⟩", "∅"]
    assert hostile["texts"][5].startswith("⟨202E⟩right␣to")
    assert hostile["title"] == HOSTILE[0]
    assert_quiet(hostile["seen"])


def test_axe_finds_nothing_and_nothing_is_too_wide(visits: Results) -> None:
    """axe checks each view in one theme or on a phone, and 64 tokens in the dark theme."""
    for result in (*visits["axe"].values(), *visits["axe, 64 tokens"].values()):
        assert_quiet(result.pop("seen"))
        assert result.pop("overflow") == 0
        assert result == {name: [] for name in result}


def test_every_control_does_what_it_says(files: Files, masks: dict[str, int]) -> None:
    demo = files("demo")
    window = {"file": demo, "mask": masks["window"]}
    names = "choices", "decoding", "themes", "buttons", "touch"
    jobs = [*({"scenario": name, "file": demo} for name in names), {"scenario": "reach", **window}]
    choices, decoding, themes, buttons, touch, reach = run_jobs(jobs)
    for result in (choices, decoding, themes, buttons, touch, reach):
        assert_quiet(result["seen"])
    assert all(expected == value for pairs in choices["found"].values() for expected, value in pairs)
    assert all(len(pairs) >= 2 for pairs in choices["found"].values())
    assert decoding["counts"][0] >= 2
    assert decoding["counts"][1] == 1
    assert decoding["full"] == 16
    assert "no room for more tokens" in decoding["text"]
    assert themes["dark"] != themes["light"] == themes["again"]
    assert (buttons["steps"], buttons["studied"]) == ([6, 5], 1)
    assert [len(buttons[name]) for name in ("cut", "mended", "fromTable")] == [1, 0, 1]
    assert buttons["help"]
    assert buttons["checked"]
    assert (touch["receiver"], touch["edits"]) == (6, [edit(2, 6, layer=LAYER)])
    assert touch["selected"][:2] == [2, []]
    assert [name for name, _ in touch["selected"][2]] == ["logit", "weight", "message", "carried"]
    # A window of 5 reaches 4 more tokens with each layer; the page shows 0, 1, 1, 2 and 3 layers.
    assert reach["counts"] == [1, 5, 5, 9, 11]
    assert reach["playing"] >= 1
    # Rows end at the model's two layers; if layers differ, all of twelve are shown.
    assert (reach["other"], reach["atOnce"], reach["rows"]) == (4, 4, [3, 13])


def test_every_size_fits_every_width(files: Files) -> None:
    names = {name: files(name) for name in ("demo", "one", "64", "512")}
    widths = {"demo": [320, 600, 1200], "one": [320], "64": [320, 1200], "512": [320, 1200]}
    (sizes,) = run_jobs([{"scenario": "sizes", "files": names, "widths": widths}])
    counts = {"demo": 11, "one": 1, "64": 64, "512": 512}
    for name, result in sizes.items():
        assert_quiet(result["seen"])
        assert (result["overflow"], result["tokens"]) == (0, counts[name.split(" ")[0]]), name
    assert sizes["64 at 1200"]["kind"] == "turned"
    assert sizes["512 at 1200"]["kind"] == "ticks"


def test_the_page_works_in_the_frame_of_a_notebook(tmp_path: Path) -> None:
    frame = tmp_path / "notebook.html"
    notebook = f"<!doctype html><title>notebook</title>{explorer.page(TEXT)._repr_html_()}"
    frame.write_text(notebook, encoding="utf-8")
    (result,) = run_jobs([{"scenario": "framed", "frame": str(frame)}])
    assert result["edits"] == 1
    assert result["seen"]["errors"] == []
    assert {url.split("#")[0] for url in result["seen"]["requests"]} <= {frame.as_uri(), "about:srcdoc"}


@pytest.mark.parametrize("browser", ["chromium", "firefox"])
def test_every_number_that_a_click_changes_is_on_the_screen(browser: str, files: Files) -> None:
    """Numbers change after each click of the tour and each edit, on a desk and a phone."""
    jobs = [{"scenario": "viewport", "file": files("first"), "viewport": size} for size in SIZES.values()]
    for result in run_jobs(jobs, browser=browser):
        assert result["seen"]["errors"] == []
        assert [entry["name"] for entry in result["found"] if not entry["changed"]] == []
        assert {entry["name"]: entry["hidden"] for entry in result["found"] if entry["hidden"]} == {}
