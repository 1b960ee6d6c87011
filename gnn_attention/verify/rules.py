"""Rules that no error bound of a call can express: exact zeros, where NaN and infinities go, and lse."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from gnn_attention.backends import Backend
from gnn_attention.verify.cases import BIAS_AND_SINKS, EVERY, GRAPHS
from gnn_attention.verify.groups import Group, Row, attend_problem
from gnn_attention.verify.measure import Outcome, gradients_of, holds, judge, worst_of
from gnn_attention.verify.truth import Problem, leaves_of

# (graph, option="plain", rows=None) -> a problem in one dtype, which all backends share
Problems = Callable[..., Problem]
Rule = Callable[[Problems, Backend], Iterator[tuple[str, Outcome]]]


def run_rule(device: str, backend: Backend, row: Row) -> Outcome:
    """The outcome of a backend by the rule of a row, in its dtype."""
    rule, _ = RULES[row["rule"]]
    return worst_of(rule(partial(attend_problem, device, row["dtype"]), backend))


def _isolated_rows(problems: Problems, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    isolated = ~GRAPHS["listed"].mask[0, 0].any(1)
    for option in ("plain", BIAS_AND_SINKS):
        problem = problems("listed", option)
        leaves = leaves_of(problem.inputs)
        plain, (out, info) = problem.call(backend, leaves), problem.call(backend, leaves, return_info=True)
        gradients = gradients_of(plain.float(), torch.ones_like(plain), leaves).values()
        yield f"outputs, {option}", holds(not torch.cat([plain, out])[:, :, isolated].any())
        yield f"lse, {option}", holds((info.lse[:, :, isolated] == -torch.inf).all())
        yield f"gradients, {option}", holds(all(g.isfinite().all() for g in gradients))


def _poison(problems: Problems, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    """Outputs without a path from a poisoned token, and gradients of what they attend to, stay right.

    The option "share" divides by 0 on pairs that are no edges of a causal graph.
    """
    cases = [
        ("causal", 9, "plain"),
        ("causal", 9, "share"),
        ("no_self", 5, "plain"),
        ("window", 2, "softcap"),
    ]
    for (graph, victim, option), poison in product(cases, (0.0, 1e4, torch.nan, torch.inf, -torch.inf)):
        mask = GRAPHS[graph].mask[0, 0]
        safe = ~mask[:, victim] & (torch.arange(len(mask)) != victim)
        # senders to which no poisoned receiver attends
        untouched = ~mask[~safe].any(0)
        problem = problems(graph, option, rows=tuple(safe.nonzero().flatten().tolist()))
        inputs = {name: x.clone() for name, x in problem.inputs.items()}
        for x in inputs.values():
            x[:, :, victim] = poison
        out, gradients = problem.solve(backend, inputs)
        reached = {name: x[:, :, untouched] for name, x in gradients.items() if name != "q"}
        truth = problem.truth.rows(safe, untouched).for_backend(backend)
        what = f"{poison:g} at token {victim} of {graph}, {option}, reached others"
        yield what, judge(out[:, :, safe], reached, truth)


def _nan_is_attended_to(problems: Problems, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    problem, receivers = problems("window"), GRAPHS["window"].mask[0, 0, :, 6]
    for which in "qkv":
        expected = receivers if which != "q" else torch.arange(len(receivers)) == 6
        inputs = {name: x.clone() for name, x in problem.inputs.items()}
        inputs[which][:, :, 6] = torch.nan
        nan = problem.call(backend, inputs).isnan().cpu()
        what = f"a NaN in {which} at token 6 of window(13, 4)"
        exact = torch.equal(nan, expected.unsqueeze(1).expand(nan.shape))
        yield what, holds(exact, "is not exactly where it is attended to")


def _lse(problems: Problems, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    """Half of a sink is given to the call, and half is added to its result by lse, with right gradients.

    With ``a = sink - log 2`` the whole sink leaves ``exp(lse) / (exp(lse) + exp(a))`` of an output whose lse
    counts a sink of a already. That is computed from the lse that is stored, as weights are by a backend that
    computes them again.
    """
    for name, option in product(("causal", "listed", "decode rows"), ("sinks", BIAS_AND_SINKS, EVERY)):
        problem = problems(name, option)
        leaves = leaves_of(problem.inputs)
        half = leaves["sink_logits"] - math.log(2)
        out, info = problem.call(backend, leaves | {"sink_logits": half}, return_info=True)
        whole = out * (info.lse - half.to(info.lse.dtype).unsqueeze(-1)).sigmoid().unsqueeze(-1)
        gradients = gradients_of(whole, problem.formula.direction, {key: leaves[key] for key in "qkv"})
        yield f"{name} with {option}", judge(whole, gradients, problem.truth.of_recomputed_weights())


# each rule, and the option without which it cannot be checked
RULES: dict[str, tuple[Rule, str]] = {
    "isolated rows are exactly 0, lse -inf, gradients finite": (_isolated_rows, "edge bias"),
    "NaN, inf and 1e4 reach only rows that attend to them": (_poison, "softcap"),
    "a NaN that is attended to is not cleaned": (_nan_is_attended_to, "plain"),
    "lse is that of the logits, bias and sinks, and so are its gradients": (_lse, EVERY),
}
GROUP = Group("rules", run_rule, {"rule": RULES}, lambda row: RULES[row["rule"]][1])
