"""F3: in float32, bfloat16 and float16, errors of every backend are at most a few times those of torch's SDPA.

Inputs have size 1, or size 5, at which cancellation shows. The largest error is judged by the rule of F1. The
mean error over all samples of a case is compared with the mean error of SDPA over a few orders of its sums, or
with that of one rounding if it is larger. A mean of few numbers depends on luck and is not judged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify.measure import (
    MAX_GRADIENT_RATIO,
    MAX_OUTPUT_RATIO,
    Solution,
    judge,
    max_abs,
)
from gnn_attention.verify.truth import Problem
from tests.guarantees.draws import Draw, GraphDraw, Numbers
from tests.guarantees.families import draw_family
from tests.guarantees.guarantee import Finding, Guarantee, Tell, Verdict, run_cases
from tests.guarantees.problems import problem_of, usual_backends

ALLOWED = {
    "largest": MAX_OUTPUT_RATIO,
    "mean": 1.5,
    "largest of gradients": MAX_GRADIENT_RATIO,
    "mean of gradients": 2.0,
}
ORDERS = 8  # orders of channels in which SDPA solves a problem
MIN_NUMBERS = 1000  # a mean of fewer numbers is not judged
MIN_ROWS = 256  # nor one of fewer rows with two edges or more
NEGLIGIBLE = 1e-9  # a gradient below this share of the largest gradient is 0 in theory
LENGTHS = (33, 47, 65, 97, 113, 129)  # not multiples of the size of a tile
GROUPS = ((4, 1), (2, 2), (1, 4), (2, 3))  # heads of k and v, and query heads per head
WIDTHS = (8, 17, 24, 33, 64)
SETTING = "{} x{:g}"
SETTINGS = tuple(product(("float32", "bfloat16", "float16"), (1.0, 5.0)))


@dataclass(frozen=True)
class ScaledDraw(Draw):
    """Case ``number`` of F3. Any six consecutive cases have each dtype in both sizes.

    Six cases that are plain calls alternate with six that are not.

    >>> {(draw.numbers.dtype, draw.numbers.size) for draw in map(ScaledDraw, range(6))} == set(SETTINGS)
    True
    """

    @cached_property
    def numbers(self) -> Numbers:
        rng = random.Random(f"numbers {self.number}")
        (dtype, size), (kv_heads, group) = SETTINGS[self.number % len(SETTINGS)], rng.choice(GROUPS)
        is_plain = self.number // len(SETTINGS) % 2 == 0
        return Numbers(
            form="attend",
            batch=4,  # for means of many numbers
            kv_heads=kv_heads,
            group=group,
            dim=rng.choice(WIDTHS),
            value_dim=rng.choice(WIDTHS),
            dtype=dtype,
            size=size,
            mod="none" if is_plain else rng.choice(["none", "alibi", "softcap"]),
            bias="none" if is_plain else rng.choice(["none", "by head"]),
            sinks=rng.random() < 0.2,
        )

    @cached_property
    def _graph_draw(self) -> GraphDraw:
        rng = random.Random(f"graph {self.number}")
        return *draw_family(rng, rng.choice(LENGTHS), self.numbers.batch, self.numbers.heads), None, "family"

    @property
    def setting(self) -> str:
        return SETTING.format(self.numbers.dtype, self.numbers.size)

    @cached_property
    def problem(self) -> Problem:
        return problem_of(self)

    @cached_property
    def attempts(self) -> dict[str, list[Solution]]:
        """Solve by SDPA in several orders of channels, with its plain and with its fused kernel."""
        kernels = {"plain": False, "fused": True}
        inputs = self.problem.inputs
        return {
            name: [self.problem.evaluate(inputs, number, is_widened) for number in range(ORDERS)]
            for name, is_widened in kernels.items()
        }


def _check(draw: ScaledDraw, name: str) -> Iterator[Finding]:
    for kind, share in _shares(draw, BACKENDS[name]):
        fault = f"{kind} error {share:.3g} times that of SDPA, allowed {ALLOWED[kind]}"
        yield f"{draw.setting} {kind}", share, "" if share <= ALLOWED[kind] else fault


def _measure(count: int, tell: Tell) -> Verdict:
    cases = ((f"case {draw}", draw) for draw in map(ScaledDraw, range(count)))
    tally = run_cases(cases, usual_backends(), _check, tell)
    settings = [SETTING.format(*setting) for setting in SETTINGS]
    rows = []
    for setting in settings:
        errors = [tally.largest.get(f"{setting} {kind}", 0.0) for kind in ALLOWED]
        rows.append(f"{setting} {errors[0]:.2f}/{errors[1]:.2f} ({errors[2]:.2f}/{errors[3]:.2f})")
    value = f"{count:,} cases; max/mean, of gradients in brackets: {'; '.join(rows)}"
    kinds = [f"{setting} {kind}" for setting, kind in product(settings, ALLOWED)]
    return tally.outcome(value, product(kinds, usual_backends()))


def _shares(draw: ScaledDraw, backend: Backend) -> Iterator[tuple[str, float]]:
    """Yield the largest and the mean error of the output and of each gradient as shares of SDPA's errors."""
    (out, gradients), truth = draw.problem.solve(backend), draw.problem.truth
    outcome = judge(out, gradients, truth.for_backend(backend))
    yield "largest", outcome.output or 0.0
    yield "largest of gradients", outcome.gradient or 0.0
    if int((draw.mask.sum(-1) > 1).sum()) < MIN_ROWS:
        return
    plain, fused = draw.attempts["plain"], draw.attempts["fused"]
    if truth.out.numel() >= MIN_NUMBERS:
        yield "mean", _mean_share(out, truth.out, [[attempt[0] for attempt in plain]])
    max_gradient = max(map(max_abs, truth.gradients.values()), default=0.0)
    for key, gradient in truth.gradients.items():
        if gradient.numel() >= MIN_NUMBERS and max_abs(gradient) > NEGLIGIBLE * max_gradient:
            # The fused kernel recomputes weights in its backward pass, as a backend with `recomputes` does.
            groups = [plain, fused] if backend.recomputes and key in fused[0][1] else [plain]
            yardsticks = [[attempt[1][key] for attempt in group] for group in groups]
            yield "mean of gradients", _mean_share(gradients[key], gradient, yardsticks)


def _mean_share(x: Tensor, true: Tensor, yardsticks: list[list[Tensor]]) -> float:
    """Return the mean error as a share of SDPA's over its orders, or of one rounding's if that is larger."""
    means = [sum(_mean_error(attempt, true) for attempt in group) / len(group) for group in yardsticks]
    # Numbers near `true` are rounded, because `true` may be exact in the dtype.
    rng = torch.Generator().manual_seed(0)
    numbers = true.detach() * (1 + torch.rand(true.shape, generator=rng, dtype=torch.float64))
    unit = max(_mean_error(numbers.to(x.dtype), numbers) / 1.5, *means)
    return _mean_error(x, true) / unit if unit > 0 else 0.0


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
