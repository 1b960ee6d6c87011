"""A whole message-passing layer in every form of its weights against the seeds' formulas, forward and every gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, Feature, GraphCase, unordered
from gnn_attention.verify.check import (
    DIM,
    DTYPES,
    FORMS,
    VALUE_DIM,
    WIDTH,
    Check,
    Settings,
    alone,
    bound,
    verdict,
)
from gnn_attention.verify.measure import Truth, gradients_of, worst_errors
from gnn_attention.verify.refusals import refused
from gnn_attention.verify.selection import covering
from gnn_attention.verify.truth import FUSED_ORDERS, ORDERS, Dense, unchanged

__all__ = ["form_checks", "layer_checks", "layer_truth", "plain_names"]

KINDS = ("plain heads", "grouped heads with biases")
LAYER_GRAPHS = ("causal", "window", "strict_causal", "cross", "listed", "by head")
LAYER_OPTIONS = ("plain", "alibi", "relative bias", "softcap", "log multiplicity", "edge bias")  # a layer has no sinks


def _heads(kind: str, seed: int) -> StandardHeads:
    """Float64 heads: "plain", or with everything at once (grouped, biases, odd sizes); biases are drawn, not zero."""
    rng = torch.Generator().manual_seed(seed)
    heads = (
        StandardHeads(WIDTH, HEADS)
        if kind == "plain heads"
        else StandardHeads(WIDTH, HEADS, head_dim=DIM, value_dim=VALUE_DIM, num_kv_heads=KV_HEADS, bias=True)
    ).double()
    for name, parameter in heads.named_parameters():
        spread = parameter.shape[-2] ** -0.5 if name.startswith("W_") else 0.5
        parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * spread
    return heads


@dataclass(frozen=True, eq=False)
class _LayerCase:
    """A whole layer in one form of its weights, shared by all backends."""

    settings: Settings
    graph_case: GraphCase
    kind: str
    form: str
    feature: Feature
    dtype: torch.dtype
    size: float

    @cached_property
    def heads(self) -> Any:
        return FORMS[self.form](_heads(self.kind, self.settings.seed)).to(self.dtype)

    @cached_property
    def drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        """States of senders and receivers, and the direction of the gradients."""
        rng, graph = torch.Generator().manual_seed(self.settings.seed + 1), self.graph_case.graph
        tokens = (graph.num_src, graph.num_dst, graph.num_dst)
        x_src, x_dst, direction = (torch.randn(BATCH, t, WIDTH, generator=rng, dtype=torch.float64) for t in tokens)
        return (x_src * self.size).to(self.dtype), (x_dst * self.size).to(self.dtype), direction.to(self.dtype)

    @cached_property
    def learned(self) -> dict[str, Tensor]:
        """What the option learns, in the dtype."""
        rng = torch.Generator().manual_seed(self.settings.seed + 8)
        return {name: x.to(self.dtype) for name, x in self.feature.learned(self.graph_case, rng).items()}

    @cached_property
    def truth(self) -> Truth:
        dense, device = partial(self.feature.dense, self.graph_case), self.settings.device
        return layer_truth(self.heads, *self.drawn, self.graph_case.mask, device, self.learned, dense, self.feature.additive)

    def run(self, backend: Backend | None, heads: Any = None, names: bool = True) -> Mapping[str, Any]:
        """The layer on a backend, or its messages one by one; ``heads`` in place of its own."""
        device = self.settings.device
        x_src, x_dst, direction = (x.to(device, copy=True) for x in self.drawn)
        learned = {name: x.to(device, copy=True).requires_grad_() for name, x in self.learned.items()}
        heads = (self.heads if heads is None else heads).to(device)
        inputs = {"x_src": x_src.requires_grad_(), "x_dst": x_dst.requires_grad_(), **learned}
        options = self.feature.options(learned)
        layer = MessagePassingAttention(heads, options.pop("score_mod", None), backend=backend)
        out = layer((x_src, x_dst), self.graph_case.graph, **options)
        gradients = gradients_of(out, direction, inputs | (plain_names(heads) if names else {}))
        return verdict(out, gradients, self.truth.for_backend(backend))


def plain_names(heads: Any) -> dict[str, Tensor]:
    return {name.removeprefix("standard."): parameter for name, parameter in heads.named_parameters()}


@torch.enable_grad()
def layer_truth(
    heads: Any,
    x_src: Tensor,
    x_dst: Tensor,
    direction: Tensor,
    mask: Tensor,
    device: str = "cpu",
    learned: Mapping[str, Tensor] | None = None,
    dense: Dense = unchanged,
    additive: bool = True,
) -> Truth:
    """The truth about a layer: the seeds' formula in float64 on its weights as they are, and SDPA between its own projections.

    ``dense`` makes logits ``[B, heads, dst, src]`` of ``learned`` and logits; ``additive`` where it adds to them.
    """
    given = {"x_src": x_src, "x_dst": x_dst, **(learned or {})}
    inputs = {name: x.detach().cpu().double().requires_grad_() for name, x in given.items()}
    weights = {name: p.detach().cpu().double().requires_grad_() for name, p in plain_names(heads).items()}
    out = oracle.layer(weights, inputs["x_src"], inputs["x_dst"], mask, heads.scale, partial(dense, inputs))
    gradients = gradients_of(out, direction.double().cpu(), inputs | weights)
    if direction.dtype == torch.float64:
        return Truth(out, gradients, {}, {})
    places = [direction.to(device), mask.to(device)]
    plain, fused = (
        worst_errors(
            (_layer_yardstick(n, widened, heads.to(device), given, places, dense, additive) for n in range(count)), out, gradients
        )
        for count, widened in ((ORDERS, False), (FUSED_ORDERS, True))
    )
    return Truth(out, gradients, plain, fused)


def _layer_yardstick(
    number: int, widened: bool, heads: Any, given: Mapping[str, Tensor], places: list[Tensor], dense: Dense, additive: bool
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The layer with SDPA in its middle, in the dtype of its weights, tokens and samples in the given order."""
    direction, mask = places
    inputs = {name: x.detach().to(direction.device, copy=True).requires_grad_() for name, x in given.items()}
    x_src, x_dst = inputs["x_src"], inputs["x_dst"]
    q, (k, v) = heads.receive(x_dst), heads.send(x_src)
    order = oracle.Order.draw(number, len(x_dst), x_dst.shape[1], x_src.shape[1], q.shape[-1], str(x_dst.device), widened)
    if additive:
        added = dense(inputs, q.new_zeros(mask.shape))
        z = oracle.reordered_sdpa(order, q, k, v, mask, heads.scale, added)
    else:
        z = oracle.reordered_attention(order, q, k, v, mask, heads.scale, partial(dense, inputs))
    out = heads.collect(z)
    learners = {name: x for name, x in inputs.items() if name.startswith("x_")} if widened else inputs
    return out, gradients_of(out, direction, learners | plain_names(heads))


def form_checks(settings: Settings) -> Iterator[Check]:
    """Conversions are exact: every form of the same heads gives what the standard formula gives (float64)."""
    if "float64" not in settings.dtypes:
        return
    for kind in KINDS:
        for graph in [name for name in LAYER_GRAPHS if name in settings.graphs]:
            case = _LayerCase(settings, GRAPHS[graph], kind, "standard", FEATURES["plain"], torch.float64, 1.0)
            for form in settings.forms:
                for backend in settings.backends:
                    name, factors = f"{form} from standard, {kind}, {graph}", {"form": form, "kind": kind, "graph": graph}
                    run = bound(_run_converted, case, form, backend)
                    yield Check("forms", backend.name, "float64", name, run, with_gradients=True, factors=factors)


def _run_converted(case: _LayerCase, form: str, backend: Backend) -> Mapping[str, Any]:
    """A form made from the standard heads of the case, held against the formula on the standard weights."""
    return case.run(backend, FORMS[form](case.heads), names=False)


def layer_checks(settings: Settings) -> Iterator[Check]:
    """Forms x graphs x options x dtypes x backends: some graphs by triples of values, all by pairs.

    The messages one by one ("walk") are one of the backends.
    """
    ways: list[Backend | None] = [*([None] if settings.walk else []), *settings.backends]
    for row in _rows(settings.dtypes, settings.graphs, settings.forms, settings.features, settings.sizes):
        case = _case(settings, row)
        for way in ways:
            yield from _checks(case, row, way)


@functools.lru_cache(maxsize=16)
def _rows(*values: tuple[Any, ...]) -> list[dict[str, str]]:
    """The values of each problem: of some graphs all triples, of all graphs all pairs."""
    dtypes, graphs, forms, features, sizes = values
    rows = [
        {"dtype": dtype, "graph": graph, "form": form, "option": option, "kind": kind, "size": f"x{size:g}"}
        for dtype in dtypes
        for graph in graphs
        for form in forms
        for option in LAYER_OPTIONS
        if option in features and unordered(FEATURES[option], GRAPHS[graph]) is None
        for kind in KINDS
        for size in sizes
    ]
    few = [number for number, row in enumerate(rows) if row["graph"] in LAYER_GRAPHS]
    triples = {few[number] for number in covering([rows[number] for number in few], 3)}
    return [rows[number] for number in sorted(triples | set(covering(rows, 2)))]


def _case(settings: Settings, row: Mapping[str, str]) -> _LayerCase:
    graph, feature, size = GRAPHS[row["graph"]], FEATURES[row["option"]], float(row["size"][1:])
    return _LayerCase(settings, graph, row["kind"], row["form"], feature, DTYPES[row["dtype"]], size)


def _checks(case: _LayerCase, row: Mapping[str, str], way: Backend | None) -> Iterator[Check]:
    """Forward and gradients, and forward alone."""
    name = f"{row['form']}, {row['kind']}, {row['graph']}, {row['option']}, inputs {row['size']}"
    backend, run, skipped = "walk" if way is None else way.name, bound(case.run, way), _skipped(case, row["option"], way)
    factors = {key: value for key, value in row.items() if key != "dtype"}
    both, forward = ({**factors, "direction": direction} for direction in ("forward and gradients", "forward alone"))
    yield Check("layer", backend, row["dtype"], name, run, True, both, skipped)
    if row["size"] == "x1" and row["kind"] == KINDS[1]:
        yield Check("layer", backend, row["dtype"], f"{name}, forward alone", alone(run), False, forward, skipped)


def _skipped(case: _LayerCase, option: str, way: Backend | None) -> str | None:
    """Why a layer cannot be run so."""
    if way is not None:
        return refused(way, case.settings.device, case.dtype, option)
    return "messages one by one need one edge list, and this graph differs by head or sample" if case.graph_case.varies else None
