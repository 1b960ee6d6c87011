"""A whole language model of ``gnn_attention.model`` as a page carries it: weights and vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gnn_attention import patterns
from gnn_attention.explorer._pack import LONGEST, Source, Words, check_length, check_weight, stored
from gnn_attention.model import Block, LanguageModel, load_trained
from gnn_attention.model.tokenizer import BytePair


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
        "tensors": {key: stored(tensor) for key, tensor in state.items()},
    }
