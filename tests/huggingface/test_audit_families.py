"""The audit of every family of text in ``hf_models``: exactly the edges that its masks promise."""

# ruff: noqa: E402
from __future__ import annotations

import inspect

import pytest
import torch
from support.extras import needs

transformers = needs("transformers")

from support.hf_models import FAMILIES, TOKENS, VOCABULARY, build

import gnn_attention as ga
import gnn_attention.huggingface  # registers the attention
from gnn_attention import patterns
from gnn_attention.interpret.audit import PartOf, audit

pytestmark = pytest.mark.slow

PAD, CHUNKS = 3, (7, 1, 1, 3)
EXPERTS = ("gpt_oss", "deepseek_v3", "mixtral")  # torch's grouped_mm, which their experts use, has no float64
TEXT = [name for name, family in FAMILIES.items() if family.inputs == "text"]
IDS = torch.randint(3, VOCABULARY - 1, (1, TOKENS), generator=torch.Generator().manual_seed(3))
CAUSAL, FULL = patterns.causal(TOKENS), patterns.full(TOKENS)
WINDOW, CHUNKED = patterns.window(TOKENS, 5), patterns.chunked(TOKENS, 5)
LAYERS = {
    "mistral": (WINDOW, WINDOW),
    "phi3": (WINDOW, WINDOW),
    **dict.fromkeys(("gemma2", "gemma3", "gemma4", "gpt_oss", "cohere2"), (WINDOW, CAUSAL)),
    "llama4": (CHUNKED, CAUSAL),
    "modernbert": (FULL, patterns.band(TOKENS, 2, 2), FULL),  # local_attention=4 counts both sides together
    **dict.fromkeys(("bert", "roberta", "distilbert"), (FULL, FULL)),
}
# of all others: model.layers
BLOCKS = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "gpt_neox": "gpt_neox.layers"}
BLOCKS |= {"bert": "bert.encoder.layer", "roberta": "roberta.encoder.layer"}
BLOCKS |= {"distilbert": "distilbert.transformer.layer"}


def on_graphs(name):
    model = build(name)
    model.set_attn_implementation("gnn_attention")
    return model


def padded(model, ids):
    """With the last tokens as padding in all samples."""
    mask = (torch.arange(TOKENS) < TOKENS - PAD).long().expand(len(ids), -1)
    return model(input_ids=ids, attention_mask=mask)


def decoded(model, ids):
    """The logits of all tokens, fed in chunks with a cache."""
    # its name since transformers 5.24, and before
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, logits = None, []
    for chunk in ids.split(CHUNKS, 1):
        out = model(chunk, **{name: cache}, use_cache=True)
        cache = out[name]
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", TEXT)
def test_every_family_follows_its_graphs(name):
    """All layers together, each alone, and decoding: exactly the promised edges, not even for a NaN."""
    model, graphs = on_graphs(name), LAYERS.get(name, (CAUSAL, CAUSAL))
    dtype = torch.float32 if name in EXPERTS else torch.float64
    verdicts = {"tokens": audit(model, graphs, (TOKENS,), dtype=dtype)}
    for number, graph in enumerate(graphs):
        layer = PartOf(model, f"{BLOCKS.get(name, 'model.layers')}.{number}", input_ids=IDS)
        verdicts[f"layer {number}"] = audit(layer, graph, (TOKENS, 32), dtype=dtype)
    if "Masked" not in FAMILIES[name].model:
        verdicts["decoding"] = audit(model, graphs, (TOKENS,), call=decoded, dtype=dtype)
    for what, verdict in verdicts.items():
        assert verdict.exact, (what, verdict)
        assert not verdict.poisoned, what


NEAR = patterns.band(TOKENS, 1, 1)
FAR = patterns.global_tokens(TOKENS, [0], causal=False) | patterns.self_loops(TOKENS)


def test_an_encoder_under_a_graph():
    """Two layers follow a graph each; padding sends nothing."""
    model = on_graphs("bert")
    with ga.use_graph(model, lambda layer, head, length: NEAR if layer == 0 else FAR):
        assert audit(model, [NEAR, FAR], (TOKENS,)).exact
        assert not audit(model, [FAR, NEAR], (TOKENS,)).exact
        verdict = audit(model, [NEAR, FAR], (TOKENS,), call=padded)
        assert verdict.ok
        assert {src for src, dst in verdict.unused} == set(range(TOKENS - PAD, TOKENS))
