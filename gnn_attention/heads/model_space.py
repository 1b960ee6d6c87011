"""The weights of attention heads in three forms that compute the same thing.

======== =================================== =============================== ======================
form     query of dst                        key of src                      value of src
======== =================================== =============================== ======================
standard ``x W_Q``                           ``x W_K``                       ``x W_V``
factored pattern ``(x W_Q) W_K^T``           ``x`` itself                    message ``(x W_V) W_O``
merged   pattern ``x W_P``                   ``x`` itself                    message ``x W_M``
======== =================================== =============================== ======================

with ``W_P = W_Q W_K^T`` and ``W_M = W_V W_O`` for each head (seeds S0, S1). With the pattern on the sender's
side the query is ``x`` and the key ``x W_K W_Q^T``, which can be cached (seed S1.15). In every form the scale
is ``1 / sqrt(head_dim)`` and a layer ``collect(attend(receive(x_dst), *send(x_src), graph, scale=scale))``. A
bias is a weight on a constant 1: ``[x, 1]`` carries biases through the products exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.heads.arrays import check_states, like_products, project, repeat_for_query_heads
from gnn_attention.heads.base import HeadsBase
from gnn_attention.heads.standard import StandardHeads

SIDES = ("receiver", "sender")


class _ModelSpaceHeads(HeadsBase):
    """What the factored and the merged form share: patterns and messages as wide as the tokens' states."""

    side: str
    _pattern_of: Callable[[Tensor], Tensor]
    _has_pattern_bias: Callable[[], bool]

    def receive(
        self, x: Float[Tensor, "batch dst width"], positions: Int[Tensor, " dst"] | None = None
    ) -> Float[Tensor, "batch heads dst dim"]:
        """The receivers' patterns, or their states where the senders hold the pattern."""
        check_states(x, self.width, next(self.parameters()).dtype)
        return self._pattern_of(x) if self.side == "receiver" else self._state_of(x)

    def send(
        self, x: Float[Tensor, "batch src source_width"], positions: Int[Tensor, " src"] | None = None
    ) -> tuple[Float[Tensor, "batch heads src dim"], Float[Tensor, "batch heads src width"]]:
        """The senders' states (or patterns) and their messages, one for each head."""
        check_states(x, self.source_width, next(self.parameters()).dtype)
        return self._pattern_of(x) if self.side == "sender" else self._state_of(x), self.messages(x)

    def sum_of_heads(self, z: Float[Tensor, "*batch heads dst width"]) -> Float[Tensor, "*batch dst width"]:
        """The update before ``b_O``: messages are in model space already."""
        return z.sum(-3).to(next(self.parameters()).dtype)

    def patterns(self, x: Float[Tensor, "batch tokens own"]) -> Float[Tensor, "batch heads tokens other"]:
        """``P = x W_P`` (``x W_P^T`` on the sender's side), to be compared with states (S0.6)."""
        return self._pattern_of(x)[..., : self.source_width if self.side == "receiver" else self.width]

    def messages(self, x: Float[Tensor, "batch src source_width"]) -> Float[Tensor, "batch heads src width"]:
        """``M = x W_M``: what a token sends, in model space (seed S0.5)."""
        raise NotImplementedError

    def _state_of(self, x: Tensor) -> Tensor:
        x = like_products(_with_one(x) if self._has_pattern_bias() else x)
        return x.unsqueeze(1).expand(-1, self.num_heads, -1, -1)


class FactoredHeads(_ModelSpaceHeads):
    """Patterns and messages computed through the factors: ``P = (x W_Q) W_K^T``, ``M = (x W_V) W_O``.

    ``FactoredHeads.of(heads)`` computes with the *same* parameters: training one trains the other.
    ``side="sender"``: ``P = (x W_K) W_Q^T``, which can be cached. ValueError for rotary or normed heads.

    Sources: seeds S0.4 to S0.6, S1.15, S1.21 ("refactored").
    """

    def __init__(self, heads: StandardHeads, side: str = "receiver") -> None:
        super().__init__()
        _check_mergeable(heads, "FactoredHeads")
        self.side = checks.choice("side", side, SIDES)
        self.standard, self.num_heads, self.head_dim = heads, heads.num_heads, heads.head_dim
        self.width, self.source_width = heads.width, heads.source_width

    @classmethod
    def of(cls, heads: StandardHeads, side: str = "receiver") -> FactoredHeads:
        """The factored form of ``heads``, which shares its parameters."""
        return cls(heads, side)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.standard.reset_parameters()

    @property
    def b_O(self) -> Tensor | None:  # type: ignore[override]
        return self.standard.b_O

    def messages(self, x: Float[Tensor, "batch src source_width"]) -> Float[Tensor, "batch heads src width"]:
        """``M = (x W_V + b_V) W_O``."""
        own, W_O = self.standard, self.standard.W_O
        assert W_O is not None
        values = project(
            x,
            repeat_for_query_heads(own.W_V, self.num_heads),
            repeat_for_query_heads(own.b_V, self.num_heads),
        )
        return values @ W_O

    def _pattern_of(self, x: Tensor) -> Tensor:
        near, far = _pattern_factors(self.standard)
        if self.side == "sender":
            near, far = far, near
        x = _with_one(x) if self._has_pattern_bias() else x
        return project(x, near) @ far.mT

    def _has_pattern_bias(self) -> bool:
        return self.standard.b_Q is not None or self.standard.b_K is not None


class MergedHeads(_ModelSpaceHeads):
    """One pattern matrix and one message matrix for each head: ``P = x W_P``, ``M = x W_M``.

    ``MergedHeads.of(heads)`` multiplies the factors out into parameters of its own. Built directly,
    ``MergedHeads(width, num_heads, head_dim)`` has no bottleneck; head_dim then only sets the scale.

    Parameters: ``pattern [heads, width (+1), source_width (+1)]`` and ``message [heads, source_width (+1),
    width]``. With biases the +1 holds their products; :attr:`W_P` and :attr:`W_M` are the parts without it.

    Sources: seeds S0.3, S0.9, S1.21; Elhage et al. 2021 (QK and OV circuits).

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
        """Bias-free, drawn from N(0, 1 / rows)."""
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
        """The merged form of ``heads``, with parameters of its own."""
        standard = heads.standard if isinstance(heads, FactoredHeads) else heads
        _check_mergeable(standard, "MergedHeads")
        # no random numbers are drawn
        with torch.device("meta"):
            result = cls(standard.width, standard.num_heads, standard.head_dim, standard.source_width, side)
        with torch.no_grad():
            near, far = (factor.double() for factor in _pattern_factors(standard))
            values = _affine(standard.W_V, standard.b_V) if standard.b_V is not None else standard.W_V
            message = (
                repeat_for_query_heads(values, standard.num_heads).double()
                @ standard.message_matrix().right.double()
            )
            result.pattern = nn.Parameter((near @ far.mT).to(standard.W_Q.dtype))
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
        """``M = x W_M`` (plus the messages' bias ``b_V W_O``)."""
        return project(_with_one(x) if self.message.shape[1] > self.source_width else x, self.message)

    def _pattern_of(self, x: Tensor) -> Tensor:
        x = _with_one(x) if self._has_pattern_bias() else x
        return project(x, self.pattern if self.side == "receiver" else self.pattern.mT)

    def _has_pattern_bias(self) -> bool:
        return self.pattern.shape[1] > self.width

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{super().extra_repr()}, side={self.side!r}"


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)


def _affine(matrix: Tensor, bias: Tensor | None) -> Tensor:
    """The matrix that acts on ``[x, 1]``: the bias (or zeros) as its last row."""
    row = torch.zeros_like(matrix[:, 0]) if bias is None else bias
    return torch.cat([matrix, row.unsqueeze(1)], dim=1)


def _pattern_factors(heads: StandardHeads) -> tuple[Tensor, Tensor]:
    """``W_Q`` and ``W_K`` of each query head, with biases as last rows where there are any."""
    W_K, b_K = (
        repeat_for_query_heads(heads.W_K, heads.num_heads),
        repeat_for_query_heads(heads.b_K, heads.num_heads),
    )
    if heads.b_Q is None and heads.b_K is None:
        return heads.W_Q, W_K
    return _affine(heads.W_Q, heads.b_Q), _affine(W_K, b_K)


def _check_mergeable(heads: StandardHeads, form: str) -> None:
    if not isinstance(heads, StandardHeads):
        raise TypeError(f"{form}.of needs StandardHeads, got {type(heads).__name__}")
    for reason, present in (("rotary", heads.rotary), ("qk_norm", heads.q_norm)):
        if present is not None:
            advice = "see pattern_matrix(distance)"
            raise ValueError(f"{form} cannot hold {reason}: it acts between W_Q and W_K; {advice}")
    if heads.W_O is None:
        raise ValueError(f"{form} needs W_O: without it there are values but no messages")
