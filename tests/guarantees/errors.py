"""F3: errors of every backend in float32, bfloat16 and float16, as shares of those of torch's SDPA.

Inputs have size 1, and size 5, at which cancellation shows. The largest error is judged by the rule of F1. The
mean error is taken over all samples of a case and compared with the mean of SDPA over a few orders of its
sums, or with the mean of one rounding where that is more. Means of few numbers are luck and not judged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.measure import (
    ALLOWED_GRADIENT,
    ALLOWED_OUTPUT,
    Attempt,
    badness,
    judge,
    largest,
)
from gnn_attention.verify.truth import Problem
from tests.guarantees.draws import Draw, Numbers
from tests.guarantees.families import Definition, any_family
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.problems import attend_problem, results, usual_backends

ALLOWED = {
    "largest": ALLOWED_OUTPUT,
    "mean": 1.5,
    "largest of gradients": ALLOWED_GRADIENT,
    "mean of gradients": 2.0,
}
ORDERS = 8  # of channels, in which SDPA attempts a problem
FEWEST_NUMBERS, FEWEST_ROWS = 1000, 256  # of which a mean is judged; rows of two edges or more
VANISHED = 1e-9  # of the largest gradient: below it a gradient is 0 in theory
LENGTHS = (33, 47, 65, 97, 113, 129)  # no multiples of the sizes of tiles
GROUPS = ((4, 1), (2, 2), (1, 4), (2, 3))  # heads of k and v, query heads for each
WIDTHS = (8, 17, 24, 33, 64)
SETTINGS = tuple(product(("float32", "bfloat16", "float16"), (1.0, 5.0)))


@dataclass(frozen=True)
class ScaledDraw(Draw):
    """Case ``number`` of F3: six in a row hold each dtype in both sizes; every other six are plain calls.

    >>> {(draw.numbers.dtype, draw.numbers.size) for draw in map(ScaledDraw, range(6))} == set(SETTINGS)
    True
    """

    @cached_property
    def numbers(self) -> Numbers:
        rng = random.Random(f"numbers {self.number}")
        (dtype, size), (kv_heads, group) = SETTINGS[self.number % len(SETTINGS)], rng.choice(GROUPS)
        plain = self.number // len(SETTINGS) % 2 == 0
        return Numbers(
            form="attend",
            batch=4,  # so that means are of many numbers
            kv_heads=kv_heads,
            group=group,
            dim=rng.choice(WIDTHS),
            value_dim=rng.choice(WIDTHS),
            dtype=dtype,
            size=size,
            scale=None,
            mod="none" if plain else rng.choice(["none", "alibi", "softcap"]),
            bias="none" if plain else rng.choice(["none", "by head"]),
            sinks=rng.random() < 0.2,
            layout="as made",
        )

    @cached_property
    def _made(self) -> tuple[TokenGraph, Definition, list[tuple[int, int]] | None, str]:
        rng = random.Random(f"graph {self.number}")
        return *any_family(rng, rng.choice(LENGTHS), self.numbers.batch, self.numbers.heads), None, "family"


def _measure(count: int, tell: Tell) -> Measured:
    worst: dict[tuple[str, float, str], float] = {}
    measured, failures = set(), []
    for number in range(count):
        tell(f"case {number} of {count}")
        draw = ScaledDraw(number)
        problem, setting = attend_problem(draw), (draw.numbers.dtype, draw.numbers.size)
        plain, fused = (
            [problem.baseline(problem.inputs, number, widened) for number in range(ORDERS)]
            for widened in (False, True)
        )
        for name, result in results(problem, usual_backends()):
            if isinstance(result, Exception):
                failures.append(f"case {draw}, {name}: {type(result).__name__}: {result}"[:500])
            elif result is not None:
                for kind, share in _shares(problem, plain, fused, name, result):
                    measured.add((*setting, name, kind))
                    worst[*setting, kind] = max(worst.get((*setting, kind), 0.0), badness(share))
                    if not share <= ALLOWED[kind]:
                        allowed = f"{share:.3g} times that of SDPA, allowed {ALLOWED[kind]}"
                        failures.append(f"case {draw}, {name}: {kind} error {allowed}")
    for setting, name, kind in product(SETTINGS, usual_backends(), ALLOWED):
        if (*setting, name, kind) not in measured:
            failures.append(f"no {kind} error of {name} was measured in {setting[0]} x{setting[1]:g}")
    return Measured(_value(worst, count), tuple(failures))


def _value(worst: dict[tuple[str, float, str], float], count: int) -> str:
    rows = []
    for dtype, size in SETTINGS:
        out, mean, gradient, gradient_mean = (worst.get((dtype, size, kind), 0.0) for kind in ALLOWED)
        rows.append(f"{dtype} x{size:g} {out:.2f}/{mean:.2f} ({gradient:.2f}/{gradient_mean:.2f})")
    return f"{count:,} cases; max/mean, of gradients in brackets: {'; '.join(rows)}"


def _shares(
    problem: Problem,
    plain: list[Attempt],
    fused: list[Attempt],
    name: str,
    attempt: Attempt,
) -> Iterator[tuple[str, float]]:
    """The largest and the mean errors of the output and of each gradient, as shares of SDPA's."""
    backend, truth = BACKENDS[name], problem.truth
    outcome = judge(*attempt, truth.for_backend(backend))
    yield "largest", outcome.output or 0.0
    yield "largest of gradients", outcome.gradient or 0.0
    if int((problem.mask.sum(-1) > 1).sum()) < FEWEST_ROWS:
        return
    if truth.out.numel() >= FEWEST_NUMBERS:
        yield "mean", _mean_share(attempt[0], truth.out, [[out for out, _ in plain]])
    most = max((largest(gradient) for gradient in truth.gradients.values()), default=0.0)
    for key, gradient in truth.gradients.items():
        if gradient.numel() >= FEWEST_NUMBERS and largest(gradient) > VANISHED * most:
            # the fused kernel computes weights again in its backward pass, as such a backend does
            groups = [plain, fused] if backend.recomputes and key in fused[0][1] else [plain]
            others = [[gradients[key] for _, gradients in group] for group in groups]
            yield "mean of gradients", _mean_share(attempt[1][key], gradient, others)


def _mean_share(x: Tensor, true: Tensor, others: list[list[Tensor]]) -> float:
    """The mean error as a share of SDPA's over its orders, or of one rounding's where that is more."""
    means = [sum(_mean_error(other, true) for other in group) / len(group) for group in others]
    unit = max(_mean_rounding(true, x.dtype), *means)
    return _mean_error(x, true) / unit if unit > 0 else 0.0


def _mean_rounding(true: Tensor, dtype: torch.dtype) -> float:
    """The mean error of one rounding; numbers exact in the dtype by luck are moved by up to twice first."""
    rng = torch.Generator().manual_seed(0)
    near = true.detach() * (1 + torch.rand(true.shape, generator=rng, dtype=torch.float64))
    return _mean_error(near.to(dtype), near) / 1.5


def _mean_error(x: Tensor, true: Tensor) -> float:
    return float((x.detach().double() - true.detach()).abs().mean())


GUARANTEE = Guarantee(
    name="F3",
    promise=(
        "float32, bfloat16 and float16, inputs x1 and x5: errors are those of torch's SDPA in the same dtype"
    ),
    bar="at most twice its largest error and 1.5 times its mean; gradients 3 and 2 times",
    quick=6,
    full=30,
    measure=_measure,
)
