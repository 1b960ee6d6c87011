"""How much reaches a token, beyond whether anything does: shares along walks, and Jacobians of a function.

Reach is possible, influence is likely: a window of 32 reaches 512 tokens back in 17 layers, and what comes
from there may be a 10^12th of what comes from nearby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.analyse._walks import Layers, check_token, edges_of, senders_of, spread, stack
from gnn_attention.analyse.reach import check_all_pairs
from gnn_attention.graph import TokenGraph

AT_ONCE = 256  # tokens that are followed together


def influence(
    graphs: Layers,
    layers: int,
    residual: float | Sequence[float] = 0.5,
    weights: Tensor | Sequence[Tensor] | None = None,
    receivers: Iterable[int] | None = None,
    senders: Iterable[int] | None = None,
) -> Float[Tensor, "dst src"]:
    """The share of each sender's input in each receiver's last state, summed over all walks.

    ``A_L ... A_2 A_1`` with ``A = residual * 1 + (1 - residual) * W``: in each layer a token keeps the share
    ``residual`` (its residual stream) and takes the rest along its in-edges by their weights. Rows sum to 1
    where those of W do; an isolated receiver only keeps. A linear model of these layers has
    exactly these derivatives.

    Args:
        graphs: one graph, or one for each layer, as all functions of ``analyse`` take them.
        layers: how many.
        residual: in 0 .. 1, or a list, one for each layer.
        weights: ``[E]`` in the order of ``edge_index``, or a list of them; None is ``1 / in-degree``, uniform
            softmax. Lists are cycled as ``graphs`` is.
        receivers: tokens whose rows are wanted, in this order; None for all.
        senders: tokens whose columns are wanted; None for all. Time is edges x layers x the fewer of both.

    Returns:
        float64 ``[receivers, senders]``.

    Raises:
        ValueError, TypeError, IndexError: wrong layers, shares, weights or tokens; all pairs of more than
        8192 tokens. Sources: arXiv 2406.04267, 2504.02732, 2005.00928; Xiao 2025.

    >>> from gnn_attention import patterns
    >>> influence(patterns.window(4, 2), 2, residual=0.5, receivers=[3]).tolist()  # binomial(2, 1/4)
    [[0.0, 0.0625, 0.375, 0.5625]]
    """
    stacked = stack(graphs)
    count = stacked[0].num_dst
    mixings = _mixings(stacked, checks.size("layers", layers), residual, weights)
    wanted = [_tokens(name, given, count) for name, given in (("receivers", receivers), ("senders", senders))]
    if len(wanted[0]) == len(wanted[1]) == count:
        check_all_pairs("influence", stacked[0], "give some receivers or senders")
    by_rows = len(wanted[0]) <= len(wanted[1])
    parts = [_propagate(mixings, part, by_rows, count) for part in torch.split(wanted[not by_rows], AT_ONCE)]
    found = torch.cat(parts, 1) if parts else torch.zeros(count, 0, dtype=torch.float64, device="cpu")
    return found.T[:, wanted[1]] if by_rows else found[wanted[0]]


@dataclass(frozen=True, eq=False)
class HopInfluence:
    """Influence by hops: ``total[r, k]`` is the sum over the senders k hops before receiver r."""

    total: Float[Tensor, "dst hops"]

    @property
    def range(self) -> Float[Tensor, " dst"]:
        """The mean number of hops by influence, of each receiver (arXiv 2506.05971, normalised)."""
        hops = torch.arange(self.total.shape[1], dtype=self.total.dtype, device=self.total.device)
        return self.total @ hops / self.total.sum(1)


def by_hop(
    influence: Float[Tensor, "dst src"], graph: TokenGraph, receivers: Iterable[int] | None = None
) -> HopInfluence:
    """Influence ``[receivers, tokens]`` of any kind, summed by the hops of a shortest way to the receiver.

    What comes from tokens that no way leads from is left out. ``total.mean(0)`` is what torch_geometric's
    ``total_influence`` returns, given :func:`jacobian_norms`; and its second result is ``range.mean()``.

    >>> from gnn_attention import patterns
    >>> graph = patterns.window(5, 2)
    >>> by_hop(torch.ones(5, 5), graph).range.tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    tokens = stack(graph)[0].num_dst
    chosen = _tokens("receivers", receivers, tokens)
    if not isinstance(influence, Tensor) or tuple(influence.shape) != (len(chosen), tokens):
        expected = f"[receivers, tokens] = [{len(chosen)}, {tokens}]"
        raise ValueError(f"influence must be a tensor {expected}, got {quote(influence)}")
    senders, hops = senders_of(graph), torch.full(influence.shape, -1, device="cpu")
    for row, dst in zip(hops, chosen.tolist(), strict=True):
        row[dst] = 0
        for count, new in enumerate(spread([senders], dst, tokens), 1):
            row[new] = count
    hops = hops.to(influence.device)
    total = influence.new_zeros(len(chosen), int(hops.max()) + 1)
    return HopInfluence(total.scatter_add(1, hops.clamp(min=0), influence.where(hops >= 0, 0.0)))


def jacobian_norms(
    function: Callable[[Tensor], Tensor],
    x: Float[Tensor, "tokens width"],
    receivers: Iterable[int] | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> Float[Tensor, "dst src"]:
    """The measured influence of any model: the size of ``d function(x)[dst] / d x[src]``, ``[dst, src]``.

    The sum of the absolute entries, as in torch_geometric's ``total_influence``, by a backward pass for each
    receiver and channel of the result. With ``projections`` the Frobenius norm instead, estimated by so many
    backward passes for each receiver: the mean square of ``u @ J``, u standard normal, which is unbiased.

    Raises TypeError or ValueError for what is no function of ``[tokens, width]`` to ``[tokens, width]``.

    >>> mean = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> jacobian_norms(lambda x: mean @ x, torch.zeros(2, 3)).tolist()
    [[3.0, 0.0], [1.5, 1.5]]
    """
    x = x.detach().requires_grad_()
    out = function(x)
    if not isinstance(out, Tensor) or out.dim() != 2 or x.dim() != 2 or len(out) != len(x):
        raise ValueError(
            f"function must take x [tokens, width] to as many rows, got {quote(out)} for {quote(x)}"
        )
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for dst in _tokens("receivers", receivers, len(x)).tolist():
        if projections is None:
            cotangents = torch.eye(out.shape[1])
        else:
            shape = checks.size("projections", projections, 1), out.shape[1]
            cotangents = torch.randn(shape, generator=generator)
        found = [torch.autograd.grad(out[dst], x, row, retain_graph=True)[0] for row in cotangents.to(out)]
        gradients = torch.stack(found)
        norm = gradients.square().sum(-1).mean(0).sqrt() if projections else gradients.abs().sum((0, 2))
        rows.append(norm)
    return torch.stack(rows) if rows else x.new_zeros(0, len(x))


def _tokens(name: str, given: Iterable[int] | None, count: int) -> Tensor:
    checks.check_order(name, given)
    chosen = (
        range(count) if given is None else [check_token(f"each of {name}", int(one), count) for one in given]
    )
    return torch.tensor(list(chosen), dtype=torch.int64, device="cpu")


def _propagate(mixings: list[Tensor], tokens: Tensor, by_rows: bool, count: int) -> Tensor:
    """``[tokens of the graph, chosen]``: what comes to chosen receivers, or from chosen senders."""
    share = torch.zeros(count, len(tokens), dtype=torch.float64, device="cpu")
    share[tokens, torch.arange(len(tokens), device="cpu")] = 1.0
    for mixing in reversed(mixings) if by_rows else mixings:
        share = (mixing.T if by_rows else mixing) @ share
    return share


def _mixings(
    stacked: list[TokenGraph],
    layers: int,
    residual: float | Sequence[float],
    weights: Tensor | Sequence[Tensor] | None,
) -> list[Tensor]:
    """The sparse matrix of each layer."""
    checks.check_order("residual", residual)
    checks.check_order("weights", weights)
    own = [float(residual)] if isinstance(residual, (int, float)) else [float(share) for share in residual]
    if not own or not all(0.0 <= share <= 1.0 for share in own):
        raise ValueError(
            f"residual must be in 0 .. 1, one number or one for each layer, got {quote(residual)}"
        )
    given = [weights] if weights is None or isinstance(weights, Tensor) else list(weights)
    mixing = cache(lambda g, o, w: _mixing(stacked[g], own[o], given[w]))
    return [mixing(layer % len(stacked), layer % len(own), layer % len(given)) for layer in range(layers)]


def _mixing(graph: TokenGraph, own: float, weights: Tensor | None) -> Tensor:
    edges, loops = edges_of(graph), torch.arange(graph.num_dst, device="cpu").expand(2, -1)
    if weights is None:
        values = graph.in_degree().double()[edges[1]].reciprocal()
    elif not isinstance(weights, Tensor) or tuple(weights.shape) != (edges.shape[1],):
        raise ValueError(f"weights must be [E] = [{edges.shape[1]}] for {graph!r}, got {quote(weights)}")
    else:
        values = weights.detach().cpu().double()
        if not bool(((values >= 0) & values.isfinite()).all()):
            raise ValueError(f"weights must be finite and at least 0, got {quote(values.tolist())}")
    places = torch.cat([loops, edges.flip(0)], 1)
    values = torch.cat([torch.full_like(loops[0], own, dtype=torch.float64), (1.0 - own) * values])
    return torch.sparse_coo_tensor(places, values, (graph.num_dst,) * 2, check_invariants=False).coalesce()
