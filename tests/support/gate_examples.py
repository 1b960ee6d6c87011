"""Kernels that the compile gate is tried on: well made, made of products, reading narrowly, spilling."""

import torch
import triton
import triton.language as tl


@triton.jit
def gather(x, rows, out, stride, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Sum ``COUNT`` rows of x."""
    number, lane = tl.program_id(0), tl.arange(0, WIDTH)
    row = tl.load(rows + number * COUNT + tl.arange(0, COUNT))
    read = tl.load(x + row.to(tl.int64)[:, None] * stride + lane[None, :])
    tl.store(out + number * WIDTH + lane, tl.sum(read.to(tl.float32), 0))


@triton.jit
def product(x, y, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """``x @ y``."""
    i, k, j = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    total = tl.dot(tl.load(x + i * K + k[None, :]), tl.load(y + k[:, None] * N + j))
    tl.store(out + i * N + j, total)


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


def launch_gather(dtype=torch.bfloat16, stride=64):
    """16 rows of 64, one program."""
    gather[(4,)](
        torch.zeros(32, stride, dtype=dtype),
        torch.zeros(64, dtype=torch.int32),
        torch.zeros(4, 64),
        stride,
        16,
        64,
    )


def launch_product(dtype=torch.bfloat16):
    """64 x 64 x 64 on one warp group."""
    product[(1,)](
        *(torch.zeros(64, 64, dtype=dtype) for _ in range(2)), torch.zeros(64, 64), 64, 64, 64, num_warps=4
    )


def launch_spilling():
    """Two tables of 128 x 128 on four warps: 256 numbers a thread."""
    spilling[(1,)](torch.zeros(2, 128, 128), torch.zeros(128, 128), 128, num_warps=4)
