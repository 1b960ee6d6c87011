"""lse and its gradient with every set of options, the output returned with it, and the weights made of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, GRAPHS, HEADS, KV_HEADS, GraphCase
from gnn_attention.verify.check import DIM, VALUE_DIM, Settings, worst
from gnn_attention.verify.measure import ALLOWED_OUTPUT, EXACT, Truth, exactly, summation_bound, within
from gnn_attention.verify.trial import Outcomes, Trial, drawn_qkv
from gnn_attention.verify.truth import ORDERS, Dense, attention_truth

GROUP = HEADS // KV_HEADS


def lse_with_options(trial: Trial) -> Mapping[str, Any]:
    """Output, lse and the gradient of lse with every set of options; the output is the same without lse."""
    given = itertools.product(("causal", "listed", "decode rows"), itertools.product((False, True), repeat=3))
    return worst(outcome for name, chosen in given for outcome in _with_lse(trial, name, chosen))


def _with_lse(trial: Trial, name: str, chosen: tuple[bool, ...]) -> Outcomes:
    case = GRAPHS[name]
    q, k, v = trial.qkv(case.graph.num_dst, case.graph.num_src)
    options = _options(case, q, chosen)
    out, info = trial.attend(q.requires_grad_(), k, v, case.graph, return_info=True, **options)
    found = info.lse[info.lse > -torch.inf]
    g_q = torch.autograd.grad(found.sum(), q, retain_graph=True)[0]
    plain = trial.attend(q, k, v, case.graph, **options)
    truth, lse, slope = _truth(trial.settings, trial.dtype, name, chosen)
    what, exact = f"{name} with {', '.join(options) or 'no option'}", found.dtype == torch.float64
    yield f"output returned with lse, {what}", trial.judged(out, {}, truth)
    yield f"output, {what}", trial.judged(plain, {}, truth)
    outcome = (
        exactly("lse", found, lse) if exact else within("lse", found, lse, _allowed(case, q, k, options))
    )
    yield f"lse, {what}", outcome
    yield f"gradient of lse, {what}", trial.judged(out, {"q": g_q}, slope)


def weights_of_edges(trial: Trial) -> Mapping[str, Any]:
    """``info.weights()`` of all edges, of some, and their sums by receiver."""
    case = GRAPHS["listed"]
    q, k, v = trial.qkv(10, 13)
    _, info = trial.attend(q, k, v, case.graph, return_info=True)
    found, some = info.weights().cpu(), info.weights(torch.tensor([5, 2])).cpu()
    dense = oracle.attention_weights(q.cpu().double(), k.cpu().double(), case.mask, DIM**-0.5)
    src, dst = torch.tensor(case.edges()).T
    wanted = dense[:, :, dst, src]
    sums = torch.zeros(BATCH, HEADS, 10, dtype=found.dtype).index_add(2, dst, found)
    ones = (case.graph.in_degree() > 0).double().expand_as(sums)
    # exp(logit - lse): both are off by what _allowed says, and a weight, which is at most 1, by as large a
    # share of itself
    bound = summation_bound(2, 1.0, torch.float32) + 2 * _allowed(case, q, k, {})
    allowed = EXACT if found.dtype == torch.float64 else bound
    return worst(
        [
            ("in edge order", within("weights", found, wanted, allowed)),
            ("of some edges", within("weights", some, wanted[..., [5, 2]], allowed)),
            ("of a receiver", within("sum of weights", sums, ones, allowed)),
        ]
    )


def _options(case: GraphCase, like: Tensor, chosen: tuple[bool, ...]) -> dict[str, Any]:
    bias, sinks = (torch.linspace(-1, 1, count).to(like.detach()) for count in (case.graph.num_edges, HEADS))
    everything: dict[str, Any] = {"score_mod": _everything, "bias": bias, "sink_logits": sinks}
    return {name: value for (name, value), there in zip(everything.items(), chosen, strict=True) if there}


def _everything(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A score_mod of all its arguments."""
    return score * (1 + b / 8) + h / 4 - src / 16 + (dst - src) / 32


def _allowed(case: GraphCase, q: Tensor, k: Tensor, options: Mapping[str, Any]) -> float:
    """How far lse in float32 may be off: by its roundings, or by twice as much as that of SDPA in the dtype
    of q.

    A logit is a sum of DIM products; its scale, score_mod and bias round at most 8 times more. lse moves by
    no more than the logit that moves most; its own sum has a term for each sender and the sink, exp and log
    round twice each.
    """
    terms = DIM + 8 + case.graph.num_src + 1 + 4
    bound = summation_bound(terms, _largest_logit(q, k, options), torch.float32)
    return max(bound, ALLOWED_OUTPUT * oracle.sdpa_lse_error(q, k, case.mask.to(q.device), DIM**-0.5))


def _largest_logit(q: Tensor, k: Tensor, options: Mapping[str, Any]) -> float:
    """The largest sum of absolute values of which a logit is made, at least 1: the magnitude of its
    roundings.
    """
    serving = k.abs().double().repeat_interleave(GROUP, 1)
    largest: float = float((q.detach().abs().double() @ serving.mT).max()) * DIM**-0.5
    # _everything: a factor of at most 1 + 7 / 8, then 3 / 4, 12 / 16 and 12 / 32
    largest = 2 * largest + 2 if "score_mod" in options else largest
    return max(1.0, largest + ("bias" in options))


@functools.lru_cache(maxsize=128)
def _truth(
    settings: Settings, dtype: torch.dtype, name: str, chosen: tuple[bool, ...]
) -> tuple[Truth, Tensor, Truth]:
    """The truth about the output, about lse, and about the gradient of the sum of lse for q.

    That gradient is attention over keys; its yardstick is the formula in float32, in which lse is summed,
    over several orders of the channels, with weights computed from a rounded lse.
    """
    case = GRAPHS[name]
    q, k, v = drawn_qkv(settings, dtype, case.graph.num_dst, case.graph.num_src)
    options = {key: x if key == "score_mod" else x.cpu() for key, x in _options(case, q, chosen).items()}
    inputs = {"q": q.cpu(), "k": k.cpu(), "v": v.cpu()}
    inputs |= {name: x for name, x in options.items() if name == "sink_logits"}
    dense = partial(_dense, case, options)
    direction = torch.zeros(BATCH, HEADS, case.graph.num_dst, VALUE_DIM, dtype=dtype)
    truth = attention_truth(inputs, case.mask, direction, DIM**-0.5, dense, False, device=settings.device)
    lse, slope = _lse(case, inputs, dense, torch.float64)
    error = 0.0
    for number in range(0 if dtype == torch.float64 else ORDERS):
        order = torch.randperm(DIM, generator=torch.Generator().manual_seed(number))
        reordered = {**inputs, "q": inputs["q"][..., order], "k": inputs["k"][..., order]}
        found = _lse(case, reordered, dense, torch.float32)[1]
        error = max(error, float((found - slope[..., order]).abs().max()))
    return truth, lse, Truth(truth.out, {"q": slope}, {**truth.yardstick, "q": error})


def _dense(
    case: GraphCase, options: Mapping[str, Any], inputs: Mapping[str, Tensor], logits: Tensor
) -> Tensor:
    """The score_mod and the bias on dense logits ``[B, H, dst, src]``."""
    if "score_mod" in options:
        b, h = (torch.arange(n, device=logits.device) for n in (BATCH, HEADS))
        positions = (x.to(logits.device) for x in case.positions())
        logits = _everything(logits, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), *positions).to(logits.dtype)
    if "bias" not in options:
        return logits
    src, dst = torch.tensor(case.edges(), device=logits.device).T
    return logits + logits.new_zeros(logits.shape[2:]).index_put((dst, src), options["bias"].to(logits))


def _lse(
    case: GraphCase, inputs: Mapping[str, Tensor], dense: Dense, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of receivers with in-edges: lse by the formula, and the gradient of its sum for q."""
    q, k = inputs["q"].detach().to(dtype).requires_grad_(), inputs["k"].to(dtype).repeat_interleave(GROUP, 1)
    with torch.enable_grad():
        logits = dense(inputs, torch.einsum("bhid,bhjd->bhij", q, k) * DIM**-0.5)
        lse = logits.masked_fill(~case.mask, -torch.inf).logsumexp(-1)
        if "sink_logits" in inputs:
            lse = torch.logaddexp(lse, inputs["sink_logits"].to(dtype).view(1, -1, 1))
        weights = torch.where(case.mask, (logits - lse.unsqueeze(-1)).exp(), 0.0)
        (slope,) = torch.autograd.grad(logits, q, weights.detach())
    return lse[case.mask.any(-1)].detach(), slope
