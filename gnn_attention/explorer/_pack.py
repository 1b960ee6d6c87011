"""Encode a model for a page: turn tensors, masks and vocabulary into JSON, and limit its size."""

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

Text = str | Sequence[int]
# If layers have different graphs, the page shows their union under this name.
UNION_NAME = "each layer's own"
# The page draws and computes every pair of tokens, so it limits their number.
MAX_TOKENS = 512
# Browsers are slow to open a page whose encoded model has more characters.
MAX_CHARACTERS = 64 * 2**20


@dataclass(frozen=True)
class Source:
    """What a page shows: tokens ``(id, text)``, an encoded model, a graph, and room for more tokens."""

    tokens: list[tuple[int, str]]
    model: dict[str, Any]
    graph: TokenGraph
    room: int = 0


def encode_tensor(tensor: Tensor) -> dict[str, Any]:
    """Encode a tensor as its shape, dtype and bytes in base64.

    A bfloat16 tensor keeps its dtype. Any other tensor becomes float16 if this changes no number,
    and float32 otherwise.

    >>> encode_tensor(torch.tensor([[1.0, -2.0]]))
    {'shape': [1, 2], 'dtype': 'float16', 'data': 'ADwAwA=='}
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        half = tensor.half()
        tensor = half if torch.equal(half.double(), tensor.double()) else tensor.float()
    array = tensor.flatten().view(torch.uint8).numpy()
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "data": data}


def encode_mask(mask: Bool[Tensor, "dst src"]) -> str:
    """Encode a mask in base64: its bits row after row, the most significant bit of each byte first.

    >>> encode_mask(torch.ones(3, 3).tril().bool())  # bits 10011011 1
    'm4A='
    """
    return base64.b64encode(np.packbits(mask.cpu().numpy()).tobytes()).decode("ascii")


def check_length(tokens: Sequence[Any] | Tensor) -> None:
    """Raise ValueError for no tokens, or more than a page can show."""
    if not len(tokens):
        raise ValueError("text_or_tokens must hold at least one token, got none")
    if (n := len(tokens)) > MAX_TOKENS:
        raise ValueError(f"text_or_tokens has {n} tokens, at most {MAX_TOKENS} fit: shorten it, or pass ids")


def check_size(model: dict[str, Any], advice: str) -> None:
    """Raise ValueError for an encoded model that is too large for a page."""
    num_characters = len(json.dumps(model))
    if num_characters > MAX_CHARACTERS:
        raise ValueError(
            f"{model['name']} would make a page of {num_characters / 1e6:,.0f} MB, "
            f"at most {MAX_CHARACTERS / 1e6:.0f}: {advice}"
        )


def pack_model(text: Text, model: LanguageModel, vocabulary: BytePair, name: str, room: int) -> Source:
    """Encode a whole model, so that the page can run it and generate up to ``room`` more tokens.

    >>> from gnn_attention.model import load_trained
    >>> source = pack_model("Llamas do not output words", *load_trained(), "trained", 16)
    >>> len(source.tokens), source.model["width"], source.graph
    (11, 128, TokenGraph(causal(27): 27 src -> 27 dst))
    """
    if not isinstance(text, str):
        # Decoding raises an error for ids that are not tokens.
        vocabulary.decode(text)
    ids = vocabulary.encode(text) if isinstance(text, str) else list(text)
    check_length(ids)
    if len(ids) + room > MAX_TOKENS + 64:
        raise ValueError(f"room must leave at most {MAX_TOKENS + 64} tokens in all, got {len(ids)} + {room}")
    texts = [piece.decode("utf-8", errors="backslashreplace") for piece in vocabulary.vocabulary]
    token_ids = {piece: token for token, piece in enumerate(vocabulary.vocabulary)}
    merges = [token_ids[piece] for pair in vocabulary.merges for piece in pair]
    encoded = _encode_model(model, name) | {"vocabulary": texts, "merges": merges}
    check_size(encoded, "use a smaller model")
    tokens = [(token, texts[token]) for token in ids]
    return Source(tokens, encoded, patterns.causal(len(ids) + room), room)


def _encode_model(model: LanguageModel, name: str) -> dict[str, Any]:
    config, state = model.config, model.state_dict()
    with torch.device("meta"):
        standard_model = LanguageModel(config)
    if keys := sorted(set(state) ^ set(standard_model.state_dict())):
        raise ValueError(f"model must be a LanguageModel with standard, bias-free heads; differs in {keys}")
    if not all(isinstance(block, Block) and isinstance(block.mlp[1], nn.GELU) for block in model.blocks):
        raise ValueError("model must be made of the blocks of gnn_attention.model, with a GELU in each")
    weights = load_trained()[0].state_dict()
    is_trained = weights.keys() == state.keys() and all(x.equal(state[k].to(x)) for k, x in weights.items())
    return {
        "kind": "model",
        "name": name,
        # The page describes single heads only if the weights are those of the shipped model.
        "trained": is_trained,
        "width": config.width,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "headDim": config.head_dim,
        "reach": config.reach,
        # If a norm has no eps, it uses that of the dtype. The page computes in float64.
        "epsilon": model.norm.eps or torch.finfo(torch.float64).eps,
        "tensors": {key: encode_tensor(tensor) for key, tensor in state.items()},
    }
