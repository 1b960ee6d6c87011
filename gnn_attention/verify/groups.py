"""The groups of checks, each a table of values whose combinations are the checks, and the problem of each.

Small inputs make flat attention; inputs five times as large make it peaked, as trained heads do.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.verify import cases
from gnn_attention.verify.cases import BIAS_AND_SINKS, DTYPES, EVERY, FEATURES, GRAPHS, KINDS, OPTIONS
from gnn_attention.verify.measure import Outcome, gradients_of, holds, judge
from gnn_attention.verify.report import Check
from gnn_attention.verify.truth import Problem, by_name, leaves_of

FORMS: dict[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender's side": partial(FactoredHeads.of, side="sender"),
    "merged": MergedHeads.of,
    "merged, sender's side": partial(MergedHeads.of, side="sender"),
}
SIZES = ("inputs x1", "inputs x5")
DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")
LAYER_GRAPHS = (
    *("causal", "window", "strict_causal", "cross", "listed", "by head", "by sample"),
    *("decode rows", "no edges", "causal, 97 tokens"),
)
# a layer has no sinks
LAYER_OPTIONS = ("plain", "alibi", "relative bias", "softcap", "log multiplicity", "edge bias")

Row = Mapping[str, str]  # the dtype, and the other factors of a check


def checks_of(
    group: str, values: Mapping[str, Iterable[str]], device: str, backends: Sequence[Backend]
) -> Iterator[Check]:
    """The checks of a group on some backends; ``values`` are those of each factor.

    The rows hold every combination of three values, of any factors and dtypes. Where inputs have sizes, pairs
    of values are checked without gradients, too.
    """
    rows = grid(**{"dtype": DTYPES, **values}) if backends else []
    if "graph" in values:
        rows = [row for row in rows if OPTIONS[row["option"]].fits(GRAPHS[row["graph"]])]
    rows = [rows[number] for number in covering(rows, 3)]
    forward = set(covering(rows, 2)) if "size" in values else set()
    for (number, row), backend in product(enumerate(rows), backends):
        factors = {name: value for name, value in row.items() if name != "dtype"}
        option = row["option"] if "option" in row else RULES[row["rule"]][1]
        skipped = unsupported_reason(backend, device, row["dtype"], option)
        if row.get("rule") == NAN_RULE and backend.capabilities.visits_non_edges and "cuda" in device:
            skipped = f"{backend.name}: it assumes finite tokens, and no number is looked at on {device}"
        if backend.name == "message_passing" and "form" in row and GRAPHS[row["graph"]].graph.varying_axes:
            skipped = "message passing needs one edge list, and this graph differs by head or sample"
        name, run = ", ".join(factors.values()), partial(run_row, device, by_name(backend), row)
        check = Check(group, backend.name, row["dtype"], name, run, factors, skipped)
        yield from (check, check.forward_alone()) if number in forward else (check,)


def run_row(device: str, backend: str | Backend, row: Row) -> Outcome:
    """The outcome of a backend on the problem of a row, or by its rule."""
    backend = BACKENDS[backend] if isinstance(backend, str) else backend
    if "rule" not in row:
        problem = drawn_problem(device, **row)
        return judge(*problem.solve(backend), problem.truth.for_backend(backend))
    share, (rule, _) = 0.0, RULES[row["rule"]]
    for name, outcome in rule(partial(drawn_problem, device, row["dtype"]), backend):
        if not outcome.passed:
            return Outcome(outcome.share, where=f"{name}: {outcome.where}")
        share = max(share, outcome.share)
    return Outcome(share)


@functools.lru_cache(maxsize=1024)
@torch.no_grad()
def unsupported_reason(backend: Backend, device: str, dtype: str, option: str) -> str | None:
    """Why a backend does not take calls with an option, without gradients; or None."""
    problem = drawn_problem(device, dtype, "causal", option)
    q, k, v = (problem.inputs[name] for name in "qkv")
    call = AttentionCall.from_arguments(q, k, v, problem.graph, **problem.options(problem.inputs))
    reason = backend.unsupported_reason(call)
    return None if reason is None else f"{backend.name}: {reason}"


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the values of each name, as rows."""
    return [dict(zip(values, row, strict=True)) for row in product(*values.values())]


def covering(rows: Sequence[Mapping[str, Any]], strength: int) -> list[int]:
    """Numbers of rows, ascending, that hold each combination of ``strength`` values that occurs in any row.

    A greedy choice: the row that adds most comes first, of equal ones the earliest.

    >>> covering([{"a": a, "b": b, "c": c} for a in (0, 1) for b in (0, 1) for c in (0, 1)], 2)
    [0, 3, 5, 6]
    """
    held = [set(combinations(row.items(), min(strength, len(row)))) for row in rows]
    missing, chosen = set().union(*held), list[int]()
    for gain in range(max(map(len, held), default=0), 0, -1):
        for number, values in enumerate(held):
            # no row adds more than this gain by now
            if len(values & missing) == gain:
                chosen.append(number)
                missing -= values
    return sorted(chosen)


# ---- the problems


@functools.lru_cache(maxsize=256)
def drawn_problem(
    device: str,
    dtype: str,
    graph: str | cases.GraphCase,
    option: str = "plain",
    size: str = "inputs x1",
    form: str | None = None,
    kind: str = "plain heads",
    rows: tuple[int, ...] | None = None,
) -> Problem:
    """A drawn call on a graph, with an option, whose inputs are multiplied by a size such as "inputs x5".

    With a form and a kind it is a layer of drawn weights. Gradients are those of the receivers ``rows``, None
    for all.
    """
    case, feature = GRAPHS[graph] if isinstance(graph, str) else graph, OPTIONS[option]
    heads = None
    if form is not None:
        heads = FORMS[form](cases.drawn_heads(kind, seed=0)).to(device, DTYPES[dtype])
    tokens = ("q", "k", "v") if heads is None else ("x_src", "x_dst")
    rng, shapes = torch.Generator().manual_seed(0 if heads is None else 1), case.shapes()

    def draw(name: str, factor: float = 1.0) -> Tensor:
        x = torch.randn(*shapes[name], generator=rng, dtype=torch.float64)
        return (x * factor).to(device, DTYPES[dtype])

    inputs = {name: draw(name, float(size.removeprefix("inputs x"))) for name in tokens}
    inputs |= {name: draw(name) for name in feature.learns}
    direction = draw("out" if heads is None else "x_dst")
    if rows is not None:
        direction[:, :, [row for row in range(case.graph.num_dst) if row not in rows]] = 0.0
    return Problem(
        inputs,
        mask=case.mask.to(device),
        direction=direction,
        scale=feature.arguments.get("scale", case.dims[0] ** -0.5 if heads is None else heads.scale),
        dense=partial(feature.dense, case),
        additive=feature.additive,
        factors=feature.factors(case, device),
        heads=heads,
        graph=case.graph,
        options=feature.options,
        layout=case.layout,
    )


# ---- rules that no error bound of a call can express: exact zeros, where NaN and infinities go, and lse

# (graph, option="plain", rows=None) -> a problem in one dtype, which all backends share
Problems = Callable[..., Problem]
Rule = Callable[[Problems, Backend], Iterator[tuple[str, Outcome]]]


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
    calls = (
        ("causal", 9, "plain"),
        ("causal", 9, "share"),
        ("no_self", 5, "plain"),
        ("window", 2, "softcap"),
    )
    assumes_finite = problems("causal").direction.is_cuda and backend.capabilities.visits_non_edges
    poisons = (0.0, 1e4) if assumes_finite else (0.0, 1e4, torch.nan, torch.inf, -torch.inf)
    for (graph, victim, option), poison in product(calls, poisons):
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
        exact = torch.equal(nan, expected.unsqueeze(1).expand(nan.shape))
        yield f"a NaN in {which} at token 6 of window(13, 4)", holds(exact, "is not exactly where it is due")


def _lse(problems: Problems, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    """Half of a sink is given to the call, and half is added to its result by lse, with right gradients.

    With ``a = sink - log 2`` the whole sink leaves ``exp(lse) / (exp(lse) + exp(a))`` of an output whose lse
    counts a sink of a already. That is computed from the lse that is stored, as weights are by a backend that
    computes them again.
    """
    for name, option in product(("causal", "listed", "decode rows"), ("sinks", BIAS_AND_SINKS, EVERY)):
        problem, recomputing = problems(name, option), replace(backend, recomputes=True)
        leaves = leaves_of(problem.inputs)
        half = leaves["sink_logits"] - math.log(2)
        out, info = problem.call(backend, leaves | {"sink_logits": half}, return_info=True)
        whole = out * (info.lse - half.to(info.lse.dtype).unsqueeze(-1)).sigmoid().unsqueeze(-1)
        gradients = gradients_of(whole, problem.direction, {key: leaves[key] for key in "qkv"})
        yield f"{name} with {option}", judge(whole, gradients, problem.truth.for_backend(recomputing))


NAN_RULE = "a NaN that is attended to is not cleaned"
# each rule, and the option without which it cannot be checked
RULES: dict[str, tuple[Rule, str]] = {
    "isolated rows are exactly 0, lse -inf, gradients finite": (_isolated_rows, "edge bias"),
    "NaN, inf and 1e4 reach only rows that attend to them": (_poison, "softcap"),
    NAN_RULE: (_nan_is_attended_to, "plain"),
    "lse is that of the logits, bias and sinks, and so are its gradients": (_lse, EVERY),
}

# ---- the groups

GROUPS: dict[str, Mapping[str, Iterable[str]]] = {
    "attend": {"graph": GRAPHS, "option": FEATURES, "size": SIZES},
    "layer": {"form": FORMS, "kind": KINDS, "graph": LAYER_GRAPHS, "option": LAYER_OPTIONS, "size": SIZES},
    "dropout": {"graph": DROPOUT_GRAPHS, "option": (cases.DROPOUT,)},
    "rules": {"rule": RULES},
}
