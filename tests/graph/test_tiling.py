"""Tiles against counting the edges of each block of the mask."""

import pytest
import torch
from support.zoo import ROWS

from gnn_attention import TokenGraph, patterns
from gnn_attention.graph.tiling import EMPTY, FULL_TILE, PARTIAL, tiles


def counted(graph, block):
    """The kind of every tile, from the mask."""
    mask = graph.mask().reshape(graph.batch or 1, graph.heads or 1, graph.num_dst, graph.num_src)
    rows, columns = -(-graph.num_dst // block), -(-graph.num_src // block)

    def edges(values):
        # torch.nn.functional.pad refuses empty tensors before torch 2.10
        padded = torch.zeros(*mask.shape[:2], rows * block, columns * block, dtype=torch.int64)
        padded[..., : graph.num_dst, : graph.num_src] = values
        return padded.reshape(*mask.shape[:2], rows, block, columns, block).sum((3, 5))

    found_edges, size = edges(mask), edges(torch.ones_like(mask))
    return torch.where(found_edges == 0, EMPTY, torch.where(found_edges == size, FULL_TILE, PARTIAL)).to(
        torch.uint8
    )


def check(graph, block):
    found = tiles(graph, block)
    table = counted(graph, block)
    assert torch.equal(found.table(), table)
    kinds = {"num_empty": EMPTY, "num_partial": PARTIAL, "num_full": FULL_TILE}
    assert {name: getattr(found, name) for name in kinds} == {
        name: int((table == kind).sum()) for name, kind in kinds.items()
    }
    following = (found.row[1:] == found.row[:-1]) & (found.first[1:] == found.stop[:-1])
    assert not bool((following & (found.full[1:] == found.full[:-1])).any()), "runs are maximal"
    place = found.row * (found.columns + 1) + found.first
    assert bool((place[1:] > place[:-1]).all()), "runs are sorted"


class TestKinds:
    @pytest.mark.slow
    @pytest.mark.parametrize("turn", range(len(ROWS)), ids=[row.name for row in ROWS])
    def test_the_zoo(self, turn):
        """The graph, its complement and its transpose, in blocks of three sizes in turn."""
        graph = ROWS[turn].build(ROWS[turn].sizes[-1])
        for place, form in enumerate((graph, ~graph, graph.T)):
            check(form, (1, 3, 8)[(turn + place) % 3])

    @pytest.mark.parametrize(
        "graph",
        [
            patterns.causal(300),
            patterns.full(300),
            patterns.window(300, 0),
            patterns.window(300, 37) | patterns.sinks(300, 5),
            patterns.window(300, 129, causal=False),
            patterns.documents([64, 0, 100, 36, 100]),
            patterns.documents([64, 36, 100, 100], causal=False),
            patterns.dilated(300, 5, 16) ^ patterns.prefix(300, 70),
            patterns.dilated(300, 9, 2) | patterns.causal(300),
            patterns.global_tokens(300, [3, 77, 250], causal=False) - patterns.window(300, 9, causal=False),
            patterns.sinks(300, 64, causal=False).T,
            patterns.causal(300).rows(111, 300),
            patterns.cross(128, 300),
            TokenGraph.from_edges(patterns.window(300, 70).edge_index, 300),
            TokenGraph.from_rule(
                lambda b, h, dst, src: (src <= dst) & (dst - src < 40 * h + 3), 200, heads=3
            ),
            TokenGraph.from_rule(
                lambda b, h, dst, src: (src < 50 * b + 3) | (dst == h), 130, 90, heads=2, batch=2
            ),
        ],
        ids=lambda graph: graph.name,
    )
    def test_larger(self, graph):
        """In blocks that divide the tokens and that do not, of one token and of more than there are."""
        for block in (1, 50, 64, 1000) if graph.num_edges % 2 else (16, 64, 100, 300):
            check(graph, block)

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
