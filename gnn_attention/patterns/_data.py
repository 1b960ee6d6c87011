"""Check the axes of a builder's data, and prepare tables for its rules.

Data of shape ``[...]``, ``[heads, ...]`` or ``[batch, heads, ...]`` get shape ``[batch, heads, ...]``.
``sizes`` has ``heads`` and ``batch`` for ``TokenGraph.from_rule``, but no ``heads`` if there is only one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.symbols import dst, look_up, src

Sizes = Mapping[str, Any]


def expand_axes(name: str, data: Any, axes: str) -> tuple[Tensor, Sizes]:
    """Return a copy of ``data`` as ``[batch, heads, *axes]`` on the CPU, and its ``sizes``.

    Lists become int64 or float64. Raises TypeError unless the data are numbers, and ValueError for
    a wrong number of axes, a leading axis of size 0, or NaN.
    """
    if not isinstance(data, Tensor):
        try:
            # torch would convert Python floats to float32.
            tensor = torch.as_tensor(data, device="cpu")
            dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
            data = torch.as_tensor(data, dtype=dtype, device="cpu")
        except (RuntimeError, TypeError, ValueError):
            raise TypeError(f"{name} must be a tensor or a table of numbers, got {quote(data)}") from None
    if data.dtype == torch.bool or data.is_complex():
        raise TypeError(f"{name} must be a tensor of numbers, got {data.dtype}")
    num_leading_axes = data.dim() - len(axes.split())
    if not 0 <= num_leading_axes <= 2 or 0 in data.shape[:num_leading_axes]:
        shape = axes.replace(" ", ", ")
        raise ValueError(
            f"{name} must be [{shape}], [heads, {shape}] or [batch, heads, {shape}], got {list(data.shape)}"
        )
    if data.is_floating_point() and bool(data.isnan().any()):
        raise ValueError(f"{name} must hold no NaN, because NaN has no order")
    sizes = dict(zip(("batch", "heads")[2 - num_leading_axes :], data.shape, strict=False))
    if num_leading_axes == 2 and sizes["heads"] == 1:
        del sizes["heads"]
    dtype = torch.promote_types(data.dtype, torch.float32) if data.is_floating_point() else torch.int64
    return data.detach().to("cpu", dtype, copy=True)[(None,) * (2 - num_leading_axes)], sizes


def expand_integers(name: str, data: Any, axes: str) -> tuple[Tensor, Sizes]:
    """Expand integers as :func:`expand_axes` does, to int64; raise TypeError for other numbers."""
    values, sizes = expand_axes(name, data, axes)
    if values.is_floating_point() and values.numel():
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    return values.long(), sizes


def int64_tensor(values: Sequence[int]) -> Int[Tensor, " tokens"]:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def segment_ids(sizes: Sequence[int]) -> Int[Tensor, " tokens"]:
    return torch.arange(len(sizes), device="cpu").repeat_interleave(int64_tensor(sizes))


def index_to_mask(index: Sequence[int], size: int) -> Bool[Tensor, " size"]:
    mask = torch.zeros(size, dtype=torch.bool, device="cpu")
    mask[index] = True
    return mask


def expand_queries_and_keys(q: Any, k: Any, *axes: int) -> tuple[Tensor, Tensor, Sizes]:
    """Return ``q`` and ``k`` as ``[batch, heads, n, dim]``; batch, heads, dim and ``axes`` must agree."""
    queries, sizes = expand_axes("q", q, "n dim")
    keys, _ = expand_axes("k", k, "n dim")
    for axis in (0, 1, -1, *axes):
        if queries.shape[axis] != keys.shape[axis]:
            raise ValueError(
                f"q and k must agree in axis {axis} of [batch, heads, n, dim], got {list(queries.shape)} and "
                f"{list(keys.shape)}; repeat shared keys with repeat_interleave"
            )
    return queries, keys, sizes


def drop_axes(table: Tensor, sizes: Sizes) -> Tensor:
    """Drop the leading axes ``[batch, heads]`` that ``sizes`` lacks, for ``rules.look_up``."""
    return (table if "batch" in sizes else table[0] if "heads" in sizes else table[0, 0]).contiguous()


def has_same_label(dst_labels: Tensor, src_labels: Tensor | None = None) -> Any:
    """Return the rule that both tokens have the same label; ``src_labels`` defaults to ``dst_labels``."""
    return look_up(dst_labels, dst) == look_up(dst_labels if src_labels is None else src_labels, src)
