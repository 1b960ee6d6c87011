"""Dropout by a hash of the seed, sample, head, receiver and sender of an edge.

Thus all backends and ranks drop the same edges, also in the backward pass. The random numbers come
from SplitMix64, with a generator for each sample and head, which is evaluated at the index of a pair:

    ``stream = mix(seed + G * (2^32 sample + head + 1))``,  ``bits = mix(stream + G * (2^32 dst + src + 1))``

(mod 2^64). A weight is kept iff the 24 high bits of ``bits`` are at least ``round(p * 2^24)``.

Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", section 4.
"""

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor

WEIGHTS_PER_CHUNK = 2**18  # Random numbers for this many weights take 4 MiB.
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def draw_seed(device: torch.device) -> Int[Tensor, ""]:
    return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)


def threshold(probability: float) -> int:
    return round(probability * 2**24)


def mask(
    seed: Int[Tensor, ""],
    sample: Int[Tensor, "..."],
    head: Int[Tensor, "..."],
    dst: Int[Tensor, "..."],
    src: Int[Tensor, "..."],
    probability: float,
) -> Bool[Tensor, "..."]:
    """True for weights that are kept; the indices are absolute, below 2^31, and broadcast."""
    stream = _mix_bits(seed + ((sample.long() << 32) + head.long() + 1) * _as_signed(GOLDEN))
    bits = _mix_bits(stream + ((dst.long() << 32) + src.long() + 1) * _as_signed(GOLDEN))
    return _shift_right(bits, 40) >= threshold(probability)


def sample_and_head(
    x: Float[Tensor, "batch heads ..."], first_sample: int, first_head: int
) -> tuple[Int[Tensor, "batch 1 ..."], Int[Tensor, "1 heads ..."]]:
    """Return the indices of the samples and heads of ``x``, with as many axes as ``x``."""
    ones = (1,) * (x.dim() - 2)
    sample = torch.arange(first_sample, first_sample + x.shape[0], device=x.device).view(-1, 1, *ones)
    head = torch.arange(first_head, first_head + x.shape[1], device=x.device).view(1, -1, *ones)
    return sample, head


def drop_weights(
    weights: Float[Tensor, "batch heads ..."],
    seed: Int[Tensor, ""] | None,
    probability: float,
    dst: Int[Tensor, "..."],
    src: Int[Tensor, "..."],
    first_sample: int = 0,
    first_head: int = 0,
) -> Float[Tensor, "batch heads ..."]:
    """Divide kept weights by ``1 - p`` and zero the others; dst and src are absolute and broadcast.

    >>> weights, ends = torch.ones(1, 1, 6), torch.arange(6)
    >>> drop_weights(weights, torch.tensor(1), 0.5, ends, ends).unique().tolist()
    [0.0, 2.0]
    """
    if not probability:
        return weights
    if seed is None:
        raise ValueError(f"dropout {probability} needs a seed, got None; pass seed=draw_seed(device)")
    sample, head = sample_and_head(weights, first_sample, first_head)
    # Each random number takes 16 bytes, so numbers for large tensors are drawn head by head.
    is_large = weights.numel() > WEIGHTS_PER_CHUNK and not torch.compiler.is_compiling()
    head_chunks = torch.split(head, 1, dim=1) if is_large else [head]
    masks = [mask(seed, sample, head_chunk, dst, src, probability) for head_chunk in head_chunks]
    keep = torch.cat(masks, dim=1) if len(masks) > 1 else masks[0]
    return weights.masked_fill(~keep, 0.0).mul_(weights.new_ones(()).div_(1.0 - probability))


def _mix_bits(z: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer in place, which makes every bit depend on all bits of z."""
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_as_signed(FIRST_FACTOR))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_as_signed(SECOND_FACTOR))
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's own shift repeats the sign bit."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _as_signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
