"""Graphs convert to FlexAttention's lists, to packings and to windows without a change of their edges."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import assert_refusals
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from gnn_attention import TokenGraph, convert, patterns


def unpack(cu_seqlens, window, n):
    """Return the mask that a varlen kernel applies: documents with one window, -1 for all."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    left, right = (n if side < 0 else side for side in window)
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for dst in range(start, stop):
            mask[dst, max(start, dst - left) : min(stop, dst + right + 1)] = True
    return mask


def tile_sets(number, columns):
    """Return FlexAttention's lists as a set of tiles for each row."""
    return [
        [set(line[: int(count)].tolist()) for count, line in zip(*row, strict=True)]
        for row in zip(number[0], columns[0], strict=True)
    ]


class CopyCounter(TorchDispatchMode):
    """Count the tensors that are copied to a device."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        self.number += func is torch.ops.aten._to_copy.default and "device" in options
        return func(*args, **options)


def varying_rule(b, h, dst, src):
    return (src + b) % 5 <= (dst + 2 * h) % 7


class TestBlockMask:
    @pytest.mark.parametrize(
        "graph",
        [
            patterns.causal(256),
            patterns.window(250, 40) | patterns.sinks(250, 3),
            patterns.documents([64, 100, 92]),
            patterns.cross(70, 90),
            patterns.dilated(256, 5, 16).rows(60, 200),
            TokenGraph.from_edges(patterns.window(256, 33).edge_index, 256),
            TokenGraph.from_rule(varying_rule, 70, 90, heads=2, batch=3),
        ],
        ids=lambda graph: graph.name,
    )
    def test_both_directions_agree_with_create_block_mask(self, graph):
        """Both builders have the same tiles with edges, and the same full tiles."""
        block_mask = convert.to_block_mask(graph, 32)
        sizes = (graph.batch, graph.heads, graph.num_dst, graph.num_src)
        created_mask = create_block_mask(graph.rule, *sizes, "cpu", BLOCK_SIZE=32)
        assert block_mask.seq_lengths == created_mask.seq_lengths == sizes[2:]
        assert torch.equal(block_mask.to_dense(), created_mask.to_dense())
        for kind in ("full_kv", "full_q"):
            lists = [
                (getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices"))
                for mask in (block_mask, created_mask)
            ]
            assert tile_sets(*lists[0]) == tile_sets(*lists[1]), kind
        for mask in (block_mask, created_mask):
            assert torch.equal(convert.from_block_mask(mask).mask(), graph.mask())

    def test_lists_without_a_mask_mod_are_whole_blocks(self):
        """FlexAttention reads only the first columns of a row; the other columns are not blocks."""
        number, columns = torch.tensor([[[1, 2], [0, 2]]]), torch.tensor([[[[1, 1], [0, 1]]] * 2])
        columns = columns.view(1, 2, 2, 2)
        mask = BlockMask.from_kv_blocks(number.int(), columns.int(), BLOCK_SIZE=(4, 2), seq_lengths=(8, 3))
        expected = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [1, 1]]]).bool()
        expected = expected.repeat_interleave(4, 1).repeat_interleave(2, 2)[..., :3]
        assert torch.equal(convert.from_block_mask(mask).mask(), expected)

    @pytest.mark.parametrize(
        "graph",
        [
            patterns.documents([64, 100, 92]),
            patterns.documents([6, 10]).T | patterns.tree([-1, *range(15)]),
            patterns.bigbird_etc(64, 8, 16, num_random=2),
        ],
        ids=lambda graph: graph.name,
    )
    def test_a_kernel_on_another_device_copies_no_table(self, graph):
        """FlexAttention cannot compile a ``mask_mod`` in which a table is moved."""
        mask = convert.to_block_mask(graph, 8, "meta")
        assert mask.kv_indices.device.type == "meta"
        zero, token = (torch.zeros(1, dtype=torch.int64, device="meta") for _ in range(2))
        with CopyCounter() as counter:
            mask.mask_mod(zero, zero, token, token)
        assert counter.number == 0

    def test_what_is_refused(self):
        varying_graph, causal = TokenGraph.from_rule(varying_rule, 4, heads=2), patterns.causal
        estimate = r"the lists of 976562500 tiles would take 29 GiB .* larger"
        packing, window = "not a packing of documents with one window", r"is not a window \(left, right\)"
        cases = [
            (lambda: convert.to_block_mask(causal(1_000_000), 32), ValueError, estimate),
            (lambda: convert.from_block_mask(causal(8)), TypeError, "mask must be a BlockMask, got"),
            (lambda: convert.to_block_mask(causal(8), 0), ValueError, "block_size must be at least 1, got 0"),
            (lambda: convert.to_block_mask(patterns.cross(0, 3)), ValueError, "at least one receiver and"),
            (lambda: convert.to_sdpa_mask(causal(3), torch.int64), TypeError, "dtype must be a floating"),
            (lambda: convert.to_varlen(varying_graph), ValueError, r"get one with select\(batch, head\)"),
            (lambda: convert.to_varlen(patterns.cross(2, 3)), ValueError, "as many receivers as senders"),
            (lambda: convert.to_varlen(patterns.prefix(6, 3)), ValueError, packing),
            (lambda: convert.to_varlen(patterns.window(8, 2) | patterns.sinks(8, 1)), ValueError, packing),
            (lambda: convert.to_varlen(patterns.tree([-1, 0, 0])), ValueError, packing),
            (lambda: convert.to_window(patterns.strict_causal(4)), ValueError, window),
            (lambda: convert.to_window(patterns.documents([3, 3])), ValueError, window),
            (lambda: convert.to_window(causal(6).rows(0, 2)), ValueError, window),
        ]
        assert_refusals(cases)


class TestVarlen:
    @pytest.mark.parametrize(
        ("graph", "bounds", "window"),
        [
            (patterns.causal(5), [0, 5], (-1, 0)),
            (patterns.full(5), [0, 5], (-1, -1)),
            (patterns.window(9, 3), [0, 9], (2, 0)),
            (patterns.window(9, 3, causal=False), [0, 9], (2, 2)),
            (patterns.window(4, 1), [0, 1, 2, 3, 4], (-1, -1)),
            (patterns.documents([3, 0, 1, 4]), [0, 3, 4, 8], (-1, 0)),
            (TokenGraph.from_edges(patterns.documents([2, 2]).edge_index.flip(1), 4), [0, 2, 4], (-1, 0)),
            (patterns.full(0), [0], (-1, -1)),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_packings(self, graph, bounds, window):
        packing = convert.to_varlen(graph)
        assert (packing.cu_seqlens.tolist(), packing.window) == (bounds, window)
        assert packing.cu_seqlens.dtype == torch.int32
        assert packing.max_seqlen == max((b - a for a, b in pairwise(bounds)), default=0)
        assert torch.equal(unpack(packing.cu_seqlens, packing.window, graph.num_dst), graph.mask())

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(1, 6), max_size=6), st.integers(0, 7), st.integers(0, 7))
    def test_any_packing_comes_back(self, lengths, left, right):
        n = sum(lengths)
        graph = patterns.documents(lengths, causal=False) & patterns.band(n, left, right)
        packing = convert.to_varlen(graph)
        assert torch.equal(unpack(packing.cu_seqlens, packing.window, n), graph.mask())


class TestWindow:
    @pytest.mark.parametrize(
        ("graph", "window"),
        [
            (patterns.causal(6), (-1, 0)),
            (patterns.full(6), (-1, -1)),
            (patterns.cross(6, 2), (-1, -1)),
            (TokenGraph.from_rule(lambda b, h, dst, src: src - (dst - 4) <= 3, 6, 2), (-1, 3)),
            (patterns.window(6, 3), (2, 0)),
            (patterns.causal(6).T, (0, -1)),
            (patterns.causal(6).rows(4, 6), (-1, 0)),
            (patterns.window(9, 3).rows(6, 9), (2, 0)),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_windows(self, graph, window):
        assert convert.to_window(graph) == window
        left, right = (99 if side < 0 else side for side in window)
        shift = graph.num_src - graph.num_dst
        expected = [
            [dst + shift - left <= src <= dst + shift + right for src in range(graph.num_src)]
            for dst in range(graph.num_dst)
        ]
        assert graph.mask().tolist() == expected
