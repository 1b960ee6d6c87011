"""Functions of one pair, as FlexAttention writes its mask_mods and score_mods, on all pairs at once.

Such a function may take vectors from tables by its indices, and multiply or sum them up. Called with tensors
of indices it would raise an error, or compute something else in silence. ``torch.vmap`` calls it instead, but
for functions whose operators all work number by number, which are faster without.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnn_attention._support.shapes import Tensor

T = TypeVar("T")
BROADCASTING_PACKAGES = ("gnn_attention", "transformers")
# More pairs are mapped in parts, because the rows of a table that they look up are copied.
MOST_PAIRS = 2**16
# These operators work number by number, but have no tag that says it.
POINTWISE = {"_to_copy", "alias", "detach", "expand", "floor_divide", "full_like", "masked_fill"}
POINTWISE |= {"masked_fill_", "ones_like", "rsub", "zeros_like"}


class _LookUps(TorchFunctionMode):
    """Look up ``table[index]`` by an operator, because ``vmap`` cannot make a Python number of an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            numbers = [i for i in index if not (isinstance(i, slice) and i == slice(None))]
            if all(isinstance(i, Tensor) or type(i) is int for i in numbers):
                at = [None if isinstance(i, slice) else torch.as_tensor(i) for i in index]
                return torch.ops.aten.index.Tensor(table, at)
        return func(*args, **(kwargs or {}))


def map_pairs(function: Callable[..., Tensor], *ends: Tensor) -> Tensor:
    """``function`` of the numbers of each place of ``ends``, which broadcast."""
    # FlexAttention's kernels call the function with single numbers themselves.
    if all(end.dim() == 0 for end in ends):
        return function(*ends)

    # vmap asks for the name of its function, which an object may not have in a compiled program
    def of_one_pair(*numbers: Tensor) -> Tensor:
        return function(*numbers)

    wide = torch.broadcast_tensors(*ends)  # type: ignore[no-untyped-call]
    # a compiled program would repeat the function for each part, and fuses the rows instead
    in_parts = not torch.compiler.is_compiling() and wide[0].numel() > MOST_PAIRS
    with _LookUps():
        mapped = torch.vmap(of_one_pair, randomness="different", chunk_size=MOST_PAIRS if in_parts else None)
        result: Tensor = mapped(*(end.reshape(-1) for end in wide))
    if result.dim() != 1:
        raise ValueError(f"a function of one pair must return one number, got shape {list(result.shape[1:])}")
    return result.view(wide[0].shape)


def call_at_once(name: str, function: Callable[..., Tensor], *ends: Tensor) -> Tensor:
    """``function`` of all pairs at once; TypeError naming it where it is not made of tensor operators."""
    try:
        return function(*ends)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be made of tensor operators "
            f"(torch.where instead of if, & instead of and, a tensor instead of a list): {error}"
        ) from error


def broadcasts(function: Any) -> bool:
    """True for functions of packages whose functions broadcast, which need no probe."""
    while isinstance(function, partial):
        function = function.func
    owner = function if isinstance(function, FunctionType) else type(function)
    return (owner.__module__ or "").split(".")[0] in BROADCASTING_PACKAGES


def call_apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread of its own, which no mode, transform or compiler of the caller sees."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def needs_single_pairs(
    call: Callable[[Callable[..., Tensor]], Tensor], function: Callable[..., Tensor], ends: Sequence[Tensor]
) -> bool | None:
    """False if all operators of a call work number by number, else True if ``vmap`` can map it, else None.

    ``call`` checks and returns the result of a function for the pairs ``ends``, all of four axes.
    """
    # A user's function may raise anything when it is given tensors of indices, and under vmap.
    with suppress(Exception), _Operators(ends) as operators:
        call(function)
        if operators.keep_pairs_apart:
            return False
    with suppress(Exception):
        call(partial(map_pairs, function))
        return True
    return None


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether each operator works number by number, or looks a number up in a table."""

    def __init__(self, ends: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keep_pairs_apart = True
        # They are known by identity. Keeping them prevents that a new tensor gets the identity of an old one.
        self._of_pairs = {id(end): end for end in ends}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        result = func(*args, **(kwargs or {}))
        if any(id(x) in self._of_pairs for x in tensors):
            name = func.overloadpacket.__name__
            if name == "index":
                # An index of each axis gives a number; one of bool would be a mask.
                table, indices = tensors[0], tensors[1:]
                are_places = all(x.dtype not in (torch.bool, torch.uint8) for x in indices)
                self.keep_pairs_apart &= len(indices) == table.dim() and are_places
                tensors = [x for x in indices if x is not table]
            else:
                self.keep_pairs_apart &= name in POINTWISE or torch.Tag.pointwise in func.tags
            self.keep_pairs_apart &= all(id(x) in self._of_pairs or x.numel() == 1 for x in tensors)
            self._of_pairs |= {id(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result
