"""What an error message says of an argument that does not fit."""

from __future__ import annotations

from gnn_attention._support.shapes import Tensor


def shape_of(x: object) -> str:
    """``[2, 3]`` for a tensor, else the name of its type."""
    return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def dtype_of(x: object) -> str:
    """``torch.float32`` for a tensor, else the name of its type."""
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def shape_and_dtype_of(x: object) -> str:
    """``[2, 3] in torch.float32`` for a tensor, else the name of its type."""
    return f"{list(x.shape)} in {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
