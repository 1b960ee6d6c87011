"""A kernel that does nothing but gather rows and add them up: the ceiling of every kernel that gathers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gnn_attention._support.shapes import Float, Int, Tensor

__all__ = ["sums"]

EACH = 64  # rows that one program adds up


def sums(table: Float[Tensor, "rows width"], places: Int[Tensor, " places"]) -> Float[Tensor, "sums width"]:
    """The sum of every 64 rows in float32; ``width`` is a power of two, the number of places a multiple of
    64.
    """
    width = table.shape[1]
    out = torch.empty(len(places) // EACH, width, dtype=torch.float32, device=table.device)
    once = max(1, min(EACH, 2048 // width))
    # Triton launches on the current device
    with torch.cuda.device_of(table):  # type: ignore[no-untyped-call]
        _sums[(len(out),)](
            table, places, out, EACH=EACH, WIDTH=width, ONCE=once, num_warps=1 if width <= 128 else 4
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _sums(TABLE, PLACES, OUT, EACH: tl.constexpr, WIDTH: tl.constexpr, ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    lane = tl.arange(0, ONCE)
    total = tl.zeros([ONCE, WIDTH], tl.float32)
    for start in range(0, EACH, ONCE):
        row = tl.load(PLACES + program * EACH + start + lane).to(tl.int64)
        total += tl.load(TABLE + row[:, None] * WIDTH + channel[None, :]).to(tl.float32)
    tl.store(OUT + program * WIDTH + channel, tl.sum(total, 0))
