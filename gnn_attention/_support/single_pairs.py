"""Call functions of one pair, such as FlexAttention's mask_mods and score_mods, on many pairs.

Such a function may look up vectors in tables by its indices and multiply or sum them. With tensors
of indices it would raise an error, or silently compute something else, so ``torch.vmap`` calls it.
If all its operators are elementwise, it is called directly, which is faster.
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
# vmap maps at most this many pairs at once, because it copies the table rows that they look up.
MAX_PAIRS_PER_CHUNK = 2**16
# Elementwise operators that lack torch's tag "pointwise".
POINTWISE_OPS = {"_to_copy", "alias", "detach", "expand", "floor_divide", "full_like", "masked_fill"}
POINTWISE_OPS |= {"masked_fill_", "ones_like", "rsub", "zeros_like"}


class _LookUpMode(TorchFunctionMode):
    """Replace ``table[index]`` by an operator, as ``vmap`` cannot convert indices to Python numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            entries = [i for i in index if not (isinstance(i, slice) and i == slice(None))]
            if all(isinstance(i, Tensor) or type(i) is int for i in entries):
                indices = [None if isinstance(i, slice) else torch.as_tensor(i) for i in index]
                return torch.ops.aten.index.Tensor(args[0], indices)
        return func(*args, **(kwargs or {}))


def map_pairs(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Broadcast ``inputs``, and call ``function`` on each tuple of entries using ``torch.vmap``."""
    # FlexAttention's kernels themselves call the function with scalars.
    if all(x.dim() == 0 for x in inputs):
        return function(*inputs)

    # vmap reads its function's ``__name__``, which a callable may lack in a compiled program.
    def call_pair(*scalars: Tensor) -> Tensor:
        return function(*scalars)

    tensors = torch.broadcast_tensors(*inputs)  # type: ignore[no-untyped-call]
    # A compiled program would repeat the function for each chunk, and it fuses the look-ups anyway.
    is_one_chunk = torch.compiler.is_compiling() or tensors[0].numel() <= MAX_PAIRS_PER_CHUNK
    chunk_size = None if is_one_chunk else MAX_PAIRS_PER_CHUNK
    with _LookUpMode():
        call_pairs = torch.vmap(call_pair, randomness="different", chunk_size=chunk_size)
        result: Tensor = call_pairs(*(x.reshape(-1) for x in tensors))
    if result.dim() != 1:
        raise ValueError(f"a function of one pair must return a scalar, got shape {list(result.shape[1:])}")
    return result.view(tensors[0].shape)


def call_on_tensors(name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call ``function`` on all pairs at once; raise TypeError if it fails."""
    try:
        return function(*inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be made of tensor operators "
            f"(torch.where instead of if, & instead of and, a tensor instead of a list): {error}"
        ) from error


def broadcasts(function: Any) -> bool:
    """Return whether ``function`` is from a package whose functions are known to broadcast."""
    while isinstance(function, partial):
        function = function.func
    owner = function if isinstance(function, FunctionType) else type(function)
    return (owner.__module__ or "").split(".")[0] in BROADCASTING_PACKAGES


def call_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new thread, outside of the modes, transforms and compiler of the caller."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def needs_single_pairs(
    call: Callable[[Callable[..., Tensor]], Tensor], function: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> bool | None:
    """False if all operators are elementwise, else True if ``vmap`` can map the call, else None.

    ``call(function)`` returns the checked result for ``inputs``, which all have four axes.
    """
    # A user's function may raise any exception if it gets tensors of indices, or under vmap.
    with suppress(Exception), _OperatorProbe(inputs) as probe:
        call(function)
        if probe.is_elementwise:
            return False
    with suppress(Exception):
        call(partial(map_pairs, function))
        return True
    return None


class _OperatorProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record whether each operator on the pairs is elementwise or looks up scalars."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_elementwise = True
        # Tensors are recognised by id. They are kept alive, so that no new tensor reuses an id.
        self._pair_tensors = {id(x): x for x in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        result = func(*args, **(kwargs or {}))
        if any(id(x) in self._pair_tensors for x in tensors):
            name = func.overloadpacket.__name__
            if name == "index":
                # One integer index for each axis returns a scalar; a bool index is a mask.
                table, indices = tensors[0], tensors[1:]
                has_integer_indices = all(x.dtype not in (torch.bool, torch.uint8) for x in indices)
                self.is_elementwise &= len(indices) == table.dim() and has_integer_indices
                tensors = [x for x in indices if x is not table]
            else:
                self.is_elementwise &= name in POINTWISE_OPS or torch.Tag.pointwise in func.tags
            self.is_elementwise &= all(id(x) in self._pair_tensors or x.numel() == 1 for x in tensors)
            self._pair_tensors |= {id(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result
