"""The checks by name: each is an object to call, which returns a :class:`Result`.

Three groups. "attend" holds the verb against the float64 formula, forward and for every gradient, over graphs, features, dtypes
and input sizes; "layer" does so for a whole message-passing layer in every form of its weights; "rules" are the semantics that
no error bound can express (nobody heard is exactly 0, a NaN stays where it is heard, duplicates are refused, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gnn_attention import convert, patterns
from gnn_attention._shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, Feature, GraphCase
from gnn_attention.verify.measure import Truth, gradients_of, judge, worst_errors
from gnn_attention.verify.report import Result

__all__ = ["DTYPES", "FORMS", "Check", "Settings", "attend_checks", "layer_checks", "layer_truth", "rule_checks"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FORMS: dict[str, Callable[[StandardHeads], Any]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender's side": lambda heads: FactoredHeads.of(heads, "sender"),
    "merged": MergedHeads.of,
    "merged, sender's side": lambda heads: MergedHeads.of(heads, "sender"),
}

DIM, VALUE_DIM, WIDTH = 16, 12, 24
ORDERS = 8  # in which the yardstick is taken
LAYER_GRAPHS = ("causal", "window", "strict_causal", "cross", "listed", "by head")


@dataclass(frozen=True, eq=False)
class Check:
    """One named check; call it to run it. Whatever goes wrong inside it is a failure with a message, not an exception."""

    group: str
    backend: str
    dtype: str
    name: str
    run: Callable[[], Mapping[str, Any]]

    def __call__(self) -> Result:
        """Run it."""
        try:
            found = dict(self.run())
        except Exception as error:  # a crash is a failed check
            found = {"passed": False, "message": f"{type(error).__name__}: {error}"}
        return Result(self.group, self.backend, self.dtype, self.name, **found)


@dataclass(frozen=True)
class Settings:
    """What to check, and where."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = tuple(DTYPES)
    backends: tuple[Backend, ...] = tuple(BACKENDS.values())
    graphs: tuple[str, ...] = tuple(GRAPHS)
    features: tuple[str, ...] = tuple(FEATURES)
    forms: tuple[str, ...] = tuple(FORMS)
    sizes: tuple[float, ...] = (1.0, 5.0)
    walk: bool = True
    seed: int = 0


# -- attend -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _AttendCase:
    """One problem, shared by all backends: its inputs rounded to the dtype, and the truth about them."""

    settings: Settings
    graph_case: GraphCase
    feature: Feature
    dtype: torch.dtype
    size: float

    @cached_property
    def _drawn(self) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(self.settings.seed)
        graph = self.graph_case.graph
        shapes = {
            "q": (BATCH, HEADS, graph.num_dst, DIM),
            "k": (BATCH, KV_HEADS, graph.num_src, DIM),
            "v": (BATCH, KV_HEADS, graph.num_src, VALUE_DIM),
        }
        inputs = {name: torch.randn(*shape, generator=rng, dtype=torch.float64) * self.size for name, shape in shapes.items()}
        inputs |= self.feature.learned(self.graph_case, rng)
        inputs["direction"] = torch.randn(BATCH, HEADS, graph.num_dst, VALUE_DIM, generator=rng, dtype=torch.float64)
        return {name: x.to(self.dtype) for name, x in inputs.items()}

    @property
    def direction(self) -> Tensor:
        return self._drawn["direction"]

    @property
    def scale(self) -> float:
        return self.feature.scale or DIM**-0.5

    def inputs(self, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Fresh leaves holding the rounded inputs."""
        names = [name for name in self._drawn if name != "direction"]
        return {name: self._drawn[name].to(device, dtype, copy=True).requires_grad_() for name in names}

    @cached_property
    def truth(self) -> Truth:
        out, gradients = self._oracle()
        if self.dtype == torch.float64:
            return Truth(out, gradients, {})
        return Truth(out, gradients, worst_errors(map(self._yardstick, range(ORDERS)), out, gradients))

    def _yardstick(self, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        """SDPA in the dtype under test, computed in the given order; the plain formula where SDPA cannot express the feature."""
        device, graph = self.settings.device, self.graph_case.graph
        inputs = self.inputs(self.dtype, device)
        order = oracle.Order.draw(number, BATCH, graph.num_dst, graph.num_src, DIM, device)
        q, k, v, mask = inputs["q"], inputs["k"], inputs["v"], self.graph_case.mask.to(device)
        sinks = inputs.get("sink_logits")

        def modify(logits: Tensor) -> Tensor:
            return self.feature.dense(self.graph_case, inputs, logits)

        if self.feature.additive:
            added = modify(q.new_zeros(BATCH, HEADS, graph.num_dst, graph.num_src))
            out = oracle.reordered_sdpa(order, q, k, v, mask, self.scale, added, sinks)
        else:
            out = oracle.attention(q[..., order.dim], k[..., order.dim], v, mask, self.scale, modify, sinks)
        return out, gradients_of(out, self.direction.to(device), inputs)

    def _oracle(self) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = self.inputs(torch.float64, "cpu")

        def modify(logits: Tensor) -> Tensor:
            return self.feature.dense(self.graph_case, inputs, logits)

        q, k, v, sinks = inputs["q"], inputs["k"], inputs["v"], inputs.get("sink_logits")
        out = oracle.attention(q, k, v, self.graph_case.mask, self.scale, modify, sinks)
        return out, gradients_of(out, self.direction.double(), inputs)

    def run(self, backend: Backend) -> Mapping[str, Any]:
        inputs = self.inputs(self.dtype, self.settings.device)
        options = self.feature.options({name: x for name, x in inputs.items() if name not in "qkv"})
        out = attend(
            inputs["q"], inputs["k"], inputs["v"], self.graph_case.graph, scale=self.feature.scale, backend=backend, **options
        )
        gradients = gradients_of(out, self.direction.to(self.settings.device), inputs)
        return _verdict(out, gradients, self.truth)


def attend_checks(settings: Settings) -> Iterator[Check]:
    """The verb over graphs x features x dtypes x input sizes x backends."""
    for dtype in settings.dtypes:
        for graph in settings.graphs:
            for feature in settings.features:
                for size in settings.sizes:
                    case = _AttendCase(settings, GRAPHS[graph], FEATURES[feature], DTYPES[dtype], size)
                    for backend in settings.backends:
                        run = _skip("a per-edge bias has no order on a graph that differs by head or sample")
                        if not (case.feature.needs_edge_order and case.graph_case.varies):
                            run = _bound(case.run, backend)
                        yield Check("attend", backend.name, dtype, f"{graph}, {feature}, inputs x{size:g}", run)


# -- layer ------------------------------------------------------------------------------------------------------------


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
        gradients = gradients_of(out, direction, inputs | _plain_names(self.heads))
        return _verdict(out, gradients, self.truth)


def _plain_names(heads: Any) -> dict[str, Tensor]:
    return {name.removeprefix("standard."): parameter for name, parameter in heads.named_parameters()}


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
    weights = {name: p.detach().cpu().double().requires_grad_() for name, p in _plain_names(heads).items()}
    modify = None if table is None else lambda logits: logits + table.double()
    out = oracle.layer(weights, inputs["x_src"], inputs["x_dst"], mask, heads.scale, modify)
    gradients = gradients_of(out, direction.double().cpu(), inputs | weights)
    if direction.dtype == torch.float64:
        return Truth(out, gradients, {})
    on_device = [None if x is None else x.detach().to(device) for x in (x_src, x_dst, direction, mask, table)]
    attempts = (_layer_yardstick(number, heads.to(device), *on_device) for number in range(ORDERS))
    return Truth(out, gradients, worst_errors(attempts, out, gradients))


def _layer_yardstick(
    number: int, heads: Any, x_src: Tensor, x_dst: Tensor, direction: Tensor, mask: Tensor, table: Tensor | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The layer with SDPA in its middle, in the dtype of its weights, tokens and samples in the given order."""
    inputs = {"x_src": x_src.clone().requires_grad_(), "x_dst": x_dst.clone().requires_grad_()}
    dim = heads.receive(x_dst[:, :1].detach()).shape[-1]
    order = oracle.Order.draw(number, len(x_dst), x_dst.shape[1], x_src.shape[1], dim, str(x_dst.device))
    q = heads.receive(inputs["x_dst"][order.sample][:, order.dst])
    k, v = heads.send(inputs["x_src"][order.sample][:, order.src])
    z = oracle.sdpa(q[..., order.dim], k[..., order.dim], v, order.pairs(mask), heads.scale, None if table is None else order.pairs(table))
    out = order.restored(heads.collect(z), axis=1)
    return out, gradients_of(out, direction, inputs | _plain_names(heads))


def layer_checks(settings: Settings) -> Iterator[Check]:
    """Forms x graphs x dtypes x input sizes x backends, the walk of message, aggregate and update among them."""
    ways: list[Backend | None] = [*([None] if settings.walk else []), *settings.backends]
    for dtype in settings.dtypes:
        for kind in ("plain heads", "grouped heads with biases"):
            for graph in [name for name in LAYER_GRAPHS if name in settings.graphs]:
                for form in settings.forms:
                    for size in settings.sizes:
                        case = _LayerCase(settings, GRAPHS[graph], kind, form, DTYPES[dtype], size)
                        for way in ways:
                            name = "walk" if way is None else way.name
                            run = _skip("the walk needs one edge list, and this graph differs by head or sample")
                            if way is not None or not case.graph_case.varies:
                                run = _bound(case.run, way)
                            yield Check("layer", name, dtype, f"{form}, {kind}, {graph}, inputs x{size:g}", run)


# -- rules ------------------------------------------------------------------------------------------------------------


def rule_checks(settings: Settings) -> Iterator[Check]:
    """The semantics that are exact."""
    rules = {
        "nobody heard is exactly 0, lse -inf, gradients finite": _rule_deaf,
        "nobody heard is 0 with sinks and bias too": _rule_deaf_with_sinks,
        "NaN, inf and 1e4 reach only those who hear them": _rule_poison,
        "a NaN that is heard is not cleaned": _rule_nan_is_heard,
        "weights come in edge order, sum to 1 and agree with lse": _rule_weights,
        "decoding row by row equals the whole": _rule_decode,
        "edges in another order give the same output": _rule_order,
        "a sender named twice is refused, or counted once": _rule_duplicates,
    }
    for dtype in settings.dtypes:
        for backend in settings.backends:
            for name, rule in rules.items():
                yield Check("rules", backend.name, dtype, name, _bound(rule, settings, DTYPES[dtype], backend))


def _qkv(settings: Settings, dtype: torch.dtype, dst: int, src: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(settings.seed + 2)
    shapes = ((BATCH, HEADS, dst, DIM), (BATCH, KV_HEADS, src, DIM), (BATCH, KV_HEADS, src, VALUE_DIM))
    q, k, v = (torch.randn(*s, generator=rng, dtype=torch.float64).to(settings.device, dtype) for s in shapes)
    return q, k, v


def _rule_deaf(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = (x.requires_grad_() for x in _qkv(settings, dtype, 10, 13))
    graph = GRAPHS["listed"].graph
    out, info = attend(q, k, v, graph, backend=backend, return_info=True)
    plain = attend(q, k, v, graph, backend=backend)
    gradients = torch.autograd.grad(plain.float().sum(), [q, k, v])
    deaf = (graph.in_degree() == 0).to(out.device)
    silent = all((o[:, :, deaf] == 0).all() and (o[:, :, ~deaf] != 0).any() for o in (out, plain))
    minus_inf = (info.lse[:, :, deaf] == -torch.inf).all() and info.lse[:, :, ~deaf].isfinite().all()
    return {"passed": bool(silent and minus_inf and all(g.isfinite().all() for g in gradients) and deaf.any())}


def _rule_deaf_with_sinks(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = _qkv(settings, dtype, 10, 13)
    graph = GRAPHS["listed"].graph
    bias, sinks = torch.ones(graph.num_edges, dtype=dtype, device=q.device), torch.ones(HEADS, dtype=dtype, device=q.device)
    out, info = attend(q, k, v, graph, bias=bias, sink_logits=sinks, backend=backend, return_info=True)
    deaf = (graph.in_degree() == 0).to(out.device)
    return {"passed": bool((out[:, :, deaf] == 0).all() and (info.lse[:, :, deaf] == -torch.inf).all())}


def _rule_poison(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    """Poison the last tokens of a causal and a windowed graph: what the others receive, and their gradients, must not change."""
    for graph, victim in ((patterns.causal(13), 9), (patterns.window(13, 3), 2), (patterns.no_self(13), 5)):
        mask = graph.mask()
        safe = ~mask[:, victim]
        safe[victim] = False
        clean = _outputs_and_gradients(_qkv(settings, dtype, 13, 13), graph, backend, safe)
        for poison in (1e4, torch.nan, torch.inf, -torch.inf):
            q, k, v = _qkv(settings, dtype, 13, 13)
            for x in (q, k, v):
                x[:, :, victim] = poison
            found = _outputs_and_gradients((q, k, v), graph, backend, safe)
            untouched = ~mask[~safe].any(0)  # senders whom no poisoned receiver hears
            for a, b in zip(clean, found, strict=True):
                kept = safe if a is clean[0] else untouched
                if not torch.allclose(a[:, :, kept].double(), b[:, :, kept].double(), rtol=0, atol=1e-6):
                    return {"passed": False, "message": f"{poison} at token {victim} of {graph.name} reached those who do not hear it"}
    return {"passed": True}


def _outputs_and_gradients(
    qkv: tuple[Tensor, Tensor, Tensor], graph: Any, backend: Backend, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of its given rows with respect to k and v."""
    q, k, v = (x.requires_grad_() for x in qkv)
    out = attend(q, k, v, graph, backend=backend)
    g_k, g_v = torch.autograd.grad(out[:, :, rows].float().sum(), [k, v])
    return out.detach(), g_k, g_v


def _rule_nan_is_heard(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    graph = patterns.window(13, 3)
    for which in range(3):
        qkv = _qkv(settings, dtype, 13, 13)
        qkv[which][:, :, 6, 0] = torch.nan
        out = attend(*qkv, graph, backend=backend)
        hears = torch.zeros(13, dtype=torch.bool, device=out.device)
        hears[[6] if which == 0 else [6, 7, 8]] = True
        column = out.isnan().any(-1) if which == 2 else out.isnan().all(-1)
        if not (column[:, :, hears].all() and not out[:, :, ~hears].isnan().any()):
            return {"passed": False, "message": f"a NaN in {'qkv'[which]} at token 6 of window(13, 3) is not where it is heard"}
    return {"passed": True}


def _rule_weights(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    case = GRAPHS["listed"]
    q, k, v = _qkv(settings, dtype, 10, 13)
    _, info = attend(q, k, v, case.graph, backend=backend, return_info=True)
    logits = torch.einsum("bhid,bhjd->bhij", *(x.cpu().double() for x in (q, k.repeat_interleave(HEADS // KV_HEADS, 1))))
    dense = oracle.masked_softmax(logits * DIM**-0.5, case.mask)
    wanted = torch.stack([dense[:, :, dst, src] for src, dst in case.edges()], dim=-1)
    found = info.weights().cpu().double()
    sums = torch.zeros(BATCH, HEADS, 10, dtype=torch.float64).index_add(2, torch.tensor([d for _, d in case.edges()]), found)
    ones = (case.graph.in_degree() > 0).double().expand_as(sums)
    some = info.weights(torch.tensor([5, 2])).cpu().double()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    close = [torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in ((found, wanted), (sums, ones), (some, wanted[..., [5, 2]]))]
    return {"passed": all(close)}


def _rule_decode(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    tolerance = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    for name in ("causal", "window | sinks", "prefix", "tree"):
        graph = GRAPHS[name].graph
        q, k, v = _qkv(settings, dtype, 13, 13)
        whole = attend(q, k, v, graph, backend=backend)
        for start, stop in ((0, 1), (5, 8), (12, 13)):
            part = attend(q[:, :, start:stop], k, v, graph.rows(start, stop), backend=backend)
            if not torch.allclose(part.double(), whole[:, :, start:stop].double(), rtol=0, atol=tolerance):
                return {"passed": False, "message": f"rows {start} .. {stop - 1} of {name} differ from the whole"}
    return {"passed": True}


def _rule_order(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = _qkv(settings, dtype, 13, 13)
    edges = patterns.window(13, 4).edge_index
    backwards = convert.from_edge_index(edges.flip(1), 13, 13)
    bias = torch.arange(edges.shape[1], device=q.device, dtype=dtype) / 16
    a = attend(q, k, v, patterns.window(13, 4), bias=bias, backend=backend)
    b = attend(q, k, v, backwards, bias=bias.flip(0), backend=backend)
    return {"passed": torch.allclose(a.double(), b.double(), rtol=0, atol=4 * torch.finfo(dtype).eps)}


def _rule_duplicates(settings: Settings, dtype: torch.dtype, backend: Backend) -> Mapping[str, Any]:
    q, k, v = _qkv(settings, dtype, 3, 3)
    edges = torch.tensor([[0, 1, 0, 2], [1, 1, 1, 2]])
    try:
        convert.from_edge_index(edges, 3, 3)
    except ValueError:
        once = convert.from_edge_index(edges[:, [0, 1, 3]], 3, 3)
        twice = convert.from_edge_index(edges, 3, 3, coalesce=True)
        return {"passed": torch.equal(attend(q, k, v, once, backend=backend), attend(q, k, v, twice, backend=backend))}
    return {"passed": False, "message": "an edge list with a duplicate was accepted"}


# -- helpers ----------------------------------------------------------------------------------------------------------


def _verdict(out: Tensor, gradients: Mapping[str, Tensor], truth: Truth) -> Mapping[str, Any]:
    found = judge(out, gradients, truth)
    message = "" if found.passed else f"output {found.output:.3g}, gradient {found.gradient:.3g} of the yardstick"
    return {"passed": found.passed, "output": found.output, "gradient": found.gradient, "message": message}


def _bound(function: Callable[..., Mapping[str, Any]], *arguments: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: function(*arguments)


def _skip(reason: str) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"passed": False, "skipped": reason}
