"""Sinks beside a window: kin, refusals, and the same graphs elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.refusals import assert_refusals

from gnn_attention import patterns


class TestKin:
    @pytest.mark.parametrize(("w", "s"), [(3, 4), (1, 1), (0, 2), (5, 0), (99, 1), (2, 99), (0, 0)])
    def test_a_window_with_sinks(self, w, s):
        graph = patterns.sink_window(17, w, s)
        assert graph == patterns.window(17, w) | patterns.sinks(17, s)
        assert graph.in_degree().tolist() == [min(i + 1, s + w) for i in range(17)]

    def test_four_sinks_unless_told(self):
        assert patterns.sink_window(17, 3) == patterns.sink_window(17, 3, 4)
        assert patterns.duo_attention(17, 1, [], 3).select() == patterns.sink_window(17, 3, 4)

    def test_each_head_has_its_graph(self):
        graph = patterns.duo_attention(12, 4, [3, 0], 2, 1)
        streaming, whole = patterns.sink_window(12, 2, 1), patterns.causal(12)
        assert graph.heads == 4
        assert [graph.select(head=head) == whole for head in range(4)] == [True, False, False, True]
        assert [graph.select(head=head) == streaming for head in range(4)] == [False, True, True, False]
        assert graph.num_edges == 2 * whole.num_edges + 2 * streaming.num_edges

    def test_all_heads_alike(self):
        everywhere, nowhere = patterns.duo_attention(9, 2, range(2), 2), patterns.duo_attention(9, 2, [], 2)
        assert torch.equal(everywhere.mask(), patterns.causal(9).mask().expand(2, 9, 9))
        assert torch.equal(nowhere.mask(), patterns.sink_window(9, 2).mask().expand(2, 9, 9))

    def test_the_name_builds_it(self):
        graph = patterns.duo_attention(9, 3, torch.tensor([2, 1]), 2)
        assert graph.name == "duo_attention(9, 3, [2, 1], 2, 4)"
        assert eval(graph.name, vars(patterns)) == graph


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: patterns.sink_window(-1, 2), ValueError, "at least 0, got -1"),
                (lambda: patterns.sink_window(4, -2), ValueError, "w must be at least 0, got -2"),
                (lambda: patterns.sink_window(4, 2, -1), ValueError, "s must be at least 0, got -1"),
                (lambda: patterns.sink_window(4, 2, 1.0), TypeError, "s must be an integer, got 1.0"),
                (lambda: patterns.duo_attention(4, 0, [], 2), ValueError, "heads must be at least 1, got 0"),
                (
                    lambda: patterns.duo_attention(4, 2, [2], 2),
                    IndexError,
                    r"retrieval must hold head numbers in 0 \.\. 1, got 2",
                ),
                (lambda: patterns.duo_attention(4, 2, [-1], 2), IndexError, r"in 0 \.\. 1, got -1"),
                (
                    lambda: patterns.duo_attention(4, 2, 1, 2),
                    TypeError,
                    r"list of head numbers, got 1; one head is \[1\]",
                ),
                (
                    lambda: patterns.duo_attention(4, 2, [True], 2),
                    TypeError,
                    "each of retrieval must be an integer, got the bool",
                ),
                (lambda: patterns.duo_attention(4, 2, [0], -1), ValueError, "w must be at least 0, got -1"),
                (
                    lambda: patterns.duo_attention(4, 2, [0], 1, None),
                    TypeError,
                    "s must be an integer, got None",
                ),
            ]
        )


class TestElsewhere:
    @pytest.mark.parametrize(("sink", "recent"), [(4, 3), (1, 1), (2, 7)])
    def test_duo_attention_masks(self, sink, recent):
        """A band of ``recent`` diagonals, the main one among them, and ``sink`` columns, under the causal
        triangle.
        """
        ones = torch.ones(16, 16, dtype=torch.bool)
        columns = (torch.arange(16) < sink).expand(16, 16)
        assert torch.equal(
            (ones.triu(1 - recent) | columns).tril(), patterns.sink_window(16, recent, sink).mask()
        )

    @pytest.mark.parametrize(("first", "local"), [(4, 3), (1, 1), (2, 7)])
    def test_lm_infinite_counts_the_distance(self, first, local):
        """Its local branch reaches distances below ``local``, its global branch the rest of the first
        tokens.
        """
        distance = torch.arange(16)[:, None] - torch.arange(16)
        near = (distance >= 0) & (distance < local)
        far = (distance >= local) & (torch.arange(16) < first)
        assert not bool((near & far).any())
        assert torch.equal(near | far, patterns.sink_window(16, local, first).mask())
