"""A check as a value: a label, and something to call that returns a :class:`Result`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from gnn_attention.backends import RefusalError
from gnn_attention.verify.measure import Outcome
from gnn_attention.verify.report import Result

FORWARD = "forward alone"


@dataclass(frozen=True, eq=False)
class Check:
    """One named check; call it to run it. Whatever goes wrong inside it is a failure with a message.

    Several processes need a ``run`` that can be pickled. Where the backend refuses a call, the output alone
    is tried, since a backend may have no backward pass; what it refuses then, too, is skipped with the
    reason. By ``factors``, backend and dtype a covering selection chooses; ``skipped`` says why the check
    cannot be run.
    """

    group: str
    backend: str
    dtype: str
    name: str
    run: Callable[[], Outcome]
    factors: Mapping[str, str] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def label(self) -> str:
        """Unique among all checks; ``--only LABEL`` runs it alone."""
        return self.result().label

    def __call__(self) -> Result:
        if self.skipped is not None:
            return self.result(skipped=self.skipped)
        try:
            outcome = self._outcome()
        except RefusalError as refusal:
            return self.result(skipped=f"{self.backend}: {refusal.reason}")
        # a crash is a failed check
        except Exception as error:
            return self.result(message=f"{type(error).__name__}: {error}")
        numbers = {name: getattr(outcome, name) for name in ("output", "gradient", "error", "unit", "share")}
        return self.result(passed=outcome.passed, message=outcome.where, **numbers)

    def result(self, passed: bool = False, **fields: float | str | None) -> Result:
        """A result of this check with these fields."""
        names = {"group": self.group, "backend": self.backend, "dtype": self.dtype, "name": self.name}
        return Result(**names, passed=passed, **fields)  # type: ignore[arg-type]

    def _outcome(self) -> Outcome:
        if self.factors.get("direction") != FORWARD:
            with suppress(RefusalError):
                return self.run()
        with torch.no_grad():
            return self.run()

    def forward_alone(self) -> Check:
        """The same without gradients: the path that a kernel takes when nothing is to be learned."""
        factors = {**self.factors, "direction": FORWARD}
        return replace(self, name=f"{self.name}, {FORWARD}", factors=factors)
