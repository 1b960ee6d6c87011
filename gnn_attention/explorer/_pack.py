"""Tensors and masks as text for a page, and what every kind of model gives to one."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.graph import TokenGraph

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


def stored(tensor: Tensor) -> dict[str, Any]:
    """A tensor as the page reads it: shape, dtype and its bytes in base64.

    Exact for half types and float32; float16 wherever it holds every number, float64 is rounded to float32.

    >>> stored(torch.tensor([[1.0, -2.0]]))
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
