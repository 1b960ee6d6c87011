"""F2 and F3: errors in float64, and as shares of SDPA's in every other dtype and in both sizes; faults are seen."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from gnn_attention import attend, patterns
from gnn_attention.backends import BACKENDS
from tests.guarantees import errors
from tests.guarantees.guarantee import no_progress

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone

F2, F3 = errors.GUARANTEES


@pytest.fixture(autouse=True, scope="module")
def _problems_made_once():
    """The truth about a case is the same for every test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "AttendProblem", lru_cache(errors.AttendProblem))
        patch.setattr(errors, "problem_of", lru_cache(errors.problem_of))
        yield


SOUND = dict(BACKENDS)


def broken(monkeypatch, name, change):
    """Of all backends one that returns something else."""
    sound = BACKENDS[name]

    def run(call):
        out, lse = sound.run(call)
        return change(out), lse

    monkeypatch.setitem(BACKENDS, name, replace(sound, run=run))
    monkeypatch.setattr(
        errors, "usual_backends", lambda: {key: one for key, one in BACKENDS.items() if one is not SOUND[key]}
    )


def test_float64_lost_on_the_way_is_seen(monkeypatch):
    broken(monkeypatch, "rows", lambda out: out.float().to(out.dtype))
    found = F2.measure(5, no_progress)
    assert any("case" in line and "rows: output" in line for line in found.failures)


@pytest.mark.parametrize("guarantee", errors.GUARANTEES, ids=lambda guarantee: guarantee.name)
def test_a_nan_and_an_exception_are_failures(guarantee, monkeypatch):
    broken(monkeypatch, "tiles", lambda out: out * torch.nan)
    broken(monkeypatch, "rows", lambda out: out.no_such_thing)
    failures = guarantee.measure(6, no_progress).failures
    assert any(", tiles: " in line and "nan" in line for line in failures)
    assert any(", rows: AttributeError" in line for line in failures)


def rounded_again(out):
    """Twice as many roundings as there need be, none of them larger than one."""
    for factor in (1.1, 1.3, 0.7, 1.7):
        out = out * factor / factor
    return out


def test_roundings_of_each_number_are_seen_by_the_mean(monkeypatch):
    broken(monkeypatch, "mixed", rounded_again)
    assert any(", mixed: mean error of out" in line for line in F3.measure(6, no_progress).failures)


def test_every_dtype_is_drawn_in_every_size_whatever_the_graph():
    draws = [errors.ScaledDraw(number) for number in range(60)]
    assert {(draw.numbers.dtype, draw.numbers.size) for draw in draws[:6]} == set(errors.SETTINGS)
    assert len({draw.graph.name.split("(")[0] for draw in draws}) > 10
    assert {(draw.numbers.group > 1, draw.numbers.dim != draw.numbers.value_dim) for draw in draws} >= {
        (True, True),
        (False, True),
    }


def unrounded(graph, dtype, backend, **options):
    """The mean error of a result in units of the mean error of one rounding.

    A mean of 24,960 such errors is known to 0.4 % (a uniform number's deviation is 0.58 of its mean): 1.1 is
    one rounding.
    """
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 130, 24, generator=rng).to(dtype) for _ in range(3))
    true = attend(q.double(), k.double(), v.double(), graph, backend="reference", **options)
    once = (true.to(dtype).double() - true).abs().mean()
    return float((attend(q, k, v, graph, backend=backend, **options).double() - true).abs().mean() / once)


@pytest.mark.parametrize("backend", ["tiles", "mixed"])
def test_sinks_of_halves_are_added_before_the_output_is_rounded(backend):
    """It was 1.7."""
    assert unrounded(patterns.prefix(130, 34), torch.bfloat16, backend, sink_logits=torch.ones(4)) < 1.1
