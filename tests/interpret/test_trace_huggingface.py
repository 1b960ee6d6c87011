"""In Hugging Face models, traced weights are eager's, and what edges carry adds up to the update."""

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
# These return weights by layer, window or model, not by attention call.
OTHER_OUTPUTS = {"diffllama", "swin", "clip"}
FAMILIES = [
    pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow)
    for name in hf_models.FAMILIES
    if name not in OTHER_OUTPUTS
]


def sort_weights(outputs):
    """Return eager attention's weights in the order in which the layers are called."""
    if getattr(outputs, "decoder_attentions", None) is None:
        return list(outputs.attentions)
    decoder = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
    return [*outputs.encoder_attentions, *(weights for both in decoder for weights in both)]


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_messages(name, monkeypatch):
    """Weights and messages equal those of eager attention, for texts without padding."""
    hf_models.keep_float64(monkeypatch)
    inputs = hf_models.inputs(name)
    model = hf_models.build64(name, "eager")
    with torch.no_grad():
        expected = sort_weights(model(**inputs, output_attentions=True))
        model.set_attn_implementation("gnn_attention")
        run = ga.trace.record(model, **inputs)
    assert len(run.layers) == len(expected) >= 2
    for layer, weights in zip(run.layers, expected, strict=True):
        assert_exact(layer["attn.hook_pattern"], weights)
        received = torch.zeros_like(layer.update)
        for pairs in layer.edge_index.split(7, 1):
            received.index_add_(1, pairs[1], layer.carried(pairs).sum(2))
        bias = layer.heads.b_O
        assert_exact(received if bias is None else received + bias, layer.update)


INTERVENTIONS = {
    "none": lambda run: (),
    "mute": lambda run: ga.trace.mute((0, 2), heads=1),
    "scale and cut": lambda run: (
        ga.trace.mute([(1, 2), (0, 4)], factor=3.0),
        ga.trace.cut((1, 4), layers=1),
    ),
    "patch": lambda run: ga.trace.patch(run, [(0, 3), (2, 2)]),
}


PADDED = [("llama", "left", key) for key in INTERVENTIONS] + [("gemma2", "right", "scale and cut")]
PADDED += [("gpt2", "left", "mute"), ("gpt_oss", "left", "patch"), ("bert", "left", "none")]


@pytest.mark.parametrize(("name", "pad", "key"), PADDED)
def test_a_pair_is_the_same_in_a_padded_batch_and_alone(name, pad, key, monkeypatch):
    """Weights, logits, messages and updates of a text are the same in a batch and alone."""
    hf_models.keep_float64(monkeypatch)
    model, inputs = hf_models.build64(name, "gnn_attention"), hf_models.inputs(name, pad)
    pairs, is_token = [(0, 2), (1, 4), (0, 3), (2, 2)], inputs["attention_mask"].bool()
    inputs["position_ids"] = (is_token.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        source = ga.trace.record(model, inputs["input_ids"][:1, :4])
        intervention = INTERVENTIONS[key](source)
        edges = [pair for pair in pairs if key != "scale and cut" or pair != (1, 4)]
        batch = ga.trace.record(model, **inputs, interventions=intervention)
        selection = ga.trace.record(model, **inputs, interventions=intervention, edges=edges)
        for sample, row in enumerate(is_token):
            ids = inputs["input_ids"][sample : sample + 1, row]
            alone = ga.trace.record(model, ids, interventions=intervention)
            tokens = slice(0, int(row.sum()))
            for whole, part, text in zip(batch.layers, selection.layers, alone.layers, strict=True):
                for measure in ("weights", "logits", "carried", "norms", "overlap"):
                    expected = getattr(text, measure)(edges)[0]
                    assert_exact(getattr(whole, measure)(edges)[sample], expected)
                    assert_exact(getattr(part, measure)(edges)[sample], expected)
                assert_exact(whole.update[sample, tokens], text.update[0])
                weights = whole.dense(whole.weights())[sample, :, tokens, tokens]
                assert_exact(weights, text.dense(text.weights())[0])


@pytest.mark.parametrize("pad", ["left", "right"])
def test_a_pair_beyond_a_text_is_no_edge_of_it(pad):
    """A pair has weight 0 in shorter samples, and is refused if all samples are too short."""
    model, inputs = hf_models.build64("llama", "gnn_attention"), hf_models.inputs("llama", pad)
    with torch.no_grad():
        layer = ga.trace.record(model, **inputs).layers[0]
    is_edge = layer.weights([(6, 7)])[:, 0] != 0
    assert is_edge.all(1).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="7 -> 6 is not an edge"):
        layer.weights([(7, 6)])


class Adapted(torch.nn.Module):
    """A linear map with an adapter that adds to its output, as in peft."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x):
        """Return the sum of the map and of a map of rank 2."""
        return self.lora_B(self.lora_A(x)) + self.base_layer(x)


def test_messages_through_an_adapter_are_unknown():
    """The linear map below an adapter is only a part of the projection."""
    model = hf_models.build64("llama", "gnn_attention")
    for layer in model.model.layers:
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj).to(model.dtype)
    with torch.no_grad():
        layer = ga.trace.record(model, torch.tensor([[3, 4]])).layers[0]
    assert layer.weights().shape[1] == 3
    with pytest.raises(NotImplementedError, match="no linear map follows its heads"):
        layer.carried([(0, 1)])
