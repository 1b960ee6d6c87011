"""Strided and fixed attention: their kin, their heads, their refusals, and the authors' own layout."""

from __future__ import annotations

import pytest
import torch
from support.refusals import assert_refusals

from gnn_attention import patterns


class TestKin:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(("n", "stride"), [(17, 4), (16, 4), (9, 1), (5, 9)])
    def test_strided_attention_unites_its_two_sets(self, n, stride, causal):
        near = patterns.band(n, stride, 0 if causal else stride)
        assert patterns.sparse_strided(n, stride, causal=causal) == near | patterns.strides(
            n, stride, causal=causal
        )

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(("n", "stride", "c"), [(17, 4, 2), (16, 4, 4), (9, 1, 1), (5, 9, 3)])
    def test_fixed_attention_unites_its_two_sets(self, n, stride, c, causal):
        own, summaries = (
            patterns.chunked(n, stride, causal=causal),
            patterns.summary_tokens(n, stride, c, causal=causal),
        )
        assert patterns.sparse_fixed(n, stride, c, causal=causal) == own | summaries

    def test_paper_and_code_count_the_first_set_differently_and_unite_to_the_same(self):
        """``l + 1`` tokens in the paper, l in the code: the token l before is in the second set anyway."""
        assert patterns.band(17, 4, 0) != patterns.band(17, 3, 0)
        assert patterns.band(17, 3, 0) | patterns.strides(17, 4) == patterns.sparse_strided(17, 4)

    def test_two_hops_through_the_sets_are_causal(self):
        """One hop in each set reaches the whole past: the factorisation's purpose."""
        assert patterns.strides(17, 4) @ patterns.band(17, 3, 0) == patterns.causal(17)
        summaries = patterns.summary_tokens(17, 4, 1) | patterns.self_loops(17)
        assert patterns.chunked(17, 4) | (summaries @ patterns.chunked(17, 4)) == patterns.causal(17)

    def test_strides_and_dilated_windows(self):
        assert patterns.strides(17, 4) == patterns.dilated(17, 17, 4)
        assert patterns.strides(17, 1) == patterns.causal(17)

    def test_every_token_is_a_summary(self):
        assert patterns.summary_tokens(9, 3, 3) == patterns.causal(9)
        assert patterns.summary_tokens(9, 3, 3, causal=False) == patterns.full(9)


class TestHeads:
    def test_strided_heads_take_turns(self):
        graph = patterns.sparse_strided(17, 4, heads=4)
        assert graph.heads == 4
        for head in range(4):
            expected = patterns.strides(17, 4) if head % 2 else patterns.band(17, 4, 0)
            assert graph.select(0, head) == expected

    def test_two_strided_heads_unite(self):
        mask = patterns.sparse_strided(17, 4, heads=2, causal=False).mask()
        assert torch.equal(mask.any(0), patterns.sparse_strided(17, 4, causal=False).mask())

    def test_fixed_heads_share_out_the_chunk(self):
        """Three heads of two tokens cover a chunk of six; they have only the own chunk in common."""
        mask = patterns.sparse_fixed(24, 6, 2, heads=3).mask()
        assert torch.equal(mask.any(0), patterns.causal(24).mask())
        assert torch.equal(mask.all(0), patterns.chunked(24, 6).mask())

    def test_the_first_fixed_head_is_the_graph_without_heads(self):
        assert patterns.sparse_fixed(17, 5, 2, heads=1).select() == patterns.sparse_fixed(17, 5, 2)

    @pytest.mark.parametrize(("stride", "c", "heads"), [(4, 1, 4), (4, 2, 2), (6, 2, 6), (6, 3, 1)])
    def test_the_authors_layout_of_vertices(self, stride, c, heads):
        """Their ``vertsize`` c and ``num_verts = stride / c``, at blocks of one token: columns, own rows,
        lower triangle.
        """
        layout = torch.zeros(heads, 24, 24, dtype=torch.bool)
        for head in range(heads):
            for vertex in torch.arange(stride).flip(0).view(-1, c)[head % (stride // c)].tolist():
                layout[head, :, vertex::stride] = True
            for start in range(0, 24, stride):
                layout[head, start : start + stride, start : start + stride] = True
        assert torch.equal(patterns.sparse_fixed(24, stride, c, heads=heads).mask(), layout.tril())


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: patterns.strides(4, 0), ValueError, "stride must be at least 1, got 0"),
                (lambda: patterns.strides(-4, 2), ValueError, "must be at least 0, got -4"),
                (lambda: patterns.summary_tokens(4, 2, 0), ValueError, "c must be at least 1, got 0"),
                (
                    lambda: patterns.summary_tokens(4, 2, 3),
                    ValueError,
                    "c must be at most stride = 2, the length of a chunk, got 3",
                ),
                (lambda: patterns.sparse_strided(4, 2.0), TypeError, "stride must be an integer, got 2.0"),
                (
                    lambda: patterns.sparse_strided(4, 2, heads=0),
                    ValueError,
                    "heads must be at least 1, got 0",
                ),
                (lambda: patterns.sparse_fixed(4, 2, 3), ValueError, "c must be at most stride = 2"),
                (
                    lambda: patterns.sparse_fixed(4, 2, 1, heads=True),
                    TypeError,
                    "heads must be an integer, got the bool True",
                ),
            ]
        )
