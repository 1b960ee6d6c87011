"""Interventions on edges of Hugging Face models: against the dense formula, in generate(), in gradients."""

from __future__ import annotations

import re
import warnings

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
SURGERIES = {
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
# of a run: each is given it
PATCHES = {
    "patch": lambda run: [trace.patch(run, PAIRS, layers=1, heads=[1, 2])],
    "patch all": lambda run: [trace.patch(run)],
    "patch several": lambda run: [
        trace.mute(heads=1, factor=FACTOR),
        trace.patch(run, ga.patterns.window(64, 3), heads=[0, 1]),
        trace.mute((2, 4), factor=FACTOR),
        trace.cut((1, 3)),
    ],
}


class Formula:
    """Dense attention with surgeries, as an attention function of transformers; with weights and values.

    ``source``: the formula of another run, whose values are patched in.
    """

    def __init__(self, surgeries, mask=None, source=None):
        self.surgeries, self.weights, self.values, self.left = surgeries, [], [], 0
        self.source = source
        if mask is not None:
            self.left = mask.int().argmax(1).view(-1, 1, 1, 1)

    def __call__(self, module, q, k, v, mask, scaling=None, **others):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        dst = torch.arange(k.shape[2] - q.shape[2], k.shape[2]).view(1, 1, -1, 1) - self.left
        src = torch.arange(k.shape[2]).view(1, 1, 1, -1) - self.left
        allowed = (src <= dst) if mask is None else mask[..., : k.shape[2]] == 0
        allowed = allowed.expand(logits.shape)
        self.values.append(v)
        # of each edge, [B, H, dst, src, dim]
        values = v.unsqueeze(2)
        for surgery in self.surgeries:
            chosen = self.chosen(surgery, module.layer_idx, q.shape[1], dst, src)
            if surgery.kind == "cut":
                allowed = allowed & ~chosen
            else:
                other = self.other(surgery.kind, module.layer_idx, values, src)
                values = torch.where(chosen.unsqueeze(-1), other, values)
        logits = logits.masked_fill(~allowed, -torch.inf)
        if (sinks := others.get("s_aux")) is not None:
            logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        top = logits.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights = (logits - top).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        self.weights.append(weights[..., : k.shape[2]])
        return (self.weights[-1].unsqueeze(-1) * values).sum(3).transpose(1, 2), None

    def other(self, kind, layer, values, src):
        """What the edges of an intervention carry, ``values`` without it."""
        if kind != "patch":
            return values * {"mute": 0.0, "scale": FACTOR}[kind]
        given, other = (
            self.source.values[layer],
            values.expand(max(map(len, (values, src))), -1, -1, -1, -1).clone(),
        )
        left = torch.as_tensor(self.source.left).flatten().tolist()
        for sample, row in enumerate(src.expand(len(other), -1, -1, -1).flatten(1).tolist()):
            which = sample % len(given)
            for slot, position in enumerate(row):
                theirs = position + left[which % len(left)]
                if position >= 0 and theirs < given.shape[2]:
                    other[sample, :, :, slot] = given[which, :, theirs].unsqueeze(1)
        return other

    @staticmethod
    def chosen(surgery, layer, heads, dst, src):
        if surgery.layers is not None and layer not in surgery.layers:
            return torch.zeros((), dtype=torch.bool)
        edges = surgery.edges
        if isinstance(edges, ga.TokenGraph):
            there = edges.mask()[dst.clamp(min=0), src.clamp(min=0)] & (dst >= 0) & (src >= 0)
        elif edges is None:
            there = torch.ones((), dtype=torch.bool)
        else:
            there = torch.stack([(src == s) & (dst == d) for s, d in edges.T.tolist()]).any(0)
        mine = range(heads) if surgery.heads is None else surgery.heads
        return there & torch.tensor([head in mine for head in range(heads)]).view(1, -1, 1, 1)


@pytest.fixture
def use_formula():
    """Makes a formula the attention of a model."""
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionMaskInterface.register("formula", masks["eager"])

    def use(model, surgeries, mask=None, source=None):
        formula = Formula(surgeries, mask, source)
        transformers.AttentionInterface.register("formula", formula)
        model.set_attn_implementation("formula")
        return formula

    return use


CASES = [("llama", "left", key) for key in SURGERIES]
CASES += [("gpt2", None, "mute"), ("gpt2", "left", "several"), ("gpt_oss", "left", "several")]
CASES += [("gpt_oss", None, "mute all heads"), ("llama", None, "graph"), ("llama", "right", "mute")]
CASES += [("gpt2", None, "scale again"), ("gpt_oss", "left", "scale"), ("gpt_oss", "left", "patch several")]
CASES += [("llama", "left", key) for key in PATCHES] + [
    ("gpt2", None, "patch all"),
    ("llama", None, "patch"),
]


def other_run(name, model, samples, use_formula):
    """A run of other tokens, shorter: of one sample, or of as many, padded in other places; its formula."""
    given = {key: value[:samples, :8] for key, value in hf_models.inputs(name, "left").items()}
    given["input_ids"] = (given["input_ids"] + 7) % hf_models.VOCABULARY
    if samples == 1:
        given.pop("attention_mask", None)
    model.set_attn_implementation("gnn_attention")
    with torch.no_grad():
        run = trace.record(model, **given)
        formula = use_formula(model, (), given.get("attention_mask"))
        model(**given)
    return run, formula


@pytest.mark.parametrize(("name", "pad", "key"), CASES)
def test_formula(name, pad, key, use_formula, monkeypatch):
    """Outputs, gradients of all parameters, and the recorded weights, which a changed message leaves."""
    hf_models.keep_float64(monkeypatch)
    model, given = hf_models.built(name), hf_models.inputs(name, pad)
    mask, surgeries, source = given.get("attention_mask"), SURGERIES.get(key), None
    if surgeries is None:
        run, source = other_run(name, model, 1 if key == "patch" else hf_models.BATCH, use_formula)
        surgeries = PATCHES[key](run)
    formula = use_formula(model, surgeries, mask, source)
    wanted = hf_models.result(name, model, given).detach()
    weights = [x.detach() for x in formula.weights]
    wanted_gradients = hf_models.gradients(name, model, given)
    model.set_attn_implementation("gnn_attention")
    with trace.operate(model, *surgeries):
        assert_exact(hf_models.result(name, model, given).detach(), wanted)
        gradients = hf_models.gradients(name, model, given)
    assert_exact(list(gradients.values()), list(wanted_gradients.values()))
    with torch.no_grad():
        run = trace.record(model, **given, surgery=surgeries)
    slots = torch.ones_like(given["input_ids"]).bool() if mask is None else mask.bool()
    # a record begins with the first token of each sample, the slots of the model with its padding
    real = torch.arange(slots.shape[1]) < slots.sum(1, keepdim=True) if pad == "left" else slots
    for layer, true in zip(run.layers, weights, strict=True):
        found = layer.dense(layer.weights())
        for sample, (own, slot) in enumerate(zip(real, slots, strict=True)):
            assert_exact(found[sample][:, own][..., own], true[sample][:, slot][..., slot])
            assert not found[sample][:, own][..., ~own].any()
        received = torch.zeros_like(layer.update)
        for pairs in layer.edge_index.split(50, 1):
            received.index_add_(1, pairs[1], layer.carried(pairs).sum(2))
        bias = 0.0 if layer.heads.b_O is None else layer.heads.b_O
        assert_exact((received + bias)[real], layer.update[real])


STEPS = [(key, cache) for key in ("cut", "several") for cache in hf_models.CACHES]
STEPS += [("scale again", "own"), ("patch several", "static")]


@pytest.mark.parametrize(("key", "cache"), STEPS)
def test_generate(key, cache, use_formula, monkeypatch):
    """Tokens and scores of each step, with padding: pairs of prompt and new tokens."""
    hf_models.keep_float64(monkeypatch)
    model, given = hf_models.built("llama"), hf_models.inputs("llama", "left")
    surgeries, source = SURGERIES.get(key), None
    if surgeries is None:
        run, source = other_run("llama", model, hf_models.BATCH, use_formula)
        surgeries = [*PATCHES[key](run), trace.patch(run, [(1, 14), (2, 13)])]
    late = getattr(trace, key if key == "cut" else "mute")([(2, 14), (13, 14)], heads=1)
    surgeries = [*surgeries, late]
    use_formula(model, surgeries, given["attention_mask"], source)
    tokens, scores = hf_models.generated(model, given, "formula")
    model.set_attn_implementation("gnn_attention")
    with trace.operate(model, *surgeries):
        found = hf_models.generated(model, given, **hf_models.CACHES[cache])
    assert torch.equal(found[0], tokens)
    assert_exact(found[1], scores)
    plain = hf_models.generated(model, given)[1]
    assert (plain - scores).abs().max() > 1e-3


def test_recomputed_layers(monkeypatch):
    """Gradient checkpointing mutes in the backward pass too."""
    hf_models.keep_float64(monkeypatch)
    model, given = hf_models.built("llama", "gnn_attention"), hf_models.inputs("llama")
    with trace.operate(model, *SURGERIES["several"]):
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
        run = trace.record(model, tokens, surgery=trace.mute((0, 1), layers=1))
    assert len(calls) == 2 + 1 + 2
    assert run.layers[1].norms((0, 1)).max() == 0 < run.layers[0].norms((0, 1)).min()


BEYOND = [
    (
        lambda model, ids: trace.record(model, ids, surgery=trace.mute([(0, 1), (0, 9)])),
        "0 -> 9 lay in no call",
    ),
    (lambda model, ids: generate(model, ids, trace.cut([(0, 4), (5, 8)])), "5 -> 8 lay in no call .* to cut"),
    (lambda model, ids: generate(model, ids, trace.cut([(0, 4), (5, 6)])), None),
]


def generate(model, ids, surgery):
    """Of 3 tokens and 5 more the last one is not attended from: receivers are 0 .. 6."""
    with trace.operate(model, surgery):
        model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)


@pytest.mark.parametrize(("run", "match"), BEYOND)
def test_a_pair_beyond_every_call_of_a_block_warns(run, match):
    """Not one that a growing sequence reaches."""
    model, tokens = hf_models.built("llama", "gnn_attention"), torch.tensor([[3, 4, 5]])
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        run(model, tokens)
    texts = [str(one.message) for one in caught if "trace.operate block" in str(one.message)]
    assert len(texts) == (match is not None)
    assert match is None or re.search(match, texts[0])


def test_a_block_in_which_nothing_ran_is_named():
    """By the function that was used."""
    model = hf_models.built("llama", "gnn_attention")
    with pytest.warns(UserWarning, match="in this trace.operate block"), trace.operate(model, trace.cut()):
        pass


def test_refusals():
    """Before anything runs where that is known, else in the call."""
    model, tokens = hf_models.built("llama", "gnn_attention"), torch.tensor([[3, 4, 5]])
    with (
        pytest.raises(IndexError, match=r"layers must be among \[0, 1\]"),
        trace.operate(model, trace.cut(layers=2)),
    ):
        pass
    with pytest.raises(TypeError, match="made by cut"), trace.operate(model, (0, 1)):
        pass
    with pytest.raises(IndexError, match=r"heads must be in 0 \.\. 3"):
        trace.record(model, tokens, surgery=trace.mute(heads=4))
    with pytest.raises(ValueError, match="2 -> 1 is no edge"):
        trace.record(model, tokens, surgery=trace.cut([(0, 1), (2, 1)]))
    with pytest.raises(ValueError, match="too short"):
        trace.record(model, tokens, surgery=trace.cut(ga.patterns.causal(2)))
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="set_attn_implementation"), trace.operate(model, trace.cut()):
        pass
