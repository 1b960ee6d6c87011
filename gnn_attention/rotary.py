"""Rotary position embedding: rotate queries and keys by angles that grow with the position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor

__all__ = ["Rotary"]


@dataclass(frozen=True)
class Rotary:
    """Rotate queries and keys: at position p, channel pair i turns by ``p * base^(-2 i / dim)``.

    The dot product of two rotated vectors depends only on the distance of their positions:
    ``(R_p q) . (R_s k) = q . R_(s - p) k``. ``interleaved=False`` pairs channels i and i + dim/2
    (Llama, GPT-NeoX), True pairs 2i and 2i + 1 (RoFormer, GPT-J). ``frequencies`` are the angles of
    the pairs at position 1; if passed, they replace the powers of ``base`` (Llama 3, YaRN).

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), section 3.2.2.

    >>> Rotary().turn(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).tolist()
    [[1.0, 0.0]]
    """

    base: float = 10000.0
    interleaved: bool = False
    frequencies: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        checks.number("base", self.base, positive=True)
        if self.frequencies is None:
            return
        try:
            object.__setattr__(self, "frequencies", tuple(map(float, self.frequencies)))
        except (TypeError, ValueError):
            values = checks.quote(self.frequencies)
            raise TypeError(f"frequencies must be numbers, one per pair of channels, got {values}") from None
        if not all(map(math.isfinite, self.frequencies)):
            raise ValueError(f"frequencies must be finite, got {self.frequencies}")

    def turn(
        self, x: Float[Tensor, "*lead tokens dim"], positions: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "*lead tokens dim"]:
        """Rotate row t of ``x`` to ``positions[t]``, in float32 or better; ValueError if dim is odd."""
        if positions.shape != x.shape[-2:-1]:
            shape, num_tokens = list(positions.shape), x.shape[-2]
            raise ValueError(f"positions must have shape [{num_tokens}], one for each token, got {shape}")
        upcast = x if x.dtype == torch.float64 else x.float()
        cos, sin = (table.to(upcast.dtype) for table in self._angles(x.shape[-1], positions))
        if self.interleaved:
            a, b = upcast[..., 0::2], upcast[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
        a, b = upcast.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

    def matrix(self, distance: int, dim: int) -> Float[Tensor, "dim dim"]:
        """Return R with ``(R_dst q) . (R_src k) = q^T R k`` for ``distance = dst - src``, in float64."""
        identity = torch.eye(dim, dtype=torch.float64)
        return self.turn(identity.unsqueeze(1), torch.tensor([distance])).squeeze(1)

    def _angles(self, dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines ``[tokens, dim / 2]`` of all angles, in float64."""
        if dim % 2:
            raise ValueError(f"rotary rotates pairs of channels: head_dim must be even, got {dim}")
        options: dict[str, Any] = {"dtype": torch.float64, "device": positions.device}
        if self.frequencies is None:
            frequencies = self.base ** (-torch.arange(0, dim, 2, **options) / dim)
        else:
            frequencies = torch.tensor(self.frequencies, **options)
        length, num_pairs = len(frequencies), dim // 2
        if length != num_pairs:
            raise ValueError(f"expected {num_pairs} frequencies, one per pair of channels, got {length}")
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
        return angles.cos(), angles.sin()
