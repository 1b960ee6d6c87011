"""A kernel that the compile gate is tried on."""

import torch
import triton
import triton.language as tl


@triton.jit
def spilling(x, out, SIZE: tl.constexpr):
    """Hold more at once than there are registers for."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    a = tl.load(x + i * SIZE + j).to(tl.float32)
    b = tl.load(x + SIZE * SIZE + i * SIZE + j).to(tl.float32)
    for _ in range(4):
        total = tl.sum(a * b, 1)
        a, b = a + total[:, None], b * total[:, None]
    tl.store(out + i * SIZE + j, a + b)


def launch_spilling():
    """Two tables of 128 x 128 on four warps: 256 numbers a thread."""
    spilling[(1,)](torch.zeros(2, 128, 128), torch.zeros(128, 128), 128, num_warps=4)
