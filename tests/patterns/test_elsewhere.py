"""Masks of attention-gym, Hugging Face and torch are the graphs of our builders."""

from __future__ import annotations

import pytest
import torch
from support.extras import needs
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import noop_mask
from torch.nn.functional import scaled_dot_product_attention

from gnn_attention import TokenGraph, algebra, patterns

# Each line is a rule of attention-gym, whose windows count distances as flash-attention does, and our graph.
GYM = """
generate_sliding_window(5) -> window(17, 6)
generate_dilated_sliding_window(5, 2) -> band(17, 5, 5, 2)
generate_dilated_sliding_window(2, 3) -> band(17, 2, 2, 3)
global_sliding_window.generate_global_sliding_window(4, at(3, 9)) -> longformer(17, 5, [3, 9], causal=False)
global_sliding_window.generate_global_sliding_window(0, at()) -> longformer(17, 1, [], causal=False)
generate_prefix_lm_mask(4) -> prefix(17, 4)
generate_prefix_lm_mask(30) -> prefix(17, 30)
generate_doc_mask_mod(causal_mask, offsets(2, 5, 1)) -> documents([2, 5, 1])
generate_doc_mask_mod(noop_mask, offsets(2, 5, 1)) -> documents([2, 5, 1], causal=False)
generate_packed_causal_doc_mask_mod(offsets(3, 0, 2)) -> documents([3, 0, 2])
generate_shared_prefix_mask_mod(offsets(3, 2, 4, 1), torch.tensor([0] * 4)) -> shared_prefix(3, [2, 4, 1])
generate_shared_prefix_mask_mod(offsets(3, 2, 4), torch.tensor([0, 0, 2])) -> prefix_tree([3, 2, 4], ROOTS)
generate_jetspec_tree_causal_mask_mod(0, ancestors(FOREST)) -> tree(FOREST)
generate_jetspec_tree_causal_mask_mod(6, ancestors(FOREST)) -> tree_decoding(6, FOREST).rows(6, 13)
generate_jetspec_training_mask_mod(5, 4) -> draft_training(5, 3, 4).rows(5, 17)
generate_jetspec_training_mask_mod(0, 3) -> draft_training(0, 2, 3)
generate_block_diffusion_mask(12, 4) -> block_diffusion(12, 4)
generate_block_diffusion_mask(7, 3) -> block_diffusion(7, 3)
generate_natten(7, 7, 5, 3) -> natten((7, 7), (5, 3))
generate_natten(7, 7, 4, 4) -> natten((7, 7), 5)
generate_sta_mask_mod_2d((8, 6), (6, 2), (2, 2), 3) -> with_text(sliding_tile((8, 6), 2, (3, 1), True), 3)
generate_sta_mask_mod_2d((8, 8), (4, 8), (2, 4), 0) -> sliding_tile((8, 8), (2, 4), 2, tiled=True)
generate_sta_mask_mod_3d((4, 4, 6), (4, 2, 6), (2, 2, 2), 2) -> with_text(TILES, 2)
generate_spatial_head_mask_mod(2, 4, 5, 2, True, 4) -> with_prompt(svg_spatial(4, 5, 8) | FIRST, 2)
generate_temporal_head_mask_mod(2, 4, 10, 2) -> with_prompt(svg_temporal(4, 10, 5), 2)
"""

# ``sliding_window=w`` attends to w tokens, itself included, or to w tokens on each side if bidirectional.
HUGGING_FACE = """
causal_mask_function -> causal(17)
bidirectional_mask_function -> full(17)
sliding_window_causal_mask_function(3) -> window(17, 3)
sliding_window_bidirectional_mask_function(3) -> window(17, 4, causal=False)
and_masks(causal_mask_function, sliding_window_overlay(3)) -> window(17, 3)
chunked_causal_mask_function(4, torch.tensor([0])) -> chunked(17, 4)
chunked_overlay(5, torch.tensor([0])) -> chunked(17, 5, causal=False)
packed_sequence_mask_function(OWNER) -> documents([3, 1, 2], causal=False)
and_masks(causal_mask_function, packed_sequence_mask_function(OWNER)) -> documents([3, 1, 2])
or_masks(causal_mask_function, blockwise_overlay(GROUPS)) -> bidirectional_groups([0, 0, -1, 1, 1, 0, -1])
"""


def offsets(*sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def at(*tokens):
    return torch.tensor([token in tokens for token in range(17)])


FOREST = [-1, 0, 1, 1, 3, 3, 0]
NAMES = {
    "torch": torch,
    "with_text": lambda video, text: algebra.extend(video, text, "both", "full"),
    "with_prompt": lambda video, prompt: patterns.memory_tokens(video, prompt, causal=False),
    "TILES": patterns.sliding_tile((4, 4, 6), 2, (2, 1, 3), tiled=True),
    "FIRST": patterns.sinks(20, 5, causal=False),
    "noop_mask": noop_mask,
    "offsets": offsets,
    "at": at,
    "FOREST": FOREST,
    "ROOTS": [-1, 0, -1],
    "OWNER": torch.tensor([[0, 0, 0, 1, 2, 2]]),
    "GROUPS": torch.tensor([[0, 0, -1, 1, 1, 0, -1]]),
}


def check(table, masks, **names):
    for line in table.strip().splitlines():
        rule_text, graph_text = line.split(" -> ")
        rule = eval(rule_text, {**vars(masks), **NAMES, **names})
        graph = eval(graph_text, {**vars(patterns), **NAMES})
        expected = TokenGraph.from_rule(rule, graph.num_dst, graph.num_src)
        assert torch.equal(graph.mask(), expected.mask()), line


def test_attention_gym():
    masks = needs("attn_gym.masks")
    needs("attn_gym.masks.global_sliding_window")
    check(GYM, masks, ancestors=lambda forest: masks.build_tree_ancestor_matrix(forest, device="cpu"))


def test_hugging_face():
    check(HUGGING_FACE, needs("transformers.masking_utils"))


@pytest.mark.parametrize(("num_dst", "num_src"), [(3, 5), (4, 4), (1, 6), (6, 4)])
def test_torch_alignments(num_dst, num_src):
    """With an identity as values the output is the weights; torch's lower right has no isolated rows."""
    q, k, v = torch.zeros(1, 1, num_dst, 8), torch.zeros(1, 1, num_src, 8), torch.eye(num_src)[None, None]
    cases = [("upper_left", {"is_causal": True})]
    cases.append(("upper_left", {"attn_mask": causal_upper_left(num_dst, num_src)}))
    if num_dst <= num_src:
        cases.append(("lower_right", {"attn_mask": causal_lower_right(num_dst, num_src)}))
    for align, mask in cases:
        weights = scaled_dot_product_attention(q, k, v, **mask)[0, 0]
        assert torch.equal(weights > 0, patterns.causal_aligned(num_dst, num_src, align).mask())


@pytest.mark.parametrize(("n", "before", "causal"), [(15, 2, True), (12, 1, True), (3, 1, False)])
def test_local_attention_of_reformer(n, before, causal):
    """The edges are the nonzero derivatives of the layer's outputs by its inputs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "attention_head_size": 8, "is_decoder": causal}
    chunks = {"local_num_chunks_before": before, "local_num_chunks_after": 0}
    config = needs("transformers").ReformerConfig(**sizes, **chunks, local_attn_chunk_length=3)
    reformer = needs("transformers.models.reformer.modeling_reformer")
    layer = reformer.LocalSelfAttention(config).double().eval()
    x = torch.randn(1, n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    derivatives = torch.autograd.functional.jacobian(lambda x: layer(x).hidden_states, x)[0, :, :, 0]
    expected = patterns.chunked(n, 3, before=before, causal=causal)
    assert torch.equal(derivatives.abs().sum((1, 3)) > 0, expected.mask())
