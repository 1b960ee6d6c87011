"""What a Hugging Face model gives its attention function."""

from typing import Any, NamedTuple

from torch import nn

from gnn_attention._support.shapes import Tensor


class Arguments(NamedTuple):
    """The arguments of one call; ``dropout`` is 0 outside of training.

    ``tensors`` are query, key and value. ``mask`` is what the mask function gave, a tensor, or None.
    ``others`` are keyword arguments that some models pass.
    """

    module: nn.Module
    tensors: tuple[Tensor, ...]
    mask: Any
    scaling: float | Tensor | None
    dropout: float
    is_causal: bool | None
    cap: float | None
    position_bias: Tensor | None
    sinks: Tensor | None
    others: dict[str, Any]
