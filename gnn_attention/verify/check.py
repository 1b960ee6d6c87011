"""A check as a value: a name, and something to call that returns a :class:`Result`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gnn_attention._shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.measure import Truth, judge
from gnn_attention.verify.report import Result

__all__ = ["DIM", "DTYPES", "FORMS", "ORDERS", "VALUE_DIM", "WIDTH", "Check", "Settings", "bound", "skip", "verdict"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FORMS: dict[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender's side": lambda heads: FactoredHeads.of(heads, "sender"),
    "merged": MergedHeads.of,
    "merged, sender's side": lambda heads: MergedHeads.of(heads, "sender"),
}

DIM, VALUE_DIM, WIDTH = 16, 12, 24
ORDERS = 8  # in which the yardstick is taken


@dataclass(frozen=True, eq=False)
class Check:
    """One named check; call it to run it. Whatever goes wrong inside it is a failure with a message, not an exception."""

    group: str
    backend: str
    dtype: str
    name: str
    run: Callable[[], Mapping[str, Any]]

    def __call__(self) -> Result:
        """Run it."""
        try:
            found = dict(self.run())
        except Exception as error:  # a crash is a failed check
            found = {"passed": False, "message": f"{type(error).__name__}: {error}"}
        return Result(self.group, self.backend, self.dtype, self.name, **found)


@dataclass(frozen=True)
class Settings:
    """What to check, and where."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = tuple(DTYPES)
    backends: tuple[Backend, ...] = tuple(BACKENDS.values())
    graphs: tuple[str, ...] = tuple(GRAPHS)
    features: tuple[str, ...] = tuple(FEATURES)
    forms: tuple[str, ...] = tuple(FORMS)
    sizes: tuple[float, ...] = (1.0, 5.0)
    walk: bool = True
    seed: int = 0


def verdict(out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Mapping[str, Any]:
    found = judge(out, gradients, truth)
    message = "" if found.passed else f"output {found.output:.3g}, gradient {found.gradient:.3g} of the yardstick"
    return {"passed": found.passed, "output": found.output, "gradient": found.gradient, "message": message}


def bound(function: Callable[..., Mapping[str, Any]], *arguments: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: function(*arguments)


def skip(reason: str) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"passed": False, "skipped": reason}
