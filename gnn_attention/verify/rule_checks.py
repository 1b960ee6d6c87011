"""The semantics that no error bound can express: nobody heard is exactly 0, a NaN stays where it is heard, and the like."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gnn_attention import convert, patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import ScoreMod
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, GRAPHS, HEADS, KV_HEADS, GraphCase
from gnn_attention.verify.check import DIM, DTYPES, GPU_ONLY, VALUE_DIM, Check, Settings, bound, worst
from gnn_attention.verify.measure import ALLOWED_OUTPUT, EXACT, Outcome, Truth, exactly, judge, summation_bound, within
from gnn_attention.verify.refusals import DROPOUT, refused
from gnn_attention.verify.truth import ORDERS, Dense, attention_truth, unchanged

__all__ = ["rule_checks"]

Rule = Callable[[Settings, torch.dtype, Backend], Mapping[str, Any]]


def rule_checks(settings: Settings) -> Iterator[Check]:
    """The semantics that are exact."""
    for dtype in [name for name in settings.dtypes if name not in GPU_ONLY]:  # tf32 is a precision, not another semantics
        for backend in settings.backends:
            for name, (rule, option) in _rules().items():
                run, skipped = (
                    bound(rule, settings, DTYPES[dtype], backend),
                    refused(backend, settings.device, DTYPES[dtype], option),
                )
                yield Check("rules", backend.name, dtype, name, run, factors={"rule": name}, skipped=skipped)


def _rules() -> dict[str, tuple[Rule, str]]:
    """Each rule, and the option without which it cannot be asked."""
    return {
        "nobody heard is exactly 0, lse -inf, gradients finite": (_rule_deaf, "plain"),
        "nobody heard is 0 with sinks and bias too": (_rule_deaf_with_sinks, "edge bias"),
        "NaN, inf and 1e4 reach only those who hear them": (_rule_poison, "softcap"),
        "a NaN that is heard is not cleaned": (_rule_nan_is_heard, "plain"),
        "what a score_mod makes of a non-edge reaches nobody": (_rule_mod_on_non_edges, "softcap"),
        "lse and the output beside it, with score_mod, bias and sinks": (_rule_lse, "alibi, softcap, bias, sinks"),
        "other sizes: heads, samples, widths, lengths, strides": (_rule_sizes, "plain"),
        "dropout keeps the mean and drops its share": (_rule_dropout, DROPOUT),
        "weights come in edge order, sum to 1 and agree with lse": (_rule_weights, "plain"),
        "decoding row by row equals the whole": (_rule_decode, "plain"),
        "edges in another order give the same output": (_rule_order, "edge bias"),
        "a sender named twice is refused, or counted once": (_rule_duplicates, "plain"),
    }


def _qkv(settings: Settings, dtype: torch.dtype, dst: int, src: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(settings.seed + 2)
    shapes = ((BATCH, HEADS, dst, DIM), (BATCH, KV_HEADS, src, DIM), (BATCH, KV_HEADS, src, VALUE_DIM))
    q, k, v = (torch.randn(*s, generator=rng, dtype=torch.float64).to(settings.device, dtype) for s in shapes)
    return q, k, v


@functools.lru_cache(maxsize=128)
def _truth(
    settings: Settings,
    dtype: torch.dtype,
    name: str,
    dense: Dense = unchanged,
    additive: bool = True,
    rows: tuple[int, ...] | None = None,
) -> Truth:
    """The truth about a named graph and the inputs of :func:`_qkv`, shared by all backends; gradients of the sum of ``rows``."""
    mask = _masks(name)
    q, k, v = _qkv(settings, dtype, *mask.shape[2:])
    direction = q.new_zeros(BATCH, HEADS, mask.shape[2], VALUE_DIM)
    direction[:, :, slice(None) if rows is None else list(rows)] = 1.0
    inputs = {"q": q, "k": k, "v": v}
    return attention_truth(inputs, mask, direction, DIM**-0.5, dense, additive, device=settings.device)


def _masks(name: str) -> Tensor:
    case = GRAPHS.get(name)
    return _poisoned_graph(name).mask().expand(BATCH, HEADS, -1, -1) if case is None else case.mask


def _judged(out: Tensor, gradients: Mapping[str, Tensor], truth: Truth, backend: Backend) -> Outcome:
    return judge(out, gradients, truth.for_backend(backend))


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


POISONED = {"causal": 9, "window of 3": 2, "no_self": 5}  # graphs of 13 tokens, and the token that is poisoned
MODS: dict[str, tuple[ScoreMod | None, Dense, bool]] = {
    "plain": (None, unchanged, True),
    "softcap": (score_mods.softcap(3.0), lambda inputs, logits: 3.0 * torch.tanh(logits / 3.0), False),
}


def _poisoned_graph(name: str) -> TokenGraph:
    return patterns.window(13, 3) if name == "window of 3" else GRAPHS[name].graph


def _rule_poison(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """One token of a graph is poisoned: outputs without a path from it, and gradients of what they attend to, stay right."""
    return worst(_poisoned(settings, dtype, backend))


def _poisoned(settings: Settings, dtype: torch.dtype, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    for name, victim in POISONED.items():
        graph = _poisoned_graph(name)
        mask = graph.mask()
        safe = ~mask[:, victim]
        safe[victim] = False
        untouched = ~mask[~safe].any(0)  # senders to which no poisoned receiver attends
        rows = tuple(safe.nonzero().flatten().tolist())
        for mod, (score_mod, dense, additive) in MODS.items():
            truth = _truth(settings, dtype, name, dense, additive, rows).rows(safe, untouched)
            for poison in (0.0, 1e4, torch.nan, torch.inf, -torch.inf):
                q, k, v = _qkv(settings, dtype, 13, 13)
                for x in (q, k, v):
                    x[:, :, victim] = poison
                out, *gradients = _outputs_and_gradients((q, k, v), graph, backend, safe, score_mod)
                found = dict(zip("kv", (g[:, :, untouched] for g in gradients), strict=True))
                what = f"{poison:g} at token {victim} of {graph.name}, {mod}, reached others"
                yield what, _judged(out[:, :, safe], found, truth, backend)


def _outputs_and_gradients(
    qkv: tuple[Tensor, Tensor, Tensor], graph: TokenGraph, backend: Backend, rows: Tensor, score_mod: ScoreMod | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of its given rows with respect to k and v."""
    q, k, v = (x.requires_grad_() for x in qkv)
    out = attend(q, k, v, graph, score_mod=score_mod, backend=backend)
    g_k, g_v = torch.autograd.grad(out[:, :, rows].double().sum(), [k, v])
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


def _shared(inputs: Mapping[str, Tensor], logits: Tensor, first: int = 0) -> Tensor:
    """``logit / (dst - src + 1)`` on the edges of a causal graph, and some number elsewhere."""
    dst, src = (torch.arange(n, device=logits.device) for n in logits.shape[2:])
    return logits / (dst.unsqueeze(1) + first - src + 1).clamp(min=1)


SHARED = {name: functools.partial(_shared, first=GRAPHS[name].first_dst) for name in ("causal", "window", "decode rows")}


def _rule_mod_on_non_edges(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """A score_mod that divides by 0 where a causal graph has no edge: right outputs and gradients all the same."""

    def share(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return score / (dst - src + 1).clamp(min=0)

    def outcomes() -> Iterator[tuple[str, Outcome]]:
        for name, dense in SHARED.items():
            graph = GRAPHS[name].graph
            q, k, v = (x.requires_grad_() for x in _qkv(settings, dtype, graph.num_dst, graph.num_src))
            out = attend(q, k, v, graph, score_mod=share, backend=backend)
            gradients = dict(zip("qkv", torch.autograd.grad(out.double().sum(), [q, k, v]), strict=True))
            what = f"a score_mod that has no value on the non-edges of {name}"
            yield what, _judged(out, gradients, _truth(settings, dtype, name, dense, False), backend)

    return worst(outcomes())


def _everything(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A score_mod that looks at all it is told."""
    return score * (1 + b / 8) + h / 4 - src / 16 + (dst - src) / 32


def _rule_lse(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """Output, lse and the gradient of lse with every set of options; the output is the same without lse."""

    def outcomes() -> Iterator[tuple[str, Outcome]]:
        for name in ("causal", "listed", "decode rows"):
            for given in itertools.product((False, True), repeat=3):
                yield from _with_lse(settings, dtype, backend, name, given)

    return worst(outcomes())


def _with_lse(
    settings: Settings, dtype: torch.dtype, backend: Backend, name: str, given: tuple[bool, ...]
) -> Iterator[tuple[str, Outcome]]:
    case = GRAPHS[name]
    q, k, v = _qkv(settings, dtype, case.graph.num_dst, case.graph.num_src)
    q.requires_grad_()
    options = _lse_options(case, q, given)
    out, info = attend(q, k, v, case.graph, backend=backend, return_info=True, **options)
    reached = info.lse > -torch.inf
    g_q = torch.autograd.grad(info.lse[reached].sum(), q, retain_graph=True)[0]
    plain = attend(q, k, v, case.graph, backend=backend, **options)
    truth, lse, slope = _lse_truth(settings, dtype, name, given)
    found, what = info.lse[reached], f"{name} with {', '.join(options) or 'no option'}"
    exact = found.dtype == torch.float64
    allowed = 0.0 if exact else _allowed_lse(case, q, k, options)
    yield f"output beside lse, {what}", _judged(out, {}, truth, backend)
    yield f"output, {what}", _judged(plain, {}, truth, backend)
    yield f"lse, {what}", exactly("lse", found, lse) if exact else within("lse", found, lse, allowed)
    yield f"gradient of lse, {what}", _judged(out, {"q": g_q}, slope, backend)


def _lse_options(case: GraphCase, like: Tensor, given: tuple[bool, ...]) -> dict[str, Any]:
    bias, sinks = torch.linspace(-1, 1, case.graph.num_edges).to(like.detach()), torch.linspace(-1, 1, HEADS).to(like.detach())
    everything: dict[str, Any] = {"score_mod": _everything, "bias": bias, "sink_logits": sinks}
    return {name: value for (name, value), there in zip(everything.items(), given, strict=True) if there}


def _lse_terms(case: GraphCase) -> int:
    """How many roundings lse has: those of a logit and of a sum over senders.

    A logit is a sum of DIM products; its scale, score_mod and bias round at most 8 times more. lse moves by no more than the
    logit that moves most; its own sum has a term for each sender and the sink, exp and log round twice each.
    """
    return DIM + 8 + case.graph.num_src + 1 + 4


def _allowed_lse(case: GraphCase, q: Tensor, k: Tensor, options: Mapping[str, Any]) -> float:
    """How far lse in float32 may be off: by its roundings, or by twice as much as that of SDPA in the dtype of q."""
    bound = summation_bound(_lse_terms(case), _largest_logit(q, k, options), torch.float32)
    return max(bound, ALLOWED_OUTPUT * oracle.sdpa_lse_error(q, k, case.mask.to(q.device), DIM**-0.5))


def _largest_logit(q: Tensor, k: Tensor, options: Mapping[str, Any]) -> float:
    """The largest sum of absolute values of which a logit is made, at least 1: the magnitude of its roundings."""
    serving = k.abs().double().repeat_interleave(HEADS // KV_HEADS, 1)
    largest: float = float((q.detach().abs().double() @ serving.mT).max()) * DIM**-0.5
    # _everything: a factor of at most 1 + 7 / 8, then 3 / 4, 12 / 16 and 12 / 32
    largest = 2 * largest + 2 if "score_mod" in options else largest
    return max(1.0, largest + ("bias" in options))


@functools.lru_cache(maxsize=128)
def _lse_truth(settings: Settings, dtype: torch.dtype, name: str, given: tuple[bool, ...]) -> tuple[Truth, Tensor, Truth]:
    """The truth about the output, about lse, and about the gradient of the sum of lse for q.

    That gradient is attention over keys; its yardstick is the formula in float32, where everyone sums, over several orders of the
    channels, with weights computed from a rounded lse.
    """
    case = GRAPHS[name]
    q, k, v = _qkv(settings, dtype, case.graph.num_dst, case.graph.num_src)
    options = {key: x if key == "score_mod" else x.cpu() for key, x in _lse_options(case, q, given).items()}
    inputs = {"q": q.cpu(), "k": k.cpu(), "v": v.cpu()}
    inputs |= {"sink_logits": options["sink_logits"]} if "sink_logits" in options else {}
    dense = functools.partial(_modified, case, options)
    direction = torch.zeros(BATCH, HEADS, case.graph.num_dst, VALUE_DIM, dtype=dtype)
    truth = attention_truth(inputs, case.mask, direction, DIM**-0.5, dense, additive=False, device=settings.device)
    lse, slope = _lse(case, inputs, dense, torch.float64)
    error = 0.0 if dtype == torch.float64 else max(_slope_error(case, inputs, dense, n, slope) for n in range(ORDERS))
    return truth, lse, Truth(truth.out, {"q": slope}, {**truth.yardstick, "q": error})


def _slope_error(case: GraphCase, inputs: Mapping[str, Tensor], dense: Dense, number: int, slope: Tensor) -> float:
    """How far the gradient of lse is off in float32, channels in another order."""
    order = torch.randperm(DIM, generator=torch.Generator().manual_seed(number))
    turned = {**inputs, "q": inputs["q"][..., order], "k": inputs["k"][..., order]}
    found = _lse(case, turned, dense, torch.float32)[1]
    return float((found - slope[..., order]).abs().max())


def _modified(case: GraphCase, options: Mapping[str, Any], inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """The score_mod and the bias on dense logits ``[B, H, dst, src]``."""
    b, h = (torch.arange(n, device=logits.device).view(shape) for n, shape in ((BATCH, (-1, 1, 1, 1)), (HEADS, (1, -1, 1, 1))))
    if "score_mod" in options:
        logits = _everything(logits, b, h, *(x.to(logits.device) for x in case.positions())).to(logits.dtype)
    if "bias" not in options:
        return logits
    src, dst = torch.tensor(case.edges(), device=logits.device).T
    return logits + logits.new_zeros(logits.shape[2:]).index_put((dst, src), options["bias"].to(logits))


def _lse(case: GraphCase, inputs: Mapping[str, Tensor], dense: Dense, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of receivers with in-edges: lse by the formula, and the gradient of its sum for q."""
    q, k = inputs["q"].detach().to(dtype).requires_grad_(), inputs["k"].to(dtype).repeat_interleave(HEADS // KV_HEADS, 1)
    with torch.enable_grad():
        logits = dense(inputs, torch.einsum("bhid,bhjd->bhij", q, k) * DIM**-0.5)
        lse = logits.masked_fill(~case.mask, -torch.inf).logsumexp(-1)
        sinks = inputs.get("sink_logits")
        lse = lse if sinks is None else torch.logaddexp(lse, sinks.to(dtype).view(1, -1, 1))
        reached = case.mask.any(-1)
        weights = torch.where(case.mask, (logits - lse.unsqueeze(-1)).exp(), 0.0)
        (slope,) = torch.autograd.grad(logits, q, weights.detach())
    return lse[reached].detach(), slope


SIZES = (  # samples, query heads, key heads, receivers, senders, dim, value_dim
    (1, 4, 1, 13, 13, 16, 16),
    (2, 3, 3, 5, 37, 24, 40),
    (1, 2, 1, 150, 150, 20, 8),
    (3, 1, 1, 1, 300, 64, 64),
    (2, 8, 2, 64, 64, 32, 32),
)


def _rule_sizes(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """Output and gradients for sizes unlike those of the other checks, on graphs that differ by head and sample or not at all."""
    return worst(_of_size(settings, dtype, backend, number, varies) for number in range(len(SIZES)) for varies in (False, True))


def _of_size(settings: Settings, dtype: torch.dtype, backend: Backend, number: int, varies: bool) -> tuple[str, Outcome]:
    drawn, graph = _drawn_of_size(settings, dtype, number), _graph_of_size(number, varies)
    q, k, v, direction = (x.detach().to(settings.device) for x in drawn)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(q, k, v, graph, backend=backend)
    gradients = dict(zip("qkv", torch.autograd.grad(out, leaves, direction), strict=True))
    what = f"q {list(q.shape)}, k {list(k.shape)}, Dv {v.shape[3]}{', by head and sample' if varies else ''}"
    return what, _judged(out, gradients, _truth_of_size(settings, dtype, number, varies), backend)


def _drawn_of_size(settings: Settings, dtype: torch.dtype, number: int) -> list[Tensor]:
    """``[B, T, H, D]`` in memory, seen as ``[B, H, T, D]``: as a layer that splits its channels into heads would give them."""
    samples, heads, kv_heads, dst, src, dim, value_dim = SIZES[number]
    rng = torch.Generator().manual_seed(settings.seed + 3)
    shapes = ((dst, heads, dim), (src, kv_heads, dim), (src, kv_heads, value_dim), (dst, heads, value_dim))
    return [torch.randn(samples, *s, generator=rng, dtype=torch.float64).to(dtype).transpose(1, 2) for s in shapes]


def _graph_of_size(number: int, varies: bool) -> TokenGraph:
    samples, heads, _, dst, src, _, _ = SIZES[number]
    sizes = {"heads": heads, "batch": samples} if varies else {}
    return TokenGraph.from_rule(_late if varies else _near, dst, src, name="other sizes", **sizes)


@functools.lru_cache(maxsize=128)
def _truth_of_size(settings: Settings, dtype: torch.dtype, number: int, varies: bool) -> Truth:
    samples, heads, _, dst, src, dim, _ = SIZES[number]
    q, k, v, direction = _drawn_of_size(settings, dtype, number)
    mask = _graph_of_size(number, varies).mask().expand(samples, heads, dst, src)
    return attention_truth({"q": q, "k": k, "v": v}, mask, direction, dim**-0.5, device=settings.device)


def _near(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst - src < 100) & (src % 5 != 1)


def _late(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src + dst) % (2 + b + h) != 1


def _rule_dropout(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """Equal weights over n senders that say 1: a mean of n Bernoulli(1/2) values, doubled; ``info.weights`` are undropped."""
    n, shape, device = 256, (1, 1, 256, 8), torch.device(settings.device)
    q, k, v = (x.to(device, dtype) for x in (torch.zeros(shape), torch.zeros(shape), torch.ones(shape)))
    deviation, outcomes = n**-0.5, []
    for graph in (patterns.full(n), patterns.no_self(n)):
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(settings.seed)
            plain = attend(q, k, v, graph, dropout=0.5, backend=backend)
            beside, info = attend(q, k, v, graph, dropout=0.5, backend=backend, return_info=True)
        for out in (plain, beside):
            rows = out[..., 0].double().flatten()
            # the mean of n rows within 6 of its deviations; the deviation of n numbers is off by (2 n)^-1/2 = 0.044: 0.3 are 6.8
            if not (abs(rows.mean() - 1) < 6 * deviation * n**-0.5 and 0.7 < rows.std() / deviation < 1.3):
                return {
                    "passed": False,
                    "message": f"mean {rows.mean():.3f}, deviation {rows.std() / deviation:.2f} of what is due",
                }
        undropped = torch.full((1, 1, 9), 1 / graph.max_in_degree, dtype=torch.float64)
        # exp(0 - lse): lse, log n, is rounded at most twice, and exp once
        allowed = summation_bound(3, math.log(n) / graph.max_in_degree, info.lse.dtype)
        outcomes.append(
            (f"weights before dropout on {graph.name}", within("", info.weights(torch.arange(9)), undropped, allowed))
        )
    return worst(outcomes)


def _rule_weights(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    case = GRAPHS["listed"]
    q, k, v = _qkv(settings, dtype, 10, 13)
    _, info = attend(q, k, v, case.graph, backend=backend, return_info=True)
    logits = torch.einsum("bhid,bhjd->bhij", *(x.cpu().double() for x in (q, k.repeat_interleave(HEADS // KV_HEADS, 1))))
    dense = oracle.masked_softmax(logits * DIM**-0.5, case.mask)
    wanted = torch.stack([dense[:, :, dst, src] for src, dst in case.edges()], dim=-1)
    found = info.weights().cpu()
    receivers = torch.tensor([dst for _, dst in case.edges()])
    sums = torch.zeros(BATCH, HEADS, 10, dtype=found.dtype).index_add(2, receivers, found)
    ones = (case.graph.in_degree() > 0).double().expand_as(sums)
    some = info.weights(torch.tensor([5, 2])).cpu()
    # exp(logit - lse): both are off by what _lse_terms says, and a weight, which is at most 1, by as large a share of itself
    bound = summation_bound(2, 1.0, torch.float32) + 2 * _allowed_lse(case, q, k, {})
    allowed = EXACT if found.dtype == torch.float64 else bound
    return worst(
        [
            ("in edge order", within("weights", found, wanted, allowed)),
            ("of some edges", within("weights", some, wanted[..., [5, 2]], allowed)),
            ("of a receiver", within("sum of weights", sums, ones, allowed)),
        ]
    )


def _rule_decode(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    def outcomes() -> Iterator[tuple[str, Outcome]]:
        for name in ("causal", "window | sinks", "prefix", "tree"):
            graph, truth = GRAPHS[name].graph, _truth(settings, dtype, name)
            q, k, v = _qkv(settings, dtype, 13, 13)
            for start, stop in ((0, 13), (0, 1), (5, 8), (12, 13)):
                part = attend(q[:, :, start:stop], k, v, graph.rows(start, stop), backend=backend)
                rows, found = torch.arange(start, stop), f"rows {start} .. {stop - 1} of {name}"
                yield found, _judged(part, {}, truth.rows(rows, torch.arange(0)), backend)

    return worst(outcomes())


def _ordered(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """The bias of :func:`_rule_order`: edge number / 16."""
    edges = patterns.window(13, 4).edge_index.to(logits.device)
    bias = torch.arange(edges.shape[1], device=logits.device, dtype=logits.dtype) / 16
    return logits + logits.new_zeros(13, 13).index_put((edges[1], edges[0]), bias)


def _rule_order(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = _qkv(settings, dtype, 13, 13)
    edges = patterns.window(13, 4).edge_index
    bias = torch.arange(edges.shape[1], device=q.device, dtype=dtype) / 16
    graphs = {"forwards": (edges, bias), "backwards": (edges.flip(1), bias.flip(0))}
    truth = _truth(settings, dtype, "window", _ordered)
    return worst(
        (name, _judged(attend(q, k, v, convert.from_edge_index(e, 13, 13), bias=b, backend=backend), {}, truth, backend))
        for name, (e, b) in graphs.items()
    )


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
