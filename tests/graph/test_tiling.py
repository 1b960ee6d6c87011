"""Tiles against counting the edges of each block of the mask."""

import pytest
import torch
from support.covering import thinned
from support.plans import PLAIN, edges_of_tiles

from gnn_attention import TokenGraph, patterns
from gnn_attention.graph import symbols
from gnn_attention.graph.tiling import EMPTY, FULL_TILE, PARTIAL, tiles


def check(graph, block):
    """Every tile against the edges of the mask in it."""
    found, mask = tiles(graph, block), graph.mask().expand(graph.shape4).flatten(0, 1)
    size = edges_of_tiles(torch.ones_like(mask[0]), block, block)
    edges = torch.stack([edges_of_tiles(one, block, block) for one in mask])
    table = torch.where(edges == 0, EMPTY, torch.where(edges == size, FULL_TILE, PARTIAL))
    assert torch.equal(found.table().flatten(0, 1), table.to(torch.uint8))
    kinds = {"num_empty": EMPTY, "num_partial": PARTIAL, "num_full": FULL_TILE}
    for name, kind in kinds.items():
        assert getattr(found, name) == int((table == kind).sum())
    following = (found.row[1:] == found.row[:-1]) & (found.first[1:] == found.stop[:-1])
    assert not bool((following & found.full[1:] & found.full[:-1]).any()), "runs of full tiles are maximal"
    partial = found.at(~found.full)
    assert torch.equal(partial.edges, edges.flatten(0, 1)[partial.row, partial.first])
    place = found.row * (found.columns + 1) + found.first
    assert bool((place[1:] > place[:-1]).all()), "runs are sorted"


VARYING = [
    TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src < 40 * h + 3), 200, heads=3),
    TokenGraph.from_rule(lambda b, h, dst, src: (src < 50 * b + 3) | (dst == h), 130, 90, heads=2, batch=2),
]


class TestKinds:
    @pytest.mark.parametrize(
        "graph", thinned([*PLAIN.values(), *VARYING], 1), ids=[*PLAIN, "by head", "by both"]
    )
    def test_blocks(self, graph):
        """That divide the tokens and that do not, of one token and of more than there are."""
        for place, form in enumerate((graph, ~graph, graph.T)):
            check(form, (3, 50, 64, 100, 2000, 1)[(place + graph.num_edges) % 6])

    def test_tiles_of_the_same_receivers_count_their_own_edges(self):
        """Two tiles may depend on the receiver alone, each in another way, which no range of tokens shows."""
        check(patterns.documents([200] * 5, causal=False), 128)
        left, right = symbols.src < 512, symbols.src >= 512
        for shift in (0, 2):
            rule = (left & (symbols.dst % 3 == 0)) | (right & ((symbols.dst * symbols.dst + shift) % 4 < 2))
            check(TokenGraph.from_rule(rule, 1024), 64)

    def test_a_million_tokens_are_a_few_thousand_runs(self):
        """Closed forms of causal and window attention in blocks of 128."""
        n, block = 2**20, 128
        rows = n // block
        causal = tiles(patterns.causal(n), block)
        assert (causal.num_full, causal.num_partial, len(causal.row)) == (
            rows * (rows - 1) // 2,
            rows,
            2 * rows - 1,
        )
        window = tiles(patterns.window(n, 4096), block)
        deep = 4096 // block  # a late row of tiles: one partial at each end, deep - 1 full between
        assert window.num_partial == rows + (rows - deep)
        assert window.num_full == sum(min(row, deep - 1) for row in range(rows))
