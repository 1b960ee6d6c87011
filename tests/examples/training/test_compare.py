"""The comparison of graphs: what is equal for all, what is measured and stored, and the command."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from torch.nn import functional

import gnn_attention as ga
from examples.training import Corpus, Recipe, encoded, metrics, trainer
from examples.training import compare as ex
from examples.training.__main__ import main
from examples.training.compare_results import Mean, Outcome, rows, table
from gnn_attention import patterns
from gnn_attention.convert import expressions
from gnn_attention.convert import files as convert_files
from gnn_attention.model import Config, induction_scores

SIZES = Config(1, width=16, num_layers=1, num_heads=2, head_dim=8, mlp_width=32, reach=4)
SHORT = Recipe(steps=3, batch=2, length=16, pieces=262, warmup=1, precision="float32")
TEXT = Corpus(
    {"a.py": "def one(x):\n    return x + 1\n" * 40}, {"b.py": "def two(x):\n    return x + 2\n" * 10}
)
JUDGED = 4


@pytest.fixture(autouse=True)
def judged_briefly(monkeypatch):
    """Reports of trainings take most of the time here: few windows, short sequences, one token."""
    monkeypatch.setattr(metrics, "_WINDOWS_JUDGED", JUDGED)
    monkeypatch.setattr(ex, "_GENERATED", 1)
    for name in ("induction_scores", "previous_token_scores"):
        monkeypatch.setattr(metrics, name, partial(getattr(metrics, name), length=8, samples=1))


def compared(graphs, recipe=SHORT, seeds=1, out=None):
    return ex.compare(graphs, recipe, seeds, out, TEXT, SIZES)


@pytest.fixture
def trained(monkeypatch):
    """The (graph, seed) of every training, as they come."""
    seen = []

    def train(recipe, *arguments, graph, **more):
        seen.append((graph.name, recipe.seed))
        return trainer.train(recipe, *arguments, graph=graph, **more)

    monkeypatch.setattr(ex, "train", train)
    return seen


class TestEquality:
    def test_a_training_is_that_of_the_recipe_with_the_graph(self):
        """As ``train --graph`` does it, whatever came before; seed and graph of the recipe are replaced.

        Losses and scores are those of its report and its model.
        """
        other = replace(SHORT, seed=7, graph="window(16, 2)")
        for one in compared("window(4); window(3) | sinks(2)", other, seeds=2)[1:3]:
            graph = expressions.parse(one.graph, n=16).name
            model, _, report = trainer.train(replace(SHORT, graph=graph, seed=one.seed), TEXT, SIZES)
            losses = report["held_out_loss"], report["training_loss"]
            assert (one.held_out_loss, one.training_loss) == losses
            score = induction_scores(model, 8, graph=expressions.parse(graph)).max()
            assert one.induction == round(float(score), 4)

    def test_it_is_judged_along_its_own_graph(self):
        """The loss is the mean of -log p over held-out windows, along the edges of the graph alone."""
        graph, known = patterns.window(16, 4), encoded(TEXT, 262)
        model, _, report = trainer.train(SHORT, known, SIZES, graph=graph, progress=False)
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


def test_a_graph_for_each_head():
    (one,) = compared("per_head(causal, window(4))")
    assert (one.edges_per_token, one.induction, one.senders) == ((136 + 58) / 32, None, 16)


def test_expressions_files_and_graphs(tmp_path):
    """A file may hold a longer graph: its first tokens are taken."""
    convert_files.write(patterns.strides(40, 3) | patterns.sinks(40, 2), tmp_path / "longer.graphml")
    name = f"file:{tmp_path / 'longer.graphml'}"
    mine = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (src % 2 == 0), 16, name="mine")
    found = compared([name, mine, "window(16, 4)"])
    assert [one.graph for one in found] == [name, "mine", "window(16, 4)"]
    pairs = sum((dst - src) % 3 == 0 or src < 2 for dst in range(16) for src in range(dst + 1))
    assert [one.edges_per_token for one in found] == [pairs / 16, 72 / 16, 58 / 16]


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
    ],
)
def test_wrong_graphs_raise_before_any_training(graphs, match, trained, tmp_path):
    convert_files.write(patterns.causal(15), tmp_path / "short.edges")
    graphs = graphs.format(tmp_path) if isinstance(graphs, str) else graphs
    with pytest.raises(TypeError if graphs == 3 else ValueError, match=match) as wrong:
        compared(graphs, out=tmp_path / "out")
    assert "\n" not in str(wrong.value)
    assert trained == []
    assert not (tmp_path / "out").exists()


class TestFolder:
    def test_what_is_there_is_not_trained_again(self, trained, monkeypatch, tmp_path):
        """Another recipe has files of its own in the same folder."""
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
        compared("causal", replace(SHORT, steps=4), out=tmp_path / "finished")
        assert trained[4:] == [("causal(16)", 0)]
        assert len(list((tmp_path / "finished").glob("*-seed*.json"))) == 7

    def test_a_changed_file_is_named(self, tmp_path):
        compared("causal", out=tmp_path)
        (file,) = tmp_path.iterdir()
        for content in ("{", "[1]", '{"seed": 1}'):
            file.write_text(content)
            with pytest.raises(ValueError, match=r"seed0\.json holds no result of a training: delete it"):
                compared("causal", out=tmp_path)

    def test_a_training_that_diverged_is_not_stored(self, monkeypatch, tmp_path):
        def train(*arguments, **more):
            model, vocabulary, report = trainer.train(*arguments, **more)
            return model, vocabulary, report | {"held_out_loss": float("nan")}

        monkeypatch.setattr(ex, "train", train)
        with pytest.raises(ValueError, match=r"causal, seed 0: .* diverged; take a lower rate than 0\.003"):
            compared("causal", out=tmp_path)
        assert list(tmp_path.iterdir()) == []


def made(graph, losses, edges=4.0, induction=0.5):
    rest = (1.0, induction, 0.01, 100.0, 4)
    return [Outcome(graph, graph, seed, edges, loss, *rest) for seed, loss in enumerate(losses)]


class TestRows:
    def test_means_and_standard_errors(self):
        # by hand: of n numbers the root of the sum of squares about the mean, over n (n - 1)
        first, second = rows(made("a", [2.0, 2.5, 3.0, 2.5]) + made("b", [3.0, 3.0, 3.0, 4.0]))
        for found, mean, squares in (
            (first.loss, 2.5, 0.5),
            (second.loss, 3.25, 0.75),
            (second.difference, 0.75, 1.25),
        ):
            assert_exact([found.mean, found.error], [mean, (squares / 12) ** 0.5], largest=4.0)
        assert first.difference is None

    def test_differences_are_taken_seed_by_seed(self):
        """Seeds far apart, graphs always the same step apart: only the mean is uncertain."""
        _, second = rows(made("a", [1.0, 2.0, 4.0]) + made("b", [1.25, 2.25, 4.25]))
        assert second.loss.error > 0.8
        assert_exact([second.difference.mean, second.difference.error], [0.25, 0.0], largest=4.25)
        mixed = made("a", [1.0, 2.0, 4.0])[::-1] + made("b", [1.25, 2.25, 4.25])[::-1]
        assert rows(mixed)[1].difference == second.difference

    def test_the_table(self):
        """An error over seeds, none of one seed."""
        losses = made("causal", [2.0, 2.2], 8.5) + made("window(4)", [2.1, 2.1], 3.625, induction=None)
        lines = table(rows(losses)).splitlines()
        assert lines[0].split("  ")[0] == "graph"
        assert " ".join(lines[1].split()) == "causal 8.5 2.1000 ± 0.1000 - 0.50 ± 0.00 10.0 100 4"
        assert " ".join(lines[2].split()) == "window(4) 3.6 2.1000 ± 0.0000 +0.0000 ± 0.1000 - 10.0 100 4"
        assert len(set(map(len, lines))) == 1
        (one,) = rows(made("a", [2.0]))
        assert one.loss == Mean(2.0, None)
        assert "±" not in table([one])


@pytest.fixture
def command(monkeypatch, tmp_path):
    """``python -m examples.training compare`` on a little text, with a small model."""
    monkeypatch.setattr(ex, "corpus", lambda: TEXT)
    monkeypatch.setattr(ex, "Config", lambda _: SIZES)
    names = ("steps", "batch", "length", "pieces", "warmup", "precision")
    short = [f"--{name}={getattr(SHORT, name)}" for name in names]
    fixed = ["compare", *short, "--graphs", "causal; window(4)", "--seeds=2"]
    return lambda *words: main([*fixed, f"--out={tmp_path / 'finished'}", *words])


def test_the_command_shows_a_table_json_and_a_plot(command, capsys, tmp_path):
    """What is stored is not measured again: the times are the same."""
    needs("matplotlib")
    files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "loss.png")]
    assert command(*files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 steps of 2 windows of 16 tokens; 2 seeds, ± is the standard error"
    assert [line.split()[0] for line in lines[1:]] == ["graph", "causal", "window(4)"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "found.json").read_text())
    assert command("--json") == 0
    assert json.loads(capsys.readouterr().out) == record
    outcomes = [Outcome(**one) for one in record["outcomes"]]
    order = [(graph, seed) for seed in (0, 1) for graph in ("causal", "window(4)")]
    assert [(one.graph, one.seed) for one in outcomes] == order
    assert record["rows"] == [asdict(row) for row in rows(outcomes)]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--plot", "no/such/loss.svg"], "--plot no/such/loss.svg: expected a folder that exists"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--length", "4000"], "the corpus has a part of"),
    ],
)
def test_wrong_arguments(words, match, command, capsys, trained):
    assert command(*words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("python -m examples.training: ")
    assert match in said.err
    assert said.out == ""
    assert trained == [] or "--length" in words
