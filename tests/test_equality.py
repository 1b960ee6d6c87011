"""``attend`` and the layer agree with the float64 formula for any graph, options, sizes and dtype.

The problems are draws of guarantee F1 with few tokens, which must also find known faults.
``ShortDraw(NUMBER)`` repeats a failure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from support.faults import WRONG_BACKENDS

from gnn_attention import Backend
from gnn_attention.verify.measure import judge
from tests.guarantees.draws import Draw
from tests.guarantees.equality import compare
from tests.guarantees.problems import problem_of


@dataclass(frozen=True)
class ShortDraw(Draw):
    """The draw ``number`` of F1, with at most 34 tokens."""

    lengths = (0, 1, 2, 3, 5, 8, 13, 21, 34)


@pytest.mark.parametrize("number", range(80))
def test_every_backend_is_the_formula(number):
    assert compare([ShortDraw(number)], print).failures == []


@pytest.mark.nightly
def test_thousands_of_new_draws():
    """The backends agree with the formula on problems that are drawn anew each night."""
    first = random.randrange(100, 10**9)
    assert compare(map(ShortDraw, range(first, first + 5000)), print).failures == []


def is_found(fault, form):
    """Return True if one of 300 draws of this form, on one graph for all heads, shows the fault."""
    backend = Backend(fault, WRONG_BACKENDS[fault])
    draws = [draw for draw in map(ShortDraw, range(300)) if draw.numbers.form == form]
    problems = (problem_of(draw) for draw in draws if draw.graph.heads is draw.graph.batch is None)
    return any(not judge(*problem.solve(backend), problem.truth).passed for problem in problems)


@pytest.mark.parametrize("fault", WRONG_BACKENDS)
def test_a_wrong_backend_is_found(fault):
    assert is_found(fault, "attend")


def test_a_wrong_layer_is_found():
    assert is_found("isolated receive", "standard")
