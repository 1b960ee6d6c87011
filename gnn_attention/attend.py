"""Attention along the edges of a token graph: :func:`attend` and :class:`AttentionInfo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support import checks, devices, memory
from gnn_attention._support.dynamo import eager_mode
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends import BACKENDS, Backend, RefusalError, dense, dispatch, nonfinite, rows
from gnn_attention.backends.call import AttentionCall, join_slices
from gnn_attention.backends.dispatch import Explanation, explain
from gnn_attention.edge_ops.normalisers import Normaliser
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import ScoreMod

__all__ = ["AttentionInfo", "Explanation", "attend", "explain", "list_backends"]

# A graph remembers at most MAX_CHOICES backends for calls of the same shapes and options.
MAX_CHOICES = 2**10
Result = tuple[Tensor, Any]


def attend(
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "#batch kv_heads src dim"],
    v: Float[Tensor, "#batch kv_heads src value_dim"],
    graph: TokenGraph,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    bias: Float[Tensor, "..."] | None = None,
    sink_logits: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    backend: str | Backend = "auto",
    return_info: bool = False,
    finite: bool = False,
    normaliser: Normaliser = "softmax",
    edge_attr: Float[Tensor, "edges features"] | None = None,
    edge_key: Float[Tensor, "... kv_heads _ dim"] | None = None,
    edge_value: Float[Tensor, "... kv_heads _ _"] | None = None,
    edge_type: Int[Tensor, " edges"] | None = None,
) -> Any:
    """Compute one round of attention along the edges of ``graph``.

    ``out_dst = sum of w_e v_src`` over the in-edges ``e = src -> dst``, with weights
    ``w = softmax over the in-edges of dst of (score_mod(scale * q_dst . k_src) + bias_e)``.
    Products are in the dtype of q, even under ``torch.autocast``, and sums in float32 or better.

    Args:
        q: one query for each receiver and head, ``[B, Hq, dst, D]``.
        k: keys of the senders, ``[B or 1, Hkv, src, D]``; Hq is a multiple of Hkv (grouped heads).
        v: values of the senders, ``[B or 1, Hkv, src, Dv]``, with the batch size of k.
        graph: edges from ``num_src`` senders (rows of k, v) to ``num_dst`` receivers (rows of q).
        scale: multiplies every ``q . k``; None means ``1 / sqrt(D)``.
        score_mod: ``score_mod(score, b, h, dst, src) -> score``; see ``gnn_attention.score_mods``.
        bias: a number for each edge in ``graph.edge_index`` order, broadcastable to ``[B, Hq, E]``.
        sink_logits: ``[Hq]``; each head adds ``exp(sink_logit)`` to its softmax denominators.
        dropout: probability of dropping a weight. Dropout is always applied: pass 0 in evaluation.
        backend: "auto" (see :func:`explain`), a name in ``list_backends()`` or a :class:`Backend`.
        return_info: also return an :class:`AttentionInfo`, which has lse, weights and logits.
        finite: True promises that q, k and v contain no NaN or inf, and skips the check for them.
            On a GPU, in compiled programs and under ``torch.func`` there is no such check.
        normaliser: computes weights from logits: "softmax", "sparsemax", "sigmoid", "silu", "gelu",
            "relu", "relu2", "identity", or a function of logits ``[B, H, E]``, in the order of
            ``graph.edge_index``; see ``gnn_attention.edge_ops.normalisers``.
        edge_attr: features ``a [E, F]`` of each edge, which add to its key and value.
        edge_key: ``W_k [Hkv, F, D]``: the key of an edge is ``k_src + a_e W_k``.
        edge_value: ``W_v [Hkv, F, Dv]``: the value of an edge is ``v_src + a_e W_v``.
        edge_type: the type of each edge, int64 ``[E]``, which selects a map from ``[types, Hkv, F, D]``.
            Without ``edge_attr`` the key is ``k_src W_k[type]``, and the value ``v_src W_v[type]``.

    Returns:
        ``out [B, Hq, dst, Dv]`` in q's dtype, exactly 0 for isolated receivers, or ``(out, info)``.

    Raises:
        ValueError, TypeError: the arguments do not fit together, or the backend is unknown.
        RefusalError: the named backend does not support the call; no other backend is tried.

    >>> from gnn_attention import patterns
    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> attend(x, x, x, patterns.strict_causal(3), scale=0.0)[0, 0].tolist()
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    options = scale, score_mod, bias, sink_logits, dropout, return_info, finite, normaliser
    edges = edge_attr, edge_key, edge_value, edge_type
    call = AttentionCall.from_arguments(q, k, v, graph, *options, *edges)
    out, lse = run_attention(call, backend)
    return (out, AttentionInfo(call, lse)) if return_info else out


def run_attention(call: AttentionCall, backend: str | Backend, graph_is_temporary: bool = False) -> Result:
    """Run a call on a backend and return ``(out, lse or None)``.

    Pass ``graph_is_temporary`` if the graph is used only once: "auto" then considers only its size.
    """
    run: Callable[[AttentionCall], Result] | None
    run = None if type(call.graph) is TokenGraph else call.graph.runner(backend)
    if run is None:
        by_size_alone = graph_is_temporary and backend == "auto"
        choice = dispatch.choose_by_size(call) if by_size_alone else _choose_backend(backend, call)
        run = partial(_run_backend, choice)
        # On a GPU "auto" replaces a backend whose kernel cannot be compiled or launched.
        if backend == "auto" and call.q.device.type in devices.ASYNCHRONOUS:
            run = partial(dispatch.run_or_replace, _run_backend, choice)
        if choice.capabilities.visits_non_edges and isinstance(backend, str) and not call.finite:
            run = partial(nonfinite.contain, run)
    device = call.q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return run(call)
    # Under autocast a backend would compute products in a narrower dtype than that of q.
    with torch.autocast(device, enabled=False):
        return run(call)


def run_and_merge(call: AttentionCall, parts: Sequence[AttentionCall], backend: str | Backend) -> Result:
    """Run parts, each with some of the edges of ``call``, and merge their results into ``(out, lse)``."""
    results = []
    for part in parts:
        sinkless_part = replace(part, sink_logits=None, with_lse=True)
        out, lse = run_attention(sinkless_part, backend)
        lse = AttentionInfo(sinkless_part, lse).lse
        results.append((out.to(lse.dtype), lse))
    out, lse = reduce(lambda first, second: edge_softmax.merge(*first, *second), results)
    out, lse = call.with_sinks(out, lse)
    return out.to(call.q.dtype), lse


def _choose_backend(backend: str | Backend, call: AttentionCall) -> Backend:
    """Choose the backend of a call, and remember it for calls of the same shapes and options."""
    choices = call.backend_names if isinstance(backend, str) else None
    # In a backward pass this id is not -1, and checkpointing may run a call again. The second run must
    # use the backend of the first, even if memory is short now, so that it saves the same tensors.
    if choices and torch._C._current_graph_task_id() != -1:
        name = choices.get(_recomputation_key(backend, call))
        if name is not None:
            return BACKENDS[name]
    if choices and backend in choices:
        return BACKENDS[choices[str(backend)]]
    is_first = backend == "auto" and dispatch.is_first_call(call)
    if backend == "auto":
        choice = dispatch.choose(call)
        if is_first:
            call.graph.count_call()
    else:
        backend = check_backend(backend)
        choice = BACKENDS[backend] if isinstance(backend, str) else backend
        reason = choice.unsupported_reason(call)
        if reason is not None:
            raise RefusalError(
                f"backend {choice.name!r} does not support this call on {call.graph!r}: {reason}", reason
            )
    if choices is not None and choice.capabilities.cached:
        # A choice that may not suit later calls is remembered only for the recomputation of this call.
        needs_few_bytes = choice.bytes_needed is None or choice.bytes_needed(call) <= memory.MIN_CHECK_BYTES
        key = str(backend) if needs_few_bytes and not is_first else _recomputation_key(backend, call)
        if key:
            choices[key] = choice.name
        if len(choices) > MAX_CHOICES:
            choices.pop(next(iter(choices)))
    return choice


def _recomputation_key(backend: str | Backend, call: AttentionCall) -> str:
    """Return a key that a call shares only with its recomputation, or "" if q cannot be read."""
    # Inside torch.func no value can be read, and reading one on a GPU would wait for the device.
    if call.q.device.type != "cpu" or torch._C._are_functorch_transforms_active():
        return ""
    # Different calls have different queries. The sample spans all tokens, as the last may be padding.
    with eager_mode():
        query_sample = call.q.detach()[:, :, :: max(1, call.q.shape[2] // 64)]
        return f"{backend} of {float(query_sample.sum()).hex()}"


def _run_backend(backend: Backend, call: AttentionCall) -> Result:
    """Run a backend, slice by slice if the graph varies and the backend computes one graph at a time."""
    if call.graph.edges.has_parallel_edges and backend.capabilities.parallel_edges == "merged":
        call = call.merge_parallel_edges()
    varies = call.graph.batch is not None or call.graph.heads is not None
    if varies and not backend.capabilities.varying_graphs:
        return join_slices([[_run_backend(backend, part) for part in row] for row in call.slices()])
    result = backend.run(call)
    if BACKENDS.get(backend.name) is backend:
        return result
    # A backend from outside the library may return anything, so its result is checked.
    out, lse = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    if not isinstance(out, Tensor) or not (lse is None or isinstance(lse, Tensor)):
        raise TypeError(f"backend {backend.name!r} must return (out, lse | None), got {checks.quote(result)}")
    shape = [*call.q.shape[:3], call.v.shape[3]]
    if list(out.shape) != shape or not (lse is None or list(lse.shape) == shape[:3]):
        raise ValueError(
            f"backend {backend.name!r} must return out {shape} and lse {shape[:3]}, "
            f"got {list(out.shape)} and {None if lse is None else list(lse.shape)}"
        )
    return out, lse


@dataclass(frozen=True, eq=False)
class AttentionInfo:
    """The lse, weights and logits of one call of :func:`attend`."""

    call: AttentionCall
    _lse: Tensor | None

    @property
    def lse(self) -> Float[Tensor, "batch heads dst"]:
        """``log(sum of exp(logit))`` over in-edges and sink, in float32 or better; -inf without in-edges."""
        if self.call.normaliser != "softmax":
            raise NotImplementedError(f"the normaliser {self.call.normaliser!r} has no lse: use weights()")
        if self._lse is None:
            raise NotImplementedError("the backend returned no lse: use a backend of list_backends()")
        return self._lse

    def weights(self, edges: Int[Tensor, "..."] | None = None) -> Float[Tensor, "batch heads edges"]:
        """Return the weight of every edge, or of ``edges`` only, before dropout: ``exp(logit - lse)``.

        The order is that of ``graph.edge_index``. ``edges`` are indices ``[K]`` into it, or pairs
        ``[2, K]`` of senders and receivers. Raises ValueError if the graph varies by head or sample,
        or if a pair is not an edge, and IndexError if an index is out of range. If maps of types replace
        the senders (``edge_type`` without ``edge_attr``), sender s of type t is ``t * num_src + s``.
        """
        index = self._edge_indices(edges)
        if self._needs_all_edges(edges):
            weights = rows.edge_weights(self.call, self._lse)
            return weights if edges is None else weights.index_select(2, index)
        dst = self.call.graph.edges_on(index.device)[1, index]
        return edge_softmax.weights_from_lse(self.logits(index), dst, self.lse)

    def logits(self, edges: Int[Tensor, "..."] | None = None) -> Float[Tensor, "batch heads edges"]:
        """Return ``score_mod(scale * q . k) + bias`` of every edge, or of ``edges`` as in :meth:`weights`."""
        index = self._edge_indices(edges)
        if self._needs_all_edges(edges):
            logits = rows.edge_logits(self.call)
            return logits if edges is None else logits.index_select(2, index)
        scores = self.call.scores(self.call.graph.edges_on(index.device)[:, index])
        bias = self.call.bias
        return scores if bias is None else scores + bias.to(scores.dtype).index_select(2, index)

    def weight_matrix(self, rows: tuple[int, int] | None = None) -> Float[Tensor, "batch heads dst src"]:
        """Return all weights before dropout, 0 at non-edges; the graph may vary by head or sample.

        ``rows=(start, stop)`` limits the tokens x tokens matrix to receivers ``start`` to ``stop - 1``.
        """
        if self.call.normaliser != "softmax" or self.call.features is not None:
            return self._scatter(self.weights(), 0.0, rows)
        lse = self.lse if rows is None else self.lse[:, :, slice(*rows)]
        return (self.logit_matrix(rows) - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()

    def logit_matrix(self, rows: tuple[int, int] | None = None) -> Float[Tensor, "batch heads dst src"]:
        """Return the logits of all pairs, -inf at non-edges; see :meth:`weight_matrix` for ``rows``."""
        call = self.call
        if call.features is not None:
            return self._scatter(self.logits(), -torch.inf, rows)
        graph = call.graph if rows is None else call.graph.rows(*rows)
        start, stop = rows or (0, graph.num_dst)
        dtype = edge_softmax.accumulation_dtype(call.q.dtype)
        k = edge_softmax.per_query_head(call.k, call.q.shape[1]).to(dtype)
        score = call.q[:, :, start:stop].to(dtype) @ k.mT * call.scale
        dst = torch.arange(start, stop, device=score.device).unsqueeze(-1)
        score = call.apply_score_mod(score, dst, torch.arange(graph.num_src, device=score.device))
        if call.bias is not None or graph.has_parallel_edges:
            receivers = call.graph.edges_on(score.device)[1]
            bias = score.new_zeros(1, 1, len(receivers)) if call.bias is None else call.bias.to(dtype)
            score = score + dense.scatter_bias(bias[..., (receivers >= start) & (receivers < stop)], graph)
        # Non-edges are masked before exp, which could be inf there and make the gradient NaN.
        return score.masked_fill(~graph.mask(score.device), -torch.inf)

    def _scatter(self, values: Tensor, fill: float, rows: tuple[int, int] | None) -> Tensor:
        """Return values of edges as a matrix, with ``fill`` at non-edges."""
        graph = self.call.graph
        src, dst = graph.edges_on(values.device)
        matrix = values.new_full((*values.shape[:2], graph.num_dst, graph.num_src), fill)
        matrix[:, :, dst, src] = values
        return matrix if rows is None else matrix[:, :, slice(*rows)]

    def _needs_all_edges(self, edges: Tensor | None) -> bool:
        """Return whether all edges are computed at once, by the lists of ``rows``."""
        call = self.call
        has_lists = type(call.graph) is TokenGraph
        return has_lists and (edges is None or call.normaliser != "softmax" or call.features is not None)

    def _edge_indices(self, edges: Tensor | None) -> Tensor:
        device = self.call.q.device
        num_edges = self.call.graph.edges_on(device).shape[1]
        if edges is None:
            return torch.arange(num_edges, device=device)
        if not isinstance(edges, Tensor) or edges.dim() != 1:
            return self.call.graph.positions_of(edges).to(device)
        if edges.is_floating_point() or edges.dtype == torch.bool:
            raise TypeError(
                f"edges must be integers, indices [K] or pairs [2, K], got {edges.dtype}; "
                "use mask.nonzero() for a bool mask"
            )
        # Inside a compiled program no value can be read.
        if not torch.compiler.is_compiling() and ((edges < 0) | (edges >= num_edges)).any():
            raise IndexError(
                f"edges must be indices in 0 .. {num_edges - 1}, got {int(edges.min())} .. {int(edges.max())}"
            )
        return edges.long().to(device)


def list_backends() -> dict[str, str]:
    """Return a dict that maps the name of each backend to a description of the calls it supports.

    >>> sorted(list_backends())
    ['dense', 'flex', 'message_passing', 'mixed', 'reference', 'rows', 'tiles', 'varlen']
    """
    return {name: f"{entry.supports}; {entry.capabilities.limits()}" for name, entry in BACKENDS.items()}


def check_backend(backend: str | Backend) -> str | Backend:
    """Return ``backend`` if it is a name of :func:`list_backends`, "auto" or a :class:`Backend`."""
    if isinstance(backend, str):
        return checks.choice("backend", backend, ["auto", *BACKENDS])
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a name or a gnn_attention.Backend, got {type(backend).__name__}")
    return backend
