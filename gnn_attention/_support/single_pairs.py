"""Functions of one pair, as FlexAttention writes its mask_mods and score_mods, on all pairs at once.

Such a function may take vectors from tables by its indices, and multiply or sum them up. Called with tensors
of indices it would raise an error, or compute something else in silence. ``torch.vmap`` calls it instead.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gnn_attention._support.shapes import Tensor

# packages whose functions of indices broadcast
BROADCASTING = ("gnn_attention", "transformers")


class _LookUps(TorchFunctionMode):
    """Look up ``table[index]`` by an operator, because ``vmap`` cannot make a Python number of an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(i == slice(None) if isinstance(i, slice) else _is_index(i) for i in index):
                at = [None if isinstance(i, slice) else torch.as_tensor(i) for i in index]
                return torch.ops.aten.index.Tensor(table, at)
        return func(*args, **(kwargs or {}))


def _is_index(index: object) -> bool:
    return isinstance(index, (int, Tensor)) and not isinstance(index, bool)


def map_pairs(function: Callable[..., Tensor], *ends: Tensor) -> Tensor:
    """``function`` of the numbers of each place of ``ends``, which broadcast."""
    # FlexAttention's kernels call the function with single numbers themselves.
    if all(end.dim() == 0 for end in ends):
        return function(*ends)
    wide = torch.broadcast_tensors(*ends)  # type: ignore[no-untyped-call]
    with _LookUps():
        result: Tensor = torch.vmap(function)(*(end.reshape(-1) for end in wide))
    if result.dim() != 1:
        raise ValueError(f"a function of one pair must return one number, got shape {list(result.shape[1:])}")
    return result.view(wide[0].shape)


def probes(shape: Sequence[int], first: Sequence[int], device: Any) -> list[Tensor]:
    """A few numbers of each axis of ``[batch, heads, dst, src]``, as broadcastable tensors."""
    few = zip(shape, first, (2, 2, 3, 7), strict=True)
    numbers = [sorted({at + (size - 1) * i // (most - 1) for i in range(most)}) for size, at, most in few]
    axes = enumerate(torch.tensor(x, device=device) for x in numbers)
    return [x.view(-1, *[1] * (3 - axis)) for axis, x in axes]


def broadcasts(function: Any) -> bool:
    """True for functions of packages whose functions broadcast, which need no probe."""
    while isinstance(function, partial):
        function = function.func
    owner = function if isinstance(function, FunctionType) else type(function)
    return (owner.__module__ or "").split(".")[0] in BROADCASTING


def needs_single_pairs(
    call: Callable[[Callable[..., Tensor]], Tensor], function: Callable[..., Tensor], mapped: Any
) -> bool:
    """True if ``mapped`` computes the function, and calling it with tensors of indices does not.

    ``call`` checks and returns the result of either on a few pairs. A function that fails both ways counts as
    one that broadcasts, so that its own call raises its error.
    """
    try:
        alone = call(mapped)
    # A user's function may raise anything under vmap, and when it is given tensors of indices.
    except Exception:
        return False
    try:
        at_once = call(function)
    except Exception:
        return True
    return not torch.allclose(at_once.double(), alone.double(), equal_nan=True)
