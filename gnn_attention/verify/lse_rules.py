"""lse and its gradient with every set of options, the output returned with it, and the weights made of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import product

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, GRAPHS, HEADS
from gnn_attention.verify.check import DIM
from gnn_attention.verify.measure import (
    ALLOWED_OUTPUT,
    EXACT,
    Outcome,
    Truth,
    exactly,
    summation_bound,
    within,
)
from gnn_attention.verify.trial import LSE_OPTIONS, Trial
from gnn_attention.verify.truth import ORDERS, AttendProblem

Outcomes = Iterator[tuple[str, Outcome]]


def lse_with_options(trial: Trial) -> Outcomes:
    """Output, lse and the gradient of lse with every set of options; the output is the same without lse."""
    for name, option in product(("causal", "listed", "decode rows"), LSE_OPTIONS):
        problem, what = trial.problem(name, option), f"{name} with {option}"
        q, k, v, *_ = problem.inputs.values()
        options = problem.options({name: x for name, x in problem.inputs.items() if name not in "qkv"})
        leaf = q.clone().requires_grad_()
        out, info = trial.attend(leaf, k, v, problem.graph, return_info=True, **options)
        found = info.lse[info.lse > -torch.inf]
        (g_q,) = torch.autograd.grad(found.sum(), leaf, retain_graph=True)
        lse, slope = _lse_truth(problem)
        yield f"output returned with lse, {what}", trial.judge(out, {}, problem.truth)
        plain = trial.attend(leaf, k, v, problem.graph, **options)
        yield f"output, {what}", trial.judge(plain, {}, problem.truth)
        exact = found.dtype == torch.float64
        yield (
            f"lse, {what}",
            exactly("lse", found, lse) if exact else within("lse", found, lse, _allowed(problem)),
        )
        yield f"gradient of lse, {what}", trial.judge(out, {"q": g_q}, slope)


def weights_of_edges(trial: Trial) -> Outcomes:
    """``info.weights()`` of all edges, of some, and their sums by receiver."""
    problem, (src, dst) = trial.problem("listed"), GRAPHS["listed"].edges()
    q, k, v = (problem.inputs[name] for name in "qkv")
    _, info = trial.attend(q, k, v, problem.graph, return_info=True)
    found, some = info.weights().cpu(), info.weights(torch.tensor([5, 2])).cpu()
    dense = oracle.attention_weights(q.cpu().double(), k.cpu().double(), problem.formula.mask, DIM**-0.5)
    wanted = dense[:, :, dst, src]
    sums = torch.zeros(BATCH, HEADS, 10, dtype=found.dtype).index_add(2, dst, found)
    ones = (problem.graph.in_degree() > 0).double().expand_as(sums)
    # exp(logit - lse): both are off by what _allowed says, and a weight, which is at most 1, by as large a
    # share of itself
    bound = summation_bound(2, 1.0, torch.float32) + 2 * _allowed(problem)
    allowed = EXACT if found.dtype == torch.float64 else bound
    yield "in edge order", within("weights", found, wanted, allowed)
    yield "of some edges", within("weights", some, wanted[..., [5, 2]], allowed)
    yield "of a receiver", within("sum of weights", sums, ones, allowed)


def _allowed(problem: AttendProblem) -> float:
    """How far lse in float32 may be off: by its roundings, or by twice as much as that of SDPA.

    A logit is a sum of DIM products; its scale, score_mod and bias round at most 8 times more. lse moves by
    no more than the logit that moves most; its own sum has a term for each sender and the sink, exp and log
    round twice each.
    """
    q, k, mask = problem.inputs["q"], problem.inputs["k"], problem.formula.mask
    terms = DIM + 8 + mask.shape[3] + 1 + 4
    bound = summation_bound(terms, _largest_logit(problem), torch.float32)
    return max(bound, ALLOWED_OUTPUT * oracle.sdpa_lse_error(q, k, mask.to(q.device), DIM**-0.5))


def _largest_logit(problem: AttendProblem) -> float:
    """The largest sum of absolute values that makes a logit, at least 1: the magnitude of its roundings."""
    q, k = (problem.inputs[name].abs().double() for name in "qk")
    largest: float = float((q @ oracle.per_query_head(k, q).mT).max()) * DIM**-0.5
    # the score_mod: a factor of at most 1 + 7 / 8, then 3 / 4, 12 / 16 and 12 / 32
    largest = 2 * largest + 2 if "score_mod" in problem.options({}) else largest
    return max(1.0, largest + ("bias" in problem.inputs))


@functools.lru_cache(maxsize=256)
def _lse_truth(problem: AttendProblem) -> tuple[Tensor, Truth]:
    """The truth about lse, and about the gradient of its sum for q.

    That gradient is attention over keys; its yardstick is the formula in float32, in which lse is summed,
    over several orders of the channels, with weights computed from a rounded lse.
    """
    inputs = {name: x.detach().cpu() for name, x in problem.inputs.items()}
    lse, slope = _lse(problem, inputs, torch.float64)
    error = 0.0
    for number in range(0 if inputs["q"].dtype == torch.float64 else ORDERS):
        order = torch.randperm(DIM, generator=torch.Generator().manual_seed(number))
        reordered = {name: x[..., order] if name in ("q", "k") else x for name, x in inputs.items()}
        found = _lse(problem, reordered, torch.float32)[1]
        error = max(error, float((found - slope[..., order]).abs().max()))
    return lse, Truth(problem.truth.out, {"q": slope}, {**problem.truth.yardstick, "q": error})


@torch.enable_grad()
def _lse(problem: AttendProblem, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of receivers with in-edges: lse by the formula, and the gradient of its sum for q."""
    q, mask = inputs["q"].to(dtype).requires_grad_(), problem.formula.mask
    k = oracle.per_query_head(inputs["k"].to(dtype), q)
    logits = problem.formula.dense(inputs, torch.einsum("bhid,bhjd->bhij", q, k) * DIM**-0.5)
    lse = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)
    if "sink_logits" in inputs:
        lse = torch.logaddexp(lse, inputs["sink_logits"].to(dtype).view(1, -1, 1))
    weights = torch.where(mask, (logits - lse.unsqueeze(-1)).exp(), 0.0)
    (slope,) = torch.autograd.grad(logits, q, weights.detach())
    return lse[mask.any(-1)].detach(), slope
