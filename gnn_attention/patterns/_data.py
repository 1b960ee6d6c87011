"""Data that a graph is made from.

Its axes, and tables by sample and head that a rule looks up. Data come as ``[...]``,
``[heads, ...]`` or ``[batch, heads, ...]`` (heads 1 = the same for all) and are worked on as
``[batch, heads, ...]``; ``sizes`` is what ``TokenGraph.from_rule`` takes for the axes that were there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.symbols import dst, look_up, src

Sizes = Mapping[str, Any]


def all_axes(name: str, data: Any, axes: str) -> tuple[Tensor, Sizes]:
    """A copy as ``[batch, heads, *axes]`` on the CPU, and the leading sizes; lists become int64 or float64.

    TypeError for anything but numbers, ValueError for another number of axes or NaN.
    """
    if not isinstance(data, Tensor):
        try:
            listed = torch.as_tensor(data, device="cpu")
            # torch reads Python's floats as float32.
            dtype = torch.float64 if listed.is_floating_point() else listed.dtype
            data = torch.as_tensor(data, dtype=dtype, device="cpu")
        except (RuntimeError, TypeError, ValueError):
            wanted = "a tensor or lists of numbers of one length"
            raise TypeError(f"{name} must be {wanted}, got {checks.quote(data)}") from None
    if data.dtype == torch.bool or data.is_complex():
        raise TypeError(f"{name} must be a tensor of numbers, got {data.dtype}")
    form, extra = axes.replace(" ", ", "), data.dim() - len(axes.split())
    if not 0 <= extra <= 2 or 0 in data.shape[:extra]:
        wanted = f"[{form}], [heads, {form}] or [batch, heads, {form}]"
        raise ValueError(f"{name} must be {wanted}, got {list(data.shape)}")
    if data.is_floating_point() and bool(data.isnan().any()):
        raise ValueError(f"{name} must hold no NaN: what is the largest or the nearest would be undefined")
    sizes = dict(zip(("batch", "heads")[2 - extra :], data.shape, strict=False))
    if extra == 2 and sizes["heads"] == 1:
        del sizes["heads"]
    wide = torch.promote_types(data.dtype, torch.float32) if data.is_floating_point() else torch.int64
    return data.detach().to("cpu", wide, copy=True)[(None,) * (2 - extra)], sizes


def whole_numbers(name: str, data: Any, axes: str) -> tuple[Tensor, Sizes]:
    """:func:`all_axes` of integers; TypeError for anything else."""
    numbers, sizes = all_axes(name, data, axes)
    if numbers.is_floating_point() and numbers.numel():
        raise TypeError(f"{name} must be integers, got {numbers.dtype}")
    return numbers.long(), sizes


def table(numbers: Sequence[int]) -> Int[Tensor, " tokens"]:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def owners(sizes: Sequence[int]) -> Int[Tensor, " tokens"]:
    return torch.arange(len(sizes), device="cpu").repeat_interleave(table(sizes))


def mark_positions(places: Sequence[int], count: int) -> Bool[Tensor, " count"]:
    marks = torch.zeros(count, dtype=torch.bool, device="cpu")
    marks[places] = True
    return marks


def queries_and_keys(q: Any, k: Any, *same: int) -> tuple[Tensor, Tensor, Sizes]:
    """Both as ``[batch, heads, n, dim]``; ValueError unless they agree in all axes but n, and in ``same``."""
    (queries, sizes), (keys, _) = all_axes("q", q, "n dim"), all_axes("k", k, "n dim")
    for axis in (0, 1, -1, *same):
        if queries.shape[axis] != keys.shape[axis]:
            got = f"got {list(queries.shape)} and {list(keys.shape)} as [batch, heads, n, dim]"
            hint = "repeat_interleave keys that several heads share"
            raise ValueError(f"q and k must agree in axis {axis}, {got}; {hint}")
    return queries, keys, sizes


def own_axes(table: Tensor, sizes: Sizes) -> Tensor:
    """``[batch, heads, ...]`` without the leading axes that do not vary, as ``rules.look_up`` expects."""
    return (table if "batch" in sizes else table[0] if "heads" in sizes else table[0, 0]).contiguous()


def same(ours: Tensor, theirs: Tensor | None = None) -> Any:
    """Whether the entry of the receiver is that of the sender, in another table if there is one."""
    return look_up(ours, dst) == look_up(ours if theirs is None else theirs, src)
