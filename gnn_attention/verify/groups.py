"""Define each group of checks by a table of the values it combines, and draw the problems."""

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
from gnn_attention.verify.cases import BIAS_AND_SINKS, DTYPES, FEATURES, GRAPHS, KINDS, MIX, OPTIONS
from gnn_attention.verify.measure import Outcome, Truth, differentiate, judge, judge_condition
from gnn_attention.verify.report import Check
from gnn_attention.verify.truth import Problem, make_leaves, name_backend

FORMS: dict[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender's side": partial(FactoredHeads.of, side="sender"),
    "merged": MergedHeads.of,
    "merged, sender's side": partial(MergedHeads.of, side="sender"),
}
# Weights are nearly uniform for "inputs x1". For "inputs x5", they are peaked, as in trained heads.
SIZES = ("inputs x1", "inputs x5")
ONE_KEY_HEAD = "4 heads over 1, 13 x 13"
EDGE_GRAPHS = ("causal", "listed", "window, 97 tokens", ONE_KEY_HEAD)
DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")
LAYER_GRAPHS: tuple[str, ...] = ("causal", "window", "strict_causal", "cross", "listed", "by head")
LAYER_GRAPHS += ("by sample", "decode rows", "no edges", "causal, 97 tokens")
# Options with sinks are missing, because layers have no sinks.
LAYER_OPTIONS = ("plain", "alibi", "relative bias", "softcap", "log multiplicity", "edge bias")


def build_checks(
    group: str, values: Mapping[str, Iterable[str]], device: str, backends: Sequence[Backend]
) -> Iterator[Check]:
    """Yield the checks of a group for ``backends``; ``values`` lists the values of each factor.

    For any three factors (dtype is one), the checks cover every combination of values. In groups
    with the factor "size", every pair of values is also checked without gradients.
    """
    rows = grid(**{"dtype": DTYPES, **values}) if backends else []
    rows = [row for row in rows if "graph" not in row or OPTIONS[row["option"]].fits(GRAPHS[row["graph"]])]
    rows = [rows[index] for index in cover_values(rows, 3)]
    forward_indices = set(cover_values(rows, 2)) if "size" in values else set()
    for (index, row), backend in product(enumerate(rows), backends):
        factors = {name: value for name, value in row.items() if name != "dtype"}
        option = row["option"] if "option" in row else RULES[row["rule"]][1]
        reason = unsupported_reason(backend, device, row["dtype"], option)
        if row.get("rule") == NAN_RULE and backend.capabilities.visits_non_edges and "cuda" in device:
            reason = f"{backend.name}: it assumes finite tokens, so NaN is not checked on {device}"
        if backend.name == "message_passing" and "form" in row and GRAPHS[row["graph"]].graph.varying_axes:
            reason = "message passing needs one edge list, and this graph varies by head or sample"
        if "derivative" in row and not backend.capabilities.double_backward:
            reason = f"{backend.name}: it has no second derivative"
        run = partial(run_row, device, name_backend(backend), row)
        check = Check(group, backend.name, row["dtype"], ", ".join(factors.values()), run, factors, reason)
        yield from (check, check.forward_alone()) if index in forward_indices else (check,)


def run_row(device: str, backend: str | Backend, row: Mapping[str, str]) -> Outcome:
    """Judge a backend by its errors on the problem of a row of factors, or by the rule that it names."""
    backend = BACKENDS[backend] if isinstance(backend, str) else backend
    if "rule" not in row:
        problem = draw_problem(device, **{name: x for name, x in row.items() if name != "derivative"})
        if "derivative" in row:
            truth = Truth(*problem.differentiate(row["derivative"]), {})
            return judge(*problem.differentiate(row["derivative"], backend), truth)
        return judge(*problem.solve(backend), problem.truth.for_backend(backend))
    rule, _ = RULES[row["rule"]]
    max_share = 0.0
    for name, outcome in rule(partial(draw_problem, device, row["dtype"]), backend):
        if not outcome.passed:
            return Outcome(outcome.share, where=f"{name}: {outcome.where}")
        max_share = max(max_share, outcome.share)
    return Outcome(max_share)


@functools.lru_cache(maxsize=1024)
@torch.no_grad()
def unsupported_reason(backend: Backend, device: str, dtype: str, option: str) -> str | None:
    """Return why a backend does not support a forward pass with an option, or None if it does."""
    problem = draw_problem(device, dtype, "causal", option)
    q, k, v = (problem.inputs[name] for name in "qkv")
    call = AttentionCall.from_arguments(q, k, v, problem.graph, **problem.options(problem.inputs))
    reason = backend.unsupported_reason(call)
    return None if reason is None else f"{backend.name}: {reason}"


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return one row for each way to choose a value for every name."""
    return [dict(zip(values, row, strict=True)) for row in product(*values.values())]


def cover_values(rows: Sequence[Mapping[str, Any]], strength: int) -> list[int]:
    """Return indices of rows that together include every combination of ``strength`` values found in a row.

    The selection is greedy: each step selects the row that adds the most new combinations.

    >>> cover_values([{"a": a, "b": b, "c": c} for a in (0, 1) for b in (0, 1) for c in (0, 1)], 2)
    [0, 3, 5, 6]
    """
    row_combinations = [set(combinations(row.items(), min(strength, len(row)))) for row in rows]
    indices: list[int] = []
    missing = set().union(*row_combinations)
    for gain in range(max(map(len, row_combinations), default=0), 0, -1):
        for index, values in enumerate(row_combinations):
            # Rows that add more combinations were selected earlier.
            if len(values & missing) == gain:
                indices.append(index)
                missing -= values
    return sorted(indices)


@functools.lru_cache(maxsize=256)
def draw_problem(
    device: str,
    dtype: str,
    graph: str | cases.GraphCase,
    option: str = "plain",
    size: str = "inputs x1",
    form: str | None = None,
    kind: str = "plain heads",
    rows: tuple[int, ...] | None = None,
) -> Problem:
    """Draw a call on a graph with an option; the size "inputs x5" multiplies the tokens by 5.

    If ``form`` is not None, the problem is a layer whose heads have this form and kind. Gradients
    are those of the outputs of the receivers ``rows``, or of all receivers if ``rows`` is None.
    """
    case = GRAPHS[graph] if isinstance(graph, str) else graph
    feature = OPTIONS[option]
    heads = None if form is None else FORMS[form](cases.draw_heads(kind, seed=0)).to(device, DTYPES[dtype])
    token_names = ("q", "k", "v") if heads is None else ("x_src", "x_dst")
    rng = torch.Generator().manual_seed(0 if heads is None else 1)

    def draw(name: str, scale: float = 1.0) -> Tensor:
        x = torch.randn(*case.shapes()[name], generator=rng, dtype=torch.float64)
        return (x * scale).to(device, DTYPES[dtype])

    inputs = {name: draw(name, float(size.removeprefix("inputs x"))) for name in token_names}
    inputs |= {name: draw(name) for name in feature.extras}
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
        oracle_options=partial(feature.oracle_options, case, feature.factors(case, device)),
        heads=heads,
        graph=case.graph,
        options=feature.options,
        layout=case.layout,
    )


# The rules below check what error bounds cannot: exact zeros, how far NaN and inf spread, and lse.
# Rules call make_problem(graph, option="plain", rows=None). All backends share the problems.
MakeProblem = Callable[..., Problem]
Rule = Callable[[MakeProblem, Backend], Iterator[tuple[str, Outcome]]]


def _check_isolated(make_problem: MakeProblem, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    is_isolated = ~GRAPHS["listed"].mask[0, 0].any(1)
    for option in ("plain", BIAS_AND_SINKS):
        problem = make_problem("listed", option)
        leaves = make_leaves(problem.inputs)
        out = problem.call(backend, leaves)
        out_with_info, info = problem.call(backend, leaves, return_info=True)
        gradients = differentiate(out.float(), torch.ones_like(out), leaves).values()
        outputs = torch.cat([out, out_with_info])
        yield f"outputs, {option}", judge_condition(not outputs[:, :, is_isolated].any())
        yield f"lse, {option}", judge_condition((info.lse[:, :, is_isolated] == -torch.inf).all())
        yield f"gradients, {option}", judge_condition(all(g.isfinite().all() for g in gradients))


def _check_poison(make_problem: MakeProblem, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    """Check the outputs and the gradients that a poisoned token must not change.

    The option "share" divides by 0 for every pair that is not an edge of a causal graph.
    """
    calls = ("causal", 9, "plain"), ("causal", 9, "share"), ("no_self", 5, "plain"), ("window", 2, "softcap")
    assumes_finite = make_problem("causal").direction.is_cuda and backend.capabilities.visits_non_edges
    poison_values = (0.0, 1e4) if assumes_finite else (0.0, 1e4, torch.nan, torch.inf, -torch.inf)
    for (graph, token, option), poison in product(calls, poison_values):
        mask = GRAPHS[graph].mask[0, 0]
        is_safe = ~mask[:, token] & (torch.arange(len(mask)) != token)
        # The gradient of a sender is safe if no poisoned receiver attends to it.
        is_safe_sender = ~mask[~is_safe].any(0)
        problem = make_problem(graph, option, rows=tuple(is_safe.nonzero().flatten().tolist()))
        inputs = {name: x.clone() for name, x in problem.inputs.items()}
        for x in inputs.values():
            x[:, :, token] = poison
        out, gradients = problem.solve(backend, inputs)
        safe_gradients = {name: x[:, :, is_safe_sender] for name, x in gradients.items() if name != "q"}
        truth = problem.truth.rows(is_safe, is_safe_sender).for_backend(backend)
        title = f"{poison:g} at token {token} of {graph}, {option}, reached others"
        yield title, judge(out[:, :, is_safe], safe_gradients, truth)


def _check_nan(make_problem: MakeProblem, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    problem = make_problem("window")
    is_receiver = GRAPHS["window"].mask[0, 0, :, 6]
    for name in "qkv":
        expected = is_receiver if name != "q" else torch.arange(len(is_receiver)) == 6
        inputs = {key: x.clone() for key, x in problem.inputs.items()}
        inputs[name][:, :, 6] = torch.nan
        is_nan = problem.call(backend, inputs).isnan().cpu()
        is_right = torch.equal(is_nan, expected.unsqueeze(1).expand(is_nan.shape))
        outcome = judge_condition(is_right, "does not reach exactly the receivers that attend to it")
        yield f"a NaN in {name} at token 6 of window(13, 4)", outcome


def _check_lse(make_problem: MakeProblem, backend: Backend) -> Iterator[tuple[str, Outcome]]:
    """Split each sink: pass one half to the call, add the other by lse, and expect the same result.

    For a half sink a, ``exp(a) = exp(sink) / 2``. Adding it multiplies the output by ``exp(lse) / (exp(lse)
    + exp(a))``. This uses the stored lse, so the limit is that of backends that recompute their weights.
    """
    for name, option in product(("causal", "listed", "decode rows"), ("sinks", BIAS_AND_SINKS, MIX)):
        problem = make_problem(name, option)
        leaves = make_leaves(problem.inputs)
        half_sink = leaves["sink_logits"] - math.log(2)
        half, info = problem.call(backend, leaves | {"sink_logits": half_sink}, return_info=True)
        out = half * (info.lse - half_sink.to(info.lse.dtype).unsqueeze(-1)).sigmoid().unsqueeze(-1)
        gradients = differentiate(out, problem.direction, {key: leaves[key] for key in "qkv"})
        truth = problem.truth.for_backend(replace(backend, recomputes=True))
        yield f"{name} with {option}", judge(out, gradients, truth)


NAN_RULE = "a NaN that is attended to is not cleaned"
# Each rule has an option, and a backend that does not support the option skips the rule.
RULES: dict[str, tuple[Rule, str]] = {
    "isolated rows are exactly 0, lse -inf, gradients finite": (_check_isolated, "edge bias"),
    "NaN, inf and 1e4 reach only rows that attend to them": (_check_poison, "softcap"),
    NAN_RULE: (_check_nan, "plain"),
    "lse is that of the logits, bias and sinks, and so are its gradients": (_check_lse, MIX),
}

GROUPS: dict[str, Mapping[str, Iterable[str]]] = {
    "attend": {"graph": GRAPHS, "option": FEATURES, "size": SIZES},
    "layer": {"form": FORMS, "kind": KINDS, "graph": LAYER_GRAPHS, "option": LAYER_OPTIONS, "size": SIZES},
    "dropout": {"graph": DROPOUT_GRAPHS, "option": (cases.DROPOUT,)},
    "edges": {"graph": EDGE_GRAPHS, "option": cases.EDGE_OPTIONS},
    "derivatives": {
        "dtype": ("float64",),
        "graph": ("causal", "listed", "by head", ONE_KEY_HEAD),
        "option": ("plain", MIX, *cases.EDGE_OPTIONS),
        "derivative": ("forward mode", "second"),
    },
    "rules": {"rule": RULES},
}
