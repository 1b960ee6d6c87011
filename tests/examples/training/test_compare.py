"""The comparison of graphs trains under equal conditions, measures, stores results and has a command."""

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
WINDOWS = 4


@pytest.fixture(autouse=True)
def short_reports(monkeypatch):
    """Use few windows, short sequences and one generated token, as reports take most of the time."""
    monkeypatch.setattr(metrics, "_REPORT_WINDOWS", WINDOWS)
    monkeypatch.setattr(ex, "_GENERATED_TOKENS", 1)
    for name in ("induction_scores", "previous_token_scores"):
        monkeypatch.setattr(metrics, name, partial(getattr(metrics, name), length=8, samples=1))


def compare(graphs, recipe=SHORT, seeds=1, out=None):
    return ex.compare(graphs, recipe, seeds, out, TEXT, SIZES)


@pytest.fixture
def trainings(monkeypatch):
    """Return the list to which each training appends its (graph, seed)."""
    pairs = []

    def train(recipe, *arguments, graph, **options):
        pairs.append((graph.name, recipe.seed))
        return trainer.train(recipe, *arguments, graph=graph, **options)

    monkeypatch.setattr(ex, "train", train)
    return pairs


class TestEquality:
    def test_a_training_is_that_of_the_recipe_with_the_graph(self):
        """Losses and scores are those of ``train --graph``; the recipe's seed and graph are replaced."""
        recipe = replace(SHORT, seed=7, graph="window(16, 2)")
        for outcome in compare("window(4); window(3) | sinks(2)", recipe, seeds=2)[1:3]:
            graph = expressions.parse(outcome.graph, n=16).name
            model, _, report = trainer.train(replace(SHORT, graph=graph, seed=outcome.seed), TEXT, SIZES)
            losses = report["held_out_loss"], report["training_loss"]
            assert (outcome.held_out_loss, outcome.training_loss) == losses
            score = induction_scores(model, 8, graph=expressions.parse(graph)).max()
            assert outcome.induction == round(float(score), 4)

    def test_the_loss_is_computed_along_the_same_graph(self):
        """The loss is the mean of -log p over held-out windows, along the edges of the graph alone."""
        graph, data = patterns.window(16, 4), encoded(TEXT, 262)
        model, _, report = trainer.train(SHORT, data, SIZES, graph=graph, progress=False)
        starts = torch.linspace(0, len(data.held_out) - 17, WINDOWS).long()
        windows = data.held_out[starts[:, None] + torch.arange(17)]
        model.backend = "reference"

        @torch.no_grad()
        def loss(dtype, graph):
            logits = model.to(dtype)(windows[:, :-1], graph)
            return float(functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))

        float32_loss, exact_loss = loss(torch.float32, graph), loss(torch.float64, graph)
        # The report rounds to four digits, and both computations have an error in float32.
        assert abs(report["held_out_loss"] - exact_loss) <= 0.5e-4 + 2 * abs(float32_loss - exact_loss)
        assert abs(loss(torch.float64, patterns.causal(16)) - exact_loss) > 1e-3


def test_a_graph_for_each_head():
    (outcome,) = compare("per_head(causal, window(4))")
    assert (outcome.edges_per_token, outcome.induction, outcome.senders) == ((136 + 58) / 32, None, 16)


def test_expressions_files_and_graphs(tmp_path):
    """The first tokens of a longer graph in a file are used."""
    convert_files.write(patterns.strides(40, 3) | patterns.sinks(40, 2), tmp_path / "longer.graphml")
    name = f"file:{tmp_path / 'longer.graphml'}"
    even = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (src % 2 == 0), 16, name="even")
    outcomes = compare([name, even, "window(16, 4)"])
    assert [outcome.graph for outcome in outcomes] == [name, "even", "window(16, 4)"]
    pairs = sum((dst - src) % 3 == 0 or src < 2 for dst in range(16) for src in range(dst + 1))
    assert [outcome.edges_per_token for outcome in outcomes] == [pairs / 16, 72 / 16, 58 / 16]


@pytest.mark.parametrize(
    ("graphs", "match"),
    [
        (3, "graphs must be expressions separated by ;"),
        ("", "graphs must name a graph, such as 'causal; window.64.', got ''"),
        ("causal; windw(4)", "graphs: 'windw.4.': column 1, .*no builder 'windw'; did you mean 'window'"),
        ("causal(15)", "graphs: 'causal.15.' must have the 16 tokens of a window, got .*15 src ->"),
        ("causal; full", r"graphs: 'full' has 120 edges from a later token \(src > dst\)"),
        ("causal; window(16)", "'causal' and 'window.16.' have the same 16 tokens and edges: leave one out"),
        ("duo_attention(3, [1], 4)", "one graph, or one for each of the 2 heads"),
        ("file:{}/short.edges", "has 15 tokens, fewer than a window: use at most this length"),
    ],
)
def test_wrong_graphs_raise_before_any_training(graphs, match, trainings, tmp_path):
    convert_files.write(patterns.causal(15), tmp_path / "short.edges")
    graphs = graphs.format(tmp_path) if isinstance(graphs, str) else graphs
    with pytest.raises(TypeError if graphs == 3 else ValueError, match=match) as error:
        compare(graphs, out=tmp_path / "out")
    assert "\n" not in str(error.value)
    assert trainings == []
    assert not (tmp_path / "out").exists()


class TestFolder:
    def test_finished_trainings_are_not_repeated(self, trainings, monkeypatch, tmp_path):
        """Stored trainings are not repeated; those of another recipe have other files in the same folder."""
        first = compare("causal; window(4)", out=tmp_path / "finished")
        assert trainings == [("causal(16)", 0), ("window(16, 4)", 0)]
        trainings.clear()
        with monkeypatch.context() as patch:
            patch.setattr(ex, "encoded", lambda *_: pytest.fail("the text was encoded"))
            stored = compare("causal; window(16, 4)", out=tmp_path / "finished")
        assert stored == [first[0], replace(first[1], graph="window(16, 4)")]
        assert trainings == []
        more = compare("window(4); window(5); causal", seeds=2, out=tmp_path / "finished")
        new_pairs = [("window(16, 5)", 0), ("window(16, 4)", 1), ("window(16, 5)", 1), ("causal(16)", 1)]
        assert trainings == new_pairs
        assert (more[0], more[2]) == (first[1], first[0])
        compare("causal", replace(SHORT, steps=4), out=tmp_path / "finished")
        assert trainings[4:] == [("causal(16)", 0)]
        assert len(list((tmp_path / "finished").glob("*-seed*.json"))) == 7

    def test_a_changed_file_is_named(self, tmp_path):
        compare("causal", out=tmp_path)
        (file,) = tmp_path.iterdir()
        for content in ("{", "[1]", '{"seed": 1}'):
            file.write_text(content)
            with pytest.raises(ValueError, match=r"seed0\.json has no result of a training: delete it"):
                compare("causal", out=tmp_path)

    def test_a_training_that_diverged_is_not_stored(self, monkeypatch, tmp_path):
        def train(*arguments, **options):
            model, vocabulary, report = trainer.train(*arguments, **options)
            return model, vocabulary, report | {"held_out_loss": float("nan")}

        monkeypatch.setattr(ex, "train", train)
        with pytest.raises(ValueError, match=r"causal, seed 0 diverged: use a rate below 0\.003"):
            compare("causal", out=tmp_path)
        assert list(tmp_path.iterdir()) == []


def outcomes_of(graph, losses, edges=4.0, induction=0.5):
    measures = (1.0, induction, 0.01, 100.0, 4)
    return [Outcome(graph, graph, seed, edges, loss, *measures) for seed, loss in enumerate(losses)]


class TestRows:
    def test_means_and_standard_errors(self):
        # The standard error of n numbers is sqrt(sum of squares about the mean / (n (n - 1))).
        first, second = rows(outcomes_of("a", [2.0, 2.5, 3.0, 2.5]) + outcomes_of("b", [3.0, 3.0, 3.0, 4.0]))
        for value, mean, squares in (
            (first.loss, 2.5, 0.5),
            (second.loss, 3.25, 0.75),
            (second.difference, 0.75, 1.25),
        ):
            assert_exact([value.mean, value.error], [mean, (squares / 12) ** 0.5], largest=4.0)
        assert first.difference is None

    def test_differences_are_taken_seed_by_seed(self):
        """Losses differ much between seeds, but their difference between graphs is always the same."""
        _, second = rows(outcomes_of("a", [1.0, 2.0, 4.0]) + outcomes_of("b", [1.25, 2.25, 4.25]))
        assert second.loss.error > 0.8
        assert_exact([second.difference.mean, second.difference.error], [0.25, 0.0], largest=4.25)
        outcomes = outcomes_of("a", [1.0, 2.0, 4.0])[::-1] + outcomes_of("b", [1.25, 2.25, 4.25])[::-1]
        assert rows(outcomes)[1].difference == second.difference

    def test_the_table(self):
        """Means over several seeds have a standard error, a single seed has none."""
        losses = outcomes_of("causal", [2.0, 2.2], 8.5) + outcomes_of(
            "window(4)", [2.1, 2.1], 3.625, induction=None
        )
        lines = table(rows(losses)).splitlines()
        assert lines[0].split("  ")[0] == "graph"
        assert " ".join(lines[1].split()) == "causal 8.5 2.1000 ± 0.1000 - 0.50 ± 0.00 10.0 100 4"
        assert " ".join(lines[2].split()) == "window(4) 3.6 2.1000 ± 0.0000 +0.0000 ± 0.1000 - 10.0 100 4"
        assert len(set(map(len, lines))) == 1
        (row,) = rows(outcomes_of("a", [2.0]))
        assert row.loss == Mean(2.0, None)
        assert "±" not in table([row])


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs the command ``compare`` on a short text, with a small model."""
    monkeypatch.setattr(ex, "corpus", lambda: TEXT)
    monkeypatch.setattr(ex, "Config", lambda _: SIZES)
    names = ("steps", "batch", "length", "pieces", "warmup", "precision")
    short = [f"--{name}={getattr(SHORT, name)}" for name in names]
    fixed = ["compare", *short, "--graphs", "causal; window(4)", "--seeds=2"]
    return lambda *words: main([*fixed, f"--out={tmp_path / 'finished'}", *words])


def test_the_command_shows_a_table_json_and_a_plot(command, capsys, tmp_path):
    """Stored trainings are not measured again, so their times stay the same."""
    needs("matplotlib")
    files = ["--json", str(tmp_path / "record.json"), "--plot", str(tmp_path / "loss.png")]
    assert command(*files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 steps of 2 windows of 16 tokens; 2 seeds, ± is the standard error"
    assert [line.split()[0] for line in lines[1:]] == ["graph", "causal", "window(4)"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "record.json").read_text())
    assert command("--json") == 0
    assert json.loads(capsys.readouterr().out) == record
    outcomes = [Outcome(**outcome) for outcome in record["outcomes"]]
    order = [(graph, seed) for seed in (0, 1) for graph in ("causal", "window(4)")]
    assert [(outcome.graph, outcome.seed) for outcome in outcomes] == order
    assert record["rows"] == [asdict(row) for row in rows(outcomes)]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--plot", "no/such/loss.svg"], "--plot no/such/loss.svg: expected a folder that exists"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--length", "4000"], "text must have more than length = 4000 tokens"),
    ],
)
def test_wrong_arguments(words, match, command, capsys, trainings):
    assert command(*words) == 2
    output = capsys.readouterr()
    assert output.err.startswith("python -m examples.training: ")
    assert match in output.err
    assert output.out == ""
    assert trainings == [] or "--length" in words
