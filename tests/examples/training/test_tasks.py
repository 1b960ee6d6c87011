"""NeighborsMatch: the samples, what reach decides, and what is learned."""

import json

import networkx as nx
import pytest
import torch

import gnn_attention as ga
from examples.training import tasks
from examples.training.__main__ import main
from gnn_attention import algebra


@pytest.fixture
def judged_briefly(monkeypatch):
    """By few samples: most of the time goes into them."""
    monkeypatch.setattr(tasks, "_TESTED", 64)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_tree(depth):
    """networkx's binary tree with self loops: leaves ``depth`` hops from the root."""
    task = tasks.neighbours_match(depth, samples=1)
    wanted = nx.balanced_tree(2, depth)
    wanted.add_edges_from((node, node) for node in list(wanted))
    assert task.graph == ga.convert.from_networkx(wanted)
    leaves = [n for n in wanted if n and nx.degree(wanted, n) == 3 and n >= 2**depth - 1]
    assert task.leaves.nonzero().flatten().tolist() == leaves
    distance = nx.single_source_shortest_path_length(wanted, 0)
    assert {distance[node] for node in leaves} == {depth}
    assert (task.graph**depth).in_degree()[0] == task.graph.num_dst


def test_the_samples():
    """Every leaf a key of its own, the root one of them; even labels; the answer is the leaf's."""
    task = tasks.neighbours_match(3, samples=4000, num_labels=4, seed=1)
    leaves = task.leaves
    assert (task.keys[:, leaves].sort(dim=1).values == torch.arange(1, 9)).all()
    assert (task.keys[:, 1:7] == 0).all()
    assert (task.labels[:, ~leaves] == 0).all()
    found = task.keys[:, leaves] == task.keys[:, :1]
    assert (found.sum(1) == 1).all()
    assert torch.equal(task.labels[:, leaves][found] - 1, task.answers)
    for counted, classes in ((task.answers, 4), (task.keys[:, 0] - 1, 8), (found.int().argmax(1), 8)):
        share = counted.bincount(minlength=classes) / 4000
        assert (share - 1 / classes).abs().max() < 5 * (1 / classes * (1 - 1 / classes) / 4000) ** 0.5
    assert torch.equal(tasks.neighbours_match(3, samples=4000, num_labels=4, seed=1).keys, task.keys)
    assert not torch.equal(tasks.neighbours_match(3, samples=4000, num_labels=4, seed=2).keys, task.keys)
    assert torch.equal(task.x[..., :8].argmax(-1)[:, leaves] + 1, task.keys[:, leaves])
    assert torch.equal(task.x.sum(-1), (task.keys > 0).float() + (task.labels > 0).float())


def plans(depth):
    """A graph, a number of layers, and whether a leaf reaches the root."""
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


@pytest.mark.parametrize(("graph", "layers", "reaches"), plans(3))
def test_the_answer_depends_on_the_leaves_that_reach_the_root(graph, layers, reaches):
    """Other labels at the leaves: the same logits at the root to the last bit, or not."""
    task, other = (tasks.neighbours_match(3, samples=50, seed=seed) for seed in (0, 1))
    torch.manual_seed(0)
    reader = tasks.Reader(task.x.shape[-1], 4, layers, virtual=graph.num_dst - task.graph.num_dst).double()
    x = task.x.double()
    changed = torch.where(task.leaves[:, None], other.x.double(), x)
    same = reader(x, graph)[:, 0] == reader(changed, graph)[:, 0]
    assert bool(same.all()) is not reaches
    assert tasks._reaches_leaf(task.graph, graph, layers) is reaches


def test_the_command(tmp_path, capsys, judged_briefly):
    """A table and JSON; wrong numbers and a folder that is missing are named before anything is trained."""
    file, words = tmp_path / "reach.json", ["reach", "--depth", "1", "--seeds", "1", "--steps", "1"]
    assert main([*words, "--json", str(file)]) == 0
    assert "reaches leaf" in capsys.readouterr().out
    assert json.loads(file.read_text())[0]["graph"] == "the tree"
    for wrong, message in (
        (["--json", str(tmp_path / "none" / "reach.json")], "expected a folder that exists"),
        (["--depth", "0"], "depth must be at least 1, got 0"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
    ):
        assert main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_only_reach_answers():
    """Without reach no better than chance, over the hops nearly always; names, layers and reach of a row."""
    # five standard errors of a share of 2048 answers
    allowed = 5 * (0.25 * 0.75 / 2048) ** 0.5
    outcomes = tasks.compare(depth=3, seeds=1, steps=120)
    assert [(one.graph, one.layers, one.reaches) for one in outcomes] == [
        ("the tree", 1, False),
        ("the tree", 3, True),
        ("the tree ** 3", 1, True),
        *(("with a virtual node", layers, layers > 1) for layers in (1, 2, 3)),
    ]
    for one in outcomes:
        if not one.reaches:
            assert all(abs(accuracy - 0.25) < allowed for accuracy in one.accuracies), one
        if one.graph == "the tree ** 3":
            assert min(one.accuracies) > 0.95, one
