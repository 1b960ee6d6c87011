"""Dropout keyed by the edge: seed, sample, head, receiver and sender alone decide what is dropped.

So the same edges are dropped by every backend, in the transposed pass, and on whichever rank has the
receiver. The numbers are those of SplitMix64, one generator a sample and head, entered at the pair's number:

    ``stream = mix(seed + G * (2^32 sample + head + 1))``,  ``bits = mix(stream + G * (2^32 dst + src + 1))``

(mod 2^64), and a weight stays iff the 24 high bits of ``bits`` are at least ``p * 2^24``, rounded.

Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", section 4.
"""

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor

AT_ONCE = 2**18  # weights whose numbers are drawn together, in 4 MiB
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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
    """Which weights stay, for absolute positions that broadcast; sample, head, dst and src below 2^31."""
    stream = _mix_bits(seed + ((sample.long() << 32) + head.long() + 1) * _as_signed(GOLDEN))
    bits = _mix_bits(stream + ((dst.long() << 32) + src.long() + 1) * _as_signed(GOLDEN))
    return _shift_right(bits, 40) >= threshold(probability)


def sample_and_head(
    x: Float[Tensor, "batch heads ..."], first_sample: int, first_head: int
) -> tuple[Int[Tensor, "batch one ..."], Int[Tensor, "one heads ..."]]:
    """The numbers of the samples and heads of ``x``, with as many axes as it has."""
    lead = (1,) * (x.dim() - 2)
    sample = torch.arange(first_sample, first_sample + x.shape[0], device=x.device).view(-1, 1, *lead)
    head = torch.arange(first_head, first_head + x.shape[1], device=x.device).view(1, -1, *lead)
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
    """``weights / (1 - p)`` where they stay, else 0; absolute dst and src broadcast to axes after the heads.

    >>> weights, ends = torch.ones(1, 1, 6), torch.arange(6)
    >>> drop_weights(weights, torch.tensor(1), 0.5, ends, ends).unique().tolist()
    [0.0, 2.0]
    """
    if not probability:
        return weights
    if seed is None:
        raise ValueError(f"dropout {probability} needs a seed, got None; give seed=draw_seed(device)")
    sample, head = sample_and_head(weights, first_sample, first_head)
    one_by_one = weights.numel() > AT_ONCE and weights.shape[1] > 1 and not torch.compiler.is_compiling()
    # a number takes 16 bytes while it is drawn: those of one head at a time, where they are many
    heads = [each.unsqueeze(1) for each in head.unbind(1)] if one_by_one else [head]
    drawn = [mask(seed, sample, each, dst, src, probability) for each in heads]
    stays = torch.cat(drawn, dim=1) if one_by_one else drawn[0]
    return weights.masked_fill(~stays, 0.0).mul_(weights.new_ones(()).div_(1.0 - probability))


def _mix_bits(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, whose bits all depend on all bits of z; in place."""
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_as_signed(FIRST))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_as_signed(SECOND))
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, by: int) -> Tensor:
    """A shift to the right that fills up with zeros: torch's own repeats the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _as_signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
