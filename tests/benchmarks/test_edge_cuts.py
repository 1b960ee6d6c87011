"""The benchmark of edge effects: from a layer and a receiver on it computes the model with one change."""

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from torch.nn import functional

from gnn_attention import trace
from gnn_attention._support.progress import Progress

needs("transformers")
hf_models = needs("support.hf_models")

from transformers import BatchEncoding  # noqa: E402

from benchmarks import edge_cuts  # noqa: E402


def letters(text, return_tensors):
    """Ids below 32."""
    return BatchEncoding({"input_ids": torch.tensor([[3 + ord(letter) % 29 for letter in text]])})


@pytest.mark.parametrize("kind", edge_cuts.MODELS)
@torch.no_grad()
def test_each_change_alone(kind, monkeypatch):
    """Of every layer, several of one batch, the first receiver among them."""
    hf_models.keep_float64(monkeypatch)
    small = hf_models.built("llama", "gnn_attention")
    monkeypatch.setattr(edge_cuts.lm, "load", lambda name: (small, letters))
    made = edge_cuts.MODELS[kind]()
    edges = [
        (0, 0, 0, 0),
        (0, 1, 2, 5),
        (1, 0, 3, 7),
        (0, 0, 4, 5),
        (1, 1, 0, 1),
        (1, 1, 9, 9),
        (0, 1, 0, 30),
    ]
    targets = made.ids[0, 1:]

    def loss():
        out = made.model(made.ids[:, :-1])
        return functional.cross_entropy((out.logits if kind == "smollm2" else out)[0], targets)

    for way in edge_cuts.WAYS:
        found = edge_cuts.measured(made, torch.tensor(edges), way, Progress("edges", shown=False))
        wanted = []
        for layer, head, src, dst in edges:
            with trace.operate(made.model, getattr(trace, way)([(src, dst)], layers=layer, heads=head)):
                wanted.append(loss())
        # of losses, whose largest is some units: the change is what is left of them
        assert_exact(found + loss(), torch.stack(wanted))
        assert found.abs().max() > 1e-6
