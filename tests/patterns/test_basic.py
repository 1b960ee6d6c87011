"""The simplest graphs: their kin, their refusals, and the same graphs elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.refusals import assert_refusals
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

from gnn_attention import patterns


class TestKin:
    def test_the_future_is_the_past_turned_round(self):
        assert patterns.anti_causal(7) == patterns.causal(7).T
        assert patterns.anti_causal(7) == ~patterns.strict_causal(7)
        assert patterns.anti_causal(7) & patterns.causal(7) == patterns.self_loops(7)

    def test_self_loops_are_the_identity_of_two_hops(self):
        graph = patterns.window(7, 3)
        assert patterns.self_loops(7) @ graph == graph == graph @ patterns.self_loops(7)
        assert graph**0 == patterns.self_loops(7) == ~patterns.no_self(7)

    def test_alignments_agree_where_the_lengths_do(self):
        for align in ("upper_left", "lower_right"):
            assert patterns.causal_aligned(6, 6, align) == patterns.causal(6)

    def test_the_lower_right_is_a_decoding_step(self):
        """The last receivers over all senders; the upper left the first ones."""
        assert torch.equal(
            patterns.causal_aligned(2, 6, "lower_right").mask(), patterns.causal(6).rows(4, 6).mask()
        )
        assert torch.equal(
            patterns.causal_aligned(2, 6, "upper_left").mask(), patterns.causal(6).rows(0, 2).mask()
        )

    def test_deaf_receivers_of_the_lower_right(self):
        assert patterns.causal_aligned(5, 3, "lower_right").in_degree().tolist() == [0, 0, 1, 2, 3]

    def test_an_encoder_and_decoder_in_four_blocks(self):
        mask = patterns.encoder_decoder(3, 4).mask()
        assert torch.equal(mask[:3, :3], patterns.full(3).mask())
        assert torch.equal(mask[3:, :3], patterns.cross(4, 3).mask())
        assert torch.equal(mask[3:, 3:], patterns.causal(4).mask())
        assert not mask[:3, 3:].any()

    def test_encoder_and_decoder_have_the_edges_of_a_prefix(self):
        assert patterns.encoder_decoder(3, 4) == patterns.prefix(7, 3)
        assert patterns.encoder_decoder(0, 4) == patterns.causal(4)
        assert patterns.encoder_decoder(4, 0) == patterns.full(4)


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: patterns.self_loops(-1), ValueError, "at least 0, got -1"),
                (lambda: patterns.anti_causal(2.5), TypeError, "must be an integer, got 2.5"),
                (
                    lambda: patterns.causal_aligned(2, 4, "left"),
                    ValueError,
                    "align must be one of 'upper_left', 'lower_right', got 'left'",
                ),
                (
                    lambda: patterns.causal_aligned(-2, 4, "upper_left"),
                    ValueError,
                    "num_dst must be at least 0, got -2",
                ),
                (
                    lambda: patterns.causal_aligned(2, "4", "upper_left"),
                    TypeError,
                    "num_src must be an integer, got '4'",
                ),
                (lambda: patterns.encoder_decoder(-1, 4), ValueError, "source must be at least 0, got -1"),
                (
                    lambda: patterns.encoder_decoder(4, True),
                    TypeError,
                    "target must be an integer, got the bool True",
                ),
            ]
        )


class TestTorch:
    """``torch.nn.attention.bias`` has both alignments: with an identity as values, the output is the
    weights.
    """

    @pytest.mark.parametrize(
        ("align", "num_dst", "num_src"),
        [
            *(("upper_left", *sizes) for sizes in ((3, 5), (4, 4), (1, 6), (6, 4))),
            *(("lower_right", 3, n) for n in (3, 5, 8)),
        ],
    )
    def test_causal_bias(self, align, num_dst, num_src):
        """Its lower right has no deaf receivers: it warns that their rows would be NaN."""
        bias = {"upper_left": causal_upper_left, "lower_right": causal_lower_right}[align](num_dst, num_src)
        q, k, v = torch.zeros(1, 1, num_dst, 8), torch.zeros(1, 1, num_src, 8), torch.eye(num_src)[None, None]
        weights = scaled_dot_product_attention(q, k, v, attn_mask=bias)[0, 0]
        assert torch.equal(weights > 0, patterns.causal_aligned(num_dst, num_src, align).mask())

    @pytest.mark.parametrize(("num_dst", "num_src"), [(3, 5), (5, 3)])
    def test_is_causal_is_the_upper_left(self, num_dst, num_src):
        q, k, v = torch.zeros(1, 1, num_dst, 8), torch.zeros(1, 1, num_src, 8), torch.eye(num_src)[None, None]
        weights = scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
        assert torch.equal(weights > 0, patterns.causal_aligned(num_dst, num_src, "upper_left").mask())
