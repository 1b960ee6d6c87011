"""The size of a new list of edges decides on its backend, and later the number of its tiles."""

import re
import sys

import pytest
import torch
from support.bounds import assert_exact
from torch.utils.checkpoint import checkpoint

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import dispatch
from gnn_attention.backends.call import AttentionCall

# The function attend hides the module of the same name.
attend_module = sys.modules["gnn_attention.attend"]


def fresh_list(tokens=400, degree=6):
    """Return a list with few messages, whose edges are scattered over 10 by 10 tiles."""
    rng = torch.Generator().manual_seed(3)
    src = torch.rand(tokens, tokens, generator=rng).topk(degree, 1).indices.sort(1).values.flatten()
    return ga.TokenGraph.from_edges(
        torch.stack([src, torch.arange(tokens).repeat_interleave(degree)]), tokens
    )


class ChoiceRecorder:
    """Count how often backends are ranked by estimates, and record the chosen ones."""

    def __init__(self, monkeypatch):
        self.counts, self.names = 0, []
        rank_backends, run = dispatch._rank_backends, attend_module._run_backend

        def count(*arguments):
            self.counts += 1
            return rank_backends(*arguments)

        def record(backend, call):
            self.names.append(backend.name)
            return run(backend, call)

        monkeypatch.setattr(dispatch, "_rank_backends", count)
        monkeypatch.setattr(attend_module, "_run_backend", record)


def test_a_list_is_counted_at_its_third_call_or_when_it_is_prepared(monkeypatch):
    """A rule is counted at its first call; the output always equals the reference."""
    recorder = ChoiceRecorder(monkeypatch)
    q, k, v = (torch.randn(1, 2, 400, 8, dtype=torch.float64) for _ in range(3))
    graph = fresh_list()
    expected = ga.attend(q, k, v, graph, backend="reference")
    for counts in (0, 0, 1, 1):
        assert_exact(ga.attend(q, k, v, graph), expected)
        assert recorder.counts == counts
    graph = fresh_list().prepare()
    assert_exact(ga.attend(q, k, v, graph), expected)
    assert recorder.counts == 2
    ga.attend(q, k, v, patterns.window(400, 3))
    assert recorder.counts == 3


@pytest.mark.parametrize(
    ("degree", "heads", "dim", "backend"),
    [(4, 2, 8, "message_passing"), (40, 8, 64, "rows"), (390, 8, 64, "dense")],
)
def test_the_first_choice_depends_only_on_numbers_of_edges_and_tokens(degree, heads, dim, backend):
    """Few messages go to message passing, many to rows, nearly full graphs to dense; nothing is cached."""
    graph = fresh_list(400, degree)
    q = torch.randn(1, heads, 400, dim)
    earlier_keys = set(graph._memo)
    assert dispatch.choose(AttentionCall.from_arguments(q, q, q, graph)).name == backend
    names = {key[0].__name__ for key in set(graph._memo) - earlier_keys if callable(key[0])} - {"_cache_key"}
    assert names <= {"num_edges", "is_full", "is_causal", "in_degree", "has_empty_rows"}


def test_explain_says_when_a_list_is_counted():
    graph = fresh_list(2048, 16)
    report = ga.explain(graph, 8, 64)
    assert (report.choice, graph.is_prepared) == ("rows", False)
    assert re.match("by the number of its edges alone.* third call .* graph.prepare.., rows: ", report.reason)
    assert (
        ga.explain(graph.prepare(), 8, 64).reason
        == "its edges are few and far between; the least estimated time"
    )
    assert "tiles: its edges lie in few" in ga.explain(make_list(patterns.window(2048, 64)), 8, 64).reason


def make_list(graph):
    return ga.TokenGraph.from_edges(graph.edge_index, graph.num_dst)


def test_a_checkpointed_call_is_recomputed_by_the_same_backend(monkeypatch):
    """The size of a list decides only on its first two calls; recomputation repeats the choices."""
    recorder = ChoiceRecorder(monkeypatch)
    graph = make_list(patterns.window(1024, 40))
    q = torch.randn(1, 2, 1024, 8, dtype=torch.float64, requires_grad=True)
    outs = [checkpoint(ga.attend, q * n, q, q, graph, use_reentrant=False) for n in (1.0, 2.0, 3.0)]
    assert recorder.names == ["message_passing", "message_passing", "tiles"]
    gradient = torch.autograd.grad(sum(outs).sum(), q)[0]
    # The backward pass begins with the last call, and repeats each call on its backend.
    assert recorder.names[3:] == ["tiles", "message_passing", "message_passing"]
    expected = sum(ga.attend(q * n, q, q, graph, backend="reference") for n in (1.0, 2.0, 3.0))
    assert_exact(gradient, torch.autograd.grad(expected.sum(), q)[0])
