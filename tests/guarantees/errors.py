"""F2 and F3: how far outputs and gradients are from the float64 formula, compared with what torch's SDPA makes of
the same numbers.

In float64 nothing may be further from it than 1e-12 of the largest number. In float32, bfloat16 and float16
the largest error and the mean error are shares of SDPA's in the same dtype, for inputs of size 1 and of size
5, at which cancellation shows. The largest is judged by the rule of F1, its floors too; a mean is taken over
all samples of a case, and SDPA's over a few orders of them, with the mean of one rounding of such numbers as
its floor. A mean of few numbers is luck, and is not judged.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend, RefusalError
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.measure import ALLOWED_GRADIENT, ALLOWED_OUTPUT, judge
from gnn_attention.verify.truth import Attempt
from tests.guarantees.draws import Draw, Numbers
from tests.guarantees.families import Definition, any_family
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.problems import AttendProblem, LayerProblem, Problem, problem_of, usual_backends

ALLOWED = {"max": (ALLOWED_OUTPUT, ALLOWED_GRADIENT), "mean": (1.5, 2.0)}  # of the output, and of gradients
FEWEST_NUMBERS, FEWEST_ROWS = (
    1000,
    256,
)  # of which a mean is judged; rows are softmaxes over two edges or more
VANISHED = 1e-9  # of the largest gradient: what is 0 in theory, whose errors are a share of nothing
LENGTHS = (33, 47, 65, 97, 113, 129)  # off the sizes of tiles
GROUPS = ((4, 1), (2, 2), (1, 4), (2, 3))  # heads of k and v, query heads for each
WIDTHS = (8, 17, 24, 33, 64)
SETTINGS = tuple((dtype, size) for dtype in ("float32", "bfloat16", "float16") for size in (1.0, 5.0))


@dataclass(frozen=True)
class DoubleDraw(Draw):
    """Case ``number`` of F1, in float64.

    >>> DoubleDraw(3).numbers.dtype
    'float64'
    """

    @cached_property
    def numbers(self) -> Numbers:
        return replace(Numbers.drawn(random.Random(self.number)), dtype="float64")


def _measure_double(count: int, tell: Tell) -> Measured:
    worst, judged, failures = 0.0, dict.fromkeys(usual_backends(), 0) | {"walk": 0}, []
    for number in range(count):
        tell(f"case {number} of {count}")
        problem = problem_of(DoubleDraw(number))
        for name, found in _attempts(problem):
            judged[name] += found is not None
            share, what = (
                (math.inf, found)
                if isinstance(found, str)
                else (0.0, "")
                if found is None
                else _share(problem, found)
            )
            if not share <= 1.0:
                failures.append(f"F2, case {problem.draw}, {name}: {what}")
            worst = max(worst, share)
    failures += [
        f"F2: nothing was measured of {name} in {count} cases" for name, times in judged.items() if not times
    ]
    value = f"largest error {worst * 1e-12:.2g} of the largest number, {sum(judged.values()):,} results of {count:,} cases"
    return Measured(value, tuple(failures))


def _share(problem: Problem, found: Attempt) -> tuple[float, str]:
    """The larger error of output and gradients in units of 1e-12 of the largest number, and in words."""
    outcome = judge(*found, problem.truth)
    larger = max(outcome.output, outcome.gradient, key=lambda share: math.inf if math.isnan(share) else share)
    return (
        larger,
        f"output {outcome.output * 1e-12:.3g}, gradients {outcome.gradient * 1e-12:.3g} of the largest "
        "number",
    )


def _attempts(problem: Problem) -> Iterator[tuple[str, Attempt | str | None]]:
    """What each backend, and for a layer the walk, makes of it: a result, an error, or None if refused."""
    for name, backend in usual_backends().items():
        yield name, _attempt(problem, backend)
    if isinstance(problem, LayerProblem) and problem.draw.edges is not None:
        yield "walk", _attempt(problem, None)


def _attempt(problem: Problem, backend: Backend | None) -> Attempt | str | None:
    try:
        return problem.run(backend)
    except RefusalError:
        return None
    except Exception as error:  # whatever it raises is a failure
        return f"{type(error).__name__}: {str(error)[:200]}"


@dataclass(frozen=True)
class ScaledDraw(Draw):
    """Case ``number`` of F3: every six of them hold each dtype in both sizes once, whatever else is
    drawn.

    >>> sorted((ScaledDraw(n).numbers.dtype, ScaledDraw(n).numbers.size) for n in range(6, 12)) == sorted(SETTINGS)
    True
    """

    @cached_property
    def numbers(self) -> Numbers:
        """Four samples, so that means are of many numbers; every other six calls are plain."""
        rng = random.Random(f"numbers {self.number}")
        shuffled = random.Random(f"settings {self.number // len(SETTINGS)}").sample(SETTINGS, len(SETTINGS))
        dtype, size = shuffled[self.number % len(SETTINGS)]
        kv_heads, group = rng.choice(GROUPS)
        plain = self.number // len(SETTINGS) % 2 == 0
        return Numbers(
            form="attend",
            batch=4,
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


@dataclass(frozen=True)
class _Ratio:
    """An error as a share of SDPA's: of which case, by whom, of what."""

    draw: Draw
    backend: str
    what: str  # "out" or the input whose gradient it is
    kind: str  # "max" or "mean"
    share: float

    @property
    def holds(self) -> bool:
        return self.share <= ALLOWED[self.kind][self.what != "out"]

    def __str__(self) -> str:
        allowed = ALLOWED[self.kind][self.what != "out"]
        return (
            f"F3, case {self.draw}, {self.backend}: {self.kind} error of {self.what} {self.share:.3g}, "
            f"allowed {allowed}"
        )


def _measure_scaled(count: int, tell: Tell) -> Measured:
    found: list[_Ratio] = []
    failures: list[str] = []
    for number in range(count):
        tell(f"case {number} of {count}")
        problem = AttendProblem(ScaledDraw(number))
        for name, result in _attempts(problem):
            if isinstance(result, str):
                failures.append(f"F3, case {problem.draw}, {name}: {result}")
            elif result is not None:
                found += _ratios(problem, name, result)
    failures += [str(ratio) for ratio in found if not ratio.holds] + _unseen(found)
    return Measured(_in_words(found, count), tuple(failures))


def _ratios(problem: AttendProblem, name: str, found: Attempt) -> Iterator[_Ratio]:
    """The largest errors of the output and of all gradients, and the mean error of each."""
    backend, truth = BACKENDS[name], problem.truth
    outcome = judge(*found, truth.for_backend(backend))
    yield _Ratio(problem.draw, name, "out", "max", outcome.output)
    yield _Ratio(problem.draw, name, "gradients", "max", outcome.gradient)
    enough = int((problem.draw.mask.sum(-1) > 1).sum()) >= FEWEST_ROWS
    largest = max((_largest(true) for true in truth.gradients.values()), default=0.0)
    for what, true in [("out", truth.out), *truth.gradients.items()]:
        x = found[0] if what == "out" else found[1][what]
        if (
            enough
            and true.numel() >= FEWEST_NUMBERS
            and (what == "out" or _largest(true) > VANISHED * largest)
        ):
            yield _Ratio(
                problem.draw, name, what, "mean", _mean_share(x, true, _sticks(problem, backend, what))
            )


def _sticks(problem: AttendProblem, backend: Backend, what: str) -> list[list[Tensor]]:
    """The results of SDPA, and where a backend recomputes weights those of its fused kernel."""
    plain, fused = problem.attempts
    groups = [plain, fused] if backend.recomputes and what in fused[0][1] else [plain]
    return [[out if what == "out" else gradients[what] for out, gradients in group] for group in groups]


def _mean_share(x: Tensor, true: Tensor, sticks: Sequence[Sequence[Tensor]]) -> float:
    """The mean error as a share of SDPA's over its orders, or of one rounding's where that is more."""
    own = _mean(x, true)
    unit = max(
        _rounding(true, x.dtype),
        *(sum(_mean(other, true) for other in group) / len(group) for group in sticks),
    )
    return 0.0 if own == 0.0 else own / unit if unit > 0 else math.inf


def _rounding(true: Tensor, dtype: torch.dtype) -> float:
    """The mean error of one rounding; numbers exact in the dtype by luck are moved by up to twice first."""
    near = true.detach() * (
        1 + torch.rand(true.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    return _mean(near.to(dtype), near) / 1.5


def _mean(x: Tensor, true: Tensor) -> float:
    return float((x.detach().double() - true.detach()).abs().mean())


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _unseen(found: Sequence[_Ratio]) -> list[str]:
    """What was not measured: each dtype in each size, by every backend, largest errors and means."""
    seen = {(ratio.draw.numbers.dtype, ratio.draw.numbers.size, ratio.backend, ratio.kind) for ratio in found}
    wanted = (
        (dtype, size, name, kind) for dtype, size in SETTINGS for name in usual_backends() for kind in ALLOWED
    )
    return [
        f"F3: no {kind} error of {name} in {dtype} x{size:g}"
        for dtype, size, name, kind in wanted
        if (dtype, size, name, kind) not in seen
    ]


def _in_words(found: Sequence[_Ratio], count: int) -> str:
    rows: dict[tuple[str, float], dict[tuple[str, bool], float]] = {setting: {} for setting in SETTINGS}
    for ratio in found:
        row, key = rows[ratio.draw.numbers.dtype, ratio.draw.numbers.size], (ratio.kind, ratio.what != "out")
        row[key] = max(row.get(key, 0.0), math.inf if math.isnan(ratio.share) else ratio.share)
    return f"{count:,} cases; max/mean, of gradients in brackets: " + "; ".join(
        f"{dtype} x{size:g} {_pair(row, False)} ({_pair(row, True)})" for (dtype, size), row in rows.items()
    )


def _pair(row: Mapping[tuple[str, bool], float], gradients: bool) -> str:
    return "/".join(f"{row[kind, gradients]:.2f}" if (kind, gradients) in row else "none" for kind in ALLOWED)


GUARANTEES = (
    Guarantee(
        name="F2",
        promise="float64: outputs and gradients of every backend and the walk are those of the formula",
        bar="at most 1e-12 of the largest number",
        quick=25,
        full=2000,
        measure=_measure_double,
    ),
    Guarantee(
        name="F3",
        promise=(
            "float32, bfloat16 and float16, inputs x1 and x5: errors are those of torch's SDPA in the same "
            "dtype"
        ),
        bar="at most twice its largest error and 1.5 times its mean; gradients 3 and 2 times",
        quick=6,
        full=300,
        measure=_measure_scaled,
    ),
)
