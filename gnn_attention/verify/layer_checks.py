"""A whole message-passing layer in every form of its weights against the seeds' formulas, forward and every gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gnn_attention._shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, GRAPHS, HEADS, KV_HEADS, GraphCase
from gnn_attention.verify.check import (
    DIM,
    DTYPES,
    FORMS,
    FUSED_ORDERS,
    ORDERS,
    VALUE_DIM,
    WIDTH,
    Check,
    Settings,
    bound,
    skip,
    verdict,
)
from gnn_attention.verify.measure import Truth, gradients_of, worst_errors

__all__ = ["form_checks", "layer_checks", "layer_truth", "plain_names"]

KINDS = ("plain heads", "grouped heads with biases")
LAYER_GRAPHS = ("causal", "window", "strict_causal", "cross", "listed", "by head")


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
    dtype: torch.dtype
    size: float

    @cached_property
    def heads(self) -> Any:
        return FORMS[self.form](_heads(self.kind, self.settings.seed)).to(self.dtype)

    @cached_property
    def _drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        rng, graph = torch.Generator().manual_seed(self.settings.seed + 1), self.graph_case.graph
        tokens = (graph.num_src, graph.num_dst, graph.num_dst)
        x_src, x_dst, direction = (torch.randn(BATCH, t, WIDTH, generator=rng, dtype=torch.float64) for t in tokens)
        return (x_src * self.size).to(self.dtype), (x_dst * self.size).to(self.dtype), direction.to(self.dtype)

    @cached_property
    def truth(self) -> Truth:
        mask = self.graph_case.mask
        return layer_truth(self.heads, *self._drawn, mask, device=self.settings.device)

    def run(self, backend: Backend | None) -> Mapping[str, Any]:
        device = self.settings.device
        x_src, x_dst, direction = (x.to(device, copy=True) for x in self._drawn)
        inputs = {"x_src": x_src.requires_grad_(), "x_dst": x_dst.requires_grad_()}
        layer = MessagePassingAttention(self.heads.to(device), backend=backend)
        out = layer((x_src, x_dst), self.graph_case.graph)
        gradients = gradients_of(out, direction, inputs | plain_names(self.heads))
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
    table: Tensor | None = None,
) -> Truth:
    """The truth about a layer: the seeds' formula in float64 on its weights as they are, and SDPA between its own projections.

    ``table [1, heads, dst, src]`` is added to the logits.
    """
    states = {"x_src": x_src, "x_dst": x_dst}
    inputs = {name: x.detach().cpu().double().requires_grad_() for name, x in states.items()}
    weights = {name: p.detach().cpu().double().requires_grad_() for name, p in plain_names(heads).items()}
    modify = None if table is None else lambda logits: logits + table.double()
    out = oracle.layer(weights, inputs["x_src"], inputs["x_dst"], mask, heads.scale, modify)
    gradients = gradients_of(out, direction.double().cpu(), inputs | weights)
    if direction.dtype == torch.float64:
        return Truth(out, gradients, {}, {})
    tensors = [x.detach().to(device) for x in (x_src, x_dst, direction, mask)]
    added = None if table is None else table.to(device)
    plain, fused = (
        worst_errors((_layer_yardstick(n, widened, heads.to(device), tensors, added) for n in range(count)), out, gradients)
        for count, widened in ((ORDERS, False), (FUSED_ORDERS, True))
    )
    return Truth(out, gradients, plain, fused)


def _layer_yardstick(
    number: int, widened: bool, heads: Any, tensors: list[Tensor], table: Tensor | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The layer with SDPA in its middle, in the dtype of its weights, tokens and samples in the given order."""
    x_src, x_dst, direction, mask = tensors
    inputs = {"x_src": x_src.clone().requires_grad_(), "x_dst": x_dst.clone().requires_grad_()}
    dim = heads.receive(x_dst[:, :1].detach()).shape[-1]
    order = oracle.Order.draw(number, len(x_dst), x_dst.shape[1], x_src.shape[1], dim, str(x_dst.device), widened)
    q = heads.receive(inputs["x_dst"][order.sample][:, order.dst])
    k, v = heads.send(inputs["x_src"][order.sample][:, order.src])
    added = None if table is None else order.pairs(table)
    z = oracle.sdpa(q[..., order.dim], k[..., order.dim], v, order.pairs(mask), heads.scale, added, widened=order.widened)
    out = order.restored(heads.collect(z), axis=1)
    return out, gradients_of(out, direction, inputs | plain_names(heads))


def _run_converted(case: _LayerCase, form: str, backend: Backend) -> Mapping[str, Any]:
    """A form made from the standard heads of the case, held against the formula on the standard weights."""
    device = case.settings.device
    x_src, x_dst, direction = (x.to(device, copy=True) for x in case._drawn)
    inputs = {"x_src": x_src.requires_grad_(), "x_dst": x_dst.requires_grad_()}
    heads = FORMS[form](case.heads).to(device)
    out = MessagePassingAttention(heads, backend=backend)((x_src, x_dst), case.graph_case.graph)
    return verdict(out, gradients_of(out, direction, inputs), case.truth.for_backend(backend))


def form_checks(settings: Settings) -> Iterator[Check]:
    """Conversions are exact: every form of the same heads gives what the standard formula gives (float64)."""
    if "float64" not in settings.dtypes:
        return
    for kind in KINDS:
        for graph in [name for name in LAYER_GRAPHS if name in settings.graphs]:
            case = _LayerCase(settings, GRAPHS[graph], kind, "standard", torch.float64, 1.0)
            for form in settings.forms:
                for backend in settings.backends:
                    run = bound(_run_converted, case, form, backend)
                    yield Check(
                        "forms", backend.name, "float64", f"{form} from standard, {kind}, {graph}", run, with_gradients=True
                    )


def layer_checks(settings: Settings) -> Iterator[Check]:
    """Forms x graphs x dtypes x input sizes x backends, the walk of message, aggregate and update among them."""
    ways: list[Backend | None] = [*([None] if settings.walk else []), *settings.backends]
    for dtype in settings.dtypes:
        for kind in KINDS:
            for graph in [name for name in LAYER_GRAPHS if name in settings.graphs]:
                for form in settings.forms:
                    for size in settings.sizes:
                        case = _LayerCase(settings, GRAPHS[graph], kind, form, DTYPES[dtype], size)
                        for way in ways:
                            name = "walk" if way is None else way.name
                            run = skip("the walk needs one edge list, and this graph differs by head or sample")
                            if way is not None or not case.graph_case.varies:
                                run = bound(case.run, way)
                            yield Check(
                                "layer", name, dtype, f"{form}, {kind}, {graph}, inputs x{size:g}", run, with_gradients=True
                            )
