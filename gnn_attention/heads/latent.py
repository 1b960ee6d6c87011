"""Multi-head latent attention: each sender has one latent for all heads."""

from __future__ import annotations

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.heads import arrays
from gnn_attention.heads.base import HeadsBase, apply_norm, axis, check_rotary
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.rotary import Rotary

__all__ = ["LatentHeads"]


class LatentHeads(HeadsBase):
    """DeepSeek's latent attention in its absorbed form, where latents serve as keys and values.

    A sender has one latent ``c = norm(x W_DKV)`` and one rotated key ``r = R (x W_KR)`` for all
    heads. In the paper, head h has the key ``[c W_UK_h, r]`` and the value ``c W_UV_h``; here the
    receiver applies both matrices instead:

        ``logit = scale ((u W_UQ_h) W_UK_h^T . c + R (u W_QR_h) . r)``,
        ``update = sum_h (sum of weighted c)_h W_UV_h W_O_h + b_O``,

    with ``u = norm(x W_DQ)``, or ``u = x`` without ``query_dim``. A cache stores only ``[c, r]``
    for each token: all heads share this key (MQA) of width ``latent_dim + rotary_dim``, and c is
    also the value.

    Parameters: ``W_DQ [width, query_dim]``, ``W_UQ [heads, query_dim, content_dim]``, ``W_QR
    [heads, query_dim, rotary_dim]``, ``W_DKV [width, latent_dim]``, ``W_KR [width, rotary_dim]``,
    ``W_UK [heads, latent_dim, content_dim]``, ``W_UV [heads, latent_dim, value_dim]``, ``W_O
    [heads, value_dim, width]``, the norms ``q_norm`` and ``kv_norm`` and, with ``bias=True``,
    ``b_DQ``, ``b_DKV``, ``b_KR`` and ``b_O``. The scale is ``1 / sqrt(content_dim + rotary_dim)``.

    Source: DeepSeek-V2 (arXiv 2405.04434), sections 2.1.2 (the absorption) and 2.1.3.

    >>> heads = LatentHeads(width=16, num_heads=4, content_dim=4, rotary_dim=2, latent_dim=6)
    >>> keys, values = heads.send(torch.zeros(1, 5, 16))
    >>> heads.receive(torch.zeros(1, 5, 16)).shape, keys.shape, values.shape
    (torch.Size([1, 4, 5, 8]), torch.Size([1, 1, 5, 8]), torch.Size([1, 1, 5, 6]))
    """

    b_DQ: nn.Parameter | None
    b_DKV: nn.Parameter | None
    b_KR: nn.Parameter | None
    rotary: Rotary
    num_heads: int = axis("W_UQ", 0, "Query heads.")
    num_kv_heads = 1
    width: int = axis("W_O", 2, "Width of a token's state.")
    source_width: int = axis("W_DKV", 0, "Width of a sender's state.")
    latent_dim: int = axis("W_DKV", 1, "Width of a latent.")

    def __init__(
        self,
        width: int,
        num_heads: int,
        content_dim: int,
        rotary_dim: int,
        latent_dim: int,
        value_dim: int | None = None,
        query_dim: int | None = None,
        rotary: Rotary | None = None,
        bias: bool = False,
        eps: float = 1e-6,
    ) -> None:
        """``value_dim`` is ``content_dim`` by default. ValueError for an odd ``rotary_dim``."""
        super().__init__()
        width = checks.size("width", width, 1)
        num_heads = checks.size("num_heads", num_heads, 1)
        content_dim = checks.size("content_dim", content_dim, 1)
        rotary_dim = checks.size("rotary_dim", rotary_dim, 1)
        latent_dim = checks.size("latent_dim", latent_dim, 1)
        value_dim = content_dim if value_dim is None else checks.size("value_dim", value_dim, 1)
        query_width = width if query_dim is None else checks.size("query_dim", query_dim, 1)
        self.rotary = Rotary() if rotary is None else rotary
        check_rotary(self.rotary, "rotary_dim", rotary_dim)
        self.W_DQ = None if query_dim is None else nn.Parameter(torch.empty(width, query_width))
        self.W_UQ = nn.Parameter(torch.empty(num_heads, query_width, content_dim))
        self.W_QR = nn.Parameter(torch.empty(num_heads, query_width, rotary_dim))
        self.W_DKV = nn.Parameter(torch.empty(width, latent_dim))
        self.W_KR = nn.Parameter(torch.empty(width, rotary_dim))
        self.W_UK = nn.Parameter(torch.empty(num_heads, latent_dim, content_dim))
        self.W_UV = nn.Parameter(torch.empty(num_heads, latent_dim, value_dim))
        self.W_O = nn.Parameter(torch.empty(num_heads, value_dim, width))
        b_DQ = None if query_dim is None else (query_width,)
        self._register_biases(bias, b_DQ=b_DQ, b_DKV=(latent_dim,), b_KR=(rotary_dim,), b_O=(width,))
        self.q_norm = None if query_dim is None else nn.RMSNorm(query_width, eps=eps)
        self.kv_norm = nn.RMSNorm(latent_dim, eps=eps)
        self.reset_parameters()

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        """``content_dim + rotary_dim``: the width of a key in the paper, and the rank of ``W_P``."""
        return self.W_UQ.shape[2] + self.W_QR.shape[2]

    def receive(
        self, x: Float[Tensor, "batch dst width"], positions: Int[Tensor, " dst"] | None = None
    ) -> Float[Tensor, "batch heads dst dim"]:
        """Compute queries ``[(u W_UQ) W_UK^T, R (u W_QR)]``; ``positions`` default to 0, 1, ..."""
        arrays.check_states(x, self.width, self.W_O.dtype)
        u = x if self.W_DQ is None else apply_norm(arrays.add_bias(x @ self.W_DQ, self.b_DQ), self.q_norm)
        pattern = torch.einsum("bti,hic->bhtc", u, self.W_UQ) @ self.W_UK.mT
        rotated = self._norm_and_rotate(torch.einsum("bti,hir->bhtr", u, self.W_QR), positions)
        return torch.cat([pattern, rotated], dim=-1)

    def send(
        self, x: Float[Tensor, "batch src width"], positions: Int[Tensor, " src"] | None = None
    ) -> tuple[Float[Tensor, "batch 1 src dim"], Float[Tensor, "batch 1 src latent"]]:
        """Compute keys ``[c, R (x W_KR)]`` and values ``c``, which all heads share."""
        latent = self.latents(x)
        rotated = self._norm_and_rotate(arrays.add_bias(x @ self.W_KR, self.b_KR), positions)
        return torch.cat([latent, rotated], dim=-1).unsqueeze(1), latent.unsqueeze(1)

    def sum_of_heads(self, z: Float[Tensor, "*batch heads dst latent"]) -> Float[Tensor, "*batch dst width"]:
        """Compute the update without ``b_O``: ``sum_h z_h W_UV_h W_O_h``."""
        return torch.einsum("...htv,hvw->...tw", z.to(self.W_O.dtype) @ self.W_UV, self.W_O)

    def latents(self, x: Float[Tensor, "batch src width"]) -> Float[Tensor, "batch src latent"]:
        """Compute the latents of senders: ``c = norm(x W_DKV + b_DKV)``."""
        arrays.check_states(x, self.source_width, self.W_DKV.dtype)
        return apply_norm(arrays.add_bias(x @ self.W_DKV, self.b_DKV), self.kv_norm)

    def pattern_matrix(self, distance: int) -> FactoredMatrix:
        """Return ``W_P [heads, query_dim, latent_dim + rotary_dim]`` for ``distance = dst - src``.

        The score is ``scale * (u W_P . [c, x W_KR])``. Only the rotary part depends on the
        distance.
        """
        rotary_dim = self.W_QR.shape[2]
        rotation = self.rotary.matrix(distance, rotary_dim).to(self.W_QR).expand(self.num_heads, -1, -1)
        content_rows = nn.functional.pad(self.W_UK.mT, (0, rotary_dim))
        rotary_rows = nn.functional.pad(rotation, (self.latent_dim, 0))
        right = torch.cat([content_rows, rotary_rows], dim=-2)
        return FactoredMatrix(torch.cat([self.W_UQ, self.W_QR], dim=-1), right)

    def message_matrix(self) -> FactoredMatrix:
        """Return ``W_M = W_UV W_O [heads, latent_dim, width]``, which maps latents to messages."""
        return FactoredMatrix(self.W_UV, self.W_O)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{super().extra_repr()}, latent_dim={self.latent_dim}"
