"""Rules that no error bound can express: isolated rows are exactly 0, a NaN stays in its rows, and more."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention import convert
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import BIAS_AND_SINKS, CASES, EVERY
from gnn_attention.verify.groups import Group, attend_problem
from gnn_attention.verify.measure import Outcome, gradients_of, holds, judge, worst_of
from gnn_attention.verify.truth import Problem, leaves_of

Outcomes = Iterator[tuple[str, Outcome]]
# (graph, option="plain", rows=None) -> a problem in one dtype, which all backends share
Problems = Callable[..., Problem]
Rule = Callable[[Problems, Backend], Outcomes]


def run_rule(device: str, seed: int, backend: Backend, row: Mapping[str, str]) -> Outcome:
    """The outcome of a backend by the rule of a row, in its dtype."""
    rule, _ = RULES[row["rule"]]
    return worst_of(rule(partial(attend_problem, device, seed, row["dtype"]), backend))


def _attend(backend: Backend, inputs: Mapping[str, Tensor], graph: TokenGraph, **options: Any) -> Any:
    q, k, v = (inputs[name] for name in "qkv")
    return attend(q, k, v, graph, backend=backend, **options)


def _isolated_rows(problems: Problems, backend: Backend) -> Outcomes:
    for option in ("plain", BIAS_AND_SINKS):
        problem = problems("listed", option)
        leaves, isolated = leaves_of(problem.inputs), problem.graph.in_degree() == 0
        options = problem.options(leaves)
        out, info = _attend(backend, leaves, problem.graph, return_info=True, **options)
        plain = _attend(backend, leaves, problem.graph, **options)
        isolated = isolated.to(out.device)
        for o in (out, plain):
            exact = (o[:, :, isolated] == 0).all() and (o[:, :, ~isolated] != 0).any()
            yield f"outputs, {option}", holds(exact)
        lse, others = info.lse[:, :, isolated], info.lse[:, :, ~isolated]
        yield f"lse, {option}", holds((lse == -torch.inf).all() and others.isfinite().all())
        gradients = gradients_of(plain.float(), torch.ones_like(plain), leaves)
        yield f"gradients, {option}", holds(all(g.isfinite().all() for g in gradients.values()))


def _poison(problems: Problems, backend: Backend) -> Outcomes:
    """Outputs without a path from a poisoned token, and gradients of what they attend to, stay right."""
    victims = {"causal": 9, "window": 2, "no_self": 5}
    for (graph, victim), option in product(victims.items(), ("plain", "softcap")):
        mask = CASES[graph].mask[0, 0]
        safe = ~mask[:, victim]
        safe[victim] = False
        # senders to which no poisoned receiver attends
        untouched = ~mask[~safe].any(0)
        problem = problems(graph, option, rows=tuple(safe.nonzero().flatten().tolist()))
        truth = problem.truth.rows(safe, untouched).for_backend(backend)
        for poison in (0.0, 1e4, torch.nan, torch.inf, -torch.inf):
            inputs = {name: x.clone() for name, x in problem.inputs.items()}
            for x in inputs.values():
                x[:, :, victim] = poison
            out, gradients = problem.solve(backend, inputs)
            reached = {name: x[:, :, untouched] for name, x in gradients.items() if name != "q"}
            what = f"{poison:g} at token {victim} of {graph}, {option}, reached others"
            yield what, judge(out[:, :, safe], reached, truth)


def _nan_is_attended_to(problems: Problems, backend: Backend) -> Outcomes:
    problem = problems("window")
    for which in "qkv":
        inputs = {name: x.clone() for name, x in problem.inputs.items()}
        inputs[which][:, :, 6, 0] = torch.nan
        nan = _attend(backend, inputs, problem.graph).isnan()
        expected = torch.zeros(13, dtype=torch.bool, device=nan.device)
        expected[[6] if which == "q" else [6, 7, 8, 9]] = True
        rows = nan.any(-1) if which == "v" else nan.all(-1)
        exact = rows[:, :, expected].all() and not nan[:, :, ~expected].any()
        what = f"a NaN in {which} at token 6 of window(13, 4)"
        yield what, holds(exact, "is not exactly where it is attended to")


def _score_mod_on_non_edges(problems: Problems, backend: Backend) -> Outcomes:
    """A score_mod that divides by 0 where there is no edge: right outputs and gradients all the same."""
    for name in ("causal", "window", "decode rows"):
        problem = problems(name, "share")
        what = f"a score_mod that has no value on the non-edges of {name}"
        yield what, judge(*problem.solve(backend), problem.truth.for_backend(backend))


def _lse(problems: Problems, backend: Backend) -> Outcomes:
    """Half of a sink is given to the call, and half is added to its result by lse, with right gradients.

    With ``a = sink - log 2`` the whole sink leaves ``exp(lse) / (exp(lse) + exp(a))`` of an output whose lse
    counts a sink of a already. That is computed from the lse that is stored, as weights are by a backend that
    computes them again.
    """
    for name, option in product(("causal", "listed", "decode rows"), ("sinks", BIAS_AND_SINKS, EVERY)):
        problem, what = problems(name, option), f"{name} with {option}"
        truth, leaves = problem.truth.of_recomputed_weights(), leaves_of(problem.inputs)
        half = leaves["sink_logits"] - math.log(2)
        halved = problem.options(leaves) | {"sink_logits": half}
        out, info = _attend(backend, leaves, problem.graph, return_info=True, **halved)
        remains = (info.lse - half.to(info.lse.dtype).unsqueeze(-1)).sigmoid().unsqueeze(-1)
        whole, qkv = out.to(info.lse.dtype) * remains, {key: leaves[key] for key in "qkv"}
        gradients = gradients_of(whole, problem.formula.direction, qkv)
        yield f"a sink added by lse, {what}", judge(whole, gradients, truth)
        plain = _attend(backend, leaves, problem.graph, **halved)
        yield f"the output without lse, {what}", judge(plain * remains, {}, truth)


def _weights_of_edges(problems: Problems, backend: Backend) -> Outcomes:
    """``info.weights()`` times what receivers send back, edge by edge, are the gradients of v.

    A backend that computes weights again from lse does the same, so that the rule for it holds.
    """
    problem = problems("listed")
    out, info = _attend(backend, problem.inputs, problem.graph, return_info=True)
    (src, dst), v = CASES["listed"].edges().to(out.device), problem.inputs["v"]
    weights = info.weights().to(info.lse.dtype)
    back = weights.unsqueeze(-1) * problem.formula.direction[:, :, dst]
    by_head = back.new_zeros(*back.shape[:2], *v.shape[2:]).index_add(2, src, back)
    gradient = by_head.unflatten(1, (v.shape[1], -1)).sum(2)
    yield "weights in edge order", judge(out, {"v": gradient}, problem.truth.of_recomputed_weights())


def _duplicates(problems: Problems, backend: Backend) -> Outcomes:
    edges = torch.tensor([[0, 1, 0, 2], [1, 1, 1, 2]])
    try:
        convert.from_edge_index(edges, 3, 3)
        yield "an edge list with a duplicate", holds(False, "was accepted")
    except ValueError:
        once = convert.from_edge_index(edges[:, [0, 1, 3]], 3, 3)
        twice = convert.from_edge_index(edges, 3, 3, coalesce=True)
        inputs = {name: x[:, :, :3] for name, x in problems("full").inputs.items()}
        one, other = (_attend(backend, inputs, graph) for graph in (once, twice))
        yield "the output", holds(torch.equal(one, other))


# each rule, and the option without which it cannot be checked
RULES: dict[str, tuple[Rule, str]] = {
    "isolated rows are exactly 0, lse -inf, gradients finite": (_isolated_rows, "edge bias"),
    "NaN, inf and 1e4 reach only rows that attend to them": (_poison, "softcap"),
    "a NaN that is attended to is not cleaned": (_nan_is_attended_to, "plain"),
    "what a score_mod makes of a non-edge reaches no row": (_score_mod_on_non_edges, "softcap"),
    "lse is that of the logits, bias and sinks, and so are its gradients": (_lse, EVERY),
    "weights come in edge order and agree with lse": (_weights_of_edges, "plain"),
    "a sender named twice is refused, or counted once": (_duplicates, "plain"),
}
GROUP = Group("rules", run_rule, {"rule": RULES}, option=lambda row: RULES[row["rule"]][1])
