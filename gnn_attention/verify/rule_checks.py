"""Rules that no error bound can express: isolated rows are exactly 0, a NaN stays in its rows, and more."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify import oracle
from gnn_attention.verify.attend_checks import drawn
from gnn_attention.verify.cases import CASES, DROPOUT, FEATURES, LSE_OPTIONS, OPTIONS, GraphCase
from gnn_attention.verify.check import DIM, DTYPES, Check, Outcomes, Settings, worst
from gnn_attention.verify.measure import (
    ALLOWED_OUTPUT,
    EXACT,
    Outcome,
    Truth,
    holds,
    judge,
    summation_bound,
    within,
)
from gnn_attention.verify.truth import ORDERS, Problem, leaves_of


@dataclass(frozen=True)
class Trial:
    """A backend in one dtype, and problems that it shares with all others."""

    settings: Settings
    dtype: torch.dtype
    backend: Backend

    @property
    def device(self) -> torch.device:
        return torch.device(self.settings.device)

    def problem(self, graph: str, option: str = "plain", rows: tuple[int, ...] | None = None) -> Problem:
        """A graph with an option; gradients are those of the receivers ``rows`` (None: of all)."""
        return _problem(self.settings, self.dtype, graph, option, rows)

    def attend(self, inputs: Mapping[str, Tensor], graph: TokenGraph, **options: Any) -> Any:
        q, k, v = (inputs[name] for name in "qkv")
        return attend(q, k, v, graph, backend=self.backend, **options)

    def judge(self, out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Outcome:
        return judge(out, gradients, truth.for_backend(self.backend))


Rule = Callable[[Trial], Outcomes]


@functools.lru_cache(maxsize=256)
def _problem(
    settings: Settings, dtype: torch.dtype, graph: str, option: str, rows: tuple[int, ...] | None
) -> Problem:
    case, feature = CASES[graph], OPTIONS[option]
    inputs = drawn(settings.seed + 2, dtype, case, feature)
    if rows is not None:
        others = [row for row in range(case.graph.num_dst) if row not in rows]
        inputs["direction"][:, :, others] = 0.0
    inputs = {name: x.to(settings.device) for name, x in inputs.items()}
    return Problem.of(case, feature, inputs, settings.device)


def rule_checks(settings: Settings) -> Iterator[Check]:
    """Every rule in every dtype on every backend; a rule needs its option."""
    for dtype, backend in product(settings.semantics, settings.backends):
        trial = Trial(settings, DTYPES[dtype], backend)
        for name, (rule, option) in RULES.items():
            run = partial(run_rule, rule, trial)
            yield settings.check("rules", backend, dtype, name, run, option, {"rule": name})


def run_rule(rule: Rule, trial: Trial) -> Mapping[str, Any]:
    """The fields of a check's result."""
    return worst(rule(trial))


def _isolated_rows(trial: Trial, option: str = "plain") -> Outcomes:
    problem = trial.problem("listed", option)
    leaves = leaves_of(problem.inputs, trial.settings.device)
    options = problem.options(leaves)
    out, info = trial.attend(leaves, problem.graph, return_info=True, **options)
    plain = trial.attend(leaves, problem.graph, **options)
    isolated = (problem.graph.in_degree() == 0).to(trial.device)
    for o in (out, plain):
        yield "outputs", holds((o[:, :, isolated] == 0).all() and (o[:, :, ~isolated] != 0).any())
    lse = info.lse[:, :, isolated] == -torch.inf
    yield "lse", holds(lse.numel() and lse.all() and info.lse[:, :, ~isolated].isfinite().all())
    gradients = torch.autograd.grad(plain.float().sum(), [leaves[name] for name in "qkv"])
    yield "gradients", holds(all(g.isfinite().all() for g in gradients))


def _poison(trial: Trial) -> Outcomes:
    """Outputs without a path from a poisoned token, and gradients of what they attend to, stay right."""
    victims = {"causal": 9, "window of 3": 2, "no_self": 5}
    for (graph, victim), option in product(victims.items(), ("plain", "softcap")):
        mask = CASES[graph].mask[0, 0]
        safe = ~mask[:, victim]
        safe[victim] = False
        # senders to which no poisoned receiver attends
        untouched = ~mask[~safe].any(0)
        problem = trial.problem(graph, option, tuple(safe.nonzero().flatten().tolist()))
        truth = problem.truth.rows(safe, untouched)
        for poison in (0.0, 1e4, torch.nan, torch.inf, -torch.inf):
            token = (torch.arange(13, device=trial.device) == victim).unsqueeze(1)
            inputs = {name: x.masked_fill(token, poison) for name, x in problem.inputs.items()}
            out, gradients = problem.solve(trial.backend, inputs)
            found = {name: gradients[name][:, :, untouched] for name in "kv"}
            what = f"{poison:g} at token {victim} of {graph}, {option}, reached others"
            yield what, trial.judge(out[:, :, safe], found, truth)


def _nan_is_attended_to(trial: Trial) -> Outcomes:
    for which in "qkv":
        problem = trial.problem("window of 3")
        inputs = {name: x.clone() for name, x in problem.inputs.items()}
        inputs[which][:, :, 6, 0] = torch.nan
        nan = trial.attend(inputs, problem.graph).isnan()
        expected = torch.zeros(13, dtype=torch.bool, device=trial.device)
        expected[[6] if which == "q" else [6, 7, 8]] = True
        rows = nan.any(-1) if which == "v" else nan.all(-1)
        exact = rows[:, :, expected].all() and not nan[:, :, ~expected].any()
        what = f"a NaN in {which} at token 6 of window(13, 3)"
        yield what, holds(exact, "is not exactly where it is attended to")


def _score_mod_on_non_edges(trial: Trial) -> Outcomes:
    """A score_mod that divides by 0 where there is no edge: right outputs and gradients all the same."""
    for name in ("causal", "window", "decode rows"):
        problem = trial.problem(name, "share")
        what = f"a score_mod that has no value on the non-edges of {name}"
        yield what, trial.judge(*problem.solve(trial.backend), problem.truth)


def _lse_with_options(trial: Trial) -> Outcomes:
    """Output, lse and the gradient of lse with every set of options; the output is the same without lse."""
    for name, option in product(("causal", "listed", "decode rows"), LSE_OPTIONS):
        problem, what = trial.problem(name, option), f"{name} with {option}"
        leaves = leaves_of(problem.inputs, trial.settings.device)
        options = problem.options(problem.inputs)
        out, info = trial.attend(leaves, problem.graph, return_info=True, **options)
        found = info.lse[info.lse > -torch.inf]
        (g_q,) = torch.autograd.grad(found.sum(), leaves["q"], retain_graph=True)
        lse, slope = _lse_truth(problem)
        yield f"output returned with lse, {what}", trial.judge(out, {}, problem.truth)
        plain = trial.attend(leaves, problem.graph, **options)
        yield f"output, {what}", trial.judge(plain, {}, problem.truth)
        allowed = None if found.dtype == torch.float64 else _lse_allowed(problem)
        yield f"lse, {what}", within("lse", found, lse, allowed)
        yield f"gradient of lse, {what}", trial.judge(out, {"q": g_q}, slope)


def _weights_of_edges(trial: Trial) -> Outcomes:
    """``info.weights()`` of all edges, of some, and their sums by receiver."""
    problem, (src, dst) = trial.problem("listed"), CASES["listed"].edges()
    _, info = trial.attend(problem.inputs, problem.graph, return_info=True)
    found, some = info.weights().cpu(), info.weights(torch.tensor([5, 2])).cpu()
    q, k = (problem.inputs[name].cpu().double() for name in "qk")
    one_hot = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    wanted = oracle.attention(q, k, one_hot, problem.formula.mask, DIM**-0.5)[:, :, dst, src]
    sums = torch.zeros(q.shape[:3], dtype=found.dtype).index_add(2, dst, found)
    ones = (problem.graph.in_degree() > 0).double().expand_as(sums)
    # exp(logit - lse): both are off by what _lse_allowed says, and a weight, which is at most 1, by as large
    # a share of itself
    bound = summation_bound(2, 1.0, torch.float32) + 2 * _lse_allowed(problem)
    allowed = EXACT if found.dtype == torch.float64 else bound
    yield "in edge order", within("weights", found, wanted, allowed)
    yield "of some edges", within("weights", some, wanted[..., [5, 2]], allowed)
    yield "of a receiver", within("sum of weights", sums, ones, allowed)


def _lse_allowed(problem: Problem) -> float:
    """How far lse in float32 may be off: by its roundings, or by twice as much as that of SDPA.

    A logit is a sum of DIM products; its scale, score_mod and bias round at most 8 times more. lse moves by
    no more than the logit that moves most; its own sum has a term for each sender and the sink, exp and log
    round twice each.
    """
    q, k, mask = problem.inputs["q"], problem.inputs["k"], problem.formula.mask
    terms = DIM + 8 + mask.shape[3] + 1 + 4
    bound = summation_bound(terms, _largest_logit(problem), torch.float32)
    return max(bound, ALLOWED_OUTPUT * oracle.sdpa_lse_error(q, k, mask.to(q.device), DIM**-0.5))


def _largest_logit(problem: Problem) -> float:
    """The largest sum of absolute values that makes a logit, at least 1: the magnitude of its roundings."""
    q, k = (problem.inputs[name].abs().double() for name in "qk")
    largest: float = float((q @ oracle.per_query_head(k, q).mT).max()) * DIM**-0.5
    # the score_mod: a factor of at most 1 + 7 / 8, then 3 / 4, 12 / 16 and 12 / 32
    largest = 2 * largest + 2 if "score_mod" in problem.options(problem.inputs) else largest
    return max(1.0, largest + float(problem.inputs.get("bias", torch.zeros(1)).abs().max()))


@functools.lru_cache(maxsize=256)
def _lse_truth(problem: Problem) -> tuple[Tensor, Truth]:
    """The truth about lse of receivers with in-edges, and about the gradient of its sum for q.

    That gradient is attention over keys; its yardstick is the formula in float32, in which lse is summed,
    over several orders of the channels.
    """
    inputs = {name: x.detach().cpu() for name, x in problem.inputs.items()}
    (lse, slope), error = _lse(problem, inputs, torch.float64), 0.0
    for number in range(0 if inputs["q"].dtype == torch.float64 else ORDERS):
        order = torch.randperm(DIM, generator=torch.Generator().manual_seed(number))
        reordered = {name: x[..., order] if name in ("q", "k") else x for name, x in inputs.items()}
        found = _lse(problem, reordered, torch.float32)[1]
        error = max(error, float((found - slope[..., order]).abs().max()))
    truth = Truth(problem.truth.out, {"q": slope}, {**problem.truth.yardstick, "q": error})
    return lse[problem.formula.mask.any(-1)], truth


@torch.enable_grad()
def _lse(problem: Problem, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    given = leaves_of(inputs, "cpu", dtype)
    lse = problem.formula.sums(given)[2]
    return lse.detach(), torch.autograd.grad(lse.sum(), given["q"])[0]


SIZES = (  # samples, query heads, key heads, receivers, senders, dim, value_dim
    (1, 4, 1, 13, 13, 16, 16),
    (2, 3, 3, 5, 37, 24, 40),
    (1, 2, 1, 150, 150, 20, 8),
    (3, 1, 1, 1, 300, 64, 64),
    (2, 8, 2, 64, 64, 32, 32),
)


def _other_sizes(trial: Trial) -> Outcomes:
    """Output and gradients for other sizes, on graphs that differ by head and sample or not at all."""
    for sizes, varies in product(SIZES, (False, True)):
        problem = _problem_of_size(trial.settings, trial.dtype, sizes, varies)
        q, k, v = (list(problem.inputs[name].shape) for name in "qkv")
        what = f"q {q}, k {k}, Dv {v[3]}{', by head and sample' if varies else ''}"
        yield what, trial.judge(*problem.solve(trial.backend), problem.truth)


@functools.lru_cache(maxsize=128)
def _problem_of_size(settings: Settings, dtype: torch.dtype, sizes: tuple[int, ...], varies: bool) -> Problem:
    """``[B, T, H, D]`` in memory, seen as ``[B, H, T, D]``: as by a layer that splits channels into heads."""
    samples, heads, kv_heads, dst, src, dim, value_dim = sizes
    same: Any = lambda b, h, i, j: (i - j < 100) & (j % 5 != 1)  # noqa: E731
    rule = (lambda b, h, i, j: (i + j) % (2 + b + h) != 1) if varies else same
    differs = {"heads": heads, "batch": samples} if varies else {}
    graph = TokenGraph.from_rule(rule, dst, src, name="other sizes", **differs)
    case = GraphCase("other sizes", graph, rule, sizes=(samples, heads))
    inputs = drawn(settings.seed + 3, dtype, case, FEATURES["plain"], 1.0, kv_heads, (dim, value_dim))
    laid_out = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    return Problem.of(case, FEATURES["plain"], laid_out, settings.device)


def _dropout_mean(trial: Trial) -> Outcomes:
    """Equal weights over n senders of value 1: a mean of n Bernoulli(1/2) values, doubled."""
    n = 256
    q, v = (make(1, 1, n, 8, dtype=trial.dtype, device=trial.device) for make in (torch.zeros, torch.ones))
    inputs = {"q": q, "k": q, "v": v}
    for graph in (patterns.full(n), patterns.no_self(n)):
        with torch.random.fork_rng([trial.device] if trial.device.type == "cuda" else []):
            torch.manual_seed(trial.settings.seed)
            plain = trial.attend(inputs, graph, dropout=0.5)
            out, info = trial.attend(inputs, graph, dropout=0.5, return_info=True)
        for rows in (x[..., 0].double().flatten() for x in (plain, out)):
            mean, deviation = float(rows.mean()), float(rows.std()) * n**0.5
            # the mean of n rows of deviation n^-1/2 within 6 deviations of 1 / n; the deviation of n numbers
            # is off by (2 n)^-1/2 = 0.044: 0.3 are 6.8 times that
            due = abs(mean - 1) < 6 / n and 0.7 < deviation < 1.3
            yield "dropout", holds(due, f"mean {mean:.3f}, deviation {deviation:.2f} of what is due")
        undropped = torch.full((1, 1, 9), 1 / graph.max_in_degree, dtype=torch.float64)
        # exp(0 - lse): lse, log n, is rounded at most twice, and exp once
        allowed = summation_bound(3, math.log(n) / graph.max_in_degree, info.lse.dtype)
        found = within("", info.weights(torch.arange(9)), undropped, allowed)
        yield f"weights before dropout on {graph.name}", found


def _decoding(trial: Trial) -> Outcomes:
    for name in ("causal", "window | sinks", "prefix", "tree"):
        problem = trial.problem(name)
        for start, stop in ((0, 13), (0, 1), (5, 8), (12, 13)):
            inputs = {**problem.inputs, "q": problem.inputs["q"][:, :, start:stop]}
            part = trial.attend(inputs, problem.graph.rows(start, stop))
            expected = problem.truth.rows(torch.arange(start, stop), torch.arange(0))
            yield f"rows {start} .. {stop - 1} of {name}", trial.judge(part, {}, expected)


def _edge_order(trial: Trial) -> Outcomes:
    problem, edges = trial.problem("window", "edge bias"), patterns.window(13, 4).edge_index
    bias = problem.inputs["bias"]
    for name, e, b in (("forwards", edges, bias), ("backwards", edges.flip(1), bias.flip(-1))):
        out = trial.attend(problem.inputs, convert.from_edge_index(e, 13, 13), bias=b)
        yield name, trial.judge(out, {}, problem.truth)


def _duplicates(trial: Trial) -> Outcomes:
    edges = torch.tensor([[0, 1, 0, 2], [1, 1, 1, 2]])
    try:
        convert.from_edge_index(edges, 3, 3)
        yield "an edge list with a duplicate", holds(False, "was accepted")
    except ValueError:
        once = convert.from_edge_index(edges[:, [0, 1, 3]], 3, 3)
        twice = convert.from_edge_index(edges, 3, 3, coalesce=True)
        inputs = {name: x[:, :, :3] for name, x in trial.problem("full").inputs.items()}
        one, other = (trial.attend(inputs, graph) for graph in (once, twice))
        yield "the output", holds(torch.equal(one, other))


EVERY, WITH_MORE = "alibi, softcap, bias, sinks", partial(_isolated_rows, option="bias, sink_logits")
# each rule, and the option without which it cannot be checked
RULES: dict[str, tuple[Rule, str]] = {
    "isolated rows are exactly 0, lse -inf, gradients finite": (_isolated_rows, "plain"),
    "isolated rows are 0 with sinks and bias too": (WITH_MORE, "edge bias"),
    "NaN, inf and 1e4 reach only rows that attend to them": (_poison, "softcap"),
    "a NaN that is attended to is not cleaned": (_nan_is_attended_to, "plain"),
    "what a score_mod makes of a non-edge reaches no row": (_score_mod_on_non_edges, "softcap"),
    "lse and the output returned with it, with score_mod, bias and sinks": (_lse_with_options, EVERY),
    "other sizes: heads, samples, widths, lengths, strides": (_other_sizes, "plain"),
    "dropout keeps the mean and drops its share": (_dropout_mean, DROPOUT),
    "weights come in edge order, sum to 1 and agree with lse": (_weights_of_edges, "plain"),
    "decoding row by row equals the whole": (_decoding, "plain"),
    "edges in another order give the same output": (_edge_order, "edge bias"),
    "a sender named twice is refused, or counted once": (_duplicates, "plain"),
}
