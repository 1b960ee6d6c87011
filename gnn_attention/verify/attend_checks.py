"""``attend`` against the float64 formula, forward and every gradient: with options, and with dropout."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import dropout
from gnn_attention.verify.cases import DROPOUT, FEATURES, GRAPHS, KV_HEADS, OPTIONS, Feature, GraphCase
from gnn_attention.verify.check import BOTH, DIM, DTYPES, VALUE_DIM, Check, Settings
from gnn_attention.verify.selection import covering, grid
from gnn_attention.verify.truth import Problem

DROPOUT_GRAPHS = ("causal", "listed", "decode rows", "by head", "window, 97 tokens")


def attend_checks(settings: Settings) -> Iterator[Check]:
    """Triples of graph, feature, dtype and size on every backend; pairs of all without gradients, too."""
    rows = _rows(settings.dtypes, settings.graphs, settings.features, settings.sizes)
    every = [{**row, "backend": backend.name} for row in rows for backend in settings.backends]
    forward = set(covering(every, 2))
    for number, row in enumerate(rows):
        name = f"{row['graph']}, {row['option']}, inputs {row['size']}"
        factors = {key: value for key, value in row.items() if key != "dtype"} | {"direction": BOTH}
        given = row["dtype"], name, partial(_problem, settings, row), row["option"]
        unordered = FEATURES[row["option"]].unsupported(GRAPHS[row["graph"]])
        found = settings.checks("attend", *given, factors)
        for place, check in enumerate(found, number * len(settings.backends)):
            check = check if unordered is None else replace(check, skipped=unordered)
            yield from (check, check.forward_alone()) if place in forward else (check,)


@functools.lru_cache(maxsize=16)
def _rows(*values: tuple[Any, ...]) -> list[dict[str, str]]:
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
        make = partial(dropout_problem, settings, GRAPHS[graph], DTYPES[dtype])
        name = f"the weights dropped on {graph} are those of the key"
        yield from settings.checks("dropout", dtype, name, make, DROPOUT, {"graph": graph})


def dropout_problem(settings: Settings, case: GraphCase, dtype: torch.dtype) -> Problem:
    """``(softmax(logits) * stays / (1 - p)) v``: factors after the softmax."""
    feature, (samples, heads) = OPTIONS[DROPOUT], case.sizes
    probability = feature.arguments["dropout"]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        seed = dropout.draw_seed(torch.device("cpu"))
    places = torch.arange(samples).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1), *case.positions()
    factors = dropout.mask(seed, *places, probability).double() / (1 - probability)
    inputs = drawn(settings.seed + 4, dtype, case, feature)
    return Problem.of(case, feature, inputs, settings.device, factors=factors.expand(case.mask.shape))
