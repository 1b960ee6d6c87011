"""One call of attention as a value: what every backend is given, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from typing_extensions import deprecated

from gnn_attention import edge_softmax, score_mods
from gnn_attention._support import checks, edge_checks
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends import dropout as backends_dropout
from gnn_attention.graph import TokenGraph, derived, memoized
from gnn_attention.score_mods import ScoreMod

# bytes of the queries that are gathered together: the allocator keeps a tensor of this size for the next step
GATHERED_BYTES = 2**22
# edges whose queries are gathered together in a compiled program, where each part is code of its own
COMPILED_EDGES = 2**16


@dataclass(eq=False)
class AttentionCall:
    """Arguments of :func:`gnn_attention.attend`; ``out [B, Hq, dst, Dv]`` and ``lse [B, Hq, dst]`` are due.

    ``bias`` is ``[B or 1, Hq or 1, E]`` in ``graph.edge_index`` order, ``sink_logits`` is ``[Hq]``. The logit
    of an edge is ``score_mod(scale * q . k) + bias``. Without ``with_lse`` a backend may return None for lse.
    ``first_sample`` and ``first_head`` number the first sample and head for score_mod and dropout, where the
    call is a part of another; ``seed`` is that of dropout (``backends.dropout``). ``finite``: the caller
    promises that q, k and v are.
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
    # what a call of these shapes, dtypes, devices and options is given to, by ``backend``, where checked
    chosen: dict[str, str] | None = field(default=None, init=False)

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
    ) -> AttentionCall:
        """The call with these arguments of ``attend``; TypeError or ValueError for one that does not fit."""
        if type(dropout) is not float or dropout != 0.0:
            dropout = checks.probability("dropout", dropout)
        if type(finite) is not bool:
            raise TypeError(f"finite must be True or False, got {checks.describe_type(finite)}")
        plain = score_mod is None, bias is None, sink_logits is None, dropout == 0.0
        key = _key(q, k, v, with_lse, *plain) if type(graph) is TokenGraph else None
        chosen = None if key is None else graph._memo.data.get(key)
        if chosen is None:
            _check_tensors(q, k, v)
            _check_graph(graph, q, k)
            chosen = None if key is None else graph._memo.data.setdefault(key, {})
        if k.shape[0] != q.shape[0]:
            k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
        if score_mod is not None:
            is_empty = not torch.compiler.is_compiling() and not (q.numel() and k.numel())
            if q.is_meta or is_empty:
                score_mod = score_mods.check_score_mod(score_mod)
            else:
                score_mod = score_mods.fit_score_mod(score_mod, (graph.dst_offset, graph.src_offset), q)
        if sink_logits is not None:
            _check_floats("sink_logits", sink_logits, "[Hq]", q)
            if tuple(sink_logits.shape) != (q.shape[1],):
                got = list(sink_logits.shape)
                raise ValueError(f"sink_logits must be [Hq] = [{q.shape[1]}], got {got}")
        scale = float(q.shape[-1] ** -0.5) if scale is None else scale
        number = scale if type(scale) is float and abs(scale) < math.inf else _checked_scale(scale)
        call = cls(
            # kernels that scale after masking would make +inf or NaN of -inf: the sign goes to q
            q=q if number > 0 else q * (-1.0 if number else 0.0),
            k=k,
            v=v,
            graph=graph,
            scale=abs(number) or 1.0,
            score_mod=score_mod,
            bias=None if bias is None else _checked_bias(bias, graph, q),
            sink_logits=sink_logits,
            dropout=dropout,
            with_lse=with_lse,
            seed=backends_dropout.draw_seed(q.device) if dropout else None,
            finite=finite,
        )
        call.chosen = chosen
        return call

    def apply_score_mod(self, score: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """``score [B, Hq, ...]`` after the score_mod, at local dst and src; errors for what is no score."""
        if self.score_mod is None:
            return score
        b, h = backends_dropout.sample_and_head(score, self.first_sample, self.first_head)
        changed = self.score_mod(score, b, h, dst + self.graph.dst_offset, src + self.graph.src_offset)
        return _checked_scores(changed, score)

    def apply_dropout(self, weights: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """``weights [B, Hq, ...]`` after dropout, at local dst and src."""
        ends = dst + self.graph.dst_offset, src + self.graph.src_offset
        first = self.first_sample, self.first_head
        return backends_dropout.drop_weights(weights, self.seed, self.dropout, *ends, *first)

    def with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The result with ``sink_logits`` in every softmax, if there are any."""
        if self.sink_logits is None:
            return out, lse
        return edge_softmax.add_sinks(out, lse, self.sink_logits, self.has_in_edges)

    @property
    def has_in_edges(self) -> Bool[Tensor, "..."]:
        """Which receivers have in-edges, broadcastable to lse."""
        found: Tensor = memoized(_has_in_edges, self.graph, self.q.device)[0]
        return found

    def scores(self, pairs: Int[Tensor, "2 pairs"]) -> Float[Tensor, "batch heads pairs"]:
        """``score_mod(scale * q . k)`` of any pairs ``(src, dst)``, edges or not; in float32 or better."""
        wide, at_once = edge_softmax.accumulation_dtype(self.q.dtype), COMPILED_EDGES
        if not torch.compiler.is_compiling():
            # The gradient of each part is a tensor like q or k: with gradients at least one edge a token.
            least = max(self.q.shape[2], self.k.shape[2]) if any_needs_gradients((self.q, self.k)) else 1
            of_edge = self.q[:, :, :1].numel() * wide.itemsize
            at_once = max(least, GATHERED_BYTES // max(1, of_edge))

        def gather(src: Tensor, dst: Tensor) -> Tensor:
            k = edge_softmax.per_query_head(self.k.to(wide), self.q.shape[1])
            # The gradients of index_select are summed in one order.
            q = self.q.to(wide).index_select(2, dst)
            return self.apply_score_mod(edge_softmax.logit(q, k.index_select(2, src), self.scale), dst, src)

        # For gradients the gathered ends are computed again, not saved.
        parts = torch.split(pairs, at_once, dim=1)
        return torch.cat([recompute(gather, *part) for part in parts], dim=-1)

    def merge_parallel_edges(self) -> AttentionCall:
        """The call without parallel edges: an edge that stands m times has ``log m`` added to its score."""
        graph, log_count = memoized(derived.merge_parallel_edges, self.graph)
        score_mod = log_count if self.score_mod is None else score_mods.chain(self.score_mod, log_count)
        return replace(self, graph=graph, score_mod=score_mod)

    @property
    def is_plain(self) -> bool:
        return self.score_mod is None and self.bias is None and not self.dropout

    def parts(self) -> list[list[AttentionCall]]:
        """A call on a plain graph for each sample and head by which the graph differs, for :func:`joined`."""
        graph, (batch, heads) = self.graph, self.q.shape[:2]
        samples = [None] if graph.batch is None else range(batch)
        numbers = [None] if graph.heads is None else range(heads)
        return [[self.part(b, h) for h in numbers] for b in samples]

    def part(self, b: int | None, h: int | None) -> AttentionCall:
        """One sample, one head or both, on its own graph, with the key/value head that serves it."""
        group = self.q.shape[1] // self.k.shape[1]
        samples = slice(None) if b is None else slice(b, b + 1)
        heads = slice(None) if h is None else slice(h, h + 1)
        kv_heads = slice(None) if h is None else slice(h // group, h // group + 1)
        bias = None if self.bias is None else self.bias.expand(*self.q.shape[:2], -1)[samples, heads]
        return replace(
            self,
            q=self.q[samples, heads],
            k=self.k[samples, kv_heads],
            v=self.v[samples, kv_heads],
            graph=one_of(self.graph, b or 0, h or 0),
            bias=bias,
            sink_logits=None if self.sink_logits is None else self.sink_logits[heads],
            first_sample=self.first_sample + (b or 0),
            first_head=self.first_head + (h or 0),
        )

    # The names of these methods before 0.3, for this release.
    @classmethod
    @deprecated("AttentionCall.checked is now called AttentionCall.from_arguments")
    def checked(cls, *arguments: Any, **options: Any) -> AttentionCall:
        """The old name of :meth:`from_arguments`."""
        return cls.from_arguments(*arguments, **options)

    @deprecated("call.modified is now called call.apply_score_mod")
    def modified(self, score: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """The old name of :meth:`apply_score_mod`."""
        return self.apply_score_mod(score, dst, src)

    @deprecated("call.dropped is now called call.apply_dropout")
    def dropped(self, weights: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """The old name of :meth:`apply_dropout`."""
        return self.apply_dropout(weights, dst, src)


def _has_in_edges(graph: TokenGraph, device: torch.device) -> tuple[Tensor]:
    """Put on the device once: a copy in every call would wait for it."""
    pointers = graph.edges.pointers()
    if pointers is None:
        return ((graph.in_degree() > 0).to(device),)
    has_in_edges = (pointers[0].to(device).diff() > 0).view(graph.shape4[:3])
    if graph.batch is None:
        has_in_edges = has_in_edges[0] if graph.heads is not None else has_in_edges[0, 0]
    return (has_in_edges,)


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """True where an operator would have nothing to add: eager tensors, outside of modes and transforms."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        if x is not None and (type(x) is not Tensor or x.is_meta):
            return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return not modes and not transformed and torch._C._get_tracing_state() is None


def any_needs_gradients(tensors: Iterable[Tensor | None]) -> bool:
    """True where a derivative may be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def token_major(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty ``[B, H, T, width]`` whose memory is ``[B, T, H, width]``, as projections make and take it."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)


def join_slices(rows: Sequence[Sequence[tuple[Tensor, Tensor | None]]]) -> tuple[Tensor, Tensor | None]:
    """The result of a call from those of its parts; lse None where a part has none."""
    out = torch.cat([torch.cat([out for out, _ in row], 1) for row in rows], 0)
    if any(lse is None for row in rows for _, lse in row):
        return out, None
    lses = [[lse for _, lse in row if lse is not None] for row in rows]
    return out, torch.cat([torch.cat(row, 1) for row in lses], 0)


def one_of(graph: TokenGraph, batch: int, head: int) -> TokenGraph:
    """``graph.select(batch, head)``, cached with the graph, and so is what is computed about it."""
    if graph.batch is None and graph.heads is None:
        return graph
    memoized(_select_parts, graph)
    part: TokenGraph = graph._slices[batch if graph.batch else 0][head if graph.heads else 0]
    return part


def _select_parts(graph: TokenGraph) -> bool:
    # a compiled program, which cannot have a graph as a constant, reads them there
    parts = [[graph.select(b, h) for h in range(graph.heads or 1)] for b in range(graph.batch or 1)]
    graph._slices[:] = parts
    return True


def _key(q: Any, k: Any, v: Any, *options: bool) -> tuple[Any, ...] | None:
    """By what their checks are cached with the graph; None for what must be checked each time."""
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor:
        return None
    sizes = q.shape, k.shape, v.shape
    return _key, options, *sizes, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    axes_of = {"q": "[B, Hq, dst, D]", "k": "[B, Hkv, src, D]", "v": "[B, Hkv, src, Dv]"}
    for (name, axes), x in zip(axes_of.items(), (q, k, v), strict=True):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            edge_checks.floats(name, x, axes)
        if x.dim() != 4:
            raise ValueError(f"{name} must be {axes}, got shape {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} must be like q ({q.dtype} on {q.device}), got {x.dtype} on {x.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in [B, Hkv, src], got {list(k.shape)} and {list(v.shape)}")
    if q.shape[3] == 0:
        raise ValueError(f"q must have at least one channel (D), got shape {list(q.shape)}")
    if k.shape[0] not in (1, q.shape[0]) or q.shape[3] != k.shape[3]:
        got = f"{list(q.shape)} and {list(k.shape)}"
        raise ValueError(f"q and k must agree in B and D, or k have B = 1, got {got}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        got = f"{q.shape[1]} and {k.shape[1]}"
        raise ValueError(f"the heads of q must be a multiple of the heads of k, got {got}")


def _check_graph(graph: TokenGraph, q: Tensor, k: Tensor) -> None:
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"graph must be a TokenGraph, got {type(graph).__name__}; see gnn_attention.convert")
    if (graph.num_dst, graph.num_src) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"{graph!r} does not fit q with {q.shape[2]} receivers and k with {k.shape[2]} senders; "
            "for some receivers of a longer graph take graph.rows(start, stop)"
        )
    for word, size, got in (("heads", graph.heads, q.shape[1]), ("batch", graph.batch, q.shape[0])):
        if size is not None and size != got:
            raise ValueError(f"{graph!r} differs by {word} ({size}), but q has {word} {got}")


def _checked_scale(scale: float) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(
            f"scale must be a number or None, got {type(scale).__name__}; a scale that is learned would lose "
            "its gradient: multiply q by it and give scale=1.0"
        )
    if not abs(scale) < math.inf:
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _checked_scores(changed: object, score: Tensor) -> Tensor:
    """What a score_mod returned, in shape and dtype of the ``score`` it was given."""
    if not isinstance(changed, Tensor) or not changed.is_floating_point():
        got = f"{changed.dtype} tensor" if isinstance(changed, Tensor) else type(changed).__name__
        raise TypeError(f"score_mod must return a float tensor, the new scores, got a {got}")
    sizes = zip(changed.shape[::-1], score.shape[::-1], strict=False)
    if changed.dim() > score.dim() or any(got not in (1, want) for got, want in sizes):
        raise ValueError(
            f"score_mod must return a shape that broadcasts to that of score, {list(score.shape)}, "
            f"got {list(changed.shape)}"
        )
    return changed.to(score.dtype).expand(score.shape)


def _checked_bias(bias: Tensor, graph: TokenGraph, q: Tensor) -> Tensor:
    _check_floats("bias", bias, "broadcastable to [B, Hq, E]", q)
    # refused by name where there is no single list of edges
    graph.edges_on(torch.device("cpu"))
    count = graph.num_edges
    wanted = (q.shape[0], q.shape[1], count)
    shape = (1,) * (3 - bias.dim()) + tuple(bias.shape)
    if len(shape) != 3 or any(got not in (1, want) for got, want in zip(shape, wanted, strict=True)):
        raise ValueError(f"bias must be broadcastable to [B, Hq, E] = {list(wanted)}, got {list(bias.shape)}")
    return bias.view(shape).expand(-1, -1, count)


def _check_floats(name: str, x: Tensor, axes: str, q: Tensor) -> None:
    edge_checks.floats(name, x, axes)
    if x.device != q.device:
        wanted = f"the device of q, {q.device}"
        raise ValueError(f"{name} must be on {wanted}, got {x.device}; use {name}.to(q.device)")
