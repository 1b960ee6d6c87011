"""Cases of attention for kernels, and the dense formula in float64 that they are held against."""

from dataclasses import dataclass, field

import torch

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import dropout as backends_dropout
from gnn_attention.edges import accumulation_dtype
from gnn_attention.score_mods import (
    RelativeBias,
    alibi,
    alibi_slopes,
    chain,
    log_multiplicity,
    relative_bias,
    softcap,
)
from gnn_attention.verify.measure import summation_bound


def listed(num_dst, num_src, share, seed=0):
    """A random graph in no particular order; receiver 3 hears nobody, 1 hears everybody, everybody but 3
    hears sender 2.
    """
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_dst, num_src, generator=rng) < share
    mask[1] = mask[:, 2] = True
    mask[3] = False
    edges = mask.nonzero().T.flip(0)
    return ga.TokenGraph.from_edges(edges[:, torch.randperm(edges.shape[1], generator=rng)], num_dst, num_src)


GRAPH = listed(6, 5, 0.3)
VARYING = ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (dst - src - h - 2 * b) % 3 == 0, 4, 3, heads=2, batch=2
)
LEARNED = RelativeBias(2, 2).double()
torch.nn.init.normal_(LEARNED.table, generator=torch.Generator().manual_seed(1))


@dataclass
class Case:
    """What differs from plain attention over ``graph`` with 2 samples, 2 query heads and one key/value
    head.
    """

    graph: ga.TokenGraph = field(default_factory=lambda: GRAPH)
    heads: tuple = (2, 1)
    widths: tuple = (8, 8)
    score_mod: object = None
    bias: tuple | None = None
    closed: bool = False
    sinks: bool = False
    dropout: float = 0.0

    def inputs(self, dtype, device):
        """q, k, v, and bias and sinks where there are any."""
        rng, g = torch.Generator().manual_seed(3), self.graph
        shapes = [
            (2, self.heads[0], g.num_dst, self.widths[0]),
            (2, self.heads[1], g.num_src, self.widths[0]),
            (2, self.heads[1], g.num_src, self.widths[1]),
        ]
        found = [torch.randn(shape, generator=rng, dtype=torch.float64).to(device, dtype) for shape in shapes]
        bias = (
            torch.randn(*self.bias, g.num_edges, generator=rng, dtype=torch.float64)
            if self.bias is not None
            else None
        )
        if self.closed:
            bias[..., ::3] = -torch.inf
            bias[..., g.edge_index[1] == 0] = -torch.inf  # who hears nobody though it has in-edges
        bias = None if bias is None else bias.to(device, accumulation_dtype(dtype))
        sinks = (
            torch.randn(self.heads[0], generator=rng, dtype=torch.float64).to(device, dtype)
            if self.sinks
            else None
        )
        return [x if x is None else x.requires_grad_() for x in (*found, bias, sinks)]


CASES = {
    "plain": Case(),
    "one head": Case(heads=(1, 1)),
    "groups of two": Case(heads=(4, 2)),
    "odd widths": Case(widths=(24, 5)),
    "wider values": Case(widths=(3, 40)),
    "softcap": Case(score_mod=softcap(0.7)),
    "alibi": Case(score_mod=alibi(alibi_slopes(2))),
    "two alibis": Case(score_mod=chain(alibi(alibi_slopes(2)), alibi((0.3, 0.1)))),
    "alibi after softcap": Case(score_mod=chain(softcap(1.5), alibi(alibi_slopes(2)))),
    "relative bias": Case(score_mod=relative_bias(torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5))),
    "learned, before and after softcap": Case(
        score_mod=chain(LEARNED, log_multiplicity(torch.arange(1.0, 6.0)), softcap(2.0), LEARNED), bias=(2,)
    ),
    "bias by head": Case(bias=(2,)),
    "bias by sample": Case(bias=(2, 1)),
    "bias for all": Case(bias=()),
    "closed edges": Case(bias=(2,), closed=True),
    "sinks": Case(sinks=True),
    "dropout": Case(dropout=0.4, heads=(2, 2)),
    "everything": Case(
        score_mod=chain(alibi(alibi_slopes(2)), LEARNED, softcap(2.0)),
        bias=(2,),
        sinks=True,
        dropout=0.3,
        widths=(24, 5),
    ),
    "by head and sample": Case(graph=VARYING, score_mod=alibi(alibi_slopes(2)), dropout=0.3),
    "receivers 2 to 4": Case(
        graph=patterns.causal(5).rows(2, 5), score_mod=alibi(alibi_slopes(2)), dropout=0.3
    ),
    "no edges": Case(graph=ga.TokenGraph.from_edges(torch.empty(2, 0, dtype=torch.int64), 3, 2), bias=(2,)),
    "no receivers": Case(graph=ga.TokenGraph.from_edges(torch.empty(2, 0, dtype=torch.int64), 0, 2)),
    "no senders": Case(graph=ga.TokenGraph.from_edges(torch.empty(2, 0, dtype=torch.int64), 3, 0)),
}


def attended(case, given, backend, seed=7, **options):
    """``(out, lse)`` with the dropout of a seed."""
    torch.manual_seed(seed)
    q, k, v, bias, sinks = given
    out, info = ga.attend(
        q,
        k,
        v,
        case.graph,
        score_mod=case.score_mod,
        bias=bias,
        sink_logits=sinks,
        dropout=case.dropout,
        backend=backend,
        return_info=True,
        **options,
    )
    return out, info.lse


def formula(case, given, seed=7):
    """Dense attention, written out over all pairs in float64."""
    q, k, v, bias, sinks = (None if x is None else x.double() for x in given)
    graph, (batch, heads, num_dst, dim) = case.graph, given[0].shape
    torch.manual_seed(seed)
    drawn = backends_dropout.draw_seed(q.device) if case.dropout else None
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(1, -1, 1, 1)
    i = torch.arange(num_dst).view(-1, 1) + graph.dst_offset
    j = torch.arange(graph.num_src).view(1, -1) + graph.src_offset
    b, h, i, j = (x.to(q.device) for x in (b, h, i, j))
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * dim**-0.5
    logits = logits if case.score_mod is None else case.score_mod(logits, b, h, i, j)
    if bias is not None:
        src, dst = graph.edges_on(q.device)
        table = logits.new_zeros(batch, heads, num_dst, graph.num_src)
        shown = bias.expand(batch, heads, -1)
        table = table.index_put((b.flatten().view(-1, 1, 1), h.flatten().view(1, -1, 1), dst, src), shown)
        logits = logits + table
    mask = graph.mask(q.device)
    logits = logits.masked_fill(~mask, -torch.inf)
    sink = logits.new_full((1, heads, 1, 1), -torch.inf) if sinks is None else sinks.view(1, -1, 1, 1)
    joined = torch.cat([logits, sink.expand(batch, heads, num_dst, 1)], -1)
    deaf = ~mask.any(-1) if graph.num_src else torch.ones(num_dst, dtype=torch.bool, device=q.device)
    dead = deaf.expand(batch, heads, num_dst) | (joined == -torch.inf).all(-1)
    weights = joined.masked_fill(dead.unsqueeze(-1), 0.0).softmax(-1)[..., :-1]
    weights = weights.masked_fill(dead.unsqueeze(-1) | (logits == -torch.inf), 0.0)
    lse = joined.masked_fill(dead.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(dead, -torch.inf)
    if drawn is not None:
        stays = backends_dropout.mask(drawn, b, h, i, j, case.dropout)
        weights = weights * stays / (1 - case.dropout)
    return weights @ v, lse


def gradients(out, lse, inputs):
    """Of a sum of out and lse with fixed weights; a receiver that hears nobody has no lse to speak of."""
    rng = torch.Generator().manual_seed(5)
    total = sum(
        (
            x.masked_fill(x == -torch.inf, 0.0)
            * torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.device, x.dtype)
        ).sum()
        for x in (out, lse)
    )
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def lse_bound(q, k, scale, lse):
    """How far lse, summed in float32, may be from that of the same numbers in float64.

    A logit is a sum of products; exp, of 2 ulps, is summed over the in-edges, and a relative error of the sum
    is an absolute one of its logarithm; the logarithm, of 2 ulps, and the sum with the shift are rounded once
    more.
    """
    products = float((q.double().abs().amax((0, 1)) @ k.double().abs().amax((0, 1)).T).max()) * abs(scale)
    logits = summation_bound(q.shape[-1] + 1, products, torch.float32)
    size = float(lse.detach()[lse.isfinite()].abs().max())
    return (
        2 * logits
        + summation_bound(k.shape[2] + 4, 1.0, torch.float32)
        + summation_bound(5, size, torch.float32)
    )


def parameters(case, given):
    """All that is learned."""
    return [x for x in given if x is not None] + (
        list(LEARNED.parameters()) if "Relative" in repr(case.score_mod) else []
    )
