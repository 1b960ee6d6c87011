"""The trace of Hugging Face models: weights are eager's, and what edges carry adds up to the update."""

from __future__ import annotations

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs

import gnn_attention as ga

needs("transformers")
hf_models = needs("support.hf_models")
needs("gnn_attention.huggingface")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("pad", [None, "left"])
def test_weights_and_messages(name, pad, monkeypatch):
    """Padded rows too."""
    hf_models.keep_float64(monkeypatch)
    given = hf_models.inputs(name, pad)
    model = hf_models.built(name, "eager")
    with torch.no_grad():
        wanted = model(**given, output_attentions=True).attentions
        model.set_attn_implementation("gnn_attention")
        run = ga.trace.record(model, **given)
    assert len(run.layers) == len(wanted) == 2
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    for layer, weights in zip(run.layers, wanted, strict=True):
        found = layer.dense(layer.weights()).transpose(1, 2)
        assert_exact(found[real], weights.transpose(1, 2)[real])
        received = torch.zeros_like(layer.update)
        for pairs, carried in layer.each_carried(at_once=7):
            received.index_add_(1, pairs[1], carried.sum(2))
        bias = layer.heads.b_O
        assert_exact((received if bias is None else received + bias)[real], layer.update[real])


def test_other_attention_is_refused():
    """With what to call."""
    with pytest.raises(ValueError, match="set_attn_implementation"):
        ga.trace.record(hf_models.build("llama"), torch.tensor([[3, 4]]))


class Adapted(torch.nn.Module):
    """A linear map and what an adapter adds to it, as in peft."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        """Twice the map."""
        return self.base_layer(x) + self.base_layer(x)


def test_messages_through_an_adapter_are_unknown():
    """The map under it is not all of the projection."""
    model = hf_models.built("llama", "gnn_attention")
    for layer in model.model.layers:
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
    with torch.no_grad():
        layer = ga.trace.record(model, torch.tensor([[3, 4]])).layers[0]
    assert layer.weights().shape[1] == 3
    with pytest.raises(NotImplementedError, match="no plain linear map takes the result of its heads"):
        layer.carried([(0, 1)])
