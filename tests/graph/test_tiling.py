"""Tiles agree with the edges in each block of the mask."""

import pytest
import torch
from support.covering import thin
from support.plans import PLAIN, edges_of_tiles

from gnn_attention import TokenGraph, patterns
from gnn_attention.graph import symbols
from gnn_attention.graph.tiling import EMPTY, FULL_TILE, PARTIAL, tiles


def check(graph, block):
    """Compare every tile with the edges of the mask in it."""
    result, mask = tiles(graph, block), graph.mask().expand(graph.shape4).flatten(0, 1)
    size = edges_of_tiles(torch.ones_like(mask[0]), block, block)
    edges = torch.stack([edges_of_tiles(slice_mask, block, block) for slice_mask in mask])
    table = torch.where(edges == 0, EMPTY, torch.where(edges == size, FULL_TILE, PARTIAL))
    assert torch.equal(result.table().flatten(0, 1), table.to(torch.uint8))
    kinds = {"num_empty": EMPTY, "num_partial": PARTIAL, "num_full": FULL_TILE}
    for name, kind in kinds.items():
        assert getattr(result, name) == int((table == kind).sum())
    is_next = (result.row[1:] == result.row[:-1]) & (result.first[1:] == result.stop[:-1])
    assert not bool((is_next & result.full[1:] & result.full[:-1]).any()), "runs of full tiles are maximal"
    partial = result.at(~result.full)
    assert torch.equal(partial.edges, edges.flatten(0, 1)[partial.row, partial.first])
    index = result.row * (result.columns + 1) + result.first
    assert bool((index[1:] > index[:-1]).all()), "runs are sorted"


VARYING = [
    TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src < 40 * h + 3), 200, heads=3),
    TokenGraph.from_rule(lambda b, h, dst, src: (src < 50 * b + 3) | (dst == h), 130, 90, heads=2, batch=2),
]


class TestKinds:
    @pytest.mark.parametrize(
        "graph", thin([*PLAIN.values(), *VARYING], 1), ids=[*PLAIN, "by head", "by both"]
    )
    def test_blocks(self, graph):
        """Blocks may divide the tokens or not, and have one token or more than there are."""
        for index, form in enumerate((graph, ~graph, graph.T)):
            check(form, (3, 50, 64, 100, 2000, 1)[(index + graph.num_edges) % 6])

    def test_tiles_of_the_same_receivers_count_their_own_edges(self):
        """Two tiles may each depend on the receiver only, but in different ways, which no range shows."""
        check(patterns.documents([200] * 5, causal=False), 128)
        left, right = symbols.src < 512, symbols.src >= 512
        for shift in (0, 2):
            rule = (left & (symbols.dst % 3 == 0)) | (right & ((symbols.dst * symbols.dst + shift) % 4 < 2))
            check(TokenGraph.from_rule(rule, 1024), 64)

    def test_a_million_tokens_are_a_few_thousand_runs(self):
        """The counts of tiles of 128 equal closed forms for causal and window attention."""
        n, block = 2**20, 128
        rows = n // block
        causal = tiles(patterns.causal(n), block)
        assert (causal.num_full, causal.num_partial, len(causal.row)) == (
            rows * (rows - 1) // 2,
            rows,
            2 * rows - 1,
        )
        window = tiles(patterns.window(n, 4096), block)
        # A row of tiles has a partial one at each end, and full ones between.
        window_rows = 4096 // block
        assert window.num_partial == rows + (rows - window_rows)
        assert window.num_full == sum(min(row, window_rows - 1) for row in range(rows))
