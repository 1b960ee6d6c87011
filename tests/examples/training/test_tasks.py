"""NeighborsMatch has the samples of its paper, and only models with enough reach learn its answers."""

import json

import networkx as nx
import pytest
import torch

import gnn_attention as ga
from examples.training import tasks
from examples.training.__main__ import main
from gnn_attention import algebra


@pytest.fixture
def few_test_samples(monkeypatch):
    """Draw few test samples, because they take most of the time."""
    monkeypatch.setattr(tasks, "_TEST_SAMPLES", 64)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_tree(depth):
    """The graph is networkx's binary tree with self loops, whose leaves are ``depth`` hops from the root."""
    task = tasks.neighbours_match(depth, samples=1)
    tree = nx.balanced_tree(2, depth)
    tree.add_edges_from((node, node) for node in list(tree))
    assert task.graph == ga.convert.from_networkx(tree)
    leaves = [n for n in tree if n and nx.degree(tree, n) == 3 and n >= 2**depth - 1]
    assert task.leaves.nonzero().flatten().tolist() == leaves
    distance = nx.single_source_shortest_path_length(tree, 0)
    assert {distance[node] for node in leaves} == {depth}
    assert (task.graph**depth).in_degree()[0] == task.graph.num_dst


def test_the_samples():
    """Leaves have distinct keys, the root has one of them, and the answer is the label of its leaf."""
    task = tasks.neighbours_match(3, samples=4000, num_labels=4, seed=1)
    leaves = task.leaves
    assert (task.keys[:, leaves].sort(dim=1).values == torch.arange(1, 9)).all()
    assert (task.keys[:, 1:7] == 0).all()
    assert (task.labels[:, ~leaves] == 0).all()
    is_match = task.keys[:, leaves] == task.keys[:, :1]
    assert (is_match.sum(1) == 1).all()
    assert torch.equal(task.labels[:, leaves][is_match] - 1, task.answers)
    for values, classes in ((task.answers, 4), (task.keys[:, 0] - 1, 8), (is_match.int().argmax(1), 8)):
        share = values.bincount(minlength=classes) / 4000
        assert (share - 1 / classes).abs().max() < 5 * (1 / classes * (1 - 1 / classes) / 4000) ** 0.5
    assert torch.equal(tasks.neighbours_match(3, samples=4000, num_labels=4, seed=1).keys, task.keys)
    assert not torch.equal(tasks.neighbours_match(3, samples=4000, num_labels=4, seed=2).keys, task.keys)
    assert torch.equal(task.x[..., :8].argmax(-1)[:, leaves] + 1, task.keys[:, leaves])
    assert torch.equal(task.x.sum(-1), (task.keys > 0).float() + (task.labels > 0).float())


def cases(depth):
    """Return graphs, numbers of layers, and whether a leaf reaches the root."""
    tree = tasks.neighbours_match(depth, 1).graph
    star = algebra.tokens.extend(tree, 1, "both", "self")
    return [
        (tree, 1, False),
        (tree, depth - 1, False),
        (tree, depth, True),
        (tree**depth, 1, True),
        (star, 1, False),
        (star, 2, True),
    ]


@pytest.mark.parametrize(("graph", "layers", "reaches"), cases(3))
def test_the_answer_depends_on_the_leaves_that_reach_the_root(graph, layers, reaches):
    """Other inputs at the leaves change the logits of the root, or leave every bit of them unchanged."""
    task, other_task = (tasks.neighbours_match(3, samples=50, seed=seed) for seed in (0, 1))
    torch.manual_seed(0)
    reader = tasks.Reader(task.x.shape[-1], 4, layers, virtual=graph.num_dst - task.graph.num_dst).double()
    x = task.x.double()
    changed_x = torch.where(task.leaves[:, None], other_task.x.double(), x)
    same = reader(x, graph)[:, 0] == reader(changed_x, graph)[:, 0]
    assert bool(same.all()) is not reaches
    assert tasks._reaches_leaf(task.graph, graph, layers) is reaches


def test_the_command(tmp_path, capsys, few_test_samples):
    """The command prints a table and writes JSON; wrong options raise an error before any training."""
    file, options = tmp_path / "reach.json", ["reach", "--depth", "1", "--seeds", "1", "--steps", "1"]
    assert main([*options, "--json", str(file)]) == 0
    assert "reaches leaf" in capsys.readouterr().out
    assert json.loads(file.read_text())[0]["graph"] == "the tree"
    for wrong, message in (
        (["--json", str(tmp_path / "none" / "reach.json")], "expected a folder that exists"),
        (["--depth", "0"], "depth must be at least 1, got 0"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
    ):
        assert main([*options, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_only_reach_answers():
    """Without reach a model does not beat chance; ``tree ** 3`` is learned nearly perfectly."""
    # This is five standard errors of a share of 2048 answers.
    allowed = 5 * (0.25 * 0.75 / 2048) ** 0.5
    outcomes = tasks.compare(depth=3, seeds=1, steps=120)
    assert [(outcome.graph, outcome.layers, outcome.reaches) for outcome in outcomes] == [
        ("the tree", 1, False),
        ("the tree", 3, True),
        ("the tree ** 3", 1, True),
        *(("with a virtual node", layers, layers > 1) for layers in (1, 2, 3)),
    ]
    for outcome in outcomes:
        if not outcome.reaches:
            assert all(abs(accuracy - 0.25) < allowed for accuracy in outcome.accuracies), outcome
        if outcome.graph == "the tree ** 3":
            assert min(outcome.accuracies) > 0.95, outcome
