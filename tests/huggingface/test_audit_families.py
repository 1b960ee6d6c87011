"""The audit over all families of ``hf_models``: what transformers itself does, and what this library's
attention does.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.bounds import assert_sum
from support.extras import needs

transformers = needs("transformers")

from support import hf_audits  # noqa: E402
from support.hf_audits import (  # noqa: E402
    ANSWER,
    CAUSAL,
    EVEN,
    EVEN_BIAS,
    FAINT,
    FULL,
    IMPLEMENTATIONS,
    PAD,
    TEXT,
    WINDOW,
    audited,
    found,
    subjects,
)
from support.hf_models import FAMILIES, TOKENS, build  # noqa: E402
from transformers.integrations import sdpa_attention  # noqa: E402

import gnn_attention as ga  # noqa: E402
from gnn_attention import patterns  # noqa: E402
from gnn_attention.interpret.audit import PartOf, audit  # noqa: E402
from gnn_attention.verify.measure import EXACT  # noqa: E402

RECORD = json.loads(hf_audits.RECORD.read_text(encoding="utf-8"))
ROWS = {(row["family"], row["subject"]): row for row in RECORD["rows"]}
AS_RECORDED = pytest.mark.skipif(
    RECORD["versions"]["transformers"] != transformers.__version__,
    reason="the record is of another version of transformers",
)


def said(verdict):
    """The rows of the record that say so of an implementation."""
    return {
        (*key, name)
        for key, row in ROWS.items()
        for name, by in row["by"].items()
        if by["verdict"] == verdict
    }


def agree(one, other):
    """Two results; a weight of 1e-44 that a processor takes for zero carries NaN alone."""
    same = [
        by | {"leaks": by.get("leaks", 0) + by.get("poisoned", 0), "poisoned": None} for by in (one, other)
    ]
    return same[0] == same[1]


@pytest.mark.slow
def test_the_record_is_of_all_families():
    """Each with everything that is audited of it, along the graphs that are promised, by every
    implementation.
    """
    assert {name for name, _ in ROWS} == set(FAMILIES)
    promised = {
        (name, what): [graph.name for graph in s.graphs]
        for name in FAMILIES
        for what, s in subjects(name).items()
    }
    assert {key: row["graphs"] for key, row in ROWS.items()} == promised
    assert all(tuple(row["by"]) == IMPLEMENTATIONS for row in ROWS.values())


@pytest.mark.slow
def test_whatever_is_not_exact_has_its_reason():
    """And the reasons are those that the tests below look for in the code."""
    reasons = {by["why"] for row in ROWS.values() for by in row["by"].values() if by["verdict"] == "leaks"}
    assert reasons == {EVEN, EVEN_BIAS, FAINT}
    assert said("unused") == set()


@pytest.mark.slow
def test_what_leaks():
    """Padding without senders under eager (but for sinks, which take it all) and T5's sdpa, and swin's
    shifted windows.
    """
    decoders = {
        name for name, family in FAMILIES.items() if family.inputs == "text" and "Masked" not in family.model
    }
    padded = {(name, "padding on the left", "eager") for name in decoders - {"gpt_oss"}}
    padded |= {(name, "decoder, padding on the left", "eager") for name in ("t5", "bart", "whisper")}
    padded |= {
        ("t5", "decoder, padding on the left", "sdpa"),
        ("modernbert", "padding on the right", "eager"),
    }
    shifted = {("swin", "stage 0 layer 1", name) for name in ("gnn_attention", "eager", "sdpa")}
    assert said("leaks") == padded | shifted


@pytest.mark.slow
def test_who_refuses():
    """SDPA softcaps and sinks, flex sinks on a CPU and three families; this library's attention refuses
    nobody.
    """
    refused = {(family, implementation) for family, _, implementation in said("refused")}
    assert refused == {
        *((name, "sdpa") for name in ("gemma2", "gpt_oss")),
        *((name, "flex_attention") for name in ("gpt_oss", "gpt2", "stablelm", "swin")),
    }


@pytest.mark.slow
def test_not_even_a_nan_leaves_our_graph():
    """Dense attention multiplies a masked NaN by a weight of zero, which is NaN; along edges it is not
    met.
    """
    poisoned = {
        name: sum(row["by"][name].get("poisoned", 0) > 0 for row in ROWS.values()) for name in IMPLEMENTATIONS
    }
    assert poisoned["gnn_attention"] == 0
    assert min(poisoned["eager"], poisoned["sdpa"]) > 50


SAMPLE = [
    ("mistral", "layer 0", "gnn_attention"),
    ("mistral", "decoding", "eager"),
    ("mistral", "padding on the left", "eager"),
    ("mistral", "padding on the left", "sdpa"),
    ("modernbert", "layer 1", "sdpa"),
    ("t5", "encoder to decoder, padding on the right", "sdpa"),
    ("t5", "decoding", "gnn_attention"),
    ("t5", "decoder, padding on the left", "sdpa"),
    ("t5", "decoder, padding on the left", "gnn_attention"),
    ("swin", "stage 0 layer 1", "eager"),
    ("swin", "patches", "gnn_attention"),
]


@pytest.mark.slow
@AS_RECORDED
@pytest.mark.parametrize(("name", "what", "implementation"), SAMPLE)
def test_a_sample_of_the_record_is_so(name, what, implementation):
    """Four families again."""
    assert agree(found(name, subjects(name)[what], implementation), ROWS[name, what]["by"][implementation])


def check_record(name, what, implementation):
    again = found(name, subjects(name)[what], implementation)
    assert agree(again, ROWS[name, what]["by"][implementation]), (what, implementation, again)


@pytest.mark.slow
@AS_RECORDED
@pytest.mark.parametrize("name", FAMILIES)
def test_the_record_is_so(name):
    """By this library's attention all of it; each of the others in turn audits every third subject."""
    others = [other for other in IMPLEMENTATIONS if other != "gnn_attention"]
    for number, what in enumerate(subjects(name), list(FAMILIES).index(name)):
        check_record(name, what, "gnn_attention")
        if number % 3 == 0:
            check_record(name, what, others[number // 3 % 3])


@AS_RECORDED
@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_all_of_the_record_is_so(name):
    for what in subjects(name):
        for implementation in IMPLEMENTATIONS:
            check_record(name, what, implementation)


@pytest.mark.slow
@AS_RECORDED
def test_eager_padding_hears_everybody_evenly():
    """The weights of a receiver whose senders are all padding are 1 / 12 each; those of a token hear no
    padding.
    """
    model, valid = build("llama"), torch.arange(TOKENS)[None].ge(PAD).long()
    with torch.no_grad():
        weights = model(TEXT, attention_mask=valid, output_attentions=True).attentions[0]
    # Equal logits: e^0 over a sum of 12 of them, four roundings at most.
    assert_sum(
        weights[..., :PAD, :],
        torch.full_like(weights[..., :PAD, :], 1 / TOKENS, dtype=torch.float64),
        4,
        1 / TOKENS,
    )
    assert not weights[..., PAD:, :PAD].any()


@pytest.mark.slow
@AS_RECORDED
def test_sdpa_with_a_bias_hears_padding_evenly_too():
    """What the docstring of transformers calls -inf is the lowest number."""
    q, heard = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    made = sdpa_attention.create_position_bias_mask(torch.zeros(1, 1, 2, 2), heard, False, q, q)
    assert torch.equal(made, torch.full_like(made, torch.finfo(torch.float32).min))
    assert torch.equal(made.softmax(-1), torch.full_like(made, 0.5))


@pytest.mark.slow
@AS_RECORDED
def test_in_float64_eager_padding_is_nan():
    """The softmax is made in float32, where the lowest number of float64 is -inf, and a row of -inf has no
    softmax.
    """
    subject = subjects("llama")["padding on the left"]
    with pytest.raises(ValueError, match="returns NaN or inf for finite inputs, first at receiver 0"):
        audited("llama", subject, "eager", dtype=torch.float64)
    for implementation in ("gnn_attention", "sdpa"):
        assert audited("llama", subject, implementation, dtype=torch.float64).exact


@pytest.mark.slow
@AS_RECORDED
def test_swin_leaks_by_its_finite_mask():
    """A weight of e^-100 at every pair of a window that the shift brought together, and nothing more than
    that.
    """
    subject = subjects("swin")["stage 0 layer 1"]
    verdict = audited("swin", subject, "sdpa")
    assert all(0 < leak.size < 1e3 * math.exp(-100) for leak in verdict.leaks)
    x, y = (torch.arange(64) // 8 - 2) % 8 // 4, (torch.arange(64) % 8 - 2) % 8 // 4
    together = (x[:, None] == x) & (y[:, None] == y) & ~subject.graphs[0].mask()
    assert {(leak.src, leak.dst) for leak in verdict.leaks} == {
        (src, dst) for dst, src in together.nonzero().tolist()
    }
    assert audited("swin", subject, "sdpa", tolerance=EXACT).exact


@pytest.mark.slow
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
def test_a_wrong_promise_is_not_kept(name, what, wrong):
    """Negative controls: another graph of the same tokens is not exact."""
    subject = hf_audits.replace(subjects(name)[what], graphs=(wrong,))
    assert not audited(name, subject, "gnn_attention").exact


@pytest.mark.slow
@AS_RECORDED
def test_flex_reads_the_bias_of_a_sample_that_is_not_there():
    """T5's bias is one for all samples: a batch of one is exact, two fail."""
    assert {(name, how) for name, _, how in said("fails")} == {("t5", "flex_attention")}
    subject = subjects("t5")["encoder"]
    assert audited("t5", subject, "flex_attention", samples=1).exact
    with pytest.raises(IndexError, match="index 1 is out of bounds for dimension 0 with size 1"):
        audited("t5", subject, "flex_attention", samples=2)


NEAR, FAR = (
    patterns.band(TOKENS, 1, 1),
    patterns.global_tokens(TOKENS, [0], causal=False) | patterns.self_loops(TOKENS),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_encoder_under_a_graph(name):
    """Each layer in its place hears along the graph that it was given, within its own; two layers together
    along both.
    """
    model = build(name)
    model.set_attn_implementation("gnn_attention")
    with ga.use_graph(model, lambda layer, head, length: NEAR if layer == 0 else FAR):
        for what, subject in subjects(name).items():
            if not what.startswith("layer"):
                continue
            own, given = subject.graphs[0], NEAR if what == "layer 0" else FAR
            verdict = audit(subject.of(model), own & given, subject.shape)
            assert verdict.exact, verdict
        if name == "bert":
            assert audit(model, [NEAR, FAR], (TOKENS,)).exact
            assert not audit(model, [FAR, NEAR], (TOKENS,)).exact
            mask = torch.arange(TOKENS) < TOKENS - PAD
            verdict = audit(
                model,
                [NEAR, FAR],
                (TOKENS,),
                call=lambda m, x: m(x, attention_mask=mask.long().expand(len(x), -1)),
            )
            assert verdict.ok
            assert {src for src, dst in verdict.unused} == set(range(TOKENS - PAD, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_under_graphs(name):
    """One graph for the encoder, one for the decoder, and cross-attention as ever."""
    model, audits = build(name), subjects(name)
    model.set_attn_implementation("gnn_attention")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_decoding_under_a_graph(name):
    """Token by token, with a cache that drops what its window has passed: along the same paths as in one
    pass.
    """
    model, sparse = build(name), patterns.window(TOKENS, 2) | patterns.sinks(TOKENS, 1)
    model.set_attn_implementation("gnn_attention")
    graphs = [graph & sparse for graph in subjects(name)["decoding"].graphs]
    with ga.use_graph(model, sparse):
        for witness in ("jacobian", "perturbation"):
            verdict = audit(model, graphs, (TOKENS,), call=hf_audits.decoded, witnesses=witness)
            assert verdict.exact, verdict
            assert audit(model, graphs, (TOKENS,), witnesses=witness).flow == verdict.flow


@pytest.mark.slow
def test_a_cache_that_forgets_is_seen():
    """Negative control: decoding whose first chunk is forgotten leaves its tokens unused."""

    def forgetful(model, ids):
        return torch.cat([model(chunk).logits for chunk in ids.split((7, 5), 1)], 1)

    unused = audit(build("llama"), CAUSAL, (TOKENS,), call=forgetful).unused
    assert set(unused) == {(src, dst) for src in range(7) for dst in range(7, TOKENS)}


@pytest.mark.slow
def test_a_picture_hears_itself_both_ways():
    """Gemma 3: the tokens of a picture hear one another, within the window too, and text is causal."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = transformers.Gemma3TextConfig(
        **sizes,
        vocab_size=64,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    vision = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=4, vision_use_head=False)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=62,
        boi_token_id=60,
        eoi_token_id=61,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation("gnn_attention")
    ids = TEXT.clone()
    ids[:, 3:7] = 62
    groups = [0 if 3 <= token < 7 else -1 for token in range(TOKENS)]
    given = {"input_ids": ids, "pixel_values": hf_audits.PICTURE, "token_type_ids": (ids == 62).long()}
    both_ways = patterns.bidirectional_groups(groups)
    for layer, graph in enumerate((both_ways & patterns.band(TOKENS, 4, TOKENS), both_ways)):
        verdict = audit(PartOf(model, f"model.language_model.layers.{layer}", **given), graph, (TOKENS, 32))
        assert verdict.exact, verdict
    assert not audit(PartOf(model, "model.language_model.layers.1", **given), FULL, (TOKENS, 32)).exact
