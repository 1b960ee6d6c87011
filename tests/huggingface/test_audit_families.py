"""The audit over all families of ``hf_models``: this library's attention, and what transformers' own does."""

# ruff: noqa: E402
from __future__ import annotations

import pytest
from support.extras import needs

transformers = needs("transformers")

from support import hf_audits
from support.hf_audits import ANSWER, PAD, audited, subjects
from support.hf_models import FAMILIES, TOKENS, build

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.interpret.audit import audit
from gnn_attention.verify.measure import EXACT

pytestmark = pytest.mark.slow


def on_graphs(name):
    model = build(name)
    model.set_attn_implementation("gnn_attention")
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_follows_its_graphs(name):
    """Each layer, padding, decoding, encoder to decoder: exactly the promised edges, not even for a NaN."""
    for what, subject in subjects(name).items():
        # swin's own mask of its shifted windows is finite: a weight of e^-100 is left
        options = {"tolerance": EXACT} if (name, what) == ("swin", "stage 0 layer 1") else {}
        verdict = audited(name, subject, **options)
        assert verdict.exact, (what, verdict)
        assert options or not verdict.poisoned, what


NEAR = patterns.band(TOKENS, 1, 1)
FAR = patterns.global_tokens(TOKENS, [0], causal=False) | patterns.self_loops(TOKENS)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_encoder_under_a_graph(name):
    """Each layer follows its graph, within its own; two layers together both."""
    model = on_graphs(name)
    with ga.use_graph(model, lambda layer, head, length: NEAR if layer == 0 else FAR):
        for what, subject in subjects(name).items():
            if what.startswith("layer"):
                graph = subject.graphs[0] & (NEAR if what == "layer 0" else FAR)
                assert audit(subject.of(model), graph, subject.shape).exact
        if name == "bert":
            assert audit(model, [NEAR, FAR], (TOKENS,)).exact
            assert not audit(model, [FAR, NEAR], (TOKENS,)).exact
            call = hf_audits.masked(slice(TOKENS - PAD, None))
            verdict = audit(model, [NEAR, FAR], (TOKENS,), call=call)
            assert verdict.ok
            assert {src for src, dst in verdict.unused} == set(range(TOKENS - PAD, TOKENS))


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_under_graphs(name):
    """One graph for the encoder, one for the decoder, and cross-attention unchanged."""
    model, audits = on_graphs(name), subjects(name)
    near, few = patterns.band(TOKENS, 1, 1), patterns.window(ANSWER, 2)
    with ga.use_graph(model.get_encoder(), near), ga.use_graph(model.get_decoder(), few):
        assert audit(model.get_encoder(), near, (TOKENS,), layers=2).exact
        for what, graphs in (("decoder", few), ("decoding", few), ("encoder to decoder", None)):
            one = audits[what]
            given = {"call": one.call, "embedding": one.embedding} | ({"layers": 2} if graphs else {})
            verdict = audit(model, graphs or one.graphs, one.shape, **given)
            assert verdict.exact, (what, verdict)
            assert graphs is None or verdict.allowed == patterns.window(ANSWER, 3)
