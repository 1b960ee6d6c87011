"""The base class of all forms of attention heads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.heads import arrays
from gnn_attention.rotary import Rotary


def axis(parameter_name: str, index: int, doc: str) -> Any:
    """Make a property that returns the length of one axis of a parameter."""
    return property(lambda self: getattr(self, parameter_name).shape[index], doc=doc)


class HeadsBase(nn.Module):
    """Base class of all forms; subclasses define sizes, ``receive``, ``send`` and ``sum_of_heads``."""

    num_heads: int
    head_dim: int
    width: int
    source_width: int
    rotary: Rotary | None
    b_O: Tensor | None
    sum_of_heads: Callable[[Tensor], Tensor]

    def reset_parameters(self) -> None:
        """Draw matrices from N(0, 1 / fan_in), and set biases to zero and norms to one."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("b_"):
                nn.init.zeros_(parameter)
            else:
                # The outputs of all heads are summed, so the fan-in includes the rows of all heads.
                fan_in = parameter.shape[-2] * (self.num_heads if name in ("W_O", "message") else 1)
                nn.init.normal_(parameter, std=fan_in**-0.5)
        for norm in self.children():
            if isinstance(norm, nn.RMSNorm):
                norm.reset_parameters()

    @property
    def scale(self) -> float:
        """``1 / sqrt(head_dim)``, whatever the width of a pattern or a latent (S0.8 of docs/sources.md)."""
        # head_dim is a tensor while torch.jit.trace records.
        return float(int(self.head_dim) ** -0.5)

    def collect(self, z: Float[Tensor, "*batch heads dst dim"]) -> Float[Tensor, "*batch dst width"]:
        """Compute the update: the sum of the heads, plus ``b_O``."""
        total = self.sum_of_heads(z)
        return total if self.b_O is None else arrays.add_bias(total, self.b_O)

    def extra_repr(self) -> str:
        return f"{self.width}, num_heads={self.num_heads}, head_dim={self.head_dim}"

    def _register_biases(self, bias: bool, **shapes: tuple[int, ...] | None) -> None:
        for name, shape in shapes.items():
            zeros = nn.Parameter(torch.zeros(shape)) if bias and shape is not None else None
            self.register_parameter(name, zeros)

    def _norm_and_rotate(self, x: Tensor, positions: Tensor | None, norm: nn.RMSNorm | None = None) -> Tensor:
        x = x if norm is None else apply_norm(x, norm)
        if self.rotary is None:
            return x
        positions = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
        return self.rotary.turn(x, positions)


def apply_norm(x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    # Under torch.autocast the norm and x have different dtypes.
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)


def check_rotary(rotary: Rotary | None, name: str, dim: int) -> None:
    if rotary is not None and not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a gnn_attention.rotary.Rotary or None, got {type(rotary).__name__}")
    if rotary is not None and dim % 2:
        raise ValueError(f"rotary rotates pairs of channels: {name} must be even, got {dim}")
