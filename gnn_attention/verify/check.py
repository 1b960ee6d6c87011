"""A check as a value: a name, and something to call that returns a :class:`Result`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend, RefusalError
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.measure import Outcome, Truth, judge
from gnn_attention.verify.report import Result

__all__ = [
    "DIM",
    "DTYPES",
    "FORMS",
    "GPU_ONLY",
    "VALUE_DIM",
    "WIDTH",
    "Check",
    "Settings",
    "alone",
    "bound",
    "verdict",
    "worst",
]

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


@dataclass(frozen=True, eq=False)
class Check:
    """One named check; call it to run it. Whatever goes wrong inside it is a failure with a message, not an exception.

    A call that the backend cannot hold, and says so, is skipped with that reason. If the check is of an output and gradients
    (``with_gradients``), it is then tried on the output alone: a backend may have no backward pass on a device. ``factors`` are
    the values, beside backend and dtype, by which a covering selection chooses; ``skipped`` says why it cannot be run.
    """

    group: str
    backend: str
    dtype: str
    name: str
    run: Callable[[], Mapping[str, Any]]
    with_gradients: bool = False
    factors: Mapping[str, str] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def label(self) -> str:
        """By which it is told from all others, and run alone: ``--only LABEL``."""
        return f"{self.group}: {self.name} [{self.backend}, {self.dtype}]"

    def __call__(self) -> Result:
        """Run it."""
        if self.skipped is not None:
            return Result(self.group, self.backend, self.dtype, self.name, passed=False, skipped=self.skipped)
        try:
            with _products_in(self.dtype):
                found = dict(self._found())
        except RefusalError as refusal:
            found = {"passed": False, "skipped": f"{self.backend}: {refusal.reason}"}
        except Exception as error:  # a crash is a failed check
            found = {"passed": False, "message": f"{type(error).__name__}: {error}"}
        return Result(self.group, self.backend, self.dtype, self.name, **found)

    def _found(self) -> Mapping[str, Any]:
        try:
            return self.run()
        except RefusalError:
            if not self.with_gradients:
                raise
        with torch.no_grad():
            return self.run()


@dataclass(frozen=True)
class Settings:
    """What to check, and where."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = tuple(name for name in DTYPES if name not in GPU_ONLY)
    backends: tuple[Backend, ...] = tuple(backend for backend in BACKENDS.values() if not backend.compiled)
    graphs: tuple[str, ...] = tuple(GRAPHS)
    features: tuple[str, ...] = tuple(FEATURES)
    forms: tuple[str, ...] = tuple(FORMS)
    sizes: tuple[float, ...] = (1.0, 5.0)
    walk: bool = True
    seed: int = 0


@contextlib.contextmanager
def _products_in(dtype: str) -> Iterator[None]:
    """TensorFloat-32 on for the checks that bear its name, off for all others; as it was, afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def verdict(out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Mapping[str, Any]:
    """What becomes of a check; without gradients, as under ``no_grad``, the output alone is judged."""
    found = judge(out, gradients, truth)
    measured = {"output": found.output, "error": found.error, "unit": found.unit, "share": found.share}
    result = {"passed": found.passed, "message": "" if found.passed else found.where, **measured}
    return result | ({"gradient": found.gradient} if gradients else {})


def worst(outcomes: Iterable[tuple[str, Outcome]]) -> Mapping[str, Any]:
    """What becomes of a check of several comparisons, each named: the worst share of what is allowed, the first that fails."""
    share = 0.0
    for name, outcome in outcomes:
        if not outcome.passed:
            return {"passed": False, "share": outcome.share, "message": f"{name}: {outcome.where}"}
        share = max(share, outcome.share)
    return {"passed": True, "share": share}


def alone(function: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
    """The check without gradients: the path that a kernel takes when nothing is to be learned."""

    def run() -> Mapping[str, Any]:
        with torch.no_grad():
            return function()

    return run


def bound(function: Callable[..., Mapping[str, Any]], *arguments: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: function(*arguments)
