"""Graphs and calls for the kernel of ``rows``; one table of cases covers all options of attention."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from support.bounds import assert_exact, summation_bound

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.edge_ops.normalisers import ELEMENTWISE
from gnn_attention.edge_softmax import accumulation_dtype
from gnn_attention.score_mods import RelativeBias, alibi, alibi_slopes, chain, softcap


def mark_slow(cases, quick):
    """Mark all cases but those in ``quick`` as slow tests."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        case if case in quick else pytest.param(*value, marks=pytest.mark.slow)
        for case, value in zip(cases, values, strict=True)
    ]


def listed(num_dst, num_src, share, seed=0):
    """Return a graph with shuffled edges; one receiver is isolated, and one attends to all senders."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_dst, num_src, generator=rng) < share
    mask[num_dst // 5] = mask[:, 2] = True
    mask[num_dst // 2] = False
    edges = mask.nonzero().T.flip(0)
    return ga.TokenGraph.from_edges(edges[:, torch.randperm(edges.shape[1], generator=rng)], num_dst, num_src)


def edgeless(num_dst, num_src):
    return ga.TokenGraph.from_edges(torch.empty(2, 0, dtype=torch.int64), num_dst, num_src)


GRAPH = listed(6, 5, 0.3)
GRAPHS = {
    "irregular": listed(14, 17, 0.3),
    "wide": listed(3, 30, 0.2),
    "window": patterns.window(30, 7),
    "one edge": ga.TokenGraph.from_edges(torch.tensor([[9], [19]]), 20, 10),
    "no edges": edgeless(4, 6),
}
VARYING = ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (dst - src - h - 2 * b) % 3 == 0, 4, 3, heads=2, batch=2
)
LEARNED = RelativeBias(2, 2).double()
torch.nn.init.normal_(LEARNED.table, generator=torch.Generator().manual_seed(1))


@dataclass
class Case:
    """Options of a call; the default is a plain call with 2 samples, 2 query heads and one key head."""

    graph: ga.TokenGraph = field(default_factory=lambda: GRAPH)
    heads: tuple = (2, 1)
    widths: tuple = (8, 8)
    score_mod: object = None
    bias: tuple | None = None
    closed: bool = False
    sinks: bool = False
    dropout: float = 0.0
    batch: int = 2
    normaliser: str = "softmax"
    # Each edge has ``features`` features, and one of ``types`` types if there are any.
    features: int = 0
    types: int = 0
    maps: tuple = ("edge_key", "edge_value")

    def inputs(self, dtype, device):
        """Return q, k, v, bias and sinks, with None for those that the case lacks, and edge_attr and maps."""
        rng = torch.Generator().manual_seed(3)
        graph = self.graph

        def draw(*shape):
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        q = draw(self.batch, self.heads[0], graph.num_dst, self.widths[0])
        k, v = (draw(self.batch, self.heads[1], graph.num_src, width) for width in self.widths)
        bias = None if self.bias is None else draw(*self.bias, graph.num_edges)
        if self.closed:
            # Every edge of receiver 0 and every third edge of the others has the bias -inf.
            bias[..., (torch.arange(graph.num_edges) % 3 == 0) | (graph.edge_index[1] == 0)] = -torch.inf
        sinks = draw(self.heads[0]) if self.sinks else None
        wide_dtype = accumulation_dtype(dtype)
        typed = [(q, dtype), (k, dtype), (v, dtype), (bias, wide_dtype), (sinks, dtype)]
        if self.features:
            shape = *([self.types] if self.types else []), self.heads[1], self.features
            widths = dict(zip(("edge_key", "edge_value"), self.widths, strict=True))
            typed.append((draw(graph.num_edges, self.features), dtype))
            typed += [(draw(*shape, widths[name]), dtype) for name in self.maps]
        return [None if x is None else x.to(device, kind).requires_grad_() for x, kind in typed]


LEARNED_TWICE = chain(softcap(2.0), LEARNED, ga.score_mods.log_multiplicity(torch.arange(1.0, 6.0)), LEARNED)
BOTH = chain(softcap(2.0), alibi(alibi_slopes(2)), LEARNED)
CASES = {
    "plain": Case(),
    "groups of two": Case(heads=(4, 2)),
    "two alibis": Case(score_mod=chain(alibi(alibi_slopes(2)), alibi((0.3, 0.1)))),
    "alibi after softcap": Case(score_mod=chain(softcap(1.5), alibi(alibi_slopes(2)))),
    "learned twice, after softcap": Case(score_mod=LEARNED_TWICE, bias=(2,)),
    "bias by head": Case(bias=(2,)),
    "closed edges": Case(bias=(2,), closed=True),
    "sinks": Case(sinks=True),
    "dropout": Case(dropout=0.4, heads=(2, 2)),
    "everything": Case(score_mod=BOTH, bias=(2,), sinks=True, dropout=0.3, widths=(24, 5)),
    "features": Case(features=3),
    "features of keys": Case(features=3, maps=("edge_key",), heads=(4, 2)),
    "features of values": Case(features=3, types=2, maps=("edge_value",), bias=(2,), closed=True),
    "features and everything": Case(
        features=5, types=3, score_mod=BOTH, bias=(2,), sinks=True, dropout=0.3, widths=(24, 5)
    ),
    "features without edges": Case(graph=edgeless(3, 2), features=3, types=2),
    "features and sigmoid": Case(features=3, types=2, bias=(2,), dropout=0.3, normaliser="sigmoid"),
    **{name: Case(normaliser=name, bias=(2,), score_mod=softcap(2.0)) for name in ELEMENTWISE},
    "by head and sample": Case(graph=VARYING, score_mod=alibi(alibi_slopes(2)), dropout=0.3),
    "receivers 2 to 4": Case(graph=patterns.causal(5).rows(2, 5), score_mod=BOTH, dropout=0.3),
    "no edges": Case(graph=edgeless(3, 2), bias=(2,)),
    "no receivers": Case(graph=edgeless(0, 2)),
    "no senders": Case(graph=edgeless(3, 0)),
    "no samples": Case(batch=0),
}


def run_attention(case, inputs, backend, seed=7):
    """Return ``(out, lse)`` of a case, with seeded dropout and a new graph without cached data."""
    torch.manual_seed(seed)
    q, k, v, bias, sinks, *features = inputs
    options = {"score_mod": case.score_mod, "bias": bias, "sink_logits": sinks, "dropout": case.dropout}
    options |= {"normaliser": case.normaliser}
    options |= dict(zip(("edge_attr", *case.maps), features, strict=False))
    if case.types:
        options["edge_type"] = torch.arange(case.graph.num_edges, device=q.device) % case.types
    out, info = ga.attend(q, k, v, replace(case.graph), **options, backend=backend, return_info=True)
    return out, info.lse if case.normaliser == "softmax" else torch.zeros_like(out[..., 0])


def gradients(out, lse, inputs, **options):
    """Return the gradients of a weighted sum of out and lse that leaves out the lse of isolated receivers."""
    rng = torch.Generator().manual_seed(5)
    total = 0.0
    for x in (out, lse):
        weights = torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.device, x.dtype)
        total = total + (x.masked_fill(x == -torch.inf, 0.0) * weights).sum()
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True, **options)


def parameters(case, inputs):
    """Return all tensors of a case that need gradients."""
    learned = list(LEARNED.parameters()) if "Relative" in repr(case.score_mod) else []
    return [x for x in inputs if x is not None] + learned


def check_against_the_reference(case, device):
    """Assert that output, lse and all gradients of ``rows`` equal those of the reference in float64."""
    LEARNED.to(device)
    inputs = case.inputs(torch.float64, device)
    leaves = parameters(case, inputs)
    output, expected = (run_attention(case, inputs, name) for name in ("rows", "reference"))
    assert_exact(output, expected)
    assert_exact(gradients(*output, leaves), gradients(*expected, leaves))


def lse_bound(q, k, scale, lse):
    """Return the largest error of an lse that is summed in float32, compared with float64.

    A logit is a sum of products. Its exp, which is off by up to 2 ulps, is summed over the in-edges, and a
    relative error of this sum is an absolute error of its logarithm. The logarithm is off by up to 2 ulps,
    too, and the shift is added with one more rounding.
    """
    products = float((q.double().abs().amax((0, 1)) @ k.double().abs().amax((0, 1)).T).max()) * abs(scale)
    logits = summation_bound(q.shape[-1] + 1, products, torch.float32)
    total = summation_bound(k.shape[2] + 4, 1.0, torch.float32)
    size = float(lse.detach().nan_to_num(0.0, 0.0, 0.0).abs().max())
    return 2 * logits + total + summation_bound(5, size, torch.float32)


def record_launches(monkeypatch, run=True):
    """Return a list to which every launched kernel is appended; with ``run=False`` no kernel runs."""
    from gnn_attention.backends.gpu.kernels import _common

    launch, kernels = _common.launch, []

    def record_launch(kernel, *args, **options):
        kernels.append(kernel)
        if run:
            launch(kernel, *args, **options)

    monkeypatch.setattr(_common, "launch", record_launch)
    return kernels
