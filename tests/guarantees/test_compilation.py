"""F7: a case of each kind holds; a break, a program too many, a wrong gradient or export is seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS
from tests.guarantees import compilation, operators
from tests.guarantees.compilation import CompilationCase, cases

# torch's own compiler instantiates autograd.Function, which torch itself calls deprecated
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def test_every_operator_that_runs_here_has_calls():
    """Recorded from public functions, so that they are never out of date."""
    calls = operators.recorded()
    assert [name for name in operators.on_this_machine() if not calls[name]] == []
    assert {name for name in operators.names() if name not in operators.on_this_machine()} == {
        "flash_sequences",
        "flash_sequences_backward",
        "triton_attention",
        "triton_attention_backward",
    }


def test_an_operator_without_calls_is_seen(monkeypatch):
    known = operators.names()
    monkeypatch.setattr(operators, "names", lambda: [*known, "new_one"])
    operators_of = {case.of: case for case in cases() if case.kind == "operator"}
    assert "no call of it is known" in operators_of["new_one"].problem()


def test_a_derivative_that_is_not_registered_is_seen():
    """As that of the copy was: eager lost the gradient, a compiled program did not."""
    with torch.library._scoped_library("gnn_attention", "FRAGMENT") as library:
        library.define("lost(Tensor x) -> Tensor")
        library.impl("lost", torch.clone, "CompositeExplicitAutograd")
        assert "lost" in operators.names()
        outcomes = operators.checks("lost", [(torch.randn(3, dtype=torch.float64),)])
        assert outcomes["test_schema"] == "SUCCESS"
        assert "does not have an autograd kernel" in outcomes["test_autograd_registration"]
    assert "lost" not in operators.names()


def with_dense(monkeypatch, run):
    monkeypatch.setitem(BACKENDS, "dense", dataclasses.replace(BACKENDS["dense"], run=run))


def test_a_break_is_seen(monkeypatch):
    right = BACKENDS["dense"].run

    def broken(call):
        torch._dynamo.graph_break()
        return right(call)

    with_dense(monkeypatch, broken)
    assert "Unsupported" in CompilationCase("graphs", "dense").problem()


@pytest.mark.slow
def test_one_program_too_many_is_seen(monkeypatch):
    """For every number of samples that is a multiple of another."""
    right = BACKENDS["dense"].run

    def fickle(call):
        return right(call) if call.q.shape[0] % 3 else right(dataclasses.replace(call))

    monkeypatch.setattr(compilation, "LENGTHS", 6)
    with_dense(monkeypatch, fickle)
    assert "programs for 6 sizes, at most 2" in CompilationCase("batches", "dense").problem()


def test_another_output_or_gradient_than_eager_is_seen(monkeypatch):
    """One that depends on who computes."""
    right = BACKENDS["dense"].run

    def off(call):
        out, lse = right(call)
        return (out * 1.001 if torch.compiler.is_compiling() else out), lse

    with_dense(monkeypatch, off)
    assert "another output than eager" in CompilationCase("graphs", "dense").problem()
    assert "sizes [9, 2, 3, 17, 60]" in CompilationCase("export", "dense").problem()
    x = torch.ones(2, requires_grad=True)
    assert (
        compilation._differs(lambda x: x.sin(), lambda x: x.detach().sin() + 0 * x, (x,), [])
        == "other gradients than eager"
    )
    assert compilation._differs(lambda x: x, lambda x: x * torch.nan, (x,), []) == "another output than eager"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiles", "rows"])
def test_a_call_with_options_is_not_compiled_for_each_number_of_samples(name):
    """The parts of a small plan are one whole, whatever the number of samples allows."""
    torch.compiler.reset()
    counted, graph = compilation.Counted(), patterns.window(9, 3)
    mod = ga.score_mods.softcap(2.0)
    compiled = torch.compile(
        lambda x: ga.attend(x, x, x, graph, score_mod=mod, backend=name), fullgraph=True, backend=counted
    )
    for samples in (5, 4, 7, 3):
        x = torch.randn(samples, 2, 9, 4, dtype=torch.float64)
        assert_exact(compiled(x), ga.attend(x, x, x, graph, score_mod=mod, backend=name))
    assert counted.programs == 2
