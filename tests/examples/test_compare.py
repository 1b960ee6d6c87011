"""``examples.compare`` prints the loss of a pretrained model along each graph, without training."""

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
    """Return a small Llama that replaces the installed model, and the file of a text."""
    model = llama()
    monkeypatch.setattr(lm, "load", lambda name: (model, Letters()))
    file = tmp_path / "text.txt"
    file.write_text("abcabdabeabfxyz")
    return model, file


def loss_with_mask(model, ids, mask):
    """Return the loss after the first quarter by transformers' own attention with a 4-D mask."""
    model.set_attn_implementation("eager")
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = model(ids, attention_mask=additive, use_cache=False).logits[0]
    model.set_attn_implementation("gnn_attention")
    first = ids.shape[1] // 4
    return float(functional.cross_entropy(logits[first:-1], ids[0, first + 1 :]))


def test_losses_are_those_of_the_model_with_the_masks(small, tmp_path, capsys):
    """Eager attention with the graph's mask has the same loss, which the table shows."""
    model, file = small
    record = tmp_path / "found.json"
    options = ["--graphs", GRAPHS, "--text", str(file), "--tokens", "12", "--json", str(record)]
    assert main(["--model", "small", *options]) == 0
    rows, output = json.loads(record.read_text())["rows"], capsys.readouterr().out
    ids = torch.tensor([[ord(letter) - 96 for letter in "abcabdabeabf"]])
    graphs = [patterns.causal(12), patterns.window(12, 2) | patterns.sinks(12, 1)]
    for row, graph in zip(rows, graphs, strict=True):
        # The loss is rounded to four places, and the rest of the bound is the error of float32.
        assert row["loss"] == pytest.approx(loss_with_mask(model, ids, graph.mask()), abs=6e-5)
        assert row["share"] == pytest.approx(graph.num_edges / 78, abs=5e-7)
        assert f"{row['loss']:.4f}" in output
    assert rows[0]["loss"] != rows[1]["loss"]


@pytest.mark.parametrize(
    ("options", "word"), [(["--tokens", "3"], "at least 8 tokens"), (["--graphs", "~causal"], "later token")]
)
def test_what_cannot_be_compared_is_refused(small, capsys, options, word):
    """The command names what is wrong, and returns the exit code 2."""
    assert main(["--model", "small", "--text", str(small[1]), *options]) == 2
    assert word in capsys.readouterr().err
