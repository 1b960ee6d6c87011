"""The groups of checks: each is a table of values, whose combinations are the checks."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.verify.cases import (
    BATCH,
    CASES,
    DIM,
    DROPOUT,
    DTYPES,
    FEATURES,
    GRAPHS,
    HEADS,
    KV_HEADS,
    OPTIONS,
    SHAPES,
)
from gnn_attention.verify.check import Check
from gnn_attention.verify.measure import verdict
from gnn_attention.verify.problems import (
    FORMS,
    KINDS,
    attend_problem,
    dropout_problem,
    form_problem,
    layer_problem,
)
from gnn_attention.verify.rules import RULES, run_rule
from gnn_attention.verify.selection import covering, grid
from gnn_attention.verify.truth import Problem

SIZES = ("inputs x1", "inputs x5")
DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")
LAYER_GRAPHS = ("causal", "window", "strict_causal", "cross", "listed", "by head")
# a layer has no sinks
LAYER_OPTIONS = ("plain", "alibi", "relative bias", "softcap", "log multiplicity", "edge bias")

Row = Mapping[str, str]  # the dtype, and the other factors of a check


def run_problem(make: Callable[..., Problem], device: str, seed: int, backend: Backend, row: Row) -> Any:
    """The fields of the result of a backend on the problem of a row."""
    problem = make(device, seed, **row)
    out, gradients = problem.solve(backend)
    return verdict(out, gradients, problem.truth.for_backend(backend))


@dataclass(frozen=True, eq=False)
class Group:
    """Checks of one kind: ``run(device, seed, backend, row)`` returns the fields of a result.

    The rows hold every combination of ``strength`` values, of any factors. ``option`` is that of the calls
    where no factor says it; with ``forward`` pairs of values are checked without gradients, too.
    """

    name: str
    run: Callable[[str, int, Backend, Row], Mapping[str, Any]]
    values: Mapping[str, Iterable[str]]
    strength: int = 3
    option: str = "plain"
    forward: bool = False

    def checks(
        self, device: str, seed: int, backends: Sequence[Backend], allowed: Mapping[str, Sequence[str]]
    ) -> Iterator[Check]:
        """The checks of all rows on all backends; factors in ``allowed`` have those values alone."""
        values = {"dtype": tuple(DTYPES), **self.values}
        values |= {name: [x for x in values[name] if x in allowed[name]] for name in allowed.keys() & values}
        rows = [row for row in grid(**values) if _is_possible(row)]
        rows = [rows[number] for number in covering(rows, self.strength)]
        forward = set(covering(rows, 2)) if self.forward else set()
        for (number, row), backend in itertools.product(enumerate(rows), backends):
            check = self._check(device, seed, backend, row)
            yield from (check, check.forward_alone()) if number in forward else (check,)

    def _check(self, device: str, seed: int, backend: Backend, row: Row) -> Check:
        factors = {name: value for name, value in row.items() if name != "dtype"}
        option = RULES[row["rule"]][1] if "rule" in row else row.get("option", self.option)
        skipped = unsupported(backend, device, DTYPES[row["dtype"]], option)
        is_message_passing = "form" in row and backend.name == "message_passing"
        if is_message_passing and GRAPHS[row["graph"]].varies:
            skipped = "message passing needs one edge list, and this graph differs by head or sample"
        return Check(
            group=self.name,
            backend=backend.name,
            dtype=row["dtype"],
            name=", ".join(factors.values()),
            run=partial(self.run, device, seed, backend, row),
            with_gradients="rule" not in row,  # rules differentiate by themselves
            factors=factors,
            skipped=skipped,
        )


def _is_possible(row: Row) -> bool:
    """Whether the graph has an order of edges where the option needs one."""
    option = row.get("option")
    return option is None or FEATURES[option].unsupported(CASES[row["graph"]]) is None


LAYERS: Mapping[str, Iterable[str]] = {
    "form": FORMS,
    "kind": KINDS,
    "graph": GRAPHS,
    "option": LAYER_OPTIONS,
    "size": SIZES,
}
CALLS: Mapping[str, Iterable[str]] = {"graph": GRAPHS | SHAPES, "option": FEATURES, "size": SIZES}
EXACT_FORMS: Mapping[str, Iterable[str]] = {
    "dtype": ["float64"],
    "form": FORMS,
    "kind": KINDS,
    "graph": LAYER_GRAPHS,
}
GROUPS = (
    Group("attend", partial(run_problem, attend_problem), CALLS, forward=True),
    Group("layer", partial(run_problem, layer_problem), {**LAYERS, "graph": LAYER_GRAPHS}, forward=True),
    Group("layer", partial(run_problem, layer_problem), LAYERS, strength=2, forward=True),
    Group("forms", partial(run_problem, form_problem), EXACT_FORMS),
    Group("rules", run_rule, {"rule": RULES}),
    Group("dropout", partial(run_problem, dropout_problem), {"graph": DROPOUT_GRAPHS}, option=DROPOUT),
)


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
