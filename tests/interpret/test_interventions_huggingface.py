"""Interventions on Hugging Face models equal a dense formula, in generate() and gradients too."""

from __future__ import annotations

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs

import gnn_attention as ga
from gnn_attention.backends import BACKENDS, Backend

transformers = needs("transformers")
hf_models = needs("support.hf_models")
huggingface = needs("gnn_attention.huggingface")

trace = ga.trace
PAIRS = [(0, 3), (1, 3), (2, 3), (2, 4), (1, 1)]
FACTOR = -2.5
# Token 0 has no other in-edge than its self loop.
ALONE = [(0, 0), (1, 4)]
INTERVENTIONS = {
    "cut": [trace.cut(PAIRS, layers=1, heads=[0, 2])],
    "mute": [trace.mute(PAIRS, layers=1, heads=[0, 2])],
    "mute all heads": [trace.mute(ALONE)],
    "head": [trace.mute(heads=3), trace.cut(ALONE, heads=1)],
    "several": [trace.mute(PAIRS, heads=[0, 1]), trace.cut((3, 4)), trace.mute((0, 2), layers=0)],
    "graph": [
        trace.mute(ga.patterns.window(64, 3), heads=1),
        trace.cut(ga.patterns.dilated(64, 2, 2), heads=0),
    ],
    "scale": [trace.mute(PAIRS, layers=1, heads=[0, 2], factor=FACTOR)],
    "scale again": [
        trace.mute(PAIRS, heads=[0, 1], factor=FACTOR),
        trace.mute(factor=FACTOR),
        trace.mute((0, 2)),
    ],
}


class Formula:
    """Dense attention with interventions, as an attention function of transformers."""

    def __init__(self, interventions, mask=None):
        self.interventions, self.left = interventions, 0
        if mask is not None:
            self.left = mask.int().argmax(1).view(-1, 1, 1, 1)

    def __call__(self, module, q, k, v, mask, scaling=None, **options):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        dst = torch.arange(k.shape[2] - q.shape[2], k.shape[2]).view(1, 1, -1, 1) - self.left
        src = torch.arange(k.shape[2]).view(1, 1, 1, -1) - self.left
        allowed = (src <= dst) if mask is None else mask[..., : k.shape[2]] == 0
        allowed = allowed.expand(logits.shape)
        values = v.unsqueeze(2)  # [B, H, dst, src, dim] by edge
        for intervention in self.interventions:
            is_chosen = self.select_cells(intervention, module.layer_idx, q.shape[1], dst, src)
            if intervention.kind == "cut":
                allowed = allowed & ~is_chosen
            else:
                factor = {"mute": 0.0, "scale": FACTOR}[intervention.kind]
                values = torch.where(is_chosen.unsqueeze(-1), factor * values, values)
        logits = logits.masked_fill(~allowed, -torch.inf)
        if (sinks := options.get("s_aux")) is not None:
            logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        largest = logits.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights = (logits - largest).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        return (weights[..., : k.shape[2]].unsqueeze(-1) * values).sum(3).transpose(1, 2), None

    @staticmethod
    def select_cells(intervention, layer, heads, dst, src):
        if intervention.layers is not None and layer not in intervention.layers:
            return torch.zeros((), dtype=torch.bool)
        edges = intervention.edges
        if isinstance(edges, ga.TokenGraph):
            is_selected = edges.mask()[dst.clamp(min=0), src.clamp(min=0)] & (dst >= 0) & (src >= 0)
        elif edges is None:
            is_selected = torch.ones((), dtype=torch.bool)
        else:
            is_selected = torch.stack([(src == s) & (dst == d) for s, d in edges.T.tolist()]).any(0)
        selected_heads = range(heads) if intervention.heads is None else intervention.heads
        return is_selected & torch.tensor([head in selected_heads for head in range(heads)]).view(1, -1, 1, 1)


@pytest.fixture
def use_formula():
    """Make a formula the attention of a model."""
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionMaskInterface.register("formula", masks["eager"])

    def use(model, interventions, mask=None):
        transformers.AttentionInterface.register("formula", Formula(interventions, mask))
        model.set_attn_implementation("formula")

    return use


CASES = [("llama", "left", key) for key in INTERVENTIONS]
CASES += [("gpt2", "left", "several"), ("gpt_oss", None, "mute all heads"), ("llama", "right", "mute")]
CASES += [("gpt2", None, "scale again"), ("gpt_oss", "left", "scale")]


@pytest.mark.parametrize(("name", "pad", "key"), CASES)
def test_formula(name, pad, key, use_formula, monkeypatch):
    """Outputs and gradients of all parameters equal the formula's."""
    hf_models.keep_float64(monkeypatch)
    model, inputs = hf_models.build64(name), hf_models.inputs(name, pad)
    mask, interventions = inputs.get("attention_mask"), INTERVENTIONS[key]
    use_formula(model, interventions, mask)
    expected = hf_models.result(name, model, inputs).detach()
    expected_gradients = hf_models.gradients(name, model, inputs)
    model.set_attn_implementation("gnn_attention")
    with trace.intervene(model, *interventions):
        assert_exact(hf_models.result(name, model, inputs).detach(), expected)
        gradients = hf_models.gradients(name, model, inputs)
    assert_exact(list(gradients.values()), list(expected_gradients.values()))


STEPS = [(key, cache) for key in ("cut", "several") for cache in hf_models.CACHES]
STEPS += [("scale again", "own")]


@pytest.mark.parametrize(("key", "cache"), STEPS)
def test_generate(key, cache, use_formula, monkeypatch):
    """Interventions on prompt and new tokens change each step as in the formula, with padding."""
    hf_models.keep_float64(monkeypatch)
    model, inputs = hf_models.build64("llama"), hf_models.inputs("llama", "left")
    late_intervention = getattr(trace, key if key == "cut" else "mute")([(2, 14), (13, 14)], heads=1)
    interventions = [*INTERVENTIONS[key], late_intervention]
    use_formula(model, interventions, inputs["attention_mask"])
    tokens, scores = hf_models.generate(model, inputs, "formula")
    model.set_attn_implementation("gnn_attention")
    with trace.intervene(model, *interventions):
        result = hf_models.generate(model, inputs, **hf_models.CACHES[cache])
    assert torch.equal(result[0], tokens)
    assert_exact(result[1], scores)
    unchanged_scores = hf_models.generate(model, inputs)[1]
    assert (unchanged_scores - scores).abs().max() > 1e-3


def test_recomputed_layers(monkeypatch):
    """With gradient checkpointing, interventions hold in the backward pass too."""
    hf_models.keep_float64(monkeypatch)
    model, inputs = hf_models.build64("llama", "gnn_attention"), hf_models.inputs("llama")
    with trace.intervene(model, *INTERVENTIONS["several"]):
        expected = hf_models.gradients("llama", model, inputs)
        model.train().activation_checkpointing_enable()
        result = hf_models.gradients("llama", model, inputs)
    assert_exact(list(result.values()), list(expected.values()))


def test_record_runs_on_the_outer_backend():
    """Recorded calls run on the outer backend, muted calls too."""
    calls = []

    def run(call):
        calls.append(call)
        return BACKENDS["reference"].run(call)

    model, tokens = hf_models.build64("llama", "gnn_attention"), torch.tensor([[3, 4, 5]])
    with torch.no_grad(), huggingface.attending(Backend("mine", run)):
        trace.record(model, tokens)
        assert len(calls) == 2
        run = trace.record(model, tokens, interventions=trace.mute((0, 1), layers=1))
    assert len(calls) == 2 + 1 + 2
    assert run.layers[1].norms((0, 1)).max() == 0 < run.layers[0].norms((0, 1)).min()


def test_a_pair_outside_every_call_warns():
    """A growing sequence reaches some pairs later: with 3 tokens and 5 more, receivers are 0 .. 6."""
    model, tokens = hf_models.build64("llama", "gnn_attention"), torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with trace.intervene(model, trace.cut([(0, 4), (5, 6)])):
        model.generate(tokens, **options)
    with (
        pytest.warns(UserWarning, match=r"5 -> 8 lay in no call .* to cut"),
        trace.intervene(model, trace.cut([(0, 4), (5, 8)])),
    ):
        model.generate(tokens, **options)


def test_a_context_in_which_nothing_ran_warns():
    """The warning names the function that made the context."""
    model = hf_models.build64("llama", "gnn_attention")
    with (
        pytest.warns(UserWarning, match="in this trace.intervene context"),
        trace.intervene(model, trace.cut()),
    ):
        pass


def test_refusals():
    """Errors are raised before anything runs if possible, else in the call."""
    model, tokens = hf_models.build64("llama", "gnn_attention"), torch.tensor([[3, 4, 5]])
    with (
        pytest.raises(IndexError, match=r"layers must be among \[0, 1\]"),
        trace.intervene(model, trace.cut(layers=2)),
    ):
        pass
    with pytest.raises(IndexError, match=r"heads must be in 0 \.\. 3"):
        trace.record(model, tokens, interventions=trace.mute(heads=4))
    with pytest.raises(ValueError, match="2 -> 1 is not an edge"):
        trace.record(model, tokens, interventions=trace.cut([(0, 1), (2, 1)]))
    with pytest.raises(ValueError, match="too short"):
        trace.record(model, tokens, interventions=trace.cut(ga.patterns.causal(2)))
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="set_attn_implementation"), trace.intervene(model, trace.cut()):
        pass
