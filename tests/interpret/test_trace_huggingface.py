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


DEFAULT = ("llama", "gpt2", "bert", "gpt_oss", "gemma2")
# two attentions a layer, windows of an image, two models in one: what they return is by layer, window, model
OTHERWISE = {"diffllama", "swin", "clip"}
FAMILIES = [
    pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow)
    for name in hf_models.FAMILIES
    if name not in OTHERWISE
]


def in_order(outputs):
    """Eager's weights, in the order in which the layers are called."""
    if getattr(outputs, "decoder_attentions", None) is None:
        return list(outputs.attentions)
    decoder = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
    return [*outputs.encoder_attentions, *(weights for both in decoder for weights in both)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pad", [None, "left"])
def test_weights_and_messages(name, pad, monkeypatch):
    """Padded rows too."""
    pad = pad if hf_models.FAMILIES[name].inputs == "text" else None
    hf_models.keep_float64(monkeypatch)
    given = hf_models.inputs(name, pad)
    model = hf_models.built(name, "eager")
    with torch.no_grad():
        wanted = in_order(model(**given, output_attentions=True))
        model.set_attn_implementation("gnn_attention")
        run = ga.trace.record(model, **given)
    assert len(run.layers) == len(wanted) >= 2
    for layer, weights in zip(run.layers, wanted, strict=True):
        found = layer.dense(layer.weights()).transpose(1, 2)
        real = (given["attention_mask"] if pad else torch.ones(found.shape[:2])).bool()
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
