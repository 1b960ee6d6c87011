"""A check as a value: a label, and something to call that returns a :class:`Result`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gnn_attention.backends import RefusalError
from gnn_attention.verify.report import Result, label

FORWARD = "forward alone"

Run = Callable[[], Mapping[str, Any]]  # the fields of a result


@dataclass(frozen=True, eq=False)
class Check:
    """One named check; call it to run it. Whatever goes wrong inside it is a failure with a message.

    Several processes need a ``run`` that can be pickled. A call that its backend does not support is skipped
    with the reason; a check ``with_gradients`` is tried on the output alone before that, since a backend may
    have no backward pass. By ``factors``, backend and dtype a covering selection chooses; ``skipped`` says
    why the check cannot be run.
    """

    group: str
    backend: str
    dtype: str
    name: str
    run: Run
    with_gradients: bool = False
    factors: Mapping[str, str] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def label(self) -> str:
        """Unique among all checks; ``--only LABEL`` runs it alone."""
        return label(self)

    def __call__(self) -> Result:
        result = partial(Result, self.group, self.backend, self.dtype, self.name)
        if self.skipped is not None:
            return result(passed=False, skipped=self.skipped)
        try:
            return result(**self.run())
        except RefusalError as refusal:
            if self.with_gradients:
                return self._without_gradients()()
            return result(passed=False, skipped=f"{self.backend}: {refusal.reason}")
        # a crash is a failed check
        except Exception as error:
            return result(passed=False, message=f"{type(error).__name__}: {error}")

    def forward_alone(self) -> Check:
        """The same without gradients: the path that a kernel takes when nothing is to be learned."""
        name, factors = f"{self.name}, {FORWARD}", {**self.factors, "direction": FORWARD}
        return replace(self._without_gradients(), name=name, factors=factors)

    def _without_gradients(self) -> Check:
        return replace(self, run=partial(_call_without_gradients, self.run), with_gradients=False)


@torch.no_grad()
def _call_without_gradients(run: Run) -> Mapping[str, Any]:
    return run()
