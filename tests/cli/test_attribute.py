"""``gnn-attention attribute`` prints edges as words and the loss along those that it keeps."""

import json

import pytest
import torch
from support.explorer_engine import data_of, mask_of
from support.extras import needs

from gnn_attention.__main__ import main

needs("transformers")

from support.letters import Letters, llama  # noqa: E402

from gnn_attention import lm, trace  # noqa: E402


@pytest.fixture
def small_model(monkeypatch):
    """Return a small Llama that replaces the installed model."""
    model = llama()
    monkeypatch.setattr(lm, "load", lambda name: (model, Letters()))
    return model


def test_edges_in_words_and_the_loss_of_what_is_kept(small_model, capsys):
    """With all edges the loss is the model's own, with half of them it differs."""
    text = "abcab"
    ids = Letters()(text, "pt").input_ids
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(small_model(ids).logits[0, :-1], ids[0, 1:]))
    records = {}
    for share in ("1", "0.5"):
        assert main(["attribute", text, "--keep", share, "--edges", "3", "--json"]) == 0
        records[share] = json.loads(capsys.readouterr().out)
    assert records["1"]["pairs"] == records["1"]["pairs_left"] == 15 * 4
    # In float32, each loss of size 3 to 5 has some 50 roundings.
    assert abs(records["1"]["loss_of_these"] - loss) < 50 * 5 * 2**-24
    assert abs(records["0.5"]["loss_of_these"] - loss) > 1e-3
    assert records["0.5"]["pairs_left"] <= 30
    edge = records["1"]["edges"][0]
    words = f"'{text[edge['dst']]}' ({edge['dst']}) <- '{text[edge['src']]}' ({edge['src']})"
    assert edge["text"].startswith(f"{edge['layer']}.{edge['head']}: {words}, ")
    assert main(["attribute", text, "--metric", "last"]) == 0
    assert "<-" in capsys.readouterr().out
    assert main(["attribute", "a"]) == 2
    assert "text must have at least two tokens, got 1" in capsys.readouterr().err


def test_a_page_of_the_strongest_layers_and_edges(small_model, tmp_path, capsys):
    """Edges rank by what a cut does to the next token, and each line links to its edge on the page."""
    text, out = "abcab", tmp_path / "page.html"
    ids = Letters()(text, "pt").input_ids
    with torch.no_grad():
        probability, token = small_model(ids).logits[0, -1].softmax(-1).max(0)
    effects = trace.attribute(small_model, ids, lambda logits: logits[0, -1].log_softmax(-1)[token])
    for layers, options in (([0, 1], []), ([1], ["--layers", "1"])):
        assert main(["explore", text, "--model", "smollm2", "-o", str(out), *options]) == 0
        _, title, *lines = capsys.readouterr().out.splitlines()
        assert title.startswith(f"next: {Letters().decode([token])!r}, p = {float(probability):.3g}; ")
        data = data_of(out)
        assert [layer["number"] for layer in data["model"]["layers"]] == layers
        top_effects = [effect for effect in effects.top(60) if effect.layer in layers][:10]
        for line, (layer, head, src, dst, _) in zip(lines, top_effects, strict=True):
            assert line.startswith(f"{layer}.{head}: {text[dst]!r} ({dst}) <- {text[src]!r} ({src}), ")
            assert line.endswith(f"; {out}#at=listen.{layers.index(layer)}.{head}.{dst}.{src}.0")
        squares = sum(effects.scores(layer).square().sum(0) for layer in layers)
        strongest_edges = effects.edge_index(0)[:, squares.topk(round(0.1 * 15)).indices]
        assert mask_of(data, 2).nonzero().flip(1).tolist() == sorted(
            strongest_edges.T.tolist(), key=lambda e: e[::-1]
        )
    assert main(["explore", text, "--model", "smollm2", "-o", str(out), "--layers", "2"]) == 2
    assert "--layers must be some of 0 .. 1, got [2]" in capsys.readouterr().err
