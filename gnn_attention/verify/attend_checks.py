"""``attend`` against the float64 formula, forward and every gradient: with options, and with dropout."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import dropout
from gnn_attention.verify.cases import (
    BATCH,
    DROPOUT,
    FEATURES,
    GRAPHS,
    HEADS,
    KV_HEADS,
    OPTIONS,
    PROBABILITY,
    Feature,
    GraphCase,
)
from gnn_attention.verify.check import BOTH, DIM, DTYPES, VALUE_DIM, Check, Settings, judged
from gnn_attention.verify.selection import covering, grid
from gnn_attention.verify.truth import Problem

DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")


def attend_checks(settings: Settings) -> Iterator[Check]:
    """Triples of graph, feature, dtype and size on every backend; pairs of all without gradients, too."""
    rows = _rows(settings.dtypes, settings.graphs, settings.features, settings.sizes)
    every = [{**row, "backend": backend.name} for row in rows for backend in settings.backends]
    forward = set(covering(every, 2))
    for number, row in enumerate(rows):
        make = functools.cache(partial(_problem, settings, row))
        name = f"{row['graph']}, {row['option']}, inputs {row['size']}"
        factors = {key: value for key, value in row.items() if key != "dtype"} | {"direction": BOTH}
        unordered = FEATURES[row["option"]].unsupported(GRAPHS[row["graph"]])
        for place, backend in enumerate(settings.backends, number * len(settings.backends)):
            run = partial(judged, make, backend)
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


def _problem(settings: Settings, row: Mapping[str, str]) -> Problem:
    case, feature, size = GRAPHS[row["graph"]], FEATURES[row["option"]], float(row["size"][1:])
    inputs = drawn(settings.seed, DTYPES[row["dtype"]], case, feature, size)
    return Problem.of(case, feature, inputs, settings.device)


def drawn(
    seed: int,
    dtype: torch.dtype,
    case: GraphCase,
    feature: Feature,
    size: float = 1.0,
    kv_heads: int = KV_HEADS,
    dims: tuple[int, int] = (DIM, VALUE_DIM),
) -> dict[str, Tensor]:
    """Inputs times ``size``, what the feature learns, and the direction of the gradients."""
    (batch, heads), rng, graph = case.sizes, torch.Generator().manual_seed(seed), case.graph
    draw = partial(torch.randn, batch, generator=rng, dtype=torch.float64)
    inputs = {
        "q": draw(heads, graph.num_dst, dims[0]) * size,
        "k": draw(kv_heads, graph.num_src, dims[0]) * size,
        "v": draw(kv_heads, graph.num_src, dims[1]) * size,
    }
    inputs |= feature.learned(case, rng)
    inputs["direction"] = draw(heads, graph.num_dst, dims[1])
    return {name: x.to(dtype) for name, x in inputs.items()}


def dropout_checks(settings: Settings) -> Iterator[Check]:
    """The very weights that an edge's key names are dropped, forward and backward."""
    graphs = [name for name in DROPOUT_GRAPHS if name in settings.graphs]
    for dtype, graph in product(settings.semantics, graphs):
        make = functools.cache(partial(_dropout_problem, settings, GRAPHS[graph], DTYPES[dtype]))
        name = f"the weights dropped on {graph} are those of the key"
        for backend in settings.backends:
            run = partial(judged, make, backend)
            yield settings.check("dropout", backend, dtype, name, run, DROPOUT, graph=graph)


def _dropout_problem(settings: Settings, case: GraphCase, dtype: torch.dtype) -> Problem:
    """``(softmax(logits) * stays / (1 - p)) v``: factors after the softmax."""
    sample, head = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        seed = dropout.draw_seed(torch.device("cpu"))
    stays = dropout.mask(seed, sample, head, *case.positions(), PROBABILITY)
    factors = (stays.double() / (1 - PROBABILITY)).expand(case.mask.shape)
    inputs = drawn(settings.seed + 4, dtype, case, OPTIONS[DROPOUT])
    return Problem.of(case, OPTIONS[DROPOUT], inputs, settings.device, factors=factors)
