"""Weight matrices from arrays, as ``[heads, in, out]``, and the products they take part in."""

from typing import Any

import torch
from torch import nn

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Tensor

# The product of fewer tokens with larger matrices takes less time than a copy of the matrices.
FEW_TOKENS, LARGE_MATRIX = 64, 2**14


def project(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W_h + b_h`` of each head: [batch, tokens, in] -> [batch, heads, tokens, out]."""
    check_states(x, matrix.shape[1], matrix.dtype)
    (batch, tokens), (heads, width, dim) = x.shape[:2], matrix.shape
    # A compiled program is for any number of tokens.
    few = not torch.compiler.is_compiling() and batch * tokens <= FEW_TOKENS
    if few and width * dim >= LARGE_MATRIX:
        result = torch.bmm(x.reshape(1, -1, width).expand(heads, -1, -1), matrix)
        result = result.view(heads, batch, tokens, dim).transpose(0, 1)
    else:
        # One product, whose matrix is a copy; reshape takes a third of the time of flatten.
        side_by_side = matrix.transpose(0, 1).reshape(width, heads * dim)
        result = torch.mm(x.reshape(batch * tokens, width), side_by_side)
        result = result.view(batch, tokens, heads, dim).transpose(1, 2)
    return result if bias is None else (result + bias.unsqueeze(1)).to(result.dtype)


def like_products(x: Tensor) -> Tensor:
    """``x`` in the dtype that its product with a matrix has: that of ``torch.autocast`` where it is on."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if _autocasts(x) else x


def _autocasts(x: Tensor) -> bool:
    fits = not x.is_meta and x.is_floating_point() and x.dtype != torch.float64
    return fits and torch.is_autocast_enabled(x.device.type)


def check_heads(heads: Any) -> None:
    known = ("receive", "send", "collect")
    if not isinstance(heads, nn.Module) or not all(callable(getattr(heads, name, None)) for name in known):
        got = f"{type(heads).__name__}; see gnn_attention.heads_of for a model's"
        raise TypeError(f"heads must have receive, send and collect, as StandardHeads, got {got}")


def check_states(x: Tensor, width: int, dtype: torch.dtype) -> None:
    """TypeError or ValueError for states that do not fit; ``torch.autocast`` allows other float dtypes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor [B, T, {width}], got {type(x).__name__}")
    if x.dim() != 3 or x.shape[-1] != width or not (x.dtype == dtype or _autocasts(x)):
        got = f"{list(x.shape)} in {x.dtype}; convert it, and give one sequence as x.unsqueeze(0)"
        raise ValueError(f"x must be [B, T, {width}] in {dtype} for these heads, got {got}")


def plus_bias(update: Tensor, b_O: Tensor | None) -> Tensor:
    return update if b_O is None else update + (b_O if b_O.dim() == 1 else b_O.sum(0))


def repeat_for_query_heads(matrix: Any, num_heads: int) -> Any:
    """One matrix (or bias) for each query head from one for each key/value head."""
    return None if matrix is None else matrix.repeat_interleave(num_heads // matrix.shape[0], dim=0)


def heads_first(name: str, array: Any, num_heads: int | None, layout: str) -> Tensor:
    """One matrix [heads, in, out] from any accepted form of it."""
    matrix = _in_rows(name, array, layout)
    shape = list(matrix.shape)
    if matrix.dim() == 3:
        if not shape[0] or num_heads not in (None, shape[0]):
            raise ValueError(f"{name} of shape {shape} has {shape[0]} heads, expected {num_heads or 'some'}")
        return matrix.contiguous()
    if matrix.dim() != 2:
        raise ValueError(f"{name} must have 2 or 3 axes, got shape {shape}")
    if num_heads is None:
        raise ValueError(f"{name} has heads side by side, shape {shape}: give num_heads")
    if shape[1] % num_heads:
        raise ValueError(f"{name} of shape {shape} (row layout) does not split into {num_heads} heads")
    return matrix.reshape(matrix.shape[0], num_heads, -1).transpose(0, 1).contiguous()


def parameter(name: str, array: Any, *shapes: tuple[int, ...], layout: str = "row") -> nn.Parameter | None:
    """A parameter of the first shape from an array of one of the shapes (more axes stay); None from None."""
    if array is None:
        return None
    matrix = _in_rows(name, array, layout)
    if tuple(matrix.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must be {expected} in row layout, got {list(matrix.shape)}")
    is_flat = matrix.dim() < len(shapes[0])
    return nn.Parameter((matrix.reshape(shapes[0]) if is_flat else matrix).contiguous())


def _in_rows(name: str, array: Any, layout: str) -> Tensor:
    """A copy as a tensor of floats, in row layout."""
    try:
        matrix = torch.as_tensor(array).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be an array or nested lists of numbers, got {quote(array)}") from None
    if not matrix.is_floating_point():
        raise TypeError(f"{name} must hold floating point numbers, got {matrix.dtype}")
    return matrix.mT if layout == "column" and matrix.dim() in (2, 3) else matrix


def check_fit(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1]:
        shapes = f"{list(k.shape)} and {list(v.shape)}"
        raise ValueError(f"W_K and W_V must have the same heads and input width, got {shapes}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"W_Q and W_K must have the same head_dim, got {q.shape[2]} and {k.shape[2]}")
    if q.shape[0] % k.shape[0]:
        raise ValueError(f"W_Q has {q.shape[0]} heads, expected a multiple of those of W_K, {k.shape[0]}")
