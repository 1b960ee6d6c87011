"""The explorer's page in Chromium and Firefox: its numbers are Python's, every control does what it says.

``explorer/*.mjs`` drive the page by playwright-core; each scenario returns what it saw, and is judged here.
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
from support.explorer_browser import quiet, results
from support.explorer_engine import HOSTILE, TEXT, data_of, edit

from gnn_attention import algebra, convert, explorer, patterns
from gnn_attention import model as lm
from gnn_attention.convert import expressions
from gnn_attention.interpret import trace

pytestmark = pytest.mark.slow  # a browser is started

HERE = Path(__file__).parent
HEADS = max((HERE.parent / "records").glob("*-heads.json"))
Files, Driven = Callable[[str], str], dict[str, Any]
LAYER, HEAD = 1, 2
SIZES = {"a desk": {"width": 1280, "height": 800}, "a phone": {"width": 390, "height": 844}}
VIEWS = ["listen", *(f"step {step}" for step in range(7)), "reach", "write", "typing"]
PLAN = {"light": VIEWS[0::3], "dark": VIEWS[1::3], "phone": VIEWS[2::3]}
TYPED = "class Größe:\n    def size(self):\n        return self.size"
# letters, marks and blanks in the same places, so that they make the same words
HARMLESS = [re.sub(r"[\w\u0301]", "a", re.sub(r"[^\s\w\u0301]", ".", text)) for text in HOSTILE]


def with_texts(texts: list[str], title: str) -> explorer.Page:
    """A page whose tokens, vocabulary, graphs and model have these texts, by way of a vocabulary of ours."""
    model, vocabulary = lm.load_trained()
    shown = explorer.page(list(range(len(texts))), (model, vocabulary), room=2, title=title)
    data = data_of(shown)
    for token, text in zip(data["tokens"], texts, strict=True):
        token["text"] = text
    data["model"]["vocabulary"][: len(texts)] = texts
    data["model"]["name"] = data["masks"][1]["name"] = data["masks"][0]["meaning"] = texts[0]
    return explorer.Page(explorer._html.assemble_page(title, data), title, len(texts))


class Oracle:
    """The shipped model in float64 over any graph, as the page must show it."""

    def __init__(self) -> None:
        model, self.vocabulary = lm.load_trained()
        self.model = model.double()
        self.ids = self.vocabulary.encode(TEXT)

    @torch.no_grad()
    def run(self, graph: Any = None, interventions: Any = (), ids: list[int] | None = None) -> trace.Run:
        tokens, graphs = torch.tensor([self.ids if ids is None else ids]), [] if graph is None else [graph]
        return trace.record(self.model, tokens, *graphs, interventions=interventions)

    def dense(self, run: trace.Run) -> torch.Tensor:
        """Weights ``[layers, heads, dst, src]``."""
        count, heads = run.output.shape[1], run.layers[0].q.shape[1]
        weights = torch.zeros(len(run.layers), heads, count, count, dtype=torch.float64)
        for layer, call in enumerate(run.layers):
            src, dst = call.edge_index
            weights[layer, :, dst, src] = call.weights()[0].mT
        return weights

    def chances(self, run: trace.Run, token: int) -> torch.Tensor:
        return run.output[0, token].softmax(-1)

    @torch.no_grad()
    def check(self, shown: dict[str, Any], run: trace.Run, dst: int) -> None:
        """Rows of the table, numbers of the steps, the update and what is expected next."""
        layer = run.layers[LAYER]
        senders = [row[0] for row in shown["rows"]]
        edges = layer.edge_index[:, layer.edge_index[1] == dst]
        weights = layer.weights(edges)[0, :, HEAD]
        assert senders == sorted(edges[0][weights > 0].tolist())
        pairs = [(src, dst) for src in senders]
        if pairs:
            rows = torch.tensor([row[1:] for row in shown["rows"]], dtype=torch.float64)
            lengths = layer.messages(pairs, heads=HEAD)[0, :, 0].norm(dim=-1)
            assert_exact(rows[:, 0], layer.logits(pairs)[0, :, HEAD], layer.logits().abs().max().item())
            assert_exact(rows[:, 1], layer.weights(pairs)[0, :, HEAD])
            assert_exact(rows[:, 2], lengths)
        by_sender = dict(zip(senders, layer.weights(pairs)[0, :, HEAD].tolist(), strict=True))
        lines = [by_sender.get(src, 0.0) for src, _ in shown["lines"]]
        assert_exact([weight for _, weight in shown["lines"]], lines)
        assert {src for src, _ in shown["lines"]} >= set(senders)
        assert_exact(torch.tensor(shown["update"], dtype=torch.float64), layer.update[0, dst])
        self.check_chances(shown["chances"], run, dst, int(self.chances(self.run(), dst).argmax()))
        steps, phase = shown["steps"], run.phases[2 * LAYER]
        assert_exact(steps["3"]["total"], 1.0 if pairs else 0.0)
        for name, tensor in {"before": phase.before, "update": phase.update, "after": phase.after}.items():
            assert_exact(steps["6"][name], tensor[0, dst].norm().item())
        assert_exact(steps["6"]["thought"], run.phases[2 * LAYER + 1].update[0, dst].norm().item())

    def check_chances(self, shown: Any, run: trace.Run, dst: int, before: int | None = None) -> None:
        expected = self.chances(run, dst)
        # the likeliest first; on the listening page seven, and what was likeliest before any edit
        likeliest = expected.topk(7 if before is not None else len(shown)).indices.tolist()
        if before not in (None, *likeliest):
            likeliest.append(before)
        assert [name for name, _ in shown] == [f"chance-{token}" for token in likeliest]
        chances = [expected[int(name.removeprefix("chance-"))].item() for name, _ in shown]
        assert_exact([chance for _, chance in shown], chances)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Files:
    """Where a page lies, written when it is first needed."""
    folder = tmp_path_factory.mktemp("pages")
    many = (oracle.ids * 60)[:512]
    makers: dict[str, Callable[[], explorer.Page]] = {
        "demo": lambda: explorer.page(TEXT),
        "first": lambda: explorer.page(),
        "one": lambda: explorer.page([oracle.ids[0]], room=1),
        "64": lambda: explorer.page(many[:64], room=8),
        "512": lambda: explorer.page(many, room=4),
        "hostile": lambda: with_texts(HOSTILE, HOSTILE[0]),
        "harmless": lambda: with_texts(HARMLESS, "word"),
    }

    def file(name: str) -> str:
        path = folder / f"{name}.html"
        if not path.exists():
            makers[name]().save(path)
        return str(path)

    return file


@pytest.fixture(scope="module")
def masks(files: Files) -> dict[str, int]:
    """The graphs of the demo page by the first word of their names."""
    data = data_of(Path(files("demo")))
    found = reversed([*enumerate(data["masks"])])
    return {mask["name"].split("(")[0] + " ahead" * (not mask["causal"]): n for n, mask in found}


@pytest.fixture(scope="module")
def driven(files: Files, masks: dict[str, int]) -> Driven:
    """The results of all quick scenarios by name; the first that is needed runs them all."""
    demo, ahead = files("demo"), next(number for name, number in masks.items() if name.endswith(" ahead"))
    where = {"file": demo, "layer": LAYER, "head": HEAD}
    toggled = {"scenario": "toggled", **where}
    jobs: dict[str, dict[str, Any]] = {
        "cut": {**toggled, "token": 10, "src": 0, "reset": True},
        "cut in one head": {**toggled, "token": 4, "src": 4, "scope": "head", "again": True},
        "added": {**toggled, "token": 2, "src": 7},
        "window": {"scenario": "mask", **where, "token": 10, "mask": masks["window"]},
        "readings": {"scenario": "readings", "file": demo},
        "arc": {"scenario": "arc", "file": demo},
        "glance": {"scenario": "glance", "file": demo},
        "words": {"scenario": "words", **where},
        "typed": {"scenario": "typed", "file": demo, "text": TYPED},
        "keys": {"scenario": "keys", "file": demo},
        "haste": {"scenario": "haste", "file": demo},
        "noted": {"scenario": "noted", "file": demo, "ahead": ahead, "strict": masks["strict_causal"]},
        "hostile": {"scenario": "hostile", "hostile": files("hostile"), "harmless": files("harmless")},
        "axe": {"scenario": "axe", "file": demo, "plan": PLAN},
        "axe, 64 tokens": {"scenario": "axe", "file": files("64"), "plan": {"dark": ["listen"]}},
    }
    return dict(zip(jobs, results(list(jobs.values())), strict=True))


def test_after_an_edit_the_page_shows_what_python_computes(driven: Driven, oracle: Oracle) -> None:
    size, one_head = len(oracle.ids), trace.cut([(4, 4)], layers=LAYER, heads=HEAD)
    added = convert.from_edge_index(torch.tensor([[7], [2]]), size)
    oracle.check(driven["cut"], oracle.run(interventions=trace.cut([(0, 10)])), 10)
    oracle.check(driven["cut"]["reset"], oracle.run(), 10)
    oracle.check(driven["cut in one head"], oracle.run(interventions=one_head), 4)
    oracle.check(driven["cut in one head"]["again"], oracle.run(), 4)
    oracle.check(driven["added"], oracle.run(patterns.causal(size) | added), 2)
    names = "cut", "cut in one head", "added"
    promised = [driven[name]["promised"].partition(" →")[0] for name in names]
    assert promised == ["Cut 0", "Cut 4", "Add 7"]
    assert driven["cut in one head"]["again"]["promised"].startswith("Put back 4 → 4 ")
    window = expressions.parse(driven["window"]["name"])
    oracle.check(driven["window"], oracle.run(algebra.restrict(window, range(size))), 10)


def test_readings_change_words_and_no_numbers(driven: Driven) -> None:
    shown = driven["readings"]
    assert [one["view"] for one in shown] == ["search", "routing", "transforms", "message exchange"]
    assert all(one["numbers"] == shown[0]["numbers"] and len(one["numbers"][0]) > 3 for one in shown)
    assert len({tuple(one["steps"]) for one in shown}) == 4
    assert shown[0]["steps"][0] == "1 query"
    exchange = ["receiving channel", "sending channel", "channel overlap", "listening distribution"]
    assert [step[2:] for step in shown[3]["steps"][:4]] == exchange


def test_a_click_on_an_arc_selects_it_a_button_cuts_it_and_everything_leads_back(
    driven: Driven, oracle: Oracle
) -> None:
    shown = driven["arc"]
    selected = shown["selected"]
    assert selected["edits"] == []
    layer, pair = oracle.run().layers[LAYER], [(selected["sender"], selected["token"])]
    numbers = dict(selected["numbers"])
    assert_exact(numbers["weight"], layer.weights(pair)[0, 0, selected["head"]].item())
    assert_exact(numbers["logit"], layer.logits(pair)[0, 0, selected["head"]].item())
    assert_exact(numbers["message"], layer.messages(pair, heads=selected["head"])[0, 0, 0].norm().item())
    # said before it happens
    assert shown["promised"] == f"Cut {selected['sender']} → {selected['token']} in layer {LAYER}, all heads"
    (cut,) = shown["steps"][0]
    assert cut == edit(*pair[0], layer=LAYER)
    assert shown["steps"][1:] == [[], [cut], []]  # undo, redo, taken back from the list
    assert shown["restored"] == [cut]
    assert re.match(rf"{cut['src']} .*weight", shown["readout"], re.DOTALL)
    quiet(shown["seen"])


def test_a_typed_text_is_read_in_the_page(driven: Driven, oracle: Oracle) -> None:
    shown, ids = driven["typed"], oracle.vocabulary.encode(TYPED)
    (pieces, read, cut), last = (shown[name] for name in ("pieces", "read", "cutting")), len(ids) - 1
    assert (shown["offered"], shown["counted"]) == (TEXT, f"{len(ids)} tokens of at most 80")
    assert len(pieces) == len(read["ids"])
    assert (read["ids"], shown["restored"], shown["back"]) == (ids, ids, oracle.ids)
    assert (read["title"], read["focus"]) == ("class Größe: ⏎ def size(self): ⏎ return self.size", str(last))
    before = oracle.run(ids=ids)
    oracle.check_chances(read["chances"], before, last, likeliest := int(before.output[0, last].argmax()))
    assert cut["edits"] == [edit(0, last, layer=LAYER)]
    without = oracle.run(interventions=trace.cut([(0, last)], layers=LAYER), ids=ids)
    oracle.check_chances(cut["chances"], without, last, likeliest)
    too_many = len(oracle.vocabulary.encode("name " * 90))
    assert shown["long"] == [f"{too_many} tokens, {too_many - 80} too many", True]
    quiet(shown["seen"])


def test_keys_and_clicks_that_come_before_the_next_frame_all_count(driven: Driven, oracle: Oracle) -> None:
    """What a key or a button does follows the newest state, not the picture, which may be older."""
    shown = driven["haste"]
    where = {name: [shown[name][one] for one in ("token", "sender")] for name in ("walk", "ports")}
    assert where == {"walk": [8, 1], "ports": [8, 2]}
    edits = {name: shown[name]["work"]["edits"] for name in ("walk", "again", "button", "ports")}
    first, second = edit(1, 8, layer=LAYER), edit(2, 8, layer=LAYER)
    # two more keys put the edge back and cut it; three clicks put it back, cut it and put it back
    assert edits == {"walk": [first], "again": [first], "button": [], "ports": [second]}
    assert (shown["steps"]["step"], shown["drag"]["token"], shown["reach"]["reachLayers"]) == (3, 8, 2)
    ids = list(oracle.ids)
    for _ in range(2):
        ids.append(int(oracle.run(ids=ids).output[0, -1].argmax()))
    assert shown["ids"] == ids
    quiet(shown["seen"])


def check_head(shown: dict[str, Any], row: dict[str, Any], weights: torch.Tensor) -> None:
    """Its weights as opacities, which are whole numbers, and its halves as recorded, wrong ones marked."""
    where = f"layer {row['layer']}, head {row['head']}"
    named = where if row["job"] == "none of these" else f"{where}: {row['job']}"
    assert (shown["layer"], shown["head"], shown["label"]) == (row["layer"], row["head"], named)
    assert (shown["allHeads"], shown["chosen"]) == (False, 1)
    opacities = torch.tensor(shown["picture"]).view_as(weights)
    assert (opacities - 255 * weights.sqrt()).abs().max() <= 0.5 + 1e-6
    for (text, holds), effect in zip(shown["halves"], (row["looks"], row["said"]), strict=True):
        right = effect["p_holm"] <= 0.05
        assert (holds, "wrong" in text) == (right, not right)


def test_every_head_at_a_glance_and_who_attends_to_a_token(driven: Driven, oracle: Oracle) -> None:
    shown, dense = driven["glance"], oracle.dense(oracle.run())
    rows = [row for row in json.loads(HEADS.read_text("utf-8"))["rows"] if row["model"] == "trained"]
    for one, row in zip(shown["heads"], rows, strict=True):
        check_head(one, row, dense[row["layer"], row["head"]])
    chosen = shown["selected"]
    weights = dense[chosen["layer"], chosen["head"]]
    for sender, found in zip((1, 4), shown["receivers"], strict=True):
        most = weights[sender:, sender].sort(descending=True)
        assert [name for name, _ in found] == [f"heard-by-{sender + place}" for place in most.indices[:10]]
        assert_exact([value for _, value in found], most.values[:10])
    assert (chosen["sender"], f"heard-by-{chosen['token']}") == (4, chosen["first"])
    quiet(shown["seen"])


def test_S1_13_five_words_are_five_nodes(driven: Driven, oracle: Oracle) -> None:
    """Weights to all tokens of a word are added, those of a word's tokens averaged: of each word, shares."""
    shown, tokens = driven["words"], [oracle.vocabulary.decode([token]) for token in oracle.ids]
    assert shown["words"] == TEXT.split() == ["Llamas", "do", "not", "output", "words"]
    word_of = torch.tensor([sum(token[0] == " " for token in tokens[: n + 1]) for n in range(len(tokens))])
    belongs = torch.nn.functional.one_hot(word_of).double()
    weights = oracle.dense(oracle.run())[LAYER, HEAD]
    wanted = (belongs / belongs.sum(0)).T @ weights @ belongs
    for number, (token, heard) in enumerate(shown["heard"]):
        assert word_of[token] == number
        assert [name for name, _ in heard] == [f"word-{sender}" for sender in range(number + 1)]
        assert_exact([value for _, value in heard], wanted[number, : number + 1])
    assert shown["arcs"] == 5
    quiet(shown["seen"])


def test_a_visit_without_a_mouse(driven: Driven) -> None:
    shown = driven["keys"]
    seen = [(one["token"], one["sender"], one["edits"]) for one in shown["shown"]]
    assert seen[:4] == [(token, None, 0) for token in range(4)]
    assert seen[4:] == [(3, 0, 0), (3, 0, 1), (3, 1, 1), (3, 1, 2), (3, 1, 1), (3, 1, 0), (10, None, 0)]
    assert [one["focus"] for one in shown["shown"] if one["key"].startswith("Arrow")] == ["1", "2", "3"]
    assert shown["label"].startswith("edge from 0 ")
    selected, cut = shown["pressed"]
    assert (selected[0], selected[1][:12]) == ("true", "edge from 0 ")
    assert (cut[0], cut[1][:15]) == ("true", "no edge from 0 ")
    assert "listens most to" in shown["said"]
    assert "It now expects" in shown["said"]
    quiet(shown["seen"])


def test_what_must_not_be_missed_is_said(driven: Driven) -> None:
    shown = driven["noted"]
    assert len(shown["ahead"]) == len(shown["added"]) == 1
    assert "later ones" in shown["ahead"][0]
    assert "exactly 0" in shown["isolated"]
    assert shown["edges"] == 0
    quiet(shown["seen"])


def test_texts_are_inert_and_visible(driven: Driven) -> None:
    shown = driven["hostile"]
    hostile, harmless = shown["hostile"], shown["harmless"]
    assert hostile["ran"] is None
    assert hostile["elements"] == harmless["elements"]
    assert not hostile["raw"], "control characters and marks of direction stand in the page as they are"
    assert [hostile["texts"][number] for number in (9, 11, 15)] == ["⇥⏎␍␣", "⟨D83D⟩", "∅"]
    assert hostile["texts"][5].startswith("⟨202E⟩right␣to")
    assert hostile["title"] == HOSTILE[0]
    quiet(hostile["seen"])


def test_axe_finds_nothing_and_nothing_is_too_wide(driven: Driven) -> None:
    """Each view in some theme or on a phone, and many tokens at night."""
    for shown in (*driven["axe"].values(), *driven["axe, 64 tokens"].values()):
        quiet(shown.pop("seen"))
        assert shown.pop("overflow") == 0
        assert shown == {name: [] for name in shown}


def test_every_control_does_what_it_says(files: Files, masks: dict[str, int]) -> None:
    demo = files("demo")
    window = {"file": demo, "mask": masks["window"]}
    names = "choices", "decoding", "themes", "buttons", "touch"
    jobs = [*({"scenario": name, "file": demo} for name in names), {"scenario": "reach", **window}]
    choices, decoding, themes, buttons, touch, reach = results(jobs)
    for shown in (choices, decoding, themes, buttons, touch, reach):
        quiet(shown["seen"])
    assert all(chosen == got for pairs in choices["found"].values() for chosen, got in pairs)
    assert all(len(pairs) >= 2 for pairs in choices["found"].values())
    assert decoding["counts"][0] >= 2
    assert decoding["counts"][1] == 1
    assert decoding["full"] == 16
    assert "no more tokens" in decoding["text"]
    assert themes["dark"] != themes["light"] == themes["again"]
    assert (buttons["steps"], buttons["studied"]) == ([6, 5], 1)
    assert [len(buttons[name]) for name in ("cut", "mended", "fromTable")] == [1, 0, 1]
    assert buttons["help"]
    assert buttons["checked"]
    assert (touch["receiver"], touch["edits"]) == (6, [edit(2, 6, layer=LAYER)])
    assert touch["selected"][:2] == [2, []]
    assert [name for name, _ in touch["selected"][2]] == ["weight", "logit", "message", "carried"]
    # a window of 5 reaches 4 more of 11 with each layer: none, one, and after a step back one, two, three
    assert reach["counts"] == [1, 5, 5, 9, 11]
    assert reach["playing"] >= 1
    # down to the model's two layers; where layers differ, none of twelve is known to be the last
    assert (reach["other"], reach["atOnce"], reach["rows"]) == (4, 4, [3, 13])


def test_every_size_fits_every_width(files: Files) -> None:
    names = {name: files(name) for name in ("demo", "one", "64", "512")}
    widths = {"demo": [320, 600, 1200], "one": [320], "64": [320, 1200], "512": [320, 1200]}
    (found,) = results([{"scenario": "sizes", "files": names, "widths": widths}])
    counts = {"demo": 11, "one": 1, "64": 64, "512": 512}
    for name, shown in found.items():
        quiet(shown["seen"])
        assert (shown["overflow"], shown["tokens"]) == (0, counts[name.split(" ")[0]]), name
    assert found["64 at 1200"]["kind"] == "turned"
    assert found["512 at 1200"]["kind"] == "ticks"


def test_the_page_works_in_the_frame_of_a_notebook(tmp_path: Path) -> None:
    frame = tmp_path / "notebook.html"
    notebook = f"<!doctype html><title>notebook</title>{explorer.page(TEXT)._repr_html_()}"
    frame.write_text(notebook, encoding="utf-8")
    (found,) = results([{"scenario": "framed", "frame": str(frame)}])
    assert found["edits"] == 1
    assert found["seen"]["errors"] == []
    assert {url.split("#")[0] for url in found["seen"]["requests"]} <= {frame.as_uri(), "about:srcdoc"}


@pytest.mark.parametrize("browser", ["chromium", "firefox"])
def test_every_number_that_a_click_changes_is_on_the_screen(browser: str, files: Files) -> None:
    """After each click of the tour and each edit, on a desk and a phone."""
    jobs = [{"scenario": "viewport", "file": files("first"), "viewport": size} for size in SIZES.values()]
    for shown in results(jobs, browser=browser):
        assert shown["seen"]["errors"] == []
        assert [one["name"] for one in shown["found"] if not one["changed"]] == []
        assert {one["name"]: one["hidden"] for one in shown["found"] if one["hidden"]} == {}
