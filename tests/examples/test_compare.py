"""``examples.compare``: loss and speed of a pretrained model over graphs, without training."""

import json

import pytest
import torch
from support.extras import needs
from torch.nn import functional

from examples.compare import main
from gnn_attention import lm, patterns

needs("transformers")

from support.letters import Letters, llama  # noqa: E402

GRAPHS = "causal; window(2) | sinks(1)"


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A small Llama in the place of the installed model, and a text."""
    model = llama()
    monkeypatch.setattr(lm, "load", lambda name: (model, Letters()))
    file = tmp_path / "text.txt"
    file.write_text("abcabdabeabfxyz")
    return model, file


def loss_with_mask(model, ids, mask):
    """Of the targets after the first quarter, by transformers' own attention with a 4-D mask."""
    model.set_attn_implementation("eager")
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = model(ids, attention_mask=additive, use_cache=False).logits[0]
    model.set_attn_implementation("gnn_attention")
    first = ids.shape[1] // 4
    return float(functional.cross_entropy(logits[first:-1], ids[0, first + 1 :]))


def test_losses_are_those_of_the_model_with_the_masks(small, tmp_path, capsys):
    """Eager attention with the graph's mask has the same loss; the table shows it."""
    model, file = small
    record = tmp_path / "found.json"
    given = ["--graphs", GRAPHS, "--text", str(file), "--tokens", "12", "--json", str(record)]
    assert main(["--model", "small", *given]) == 0
    rows, shown = json.loads(record.read_text())["rows"], capsys.readouterr().out
    ids = torch.tensor([[ord(letter) - 96 for letter in "abcabdabeabf"]])
    graphs = [patterns.causal(12), patterns.window(12, 2) | patterns.sinks(12, 1)]
    for row, graph in zip(rows, graphs, strict=True):
        # rounded to four places, beside float32's own rounding
        assert row["loss"] == pytest.approx(loss_with_mask(model, ids, graph.mask()), abs=6e-5)
        assert row["share"] == pytest.approx(graph.num_edges / 78, abs=5e-7)
        assert f"{row['loss']:.4f}" in shown
    assert rows[0]["loss"] != rows[1]["loss"]


@pytest.mark.parametrize(
    ("given", "word"), [(["--tokens", "3"], "at least 8 tokens"), (["--graphs", "~causal"], "later token")]
)
def test_what_cannot_be_compared_is_refused(small, capsys, given, word):
    """By name, with exit code 2."""
    assert main(["--model", "small", "--text", str(small[1]), *given]) == 2
    assert word in capsys.readouterr().err
