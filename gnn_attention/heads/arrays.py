"""Read parameter matrices ``[heads, in, out]`` from arrays, and multiply states by them."""

from typing import Any

import torch
from torch import nn

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Tensor

# bmm is faster than mm for at most MAX_BMM_TOKENS tokens if a matrix has at least MIN_BMM_ENTRIES entries.
MAX_BMM_TOKENS = 64
MIN_BMM_ENTRIES = 2**14


def project(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W_h + b_h`` for each head: [batch, tokens, in] -> [batch, heads, tokens, out]."""
    check_states(x, matrix.shape[1], matrix.dtype)
    batch_size, num_tokens = x.shape[:2]
    num_heads, width, dim = matrix.shape
    # A compiled program must not depend on the number of tokens.
    has_few_tokens = not torch.compiler.is_compiling() and batch_size * num_tokens <= MAX_BMM_TOKENS
    if has_few_tokens and width * dim >= MIN_BMM_ENTRIES:
        result = torch.bmm(x.reshape(1, -1, width).expand(num_heads, -1, -1), matrix)
        result = result.view(num_heads, batch_size, num_tokens, dim).transpose(0, 1)
    else:
        # A single product needs a copy of all matrices; reshape copies three times as fast as flatten.
        wide_matrix = matrix.transpose(0, 1).reshape(width, num_heads * dim)
        result = torch.mm(x.reshape(batch_size * num_tokens, width), wide_matrix)
        result = result.view(batch_size, num_tokens, num_heads, dim).transpose(1, 2)
    return result if bias is None else (result + bias.unsqueeze(1)).to(result.dtype)


def to_product_dtype(x: Tensor) -> Tensor:
    """Convert ``x`` to the dtype of its matrix products, which ``torch.autocast`` may change."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if _is_autocast(x) else x


def _is_autocast(x: Tensor) -> bool:
    can_be_autocast = not x.is_meta and x.is_floating_point() and x.dtype != torch.float64
    return can_be_autocast and torch.is_autocast_enabled(x.device.type)


def check_heads(heads: Any) -> None:
    methods = ("receive", "send", "collect")
    if not isinstance(heads, nn.Module) or not all(callable(getattr(heads, name, None)) for name in methods):
        raise TypeError(
            "heads must be a module with receive, send and collect, such as StandardHeads, "
            f"got {type(heads).__name__}; gnn_attention.heads_of copies those of a model"
        )


def check_states(x: Tensor, width: int, dtype: torch.dtype) -> None:
    """Check states ``[B, T, width]``; ``torch.autocast`` allows other floating point dtypes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor [B, T, {width}], got {type(x).__name__}")
    if x.dim() != 3 or x.shape[-1] != width or not (x.dtype == dtype or _is_autocast(x)):
        raise ValueError(
            f"x must be [B, T, {width}] in {dtype} for these heads, got {list(x.shape)} in {x.dtype}; "
            "convert it, and pass a single sequence as x.unsqueeze(0)"
        )


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias ``[width]``, or biases ``[heads, width]`` summed over the heads."""
    return x if bias is None else x + (bias if bias.dim() == 1 else bias.sum(0))


def repeat_for_query_heads(matrix: Any, num_heads: int) -> Any:
    return None if matrix is None else matrix.repeat_interleave(num_heads // matrix.shape[0], dim=0)


def read_matrix(name: str, array: Any, num_heads: int | None, layout: str) -> Tensor:
    """Return an array as ``[heads, in, out]``; ``from_arrays`` lists the shapes that it may have."""
    matrix = _read_array(name, array, layout)
    shape = list(matrix.shape)
    if matrix.dim() == 3:
        if not shape[0] or num_heads not in (None, shape[0]):
            expected = num_heads or "at least 1"
            raise ValueError(f"{name} of shape {shape} has {shape[0]} heads, expected {expected}")
        return matrix.contiguous()
    if matrix.dim() != 2:
        raise ValueError(f"{name} must have 2 or 3 axes, got shape {shape}")
    if num_heads is None:
        raise ValueError(f"{name} has its heads side by side, shape {shape}: pass num_heads=...")
    if shape[1] % num_heads:
        raise ValueError(f"{name} of shape {shape} (row layout) does not split into {num_heads} heads")
    return matrix.reshape(matrix.shape[0], num_heads, -1).transpose(0, 1).contiguous()


def read_parameter(name: str, array: Any, *shapes: tuple[int, ...], layout: str = "row") -> Any:
    """Return an array as a parameter, reshaped to the first shape if it has fewer axes."""
    if array is None:
        return None
    matrix = _read_array(name, array, layout)
    if tuple(matrix.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must be {expected} in row layout, got {list(matrix.shape)}")
    matrix = matrix.reshape(shapes[0]) if matrix.dim() < len(shapes[0]) else matrix
    return nn.Parameter(matrix.contiguous())


def _read_array(name: str, array: Any, layout: str) -> Tensor:
    """Copy an array to a floating point tensor in row layout."""
    try:
        matrix = torch.as_tensor(array).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be an array or nested lists of numbers, got {quote(array)}") from None
    if not matrix.is_floating_point():
        raise TypeError(f"{name} must hold floating point numbers, got {matrix.dtype}")
    return matrix.mT if layout == "column" and matrix.dim() in (2, 3) else matrix


def check_shapes(W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> None:
    if W_K.shape[:2] != W_V.shape[:2]:
        raise ValueError(f"W_K {list(W_K.shape)} and W_V {list(W_V.shape)} must agree in heads and width")
    if W_Q.shape[2] != W_K.shape[2]:
        raise ValueError(f"W_Q and W_K must have the same head_dim, got {W_Q.shape[2]} and {W_K.shape[2]}")
    if W_Q.shape[0] % W_K.shape[0]:
        raise ValueError(f"W_Q has {W_Q.shape[0]} heads, not a multiple of the {W_K.shape[0]} of W_K")
