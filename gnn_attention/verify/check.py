"""A check as a value: a label, and something to call that returns a :class:`Result`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend, RefusalError
from gnn_attention.backends.call import AttentionCall
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, OPTIONS
from gnn_attention.verify.measure import Outcome, Truth, judge
from gnn_attention.verify.report import Result, label
from gnn_attention.verify.truth import Problem

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,  # float32 whose matrix products may round to TensorFloat-32: a mode of GPUs
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
GPU_ONLY = ("tf32",)

FORMS: dict[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender's side": lambda heads: FactoredHeads.of(heads, "sender"),
    "merged": MergedHeads.of,
    "merged, sender's side": lambda heads: MergedHeads.of(heads, "sender"),
}

DIM, VALUE_DIM, WIDTH = 16, 12, 24
BOTH, FORWARD = "forward and gradients", "forward alone"

Run = Callable[[], Mapping[str, Any]]
MakeProblem = Callable[[], Problem]
Factors = Mapping[str, str]
Outcomes = Iterable[tuple[str, Outcome]]


@dataclass(frozen=True, eq=False)
class Check:
    """One named check; call it to run it. Whatever goes wrong inside it is a failure with a message.

    A call that its backend does not support is skipped with the reason; a check of output and gradients
    (``with_gradients``) is tried on the output alone before that: a backend may have no backward pass.
    ``factors`` are the values by which a covering selection chooses, further to backend and dtype;
    ``skipped`` says why it cannot be run.
    """

    group: str
    backend: str
    dtype: str
    name: str
    run: Run
    with_gradients: bool = False
    factors: Factors = field(default_factory=dict)
    skipped: str | None = None

    @property
    def label(self) -> str:
        """Unique among all checks; ``--only LABEL`` runs it alone."""
        return label(self)

    def __call__(self) -> Result:
        result = partial(Result, self.group, self.backend, self.dtype, self.name)
        if self.skipped is not None:
            return result(passed=False, skipped=self.skipped)
        matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
        try:
            matmul.fp32_precision = "tf32" if self.dtype == "tf32" else "ieee"
            return result(**self._fields())
        except RefusalError as unsupported:
            return result(passed=False, skipped=f"{self.backend}: {unsupported.reason}")
        # a crash is a failed check
        except Exception as error:
            return result(passed=False, message=f"{type(error).__name__}: {error}")
        finally:
            matmul.fp32_precision = before

    def _fields(self) -> Mapping[str, Any]:
        try:
            return self.run()
        except RefusalError:
            if not self.with_gradients:
                raise
        with torch.no_grad():
            return self.run()

    def forward_alone(self) -> Check:
        """The same without gradients: the path that a kernel takes when nothing is to be learned."""
        factors, run = {**self.factors, "direction": FORWARD}, torch.no_grad()(self.run)
        return replace(self, name=f"{self.name}, {FORWARD}", run=run, with_gradients=False, factors=factors)


@dataclass(frozen=True)
class Settings:
    """What to check, and where; ``walk`` adds the layer's messages one by one, without a backend."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = tuple(name for name in DTYPES if name not in GPU_ONLY)
    backends: tuple[Backend, ...] = tuple(backend for backend in BACKENDS.values() if not backend.compiled)
    graphs: tuple[str, ...] = tuple(GRAPHS)
    features: tuple[str, ...] = tuple(FEATURES)
    forms: tuple[str, ...] = tuple(FORMS)
    sizes: tuple[float, ...] = (1.0, 5.0)
    walk: bool = True
    seed: int = 0

    @property
    def paths(self) -> tuple[Backend | None, ...]:
        """Of a layer: its messages one by one (None), and every backend."""
        return (None, *self.backends) if self.walk else self.backends

    @property
    def semantics(self) -> list[str]:
        """The dtypes without tf32, which is a precision and no other semantics."""
        return [name for name in self.dtypes if name not in GPU_ONLY]

    def check(
        self, group: str, path: Backend | None, dtype: str, name: str, run: Run, term: str, factors: Factors
    ) -> Check:
        """A check of one path; skipped where the backend does not take calls with the option ``term``."""
        skipped = None if path is None else unsupported(path, self.device, DTYPES[dtype], term)
        path_name = "walk" if path is None else path.name
        # rules differentiate by themselves
        return Check(group, path_name, dtype, name, run, group != "rules", factors, skipped)

    def checks(
        self,
        group: str,
        dtype: str,
        name: str,
        make: MakeProblem,
        term: str,
        factors: Factors,
        form: Any = None,
    ) -> Iterator[Check]:
        """A problem on every path of a layer, or of a call, perhaps in another form of its heads."""
        make = functools.cache(make)
        for path in self.paths if group in ("layer", "trained") else self.backends:
            run = partial(judged, make, path, form)
            yield self.check(group, path, dtype, name, run, term, factors)


@functools.lru_cache(maxsize=1024)
@torch.no_grad()
def unsupported(backend: Backend, device: str, dtype: torch.dtype, option: str) -> str | None:
    """Why a backend does not take calls with an option, without gradients; or None."""
    # checks are listed where they cannot be run
    if device.startswith("cuda") and not torch.cuda.is_available():
        return None
    case, feature = GRAPHS["causal"], OPTIONS[option]
    shapes = ((BATCH, heads, case.graph.num_dst, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
    learned = feature.learned(case, torch.Generator().manual_seed(0))
    options = feature.options({name: x.to(device, dtype) for name, x in learned.items()})
    reason = backend.unsupported_reason(AttentionCall.checked(q, k, v, case.graph, **options))
    return None if reason is None else f"{backend.name}: {reason}"


def judged(make: MakeProblem, path: Backend | None, form: Any = None) -> Mapping[str, Any]:
    """The fields of a result of a path (None: message by message) on a problem."""
    problem = make()
    return verdict(*problem.solve(path, form=form), problem.truth.for_backend(path))


def verdict(out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Mapping[str, Any]:
    """The fields of a result; without gradients, as under ``no_grad``, the output alone is judged."""
    found = judge(out, gradients, truth)
    fields = {name: getattr(found, name) for name in ("passed", "output", "error", "unit", "share")}
    gradient = {"gradient": found.gradient} if gradients else {}
    return fields | gradient | {"message": "" if found.passed else found.where}


def worst(outcomes: Outcomes) -> Mapping[str, Any]:
    """The fields of a result of several named comparisons: the worst share allowed, the first that fails."""
    share = 0.0
    for name, outcome in outcomes:
        if not outcome.passed:
            return {"passed": False, "share": outcome.share, "message": f"{name}: {outcome.where}"}
        share = max(share, outcome.share)
    return {"passed": True, "share": share}
