"""The audit over all families of ``hf_models``: this library's attention, and what transformers' own does."""

# ruff: noqa: E402
from __future__ import annotations

import math

import pytest
import torch
from support.extras import needs

transformers = needs("transformers")

from support import hf_audits
from support.hf_audits import ANSWER, CAUSAL, FULL, PAD, TEXT, WINDOW, audited, subjects
from support.hf_models import FAMILIES, TOKENS, build

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.interpret.audit import PartOf, audit
from gnn_attention.verify.measure import EXACT

SHIFTED = ("swin", "stage 0 layer 1")  # its own mask is finite: a weight of e^-100 is left
pytestmark = pytest.mark.slow


def on_graphs(name):
    model = build(name)
    model.set_attn_implementation("gnn_attention")
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_follows_its_graphs(name):
    """Each layer, padding, decoding, encoder to decoder: exactly the promised edges, not even for a NaN."""
    for what, subject in subjects(name).items():
        options = {"tolerance": EXACT} if (name, what) == SHIFTED else {}
        verdict = audited(name, subject, "gnn_attention", **options)
        assert verdict.exact, (what, verdict)
        assert options or not verdict.poisoned, what


OF_TRANSFORMERS = [  # family, subject, implementation, whether it is exact
    ("mistral", "decoding", "eager", True),
    ("mistral", "padding on the left", "eager", False),
    ("mistral", "padding on the left", "sdpa", True),
    ("modernbert", "layer 1", "sdpa", True),
    ("t5", "encoder to decoder, padding on the right", "sdpa", True),
    ("t5", "decoder, padding on the left", "sdpa", False),
    ("llama", "layer 0", "flex_attention", True),
    (*SHIFTED, "eager", False),
]


@pytest.mark.parametrize(("name", "what", "implementation", "exact"), OF_TRANSFORMERS)
def test_other_implementations(name, what, implementation, exact):
    """eager_mask and sdpa's bias hold finfo.min, not -inf: padding whose senders are padding leaks."""
    verdict = audited(name, subjects(name)[what], implementation)
    assert verdict.exact == exact
    assert verdict.ok == exact


def test_swin_leaks_by_its_finite_mask():
    """A weight of e^-100 at every pair of a window that the shift brought together, and nothing else."""
    subject = subjects("swin")["stage 0 layer 1"]
    verdict = audited("swin", subject, "sdpa")
    assert all(0 < leak.size < 1e3 * math.exp(-100) for leak in verdict.leaks)
    x, y = (torch.arange(64) // 8 - 2) % 8 // 4, (torch.arange(64) % 8 - 2) % 8 // 4
    together = (x[:, None] == x) & (y[:, None] == y) & ~subject.graphs[0].mask()
    pairs = {(src, dst) for dst, src in together.nonzero().tolist()}
    assert {(leak.src, leak.dst) for leak in verdict.leaks} == pairs
    assert audited("swin", subject, "sdpa", tolerance=EXACT).exact


@pytest.mark.parametrize(
    ("name", "what", "wrong"),
    [
        ("mistral", "layer 1", patterns.window(TOKENS, 4)),
        ("gemma2", "layer 0", CAUSAL),
        ("gemma2", "layer 1", WINDOW),
        ("llama4", "layer 0", patterns.chunked(TOKENS, 4)),
        ("modernbert", "layer 1", patterns.band(TOKENS, 2, 1)),
        ("bart", "decoder layer 0", patterns.full(ANSWER)),
    ],
)
def test_a_wrong_promise_is_not_exact(name, what, wrong):
    """Negative controls: another graph of the same tokens is not exact."""
    subject = hf_audits.replace(subjects(name)[what], graphs=(wrong,))
    assert not audited(name, subject, "gnn_attention").exact


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
        for what in ("decoder", "decoding"):
            subject = audits[what]
            verdict = audit(model, few, (ANSWER,), layers=2, call=subject.call, embedding=subject.embedding)
            assert verdict.exact, verdict
            assert verdict.allowed == patterns.window(ANSWER, 3)
        across = audits["encoder to decoder"]
        assert audit(model, across.graphs, across.shape, call=across.call, embedding=across.embedding).exact


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_decoding_under_a_graph(name):
    """Token by token, with a cache that drops what its window has passed: the same paths as in one pass."""
    model, sparse = on_graphs(name), patterns.window(TOKENS, 2) | patterns.sinks(TOKENS, 1)
    graphs = [graph & sparse for graph in subjects(name)["decoding"].graphs]
    with ga.use_graph(model, sparse):
        for witness in ("jacobian", "perturbation"):
            verdict = audit(model, graphs, (TOKENS,), call=hf_audits.decoded, witnesses=witness)
            assert verdict.exact, verdict
            assert audit(model, graphs, (TOKENS,), witnesses=witness).flow == verdict.flow


def test_a_cache_that_forgets_is_seen():
    """Negative control: decoding whose first chunk is forgotten leaves its tokens unused."""

    def forgetful(model, ids):
        return torch.cat([model(chunk).logits for chunk in ids.split((7, 5), 1)], 1)

    unused = audit(build("llama"), CAUSAL, (TOKENS,), call=forgetful).unused
    assert set(unused) == {(src, dst) for src in range(7) for dst in range(7, TOKENS)}


def gemma3():
    """Gemma 3 with pictures of four tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
    vision = sizes | {"image_size": 16, "patch_size": 4, "vision_use_head": False}
    ids = {"image_token_id": 62, "boi_token_id": 60, "eoi_token_id": 61}
    torch.manual_seed(0)
    ids |= {"text_config": transformers.Gemma3TextConfig(**text), "mm_tokens_per_image": 4}
    ids |= {"vision_config": transformers.SiglipVisionConfig(**vision)}
    model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**ids)).eval()
    model.set_attn_implementation("gnn_attention")
    return model


def test_a_picture_attends_to_itself_both_ways():
    """Within the window too; text is causal."""
    model, ids = gemma3(), TEXT.clone()
    ids[:, 3:7] = 62
    groups = [0 if 3 <= token < 7 else -1 for token in range(TOKENS)]
    given = {"input_ids": ids, "pixel_values": hf_audits.PICTURE, "token_type_ids": (ids == 62).long()}
    both_ways = patterns.bidirectional_groups(groups)
    for layer, graph in enumerate((both_ways & patterns.band(TOKENS, 4, TOKENS), both_ways)):
        part = PartOf(model, f"model.language_model.layers.{layer}", **given)
        assert audit(part, graph, (TOKENS, 32)).exact
    assert not audit(part, FULL, (TOKENS, 32)).exact
