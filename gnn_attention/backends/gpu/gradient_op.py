"""What the operators of GPUs share: an operator for gradients, and the layout of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gnn_attention._support.custom_op import operator
from gnn_attention._support.shapes import Tensor


def gradient_operator(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], advice: str
) -> Callable[..., Any]:
    """An operator for first derivatives; a second one is a NotImplementedError with ``advice``."""

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"second derivatives do not pass through {advice}")

    def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """There is no derivative that would need it."""

    return operator(name, schema, run, fake, refuse, save_nothing)


def token_major(like: Tensor, width: int) -> Tensor:
    """As kernels write: an empty ``[B, H, T, width]`` whose memory is ``[B, T, H, width]``."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)
