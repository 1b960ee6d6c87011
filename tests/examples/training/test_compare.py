"""The comparison of graphs: what is equal for all, what is measured and stored, and the command."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from support.extras import needs
from support.refusals import assert_refusals
from torch.nn import functional

import gnn_attention as ga
from examples.training import Corpus, Recipe, metrics
from examples.training import compare as ex
from examples.training import trainer as training
from examples.training.__main__ import main
from examples.training.compare_results import Outcome, rows
from gnn_attention import patterns
from gnn_attention.analyse.cost import most_cached
from gnn_attention.cache import KeyValueCache
from gnn_attention.convert import expressions
from gnn_attention.convert import files as convert_files
from gnn_attention.model import Config, induction_scores

SIZES = Config(1, width=16, num_layers=1, num_heads=2, head_dim=8, mlp_width=32, reach=4)
SHORT = Recipe(steps=3, batch=2, length=16, pieces=262, warmup=1, precision="float32")
TEXT = Corpus(
    {"a.py": "def one(x):\n    return x + 1\n" * 40}, {"b.py": "def two(x):\n    return x + 2\n" * 10}
)
THREE = "causal; window(4); window(3) | sinks(2)"
JUDGED = 4


@pytest.fixture(autouse=True)
def judged_briefly(monkeypatch):
    """Reports of trainings take most of the time here: few windows, short sequences, one token."""
    monkeypatch.setattr(metrics, "_WINDOWS_JUDGED", JUDGED)
    monkeypatch.setattr(ex, "_GENERATED", 1)
    for name in ("induction_scores", "previous_token_scores"):
        monkeypatch.setattr(metrics, name, partial(getattr(metrics, name), length=8, samples=1))


def compared(graphs=THREE, recipe=SHORT, seeds=1, out=None, **more):
    return ex.compare(graphs, recipe, seeds, out, TEXT, SIZES, **more)


@cache
def finished():
    """The outcome of one training, and the files that a comparison writes of it, by name."""
    with tempfile.TemporaryDirectory() as folder:
        (outcome,) = compared("causal", out=Path(folder) / "finished")
        return outcome, {path.name: path.read_text() for path in (Path(folder) / "finished").iterdir()}


def written(folder):
    """The folder of a comparison that is finished, and its outcome."""
    folder.mkdir()
    outcome, files = finished()
    for name, text in files.items():
        (folder / name).write_text(text)
    return outcome


def measured(outcome):
    """What does not depend on the clock."""
    return replace(outcome, seconds_per_step=0.0, tokens_per_second=0.0)


@pytest.fixture
def trained(monkeypatch):
    """The (graph, seed) of every training, as they come."""
    seen = []

    def train(recipe, *arguments, graph, **more):
        seen.append((graph.name, recipe.seed))
        return training.train(recipe, *arguments, graph=graph, **more)

    monkeypatch.setattr(ex, "train", train)
    return seen


def stop_after(monkeypatch, count):
    """KeyboardInterrupt in the step after so many."""
    step, number = training._Fit.step, iter(range(100))

    def interrupted(fit, window, done):
        if next(number) == count:
            raise KeyboardInterrupt
        step(fit, window, done)

    monkeypatch.setattr(training._Fit, "step", interrupted)


class TestEquality:
    def test_weights_and_windows_are_the_same_for_every_graph_of_a_seed(self, monkeypatch):
        seen, step = [], training._Fit.step

        def watched(fit, window, done):
            seen.append((window, [parameter.detach().clone() for parameter in fit.model.parameters()]))
            step(fit, window, done)

        monkeypatch.setattr(training._Fit, "step", watched)
        compared("causal; window(4)", seeds=2)
        runs = [seen[start : start + SHORT.steps] for start in range(0, len(seen), SHORT.steps)]
        assert len(runs) == 4
        for one, other in ((0, 1), (2, 3)):
            assert all(torch.equal(a[0], b[0]) for a, b in zip(runs[one], runs[other], strict=True))
            assert all(map(torch.equal, runs[one][0][1], runs[other][0][1]))
        assert not torch.equal(runs[0][0][0], runs[2][0][0])
        assert not torch.equal(runs[0][0][1][0], runs[2][0][1][0])
        # what they learn differs
        assert not torch.equal(runs[0][2][1][0], runs[1][2][1][0])

    def test_a_training_is_that_of_the_recipe_with_the_graph(self):
        """As ``train --graph`` does it, whatever came before; seed and graph of the recipe are replaced.

        Losses and scores are those of its report and its model.
        """
        other = replace(SHORT, seed=7, graph="window(16, 2)")
        for one in compared("window(4); window(3) | sinks(2)", other, seeds=2)[1:3]:
            graph = expressions.parse(one.graph, n=16).name
            model, _, report = training.train(replace(SHORT, graph=graph, seed=one.seed), TEXT, SIZES)
            losses = report["held_out_loss"], report["training_loss"]
            assert (one.held_out_loss, one.training_loss) == losses
            score = induction_scores(model, 8, graph=expressions.parse(graph)).max()
            assert one.induction == round(float(score), 4)

    def test_it_is_judged_along_its_own_graph(self):
        """The loss is the mean of -log p over held-out windows, along the edges of the graph alone."""
        graph, known = patterns.window(16, 4), training.encoded(TEXT, 262)
        model, _, report = training.train(SHORT, known, SIZES, graph=graph, progress=False)
        starts = torch.linspace(0, len(known.held_out) - 17, JUDGED).long()
        windows = known.held_out[starts[:, None] + torch.arange(17)]
        model.backend = "reference"

        @torch.no_grad()
        def loss(dtype, graph):
            logits = model.to(dtype)(windows[:, :-1], graph)
            return float(functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))

        narrow, wide = loss(torch.float32, graph), loss(torch.float64, graph)
        # half of the report's fourth digit, and twice the error of the backend "reference" in float32
        assert abs(report["held_out_loss"] - wide) <= 0.5e-4 + 2 * abs(narrow - wide)
        assert abs(loss(torch.float64, patterns.causal(16)) - wide) > 1e-3


STORED = [
    "window(24, 3) | sinks(24, 2)",
    "strict_causal(24)",
    "duo_attention(24, 2, [1], 4)",
    "chunked(24, 8)",
]


class TestMeasures:
    def test_a_graph_for_each_head(self):
        (one,) = compared("per_head(causal, window(4))")
        assert one.edges_per_token == (136 + 58) / 32
        assert one.induction is None
        assert one.senders == 16

    @pytest.mark.parametrize("text", STORED)
    @torch.no_grad()
    def test_senders_are_the_most_that_a_cache_stores(self, text):
        graph = expressions.parse(text)
        cache, most = KeyValueCache(graph), 0
        for _ in range(24):
            cache.append(*(torch.zeros(1, 2, 1, 4) for _ in range(2)))
            most = max(most, len(cache.positions))
        assert most_cached(graph) == most

    def test_a_training_that_diverged(self, monkeypatch, tmp_path):
        def train(*arguments, **more):
            model, vocabulary, report = training.train(*arguments, **more)
            return model, vocabulary, report | {"held_out_loss": float("nan")}

        monkeypatch.setattr(ex, "train", train)
        with pytest.raises(ValueError, match=r"causal, seed 0: .* diverged; take a lower rate than 0\.003"):
            compared(out=tmp_path / "finished")
        assert list((tmp_path / "finished").iterdir()) == []


class TestGraphs:
    def test_expressions_files_and_graphs(self, tmp_path):
        """A file may hold a longer graph: its first tokens are taken."""
        convert_files.write(patterns.strides(40, 3) | patterns.sinks(40, 2), tmp_path / "longer.graphml")
        name = f"file:{tmp_path / 'longer.graphml'}"
        mine = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (src % 2 == 0), 16, name="mine")
        found = compared([name, mine, "window(16, 4)"])
        assert [one.graph for one in found] == [name, "mine", "window(16, 4)"]
        pairs = sum((dst - src) % 3 == 0 or src < 2 for dst in range(16) for src in range(dst + 1))
        assert [one.edges_per_token for one in found] == [pairs / 16, 72 / 16, 58 / 16]
        (one,) = compared("strides(3) | sinks(2)")
        assert measured(one) == replace(measured(found[0]), graph="strides(3) | sinks(2)")

    @pytest.mark.parametrize(
        ("graphs", "match"),
        [
            (3, "graphs must be expressions with ; between them"),
            ("", "graphs must name at least one graph, such as 'causal; window.64.', got ''"),
            ("causal; windw(4)", "graphs: 'windw.4.': column 1, .*no builder 'windw'; did you mean 'window'"),
            ("causal(15)", "graphs: 'causal.15.' must have the 16 tokens of a window, got .*15 src ->"),
            ("causal; full", r"graphs: 'full' has 120 edges from a later token \(src > dst\)"),
            ("causal; window(16)", "'causal' and 'window.16.' have the same 16 tokens and edges, leave one"),
            ("duo_attention(3, [1], 4)", "one graph, or one for each of the 2 heads"),
            ("file:{}/short.edges", "has 15 tokens, fewer than a window: take a length of at most 15"),
            ("file:{}/both.edges", "has 29 edges from a later token .* take lines with src > dst out of"),
        ],
    )
    def test_wrong_graphs_raise_before_any_training(self, graphs, match, trained, tmp_path):
        convert_files.write(patterns.causal(15), tmp_path / "short.edges")
        convert_files.write(patterns.window(20, 3, causal=False), tmp_path / "both.edges")
        graphs = graphs.format(tmp_path) if isinstance(graphs, str) else graphs
        with pytest.raises(TypeError if graphs == 3 else ValueError, match=match) as wrong:
            compared(graphs, out=tmp_path / "out")
        assert "\n" not in str(wrong.value)
        assert trained == []
        assert not (tmp_path / "out").exists()


class TestFolder:
    def test_what_is_there_is_not_trained_again(self, trained, monkeypatch, tmp_path):
        first = compared("causal; window(4)", out=tmp_path / "finished")
        assert trained == [("causal(16)", 0), ("window(16, 4)", 0)]
        trained.clear()
        with monkeypatch.context() as patch:
            patch.setattr(ex, "encoded", lambda *_: pytest.fail("the text was encoded"))
            again = compared("causal; window(16, 4)", out=tmp_path / "finished")
        assert again == [first[0], replace(first[1], graph="window(16, 4)")]
        assert trained == []
        more = compared("window(4); window(5); causal", seeds=2, out=tmp_path / "finished")
        added = [("window(16, 5)", 0), ("window(16, 4)", 1), ("window(16, 5)", 1), ("causal(16)", 1)]
        assert trained == added
        assert (more[0], more[2]) == (first[1], first[0])
        assert len(list((tmp_path / "finished").glob("*-seed*.json"))) == 6

    @pytest.mark.parametrize(
        ("changed", "text", "width", "match"),
        [
            ({"steps": 4}, TEXT, 16, "with steps 3, not 4: choose a new folder, or the same options"),
            ({}, Corpus({"a.py": "x = 1\n" * 99}, {}), 16, r"with corpus \"\w{16}\", not \"\w{16}\": choose"),
            ({}, TEXT, 8, "with width 16, not 8: choose"),
        ],
    )
    def test_another_plan_is_named(self, changed, text, width, match, tmp_path):
        written(tmp_path / "finished")
        recipe, config = replace(SHORT, **changed), replace(SIZES, width=width)
        with pytest.raises(ValueError, match=f"finished holds a comparison {match}"):
            ex.compare("causal", recipe, 1, tmp_path / "finished", text, config)

    @pytest.mark.parametrize(
        ("name", "content", "match"),
        [
            ("plan.json", "{", "plan.json is no JSON .*: delete it to begin anew"),
            ("{key}-seed0.json", "{}", "seed0.json holds no result of a training: delete it to train"),
            ("{key}-seed0.json", '"seed": 1', "holds the result of causal, seed 1: delete it to train anew"),
            ("{key}-seed0.json", '"held_out_loss": NaN', "holds no result"),
        ],
    )
    def test_changed_files(self, name, content, match, tmp_path):
        one = written(tmp_path / "finished")
        assert compared("causal", out=tmp_path / "finished") == [one]
        file = tmp_path / "finished" / name.format(key=one.key)
        if content.startswith('"'):
            content = json.dumps(asdict(one) | json.loads(f"{{{content}}}"))
        file.write_text(content)
        with pytest.raises(ValueError, match=match):
            compared("causal", out=tmp_path / "finished")

    def test_wrong_folders(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        missing = "expected one in a folder that exists, make .*none first"
        assert_refusals(
            [
                (lambda: compared(out=tmp_path), ValueError, "holds files, but no plan.json of a comparison"),
                (lambda: compared(out=tmp_path / "notes.txt"), ValueError, "notes.txt is no folder"),
                (lambda: compared(out=tmp_path / "none" / "finished"), ValueError, missing),
            ]
        )
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """``python -m examples.training compare`` on a little text, with a small model."""
    monkeypatch.setattr(ex, "corpus", lambda: TEXT)
    monkeypatch.setattr(ex, "Config", lambda _: SIZES)
    names = ("steps", "batch", "length", "pieces", "warmup", "precision")
    short = [f"--{name}={getattr(SHORT, name)}" for name in names]
    return lambda *words: main(["compare", *short, "--seeds=2", f"--out={tmp_path / 'finished'}", *words])


class TestCommand:
    def test_the_table(self, command, capsys):
        assert command("--graphs", "causal; window(4)") == 0
        said = capsys.readouterr()
        assert said.err == ""
        lines = said.out.splitlines()
        assert lines[0] == "3 steps of 2 windows of 16 tokens; 2 seeds, ± is the standard error over them"
        assert [line.split()[0] for line in lines[1:]] == ["graph", "causal", "window(4)"]
        assert command("--graphs", "causal; window(4)") == 0
        # the times too: nothing was measured again
        assert capsys.readouterr().out == said.out

    def test_json_and_plot(self, command, capsys, tmp_path):
        needs("matplotlib")
        files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "loss.png")]
        assert command("--graphs", "causal; window(4)", *files) == 0
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
        record = json.loads((tmp_path / "found.json").read_text())
        capsys.readouterr()
        assert command("--graphs", "causal; window(4)", "--json") == 0
        assert json.loads(capsys.readouterr().out) == record
        assert record["recipe"]["steps"] == 3
        outcomes = [Outcome(**one) for one in record["outcomes"]]
        order = [(graph, seed) for seed in (0, 1) for graph in ("causal", "window(4)")]
        assert [(one.graph, one.seed) for one in outcomes] == order
        assert record["rows"] == [asdict(row) for row in rows(outcomes)]
        assert record["rows"][1]["difference"].keys() == {"mean", "error"}

    def test_interrupted_it_says_how_to_go_on(self, command, monkeypatch, capsys, tmp_path):
        stop_after(monkeypatch, 4)
        assert command("--graphs", "causal; window(4)") == 130
        said, finished = capsys.readouterr(), f"1 of 4 trainings are in {tmp_path / 'finished'}"
        assert said == ("", f"interrupted: {finished}, the same command goes on from there\n")
        assert command("--graphs", "causal; window(4)") == 0
        assert "window(4)" in capsys.readouterr().out

    def test_progress_counts_the_steps_of_all_trainings(self, monkeypatch):
        monkeypatch.setattr(ex, "_SECONDS_BETWEEN_LINES", 0.0)
        lines: list[str] = []
        compared("causal; window(4)", seeds=2, log=lines.append)
        assert lines[0].endswith("reading the text]")
        counts = [re.search(r"\| (\d+)/12 \[", line)[1] for line in lines[1:]]
        assert counts == [str(step) for step in range(1, 13)]
        assert "causal, seed 0, loss " in lines[1]
        assert "window(4), seed 1, loss " in lines[-1]

    @pytest.mark.parametrize(
        ("words", "match"),
        [
            (["--plot", "no/such/loss.svg"], "--plot no/such/loss.svg: expected a folder that exists"),
            (["--plot", "{}/loss.xyz"], "expected a file name that ends in one of .eps, "),
            (["--seeds", "0"], "seeds must be at least 1, got 0"),
            (["--length", "4000"], "the corpus has a part of"),
        ],
    )
    def test_wrong_arguments(self, words, match, command, capsys, tmp_path, trained):
        if "--plot" in words:
            needs("matplotlib")
        assert command(*(word.format(tmp_path) for word in words)) == 2
        said = capsys.readouterr()
        assert said.err.startswith("python -m examples.training compare: ")
        assert match in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""
        assert not list(tmp_path.glob("loss*"))
