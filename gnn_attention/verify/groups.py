"""The groups of checks, each a table of values whose combinations are the checks, and the problem of each.

Small inputs make flat attention; inputs five times as large make it peaked, as trained heads do.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.backends import dropout as dropped
from gnn_attention.backends.call import AttentionCall
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
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
    VALUE_DIM,
    Feature,
    GraphCase,
)
from gnn_attention.verify.check import Check
from gnn_attention.verify.measure import verdict
from gnn_attention.verify.selection import covering, grid
from gnn_attention.verify.truth import Problem

WIDTH = 24
KINDS = ("plain heads", "grouped heads with biases")
FORMS: dict[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender's side": lambda heads: FactoredHeads.of(heads, "sender"),
    "merged": MergedHeads.of,
    "merged, sender's side": lambda heads: MergedHeads.of(heads, "sender"),
}
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

    The rows hold every combination of ``strength`` values, of any factors. ``option(row)`` is the option that
    the calls of a row have. Where inputs have sizes, pairs of values are checked without gradients, too.
    """

    name: str
    run: Callable[[str, int, Backend, Row], Mapping[str, Any]]
    values: Mapping[str, Any]  # of each factor, iterables of its values
    strength: int = 3
    option: Callable[[Row], str] = lambda row: row.get("option", "plain")
    with_gradients: bool = True

    def checks(
        self, device: str, seed: int, backends: Sequence[Backend], allowed: Mapping[str, Sequence[str]]
    ) -> Iterator[Check]:
        """The checks of all rows on all backends; factors in ``allowed`` have those values alone."""
        values = {"dtype": tuple(DTYPES), **self.values}
        values |= {name: [x for x in values[name] if x in allowed[name]] for name in allowed.keys() & values}
        rows = grid(**values)
        if "option" in values:
            rows = [row for row in rows if FEATURES[row["option"]].fits(CASES[row["graph"]])]
        rows = [rows[number] for number in covering(rows, self.strength)]
        forward = set(covering(rows, 2)) if "size" in values else set()
        for (number, row), backend in itertools.product(enumerate(rows), backends):
            check = self._check(device, seed, backend, row)
            yield from (check, check.forward_alone()) if number in forward else (check,)

    def _check(self, device: str, seed: int, backend: Backend, row: Row) -> Check:
        factors = {name: value for name, value in row.items() if name != "dtype"}
        skipped = unsupported(backend, device, DTYPES[row["dtype"]], self.option(row))
        is_message_passing = "form" in row and backend.name == "message_passing"
        if is_message_passing and GRAPHS[row["graph"]].varies:
            skipped = "message passing needs one edge list, and this graph differs by head or sample"
        return Check(
            group=self.name,
            backend=backend.name,
            dtype=row["dtype"],
            name=", ".join(factors.values()),
            run=partial(self.run, device, seed, backend, row),
            with_gradients=self.with_gradients,
            factors=factors,
            skipped=skipped,
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


# ---- the problems


@functools.lru_cache(maxsize=256)
def attend_problem(
    device: str,
    seed: int,
    dtype: str,
    graph: str,
    option: str,
    size: str = "inputs x1",
    rows: tuple[int, ...] | None = None,
) -> Problem:
    """A drawn call on a graph, with an option, whose inputs are multiplied by a size such as "inputs x5".

    Gradients are those of the receivers ``rows`` (None: of all).
    """
    case, feature = CASES[graph], OPTIONS[option]
    inputs = drawn(seed, DTYPES[dtype], case, feature, _factor(size))
    if rows is not None:
        inputs["direction"][:, :, [row for row in range(case.graph.num_dst) if row not in rows]] = 0.0
    problem = Problem.of(case, feature, {name: x.to(device) for name, x in inputs.items()}, device)
    return replace(problem, layout=tokens_first) if graph in SHAPES else problem


def _factor(size: str) -> float:
    return float(size.removeprefix("inputs x"))


def tokens_first(x: Tensor) -> Tensor:
    """``[B, T, H, D]`` in memory, as of a layer that splits its channels into heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def drawn(
    seed: int, dtype: torch.dtype, case: GraphCase, feature: Feature, size: float = 1.0
) -> dict[str, Tensor]:
    """Inputs times ``size``, what the feature learns, and the direction of the gradients."""
    (batch, heads), rng, graph = case.sizes, torch.Generator().manual_seed(seed), case.graph
    draw = partial(torch.randn, batch, generator=rng, dtype=torch.float64)
    inputs = {
        "q": draw(heads, graph.num_dst, case.dims[0]) * size,
        "k": draw(case.kv_heads, graph.num_src, case.dims[0]) * size,
        "v": draw(case.kv_heads, graph.num_src, case.dims[1]) * size,
    }
    inputs |= feature.learned(case, rng)
    inputs["direction"] = draw(heads, graph.num_dst, case.dims[1])
    return {name: x.to(dtype) for name, x in inputs.items()}


@functools.lru_cache(maxsize=64)
def dropout_problem(device: str, seed: int, dtype: str, graph: str) -> Problem:
    """``(softmax(logits) * stays / (1 - p)) v``: factors after the softmax."""
    case, feature = GRAPHS[graph], OPTIONS[DROPOUT]
    probability, (samples, heads) = feature.arguments["dropout"], case.sizes
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        key = dropped.draw_seed(torch.device("cpu"))
    places = torch.arange(samples).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1), *case.positions()
    factors = dropped.mask(key, *places, probability).double() / (1 - probability)
    inputs = drawn(seed + 4, DTYPES[dtype], case, feature)
    return Problem.of(case, feature, inputs, device, factors=factors.expand(case.mask.shape))


@functools.lru_cache(maxsize=64)
def layer_problem(
    device: str, seed: int, dtype: str, form: str, kind: str, graph: str, option: str, size: str
) -> Problem:
    """A layer in one form of drawn weights, on drawn tokens that are multiplied by the size."""
    case, feature, rng = GRAPHS[graph], FEATURES[option], torch.Generator().manual_seed(seed + 1)
    draw = partial(torch.randn, BATCH, generator=rng, dtype=torch.float64)
    inputs = {
        "x_src": draw(case.graph.num_src, WIDTH) * _factor(size),
        "x_dst": draw(case.graph.num_dst, WIDTH) * _factor(size),
        "direction": draw(case.graph.num_dst, WIDTH),
    }
    inputs |= feature.learned(case, torch.Generator().manual_seed(seed + 8))
    rounded = {name: x.to(DTYPES[dtype]) for name, x in inputs.items()}
    heads = FORMS[form](drawn_heads(kind, seed)).to(DTYPES[dtype])
    return Problem.of(case, feature, rounded, device, heads)


def form_problem(device: str, seed: int, dtype: str, form: str, kind: str, graph: str) -> Problem:
    """A layer of standard heads, which is solved in another form of them: conversions are exact."""
    standard = layer_problem(device, seed, dtype, "standard", kind, graph, "plain", "inputs x1")
    return replace(standard, form=FORMS[form])


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


WEIGHTS = {"form": FORMS, "kind": KINDS}
LAYERS = {**WEIGHTS, "graph": GRAPHS, "option": LAYER_OPTIONS, "size": SIZES}
EXACT_FORMS = {**WEIGHTS, "graph": LAYER_GRAPHS, "dtype": ["float64"]}
CALLS = {"graph": GRAPHS | SHAPES, "option": FEATURES, "size": SIZES}
GROUPS = (
    Group("attend", partial(run_problem, attend_problem), CALLS),
    Group("layer", partial(run_problem, layer_problem), {**LAYERS, "graph": LAYER_GRAPHS}),
    Group("layer", partial(run_problem, layer_problem), LAYERS, strength=2),
    Group("forms", partial(run_problem, form_problem), EXACT_FORMS),
    Group(
        "dropout",
        partial(run_problem, dropout_problem),
        {"graph": DROPOUT_GRAPHS},
        option=lambda row: DROPOUT,
    ),
)
