"""Grids: their kin, their refusals, and the same graphs elsewhere."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
import torch
from support.extras import needs
from support.refusals import assert_refusals

from gnn_attention import TokenGraph, patterns


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

    def test_neighbourhoods_on_a_line(self):
        assert patterns.natten((9,), 9) == patterns.full(9)
        assert patterns.natten((9,), 1) == patterns.self_loops(9)
        assert patterns.natten((9,), 3, causal=True) == patterns.window(9, 3)
        assert patterns.natten((9,), 3, dilation=2, causal=True) == patterns.dilated(9, 3, 2)

    def test_neighbourhoods_contain_the_window_that_is_not_pushed(self):
        inner = patterns.natten((9,), 5) & patterns.band(9, 2, 2)
        assert inner == patterns.band(9, 2, 2)

    def test_a_stride_as_large_as_the_kernel_is_blocked(self):
        assert patterns.natten((12, 6), 3, stride=3) == patterns.swin((12, 6), 3)
        assert patterns.natten((12,), 4, stride=4, causal=True) == patterns.chunked(12, 4)

    def test_dilation_leaves_every_remainder_alone(self):
        graph = patterns.natten((7,), 3, dilation=2)
        for remainder, size in ((0, 4), (1, 3)):
            part = graph.mask()[remainder::2, remainder::2]
            assert torch.equal(part, patterns.natten((size,), 3).mask())
        assert not graph.mask()[0::2, 1::2].any()

    def test_one_value_or_one_for_each_axis(self):
        assert patterns.natten((5, 5), 3, 1, 1, False) == patterns.natten(
            (5, 5), (3, 3), (1, 1), (1, 1), (False, False)
        )
        assert patterns.swin([4, 6], [2, 2], [1, 1]) == patterns.swin(torch.Size([4, 6]), 2, 1)

    def test_names_give_the_axes_that_differ(self):
        graph = patterns.natten([6, 4], [3, 3], dilation=(2, 1), causal=(True, False))
        assert graph.name == "natten((6, 4), 3, dilation=(2, 1), causal=(True, False))"
        assert patterns.sliding_tile((4, 6), 2, (1, 3), text=1, tiled=True).name == (
            "sliding_tile((4, 6), 2, (1, 3), text=1, tiled=True)"
        )

    def test_swin_layers_take_turns(self):
        """The windows alone never mix; with the shifted ones information crosses every border."""
        plain, shifted = patterns.swin((8,), 4), patterns.swin((8,), 4, 2)
        assert plain @ plain == plain
        assert (plain @ shifted @ plain) == patterns.full(8)

    def test_swin_and_blocks_without_halo(self):
        assert patterns.swin((5, 7), (2, 3)) == patterns.haloed_blocks((5, 7), (2, 3), 0)
        assert patterns.swin((9,), 4) == patterns.chunked(9, 4, causal=False)

    def test_halos_on_a_line(self):
        assert patterns.haloed_blocks((11,), 4, 4) == patterns.chunked(11, 4, before=1, after=1, causal=False)
        assert patterns.haloed_blocks((11,), 1, 2) == patterns.band(11, 2, 2)

    def test_axes_unite_and_follow_each_other(self):
        shape = (2, 3, 4)
        first, second, third = (patterns.axial(shape, axis) for axis in range(3))
        assert first | second | third == patterns.axial(shape)
        assert first @ second @ third == patterns.full(24)
        assert patterns.axial((5,)) == patterns.full(5)
        assert patterns.axial((3, 4), 1) == patterns.documents([4, 4, 4], causal=False)

    def test_a_picture_one_row_high_has_segments(self):
        """Image Transformer in one dimension: what stands to the right of the block is not generated yet."""
        assert patterns.image_local_2d((1, 11), (1, 4), (0, 3)) == patterns.segment_recurrence(11, 4, 3)
        assert patterns.image_local_2d((3, 4), (3, 4), 0) == patterns.causal(12)

    def test_tiles_slide_as_neighbourhoods_of_tiles(self):
        assert patterns.sliding_tile((5, 6), 1, 3) == patterns.natten((5, 6), 3)
        blown_up = torch.kron(patterns.natten((4,), 3).mask().float(), torch.ones(2, 2)) > 0
        assert torch.equal(patterns.sliding_tile((8,), 2, 3).mask(), blown_up)

    @pytest.mark.parametrize(("tile", "window"), [(2, 3), (3, 3), (2, 1)])
    def test_tiles_slide_as_a_stride_of_one_tile(self, tile, window):
        """Generalised neighbourhood attention of ``window`` tiles, where the window has a middle tile."""
        shape = (4 * tile, 3 * tile)
        assert patterns.sliding_tile(shape, tile, window) == patterns.natten(
            shape, window * tile, stride=tile
        )

    def test_tiled_is_the_same_graph_in_another_order(self):
        shape, tile = (4, 6), (2, 3)
        order = sorted(range(24), key=lambda i: (i // 6 // 2, i % 6 // 3, i // 6, i % 6))
        mask = patterns.sliding_tile(shape, tile, (1, 2), text=1).mask()
        order = torch.tensor([*order, 24])
        assert torch.equal(
            patterns.sliding_tile(shape, tile, (1, 2), text=1, tiled=True).mask(), mask[order][:, order]
        )

    def test_video_heads_without_a_prompt(self):
        assert patterns.svg_spatial(3, 4, 5) == patterns.window(12, 5, causal=False)
        frames = torch.ones(3, 3) > 0
        spread = torch.kron(frames.float(), patterns.window(4, 2, causal=False).mask().float()) > 0
        assert torch.equal(patterns.svg_temporal(3, 4, 2).mask(), spread)

    @pytest.mark.parametrize(
        "build",
        [
            lambda: patterns.natten((5, 4), 3),
            lambda: patterns.swin((4, 4), 2, 1),
            lambda: patterns.sliding_tile((4,), 2, 1, text=1),
            lambda: patterns.axial((2, 3)),
        ],
        ids=["natten", "swin", "sliding_tile", "axial"],
    )
    def test_grids_can_be_pickled(self, build):
        assert pickle.loads(pickle.dumps(build())) == build()


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (
                    lambda: patterns.natten(16, 3),
                    TypeError,
                    r"shape must be a sequence of sizes, got 16; a line of tokens is \(16,\)",
                ),
                (lambda: patterns.natten((), 3), ValueError, "shape must have at least one axis"),
                (lambda: patterns.natten((4, 0), 3), ValueError, "each of shape must be at least 1, got 0"),
                (
                    lambda: patterns.natten((4, 4.0), 3),
                    TypeError,
                    "each of shape must be an integer, got 4.0",
                ),
                (lambda: patterns.natten((4, 4), 0), ValueError, "kernel must be at least 1, got 0"),
                (
                    lambda: patterns.natten((4, 4), (3, 3, 3)),
                    ValueError,
                    r"kernel must be one value or 2, .*\(4, 4\), got \(3, 3, 3\)",
                ),
                (
                    lambda: patterns.natten((4, 4), (3, "3")),
                    TypeError,
                    "each of kernel must be an integer, got '3'",
                ),
                (
                    lambda: patterns.natten((5, 4), 5),
                    ValueError,
                    "kernel must fit into the grid, got kernel = 5 along axis 1, which has 4",
                ),
                (
                    lambda: patterns.natten((7,), 4, dilation=2),
                    ValueError,
                    r"got kernel \* dilation = 4 \* 2 along axis 0, which has 7",
                ),
                (
                    lambda: patterns.natten((7,), 3, stride=4),
                    ValueError,
                    "stride must be at most kernel, got 4 for a kernel of 3",
                ),
                (lambda: patterns.natten((7,), 3, stride=0), ValueError, "stride must be at least 1, got 0"),
                (
                    lambda: patterns.natten((7,), 3, dilation=True),
                    TypeError,
                    "dilation must be an integer, got the bool True",
                ),
                (
                    lambda: patterns.natten((7,), 3, causal=1),
                    TypeError,
                    "causal must be True or False, .* got 1 of type int",
                ),
                (
                    lambda: patterns.natten((7, 7), 3, causal=(True,)),
                    ValueError,
                    r"causal must be one value or 2, .* got \(True,\)",
                ),
                (
                    lambda: patterns.swin((8, 8), 4, 4),
                    ValueError,
                    "shift must be less than window, got 4 for a window of 4 along axis 0",
                ),
                (lambda: patterns.swin((8, 8), 4, -1), ValueError, "shift must be at least 0, got -1"),
                (lambda: patterns.swin((8, 8), 0), ValueError, "window must be at least 1, got 0"),
                (
                    lambda: patterns.haloed_blocks((8, 8), 4, -1),
                    ValueError,
                    "halo must be at least 0, got -1",
                ),
                (
                    lambda: patterns.haloed_blocks((8, 8), (4, 0), 1),
                    ValueError,
                    "each of block must be at least 1, got 0",
                ),
                (
                    lambda: patterns.axial((2, 3), 2),
                    IndexError,
                    r"axis must be in 0 \.\. 1 for a grid of shape \(2, 3\), got 2",
                ),
                (lambda: patterns.axial((2, 3), -1), IndexError, r"axis must be in 0 \.\. 1 .* got -1"),
                (lambda: patterns.axial((2, 3), 0.0), TypeError, "axis must be an integer, got 0.0"),
                (
                    lambda: patterns.image_local_2d((8,), 4, 1),
                    ValueError,
                    r"shape must be \(height, width\), got \(8,\)",
                ),
                (
                    lambda: patterns.image_local_2d((8, 8), 0, 1),
                    ValueError,
                    "block must be at least 1, got 0",
                ),
                (
                    lambda: patterns.image_local_2d((8, 8), 2, -1),
                    ValueError,
                    "memory must be at least 0, got -1",
                ),
                (
                    lambda: patterns.sliding_tile((8, 6), 4, 1),
                    ValueError,
                    "tile must divide the grid, got 4 along axis 1, which has 6",
                ),
                (
                    lambda: patterns.sliding_tile((8,), 4, 3),
                    ValueError,
                    "window must fit into the grid, got window = 3 along axis 0",
                ),
                (
                    lambda: patterns.sliding_tile((8,), 4, 1, text=-1),
                    ValueError,
                    "text must be at least 0, got -1",
                ),
                (lambda: patterns.svg_spatial(-1, 4, 2), ValueError, "frames must be at least 0, got -1"),
                (lambda: patterns.svg_spatial(2, 0, 2), ValueError, "frame_size must be at least 1, got 0"),
                (lambda: patterns.svg_temporal(2, 4, -2), ValueError, "w must be at least 0, got -2"),
                (
                    lambda: patterns.svg_temporal(2, 4, 2, prompt=-1),
                    ValueError,
                    "prompt must be at least 0, got -1",
                ),
            ]
        )


class TestAttentionGym:
    @pytest.mark.parametrize("kernel", [(3, 3), (5, 3), (1, 7)])
    def test_natten(self, kernel):
        """On a square canvas, as its names of width and height change places; odd kernels."""
        masks = needs("attn_gym.masks")
        theirs = masks.generate_natten(7, 7, *kernel)
        assert TokenGraph.from_rule(theirs, 49) == patterns.natten((7, 7), kernel)

    def test_natten_with_an_even_kernel_hears_one_more(self):
        masks = needs("attn_gym.masks")
        theirs = TokenGraph.from_rule(masks.generate_natten(7, 7, 4, 4), 49)
        assert theirs == patterns.natten((7, 7), 5)

    @pytest.mark.parametrize(
        ("shape", "tile", "window"),
        [((8, 6), (2, 2), (3, 1)), ((8, 8), (2, 4), (2, 2)), ((9, 6), (3, 1), (3, 4))],
    )
    @pytest.mark.parametrize("text", [0, 3])
    def test_sliding_tiles_of_a_picture(self, shape, tile, window, text):
        kernel = tuple(w * t for w, t in zip(window, tile, strict=True))
        masks = needs("attn_gym.masks")
        theirs = masks.generate_sta_mask_mod_2d(shape, kernel, tile, text)
        graph = patterns.sliding_tile(shape, tile, window, text=text, tiled=True)
        assert TokenGraph.from_rule(theirs, graph.num_dst) == graph

    @pytest.mark.parametrize("text", [0, 2])
    def test_sliding_tiles_of_a_video(self, text):
        masks = needs("attn_gym.masks")
        theirs = masks.generate_sta_mask_mod_3d((4, 4, 6), (4, 2, 6), (2, 2, 2), text)
        graph = patterns.sliding_tile((4, 4, 6), 2, (2, 1, 3), text=text, tiled=True)
        assert TokenGraph.from_rule(theirs, graph.num_dst) == graph

    @pytest.mark.parametrize("first_frame", [True, False])
    @pytest.mark.parametrize(
        ("prompt", "frames", "size", "width", "multiple"), [(2, 4, 5, 2, 4), (0, 3, 4, 1, 1)]
    )
    def test_spatial_head(self, prompt, frames, size, width, multiple, first_frame):
        masks = needs("attn_gym.masks")
        theirs = masks.generate_spatial_head_mask_mod(prompt, frames, size, width, first_frame, multiple)
        w = width * size // multiple * multiple
        graph = patterns.svg_spatial(frames, size, w, prompt=prompt, first_frame=first_frame)
        assert TokenGraph.from_rule(theirs, prompt + frames * size) == graph

    @pytest.mark.parametrize(("prompt", "frames", "size", "width"), [(2, 4, 10, 2), (0, 3, 7, 1)])
    def test_temporal_head(self, prompt, frames, size, width):
        masks = needs("attn_gym.masks")
        theirs = masks.generate_temporal_head_mask_mod(prompt, frames, size, width)
        graph = patterns.svg_temporal(frames, size, width * size // frames, prompt=prompt)
        assert TokenGraph.from_rule(theirs, prompt + frames * size) == graph


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
