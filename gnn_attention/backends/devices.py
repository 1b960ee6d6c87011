"""Which devices compute while the host goes on, and when nothing may depend on their numbers."""

from typing import Any

import torch

from gnn_attention._support.shapes import Tensor

ASYNCHRONOUS = ("cuda",)  # the host would wait for their numbers


def is_program(x: Tensor) -> bool:
    """True while what is called is compiled, or recorded as a CUDA graph."""
    if torch.compiler.is_compiling() or x.device.type not in ASYNCHRONOUS:
        return torch.compiler.is_compiling()
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
