"""A logit as length times length times cosine, and how long the patterns of a layer's heads are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edge_softmax import accumulation_dtype, logit, per_query_head
from gnn_attention.graph import TokenGraph, edge_list
from gnn_attention.heads import StandardHeads
from gnn_attention.heads.model_space import SIDES
from gnn_attention.interpret.circuits.head import each
from gnn_attention.interpret.trace import LayerTrace, pairs

# gathered ends of edges: 16 MB in float32
NUMBERS_AT_ONCE = 2**22


class Split(NamedTuple):
    """The three factors of a dot product for every edge: ``pattern . state = |pattern| |state| cos``."""

    length_of_pattern: Float[Tensor, "..."]
    length_of_state: Float[Tensor, "..."]
    cosine: Float[Tensor, "..."]

    @property
    def product(self) -> Float[Tensor, "..."]:
        """The dot product again: the logit before the scale."""
        return self.length_of_pattern * self.length_of_state * self.cosine


def split(
    patterns: Float[Tensor, "... width"], states: Float[Tensor, "... width"], edges: Any = None
) -> Split:
    """The length of the pattern, the length of the state, and their cosine, for each logit (seed S1.16).

    Without ``edges``, patterns and states vector by vector: ``[..., width]``, broadcast. With them,
    ``patterns [..., dst, width]`` and ``states [..., src, width]`` give numbers ``[..., E]``; edges are a
    :class:`TokenGraph`, ``[2, E]``, or a list of ``(src, dst)``. The vectors of both ends are those of
    ``FactoredHeads``: ``form.receive(x)`` and ``form.send(x)[0]``. The cosine with a vector of length 0 is 0.

    Raises ValueError, TypeError or IndexError for vectors or edges that do not fit.

    >>> patterns, states = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> parts = split(patterns, states, [(0, 0), (1, 0), (1, 1)])
    >>> parts.length_of_pattern.tolist(), parts.length_of_state.tolist()
    ([5.0, 5.0, 2.0], [1.0, 3.0, 3.0])
    """
    patterns, states = _vectors(patterns, states, 1 if edges is None else 2)
    lengths, sizes = patterns.norm(dim=-1), states.norm(dim=-1)
    if edges is None:
        products = logit(patterns, states, 1.0)
    else:
        src, dst = _pairs_of(edges, patterns, states)
        products = _dot_products(patterns, states, src, dst)
        lengths, sizes = lengths[..., dst], sizes[..., src]
    bound = lengths * sizes
    cosine = torch.where(bound > 0, products / bound, 0.0)
    return Split(lengths.expand(cosine.shape), sizes.expand(cosine.shape), cosine)


class PatternLengths(NamedTuple):
    """``|P|`` of every head and token, for receivers and senders."""

    receiver: Float[Tensor, "*batch heads dst"]
    sender: Float[Tensor, "*batch heads src"]


def pattern_lengths(source: Any, x: Any = None) -> PatternLengths:
    """The lengths of the patterns of each head: ``|x W_P + b_P|``, for senders ``|x W_P^T + b_S|``.

    A long pattern makes all logits of its token large, and the softmax sharp (seeds S1.15, S1.16).

    ``source`` is heads or a layer of them, with ``x``, the input of the layer, ``[T, width]`` or ``[B, T,
    width]``, or a pair ``(x_src, x_dst)``; or a layer of a run (``trace.record(...).layers[0]``), without.
    TypeError or ValueError for another source or where there is no pattern (rotary, qk_norm).
    """
    if isinstance(source, LayerTrace):
        return _lengths_in(source)
    if x is None:
        raise TypeError("x must be given with heads or a layer: the states that the layer is given")
    x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
    ends, circuits = zip((x_dst, x_src), SIDES, strict=True), each(source)
    by_side = [[head.patterns(end, side).norm(dim=-1) for head in circuits] for end, side in ends]
    return PatternLengths(*(torch.stack(lengths, dim=-2) for lengths in by_side))


def _vectors(patterns: Any, states: Any, own_axes: int) -> tuple[Tensor, Tensor]:
    got = f"got {quoted(patterns)} and {quoted(states)}"
    if not all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() for x in (patterns, states)):
        raise TypeError(f"patterns and states must be float tensors [..., width], {got}")
    if patterns.shape[-1] != states.shape[-1]:
        raise ValueError(f"patterns and states must be of one width to be compared, {got}")
    if min(patterns.dim(), states.dim()) < own_axes:
        raise ValueError(f"with edges, patterns must be [..., dst, width], states [..., src, width], {got}")
    leading = zip(reversed(patterns.shape[:-own_axes]), reversed(states.shape[:-own_axes]), strict=False)
    if any(n != m and 1 not in (n, m) for n, m in leading):
        raise ValueError(f"patterns and states must broadcast, {got}")
    wide = accumulation_dtype(torch.promote_types(patterns.dtype, states.dtype))
    return patterns.to(wide), states.to(wide)


def _pairs_of(edges: Any, patterns: Tensor, states: Tensor) -> Tensor:
    num_dst, num_src = patterns.shape[-2], states.shape[-2]
    if not isinstance(edges, TokenGraph):
        return edge_list.checked(pairs.as_pairs(edges), num_dst, num_src).to(patterns.device)
    if (edges.num_dst, edges.num_src) != (num_dst, num_src):
        raise ValueError(f"edges must be over {num_src} senders and {num_dst} receivers, got {quoted(edges)}")
    return edges.edges_on(patterns.device)


def _dot_products(patterns: Tensor, states: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    # some edges at a time, so that memory is bounded
    one = max(patterns[..., :1, :].numel(), states[..., :1, :].numel(), 1)
    step = max(1, NUMBERS_AT_ONCE // one)
    ends = zip(torch.split(src, step), torch.split(dst, step), strict=True)
    return torch.cat([logit(patterns[..., to, :], states[..., at, :], 1.0) for at, to in ends], dim=-1)


@torch.no_grad()
def _lengths_in(call: LayerTrace) -> PatternLengths:
    # from the queries and keys of the run, which hold the biases
    if not isinstance(call.heads, StandardHeads):
        got = type(call.heads).__name__
        raise TypeError(f"source must be a run of StandardHeads, got {got}: give its heads and their states")
    call.check_whole("lengths of patterns")
    keys, matrices = per_query_head(call.k, call.q.shape[1]), [one.pattern for one in each(call.heads)]
    receiver = [(call.q[:, h].to(W.right) @ W.right).norm(dim=-1) for h, W in enumerate(matrices)]
    sender = [(keys[:, h].to(W.left) @ W.left.mT).norm(dim=-1) for h, W in enumerate(matrices)]
    return PatternLengths(torch.stack(receiver, dim=1), torch.stack(sender, dim=1))
