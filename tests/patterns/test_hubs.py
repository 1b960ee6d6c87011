"""Hubs and extra nodes combine with random blocks and lists, and transformers has the same Longformer."""

from __future__ import annotations

import pytest
import torch
from support.extras import needs

from gnn_attention import TokenGraph, patterns


@pytest.mark.parametrize(
    "build", [patterns.bigbird, lambda *args, **kw: patterns.bigbird_etc(*args, 1, **kw)]
)
def test_random_blocks(build):
    """Each head draws its own blocks from the seed, and one more random block only adds edges."""
    graph = build(48, 2, num_random=3, heads=4, seed=7)
    assert graph == build(48, 2, num_random=3, heads=4, seed=7)
    assert graph.select(0, 0) == build(48, 2, num_random=3, seed=7)
    assert graph.select(0, 0) != build(48, 2, num_random=3, seed=8)
    masks = [graph.select(0, head).mask() for head in range(4)]
    assert not any(torch.equal(masks[a], masks[b]) for a in range(4) for b in range(a))
    large_graph, small_graph = build(48, 2, num_random=4, seed=7), build(48, 2, num_random=3, seed=7)
    assert (small_graph - large_graph).num_edges == 0
    assert large_graph.num_edges > small_graph.num_edges


@pytest.mark.parametrize("window", [4, 8])
@pytest.mark.parametrize("tokens", [[], [0], [2, 11]])
def test_edges_of_longformer(window, tokens):
    """The edges are the nonzero derivatives of the outputs of the layer of transformers."""
    torch.manual_seed(0)
    longformer = needs("transformers.models.longformer.modeling_longformer")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "attention_window": [window]}
    config = needs("transformers").LongformerConfig(**sizes, attention_probs_dropout_prob=0.0)
    layer = longformer.LongformerSelfAttention(config, 0).eval()
    for word in ("query", "key", "value"):
        getattr(layer, f"{word}_global").load_state_dict(getattr(layer, word).state_dict())
    x, is_global = torch.randn(1, 24, 8).requires_grad_(), torch.zeros(1, 24, dtype=torch.bool)
    is_global[:, tokens] = True
    options = {"is_index_masked": is_global > 1, "is_index_global_attn": is_global}
    output = layer(x, is_global * 1e4, **options, is_global_attn=bool(tokens))
    gradients = [torch.autograd.grad(row.square().sum(), x, retain_graph=True)[0][0] for row in output[0][0]]
    mask = torch.stack([gradient.abs().sum(-1) > 0 for gradient in gradients])
    assert torch.equal(mask, patterns.longformer(24, window // 2 + 1, tokens, causal=False).mask())


def test_memory_of_listed_edges():
    ring = TokenGraph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, name="ring")
    graph = patterns.memory_tokens(ring, 1, causal=False)
    assert graph.edge_index[0].tolist() == [0, 1, 2, 3, 0, 3, 0, 1, 0, 2]
    assert graph.edge_index[1].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_memory_by_head_and_sample():
    def rule(b, h, dst, src):
        return (src == b) | (dst == h)

    graph = patterns.memory_tokens(TokenGraph.from_rule(rule, 3, heads=2, batch=3), 1, causal=False)
    assert (graph.heads, graph.batch) == (2, 3)
    assert graph.select(2, 1).in_degree().tolist() == [4, 2, 4, 2]
