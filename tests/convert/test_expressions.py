"""The parser of graphs reads its language and the name of every graph, and refuses other texts."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.zoo import ROWS

from gnn_attention import TokenGraph, algebra, patterns
from gnn_attention.convert import expressions
from gnn_attention.convert.expressions import parse

causal, full, window, sinks, cross = (
    getattr(patterns, name) for name in ("causal", "full", "window", "sinks", "cross")
)


def named_graphs():
    """Return the graphs of the zoo whose names are complete expressions."""
    return [row.build(row.named_at) for row in ROWS if row.named_at is not None]


def combine(inner):
    binary = st.tuples(inner, st.sampled_from("|&-^@"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    unary = inner.flatmap(lambda text: st.sampled_from([f"~{text}", f"({text}).T", f"({text}) ** 2"]))
    return binary | unary


class TestReading:
    def test_every_name_of_the_zoo_is_an_expression(self):
        """The name parses to the graph, also if its number of tokens is passed."""
        for graph in named_graphs():
            assert parse(graph.name) == graph, graph.name
            assert parse(graph.name, n=graph.num_dst) == graph, graph.name

    @pytest.mark.parametrize(
        ("text", "graph"),
        [
            ("causal(4).T", TokenGraph.from_rule(lambda b, h, dst, src: src >= dst, 4)),
            ("strict_causal(4) ** 3", TokenGraph.from_edges(torch.tensor([[0], [3]]), 4)),
            ("window(9, 3) ** 0", window(9, 1)),
            ("causal(6).T.rows(stop=4, start=2).T", causal(6).T.rows(2, 4).T),
            ("documents([2, 1,])", patterns.documents([2, 1])),
            ("  window(5,2)\n|\tsinks(5,1) ", window(5, 2) | sinks(5, 1)),
            ("disjoint_sum(causal(3), full(2))", algebra.disjoint_sum(causal(3), full(2))),
            ("closure(window(5, 2), reflexive=True)", causal(5)),
            ("top_k(tensor([[3, 1], [1, 2]]), 1)", window(2, 1)),
            ("top_k(randn(5, 5, seed=3), 5)", causal(5)),
        ],
    )
    def test_language(self, text, graph):
        assert parse(text) == graph

    def test_a_name_means_one_thing(self):
        names = [*patterns.__all__, *algebra.__all__, "tensor", "randn"]
        assert len(set(names)) == len(names)
        assert set(expressions.FUNCTIONS) == set(names)

    def test_random_numbers_are_always_the_same(self):
        before = torch.get_rng_state()
        assert torch.equal(expressions.randn(3, 4, seed=5), expressions.randn(3, 4, seed=5))
        assert not torch.equal(expressions.randn(3, 4, seed=5), expressions.randn(3, 4))
        assert torch.equal(torch.get_rng_state(), before)

    def test_one_of_several_graphs(self, monkeypatch):
        monkeypatch.setitem(expressions.FUNCTIONS, "pair", lambda n: (causal(n), full(n)))
        assert parse("pair(4)[1] - pair(4)[0]") == full(4) - causal(4)
        for text, match in [
            ("pair(4)", "'pair.4.' is .TokenGraph.*, expected a graph .*; .0. chooses the first"),
            ("pair(4) | full(4)", "column 1, 'pair.4.': expected a graph here, got .TokenGraph"),
            ("pair(4)[2]", r"column 1, 'pair\(4\)\[2\]': tuple index out of range"),
            ("pair(4)['a']", "this is not part of the language"),
        ]:
            with pytest.raises(ValueError, match=match):
                parse(text)

    @settings(max_examples=60, deadline=None)
    @given(st.recursive(st.sampled_from(["causal(5)", "window(5, 2)", "sinks(5, 2)", "no_self(5)"]), combine))
    def test_reads_what_python_reads(self, text):
        python = eval(text, {name: getattr(patterns, name) for name in patterns.__all__})
        assert parse(text) == python
        assert parse(python.name) == python


class TestTheNumberOfTokens:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("causal", "causal(64)"),
            ("causal(n=64)", "causal(64)"),
            ("window(n, 8)", "window(64, 8)"),
            ("window(8)", "window(64, 8)"),
            ("window(64, 8)", "window(64, 8)"),
            ("( ~window( 8 )).T@sinks(s=4)", "(~window(64,  8)).T @ sinks(64, 4)"),
            ("documents([40, 24])", "documents([40, 24])"),
            ("per_head(causal, window(8))", "per_head(causal(64), window(64, 8))"),
            ("memory_tokens(window(60, 8), 4)", "memory_tokens(window(60, 8), 4)"),
        ],
    )
    def test_it_may_be_a_name_or_left_out(self, text, expected):
        assert parse(text, n=64) == parse(expected)

    def test_the_rest_is_refused_as_without_it(self):
        for text, match in [
            ("cusal", "there is no builder 'cusal'; did you mean 'causal'"),
            ("window", "missing 1 required positional argument: 'w'"),
            ("n", "'n' is 64, expected a graph"),
        ]:
            with pytest.raises(ValueError, match=match):
                parse(text, n=64)
        with pytest.raises(ValueError, match="n must be at least 0, got -1"):
            parse("causal", n=-1)
        with pytest.raises(ValueError, match="column 8, 'n': there is no builder 'n'"):
            parse("window(n, 8)")


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("windw(4, 2)", r"column 1, 'windw\(4, 2\)': there is no builder 'windw'; did you mean"),
            ("qqqq(4)", "there is no builder 'qqqq'; 'gnn-attention graphs' lists them"),
            ("causal", r"column 1, 'causal': causal\(\) missing 1 required positional argument: 'n'"),
            ("causal(4) + full(4)", r"column 1, 'causal\(4\) \+ full\(4\)': this is not part of"),
            ("causal(4) | 3", "column 13, '3': expected a graph here, got 3$"),
            ("window(4, -'w')", "column 11, .*: this is not part of the language"),
            ("causal(4).mask()", r"not part of the language of graphs; expected .*\.rows\(start, stop\),"),
            ("__import__('os').system('true')", "column 1, .*: this is not part of the language"),
            ("causal.__globals__", "column 1, .*: this is not part of the language"),
            ("window(4, -1)", r"column 1, 'window\(4, -1\)': w must be at least 0, got -1"),
            ("causal(4) | causal(5)", "column 1, .*must have the same tokens"),
            ("causal(*[3])", "not part of the language"),
            ("causal(n=3, n=4)", r"column 1, 'causal\(n=3, n=4\)': .*arguments that are each written"),
            ("'\ud800' | full(3)", "not an expression .*surrogates not allowed"),
            ("documents([50 lengths])", "column 12, .*not an expression .*invalid syntax"),
            ("", "column 1, '': not an expression"),
            ("1or 2", "not part of the language"),
            ("full(3) | cross(3, 'ä') | hidden(3)", "column 11, .*num_src must be an integer, got 'ä'"),
        ],
    )
    def test_one_sentence_with_the_place(self, text, match):
        with pytest.raises(ValueError, match=match) as refusal:
            parse(text)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("causal(3)**9**9", "column 12, '9': expected a graph here"),
            ("causal(9000) @ causal(9000)", "column 1, .*products and powers list at most 16777216 pairs"),
            ("cross(9000, 1) @ cross(1, 9000)", "got 81000000$"),
            ("window(1000, 8) ** 1024", "got 1024000000$"),
            ("causal(3) ** 9999", r"the power of a graph is a number of hops in 0 \.\. 1024"),
            ("causal(99999999999)", "column 8, '99999999999': a number is at most 16777216"),
            ("causal(" + "9" * 5000 + ")", "not an expression"),
            ("sinks(4, -1e999)", "a number is at most"),
            ("randn(3000, 3000, 3000)", "randn makes at most 16777216 numbers here"),
            ("~" * 4000 + "causal(3)", "nests too many parentheses and operators"),
            ("causal(3)|" * 2000, "has 20000 characters, at most 10000 are read"),
        ],
        ids=lambda text: text[:24],
    )
    def test_size_has_limits(self, text, match):
        start = time.perf_counter()
        with pytest.raises(ValueError, match=match):
            parse(text)
        assert time.perf_counter() - start < 5

    @pytest.mark.parametrize("text", [None, b"causal(3)", causal(3)])
    def test_only_strings(self, text):
        with pytest.raises(TypeError, match="text must be a string such as"):
            parse(text)
