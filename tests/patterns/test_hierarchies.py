"""Hierarchies connect all blocks or tokens, and their levels partition the edges."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from support.bounds import assert_exact

from gnn_attention import attend, patterns, score_mods

each_n = pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 9, 31, 32, 33])


def distances_of(n):
    return torch.arange(n)[:, None] - torch.arange(n)


class TestReach:
    @pytest.mark.parametrize("order", list(permutations(range(3))))
    @pytest.mark.parametrize("block", [1, 2])
    def test_one_factor_of_each_level_connects_all_blocks_by_one_path(self, order, block):
        first, second, third = (patterns.butterfly_factor(8 * block, level, block) for level in order)
        assert (first @ second @ third).is_full()
        walks = first.mask().long() @ second.mask().long() @ third.mask().long()
        # One path of blocks passes through any token of the two blocks between.
        assert walks.unique().tolist() == [block**2]


class TestBinaryPartition:
    @pytest.mark.parametrize("k", [1, 2, 3])
    @each_n
    def test_every_sender_counts_once_at_some_scale(self, n, k):
        """The spans that a token attends to hold every allowed token once."""
        for causal, expected in ((True, (distances_of(n) >= 0).long()), (False, torch.ones(n, n).long())):
            mask = patterns.binary_partition(n, k, causal=causal).mask().long()
            spans = mask[n:, :n]
            assert torch.equal(mask[:n, :n] + mask[:n, n:] @ spans, expected)


class TestKin:
    def test_longnet_merges_as_a_multigraph(self):
        """Merging the pairs by their softmax denominators counts an edge of m pairs m times."""
        pairs = [(4, 1), (8, 2), (16, 4)]
        q, k, v = torch.randn(3, 1, 1, 16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        parts = [attend(q, k, v, patterns.longnet(16, [w], [r]), return_info=True) for w, r in pairs]
        shares = torch.stack([info.lse for _, info in parts]).softmax(0)
        expected = sum(weight.unsqueeze(-1) * out for weight, (out, _) in zip(shares, parts, strict=True))
        count = sum(patterns.longnet(16, [w], [r]).mask().double() for w, r in pairs)
        assert int(count.max()) == 3
        union = patterns.longnet(16, [w for w, _ in pairs], [r for _, r in pairs])
        assert torch.equal(union.mask(), count > 0)
        output = attend(q, k, v, union, score_mod=score_mods.log_multiplicity(count.clamp(min=1)))
        assert_exact(output, expected)

    @pytest.mark.parametrize("block", [1, 2, 3])
    @each_n
    def test_levels_of_a_hierarchical_matrix_are_a_partition(self, n, block):
        for causal, expected in ((True, (distances_of(n) >= 0).long()), (False, torch.ones(n, n).long())):
            levels = [patterns.h_matrix_level(n, block, level, causal=causal) for level in range(6)]
            assert torch.equal(sum(level.mask().long() for level in levels), expected)


class TestFibottention:
    """Khaleghi Rahimian et al. 2024 give each head the distances in a row of the Wythoff array."""

    # This is sequence A035513 of the OEIS.
    WYTHOFF = (1, 2, 3, 5, 8, 13), (4, 7, 11, 18, 29), (6, 10, 16, 26, 42), (9, 15, 24, 39), (12, 20, 32, 52)

    @staticmethod
    def distances(graph, head):
        src, dst = graph.select(head=head).edge_index
        return tuple((dst - src).abs().unique().tolist())

    def test_rows_of_the_published_array(self):
        graph = patterns.fibottention(120, 5, 60, 60)
        for head, row in enumerate(self.WYTHOFF):
            assert self.distances(graph, head)[: len(row)] == row

    def test_windows_grow_from_head_to_head(self):
        """Each row ends at w_i = 5, 15, 25, but keeps its first distance."""
        graph = patterns.fibottention(75, 3)
        assert [self.distances(graph, head) for head in range(3)] == [(1, 2, 3, 5), (4, 7, 11), (6, 10, 16)]
        assert self.distances(patterns.fibottention(75, 5, 2, 2), 4) == (12,)
