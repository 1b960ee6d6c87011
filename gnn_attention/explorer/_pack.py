"""A model as a page carries it: tensors and masks as text, weights, vocabulary, limits."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from gnn_attention import patterns
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.model import Block, LanguageModel, load_trained
from gnn_attention.model.tokenizer import BytePair

Words = str | Sequence[int]
# the name of the graph of layers that attend along different ones: their union
EACH_ITS_OWN = "each layer's own"
# tokens: the page draws and computes every pair of them
LONGEST = 512
# characters of a model; browsers open more, but slowly
LARGEST = 64 * 2**20


@dataclass(frozen=True)
class Source:
    """What a page is made of: tokens as ``(id, text)``, the model as the page reads it, its own graph.

    ``room`` is how many more tokens may be written.
    """

    tokens: list[tuple[int, str]]
    model: dict[str, Any]
    own: TokenGraph
    room: int = 0


def encode_tensor(tensor: Tensor) -> dict[str, Any]:
    """A tensor as the page reads it: shape, dtype and its bytes in base64.

    Exact for half types and float32; float16 wherever it holds every number, float64 is rounded to float32.

    >>> encode_tensor(torch.tensor([[1.0, -2.0]]))
    {'shape': [1, 2], 'dtype': 'float16', 'data': 'ADwAwA=='}
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        half = tensor.half()
        tensor = half if torch.equal(half.double(), tensor.double()) else tensor.float()
    raw = tensor.flatten().view(torch.uint8).numpy()
    data, dtype = base64.b64encode(raw.tobytes()).decode("ascii"), str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "data": data}


def bits(mask: Bool[Tensor, "dst src"]) -> str:
    """A mask as bits, row after row, the most significant of each byte first, in base64.

    >>> bits(torch.tensor([[True, False, False], [True, True, False], [True, True, True]]))  # 10011011 1
    'm4A='
    """
    return base64.b64encode(np.packbits(mask.cpu().numpy()).tobytes()).decode("ascii")


def check_length(tokens: Sequence[Any] | Tensor) -> None:
    """ValueError for no tokens, or more than a page can show."""
    if not len(tokens):
        raise ValueError("text_or_tokens must hold at least one token, got none")
    if len(tokens) > LONGEST:
        most = f"a page shows at most {LONGEST}: shorten it, or give the token ids of the part to look at"
        raise ValueError(f"text_or_tokens has {len(tokens)} tokens, and {most}")


def check_weight(model: dict[str, Any], instead: str) -> None:
    """ValueError for a model that is too large to be put into a page, with what to do ``instead``."""
    found = len(json.dumps(model))
    if found > LARGEST:
        size = f"{found / 1e6:,.0f} MB, at most {LARGEST / 1e6:.0f}"
        raise ValueError(f"{model['name']} would make a page of {size}: {instead}")


def whole(words: Words, model: LanguageModel, vocabulary: BytePair, name: str, room: int) -> Source:
    """All that a page needs to compute what the model computes, and to write ``room`` more tokens.

    >>> from gnn_attention.model import load_trained
    >>> source = whole("Llamas do not output words", *load_trained(), "trained", 16)
    >>> len(source.tokens), source.model["width"], source.own
    (11, 128, TokenGraph(causal(27): 27 src -> 27 dst))
    """
    if not isinstance(words, str):
        # refuses what is no token
        vocabulary.decode(words)
    ids = vocabulary.encode(words) if isinstance(words, str) else list(words)
    check_length(ids)
    if len(ids) + room > LONGEST + 64:
        raise ValueError(f"room must leave at most {LONGEST + 64} tokens in all, got {len(ids)} and {room}")
    texts = [piece.decode("utf-8", errors="backslashreplace") for piece in vocabulary.vocabulary]
    token_of = {piece: token for token, piece in enumerate(vocabulary.vocabulary)}
    merges = [token_of[part] for pair in vocabulary.merges for part in pair]
    packed = _model(model, name) | {"vocabulary": texts, "merges": merges}
    check_weight(packed, "take a smaller model")
    tokens = [(token, texts[token]) for token in ids]
    return Source(tokens, packed, patterns.causal(len(ids) + room), room)


def _model(model: LanguageModel, name: str) -> dict[str, Any]:
    config, state, own = model.config, model.state_dict(), load_trained()[0].state_dict()
    with torch.device("meta"):
        usual = LanguageModel(config)
    other = sorted(set(state) ^ set(usual.state_dict()))
    if other:
        expected = "the parameters of a LanguageModel, standard heads without biases"
        raise ValueError(f"model must have {expected}; differs in {other}")
    if not all(isinstance(block, Block) and isinstance(block.mlp[1], nn.GELU) for block in model.blocks):
        raise ValueError("model must be made of the blocks of gnn_attention.model, with a GELU in each")
    return {
        "kind": "model",
        "name": name,
        # what is recorded of the heads is of the weights that ship and no others
        "trained": own.keys() == state.keys() and all(own[key].equal(state[key].to(own[key])) for key in own),
        "width": config.width,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "headDim": config.head_dim,
        "reach": config.reach,
        # the page computes in float64
        "epsilon": model.norm.eps or torch.finfo(torch.float64).eps,
        "tensors": {key: encode_tensor(tensor) for key, tensor in state.items()},
    }
