"""Each study of a language model runs on a small model."""

import json

import pytest
import torch
from support.extras import needs

from benchmarks import indexer_training
from gnn_attention import patterns

needs("transformers")

from support import letters  # noqa: E402

from benchmarks import indexer_smollm2, lm_graphs  # noqa: E402


def small_llama(tokens):
    return letters.llama().requires_grad_(False), torch.randint(0, letters.SIZES["vocab_size"], (1, tokens))


def test_points_have_the_requested_shares(monkeypatch):
    """The attention weights, which are ranked in place of effects, sum to 1 over the edges of a receiver."""
    monkeypatch.setattr(lm_graphs, "FIRST", 4)
    monkeypatch.setattr(lm_graphs, "STEPS", (0.5, 0.3))
    study = lm_graphs.Study(*small_llama(24))
    lm_graphs.refine(study)
    study.rank("random", lm_graphs.score_randomly(study), (0.2,))
    # A budget is a whole number of the 2 x 300 pairs.
    assert [point["share"] for point in study.points] == pytest.approx([0.5, 0.3, 0.2], abs=1 / 600)
    weights = lm_graphs.score_by_weight(study).scores(0, "slope")
    rows = torch.zeros(2, 24).index_add_(1, study.causal.edge_index[1], weights)
    # Each sum adds at most 24 float32 numbers.
    assert (rows - 1).abs().max() < 24 * torch.finfo(torch.float32).eps


def test_an_indexer_learns_what_a_layer_looks_at(monkeypatch):
    for name, value in {"TOKENS": 32, "ROWS": 16, "STEPS": 4, "GROUPS": 2, "SENDERS": (4, 64)}.items():
        monkeypatch.setattr(indexer_smollm2, name, value)
    model, ids = small_llama(32)
    states, loss = indexer_smollm2.record(model, ids)
    assert loss == pytest.approx(float(model(ids, labels=ids).loss), abs=1e-5)
    recalls, indexers = indexer_smollm2.study_layer(0, [states], [states])
    # With 64 senders, every sender is selected.
    assert recalls["indexer"][1] == recalls["best"][1] == recalls["best for all heads"][1] == 1.0
    assert indexer_smollm2.loss_along(model, ids, [indexers] * 2, 64) == pytest.approx(loss, abs=1e-3)


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
