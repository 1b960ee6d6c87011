"""Local attention on a line: its kin, its refusals, and the same graphs elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.extras import needs
from support.refusals import assert_refusals

from gnn_attention import TokenGraph, patterns


def heard(layer, n, width=8):
    """bool [dst, src]: whose input moves whose output, by the derivatives of a layer that maps [1, n, width]
    to its like.
    """
    torch.manual_seed(0)
    jacobian = torch.autograd.functional.jacobian(layer, torch.randn(1, n, width, dtype=torch.float64))
    return jacobian[0, :, :, 0].abs().sum((1, 3)) > 0


class TestKin:
    @pytest.mark.parametrize("w", [1, 3, 40])
    def test_bands_are_windows(self, w):
        assert patterns.band(17, w - 1, 0) == patterns.window(17, w)
        assert patterns.band(17, w - 1, w - 1) == patterns.window(17, w, causal=False)
        assert patterns.band(17, 0, w) == patterns.band(17, w, 0).T

    @pytest.mark.parametrize(("distance", "dilation"), [(6, 3), (7, 3), (0, 2), (5, 1)])
    def test_a_dilation_by_distance_is_one_by_number(self, distance, dilation):
        w = distance // dilation + 1
        assert patterns.band(17, distance, distance, dilation) == patterns.dilated(
            17, w, dilation, causal=False
        )
        assert patterns.band(17, distance, 0, dilation) == patterns.dilated(17, w, dilation)

    def test_a_band_beyond_the_ends_is_full(self):
        assert patterns.band(7, 7, 7) == patterns.full(7)
        assert patterns.band(7, 7, 0) == patterns.causal(7)

    def test_chunks_are_documents_of_one_length(self):
        assert patterns.chunked(11, 4) == patterns.documents([4, 4, 3])
        assert patterns.chunked(11, 4, causal=False) == patterns.documents([4, 4, 3], causal=False)

    def test_chunks_of_one_token_are_bands(self):
        assert patterns.chunked(9, 1, before=2) == patterns.window(9, 3)
        assert patterns.chunked(9, 1, before=2, after=1, causal=False) == patterns.band(9, 2, 1)

    def test_chunks_ahead_add_nothing_to_a_causal_graph(self):
        assert patterns.chunked(11, 4, before=1, after=2) == patterns.chunked(11, 4, before=1)

    def test_a_ring_differs_at_its_seam_alone(self):
        """The first chunk attends to the last one."""
        line, ring = (patterns.chunked(12, 4, before=1, causal=False, wrap=wrap) for wrap in (False, True))
        dst, src = (ring ^ line).edge_index.flip(0)
        assert set(dst.tolist()) == {0, 1, 2, 3}
        assert set(src.tolist()) == {8, 9, 10, 11}
        assert line - ring == patterns.window(12, 0)

    def test_a_ring_of_few_chunks_is_full(self):
        assert patterns.chunked(8, 4, before=1, causal=False, wrap=True) == patterns.full(8)
        assert patterns.chunked(0, 4, before=1, causal=False, wrap=True).num_edges == 0

    def test_segments_between_chunks_and_windows(self):
        """Without memory they are chunks, with whole segments as memory chunks beside chunks, of one token
        windows.
        """
        assert patterns.segment_recurrence(11, 4, 0) == patterns.chunked(11, 4)
        assert patterns.segment_recurrence(11, 4, 8) == patterns.chunked(11, 4, before=2)
        assert patterns.segment_recurrence(11, 1, 3) == patterns.window(11, 4)
        assert patterns.segment_recurrence(11, 11, 0) == patterns.causal(11)

    def test_a_memory_counts_from_the_segment_not_from_the_token(self):
        """The window of the same reach is larger at a segment's start and never smaller."""
        graph, window = patterns.segment_recurrence(12, 4, 3), patterns.window(12, 7)
        assert graph - window == patterns.window(12, 0)
        assert (window - graph).num_edges > 0


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: patterns.band(4, -1, 0), ValueError, "left must be at least 0, got -1"),
                (lambda: patterns.band(4, 0, -1), ValueError, "right must be at least 0, got -1"),
                (lambda: patterns.band(4, None, 0), TypeError, "left must be an integer, got None"),
                (lambda: patterns.band(4, 1, 1, 0), ValueError, "dilation must be at least 1, got 0"),
                (lambda: patterns.band(-4, 1, 1), ValueError, "must be at least 0, got -4"),
                (lambda: patterns.chunked(4, 0), ValueError, "chunk must be at least 1, got 0"),
                (lambda: patterns.chunked(-4, 2), ValueError, "n must be at least 0, got -4"),
                (lambda: patterns.chunked(4, 2, before=-1), ValueError, "before must be at least 0, got -1"),
                (lambda: patterns.chunked(4, 2, after=1.0), TypeError, "after must be an integer, got 1.0"),
                (
                    lambda: patterns.chunked(4, 2, before=True),
                    TypeError,
                    "before must be an integer, got the bool True",
                ),
                (
                    lambda: patterns.segment_recurrence(4, 0, 2),
                    ValueError,
                    "segment must be at least 1, got 0",
                ),
                (
                    lambda: patterns.segment_recurrence(4, 2, -2),
                    ValueError,
                    "memory must be at least 0, got -2",
                ),
            ]
        )


class TestAttentionGym:
    @pytest.mark.parametrize("w", [0, 1, 5])
    def test_sliding_window(self, w):
        masks = needs("attn_gym.masks")
        assert TokenGraph.from_rule(masks.generate_sliding_window(w), 17) == patterns.band(17, w, 0)

    @pytest.mark.parametrize(("w", "dilation"), [(4, 2), (5, 2), (3, 1), (2, 3)])
    def test_dilated_sliding_window(self, w, dilation):
        masks = needs("attn_gym.masks")
        theirs = masks.generate_dilated_sliding_window(w, dilation)
        assert TokenGraph.from_rule(theirs, 17) == patterns.band(17, w, w, dilation)


class TestHuggingFace:
    @pytest.mark.parametrize("size", [1, 4, 17])
    def test_chunked_attention(self, size):
        masking = needs("transformers.masking_utils")
        causal = masking.chunked_causal_mask_function(size, torch.tensor([0]))
        assert TokenGraph.from_rule(causal, 17) == patterns.chunked(17, size)
        overlay = masking.chunked_overlay(size, torch.tensor([0]))
        assert TokenGraph.from_rule(overlay, 17) == patterns.chunked(17, size, causal=False)

    @pytest.mark.parametrize("w", [1, 3])
    def test_sliding_windows(self, w):
        masking = needs("transformers.masking_utils")
        causal = masking.sliding_window_causal_mask_function(w)
        assert TokenGraph.from_rule(causal, 17) == patterns.band(17, w - 1, 0)
        both = masking.sliding_window_bidirectional_mask_function(w)
        assert TokenGraph.from_rule(both, 17) == patterns.band(17, w, w)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(
        ("n", "before", "after"), [(12, 1, 0), (12, 1, 1), (15, 2, 0), (12, 0, 0), (3, 1, 0)]
    )
    def test_local_attention_of_reformer(self, causal, n, before, after):
        """Its chunks stand in a ring: whose input moves whose output, by the layer's own derivatives."""
        transformers = needs("transformers")
        config = transformers.ReformerConfig(
            hidden_size=8,
            num_attention_heads=1,
            attention_head_size=8,
            local_attn_chunk_length=3,
            local_num_chunks_before=before,
            local_num_chunks_after=after,
            is_decoder=causal,
        )
        reformer = needs("transformers.models.reformer.modeling_reformer")
        layer = reformer.LocalSelfAttention(config).double().eval()
        expected = patterns.chunked(n, 3, before=before, after=after, causal=causal, wrap=True)
        assert torch.equal(heard(lambda x: layer(x).hidden_states, n), expected.mask())

    @pytest.mark.parametrize("w", [4, 6])
    def test_window_of_longformer(self, w):
        transformers = needs("transformers")
        config = transformers.LongformerConfig(hidden_size=8, num_attention_heads=1, attention_window=[w])
        longformer = needs("transformers.models.longformer.modeling_longformer")
        layer = longformer.LongformerSelfAttention(config, layer_id=0).double().eval()
        n, none = 4 * w, torch.zeros(1, 4 * w)

        def run(x):
            return layer(x, attention_mask=none, is_index_masked=none > 0, is_index_global_attn=none > 0)[0]

        assert torch.equal(heard(run, n), patterns.band(n, w // 2, w // 2).mask())


class TestTransformerXL:
    @pytest.mark.parametrize(("segment", "memory"), [(4, 3), (4, 6), (5, 0)])
    def test_segment_by_segment(self, segment, memory):
        """Its mask of one segment over memory and segment: everything but what lies above the diagonal moved
        by the memory.
        """
        n = 20
        mask = torch.zeros(n, n, dtype=torch.bool)
        for start in range(0, n, segment):
            kept = min(memory, start)
            mask[start : start + segment, start - kept : start + segment] = (
                torch.ones(segment, kept + segment).tril(kept) > 0
            )
        assert torch.equal(patterns.segment_recurrence(n, segment, memory).mask(), mask)
