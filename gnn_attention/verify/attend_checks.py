"""``attend`` against the float64 formula, forward and every gradient: with options, and with dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend, dropout
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, Feature, GraphCase
from gnn_attention.verify.check import BOTH, DIM, DROPOUT, DTYPES, VALUE_DIM, Check, Settings
from gnn_attention.verify.selection import covering, grid
from gnn_attention.verify.truth import AttendProblem

PROBABILITY = 0.3
DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")

Row = Mapping[str, str]


def attend_checks(settings: Settings) -> Iterator[Check]:
    """Triples of graph, feature, dtype and size on every backend; pairs of all without gradients, too."""
    rows = _rows(settings.dtypes, settings.graphs, settings.features, settings.sizes)
    every = [{**row, "backend": backend.name} for row in rows for backend in settings.backends]
    forward = set(covering(every, 2))
    for number, row in enumerate(rows):
        problem = functools.cache(partial(_problem, settings, row))
        name = f"{row['graph']}, {row['option']}, inputs {row['size']}"
        factors = {key: value for key, value in row.items() if key != "dtype"} | {"direction": BOTH}
        unordered = FEATURES[row["option"]].unsupported(GRAPHS[row["graph"]])
        for place, backend in enumerate(settings.backends, number * len(settings.backends)):
            run = partial(_run, problem, backend)
            check = settings.check("attend", backend, row["dtype"], name, run, row["option"], **factors)
            check = check if unordered is None else replace(check, skipped=unordered)
            yield check
            if place in forward:
                yield check.forward_alone()


@functools.lru_cache(maxsize=16)
def _rows(*values: tuple[Any, ...]) -> list[dict[str, str]]:
    """The values of each problem: all triples."""
    dtypes, graphs, options, sizes = values
    rows = grid(dtype=dtypes, graph=graphs, option=options, size=[f"x{size:g}" for size in sizes])
    return [rows[number] for number in covering(rows, 3)]


def _run(problem: Callable[[], AttendProblem], backend: Backend) -> Mapping[str, Any]:
    return problem().run(backend)


def _problem(settings: Settings, row: Row) -> AttendProblem:
    case, feature = GRAPHS[row["graph"]], FEATURES[row["option"]]
    inputs, direction = _draw(settings.seed, DTYPES[row["dtype"]], case, feature, float(row["size"][1:]))
    return AttendProblem.of(case, feature, inputs, direction, settings.device)


def _draw(
    seed: int, dtype: torch.dtype, case: GraphCase, feature: Feature, size: float = 1.0
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs times ``size``, what the feature learns, and the direction of the gradients."""
    rng, graph = torch.Generator().manual_seed(seed), case.graph
    draw = partial(torch.randn, BATCH, generator=rng, dtype=torch.float64)
    inputs = {
        "q": draw(HEADS, graph.num_dst, DIM) * size,
        "k": draw(KV_HEADS, graph.num_src, DIM) * size,
        "v": draw(KV_HEADS, graph.num_src, VALUE_DIM) * size,
    }
    inputs |= feature.learned(case, rng)
    direction = draw(HEADS, graph.num_dst, VALUE_DIM)
    return {name: x.to(dtype) for name, x in inputs.items()}, direction.to(dtype)


def dropout_checks(settings: Settings) -> Iterator[Check]:
    """The very weights that an edge's key names are dropped, forward and backward."""
    graphs = [name for name in DROPOUT_GRAPHS if name in settings.graphs]
    for dtype, graph in product(settings.semantics, graphs):
        problem = functools.cache(partial(_dropout_problem, settings, GRAPHS[graph], DTYPES[dtype]))
        for backend in settings.backends:
            name, run = (
                f"the weights dropped on {graph} are those of the key",
                partial(_run, problem, backend),
            )
            yield settings.check("dropout", backend, dtype, name, run, DROPOUT, graph=graph)


def _dropout_problem(settings: Settings, case: GraphCase, dtype: torch.dtype) -> AttendProblem:
    """``(softmax(logits) * stays / (1 - p)) v``: factors after the softmax."""
    feature = Feature(DROPOUT, options=lambda _: {"dropout": PROBABILITY})
    sample, head = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        seed = dropout.draw_seed(torch.device("cpu"))
    stays = dropout.mask(seed, sample, head, *case.positions(), PROBABILITY)
    factors = (stays.double() / (1 - PROBABILITY)).expand(case.mask.shape)
    inputs, direction = _draw(settings.seed + 4, dtype, case, feature)
    return AttendProblem.of(case, feature, inputs, direction, settings.device, factors)
