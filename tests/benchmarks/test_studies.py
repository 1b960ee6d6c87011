"""The studies of language models, each on a small one."""

import json

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from torch.nn import functional

from benchmarks import indexer_training
from gnn_attention import patterns, trace

needs("transformers")
hf_models = needs("support.hf_models")

from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM  # noqa: E402

from benchmarks import edge_cuts  # noqa: E402


@pytest.mark.parametrize("kind", edge_cuts.MODELS)
@torch.no_grad()
def test_each_edge_is_changed_alone(kind, monkeypatch):
    """Of every layer, several of one batch, the first receiver among them."""

    def letters(text, return_tensors):
        return BatchEncoding({"input_ids": torch.tensor([[3 + ord(letter) % 29 for letter in text]])})

    hf_models.keep_float64(monkeypatch)
    small = hf_models.built("llama", "gnn_attention")
    monkeypatch.setattr(edge_cuts.lm, "load", lambda name: (small, letters))
    made = edge_cuts.MODELS[kind]()
    edges = [(0, 0, 0, 0), (0, 1, 2, 5), (1, 0, 3, 7), (0, 0, 4, 5), (1, 1, 0, 1), (1, 1, 9, 9)]

    def loss():
        out = made.model(made.ids[:, :-1])
        return functional.cross_entropy((out.logits if kind == "smollm2" else out)[0], made.ids[0, 1:])

    for way in edge_cuts.WAYS:
        found, wanted = edge_cuts.measured(made, torch.tensor(edges), way), []
        for layer, head, src, dst in edges:
            with trace.operate(made.model, getattr(trace, way)([(src, dst)], layers=layer, heads=head)):
                wanted.append(loss())
        # of losses, whose largest is some units: the change is what is left of them
        assert_exact(found + loss(), torch.stack(wanted))
        assert found.abs().max() > 1e-6


def llama(tokens):
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**sizes, **heads, attn_implementation="gnn_attention")
    return LlamaForCausalLM(config).eval().requires_grad_(False), torch.randint(0, 30, (1, tokens))


def test_a_model_that_chooses_its_graphs_is_trained(monkeypatch, tmp_path):
    sizes = {"TOKENS": 32, "BRIEF": 16, "SENDERS": 8, "ROWS": 16, "WIDTH": 16, "HELD_OUT": 2}
    sizes |= {"SHORT": 20, "DENSE": 20, "CONTINUED": 20, "GROWTH": torch.ones(32)}
    sizes |= {"WINDOW": patterns.window(32, 4), "CAUSAL": patterns.causal(32)}
    for name, value in sizes.items():
        monkeypatch.setattr(indexer_training, name, value)
    indexer_training.main(["--out", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    losses = [record[name] for name in record if name.startswith("loss of ")]
    assert (len(losses), len({loss[0] for loss in losses[:3]})) == (5, 3)
