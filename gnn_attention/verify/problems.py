"""The problems of the checks: calls of ``attend``, and layers in every form of their weights.

Small inputs make flat attention; inputs five times as large make it peaked, as trained heads do.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import dropout as dropped
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


@functools.lru_cache(maxsize=64)
def attend_problem(device: str, seed: int, dtype: str, graph: str, option: str, size: str) -> Problem:
    """A drawn call on a graph, with an option, whose inputs are multiplied by a size such as "inputs x5"."""
    case, feature = CASES[graph], FEATURES[option]
    problem = Problem.of(case, feature, drawn(seed, DTYPES[dtype], case, feature, _factor(size)), device)
    return replace(problem, layout=tokens_first) if graph in SHAPES else problem


def tokens_first(x: Tensor) -> Tensor:
    """``[B, T, H, D]`` in memory, as of a layer that splits its channels into heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _factor(size: str) -> float:
    return float(size.removeprefix("inputs x"))


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
