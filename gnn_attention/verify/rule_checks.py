"""The semantics that no error bound can express: nobody heard is exactly 0, a NaN stays where it is heard, and the like."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gnn_attention import convert, patterns, score_mods
from gnn_attention._shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import ScoreMod
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, GRAPHS, HEADS, KV_HEADS, GraphCase
from gnn_attention.verify.check import DIM, DTYPES, GPU_ONLY, VALUE_DIM, Check, Settings, bound

__all__ = ["rule_checks"]


def rule_checks(settings: Settings) -> Iterator[Check]:
    """The semantics that are exact."""
    rules = {
        "nobody heard is exactly 0, lse -inf, gradients finite": _rule_deaf,
        "nobody heard is 0 with sinks and bias too": _rule_deaf_with_sinks,
        "NaN, inf and 1e4 reach only those who hear them": _rule_poison,
        "a NaN that is heard is not cleaned": _rule_nan_is_heard,
        "what a score_mod makes of a non-edge reaches nobody": _rule_mod_on_non_edges,
        "lse and the output beside it, with score_mod, bias and sinks": _rule_lse,
        "other sizes: heads, samples, widths, lengths, strides": _rule_sizes,
        "dropout keeps the mean and drops its share": _rule_dropout,
        "weights come in edge order, sum to 1 and agree with lse": _rule_weights,
        "decoding row by row equals the whole": _rule_decode,
        "edges in another order give the same output": _rule_order,
        "a sender named twice is refused, or counted once": _rule_duplicates,
    }
    for dtype in [name for name in settings.dtypes if name not in GPU_ONLY]:  # tf32 is a precision, not another semantics
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
        untouched = ~mask[~safe].any(0)  # senders whom no poisoned receiver hears
        for score_mod in (None, score_mods.softcap(3.0)):
            clean = _outputs_and_gradients(_qkv(settings, dtype, 13, 13), graph, backend, safe, score_mod)
            for poison in (1e4, torch.nan, torch.inf, -torch.inf):
                q, k, v = _qkv(settings, dtype, 13, 13)
                for x in (q, k, v):
                    x[:, :, victim] = poison
                found = _outputs_and_gradients((q, k, v), graph, backend, safe, score_mod)
                for a, b in zip(clean, found, strict=True):
                    kept = safe if a is clean[0] else untouched
                    if not torch.allclose(a[:, :, kept].double(), b[:, :, kept].double(), rtol=0, atol=1e-6):
                        message = f"{poison} at token {victim} of {graph.name} reached those who do not hear it ({score_mod})"
                        return {"passed": False, "message": message}
    return {"passed": True}


def _outputs_and_gradients(
    qkv: tuple[Tensor, Tensor, Tensor], graph: TokenGraph, backend: Backend, rows: Tensor, score_mod: ScoreMod | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of its given rows with respect to k and v."""
    q, k, v = (x.requires_grad_() for x in qkv)
    out = attend(q, k, v, graph, score_mod=score_mod, backend=backend)
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


def _rule_mod_on_non_edges(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """A score_mod that divides by 0 where a causal graph has no edge: no NaN in the output or in a gradient."""
    for name in ("causal", "window", "decode rows"):
        graph = GRAPHS[name].graph
        results = []
        for least in (1, 0):  # the same on every edge; on non-edges finite, then not
            q, k, v = (x.requires_grad_() for x in _qkv(settings, dtype, graph.num_dst, graph.num_src))

            def share(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor, least: int = least) -> Tensor:
                return score / (dst - src + 1).clamp(min=least)

            out = attend(q, k, v, graph, score_mod=share, backend=backend)
            results.append((out, *torch.autograd.grad(out.float().sum(), [q, k, v])))
        if not all(_close(a, b, dtype) for a, b in zip(*results, strict=True)):
            return {"passed": False, "message": f"a score_mod without a value on the non-edges of {name} spoils what is heard"}
    return {"passed": True}


def _everything(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A score_mod that looks at all it is told."""
    return score * (1 + b / 8) + h / 4 - src / 16 + (dst - src) / 32


def _rule_lse(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """Output, lse and the gradient of lse with every set of options; the output is the same when nobody asks for lse."""
    for name in ("causal", "listed", "decode rows"):
        case = GRAPHS[name]
        q, k, v = _qkv(settings, dtype, case.graph.num_dst, case.graph.num_src)
        q.requires_grad_()
        bias, sinks = torch.linspace(-1, 1, case.graph.num_edges).to(q), torch.linspace(-1, 1, HEADS).to(q)
        everything: dict[str, Any] = {"score_mod": _everything, "bias": bias, "sink_logits": sinks}
        for given in itertools.product((False, True), repeat=3):
            options = {name: value for (name, value), there in zip(everything.items(), given, strict=True) if there}
            out, info = attend(q, k, v, case.graph, backend=backend, return_info=True, **options)
            heard = info.lse > -torch.inf
            g_q = torch.autograd.grad(info.lse[heard].sum(), q, retain_graph=True)[0]
            alone = attend(q, k, v, case.graph, backend=backend, **options)
            wanted, wanted_lse, wanted_g_q = _lse_truth(q, k, v, case, **options)
            for word, found, true, precision in (
                ("output beside lse", out, wanted, dtype),
                ("output", alone, wanted, dtype),
                ("lse", info.lse[heard], wanted_lse[heard.cpu()], info.lse.dtype),
                ("gradient of lse", g_q, wanted_g_q, dtype),
            ):
                if not _close(found.cpu(), true, precision):
                    return {"passed": False, "message": f"{word} on {name} with {', '.join(options) or 'nothing'} is wrong"}
    return {"passed": True}


def _lse_truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    case: GraphCase,
    score_mod: ScoreMod | None = None,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and the gradient of its finite sum with respect to q, from the formula in float64."""
    q, k, v = (x.detach().cpu().double() for x in (q, k, v))
    q.requires_grad_()
    sinks = None if sink_logits is None else sink_logits.cpu().double()
    table = torch.zeros(case.mask.shape[2:], dtype=torch.float64)
    for number, (src, dst) in enumerate(case.edges()):
        table[dst, src] = 0.0 if bias is None else float(bias[number])

    def modify(logits: Tensor) -> Tensor:
        b, h = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(1, -1, 1, 1)
        return table + (logits if score_mod is None else score_mod(logits, b, h, *case.positions()))

    wanted = oracle.attention(q, k, v, case.mask, DIM**-0.5, modify, sinks)
    logits = modify(torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * DIM**-0.5)
    lse = logits.masked_fill(~case.mask, -torch.inf).logsumexp(-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks.view(1, -1, 1))
    return wanted, lse, torch.autograd.grad(lse[case.mask.any(-1)].sum(), q)[0]


SIZES = (  # samples, query heads, key heads, receivers, senders, dim, value_dim
    (1, 4, 1, 13, 13, 16, 16),
    (2, 3, 3, 5, 37, 24, 40),
    (1, 2, 1, 150, 150, 20, 8),
    (3, 1, 1, 1, 300, 64, 64),
    (2, 8, 2, 64, 64, 32, 32),
)


def _rule_sizes(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """Output and gradients for sizes unlike those of the other checks, on graphs that differ by head and sample or not at all."""
    for samples, heads, kv_heads, dst, src, dim, value_dim in SIZES:
        for varies in (False, True):
            sizes = {"heads": heads, "batch": samples} if varies else {}
            graph = TokenGraph.from_rule(_late if varies else _near, dst, src, name="other sizes", **sizes)
            rng = torch.Generator().manual_seed(settings.seed + 3)
            shapes = ((dst, heads, dim), (src, kv_heads, dim), (src, kv_heads, value_dim), (dst, heads, value_dim))
            # [B, T, H, D] in memory, seen as [B, H, T, D]: as a layer that splits its channels into heads would give them
            drawn = [torch.randn(samples, *s, generator=rng, dtype=torch.float64).to(dtype).transpose(1, 2) for s in shapes]
            q, k, v, direction = (x.detach().to(settings.device).requires_grad_() for x in drawn)
            results = [_with_gradients(attend(q, k, v, graph, backend=backend), [q, k, v], direction)]
            q, k, v, direction = (x.detach().double().requires_grad_() for x in drawn)
            mask = graph.mask().expand(samples, heads, dst, src)
            results.append(_with_gradients(oracle.attention(q, k, v, mask, dim**-0.5), [q, k, v], direction))
            if not all(_close(a.cpu(), b, dtype) for a, b in zip(*results, strict=True)):
                shape = f"q {[samples, heads, dst, dim]}, k {[samples, kv_heads, src, dim]}, Dv {value_dim}"
                return {"passed": False, "message": f"{shape}{', by head and sample' if varies else ''} is wrong"}
    return {"passed": True}


def _with_gradients(out: Tensor, leaves: list[Tensor], direction: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, leaves, direction.detach())]


def _near(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst - src < 100) & (src % 5 != 1)


def _late(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src + dst) % (2 + b + h) != 1


def _rule_dropout(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """Equal weights over n senders that say 1: a mean of n Bernoulli(1/2) values, doubled; ``info.weights`` are undropped."""
    n, shape, device = 256, (1, 1, 256, 8), torch.device(settings.device)
    q, k, v = (x.to(device, dtype) for x in (torch.zeros(shape), torch.zeros(shape), torch.ones(shape)))
    deviation = n**-0.5
    for graph in (patterns.full(n), patterns.no_self(n)):
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(settings.seed)
            plain = attend(q, k, v, graph, dropout=0.5, backend=backend)
            beside, info = attend(q, k, v, graph, dropout=0.5, backend=backend, return_info=True)
        for out in (plain, beside):
            rows = out[..., 0].double().flatten()
            if not (abs(rows.mean() - 1) < 6 * deviation * n**-0.5 and 0.7 < rows.std() / deviation < 1.3):
                return {
                    "passed": False,
                    "message": f"mean {rows.mean():.3f}, deviation {rows.std() / deviation:.2f} of what is due",
                }
        undropped = torch.full((1, 1, 9), 1 / graph.max_in_degree, device=device)
        if not _close(info.weights(torch.arange(9)), undropped, torch.float32):
            return {"passed": False, "message": "info.weights are not those before dropout"}
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
