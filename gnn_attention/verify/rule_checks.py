"""The semantics that no error bound can express: nobody heard is exactly 0, a NaN stays where it is heard, and the like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, GRAPHS, HEADS, KV_HEADS
from gnn_attention.verify.check import DIM, DTYPES, VALUE_DIM, Check, Settings, bound

__all__ = ["rule_checks"]


def rule_checks(settings: Settings) -> Iterator[Check]:
    """The semantics that are exact."""
    rules = {
        "nobody heard is exactly 0, lse -inf, gradients finite": _rule_deaf,
        "nobody heard is 0 with sinks and bias too": _rule_deaf_with_sinks,
        "NaN, inf and 1e4 reach only those who hear them": _rule_poison,
        "a NaN that is heard is not cleaned": _rule_nan_is_heard,
        "weights come in edge order, sum to 1 and agree with lse": _rule_weights,
        "decoding row by row equals the whole": _rule_decode,
        "edges in another order give the same output": _rule_order,
        "a sender named twice is refused, or counted once": _rule_duplicates,
    }
    for dtype in settings.dtypes:
        for backend in settings.backends:
            for name, rule in rules.items():
                yield Check("rules", backend.name, dtype, name, bound(rule, settings, DTYPES[dtype], backend))


def _qkv(settings: Settings, dtype: torch.dtype, dst: int, src: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(settings.seed + 2)
    shapes = ((BATCH, HEADS, dst, DIM), (BATCH, KV_HEADS, src, DIM), (BATCH, KV_HEADS, src, VALUE_DIM))
    q, k, v = (torch.randn(*s, generator=rng, dtype=torch.float64).to(settings.device, dtype) for s in shapes)
    return q, k, v


def _rule_deaf(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = (x.requires_grad_() for x in _qkv(settings, dtype, 10, 13))
    graph = GRAPHS["listed"].graph
    out, info = attend(q, k, v, graph, backend=backend, return_info=True)
    plain = attend(q, k, v, graph, backend=backend)
    gradients = torch.autograd.grad(plain.float().sum(), [q, k, v])
    deaf = (graph.in_degree() == 0).to(out.device)
    silent = all((o[:, :, deaf] == 0).all() and (o[:, :, ~deaf] != 0).any() for o in (out, plain))
    minus_inf = (info.lse[:, :, deaf] == -torch.inf).all() and info.lse[:, :, ~deaf].isfinite().all()
    return {"passed": bool(silent and minus_inf and all(g.isfinite().all() for g in gradients) and deaf.any())}


def _rule_deaf_with_sinks(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = _qkv(settings, dtype, 10, 13)
    graph = GRAPHS["listed"].graph
    bias, sinks = torch.ones(graph.num_edges, dtype=dtype, device=q.device), torch.ones(HEADS, dtype=dtype, device=q.device)
    out, info = attend(q, k, v, graph, bias=bias, sink_logits=sinks, backend=backend, return_info=True)
    deaf = (graph.in_degree() == 0).to(out.device)
    return {"passed": bool((out[:, :, deaf] == 0).all() and (info.lse[:, :, deaf] == -torch.inf).all())}


def _rule_poison(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """Poison the last tokens of a causal and a windowed graph: what the others receive, and their gradients, must not change."""
    for graph, victim in ((patterns.causal(13), 9), (patterns.window(13, 3), 2), (patterns.no_self(13), 5)):
        mask = graph.mask()
        safe = ~mask[:, victim]
        safe[victim] = False
        clean = _outputs_and_gradients(_qkv(settings, dtype, 13, 13), graph, backend, safe)
        for poison in (1e4, torch.nan, torch.inf, -torch.inf):
            q, k, v = _qkv(settings, dtype, 13, 13)
            for x in (q, k, v):
                x[:, :, victim] = poison
            found = _outputs_and_gradients((q, k, v), graph, backend, safe)
            untouched = ~mask[~safe].any(0)  # senders whom no poisoned receiver hears
            for a, b in zip(clean, found, strict=True):
                kept = safe if a is clean[0] else untouched
                if not torch.allclose(a[:, :, kept].double(), b[:, :, kept].double(), rtol=0, atol=1e-6):
                    return {
                        "passed": False,
                        "message": f"{poison} at token {victim} of {graph.name} reached those who do not hear it",
                    }
    return {"passed": True}


def _outputs_and_gradients(
    qkv: tuple[Tensor, Tensor, Tensor], graph: TokenGraph, backend: Backend, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of its given rows with respect to k and v."""
    q, k, v = (x.requires_grad_() for x in qkv)
    out = attend(q, k, v, graph, backend=backend)
    g_k, g_v = torch.autograd.grad(out[:, :, rows].float().sum(), [k, v])
    return out.detach(), g_k, g_v


def _rule_nan_is_heard(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    graph = patterns.window(13, 3)
    for which in range(3):
        qkv = _qkv(settings, dtype, 13, 13)
        qkv[which][:, :, 6, 0] = torch.nan
        out = attend(*qkv, graph, backend=backend)
        hears = torch.zeros(13, dtype=torch.bool, device=out.device)
        hears[[6] if which == 0 else [6, 7, 8]] = True
        column = out.isnan().any(-1) if which == 2 else out.isnan().all(-1)
        if not (column[:, :, hears].all() and not out[:, :, ~hears].isnan().any()):
            return {"passed": False, "message": f"a NaN in {'qkv'[which]} at token 6 of window(13, 3) is not where it is heard"}
    return {"passed": True}


def _rule_weights(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    case = GRAPHS["listed"]
    q, k, v = _qkv(settings, dtype, 10, 13)
    _, info = attend(q, k, v, case.graph, backend=backend, return_info=True)
    logits = torch.einsum("bhid,bhjd->bhij", *(x.cpu().double() for x in (q, k.repeat_interleave(HEADS // KV_HEADS, 1))))
    dense = oracle.masked_softmax(logits * DIM**-0.5, case.mask)
    wanted = torch.stack([dense[:, :, dst, src] for src, dst in case.edges()], dim=-1)
    found = info.weights().cpu().double()
    sums = torch.zeros(BATCH, HEADS, 10, dtype=torch.float64).index_add(2, torch.tensor([d for _, d in case.edges()]), found)
    ones = (case.graph.in_degree() > 0).double().expand_as(sums)
    some = info.weights(torch.tensor([5, 2])).cpu().double()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    close = [
        torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in ((found, wanted), (sums, ones), (some, wanted[..., [5, 2]]))
    ]
    return {"passed": all(close)}


def _rule_decode(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    for name in ("causal", "window | sinks", "prefix", "tree"):
        graph = GRAPHS[name].graph
        q, k, v = _qkv(settings, dtype, 13, 13)
        whole = attend(q, k, v, graph, backend=backend)
        for start, stop in ((0, 1), (5, 8), (12, 13)):
            part = attend(q[:, :, start:stop], k, v, graph.rows(start, stop), backend=backend)
            if not _close(part, whole[:, :, start:stop], dtype):
                return {"passed": False, "message": f"rows {start} .. {stop - 1} of {name} differ from the whole"}
    return {"passed": True}


def _rule_order(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = _qkv(settings, dtype, 13, 13)
    edges = patterns.window(13, 4).edge_index
    backwards = convert.from_edge_index(edges.flip(1), 13, 13)
    bias = torch.arange(edges.shape[1], device=q.device, dtype=dtype) / 16
    a = attend(q, k, v, patterns.window(13, 4), bias=bias, backend=backend)
    b = attend(q, k, v, backwards, bias=bias.flip(0), backend=backend)
    return {"passed": _close(a, b, dtype)}


def _rule_duplicates(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = _qkv(settings, dtype, 3, 3)
    edges = torch.tensor([[0, 1, 0, 2], [1, 1, 1, 2]])
    try:
        convert.from_edge_index(edges, 3, 3)
    except ValueError:
        once = convert.from_edge_index(edges[:, [0, 1, 3]], 3, 3)
        twice = convert.from_edge_index(edges, 3, 3, coalesce=True)
        return {"passed": torch.equal(attend(q, k, v, once, backend=backend), attend(q, k, v, twice, backend=backend))}
    return {"passed": False, "message": "an edge list with a duplicate was accepted"}


def _close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to eight roundings of the largest number: the same sum in another order."""
    return bool((a.double() - b.double()).abs().max() <= 8 * torch.finfo(dtype).eps * b.double().abs().max())
