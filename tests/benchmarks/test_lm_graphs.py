"""The choices of ``benchmarks.lm_graphs`` on a small model."""

import pytest
import torch
from support.extras import needs

needs("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import gnn_attention.huggingface  # noqa: E402, F401
from benchmarks import lm_graphs  # noqa: E402
from gnn_attention import patterns  # noqa: E402

TOKENS = 24


@pytest.fixture
def study(monkeypatch, tmp_path):
    """Of a small Llama that reads random tokens."""
    monkeypatch.setattr(lm_graphs, "FIRST", 4)
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**sizes, **heads, attn_implementation="gnn_attention")
    made = object.__new__(lm_graphs.Study)
    made.file, made.model = tmp_path / "record.json", LlamaForCausalLM(config).eval().requires_grad_(False)
    made.ids, made.causal = torch.randint(0, 30, (1, TOKENS)), patterns.causal(TOKENS)
    made.pairs, made.record = made.causal.num_edges, {"points": []}
    return made


def test_steps_have_the_shares_that_were_asked_for(study, monkeypatch):
    """What is measured is not measured again."""
    monkeypatch.setattr(lm_graphs, "STEPS", (0.5, 0.3))
    lm_graphs.refined(study)
    points = study.record["points"]
    assert [point["choice"] for point in points] == [lm_graphs.REFINED] * 2
    for point, share in zip(points, (0.5, 0.3), strict=True):
        # the budget is a whole number of the 2 x 300 pairs
        assert point["share"] == pytest.approx(share, abs=1 / 600)
    assert points[1]["loss"] != points[0]["loss"]
    before = list(points)
    lm_graphs.refined(study)
    assert study.record["points"] == before


def test_weights_are_ranked_in_the_place_of_effects(study):
    """Rows of the weights sum to one."""
    found = lm_graphs.weights(study)
    rows = torch.zeros(2, TOKENS).index_add_(1, study.causal.edge_index[1], found.scores(0, "slope"))
    # float32 sums of at most 24 numbers
    assert (rows - 1).abs().max() < 24 * torch.finfo(torch.float32).eps
