"""Grids: the same graphs elsewhere."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.extras import needs

from gnn_attention import patterns


def product_of(*graphs):
    """bool [dst, src]: an edge where each of the graphs along the axes has one."""
    mask = torch.ones(1, 1)
    for graph in graphs:
        mask = torch.kron(mask, graph.mask().float())
    return mask > 0


class TestKin:
    @pytest.mark.parametrize(
        ("build", "shape"),
        [
            (lambda shape: patterns.natten(shape, 3, dilation=2), (6, 7)),
            (lambda shape: patterns.natten(shape, 4, stride=3), (5, 4, 6)),
            (lambda shape: patterns.swin(shape, 3, 2), (5, 7)),
            (lambda shape: patterns.haloed_blocks(shape, 2, 1), (3, 5, 4)),
            (lambda shape: patterns.sliding_tile(shape, 2, 2), (4, 6)),
        ],
        ids=["natten dilated", "natten strided", "swin", "haloed_blocks", "sliding_tile"],
    )
    def test_boxes_are_products_of_their_axes(self, build, shape):
        assert torch.equal(build(shape).mask(), product_of(*(build((size,)) for size in shape)))

    def test_dilation_leaves_every_remainder_alone(self):
        graph = patterns.natten((7,), 3, dilation=2)
        for remainder, size in ((0, 4), (1, 3)):
            part = graph.mask()[remainder::2, remainder::2]
            assert torch.equal(part, patterns.natten((size,), 3).mask())
        assert not graph.mask()[0::2, 1::2].any()

    def test_tiled_is_the_same_graph_in_another_order(self):
        shape, tile = (4, 6), (2, 3)
        order = sorted(range(24), key=lambda i: (i // 6 // 2, i % 6 // 3, i // 6, i % 6))
        mask = patterns.sliding_tile(shape, tile, (1, 2), text=1).mask()
        order = torch.tensor([*order, 24])
        assert torch.equal(
            patterns.sliding_tile(shape, tile, (1, 2), text=1, tiled=True).mask(), mask[order][:, order]
        )


class TestHuggingFace:
    @pytest.mark.parametrize(
        ("shape", "window", "shift"), [((8, 8), 4, 2), ((8, 12), 4, 1), ((6, 9), 3, 2), ((8, 8), 4, 0)]
    )
    def test_shifted_windows_of_swin(self, shape, window, shift):
        """Its layer's own roll, partition and mask, carried by the positions of the tokens."""
        transformers = needs("transformers")
        modeling_swin = needs("transformers.models.swin.modeling_swin")
        layer = modeling_swin.SwinLayer(
            transformers.SwinConfig(window_size=window),
            dim=4,
            input_resolution=shape,
            num_heads=1,
            shift_size=shift,
        )
        places = torch.arange(shape[0] * shape[1]).view(1, *shape, 1)
        windows = modeling_swin.window_partition(layer.cyclic_shift(places), window).view(-1, window**2)
        allowed = layer.get_attn_mask(*shape, dtype=torch.float32, device=places.device)
        mask = torch.zeros(shape[0] * shape[1], shape[0] * shape[1], dtype=torch.bool)
        for number, tokens in enumerate(windows):
            inside = torch.ones(window**2, window**2) > 0 if allowed is None else allowed[number] == 0
            mask[tokens[:, None], tokens] = inside
        assert torch.equal(patterns.swin(shape, window, shift).mask(), mask)


class TestElsewhere:
    @pytest.mark.parametrize(("shape", "block", "halo"), [((4, 6), 2, 1), ((6, 6), 3, 2), ((4, 4), 4, 1)])
    def test_halos_by_unfolding(self, shape, block, halo):
        """As convolutions gather their input: blocks of senders are windows of ``block + 2 halo`` at steps of
        ``block``.
        """
        places = torch.arange(shape[0] * shape[1]).view(1, 1, *shape)
        senders = (
            torch.nn.functional.unfold(places + 1.0, block + 2 * halo, stride=block, padding=halo).long() - 1
        )
        receivers = torch.nn.functional.unfold(places.float(), block, stride=block).long()
        mask = torch.zeros(shape[0] * shape[1], shape[0] * shape[1], dtype=torch.bool)
        for dst, src in zip(receivers[0].T, senders[0].T, strict=True):
            mask[dst[:, None], src[src >= 0]] = True
        assert torch.equal(patterns.haloed_blocks(shape, block, halo).mask(), mask)

    @pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4)])
    def test_axes_as_the_number_of_coordinates_that_differ(self, shape):
        places = torch.tensor(list(product(*map(range, shape))), dtype=torch.float32)
        assert torch.equal(patterns.axial(shape).mask(), torch.cdist(places, places, p=0) < 2)
