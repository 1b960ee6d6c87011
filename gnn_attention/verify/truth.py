"""Problems that checks share, a call of ``attend`` or a whole layer, and the truth about each.

The truth is dense attention in float64, and how far SDPA is from it: by these a result is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import (
    Attempt,
    Truth,
    errors_of,
    gradients_of,
    largest_of,
    nearby,
    widen_by_roundings,
)

OF_MASK = ("table", "bias")  # what SDPA's fused kernel gives no gradient


@dataclass(frozen=True, eq=False)
class Problem:
    """A call of ``attend`` on "q", "k", "v" and what it learns, or a layer of ``heads`` on "x_src", "x_dst".

    Inputs have the dtype and device under test. ``dense(inputs, logits)`` returns new logits, as large as the
    mask ``[B, H, dst, src]``; ``factors`` multiply the weights; gradients are those of ``(out *
    direction).sum()`` for all inputs. ``additive`` says that ``dense`` is a sum, which SDPA can be given as a
    mask; without it, or with factors, the yardstick is the plain formula in the inputs' dtype.

    A backend is called with ``graph``, ``options(inputs)`` as further arguments, and q, k and v where
    ``layout`` puts them in memory. A problem without a graph has a truth alone.
    """

    inputs: Mapping[str, Tensor]
    mask: Tensor
    direction: Tensor
    scale: float
    dense: Callable[[Mapping[str, Tensor], Tensor], Tensor] = lambda inputs, logits: logits
    additive: bool = True
    factors: Tensor | None = None
    heads: Any = None
    neighbours: int = 16  # problems over which the yardstick is taken, the problem itself among them
    graph: Any = None
    options: Callable[[Mapping[str, Tensor]], dict[str, Any]] = lambda inputs: {}
    layout: Callable[[Tensor], Tensor] = lambda x: x

    # ---- the truth

    @cached_property
    def truth(self) -> Truth:
        """Output and gradients in float64 on rounded inputs, and SDPA's errors in the dtype of the inputs.

        SDPA's largest error on one problem of few numbers is luck (a half to twice what it mostly is). So it
        is taken over 16 problems: this one, and 15 :func:`nearby`, each in another order with its own truth.
        """
        inputs = {**self.inputs, **plain_names(self.heads)}
        with torch.enable_grad():
            true = self.attempt(inputs)
            if self.direction.dtype == torch.float64:
                return Truth(*true, {})
            plain, fused = list[dict[str, float]](), list[dict[str, float]]()
            for number in range(self.neighbours):
                moved = {name: nearby(x, number) for name, x in inputs.items()}
                solved = self.attempt(moved)
                plain.append(errors_of(self.attempt(moved, number), solved))
                fused.append(errors_of(self.attempt(moved, number, widened=True), solved))
            truth = Truth(*true, largest_of(plain), largest_of(fused))
            return widen_by_roundings(truth, self._sums, inputs, self.direction)

    def attempt(
        self, inputs: Mapping[str, Tensor], number: int | None = None, widened: bool = False
    ) -> Attempt:
        """Output and gradients by the formulas in float64, no weight passing through a layer's projections.

        With a number they are those of SDPA, or of the plain formula, in its order and the dtype under test.
        """
        leaves = leaves_of(inputs, torch.float64 if number is None else self.direction.dtype)
        if number is None and self.heads is not None:
            dense = partial(self.dense, leaves)
            out = oracle.layer(leaves, leaves["x_src"], leaves["x_dst"], self.mask, self.scale, dense)
        else:
            out = self._call(leaves, number, widened)[0]
        learned = {name: x for name, x in leaves.items() if not (widened and name in OF_MASK)}
        return out.detach(), gradients_of(out, self.direction, learned)

    def _sums(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The output, the sums of its heads, and lse; of a layer q, k and v, too."""
        out, z, q, k, v = self._call(inputs)
        logits = torch.einsum("bhid,bhjd->bhij", q, oracle.per_query_head(k, q)) * self.scale
        lse = oracle.lse(self.dense(inputs, logits), self.mask, inputs.get("sink_logits"))
        return (out, z, lse) if self.heads is None else (out, z, lse, q, k, v)

    def _call(
        self, inputs: Mapping[str, Tensor], number: int | None = None, widened: bool = False
    ) -> tuple[Tensor, ...]:
        """The output, that of attention before heads are summed, and q, k and v.

        Attention is the formula; with a number in its order, by SDPA where that can.
        """
        dense, sinks = partial(self.dense, inputs), inputs.get("sink_logits")

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if number is not None and self.additive and self.factors is None:
                added = dense(q.new_zeros(self.mask.shape))
                return oracle.sdpa(q, k, v, self.mask, self.scale, added, sinks, widened, number)
            q, k = oracle.reorder_channels(number or 0, q, k)
            return oracle.attention(q, k, v, self.mask, self.scale, dense, sinks, self.factors)

        if self.heads is None:
            q = inputs["q"]
            # keys and values of one sample serve all
            k, v = (inputs[name].expand(len(q), -1, -1, -1) for name in "kv")
            z = attention(q, k, v)
            return z, z, q, k, v
        names = [name for name, _ in self.heads.named_parameters()]
        weights = {f"heads.{name}": inputs[name.removeprefix("standard.")] for name in names}
        tokens = inputs["x_src"], inputs["x_dst"]
        results: tuple[Tensor, ...] = functional_call(_Layer(self.heads), weights, (*tokens, attention))
        return results

    # ---- what a backend makes of it

    def solve(self, backend: Backend, inputs: Mapping[str, Tensor] | None = None) -> Attempt:
        """Output and gradients of a backend, perhaps with other inputs than the problem's own."""
        leaves = leaves_of(self.inputs if inputs is None else inputs)
        with torch.random.fork_rng([self.direction.device] if self.direction.is_cuda else []):
            torch.manual_seed(0)
            if self.heads is None:
                out = self.call(backend, leaves)
            else:
                options = self.options(leaves)
                mod = options.pop("score_mod", None)
                layer = MessagePassingAttention(self.heads, mod, backend=by_name(backend))
                out = layer((leaves["x_src"], leaves["x_dst"]), self.graph, **options)
                leaves |= plain_names(self.heads)
        return out, gradients_of(out, self.direction, leaves)

    def call(self, backend: Backend, inputs: Mapping[str, Tensor], **more: Any) -> Any:
        """What ``attend`` makes of q, k and v in their places, and of its options."""
        q, k, v = (self.layout(inputs[name]) for name in "qkv")
        return attend(q, k, v, self.graph, backend=by_name(backend), **self.options(inputs), **more)


class _Layer(nn.Module):
    """A layer whose weights and attention are arguments of each call."""

    def __init__(self, heads: nn.Module) -> None:
        super().__init__()
        self.heads: Any = heads

    def forward(self, x_src: Tensor, x_dst: Tensor, attention: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        q, (k, v) = self.heads.receive(x_dst), self.heads.send(x_src)
        z = attention(q, k, v)
        return self.heads.collect(z), z, q, k, v


def by_name(backend: Backend) -> str | Backend:
    """The name of a backend of the table, by which a user calls it; any other backend itself."""
    return backend.name if BACKENDS.get(backend.name) is backend else backend


def leaves_of(inputs: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: x.detach().to(dtype, copy=True).requires_grad_() for name, x in inputs.items()}


def plain_names(heads: Any) -> dict[str, Tensor]:
    """The weights by their names in the formulas; {} without heads."""
    named = () if heads is None else heads.named_parameters()
    return {name.removeprefix("standard."): parameter for name, parameter in named}
