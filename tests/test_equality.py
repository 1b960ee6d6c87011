"""Properties: ``attend`` and the layer are the float64 formula, on whatever graph, options, sizes and dtype
are put together.

The same problems and rule as those of guarantee F1; here they are composed of strategies, so that a failure
shrinks to few tokens and few options. The properties must fail on known faults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.faults import WRONG_BACKENDS

from gnn_attention import Backend, MergedHeads, TokenGraph, convert
from gnn_attention.backends import BACKENDS, RefusalError
from gnn_attention.verify.measure import judge
from tests.guarantees import problems
from tests.guarantees.draws import DTYPES, Draw, Numbers
from tests.guarantees.families import FAMILIES, OPERATIONS
from tests.guarantees.problems import layer_problem, problem_of, takes

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def few(count):
    """As many examples, the same each time."""
    return settings(
        derandomize=True, deadline=None, max_examples=count, suppress_health_check=CHECKS, print_blob=True
    )


NIGHT = settings(few(500), derandomize=False, database=None)
HUNT = settings(few(200), phases=[Phase.generate], report_multiple_bugs=False)


@dataclass(frozen=True)
class Example(Draw):
    """A draw composed by hypothesis: ``number`` is the seed of its numbers alone."""

    composed: Numbers
    made: tuple[Any, ...]  # graph, definition, edges in the order of a bias where they were listed, kind

    numbers = property(lambda self: self.composed)
    _made = property(lambda self: self.made)

    def __repr__(self):
        return str(self)


def families(n, batch, heads_):
    """A family with its definition."""
    names = [name for name in FAMILIES if batch or name != "by sample"]
    chance = st.randoms(note_method_calls=False, use_true_random=False)
    return st.tuples(st.sampled_from(names), chance).map(
        lambda drawn: FAMILIES[drawn[0]](drawn[1], n, batch, heads_)
    )


def joined(parts):
    """Two graphs by ``| & - ^``, and their definitions by the words."""
    operation, (one, first), (other, second) = parts
    graphs, words = OPERATIONS[operation]
    return graphs(one, other), lambda b, h, i, j: words(first(b, h, i, j), second(b, h, i, j))


def with_isolated(made):
    """Some receivers are left without in-edges: every ``step``-th."""
    (one, definition), step = made
    rule = TokenGraph.from_rule(lambda b, h, dst, src: dst % step == 0, one.num_dst, one.num_src)
    return one - rule, lambda b, h, i, j: i % step != 0 and definition(b, h, i, j)


@st.composite
def rows(draw, expressions):
    """Some receivers: definitions are of absolute ones."""
    made, definition = draw(expressions)
    start = draw(st.integers(0, made.num_dst))
    return made.rows(start, draw(st.integers(start, made.num_dst))), definition


@st.composite
def tables(draw, n):
    """A mask with more or fewer receivers than senders."""
    num_dst = draw(st.integers(0, n + 3))
    row = st.lists(st.booleans(), min_size=n, max_size=n)
    table = draw(st.lists(row, min_size=num_dst, max_size=num_dst))
    mask = torch.tensor(table, dtype=torch.bool).reshape(num_dst, n)
    return convert.from_mask(mask), lambda b, h, i, j: table[i][j]


@st.composite
def lists(draw, n):
    """Edges in no order, some of them twice, with the list of them once."""
    num_dst = draw(st.integers(0, n))
    pairs = st.tuples(st.integers(0, max(0, n - 1)), st.integers(0, max(0, num_dst - 1)))
    listed = draw(st.lists(pairs, max_size=3 * n if num_dst else 0))
    edge_index = torch.tensor(listed, dtype=torch.int64).reshape(-1, 2).t()
    once = list(dict.fromkeys(listed))
    return convert.from_edge_index(edge_index, num_dst, n, coalesce=len(once) < len(listed)), once


KINDS = ("family", "expression", "isolated", "rows", "table", "list")


@st.composite
def graphs(draw, kind, n, batch, heads_):
    """A graph of that kind, its definition, its list of edges where there is one, and the kind."""
    if kind == "list":
        made, listed = draw(lists(n))
        known = set(listed)
        return made, lambda b, h, i, j: (j, i) in known, listed, kind
    family = families(n, batch, heads_)
    join = lambda part: st.tuples(st.sampled_from(sorted(OPERATIONS)), part, part).map(joined)  # noqa: E731
    expressions = st.recursive(family, join, max_leaves=3)
    isolated = st.tuples(expressions, st.integers(1, 3)).map(with_isolated)
    made = {"family": family, "expression": expressions, "isolated": isolated}
    made |= {"rows": rows(expressions), "table": tables(n)}
    return *draw(made[kind]), None, kind


OPTIONS = {
    "batch": st.integers(0, 7).map(lambda n: (1, 1, 1, 1, 2, 2, 2, 0)[n]),
    "kv_heads": st.integers(1, 2),
    "group": st.integers(1, 3),
    "dim": st.integers(1, 9),
    "value_dim": st.integers(1, 9),
    "dtype": st.sampled_from(["float64", *DTYPES]),
    "size": st.sampled_from([1.0, 5.0]),
    "scale": st.sampled_from([None, 0.7, 0.05]),
    "mod": st.sampled_from(
        ["none", "alibi", "softcap", "relative", "multiplicity", "alibi, softcap", "relative, multiplicity"]
    ),
    "bias": st.sampled_from(["none", "none", "none", "one for all", "by head", "by sample and head"]),
    "sinks": st.booleans(),
    "layout": st.sampled_from(["as made", "tokens first", "every second channel", "one sample for all"]),
}


@st.composite
def examples(draw, kind, *forms):
    """Anything on a graph of that kind in one of these forms, of 0 to 13 tokens."""
    composed = Numbers(draw(st.sampled_from(forms)), **{name: draw(x) for name, x in OPTIONS.items()})
    n = draw(st.integers(0, 16).map(lambda n: {14: 21, 15: 34, 16: 65}.get(n, n)))
    made = draw(graphs(kind, n, composed.batch, composed.heads))
    return Example(draw(st.integers(0, 9)), composed, made)


def usual():
    """The backends of a CPU that compile nothing."""
    return [backend for backend in BACKENDS.values() if not backend.compiled and backend.name != "varlen"]


def check(example, backends):
    """Output and every gradient by the rule, on each backend that supports the problem."""
    problem = problem_of(example)
    for backend in backends:
        if not takes(problem, backend.name):
            continue
        try:
            found = judge(*problem.solve(backend), problem.truth.for_backend(backend))
        except RefusalError:
            continue
        assert found.passed, f"{backend.name}: {found.where}"


def check_conversion(example):
    """A form made of standard heads against the formula on the weights of those."""
    numbers = replace(example.numbers, dtype="float64")
    standard = layer_problem(replace(example, composed=replace(numbers, form="standard")))
    out, gradients = layer_problem(replace(example, composed=numbers)).solve(BACKENDS["dense"])
    found = judge(out, {name: gradients[name] for name in ("x_src", "x_dst")}, standard.truth)
    assert found.passed, found.where


def calls(kind, backends):
    """The property of ``attend`` as a function without arguments."""
    return given(examples(kind, "attend"))(lambda example: check(example, backends))


def layers(kind, backends, forms=("standard", "factored", "merged")):
    """That of a layer, in each form of its weights."""
    return given(examples(kind, *forms))(lambda example: check(example, backends))


def conversions(kind):
    """That of forms made of standard heads."""
    return given(examples(kind, "factored", "merged"))(check_conversion)


PROPERTIES = {
    "attend is the formula": (6, lambda kind: calls(kind, usual())),
    "layers are the formula": (4, lambda kind: layers(kind, usual())),
    "forms are one formula": (3, conversions),
}
each = pytest.mark.parametrize(("count", "examined"), PROPERTIES.values(), ids=PROPERTIES)


@pytest.mark.parametrize("kind", KINDS)
@each
def test_equality(kind, count, examined):
    few(count)(examined(kind))()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@each
def test_thousands_of_new_examples(kind, count, examined):
    """Others each night; a failure prints how to repeat it."""
    NIGHT(examined(kind))()


SOUGHT = {"rows from the left": "rows", "isolated receive": "isolated"}


@pytest.mark.parametrize("fault", WRONG_BACKENDS)
def test_a_wrong_backend_is_found(fault):
    with pytest.raises(AssertionError, match=f"^{fault}: "):
        HUNT(calls(SOUGHT.get(fault, "family"), [Backend(fault, WRONG_BACKENDS[fault])]))()


def test_a_wrong_layer_is_found():
    backend = Backend("isolated receive", WRONG_BACKENDS["isolated receive"])
    with pytest.raises(AssertionError, match=r"^isolated receive: "):
        HUNT(layers("isolated", [backend], ["standard"]))()


def test_a_wrong_conversion_is_found(monkeypatch):
    """The bias of the queries is lost in the merged form."""

    def without_bias(heads):
        merged = MergedHeads.of(heads)
        merged.pattern.data[:, merged.width :] = 0
        return merged

    monkeypatch.setitem(problems.FORMS, "merged", without_bias)
    with pytest.raises(AssertionError):
        HUNT(conversions("family"))()
