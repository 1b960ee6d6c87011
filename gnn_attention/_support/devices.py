"""Devices that compute asynchronously, and programs that must not depend on computed values."""

from typing import Any

import torch

from gnn_attention._support.shapes import Tensor

ASYNCHRONOUS = ("cuda",)  # On these devices, reading a value makes the host wait.


def is_compiling_or_capturing(x: Tensor) -> bool:
    """True while the calling program is compiled, or captured as a CUDA graph."""
    if torch.compiler.is_compiling() or x.device.type not in ASYNCHRONOUS:
        return torch.compiler.is_compiling()
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
