"""F6: first and second derivatives of every backend equal numerical ones, for every input and parameter.

A case is a graph of a family on three to five tokens and a form (a call of ``attend``, or a layer of standard,
factored or merged heads) in float64. ``torch.autograd.gradcheck`` changes numbers by 1e-6. ``dense``,
``reference`` and the message-passing path promise second derivatives. Other backends may refuse them by name,
but never give wrong ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify.truth import Problem, make_leaves, name_backend
from tests.guarantees.draws import Draw, GraphDraw, Numbers
from tests.guarantees.families import FAMILIES, draw_edge_list
from tests.guarantees.guarantee import Finding, Guarantee, Tell, Verdict, run_cases
from tests.guarantees.problems import MESSAGE_PASSING, call, problem_of, takes, usual_backends

KINDS = (
    *("causal", "list", "window", "band", "dilated", "window and sinks"),
    *("prefix", "documents", "tree", "globals", "by head", "full"),
)
FORMS = ("attend", "standard", "attend", "factored", "attend", "merged")
DOUBLE_BACKWARD = ("dense", "reference", MESSAGE_PASSING)  # they refuse no second derivative


@dataclass(frozen=True)
class SmallDraw(Draw):
    """Case ``number`` of F6: three to five tokens in float64, with one or two channels.

    >>> SmallDraw(1).kind, SmallDraw(1).numbers.form, SmallDraw(1).numbers.dtype
    ('list', 'standard', 'float64')
    """

    @cached_property
    def numbers(self) -> Numbers:
        rng = random.Random(self.number)
        kv_heads, group = rng.choice([(1, 1), (2, 1), (1, 2)])
        return replace(
            Numbers.draw(rng),
            form=FORMS[(self.number + self.number // len(KINDS)) % len(FORMS)],
            batch=rng.choice([1, 1, 2]),
            kv_heads=kv_heads,
            group=group,
            dim=rng.randint(1, 2),
            value_dim=rng.randint(1, 2),
            dtype="float64",
            size=1.0,
        )

    @cached_property
    def _graph_draw(self) -> GraphDraw:
        rng = random.Random(f"graph {self.number}")
        kind = KINDS[self.number % len(KINDS)]
        n = rng.randint(3, 5)
        if kind == "list":
            graph, edges = draw_edge_list(rng, n)
            return graph, lambda b, h, i, j: (j, i) in edges, edges, kind
        return *FAMILIES[kind](rng, n, self.numbers.batch, self.numbers.heads), None, kind


def _function(problem: Problem, backend: Backend) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return the output as a function of all inputs and parameters, and the list of them."""
    inputs = make_leaves(problem.inputs)
    if problem.heads is None:

        def attend(*tensors: Tensor) -> Tensor:
            state = dict(zip(inputs, tensors, strict=True))
            out: Tensor = call(problem, state, tuple(problem.layout(state[name]) for name in "qkv"), backend)
            return out

        return attend, list(inputs.values())
    layer = MessagePassingAttention(problem.heads, backend=name_backend(backend))
    weights = dict(layer.named_parameters())

    def update(x_src: Tensor, x_dst: Tensor, *tensors: Tensor) -> Tensor:
        state = dict(zip(weights, tensors, strict=True))
        out: Tensor = functional_call(layer, state, ((x_src, x_dst), problem.graph))
        return out

    return update, [*inputs.values(), *weights.values()]


def _check(problem: Problem, name: str) -> Iterator[Finding]:
    """Check first and second derivatives; a wrong one raises."""
    if not takes(problem, name):
        return
    run, leaves = _function(problem, BACKENDS[name])
    run(*leaves)
    gradcheck(run, leaves, nondet_tol=0.0, fast_mode=True)
    yield "gradient", 0.0, ""
    try:
        gradgradcheck(run, leaves, nondet_tol=0.0, fast_mode=True)
    except NotImplementedError:
        yield "refused second derivative", 0.0, "it is refused" if name in DOUBLE_BACKWARD else ""
    else:
        yield "second derivative", 0.0, ""


def _measure(count: int, tell: Tell) -> Verdict:
    cases = ((f"case {draw}", problem_of(draw)) for draw in map(SmallDraw, range(count)))
    tally = run_cases(cases, usual_backends(), _check, tell)
    value = (
        f"{len(tally.failures)} failures in {count:,} cases: {tally.total('gradient'):,} gradients, "
        f"{tally.total('second derivative'):,} second derivatives; refused by name "
        f"{tally.total('refused'):,} calls, {tally.total('refused second derivative'):,} second derivatives"
    )
    expected = product(["second derivative"], [name for name in usual_backends() if name in DOUBLE_BACKWARD])
    return tally.outcome(value, [*product(["gradient"], usual_backends()), *expected])


GUARANTEE = Guarantee(
    name="F6",
    promise=(
        "gradients and second derivatives are those of the formula: 12 families, 4 forms, every backend "
        "that holds float64"
    ),
    bar=(
        "gradcheck and gradgradcheck (float64, eps 1e-6) pass in 100 % of cases, or a refusal names the "
        "reason; dense, reference and the message-passing path refuse no second derivative"
    ),
    quick=6,
    full=60,
    measure=_measure,
)
