"""Interventions on edges of Hugging Face models: against the dense formula, in generate(), in gradients."""

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
# token 0 has no in-edge but its own
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

    def __call__(self, module, q, k, v, mask, scaling=None, **others):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        dst = torch.arange(k.shape[2] - q.shape[2], k.shape[2]).view(1, 1, -1, 1) - self.left
        src = torch.arange(k.shape[2]).view(1, 1, 1, -1) - self.left
        allowed = (src <= dst) if mask is None else mask[..., : k.shape[2]] == 0
        allowed = allowed.expand(logits.shape)
        # of each edge, [B, H, dst, src, dim]
        values = v.unsqueeze(2)
        for intervention in self.interventions:
            chosen = self.chosen(intervention, module.layer_idx, q.shape[1], dst, src)
            if intervention.kind == "cut":
                allowed = allowed & ~chosen
            else:
                factor = {"mute": 0.0, "scale": FACTOR}[intervention.kind]
                values = torch.where(chosen.unsqueeze(-1), factor * values, values)
        logits = logits.masked_fill(~allowed, -torch.inf)
        if (sinks := others.get("s_aux")) is not None:
            logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        top = logits.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights = (logits - top).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        return (weights[..., : k.shape[2]].unsqueeze(-1) * values).sum(3).transpose(1, 2), None

    @staticmethod
    def chosen(intervention, layer, heads, dst, src):
        if intervention.layers is not None and layer not in intervention.layers:
            return torch.zeros((), dtype=torch.bool)
        edges = intervention.edges
        if isinstance(edges, ga.TokenGraph):
            there = edges.mask()[dst.clamp(min=0), src.clamp(min=0)] & (dst >= 0) & (src >= 0)
        elif edges is None:
            there = torch.ones((), dtype=torch.bool)
        else:
            there = torch.stack([(src == s) & (dst == d) for s, d in edges.T.tolist()]).any(0)
        mine = range(heads) if intervention.heads is None else intervention.heads
        return there & torch.tensor([head in mine for head in range(heads)]).view(1, -1, 1, 1)


@pytest.fixture
def use_formula():
    """Makes a formula the attention of a model."""
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
    """Outputs, and gradients of all parameters."""
    hf_models.keep_float64(monkeypatch)
    model, given = hf_models.built(name), hf_models.inputs(name, pad)
    mask, interventions = given.get("attention_mask"), INTERVENTIONS[key]
    use_formula(model, interventions, mask)
    wanted = hf_models.result(name, model, given).detach()
    wanted_gradients = hf_models.gradients(name, model, given)
    model.set_attn_implementation("gnn_attention")
    with trace.intervene(model, *interventions):
        assert_exact(hf_models.result(name, model, given).detach(), wanted)
        gradients = hf_models.gradients(name, model, given)
    assert_exact(list(gradients.values()), list(wanted_gradients.values()))


STEPS = [(key, cache) for key in ("cut", "several") for cache in hf_models.CACHES]
STEPS += [("scale again", "own")]


@pytest.mark.parametrize(("key", "cache"), STEPS)
def test_generate(key, cache, use_formula, monkeypatch):
    """Tokens and scores of each step, with padding: pairs of prompt and new tokens."""
    hf_models.keep_float64(monkeypatch)
    model, given = hf_models.built("llama"), hf_models.inputs("llama", "left")
    late = getattr(trace, key if key == "cut" else "mute")([(2, 14), (13, 14)], heads=1)
    interventions = [*INTERVENTIONS[key], late]
    use_formula(model, interventions, given["attention_mask"])
    tokens, scores = hf_models.generated(model, given, "formula")
    model.set_attn_implementation("gnn_attention")
    with trace.intervene(model, *interventions):
        found = hf_models.generated(model, given, **hf_models.CACHES[cache])
    assert torch.equal(found[0], tokens)
    assert_exact(found[1], scores)
    plain = hf_models.generated(model, given)[1]
    assert (plain - scores).abs().max() > 1e-3


def test_recomputed_layers(monkeypatch):
    """Gradient checkpointing mutes in the backward pass too."""
    hf_models.keep_float64(monkeypatch)
    model, given = hf_models.built("llama", "gnn_attention"), hf_models.inputs("llama")
    with trace.intervene(model, *INTERVENTIONS["several"]):
        wanted = hf_models.gradients("llama", model, given)
        model.train().activation_checkpointing_enable()
        found = hf_models.gradients("llama", model, given)
    assert_exact(list(found.values()), list(wanted.values()))


def test_record_runs_on_the_outer_backend():
    """Muted calls too."""
    calls = []

    def run(call):
        calls.append(call)
        return BACKENDS["reference"].run(call)

    model, tokens = hf_models.built("llama", "gnn_attention"), torch.tensor([[3, 4, 5]])
    with torch.no_grad(), huggingface.attending(Backend("mine", run)):
        trace.record(model, tokens)
        assert len(calls) == 2
        run = trace.record(model, tokens, interventions=trace.mute((0, 1), layers=1))
    assert len(calls) == 2 + 1 + 2
    assert run.layers[1].norms((0, 1)).max() == 0 < run.layers[0].norms((0, 1)).min()


def test_a_pair_beyond_every_call_of_a_block_warns():
    """Not one that a growing sequence reaches: of 3 tokens and 5 more, receivers are 0 .. 6."""
    model, tokens = hf_models.built("llama", "gnn_attention"), torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with trace.intervene(model, trace.cut([(0, 4), (5, 6)])):
        model.generate(tokens, **options)
    with (
        pytest.warns(UserWarning, match=r"5 -> 8 lay in no call .* to cut"),
        trace.intervene(model, trace.cut([(0, 4), (5, 8)])),
    ):
        model.generate(tokens, **options)


def test_a_block_in_which_nothing_ran_is_named():
    """By the function that was used."""
    model = hf_models.built("llama", "gnn_attention")
    with (
        pytest.warns(UserWarning, match="in this trace.intervene context"),
        trace.intervene(model, trace.cut()),
    ):
        pass


def test_refusals():
    """Before anything runs where that is known, else in the call."""
    model, tokens = hf_models.built("llama", "gnn_attention"), torch.tensor([[3, 4, 5]])
    with (
        pytest.raises(IndexError, match=r"layers must be among \[0, 1\]"),
        trace.intervene(model, trace.cut(layers=2)),
    ):
        pass
    with pytest.raises(IndexError, match=r"heads must be in 0 \.\. 3"):
        trace.record(model, tokens, interventions=trace.mute(heads=4))
    with pytest.raises(ValueError, match="2 -> 1 is no edge"):
        trace.record(model, tokens, interventions=trace.cut([(0, 1), (2, 1)]))
    with pytest.raises(ValueError, match="too short"):
        trace.record(model, tokens, interventions=trace.cut(ga.patterns.causal(2)))
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="set_attn_implementation"), trace.intervene(model, trace.cut()):
        pass
