"""A graph as FlexAttention's lists of tiles, and as a table of bits."""

import pytest
import torch
from support.covering import thinned
from torch.nn.attention.flex_attention import BlockMask

from gnn_attention import patterns
from gnn_attention.backends import _flex_block_mask as masks
from gnn_attention.verify.cases import GRAPHS

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", thinned(GRAPHS, 0))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_is_the_graph_on_every_pair(name, device, monkeypatch):
    """For tiles of both devices, empty and full ones too; beyond the border there is no edge."""
    case, block = GRAPHS[name], masks.BLOCKS[device]
    monkeypatch.setitem(masks.BLOCKS, "cpu", block)
    table, lists = masks.plan(case.graph, CPU)
    sides = [block * max(2, -(-size // block)) for size in (case.graph.num_dst, case.graph.num_src)]
    b, h, _, _ = case.indices()
    dst, src = torch.arange(sides[0]).view(-1, 1), torch.arange(sides[1])
    edges = masks.is_edge(table, block, b, h, dst, src)
    inside = edges[:, :, : case.graph.num_dst, : case.graph.num_src]
    assert torch.equal(inside, case.mask)
    assert edges.sum() == inside.sum()
    assert len(lists) == 4


LONG = [patterns.window(1000, 150), patterns.causal(640), patterns.cross(128, 100)]


@pytest.mark.parametrize("graph", LONG, ids=repr)
def test_long_graphs_have_all_kinds_of_tiles(graph):
    """The lists hold every tile with an edge once, the full ones apart; none that the border cuts is full."""
    _, (some_number, some, full_number, full) = masks.plan(graph, CPU)
    assert full_number.sum() > 0
    for row, part in enumerate(graph.mask().split(64)):
        counts = [int(tile.sum()) for tile in part.split(64, 1)]
        whole = [c for c, count in enumerate(counts) if count == 64 * 64]
        assert full[0, 0, row, : full_number[0, 0, row]].tolist() == whole
        partial = [c for c, count in enumerate(counts) if count and c not in whole]
        assert some[0, 0, row, : some_number[0, 0, row]].tolist() == partial


ON_CUDA = [patterns.window(5000, 150), patterns.cross(700, 200), GRAPHS["by head"].graph]


@pytest.mark.parametrize("graph", ON_CUDA, ids=repr)
def test_lists_for_cuda_are_turned_round_and_as_wide_as_the_longest_row(graph):
    """Those of columns are FlexAttention's own transposition of those of rows, for a backward pass."""
    full, some = masks._kinds(masks.tiles(graph, 128))
    wide = [part for kind in (some, full, some.mT, full.mT) for part in masks.tile_list(kind)]
    narrow = masks._lists(full, some, on_cpu=False)
    other = BlockMask.from_kv_blocks(*wide[:4], BLOCK_SIZE=128)
    turned = (other.q_num_blocks, other.q_indices, other.full_q_num_blocks, other.full_q_indices)
    assert all(torch.equal(mine, its) for mine, its in zip(wide[4:], turned, strict=True))
    for number, all_columns, columns in zip(wide[::2], wide[1::2], narrow[1::2], strict=True):
        assert columns.is_contiguous()
        listed = torch.arange(columns.shape[-1]) < number.unsqueeze(-1)
        assert torch.equal(listed.sum(-1), number)
        assert torch.equal(columns[listed], all_columns[..., : columns.shape[-1]][listed])
    assert narrow[1].shape == narrow[3].shape
    assert narrow[5].shape == narrow[7].shape
    if graph.num_dst == 5000:
        assert sum(x.numel() for x in narrow) < sum(x.numel() for x in wide) / 5
