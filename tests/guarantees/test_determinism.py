"""F8: a race, an order that matters and a number of threads that does are seen."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import gnn_attention as ga
from gnn_attention import convert, score_mods
from gnn_attention._support.deterministic_index import entries
from gnn_attention.backends import BACKENDS
from tests.guarantees import determinism

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone


def changed(monkeypatch, name, change):
    sound = BACKENDS[name]

    def run(call):
        out, lse = sound.run(call)
        return change(call, out), lse

    monkeypatch.setitem(BACKENDS, name, replace(sound, run=run))
    return BACKENDS[name]


def call_of(added):
    return next(call for call in determinism._calls() if call.where == "list" and call.added == added)


def test_a_result_that_differs_is_seen(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    wrong = changed(monkeypatch, "dense", lambda call, out: out + 1e-6 * torch.rand(1, generator=rng))
    failures, _ = determinism._broken("repeats", call_of("bias"), "dense", wrong, 2)
    assert len(failures) == 4
    assert "bias on list, float32, dense, repeat 0 as it is: out, gradient" in failures[0]


def test_what_lay_in_memory_is_seen(monkeypatch):
    wrong = changed(monkeypatch, "dense", lambda call, out: out + torch.empty(2**14).sum() * 0)
    assert determinism._broken("repeats", call_of("bias"), "dense", wrong, 5)[0]


def test_an_order_that_matters_is_seen(monkeypatch):
    wrong = changed(monkeypatch, "dense", lambda call, out: out + call.graph.edge_index[0, 0] * 1e-6)
    assert "order 0" in determinism._broken("orders of edges", call_of("table"), "dense", wrong, 10)[0][0]


def test_a_number_of_threads_that_matters_is_seen(monkeypatch):
    wrong = changed(monkeypatch, "rows", lambda call, out: out + torch.get_num_threads() * 1e-6)
    assert (
        "one thread and two"
        in determinism._broken("numbers of threads", call_of("table"), "rows", wrong, 1)[0][0]
    )


def test_an_exception_is_a_failure(monkeypatch):
    wrong = changed(monkeypatch, "rows", lambda call, out: out.no_such_thing)
    assert "AttributeError" in determinism._broken("repeats", call_of("table"), "rows", wrong, 1)[0][0]


def test_the_reference_gives_the_same_bits_for_any_order_of_edges():
    """In float64, where no rounding to float32 hides the order of a sum."""
    edges = (
        torch.ones(30, 30).nonzero().t()[:, torch.randperm(900, generator=torch.Generator().manual_seed(0))]
    )
    q = torch.randn(1, 2, 30, 8, dtype=torch.float64)
    outs = [
        ga.attend(q, q, q, convert.from_edge_index(e, 30, 30), backend="reference")
        for e in (edges, edges.flip(1))
    ]
    assert torch.equal(*outs)


def test_the_gradient_of_a_table_is_summed_in_float64():
    """One after the other in float32, 1e8 and then ones would be 1e8."""
    table = torch.zeros(1, 1, requires_grad=True)
    place = torch.zeros(101, dtype=torch.int64)
    entries(table, place, place).backward(torch.tensor([1e8] + 100 * [1.0]))
    assert table.grad.item() == torch.tensor(100000100.0).item() > 1e8


def test_a_learned_table_has_both_derivatives_and_refuses_what_it_has_not():
    table = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    head, column = torch.arange(2).view(2, 1), torch.tensor([0, 4, 4, 1])
    assert torch.autograd.gradcheck(lambda t: entries(t, head, column).square(), (table,))
    assert torch.autograd.gradgradcheck(lambda t: entries(t, head, column).square(), (table,))
    assert torch.func.grad(lambda t: entries(t, head, column).sum())(table).shape == table.shape
    with pytest.raises(IndexError, match="out of bounds"):
        entries(table, torch.tensor([2]), torch.tensor([0]))


@pytest.mark.parametrize(
    "mod", [lambda score: score, torch.nn.Linear(2, 2), partial(score_mods.softcap(1.0), 1)]
)
def test_a_score_mod_of_another_signature_is_refused(mod):
    x = torch.ones(1, 1, 3, 2)
    with pytest.raises(TypeError, match=r"score_mod must take \(score, b, h, dst, src\), got a \w+ of \("):
        ga.attend(x, x, x, ga.patterns.causal(3), score_mod=mod)
