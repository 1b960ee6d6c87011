"""Attention heads in the standard form: ``W_Q``, ``W_K``, ``W_V`` and ``W_O`` for each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.heads import arrays
from gnn_attention.heads.base import HeadsBase, axis, check_rotary
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.rotary import Rotary


class StandardHeads(HeadsBase):
    """Query, key, value and output matrices: ``update = sum_h w_h (x W_V_h) W_O_h + b_O``.

    Parameters: ``W_Q [heads, width, head_dim]``, ``W_K [kv_heads, source_width, head_dim]``,
    ``W_V [kv_heads, source_width, value_dim]``, ``W_O [heads, value_dim, width]`` and, with
    ``bias=True``, ``b_Q``, ``b_K`` and ``b_V`` with one row for each head and ``b_O [width]`` (or
    ``[heads, width]``, summed over the heads). ``source_width`` is the width of a sender's state.
    Query heads share keys and values if ``num_kv_heads < num_heads`` (GQA; 1 is MQA). ``qk_norm=True``
    applies a learned RMSNorm to queries and keys, before ``rotary`` rotates them.

    Sources: Vaswani et al. 2017 (arXiv 1706.03762), 3.2; S0.1, S0.2, S1.6 and S2.8 of
    docs/sources.md; Ainslie et al. 2023 (GQA, 2305.13245).

    >>> heads = StandardHeads(width=8, num_heads=2)
    >>> heads.receive(torch.zeros(1, 5, 8)).shape, heads.scale
    (torch.Size([1, 2, 5, 4]), 0.5)
    """

    b_Q: nn.Parameter | None
    b_K: nn.Parameter | None
    b_V: nn.Parameter | None
    num_heads: int = axis("W_Q", 0, "Query heads.")
    num_kv_heads: int = axis("W_K", 0, "Key/value heads; each serves num_heads / num_kv_heads query heads.")
    width: int = axis("W_Q", 1, "Width of a receiver's state.")
    source_width: int = axis("W_K", 1, "Width of a sender's state.")
    head_dim: int = axis("W_Q", 2, "Width of a query and a key.")

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        source_width: int | None = None,
        rotary: Rotary | None = None,
        qk_norm: bool | None = None,
    ) -> None:
        """``num_kv_heads`` must divide ``num_heads``, which must divide ``width`` if ``head_dim`` is None."""
        super().__init__()
        sizes = head_sizes(width, num_heads, head_dim, value_dim, num_kv_heads)
        width, num_heads, head_dim, value_dim, num_kv_heads = sizes
        source_width = width if source_width is None else checks.size("source_width", source_width, 1)
        self.W_Q = nn.Parameter(torch.empty(num_heads, width, head_dim))
        self.W_K = nn.Parameter(torch.empty(num_kv_heads, source_width, head_dim))
        self.W_V = nn.Parameter(torch.empty(num_kv_heads, source_width, value_dim))
        self.W_O: nn.Parameter | None = nn.Parameter(torch.empty(num_heads, value_dim, width))
        self._register_biases(bias, b_Q=(num_heads, head_dim), b_K=(num_kv_heads, head_dim))
        self._register_biases(bias, b_V=(num_kv_heads, value_dim), b_O=(width,))
        check_rotary(rotary, "head_dim", head_dim)
        self.rotary = rotary
        self.q_norm = nn.RMSNorm(head_dim) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim) if qk_norm else None
        self.reset_parameters()

    def receive(
        self, x: Float[Tensor, "batch dst width"], positions: Int[Tensor, " dst"] | None = None
    ) -> Float[Tensor, "batch heads dst dim"]:
        """Compute queries ``x W_Q + b_Q``, normalized and rotated; positions default to 0, 1, ..."""
        return self._norm_and_rotate(arrays.project(x, self.W_Q, self.b_Q), positions, self.q_norm)

    def send(
        self, x: Float[Tensor, "batch src width"], positions: Int[Tensor, " src"] | None = None
    ) -> tuple[Float[Tensor, "batch kv_heads src dim"], Float[Tensor, "batch kv_heads src value_dim"]]:
        """Compute keys ``x W_K + b_K``, normalized and rotated, and values ``x W_V + b_V``."""
        keys = self._norm_and_rotate(arrays.project(x, self.W_K, self.b_K), positions, self.k_norm)
        return keys, arrays.project(x, self.W_V, self.b_V)

    def sum_of_heads(self, z: Float[Tensor, "*batch heads dst dim"]) -> Float[Tensor, "*batch dst width"]:
        """Compute ``sum_h z_h W_O_h``, or concatenate the heads if there is no ``W_O`` (S3.8)."""
        if self.W_O is None:
            return z.transpose(-3, -2).flatten(-2)
        return z.to(self.W_O.dtype).transpose(-3, -2).flatten(-2) @ self.W_O.flatten(0, 1)

    def pattern_matrix(self, distance: int | None = None) -> FactoredMatrix:
        """Return the factors of ``W_P = W_Q W_K^T [heads, width, source_width]``, without biases.

        Rotary heads have ``W_Q R W_K^T``, which depends on ``distance = dst - src``. ValueError
        for rotary heads without a distance, and for ``qk_norm``, which is not a linear map.
        """
        if self.q_norm is not None:
            raise ValueError("heads with qk_norm have no pattern matrix: the norm depends on the token")
        left: Tensor = self.W_Q
        right = arrays.repeat_for_query_heads(self.W_K, self.num_heads).mT
        if self.rotary is not None:
            if distance is None:
                raise ValueError("rotary heads have a pattern matrix for each distance: pass distance=...")
            left = left @ self.rotary.matrix(distance, self.head_dim).to(left)
        return FactoredMatrix(left, right)

    def message_matrix(self) -> FactoredMatrix:
        """Return the factors of ``W_M = W_V W_O [heads, source_width, width]``."""
        if self.W_O is None:
            raise ValueError("heads without W_O have values but no messages")
        return FactoredMatrix(arrays.repeat_for_query_heads(self.W_V, self.num_heads), self.W_O)

    def extra_repr(self) -> str:
        """Return the sizes."""
        kv_heads = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return super().extra_repr() + kv_heads

    @classmethod
    def from_arrays(
        cls,
        W_Q: Any,
        W_K: Any,
        W_V: Any,
        W_O: Any = None,
        b_Q: Any = None,
        b_K: Any = None,
        b_V: Any = None,
        b_O: Any = None,
        layout: str = "row",
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        rotary: Rotary | None = None,
    ) -> StandardHeads:
        """Make heads from copies of tensors, numpy arrays or nested lists.

        ``layout="row"`` means ``q = x W_Q`` (S0, S1), with matrices ``[heads, in, out]`` or
        ``[in, heads * out]`` and ``W_O [heads, value_dim, width]`` or ``[heads * value_dim, width]``.
        ``layout="column"`` means ``q = W_Q x`` (S2.1, S3.7), with all matrices transposed, as in
        ``nn.Linear.weight``. Two-dimensional matrices need ``num_heads``, and ``num_kv_heads`` if it
        differs. Biases are ``[heads, dim]`` or flat; ``b_O`` is ``[width]`` or ``[heads, width]``.
        Without ``W_O`` the heads are concatenated. A ValueError names the array that does not fit.
        """
        layout = checks.choice("layout", layout, ("row", "column"))
        num_heads = None if num_heads is None else checks.size("num_heads", num_heads, 1)
        num_kv_heads = num_heads if num_kv_heads is None else checks.size("num_kv_heads", num_kv_heads, 1)
        W_Q = arrays.read_matrix("W_Q", W_Q, num_heads, layout)
        W_K = arrays.read_matrix("W_K", W_K, num_kv_heads, layout)
        W_V = arrays.read_matrix("W_V", W_V, num_kv_heads, layout)
        arrays.check_shapes(W_Q, W_K, W_V)
        num_heads, width, head_dim = W_Q.shape
        num_kv_heads, source_width, value_dim = W_V.shape
        # On the meta device the constructor draws no random numbers.
        with torch.device("meta"):
            sizes = width, num_heads, head_dim, value_dim, num_kv_heads
            result = cls(*sizes, source_width=source_width, rotary=rotary)
        result.W_Q, result.W_K, result.W_V = nn.Parameter(W_Q), nn.Parameter(W_K), nn.Parameter(W_V)
        shapes = (num_heads, value_dim, width), (num_heads * value_dim, width)
        result.W_O = arrays.read_parameter("W_O", W_O, *shapes, layout=layout)
        for name, array, matrix in (("b_Q", b_Q, W_Q), ("b_K", b_K, W_K), ("b_V", b_V, W_V)):
            shape = torch.Size([matrix.shape[0], matrix.shape[2]])
            result.register_parameter(name, arrays.read_parameter(name, array, shape, (shape.numel(),)))
        if b_O is not None and W_O is None:
            raise ValueError("b_O needs W_O: pass both or neither")
        result.register_parameter("b_O", arrays.read_parameter("b_O", b_O, (width,), (num_heads, width)))
        for name, parameter in result.named_parameters():
            if parameter.dtype != W_Q.dtype:
                raise ValueError(f"{name} must have the dtype of W_Q, {W_Q.dtype}, got {parameter.dtype}")
        return result

    @classmethod
    def from_mha(cls, attention: nn.MultiheadAttention) -> StandardHeads:
        """Copy the parameters of a ``torch.nn.MultiheadAttention`` into heads.

        ValueError for ``add_bias_kv``, ``add_zero_attn`` and ``kdim != vdim``; dropout is ignored.
        """
        checks.instance("attention", attention, nn.MultiheadAttention)
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn add a sender: make it a token of the graph")
        if attention.kdim != attention.vdim:
            raise ValueError(f"kdim and vdim must be equal, got {attention.kdim} and {attention.vdim}")
        weight, bias, out_proj = attention.in_proj_weight, attention.in_proj_bias, attention.out_proj
        separate_weights = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
        W_Q, W_K, W_V = separate_weights if weight is None else weight.chunk(3)
        b_Q, b_K, b_V = (None, None, None) if bias is None else bias.chunk(3)
        options = {"b_Q": b_Q, "b_K": b_K, "b_V": b_V, "layout": "column", "num_heads": attention.num_heads}
        return cls.from_arrays(W_Q, W_K, W_V, out_proj.weight, b_O=out_proj.bias, **options)


def head_sizes(
    width: int, num_heads: int, head_dim: int | None, value_dim: int | None, num_kv_heads: int | None
) -> tuple[int, int, int, int, int]:
    """Return the five sizes with the defaults filled in; ValueError if they are inconsistent."""
    width = checks.size("width", width, 1)
    num_heads = checks.size("num_heads", num_heads, 1)
    num_kv_heads = num_heads if num_kv_heads is None else checks.size("num_kv_heads", num_kv_heads, 1)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    if head_dim is None and width % num_heads:
        raise ValueError(f"width {width} is not a multiple of num_heads {num_heads}: pass head_dim=...")
    head_dim = width // num_heads if head_dim is None else checks.size("head_dim", head_dim, 1)
    value_dim = head_dim if value_dim is None else checks.size("value_dim", value_dim, 1)
    return width, num_heads, head_dim, value_dim, num_kv_heads
