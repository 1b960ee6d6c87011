"""The mean weights of heads are those that eager attention returns."""

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs

import gnn_attention as ga
from examples.sinks import sinks
from gnn_attention import patterns

hf_models = needs("support.hf_models")
IDS = torch.arange(18).view(2, 9)


@pytest.mark.parametrize("graph", [patterns.causal(9), patterns.window(9, 3) | patterns.sinks(9, 1)])
@torch.no_grad()
def test_sinks_are_means_of_eager_weights(graph):
    """The means are over both samples and all receivers with an edge; the softmax of eager is float32."""
    llama = hf_models.build64("llama").model
    bias = torch.zeros(1, 1, 9, 9, dtype=torch.float64).masked_fill(~graph.mask(), -torch.inf)
    weights = torch.stack(llama(IDS, attention_mask=bias, output_attentions=True).attentions).double()
    llama.set_attn_implementation("gnn_attention")
    with ga.use_graph(llama, graph):
        means = sinks(llama, IDS)
    receivers = graph.mask().sum(0)
    # A weight, which is at most 1, is rounded to float32 four times.
    assert float((means.weight - weights.sum((1, 3)) / 2 / receivers).abs().max()) <= 4 * 2**-24
    uniform = graph.mask().double() / graph.mask().sum(1, keepdim=True)
    assert_exact(means.uniform, (uniform.sum(0) / receivers).expand(2, 4, 9))
    wanted = {
        (layer, head, token)
        for layer, head, token in torch.ones(2, 4, 9).nonzero().tolist()
        if means.weight[layer, head, token] > 1.2 * means.uniform[layer, head, token]
    }
    assert 0 < len(wanted) < 72
    assert {tuple(row) for row in means.over(1.2).tolist()} == wanted
