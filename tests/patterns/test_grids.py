"""Grids are products of their axes, and transformers has the same shifted windows."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from support.extras import needs

from gnn_attention import patterns


class TestKin:
    @pytest.mark.parametrize(
        ("build", "shape"),
        [
            (lambda shape: patterns.natten(shape, 3, dilation=2), (6, 7)),
            (lambda shape: patterns.swin(shape, 3, 2), (5, 7)),
            (lambda shape: patterns.haloed_blocks(shape, 2, 1), (3, 5, 4)),
            (lambda shape: patterns.sliding_tile(shape, 2, 2), (4, 6)),
        ],
        ids=["natten dilated", "swin", "haloed_blocks", "sliding_tile"],
    )
    def test_boxes_are_products_of_their_axes(self, build, shape):
        axes = [build((size,)).mask().float() for size in shape]
        assert torch.equal(build(shape).mask(), reduce(torch.kron, axes) > 0)


class TestHuggingFace:
    @pytest.mark.parametrize(
        ("shape", "window", "shift"), [((8, 8), 4, 2), ((8, 12), 4, 1), ((6, 9), 3, 2), ((8, 8), 4, 0)]
    )
    def test_shifted_windows_of_swin(self, shape, window, shift):
        """The layer's roll, partition and mask of the positions of tokens give the edges."""
        modeling_swin = needs("transformers.models.swin.modeling_swin")
        config = needs("transformers").SwinConfig(window_size=window)
        layer = modeling_swin.SwinLayer(config, 4, input_resolution=shape, num_heads=1, shift_size=shift)
        positions = torch.arange(shape[0] * shape[1]).view(1, *shape, 1)
        windows = modeling_swin.window_partition(layer.cyclic_shift(positions), window).view(-1, window**2)
        layer_mask = layer.get_attn_mask(*shape, dtype=torch.float32, device=positions.device)
        mask = torch.zeros(shape[0] * shape[1], shape[0] * shape[1], dtype=torch.bool)
        for number, tokens in enumerate(windows):
            is_full = layer_mask is None
            mask[tokens[:, None], tokens] = torch.tensor(True) if is_full else layer_mask[number] == 0
        assert torch.equal(patterns.swin(shape, window, shift).mask(), mask)
