"""Single edges are cut and muted in small models."""

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from torch.nn import functional

from gnn_attention import trace

needs("transformers")
hf_models = needs("support.hf_models")

from transformers import BatchEncoding  # noqa: E402

from examples import edge_cuts  # noqa: E402


@pytest.mark.parametrize("kind", edge_cuts.MODELS)
@torch.no_grad()
def test_each_edge_is_changed_alone(kind, monkeypatch):
    """Each loss is that of a single changed edge; the edges are of every layer, and some share a batch."""

    def tokens_of(text, return_tensors):
        return BatchEncoding({"input_ids": torch.tensor([[3 + ord(letter) % 29 for letter in text]])})

    hf_models.keep_float64(monkeypatch)
    small = hf_models.build64("llama", "gnn_attention")
    monkeypatch.setattr(edge_cuts.lm, "load", lambda name: (small, tokens_of))
    study = edge_cuts.MODELS[kind]()
    edges = [(0, 0, 0, 0), (0, 1, 2, 5), (1, 0, 3, 7), (0, 0, 4, 5), (1, 1, 0, 1), (1, 1, 9, 9)]

    def loss():
        out = study.model(study.ids[:, :-1])
        return functional.cross_entropy((out.logits if kind == "smollm2" else out)[0], study.ids[0, 1:])

    for way in edge_cuts.WAYS:
        changes, losses = edge_cuts.measure_changes(study, torch.tensor(edges), way), []
        for layer, head, src, dst in edges:
            with trace.intervene(study.model, getattr(trace, way)([(src, dst)], layers=layer, heads=head)):
                losses.append(loss())
        # Losses are compared instead of changes, because a change is a small difference of two losses.
        assert_exact(changes + loss(), torch.stack(losses))
        assert changes.abs().max() > 1e-6
