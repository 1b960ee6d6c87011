"""F6: first, forward-mode and second derivatives equal numerical ones, for every input and parameter.

A case is a graph of a family on three to five tokens and a form (a call of ``attend``, or a layer of standard,
factored or merged heads) in float64. ``torch.autograd.gradcheck`` changes numbers by 1e-6. A backend may refuse a
call whose options it does not support, but it never refuses a derivative of a call that it supports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend, RefusalError
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify.truth import Problem, make_leaves, name_backend
from tests.guarantees.draws import Draw, GraphDraw, Numbers
from tests.guarantees.families import FAMILIES, draw_edge_list
from tests.guarantees.guarantee import Finding, Guarantee, Tell, Verdict, run_cases
from tests.guarantees.problems import call, problem_of, takes, usual_backends

KINDS = (
    *("causal", "list", "window", "band", "dilated", "window and sinks"),
    *("prefix", "documents", "tree", "globals", "by head", "full"),
)
FORMS = ("attend", "standard", "attend", "factored", "attend", "merged")
# The first is of autograd and of forward mode, the second of a backward pass and of forward over reverse mode.
DERIVATIVES = ("first derivative", "second derivative")


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
    """Check first and second derivatives, each in two modes; a wrong one raises."""
    if not takes(problem, name):
        return
    run, leaves = _function(problem, BACKENDS[name])
    with torch.no_grad():
        run(*leaves)  # A refusal here is one of the call; later ones are of derivatives.
    checks = (
        partial(gradcheck, check_forward_ad=True),
        partial(gradgradcheck, check_fwd_over_rev=True),
    )
    for kind, check in zip(DERIVATIVES, checks, strict=True):
        fault = ""
        try:
            check(run, leaves, nondet_tol=0.0, fast_mode=True)
        except RefusalError as refusal:
            fault = f"the {kind} is refused: {refusal}"
        yield kind, 0.0, fault


def _measure(count: int, tell: Tell) -> Verdict:
    cases = ((f"case {draw}", problem_of(draw)) for draw in map(SmallDraw, range(count)))
    tally = run_cases(cases, usual_backends(), _check, tell)
    value = (
        f"{len(tally.failures)} failures in {count:,} cases: {tally.total(DERIVATIVES[0]):,} calls with all first "
        f"derivatives, {tally.total(DERIVATIVES[1]):,} with all second derivatives, "
        f"{tally.total('refused'):,} calls refused by name"
    )
    return tally.outcome(value, product(DERIVATIVES, usual_backends()))


GUARANTEE = Guarantee(
    name="F6",
    promise=(
        "gradients, forward-mode and second derivatives are those of the formula: 12 families, 4 forms, every "
        "backend that holds float64"
    ),
    bar=(
        "gradcheck and gradgradcheck (float64, eps 1e-6), with check_forward_ad and check_fwd_over_rev, pass in "
        "100 % of cases; no backend refuses a derivative of a call that it supports"
    ),
    quick=6,
    full=60,
    measure=_measure,
)
