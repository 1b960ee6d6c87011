"""A list of edges that is seen for the first time: chosen by its size alone, then counted, then planned."""

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

# the name of the module is that of its function
attending = sys.modules["gnn_attention.attend"]


def fresh_list(tokens=400, degree=6):
    """A list whose messages are few, and whose edges lie in 10 by 10 tiles."""
    rng = torch.Generator().manual_seed(3)
    src = torch.rand(tokens, tokens, generator=rng).topk(degree, 1).indices.sort(1).values.flatten()
    return ga.TokenGraph.from_edges(
        torch.stack([src, torch.arange(tokens).repeat_interleave(degree)]), tokens
    )


class Looks:
    """Counts how often the edges of a graph are ordered by estimates, and who is chosen."""

    def __init__(self, monkeypatch):
        self.counts, self.names, ordered, run = 0, [], dispatch._rank_backends, attending._run

        def count(*arguments):
            self.counts += 1
            return ordered(*arguments)

        def note(backend, call):
            self.names.append(backend.name)
            return run(backend, call)

        monkeypatch.setattr(dispatch, "_rank_backends", count)
        monkeypatch.setattr(attending, "_run", note)


def test_a_list_is_counted_at_its_third_call_or_once_it_is_prepared(monkeypatch):
    """A rule at the first; the numbers are those of the formula at every stage."""
    looks, tokens = Looks(monkeypatch), (torch.randn(1, 2, 400, 8, dtype=torch.float64) for _ in range(3))
    q, k, v = tokens
    graph = fresh_list()
    wanted = ga.attend(q, k, v, graph, backend="reference")
    for counts in (0, 0, 1, 1):
        assert_exact(ga.attend(q, k, v, graph), wanted)
        assert looks.counts == counts
    graph = fresh_list().prepare()
    assert_exact(ga.attend(q, k, v, graph), wanted)
    assert looks.counts == 2
    ga.attend(q, k, v, patterns.window(400, 3))
    assert looks.counts == 3


@pytest.mark.parametrize(
    ("edges_of_each", "heads", "dim", "backend"),
    [(4, 2, 8, "message_passing"), (40, 8, 64, "rows"), (390, 8, 64, "dense")],
)
def test_the_first_choice_is_by_the_numbers_of_edges_and_tokens_alone(edges_of_each, heads, dim, backend):
    """Few messages at once, many by rows, and a mask where most pairs are edges; nothing is cached."""
    graph = fresh_list(400, edges_of_each)
    q = torch.randn(1, heads, 400, dim)
    known = set(graph._memo)
    assert dispatch.choose(AttentionCall.from_arguments(q, q, q, graph)).name == backend
    about_edges = {key[0].__name__ for key in set(graph._memo) - known if callable(key[0])} - {"_key"}
    assert about_edges <= {"num_edges", "is_full", "is_causal", "in_degree", "has_empty_rows"}


def test_explain_says_at_which_call_a_list_is_counted():
    graph = fresh_list(2048, 16)
    first = ga.explain(graph, 8, 64)
    assert (first.choice, graph.is_prepared) == ("rows", False)
    assert re.match("by the number of its edges alone.* third call .* graph.prepare.., rows: ", first.reason)
    assert (
        ga.explain(graph.prepare(), 8, 64).reason
        == "its edges are few and far between; the least estimated time"
    )
    assert "tiles: its edges lie in few" in ga.explain(as_list(patterns.window(2048, 64)), 8, 64).reason


def as_list(graph):
    return ga.TokenGraph.from_edges(graph.edge_index, graph.num_dst)


def test_a_checkpointed_call_is_computed_again_as_it_was_though_the_list_is_counted_since(monkeypatch):
    """The first two calls along a list are chosen by its size; those after them, and recomputations, not."""
    looks = Looks(monkeypatch)
    graph = as_list(patterns.window(1024, 40))
    q = torch.randn(1, 2, 1024, 8, dtype=torch.float64, requires_grad=True)
    outs = [checkpoint(ga.attend, q * n, q, q, graph, use_reentrant=False) for n in (1.0, 2.0, 3.0)]
    assert looks.names == ["message_passing", "message_passing", "tiles"]
    found = torch.autograd.grad(sum(outs).sum(), q)[0]
    # The backward pass begins with the last call; each has the backend that it had.
    assert looks.names[3:] == ["tiles", "message_passing", "message_passing"]
    plain = sum(ga.attend(q * n, q, q, graph, backend="reference") for n in (1.0, 2.0, 3.0))
    assert_exact(found, torch.autograd.grad(plain.sum(), q)[0])
