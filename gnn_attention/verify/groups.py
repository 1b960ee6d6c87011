"""The groups of checks, each a table of values whose combinations are the checks, and the problem of each.

Small inputs make flat attention; inputs five times as large make it peaked, as trained heads do.
"""

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.verify.cases import (
    DIM,
    DROPOUT,
    DTYPES,
    FEATURES,
    GRAPHS,
    HEADS,
    KV_HEADS,
    OPTIONS,
    VALUE_DIM,
    Feature,
    GraphCase,
)
from gnn_attention.verify.measure import Outcome, judge
from gnn_attention.verify.report import Check
from gnn_attention.verify.truth import Problem

WIDTH = 24
KINDS = ("plain heads", "grouped heads with biases")
FORMS: dict[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender's side": partial(FactoredHeads.of, side="sender"),
    "merged": MergedHeads.of,
    "merged, sender's side": partial(MergedHeads.of, side="sender"),
}
SIZES = ("inputs x1", "inputs x5")
DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")
LAYER_GRAPHS = (
    *("causal", "window", "strict_causal", "cross", "listed", "by head", "by sample"),
    *("decode rows", "no edges", "causal, 97 tokens"),
)
# a layer has no sinks
LAYER_OPTIONS = ("plain", "alibi", "relative bias", "softcap", "log multiplicity", "edge bias")

Row = Mapping[str, str]  # the dtype, and the other factors of a check


@dataclass(frozen=True, eq=False)
class Group:
    """Checks of one kind: ``run(device, backend, row)`` returns the outcome of a backend.

    The rows hold every combination of three values, of any factors. ``option(row)`` is the option that the
    calls of a row have. Where inputs have sizes, pairs of values are checked without gradients, too.
    """

    name: str
    run: Callable[[str, Backend, Row], Outcome]
    values: Mapping[str, Any]  # of each factor, iterables of its values
    option: Callable[[Row], str] = lambda row: row.get("option", "plain")

    def checks(self, device: str, backends: Sequence[Backend]) -> Iterator[Check]:
        """The checks of all rows on all backends."""
        rows = grid(**{"dtype": DTYPES, **self.values}) if backends else []
        if "option" in self.values:
            rows = [row for row in rows if FEATURES[row["option"]].fits(GRAPHS[row["graph"]])]
        rows = [rows[number] for number in covering(rows, 3)]
        forward = set(covering(rows, 2)) if "size" in self.values else set()
        for (number, row), backend in itertools.product(enumerate(rows), backends):
            check = self._check(device, backend, row)
            yield from (check, check.forward_alone()) if number in forward else (check,)

    def _check(self, device: str, backend: Backend, row: Row) -> Check:
        factors = {name: value for name, value in row.items() if name != "dtype"}
        skipped = unsupported(backend, device, DTYPES[row["dtype"]], self.option(row))
        is_message_passing = "form" in row and backend.name == "message_passing"
        if is_message_passing and GRAPHS[row["graph"]].varies:
            skipped = "message passing needs one edge list, and this graph differs by head or sample"
        name, run = ", ".join(factors.values()), partial(self.run, device, backend, row)
        return Check(self.name, backend.name, row["dtype"], name, run, factors, skipped)


@functools.lru_cache(maxsize=1024)
@torch.no_grad()
def unsupported(backend: Backend, device: str, dtype: torch.dtype, option: str) -> str | None:
    """Why a backend does not take calls with an option, without gradients; or None."""
    # checks are listed where they cannot be run
    if device.startswith("cuda") and not torch.cuda.is_available():
        return None
    case, feature = GRAPHS["causal"], OPTIONS[option]
    inputs = drawn(device, 0, dtype, case, feature)
    q, k, v = (inputs[name] for name in "qkv")
    reason = backend.unsupported_reason(AttentionCall.checked(q, k, v, case.graph, **feature.options(inputs)))
    return None if reason is None else f"{backend.name}: {reason}"


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the values of each name, as rows."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def covering(rows: Sequence[Mapping[str, Any]], strength: int) -> list[int]:
    """Numbers of rows, ascending, that hold each combination of ``strength`` values that occurs in any row.

    A greedy choice: the row that adds most comes first, of equal ones the earliest.

    >>> covering([{"a": a, "b": b, "c": c} for a in (0, 1) for b in (0, 1) for c in (0, 1)], 2)
    [0, 3, 5, 6]
    """
    combinations = [list(itertools.combinations(row.items(), min(strength, len(row)))) for row in rows]
    missing = set(itertools.chain.from_iterable(combinations))
    queue = [(-len(values), number) for number, values in enumerate(combinations)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        promised, number = heapq.heappop(queue)
        gain = sum(combination in missing for combination in combinations[number])
        if gain == -promised:
            chosen.append(number)
            missing.difference_update(combinations[number])
        elif gain:
            heapq.heappush(queue, (-gain, number))
    return sorted(chosen)


# ---- the problems


@functools.lru_cache(maxsize=256)
def attend_problem(
    device: str,
    dtype: str,
    graph: str,
    option: str = "plain",
    size: str = "inputs x1",
    rows: tuple[int, ...] | None = None,
) -> Problem:
    """A drawn call on a graph, with an option, whose inputs are multiplied by a size such as "inputs x5".

    Gradients are those of the receivers ``rows`` (None: of all).
    """
    case, feature = GRAPHS[graph], OPTIONS[option]
    inputs = drawn(device, 0, DTYPES[dtype], case, feature, size)
    if rows is not None:
        inputs["direction"][:, :, [row for row in range(case.graph.num_dst) if row not in rows]] = 0.0
    return Problem.of(case, feature, inputs)


@functools.lru_cache(maxsize=64)
def layer_problem(
    device: str,
    dtype: str,
    form: str,
    kind: str,
    graph: str,
    option: str = "plain",
    size: str = "inputs x1",
) -> Problem:
    """A layer in one form of drawn weights, on drawn tokens that are multiplied by the size."""
    case, feature = GRAPHS[graph], FEATURES[option]
    inputs = drawn(device, 1, DTYPES[dtype], case, feature, size, of_layer=True)
    heads = FORMS[form](drawn_heads(kind, seed=0)).to(device, DTYPES[dtype])
    return Problem.of(case, feature, inputs, heads)


def drawn(
    device: str,
    seed: int,
    dtype: torch.dtype,
    case: GraphCase,
    feature: Feature,
    size: str = "inputs x1",
    of_layer: bool = False,
) -> dict[str, Tensor]:
    """The inputs of a call, or of a layer, what the feature learns, and the direction of the gradients."""
    (batch, heads), (dim, value_dim), graph = case.sizes, case.dims, case.graph
    rng, factor = torch.Generator().manual_seed(seed), float(size.removeprefix("inputs x"))
    shapes: dict[str, tuple[int, ...]] = {
        "q": (heads, graph.num_dst, dim),
        "k": (case.kv_heads, graph.num_src, dim),
        "v": (case.kv_heads, graph.num_src, value_dim),
    }
    if of_layer:
        shapes = {"x_src": (graph.num_src, WIDTH), "x_dst": (graph.num_dst, WIDTH)}
    draw = partial(torch.randn, batch, generator=rng, dtype=torch.float64)
    inputs = {name: draw(*shape) * factor for name, shape in shapes.items()} | feature.learned(case, rng)
    inputs["direction"] = draw(*((graph.num_dst, WIDTH) if of_layer else (heads, graph.num_dst, value_dim)))
    return {name: x.to(device, dtype) for name, x in inputs.items()}


def drawn_heads(kind: str, seed: int) -> StandardHeads:
    """Float64 heads: plain, or grouped with odd sizes and biases, which are drawn."""
    rng = torch.Generator().manual_seed(seed)
    heads = StandardHeads(WIDTH, HEADS)
    if kind != "plain heads":
        heads = StandardHeads(WIDTH, HEADS, DIM, VALUE_DIM, num_kv_heads=KV_HEADS, bias=True)
    for name, parameter in heads.double().named_parameters():
        spread = parameter.shape[-2] ** -0.5 if name.startswith("W_") else 0.5
        parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * spread
    return heads


# ---- the groups; that of rules is in the module of rules


def _solve(make: Callable[..., Problem], device: str, backend: Backend, row: Row) -> Outcome:
    problem = make(device, **row)
    return judge(*problem.solve(backend), problem.truth.for_backend(backend))


CALLS = {"graph": GRAPHS, "option": FEATURES, "size": SIZES}
LAYERS = {"form": FORMS, "kind": KINDS, "graph": LAYER_GRAPHS, "option": LAYER_OPTIONS, "size": SIZES}
dropout_problem = partial(attend_problem, option=DROPOUT)
GROUPS = (
    Group("attend", partial(_solve, attend_problem), CALLS),
    Group("layer", partial(_solve, layer_problem), LAYERS),
    Group("dropout", partial(_solve, dropout_problem), {"graph": DROPOUT_GRAPHS}, lambda row: DROPOUT),
)
