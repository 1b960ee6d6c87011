"""An attention call as a value, the one argument of every backend."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch.autograd import forward_ad

from gnn_attention import edge_softmax, score_mods
from gnn_attention._support import checks, edge_checks
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends import dropout as backends_dropout
from gnn_attention.backends.edge_features import EdgeFeatures, map_by_type
from gnn_attention.edge_ops import edge_lists, operators
from gnn_attention.edge_ops.normalisers import Normaliser, check_normaliser, normalise_unsorted
from gnn_attention.graph import TokenGraph, derived, memoized
from gnn_attention.score_mods import ScoreMod


def _make_alias(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call_method(*arguments: Any, **options: Any) -> Any:
        text = f"AttentionCall.{name} is now called AttentionCall.{method.__name__}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return method(*arguments, **options)

    return call_method


@dataclass(eq=False)
class AttentionCall:
    """Arguments of :func:`gnn_attention.attend`, from which a backend computes ``out`` and ``lse``.

    A backend returns ``out [B, Hq, dst, Dv]`` and ``lse [B, Hq, dst]``; lse may be None unless ``with_lse``.
    ``bias`` is ``[B or 1, Hq or 1, E]`` in ``graph.edge_index`` order, ``sink_logits`` is ``[Hq]``. The logit
    of an edge is ``score_mod(scale * q . k) + bias``. For score_mod and dropout, the samples and heads of a
    slice are numbered from ``first_sample`` and ``first_head``. ``seed`` is the seed of dropout. With
    ``finite`` the caller promises that q, k and v are finite. Without a softmax, lse is None.
    """

    q: Float[Tensor, "batch heads dst dim"]
    k: Float[Tensor, "batch kv_heads src dim"]
    v: Float[Tensor, "batch kv_heads src value_dim"]
    graph: TokenGraph
    scale: float
    score_mod: ScoreMod | None = None
    bias: Float[Tensor, "..."] | None = None
    sink_logits: Float[Tensor, " heads"] | None = None
    dropout: float = 0.0
    with_lse: bool = False
    first_sample: int = 0
    first_head: int = 0
    seed: Int[Tensor, ""] | None = None
    finite: bool = False
    normaliser: Normaliser = "softmax"
    features: EdgeFeatures | None = None
    # The backends that ``attend`` chose for earlier calls of these shapes, dtypes and options.
    backend_names: dict[str, str] | None = field(default=None, init=False)

    @classmethod
    def from_arguments(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        graph: TokenGraph,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        bias: Tensor | None = None,
        sink_logits: Tensor | None = None,
        dropout: float = 0.0,
        with_lse: bool = False,
        finite: bool = False,
        normaliser: Normaliser = "softmax",
        edge_attr: Tensor | None = None,
        edge_key: Tensor | None = None,
        edge_value: Tensor | None = None,
        edge_type: Tensor | None = None,
    ) -> AttentionCall:
        """Check the arguments of ``attend`` and return the call; raise TypeError or ValueError."""
        if type(dropout) is not float or dropout != 0.0:
            dropout = checks.probability("dropout", dropout)
        if type(finite) is not bool:
            raise TypeError(f"finite must be True or False, got {checks.describe_type(finite)}")
        if normaliser != "softmax":
            normaliser = check_normaliser(normaliser)
        name = normaliser if isinstance(normaliser, str) else "a function"
        are_missing = score_mod is None, bias is None, sink_logits is None, edge_attr is None
        options = with_lse, dropout == 0.0, name, *are_missing
        key = _cache_key(q, k, v, options) if type(graph) is TokenGraph else None
        backend_names = None if key is None else graph._memo.data.get(key)
        if backend_names is None:
            _check_tensors(q, k, v)
            _check_graph(graph, q, k)
            backend_names = None if key is None else graph._memo.data.setdefault(key, {})
        features = None
        if edge_attr is not None:
            features = EdgeFeatures.from_arguments(edge_attr, edge_key, edge_value, edge_type, graph, k, v)
        elif edge_type is not None:
            mod, num_src = score_mod, graph.num_src
            # The senders of an edge are repeated for each type.
            score_mod = mod and (lambda score, b, h, dst, src: mod(score, b, h, dst, src % num_src))
            graph, k, v = map_by_type(edge_key, edge_value, edge_type, graph, k, v)
            if key is not None:
                backend_names = graph._memo.data.setdefault(key, {})
        elif edge_key is not None or edge_value is not None:
            raise ValueError("edge_key and edge_value need edge_attr or edge_type, got neither")
        if k.shape[0] != q.shape[0]:
            k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
        if score_mod is not None:
            is_empty = not torch.compiler.is_compiling() and not (q.numel() and k.numel())
            if q.is_meta or is_empty:
                score_mod = score_mods.check_score_mod(score_mod)
            else:
                score_mod = score_mods.fit_score_mod(score_mod, (graph.dst_offset, graph.src_offset), q)
        if sink_logits is not None:
            edge_checks.floats_like("sink_logits", sink_logits, "[Hq]", q)
            if normaliser != "softmax":
                raise ValueError(f"sink_logits need normaliser='softmax', got {normaliser!r}")
            if tuple(sink_logits.shape) != (q.shape[1],):
                raise ValueError(f"sink_logits must be [Hq] = [{q.shape[1]}], got {list(sink_logits.shape)}")
        scale = float(q.shape[-1] ** -0.5) if scale is None else scale
        scale = scale if type(scale) is float and abs(scale) < math.inf else _check_scale(scale)
        # The sign of the scale moves into q: kernels that scale after masking would turn -inf into +inf.
        q = q if scale > 0 else q * (-1.0 if scale else 0.0)
        bias = None if bias is None else _check_bias(bias, graph, q)
        call = cls(q, k, v, graph, abs(scale) or 1.0, score_mod, bias, sink_logits, dropout, with_lse)
        call.seed = backends_dropout.draw_seed(q.device) if dropout else None
        call.finite, call.normaliser, call.features = finite, normaliser, features
        call.backend_names = backend_names
        return call

    def apply_score_mod(self, score: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """Apply the score_mod to ``score [B, Hq, ...]`` for local dst and src, and check the result."""
        if self.score_mod is None:
            return score
        b, h = backends_dropout.sample_and_head(score, self.first_sample, self.first_head)
        result = self.score_mod(score, b, h, dst + self.graph.dst_offset, src + self.graph.src_offset)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            kind = f"{result.dtype} tensor" if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(f"score_mod must return a float tensor, the new scores, got a {kind}")
        sizes = zip(result.shape[::-1], score.shape[::-1], strict=False)
        if result.dim() > score.dim() or any(size not in (1, expected) for size, expected in sizes):
            raise ValueError(
                f"score_mod must return a tensor that broadcasts to score, {list(score.shape)}, "
                f"got {list(result.shape)}"
            )
        return result.to(score.dtype).expand(score.shape)

    def apply_dropout(self, weights: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """Apply dropout to ``weights [B, Hq, ...]`` for local dst and src."""
        if not self.dropout:
            return weights
        dst = dst + self.graph.dst_offset
        src = src + self.graph.src_offset
        return backends_dropout.drop_weights(
            weights, self.seed, self.dropout, dst, src, self.first_sample, self.first_head
        )

    def normalise(
        self, logits: Float[Tensor, "... heads edges"], dst: Int[Tensor, " edges"], num_dst: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weights of edges to receivers ``dst``, in any order, and lse for a softmax."""
        if self.normaliser == "softmax":
            return edge_softmax.softmax(logits, dst, num_dst, self.sink_logits, check=False)
        values = logits.reshape(*self.q.shape[:2], len(dst))
        return normalise_unsorted(self.normaliser, values, dst, num_dst).view(logits.shape), None

    def with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``sink_logits``, if there are any, to every softmax of a result."""
        if self.sink_logits is None:
            return out, lse
        return edge_softmax.add_sinks(out, lse, self.sink_logits, self.has_in_edges)

    @property
    def has_in_edges(self) -> Bool[Tensor, "..."]:
        """True at receivers that have in-edges; broadcastable to lse."""
        mask: Tensor = memoized(_has_in_edges, self.graph, self.q.device)[0]
        return mask

    def scores(self, pairs: Int[Tensor, "2 pairs"]) -> Float[Tensor, "batch heads pairs"]:
        """Compute ``score_mod(scale * q . k)`` of pairs ``(src, dst)``, in float32 or better."""
        dtype, (src, dst) = edge_softmax.accumulation_dtype(self.q.dtype), pairs
        q, k = self.q.to(dtype), self.k.to(dtype)
        if not are_eager((q, k, pairs)):
            # A compiler fuses the sum with both copies.
            k = edge_softmax.per_query_head(k, q.shape[1]).index_select(2, src)
            return self.apply_score_mod(edge_softmax.logit(q.index_select(2, dst), k, self.scale), dst, src)
        order = (dst * k.shape[2] + src).argsort()
        edges = edge_lists.sort_edges(src[order], dst[order], k.shape[2], q.shape[2])
        products = operators.products(q, k, edges.tensors, self.scale)
        return self.apply_score_mod(operators.permute(products, [order.argsort(), order]), dst, src)

    def merge_parallel_edges(self) -> AttentionCall:
        """Replace m parallel edges by one edge with ``log m`` added to its score."""
        graph, log_mod = memoized(derived.merge_parallel_edges, self.graph)
        score_mod = log_mod if self.score_mod is None else score_mods.chain(self.score_mod, log_mod)
        return replace(self, graph=graph, score_mod=score_mod)

    @property
    def is_plain(self) -> bool:
        has_options = self.bias is not None or self.features is not None or self.dropout
        return self.score_mod is None and self.normaliser == "softmax" and not has_options

    def slices(self) -> list[list[AttentionCall]]:
        """Split the call along the axes by which the graph differs; :func:`join_slices` joins the results."""
        batch, heads = self.q.shape[:2]
        samples = [None] if self.graph.batch is None else range(batch)
        head_indices = [None] if self.graph.heads is None else range(heads)
        return [[self.select(b, h) for h in head_indices] for b in samples]

    def select(self, b: int | None, h: int | None) -> AttentionCall:
        """Return the call of sample b and head h (None: all of them), on that slice of the graph."""
        group_size = self.q.shape[1] // self.k.shape[1]
        samples = slice(None) if b is None else slice(b, b + 1)
        heads = slice(None) if h is None else slice(h, h + 1)
        kv_heads = slice(None) if h is None else slice(h // group_size, h // group_size + 1)
        bias = None if self.bias is None else self.bias.expand(*self.q.shape[:2], -1)[samples, heads]
        return replace(
            self,
            q=self.q[samples, heads],
            k=self.k[samples, kv_heads],
            v=self.v[samples, kv_heads],
            graph=edge_lists.select_slice(self.graph, b or 0, h or 0),
            bias=bias,
            sink_logits=None if self.sink_logits is None else self.sink_logits[heads],
            features=self.features and self.features.select_heads(kv_heads),
            first_sample=self.first_sample + (b or 0),
            first_head=self.first_head + (h or 0),
        )

    # This release keeps the names that the methods had in 0.2.0.
    checked = classmethod(_make_alias("checked", from_arguments.__func__))  # type: ignore[attr-defined]
    modified = _make_alias("modified", apply_score_mod)
    dropped = _make_alias("dropped", apply_dropout)
    parts = _make_alias("parts", slices)
    part = _make_alias("part", select)


def _has_in_edges(graph: TokenGraph, device: torch.device) -> tuple[Tensor]:
    pointers = graph.edges.pointers()
    if pointers is None:
        return ((graph.in_degree() > 0).to(device),)
    has_in_edges = (pointers[0].to(device).diff() > 0).view(graph.shape4[:3])
    if graph.batch is None:
        has_in_edges = has_in_edges[0] if graph.heads is not None else has_in_edges[0, 0]
    return (has_in_edges,)


def are_eager(tensors: Iterable[Tensor | None]) -> bool:
    """True if the tensors have values, and no compiler, mode, transform or dual level is active."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:
        if x is not None and (type(x) is not Tensor or x.is_meta):
            return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    is_dual = torch.autograd.forward_ad._current_level >= 0
    return not modes and not is_dual and torch._C._get_tracing_state() is None


def any_needs_gradients(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def token_major(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor ``[B, H, T, width]`` that is laid out in memory as ``[B, T, H, width]``."""
    batch, heads, tokens, _ = like.shape
    # If a Function with several results returned a view, autograd would forbid writing into it.
    strides = tokens * heads * width, width, heads * width, 1
    return like.new_empty_strided((batch, heads, tokens, width), strides, dtype=dtype or like.dtype)


def join_slices(rows: Sequence[Sequence[tuple[Tensor, Tensor | None]]]) -> tuple[Tensor, Tensor | None]:
    """Join the results of :meth:`AttentionCall.slices`; lse is None if a slice has none."""
    out = torch.cat([torch.cat([out for out, _ in row], 1) for row in rows], 0)
    if any(lse is None for row in rows for _, lse in row):
        return out, None
    lses = [[lse for _, lse in row if lse is not None] for row in rows]
    return out, torch.cat([torch.cat(row, 1) for row in lses], 0)


def _cache_key(q: Any, k: Any, v: Any, options: tuple[object, ...]) -> tuple[Any, ...] | None:
    """Return the key under which the graph caches the checks of a call, or None if they are not cached."""
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor:
        return None
    sizes = q.shape, k.shape, v.shape
    kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    may_be_forward_mode = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return _cache_key, may_be_forward_mode, options, *sizes, *kinds


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    layouts = {"q": "[B, Hq, dst, D]", "k": "[B, Hkv, src, D]", "v": "[B, Hkv, src, Dv]"}
    for (name, layout), x in zip(layouts.items(), (q, k, v), strict=True):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            edge_checks.floats(name, x, layout)
        if x.dim() != 4:
            raise ValueError(f"{name} must be {layout}, got shape {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} must be like q ({q.dtype} on {q.device}), got {x.dtype} on {x.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in [B, Hkv, src], got {list(k.shape)} and {list(v.shape)}")
    if q.shape[3] == 0:
        raise ValueError(f"q must have at least one channel (D), got shape {list(q.shape)}")
    if k.shape[0] not in (1, q.shape[0]) or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must agree in B and D (k may have B = 1), got {list(q.shape)} and {list(k.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's heads, got {q.shape[1]} and {k.shape[1]}")


def _check_graph(graph: TokenGraph, q: Tensor, k: Tensor) -> None:
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"graph must be a TokenGraph, got {type(graph).__name__}; see gnn_attention.convert")
    if (graph.num_dst, graph.num_src) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"{graph!r} does not fit q with {q.shape[2]} receivers and k with {k.shape[2]} senders; "
            "for a range of receivers of a longer graph use graph.rows(start, stop)"
        )
    for axis, expected, size in (("heads", graph.heads, q.shape[1]), ("batch", graph.batch, q.shape[0])):
        if expected is not None and expected != size:
            raise ValueError(f"{graph!r} has {axis}={expected}, but q has {axis}={size}")


def _check_scale(scale: float) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(
            f"scale must be a number or None, got {type(scale).__name__}; a learned scale would "
            "lose its gradient: multiply q by it and pass scale=1.0"
        )
    if not abs(scale) < math.inf:
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _check_bias(bias: Tensor, graph: TokenGraph, q: Tensor) -> Tensor:
    edge_checks.floats_like("bias", bias, "broadcastable to [B, Hq, E]", q)
    # This raises an error if each sample or head has its own edge list.
    graph.edges_on(torch.device("cpu"))
    expected = [q.shape[0], q.shape[1], graph.num_edges]
    shape = (1,) * (3 - bias.dim()) + tuple(bias.shape)
    if len(shape) != 3 or any(size not in (1, full) for size, full in zip(shape, expected, strict=True)):
        raise ValueError(f"bias must be broadcastable to [B, Hq, E] = {expected}, got {list(bias.shape)}")
    return bias.view(shape).expand(-1, -1, graph.num_edges)
