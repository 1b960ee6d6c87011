"""Graphs become FlexAttention's lists of tiles, and bit tables."""

import pytest
import torch
from support.covering import thin
from torch.nn.attention.flex_attention import BlockMask

from gnn_attention import patterns
from gnn_attention.backends import _flex_block_mask as masks
from gnn_attention.verify.cases import GRAPHS

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", thin(GRAPHS, 0))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_gives_the_edges_of_the_graph(name, device, monkeypatch):
    """The table is right for tiles of both devices, empty and full tiles, and pairs beyond the border."""
    case, block = GRAPHS[name], masks.BLOCK_SIZES[device]
    monkeypatch.setitem(masks.BLOCK_SIZES, "cpu", block)
    table, lists = masks.make_tables(case.graph, CPU)
    sides = [block * max(2, -(-size // block)) for size in (case.graph.num_dst, case.graph.num_src)]
    b, h, _, _ = case.indices()
    dst, src = torch.arange(sides[0]).view(-1, 1), torch.arange(sides[1])
    edges = masks.is_edge(table, block, b, h, dst, src)
    inner_edges = edges[:, :, : case.graph.num_dst, : case.graph.num_src]
    assert torch.equal(inner_edges, case.mask)
    assert edges.sum() == inner_edges.sum()
    assert len(lists) == 4


LONG = [patterns.window(1000, 150), patterns.causal(640), patterns.cross(128, 100)]


@pytest.mark.parametrize("graph", LONG, ids=repr)
def test_long_graphs_have_all_kinds_of_tiles(graph):
    """Two lists hold each tile with an edge once, partial or full; tiles cut by the border are partial."""
    _, (num_partial, partial, num_full, full) = masks.make_tables(graph, CPU)
    assert num_full.sum() > 0
    for row, mask in enumerate(graph.mask().split(64)):
        counts = [int(tile.sum()) for tile in mask.split(64, 1)]
        full_columns = [c for c, count in enumerate(counts) if count == 64 * 64]
        assert full[0, 0, row, : num_full[0, 0, row]].tolist() == full_columns
        partial_columns = [c for c, count in enumerate(counts) if count and c not in full_columns]
        assert partial[0, 0, row, : num_partial[0, 0, row]].tolist() == partial_columns


ON_CUDA = [patterns.window(5000, 150), patterns.cross(700, 200), GRAPHS["by head"].graph]


@pytest.mark.parametrize("graph", ON_CUDA, ids=repr)
def test_lists_for_cuda_have_columns_and_the_width_of_the_longest_row(graph):
    """The lists by columns, for the backward pass, are FlexAttention's own transpose of those by rows."""
    full, partial = masks._split_tiles(masks.tiles(graph, 128))
    lists = [x for kind in (partial, full, partial.mT, full.mT) for x in masks.tile_list(kind)]
    short_lists = masks._list_tiles(full, partial, on_cpu=False)
    mask = BlockMask.from_kv_blocks(*lists[:4], BLOCK_SIZE=128)
    transpose = (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
    assert all(torch.equal(x, y) for x, y in zip(lists[4:], transpose, strict=True))
    for number, all_columns, columns in zip(lists[::2], lists[1::2], short_lists[1::2], strict=True):
        assert columns.is_contiguous()
        is_used = torch.arange(columns.shape[-1]) < number.unsqueeze(-1)
        assert torch.equal(is_used.sum(-1), number)
        assert torch.equal(columns[is_used], all_columns[..., : columns.shape[-1]][is_used])
    assert short_lists[1].shape == short_lists[3].shape
    assert short_lists[5].shape == short_lists[7].shape
    if graph.num_dst == 5000:
        assert sum(x.numel() for x in short_lists) < sum(x.numel() for x in lists) / 5
