"""Rules that no error bound can express: isolated rows are exactly 0, a NaN stays in its rows, and more."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gnn_attention import convert
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import CASES
from gnn_attention.verify.groups import Group, attend_problem
from gnn_attention.verify.measure import Outcome, Truth, gradients_of, holds, judge, worst_of
from gnn_attention.verify.truth import Problem, leaves_of


@dataclass(frozen=True)
class Trial:
    """A backend in one dtype, and problems that it shares with all others."""

    device: str
    seed: int
    dtype: str
    backend: Backend

    def problem(self, graph: str, option: str = "plain", rows: tuple[int, ...] | None = None) -> Problem:
        """A graph with an option; gradients are those of the receivers ``rows`` (None: of all)."""
        return attend_problem(self.device, self.seed, self.dtype, graph, option, "inputs x1", rows)

    def attend(self, inputs: Mapping[str, Tensor], graph: TokenGraph, **options: Any) -> Any:
        q, k, v = (inputs[name] for name in "qkv")
        return attend(q, k, v, graph, backend=self.backend, **options)

    def judge(self, out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Outcome:
        return judge(out, gradients, truth.for_backend(self.backend))


Outcomes = Iterator[tuple[str, Outcome]]
Rule = Callable[[Trial], Outcomes]


def run_rule(device: str, seed: int, backend: Backend, row: Mapping[str, str]) -> Mapping[str, Any]:
    """The fields of the result of a backend by the rule of a row, in its dtype."""
    rule, _ = RULES[row["rule"]]
    return worst_of(rule(Trial(device, seed, row["dtype"], backend)))


def _isolated_rows(trial: Trial) -> Outcomes:
    for option in ("plain", "bias and sinks"):
        problem = trial.problem("listed", option)
        leaves = leaves_of(problem.inputs, trial.device)
        out, info = trial.attend(leaves, problem.graph, return_info=True, **problem.options(leaves))
        plain = trial.attend(leaves, problem.graph, **problem.options(leaves))
        isolated = (problem.graph.in_degree() == 0).to(trial.device)
        for o in (out, plain):
            exact = (o[:, :, isolated] == 0).all() and (o[:, :, ~isolated] != 0).any()
            yield f"outputs, {option}", holds(exact)
        lse, others = info.lse[:, :, isolated], info.lse[:, :, ~isolated]
        yield f"lse, {option}", holds((lse == -torch.inf).all() and others.isfinite().all())
        gradients = torch.autograd.grad(plain.float().sum(), [leaves[name] for name in "qkv"])
        yield f"gradients, {option}", holds(all(g.isfinite().all() for g in gradients))


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
            reached = {name: gradients[name][:, :, untouched] for name in "kv"}
            what = f"{poison:g} at token {victim} of {graph}, {option}, reached others"
            yield what, trial.judge(out[:, :, safe], reached, truth)


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


def _lse(trial: Trial) -> Outcomes:
    """Half of a sink is given to the call, and half is added to its result by lse, with right gradients.

    With ``a = sink - log 2`` the whole sink leaves ``exp(lse) / (exp(lse) + exp(a))`` of an output whose lse
    counts a sink of a already. That is computed from the lse that is stored, as weights are by a backend that
    computes them again.
    """
    options = ("sinks", "bias and sinks", "score_mod, sink_logits", "score_mod, bias, sink_logits")
    for name, option in product(("causal", "listed", "decode rows"), options):
        problem, what = trial.problem(name, option), f"{name} with {option}"
        truth, leaves = problem.truth.of_recomputed_weights(), leaves_of(problem.inputs, trial.device)
        half = leaves["sink_logits"] - math.log(2)
        halved = problem.options(leaves) | {"sink_logits": half}
        out, info = trial.attend(leaves, problem.graph, return_info=True, **halved)
        remains = (info.lse - half.to(info.lse.dtype).unsqueeze(-1)).sigmoid().unsqueeze(-1)
        whole, qkv = out.to(info.lse.dtype) * remains, {key: leaves[key] for key in "qkv"}
        gradients = gradients_of(whole, problem.formula.direction.to(trial.device), qkv)
        yield f"a sink added by lse, {what}", judge(whole, gradients, truth)
        plain = trial.attend(leaves, problem.graph, **halved)
        yield f"the output without lse, {what}", judge(plain * remains, {}, truth)


def _weights_of_edges(trial: Trial) -> Outcomes:
    """``info.weights()`` times what receivers send back, edge by edge, are the gradients of v.

    A backend that computes weights again from lse does the same, so that the rule for it holds.
    """
    problem, (src, dst) = trial.problem("listed"), CASES["listed"].edges().to(trial.device)
    out, info = trial.attend(problem.inputs, problem.graph, return_info=True)
    weights, v = info.weights().to(info.lse.dtype), problem.inputs["v"]
    back = weights.unsqueeze(-1) * problem.formula.direction.to(trial.device)[:, :, dst]
    by_head = back.new_zeros(*back.shape[:2], *v.shape[2:]).index_add(2, src, back)
    gradient = by_head.unflatten(1, (v.shape[1], -1)).sum(2)
    yield "weights in edge order", judge(out, {"v": gradient}, problem.truth.of_recomputed_weights())


def _decoding(trial: Trial) -> Outcomes:
    """Some receivers over all senders give the same rows as the whole graph."""
    for name in ("causal", "window | sinks", "prefix", "tree"):
        problem = trial.problem(name)
        for start, stop in ((0, 13), (0, 1), (5, 8), (12, 13)):
            inputs = {**problem.inputs, "q": problem.inputs["q"][:, :, start:stop]}
            part = trial.attend(inputs, problem.graph.rows(start, stop))
            expected = problem.truth.rows(torch.arange(start, stop), torch.arange(0))
            yield f"rows {start} .. {stop - 1} of {name}", trial.judge(part, {}, expected)


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


EVERY = "alibi, softcap, bias, sinks"
# each rule, and the option without which it cannot be checked
RULES: dict[str, tuple[Rule, str]] = {
    "isolated rows are exactly 0, lse -inf, gradients finite": (_isolated_rows, "edge bias"),
    "NaN, inf and 1e4 reach only rows that attend to them": (_poison, "softcap"),
    "a NaN that is attended to is not cleaned": (_nan_is_attended_to, "plain"),
    "what a score_mod makes of a non-edge reaches no row": (_score_mod_on_non_edges, "softcap"),
    "lse is that of the logits, bias and sinks, and so are its gradients": (_lse, EVERY),
    "weights come in edge order and agree with lse": (_weights_of_edges, "plain"),
    "decoding row by row equals the whole": (_decoding, "plain"),
    "a sender named twice is refused, or counted once": (_duplicates, "plain"),
}
# rules differentiate by themselves
GROUP = Group(
    "rules", run_rule, {"rule": RULES}, option=lambda row: RULES[row["rule"]][1], with_gradients=False
)
