"""Rules that no error bound can express: isolated rows are exactly 0, a NaN stays in its rows, and more."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import GRAPHS, HEADS
from gnn_attention.verify.check import DROPOUT, DTYPES, Check, Settings, worst
from gnn_attention.verify.lse_rules import Outcomes, lse_with_options, weights_of_edges
from gnn_attention.verify.measure import holds, summation_bound, within
from gnn_attention.verify.trial import CASES, Trial
from gnn_attention.verify.truth import AttendProblem, Formula

Rule = Callable[[Trial], Outcomes]


def rule_checks(settings: Settings) -> Iterator[Check]:
    """Every rule in every dtype on every backend; a rule needs its option."""
    for dtype, backend in product(settings.semantics, settings.backends):
        trial = Trial(settings, DTYPES[dtype], backend)
        for name, (rule, option) in RULES.items():
            yield settings.check("rules", backend, dtype, name, partial(_run, rule, trial), option, rule=name)


def _run(rule: Rule, trial: Trial) -> Mapping[str, Any]:
    return worst(rule(trial))


def _isolated_rows(trial: Trial, extra: bool = False) -> Outcomes:
    graph = GRAPHS["listed"].graph
    q, k, v = (x.requires_grad_() for x in trial.qkv(10, 13))
    ones = partial(torch.ones, dtype=trial.dtype, device=trial.device)
    options: dict[str, Any] = {"bias": ones(graph.num_edges), "sink_logits": ones(HEADS)} if extra else {}
    out, info = trial.attend(q, k, v, graph, return_info=True, **options)
    plain = trial.attend(q, k, v, graph, **options)
    isolated = (graph.in_degree() == 0).to(trial.device)
    for o in (out, plain):
        yield "outputs", holds((o[:, :, isolated] == 0).all() and (o[:, :, ~isolated] != 0).any())
    lse = info.lse[:, :, isolated] == -torch.inf
    yield "lse", holds(lse.numel() and lse.all() and info.lse[:, :, ~isolated].isfinite().all())
    gradients = torch.autograd.grad(plain.float().sum(), [q, k, v])
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
    for which in range(3):
        qkv = trial.qkv()
        qkv[which][:, :, 6, 0] = torch.nan
        nan = trial.attend(*qkv, patterns.window(13, 3)).isnan()
        expected = torch.zeros(13, dtype=torch.bool, device=trial.device)
        expected[[6] if which == 0 else [6, 7, 8]] = True
        rows = nan.any(-1) if which == 2 else nan.all(-1)
        exact = rows[:, :, expected].all() and not nan[:, :, ~expected].any()
        what = f"a NaN in {'qkv'[which]} at token 6 of window(13, 3)"
        yield what, holds(exact, "is not exactly where it is attended to")


def _score_mod_on_non_edges(trial: Trial) -> Outcomes:
    """A score_mod that divides by 0 where there is no edge: right outputs and gradients all the same."""
    for name in ("causal", "window", "decode rows"):
        problem = trial.problem(name, "share")
        what = f"a score_mod that has no value on the non-edges of {name}"
        yield what, trial.judge(*problem.solve(trial.backend), problem.truth)


SIZES = (  # samples, query heads, key heads, receivers, senders, dim, value_dim
    (1, 4, 1, 13, 13, 16, 16),
    (2, 3, 3, 5, 37, 24, 40),
    (1, 2, 1, 150, 150, 20, 8),
    (3, 1, 1, 1, 300, 64, 64),
    (2, 8, 2, 64, 64, 32, 32),
)


def _other_sizes(trial: Trial) -> Outcomes:
    """Output and gradients for other sizes, on graphs that differ by head and sample or not at all."""
    for number, varies in product(range(len(SIZES)), (False, True)):
        problem = _problem_of_size(trial.settings, trial.dtype, number, varies)
        q, k, v = (list(problem.inputs[name].shape) for name in "qkv")
        what = f"q {q}, k {k}, Dv {v[3]}{', by head and sample' if varies else ''}"
        yield what, trial.judge(*problem.solve(trial.backend), problem.truth)


@functools.lru_cache(maxsize=128)
def _problem_of_size(settings: Settings, dtype: torch.dtype, number: int, varies: bool) -> AttendProblem:
    """``[B, T, H, D]`` in memory, seen as ``[B, H, T, D]``: as by a layer that splits channels into heads."""
    samples, heads, kv_heads, dst, src, dim, value_dim = SIZES[number]
    rng = torch.Generator().manual_seed(settings.seed + 3)
    shapes = ((dst, heads, dim), (src, kv_heads, dim), (src, kv_heads, value_dim), (dst, heads, value_dim))
    drawn = (torch.randn(samples, *shape, generator=rng, dtype=torch.float64) for shape in shapes)
    q, k, v, direction = (x.to(dtype).transpose(1, 2) for x in drawn)
    sizes = {"heads": heads, "batch": samples} if varies else {}
    graph = TokenGraph.from_rule(_scattered if varies else _near, dst, src, name="other sizes", **sizes)
    mask = graph.mask().expand(samples, heads, dst, src)
    formula = Formula(mask, direction, dim**-0.5, device=settings.device)
    return AttendProblem(graph, formula, {"q": q, "k": k, "v": v})


def _near(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst - src < 100) & (src % 5 != 1)


def _scattered(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src + dst) % (2 + b + h) != 1


def _dropout_mean(trial: Trial) -> Outcomes:
    """Equal weights over n senders of value 1: a mean of n Bernoulli(1/2) values, doubled."""
    n = 256
    q, v = (make(1, 1, n, 8, dtype=trial.dtype, device=trial.device) for make in (torch.zeros, torch.ones))
    for graph in (patterns.full(n), patterns.no_self(n)):
        with torch.random.fork_rng([trial.device] if trial.device.type == "cuda" else []):
            torch.manual_seed(trial.settings.seed)
            plain = trial.attend(q, q, v, graph, dropout=0.5)
            out, info = trial.attend(q, q, v, graph, dropout=0.5, return_info=True)
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
    q, k, v = trial.qkv()
    for name in ("causal", "window | sinks", "prefix", "tree"):
        graph, truth = GRAPHS[name].graph, trial.problem(name).truth
        for start, stop in ((0, 13), (0, 1), (5, 8), (12, 13)):
            part = trial.attend(q[:, :, start:stop], k, v, graph.rows(start, stop))
            expected = truth.rows(torch.arange(start, stop), torch.arange(0))
            yield f"rows {start} .. {stop - 1} of {name}", trial.judge(part, {}, expected)


def _edge_order(trial: Trial) -> Outcomes:
    edges = patterns.window(13, 4).edge_index
    bias = torch.arange(edges.shape[1], device=trial.device, dtype=trial.dtype) / 16
    truth = trial.problem("window", "numbered").truth
    for name, e, b in (("forwards", edges, bias), ("backwards", edges.flip(1), bias.flip(0))):
        out = trial.attend(*trial.qkv(), convert.from_edge_index(e, 13, 13), bias=b)
        yield name, trial.judge(out, {}, truth)


def _duplicates(trial: Trial) -> Outcomes:
    edges = torch.tensor([[0, 1, 0, 2], [1, 1, 1, 2]])
    try:
        convert.from_edge_index(edges, 3, 3)
        yield "an edge list with a duplicate", holds(False, "was accepted")
    except ValueError:
        once = convert.from_edge_index(edges[:, [0, 1, 3]], 3, 3)
        twice = convert.from_edge_index(edges, 3, 3, coalesce=True)
        one, other = (trial.attend(*trial.qkv(3, 3), graph) for graph in (once, twice))
        yield "the output", holds(torch.equal(one, other))


# each rule, and the option without which it cannot be checked
RULES: dict[str, tuple[Rule, str]] = {
    "isolated rows are exactly 0, lse -inf, gradients finite": (_isolated_rows, "plain"),
    "isolated rows are 0 with sinks and bias too": (partial(_isolated_rows, extra=True), "edge bias"),
    "NaN, inf and 1e4 reach only rows that attend to them": (_poison, "softcap"),
    "a NaN that is attended to is not cleaned": (_nan_is_attended_to, "plain"),
    "what a score_mod makes of a non-edge reaches no row": (_score_mod_on_non_edges, "softcap"),
    "lse and the output returned with it, with score_mod, bias and sinks": (
        lse_with_options,
        "alibi, softcap, bias, sinks",
    ),
    "other sizes: heads, samples, widths, lengths, strides": (_other_sizes, "plain"),
    "dropout keeps the mean and drops its share": (_dropout_mean, DROPOUT),
    "weights come in edge order, sum to 1 and agree with lse": (weights_of_edges, "plain"),
    "decoding row by row equals the whole": (_decoding, "plain"),
    "edges in another order give the same output": (_edge_order, "edge bias"),
    "a sender named twice is refused, or counted once": (_duplicates, "plain"),
}
