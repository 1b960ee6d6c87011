"""Attention heads in three forms that compute the same update.

======== =================================== =============================== ======================
form     query of dst                        key of src                      value of src
======== =================================== =============================== ======================
standard ``x W_Q``                           ``x W_K``                       ``x W_V``
factored pattern ``(x W_Q) W_K^T``           ``x`` itself                    message ``(x W_V) W_O``
merged   pattern ``x W_P``                   ``x`` itself                    message ``x W_M``
======== =================================== =============================== ======================

Here ``W_P = W_Q W_K^T`` and ``W_M = W_V W_O`` for each head (sources S0 and S1 of docs/sources.md).
With ``side="sender"`` the query is ``x``, and the key ``x W_K W_Q^T`` can be cached (S1.15). In every
form the scale is ``1 / sqrt(head_dim)``, and a layer computes ``collect(attend(receive(x_dst),
*send(x_src), graph, scale=scale))``. A bias is an extra row of its matrix, which then multiplies ``[x, 1]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.heads.arrays import check_states, project, repeat_for_query_heads, to_product_dtype
from gnn_attention.heads.base import HeadsBase
from gnn_attention.heads.standard import StandardHeads

SIDES = ("receiver", "sender")


class _ModelSpaceHeads(HeadsBase):
    """Base class of two forms, in which patterns and messages are as wide as states."""

    side: str
    messages: Callable[[Tensor], Tensor]
    _project_pattern: Callable[[Tensor], Tensor]
    _has_pattern_bias: Callable[[], bool]

    def receive(
        self, x: Float[Tensor, "batch dst width"], positions: Int[Tensor, " dst"] | None = None
    ) -> Float[Tensor, "batch heads dst dim"]:
        """Return queries: the receivers' patterns, or their states if ``side`` is "sender"."""
        check_states(x, self.width, next(self.parameters()).dtype)
        return self._project_pattern(x) if self.side == "receiver" else self._repeat_state(x)

    def send(
        self, x: Float[Tensor, "batch src source_width"], positions: Int[Tensor, " src"] | None = None
    ) -> tuple[Float[Tensor, "batch heads src dim"], Float[Tensor, "batch heads src width"]]:
        """Return keys and messages; keys are states, or patterns if ``side`` is "sender"."""
        check_states(x, self.source_width, next(self.parameters()).dtype)
        keys = self._project_pattern(x) if self.side == "sender" else self._repeat_state(x)
        return keys, self.messages(x)

    def sum_of_heads(self, z: Float[Tensor, "*batch heads dst width"]) -> Float[Tensor, "*batch dst width"]:
        """Compute the update without ``b_O``: a plain sum, since messages are in model space."""
        return z.sum(-3).to(next(self.parameters()).dtype)

    def patterns(self, x: Float[Tensor, "batch tokens _"]) -> Float[Tensor, "batch heads tokens _"]:
        """Compute ``P = x W_P``, or ``x W_P^T`` if ``side`` is "sender" (S0.6)."""
        return self._project_pattern(x)[..., : self.source_width if self.side == "receiver" else self.width]

    def _repeat_state(self, x: Tensor) -> Tensor:
        x = to_product_dtype(_append_one(x) if self._has_pattern_bias() else x)
        return x.unsqueeze(1).expand(-1, self.num_heads, -1, -1)


class FactoredHeads(_ModelSpaceHeads):
    """Patterns ``P = (x W_Q) W_K^T`` and messages ``M = (x W_V) W_O``, computed factor by factor.

    ``FactoredHeads.of(heads)`` has the *same* parameters: training one trains the other. With
    ``side="sender"``, ``P = (x W_K) W_Q^T`` can be cached. ValueError for heads with ``rotary`` or
    ``qk_norm``, or without ``W_O``.

    Sources: S0.4 to S0.6, S1.15, S1.21 ("refactored").
    """

    def __init__(self, heads: StandardHeads, side: str = "receiver") -> None:
        super().__init__()
        _check_mergeable(heads, "FactoredHeads")
        self.side = checks.choice("side", side, SIDES)
        self.standard, self.num_heads, self.head_dim = heads, heads.num_heads, heads.head_dim
        self.width, self.source_width = heads.width, heads.source_width

    @classmethod
    def of(cls, heads: StandardHeads, side: str = "receiver") -> FactoredHeads:
        """Return the factored form of ``heads``, which shares their parameters."""
        return cls(heads, side)

    def reset_parameters(self) -> None:
        """Initialize the parameters again."""
        self.standard.reset_parameters()

    @property
    def b_O(self) -> Tensor | None:  # type: ignore[override]
        return self.standard.b_O

    def messages(self, x: Float[Tensor, "batch src source_width"]) -> Float[Tensor, "batch heads src width"]:
        """Compute the messages ``M = (x W_V + b_V) W_O``, in model space (S0.5)."""
        W_V = repeat_for_query_heads(self.standard.W_V, self.num_heads)
        b_V = repeat_for_query_heads(self.standard.b_V, self.num_heads)
        assert self.standard.W_O is not None
        return project(x, W_V, b_V) @ self.standard.W_O

    def _project_pattern(self, x: Tensor) -> Tensor:
        left, right = _pattern_factors(self.standard)
        if self.side == "sender":
            left, right = right, left
        x = _append_one(x) if self._has_pattern_bias() else x
        return project(x, left) @ right.mT

    def _has_pattern_bias(self) -> bool:
        return self.standard.b_Q is not None or self.standard.b_K is not None


class MergedHeads(_ModelSpaceHeads):
    """One pattern matrix and one message matrix for each head: ``P = x W_P``, ``M = x W_M``.

    ``MergedHeads.of(heads)`` multiplies the factors and stores the products as its own parameters.
    ``MergedHeads(width, num_heads, head_dim)`` draws random full-rank matrices; ``head_dim`` sets
    the scale.

    Parameters: ``pattern [heads, width (+1), source_width (+1)]``, ``message [heads, source_width
    (+1), width]``. An extra row or column holds products of biases, which :attr:`W_P` and
    :attr:`W_M` omit.

    Sources: S0.3, S0.9, S1.21; Elhage et al. 2021 (QK and OV circuits).

    >>> standard = StandardHeads(8, 2, bias=True).double()
    >>> torch.allclose(MergedHeads.of(standard).W_P, standard.pattern_matrix().full(), rtol=0, atol=1e-12)
    True
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        source_width: int | None = None,
        side: str = "receiver",
    ) -> None:
        super().__init__()
        self.side = checks.choice("side", side, SIDES)
        self.head_dim = checks.size("head_dim", head_dim, 1)
        self.width = checks.size("width", width, 1)
        self.source_width = width if source_width is None else checks.size("source_width", source_width, 1)
        self.num_heads = checks.size("num_heads", num_heads, 1)
        self.pattern = nn.Parameter(torch.empty(num_heads, self.width, self.source_width))
        self.message = nn.Parameter(torch.empty(num_heads, self.source_width, self.width))
        self.register_parameter("b_O", None)
        self.reset_parameters()

    @classmethod
    def of(cls, heads: StandardHeads | FactoredHeads, side: str = "receiver") -> MergedHeads:
        """Return the merged form of ``heads``, with its own parameters."""
        standard = heads.standard if isinstance(heads, FactoredHeads) else heads
        _check_mergeable(standard, "MergedHeads")
        # On the meta device the constructor draws no random numbers.
        with torch.device("meta"):
            result = cls(standard.width, standard.num_heads, standard.head_dim, standard.source_width, side)
        with torch.no_grad():
            left, right = _pattern_factors(standard)
            result.pattern = nn.Parameter((left.double() @ right.double().mT).to(standard.W_Q.dtype))
            W_V = standard.W_V if standard.b_V is None else _append_bias(standard.W_V, standard.b_V)
            W_V = repeat_for_query_heads(W_V, standard.num_heads)
            message = W_V.double() @ standard.message_matrix().right.double()
            result.message = nn.Parameter(message.to(standard.W_Q.dtype))
        if standard.b_O is not None:
            result.register_parameter("b_O", nn.Parameter(standard.b_O.detach().clone()))
        return result

    @property
    def W_P(self) -> Float[Tensor, "heads width source_width"]:
        """``W_Q W_K^T`` of each head."""
        return self.pattern[:, : self.width, : self.source_width]

    @property
    def W_M(self) -> Float[Tensor, "heads source_width width"]:
        """``W_V W_O`` of each head."""
        return self.message[:, : self.source_width]

    def messages(self, x: Float[Tensor, "batch src source_width"]) -> Float[Tensor, "batch heads src width"]:
        """Compute the messages ``M = x W_M``, plus ``b_V W_O`` if there is a bias."""
        return project(_append_one(x) if self.message.shape[1] > self.source_width else x, self.message)

    def _project_pattern(self, x: Tensor) -> Tensor:
        x = _append_one(x) if self._has_pattern_bias() else x
        return project(x, self.pattern if self.side == "receiver" else self.pattern.mT)

    def _has_pattern_bias(self) -> bool:
        return self.pattern.shape[1] > self.width

    def extra_repr(self) -> str:
        """Return the sizes and the side."""
        return f"{super().extra_repr()}, side={self.side!r}"


def _append_one(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)


def _append_bias(matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Append the bias (or zeros) as the last row, which acts on the 1 of ``[x, 1]``."""
    row = torch.zeros_like(matrix[:, 0]) if bias is None else bias
    return torch.cat([matrix, row.unsqueeze(1)], dim=1)


def _pattern_factors(heads: StandardHeads) -> tuple[Tensor, Tensor]:
    """Return ``W_Q`` and ``W_K`` of each query head; any biases are their last rows."""
    W_K = repeat_for_query_heads(heads.W_K, heads.num_heads)
    if heads.b_Q is None and heads.b_K is None:
        return heads.W_Q, W_K
    b_K = repeat_for_query_heads(heads.b_K, heads.num_heads)
    return _append_bias(heads.W_Q, heads.b_Q), _append_bias(W_K, b_K)


def _check_mergeable(heads: StandardHeads, form: str) -> None:
    if not isinstance(heads, StandardHeads):
        raise TypeError(f"{form}.of needs StandardHeads, got {type(heads).__name__}")
    for name, module in (("rotary", heads.rotary), ("qk_norm", heads.q_norm)):
        if module is not None:
            raise ValueError(
                f"{form} cannot hold {name}, which acts between W_Q and W_K; see pattern_matrix(distance)"
            )
    if heads.W_O is None:
        raise ValueError(f"{form} needs W_O: heads without it have values but no messages")
