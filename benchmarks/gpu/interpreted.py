"""Whether Triton's interpreter works with the NumPy that is there: a rehearsal on a CPU depends on it."""

from __future__ import annotations

import functools

import numpy
import torch
import triton
import triton.language as tl

from benchmarks.process import one_line

__all__ = ["unable"]


@functools.cache
def unable() -> str | None:
    """Why no kernel can be interpreted here; None if they can.

    Triton 3.6 counts a loop by ``range`` of an array of one number, which NumPy refuses from 2.4 on.
    """
    given, counted = torch.tensor([5]), torch.zeros(1, dtype=torch.int64)
    try:
        _loop[(1,)](given, counted)
    except Exception as error:
        versions = f"triton {triton.__version__} interprets no kernel with numpy {numpy.__version__}"
        return f"{versions} ({one_line(error.__cause__ or error)})"
    return None if int(counted) == 5 else f"a loop of 5 steps was interpreted as {int(counted)}"


@triton.jit
def _loop(STEPS, COUNTED):  # type: ignore[no-untyped-def]
    counted = tl.load(COUNTED)
    for _ in range(tl.load(STEPS)):
        counted += 1
    tl.store(COUNTED, counted)
