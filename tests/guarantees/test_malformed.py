"""F5: every kind of wrong answer is seen, the tables hold, and what they uncovered stays mended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnn_attention import attend, convert, patterns
from gnn_attention._support import checks
from gnn_attention.graph import edge_list
from tests.guarantees import malformed
from tests.guarantees.guarantee import no_progress
from tests.guarantees.malformed.case import COMPILED, EAGER, Case, Subject, faults

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone


def named(name):
    return next(case for case in malformed.cases() if str(case) == name)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's own look at inner frames
@pytest.mark.parametrize(
    "step", [pytest.param(9, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_cases_hold_compiled(step):
    compiled = [case for case in malformed.cases() if COMPILED in case.ways]
    assert len(compiled) > 60
    assert [(str(case), fault) for case in compiled[::step] for fault in faults(case, COMPILED)] == []


def test_cases_hold_eager():
    """All of them: a sentence that is written anew must still say what its case asks for."""
    found = [(str(case), fault) for case in malformed.cases() for fault in faults(case, EAGER)]
    assert found == []


def test_the_cases_are_many_and_their_names_their_own():
    cases = malformed.cases()
    assert len(cases) >= malformed.LEAST
    assert len({str(case) for case in cases}) == len(cases)


def test_what_is_not_installed_is_skipped(monkeypatch):
    missing = replace(
        named("attend: ^graph must be a TokenGraph, got NoneType").subject, needs="no_such_package"
    )
    monkeypatch.setattr(
        malformed, "cases", lambda: (replace(malformed_case(), subject=missing), malformed_case())
    )
    found = malformed.measure(2, no_progress)
    assert not found.holds
    assert found.skipped == ("attend: ^graph must, got int: needs no_such_package",)


def malformed_case():
    return Case(PLANTED, TypeError, "^graph must", "got int", lambda one: attend(*one, 3))


def three():
    return [torch.eye(3).view(1, 1, 3, 3) for _ in "qkv"]


def first_row(one):
    """The first token attends to itself alone."""
    return attend(*one, patterns.causal(3))[0, 0, 0]


PLANTED = Subject("attend", three, first_row, lambda one: torch.tensor([1.0, 0.0, 0.0]))


def changing(one):
    one[0].zero_()
    attend(*one, 3)


FAULTS = {
    "no error": (lambda one: attend(*one, patterns.causal(3)), "no error"),
    "another type": (lambda one: attend(*one, patterns.causal(4)), "ValueError in place of TypeError"),
    "from below": (lambda one: torch.zeros(2) @ torch.zeros(3), "raised from below"),
    "no argument": (lambda one: checks.size("n", "3"), "does not name the argument"),
    "changed": (changing, "something of the object changed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault):
    bad, said = FAULTS[fault]
    case = Case(PLANTED, TypeError, "^graph must", "got int", bad)
    assert any(said in found for found in faults(case))


def test_a_long_or_raw_message_is_seen():
    case = Case(PLANTED, TypeError, "n", "got", lambda one: checks.size("n" * 500, "3"))
    assert any("a message of" in found for found in faults(case))
    raw = Case(PLANTED, TypeError, "x", "got", lambda one: checks.size("x: size of tensor a", "3"))
    assert any("raw words" in found for found in faults(raw))


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.full((3,), torch.nan), torch.zeros(2)], ids=["zeros", "NaN", "shape"]
)
def test_a_wrong_next_call_is_seen(wrong):
    subject = replace(PLANTED, good=lambda one: wrong)
    assert any(
        "next valid call is wrong" in found for found in faults(replace(malformed_case(), subject=subject))
    )


def test_a_check_that_is_gone_is_reported_by_the_figure(monkeypatch):
    """The library without one of its checks: the guarantee says which case then fails."""
    named_before = named("from_edges: ^edge_index must, torch.float32")
    monkeypatch.setattr(edge_list, "SIGNED", (*edge_list.SIGNED, torch.float32))
    monkeypatch.setattr(malformed, "cases", lambda: (named_before,))
    assert any(
        "torch.float32 (eager): no error" in failure for failure in malformed.measure(1, no_progress).failures
    )


def test_the_edges_of_a_huge_list_are_counted_without_an_array_of_receivers():
    """``in_degree`` of 2^31 receivers takes 17 GB."""
    assert convert.from_edge_index(torch.tensor([[0, 1], [0, 2**30]]), 2**31).num_edges == 2


def test_a_score_mod_may_take_more_by_default_and_any_number():
    q = torch.eye(3).view(1, 1, 3, 3)
    for mod in (lambda score, b, h, dst, src, more=0: score, lambda *all_of_it: all_of_it[0]):
        attend(q, q, q, patterns.causal(3), score_mod=mod)
