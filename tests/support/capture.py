"""What a CUDA graph may not capture, as a mode that raises wherever there is a GPU or not."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FORBIDDEN_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# numbers of the host on their way to a tensor, and a question that the host asks
FORBIDDEN = {"aten::lift_fresh", "aten::equal", "aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"}


class CaptureError(RuntimeError):
    """What ends a capture on a GPU."""


class CaptureRules(TorchDispatchMode):
    """Raises for what waits for the device, moves between devices, or has a size that depends on numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        sized = func.name() == "aten::repeat_interleave.Tensor" and given.get("output_size") is not None
        # of a bool index, the number of entries is known to the device alone
        by_numbers = func.name() == "aten::index.Tensor" and all(
            index is None or index.dtype != torch.bool for index in args[1]
        )
        moved = func.name().startswith(("aten::_to_copy", "aten::copy_")) and _moves(args, given)
        if (
            moved
            or func.name() in FORBIDDEN
            or (FORBIDDEN_TAGS & set(func.tags) and not (sized or by_numbers))
        ):
            raise CaptureError(func.name())
        return func(*args, **given)


def _moves(args: Any, given: Any) -> bool:
    """Whether a copy names a device, or has tensors on two; on a CPU ``to`` another one makes the call."""
    devices = {x.device for x in args if isinstance(x, torch.Tensor)}
    return given.get("device") is not None or len(devices) > 1
