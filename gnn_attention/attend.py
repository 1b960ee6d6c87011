"""The one verb: attention over a token graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support import checks, memory
from gnn_attention._support.dynamo import eager_mode
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends import BACKENDS, Backend, RefusalError, dense, devices, dispatch, nonfinite
from gnn_attention.backends.call import AttentionCall, join_slices
from gnn_attention.backends.dispatch import Explanation, explain
from gnn_attention.graph import TokenGraph
from gnn_attention.score_mods import ScoreMod

__all__ = ["AttentionInfo", "Explanation", "attend", "explain", "list_backends"]

# Calls along a graph whose choices are kept for their backward passes.
MOST_CHOICES = 2**10
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
) -> Any:
    """One round of attention along the edges of ``graph``: ``out_dst = sum over src -> dst of w_e v_src``.

    ``w = softmax over the in-edges of dst of (score_mod(scale * q_dst . k_src) + bias_e)``. The arithmetic is
    that of q's dtype (sums in float32 or better): ``torch.autocast`` ends here.

    Args:
        q: one query for each receiver and head, ``[B, Hq, dst, D]``.
        k: keys of the senders ``[B or 1, Hkv, src, D]``; Hq is a multiple of Hkv (grouped heads).
        v: values of the senders ``[B or 1, Hkv, src, Dv]``, as many samples as k.
        graph: which keys each query attends to; ``graph.num_dst`` and ``num_src`` are the sizes of q and k.
        scale: ``1 / sqrt(D)`` unless given.
        score_mod: ``score_mod(score, b, h, dst, src) -> score``, see ``gnn_attention.score_mods``.
        bias: a number for each edge, broadcastable to ``[B, Hq, E]``, in ``graph.edge_index`` order.
        sink_logits: ``[Hq]``, one more logit for each head in every softmax, without a value.
        dropout: probability with which a weight is dropped (applied as given: pass 0 outside training).
        backend: a name of ``list_backends()``, a :class:`Backend`, or "auto" (:func:`explain` says what it
            takes).
        return_info: also return an :class:`AttentionInfo` with lse and the weights of edges.
        finite: a promise that q, k and v hold no NaN or inf, so that no pass over them looks for one. On a
            GPU, in compiled programs and in transforms of ``torch.func`` it is taken for granted.

    Returns:
        ``out [B, Hq, dst, Dv]`` in the dtype of q, or ``(out, info)``. Without in-edges it is exactly 0.

    Raises:
        ValueError, TypeError: arguments that do not fit together, or an unknown backend; NotImplementedError:
        the named backend does not support the call (it never falls back to another).

    >>> from gnn_attention import patterns
    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> attend(x, x, x, patterns.strict_causal(3), scale=0.0)[0, 0].tolist()
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    call = AttentionCall.from_arguments(
        *(q, k, v, graph, scale, score_mod, bias, sink_logits, dropout), with_lse=return_info, finite=finite
    )
    out, lse = run_attention(call, backend)
    return (out, AttentionInfo(call, lse)) if return_info else out


def run_attention(call: AttentionCall, backend: str | Backend, seen_once: bool = False) -> Result:
    """``(out, lse or None)`` of a call that was checked, on a backend as :func:`attend` takes it.

    ``seen_once``: the graph was made for this call, so "auto" chooses by its size and keeps nothing with it.
    """
    run: Callable[[AttentionCall], Result] | None
    run = None if type(call.graph) is TokenGraph else call.graph.runner(backend)
    if run is None:
        chosen = dispatch.choose_by_size(call) if seen_once and backend == "auto" else _choose(backend, call)
        # A kernel that cannot be compiled or launched is replaced where "auto" took it.
        replaceable = backend == "auto" and call.q.device.type in devices.ASYNCHRONOUS
        run = partial(dispatch.run_or_replace, _run, chosen) if replaceable else partial(_run, chosen)
        if chosen.capabilities.visits_non_edges and isinstance(backend, str) and not call.finite:
            run = partial(nonfinite.contain, run)
    device = call.q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return run(call)
    # Inside, products have the dtype of their factors.
    with torch.autocast(device, enabled=False):
        return run(call)


def attended_in_parts(call: AttentionCall, parts: Sequence[AttentionCall], backend: str | Backend) -> Result:
    """``(out, lse)`` of a call whose edges are those of disjoint parts, each with values of its own.

    One softmax over all: each part counts with its share ``e^(lse_part - lse)``, so nothing is subtracted.
    """
    results = []
    for part in parts:
        bare = replace(part, sink_logits=None, with_lse=True)
        out, lse = run_attention(bare, backend)
        lse = AttentionInfo(bare, lse).lse
        results.append((out.to(lse.dtype), lse))
    out, lse = reduce(lambda first, second: edge_softmax.merge(*first, *second), results)
    out, lse = call.with_sinks(out, lse)
    return out.to(call.q.dtype), lse


def _choose(backend: str | Backend, call: AttentionCall) -> Backend:
    """The backend of a call, which is kept with the graph where like calls have the same one."""
    kept = call.backend_names if isinstance(backend, str) else None
    # A backward pass computes a checkpointed call again; outside of one the id is -1. The call must have the
    # backend that it had, whatever memory is free by now: another one would save other tensors.
    if kept and torch._C._current_graph_task_id() != -1:
        earlier = kept.get(_key_of_queries(backend, call))
        if earlier is not None:
            return BACKENDS[earlier]
    if kept and backend in kept:
        return BACKENDS[kept[str(backend)]]
    is_first = backend == "auto" and dispatch.is_first_call(call)
    if backend == "auto":
        chosen = dispatch.choose(call)
        if is_first:
            call.graph.count_call()
    else:
        backend = checked_backend(backend)
        chosen = BACKENDS[backend] if isinstance(backend, str) else backend
        reason = chosen.unsupported_reason(call)
        if reason is not None:
            message = f"backend {chosen.name!r} cannot hold this call on {call.graph!r}: {reason}"
            raise RefusalError(message, reason)
    if kept is not None and chosen.capabilities.cached:
        # Less memory may be free at the next call.
        needs_little = chosen.bytes_needed is None or chosen.bytes_needed(call) <= memory.WORTH_ASKING
        key = str(backend) if needs_little and not is_first else _key_of_queries(backend, call)
        if key:
            kept[key] = chosen.name
        if len(kept) > MOST_CHOICES:
            kept.pop(next(iter(kept)))
    return chosen


def _key_of_queries(backend: str | Backend, call: AttentionCall) -> str:
    """A key that a call shares with its recomputation alone: calls of one form differ in their queries."""
    # The numbers of a transform cannot be looked at, and a GPU would have to be waited for.
    if call.q.device.type != "cpu" or torch._C._are_functorch_transforms_active():
        return ""
    # Some from all positions count: the last may be padding.
    with eager_mode():
        some = call.q.detach()[:, :, :: max(1, call.q.shape[2] // 64)]
        return f"{backend} of {float(some.sum()).hex()}"


def _run(chosen: Backend, call: AttentionCall) -> Result:
    """Run a backend, on each sample and head alone where the graph differs by them and it takes one graph."""
    if call.graph.edges.has_parallel_edges and chosen.capabilities.parallel_edges == "merged":
        call = call.merge_parallel_edges()
    varies = call.graph.batch is not None or call.graph.heads is not None
    if varies and not chosen.capabilities.varying_graphs:
        return join_slices([[_run(chosen, part) for part in row] for row in call.slices()])
    result = chosen.run(call)
    if BACKENDS.get(chosen.name) is chosen:
        return result
    # A backend of the caller's own may return anything.
    out, lse = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    name, shape = chosen.name, [*call.q.shape[:3], call.v.shape[3]]
    if not isinstance(out, Tensor) or not (lse is None or isinstance(lse, Tensor)):
        got = checks.quote(result)
        raise TypeError(f"backend {name!r} must return (out, lse or None), its run gave {got}")
    if list(out.shape) != shape or not (lse is None or list(lse.shape) == shape[:3]):
        got = f"{list(out.shape)} and {None if lse is None else list(lse.shape)}"
        raise ValueError(f"backend {name!r} must return out {shape} and lse {shape[:3]}, its run gave {got}")
    return out, lse


@dataclass(frozen=True, eq=False)
class AttentionInfo:
    """What a call of :func:`attend` gives besides its output: lse, weights and logits."""

    call: AttentionCall
    _lse: Tensor | None

    @property
    def lse(self) -> Float[Tensor, "batch heads dst"]:
        """``log sum over in-edges of exp(logit)``, sinks included; -inf without in-edges. float32 or 64."""
        if self._lse is None:
            raise NotImplementedError("this backend returned no lse; take one of list_backends()")
        return self._lse

    def weights(self, edges: Int[Tensor, "..."] | None = None) -> Float[Tensor, "batch heads edges"]:
        """``exp(logit - lse)`` of every edge in ``graph.edge_index`` order, or of ``edges``, before dropout.

        ``edges``: positions ``[K]`` in ``graph.edge_index``, or ``[2, K]`` senders and receivers. Computed
        from q, k and lse, whatever the backend. ValueError for a graph that differs by head or sample, or for
        a pair that is no edge; IndexError for a position that is none.
        """
        positions = self._positions(edges)
        dst = self.call.graph.edges_on(positions.device)[1, positions]
        return edge_softmax.weights_from_lse(self.logits(positions), dst, self.lse)

    def logits(self, edges: Int[Tensor, "..."] | None = None) -> Float[Tensor, "batch heads edges"]:
        """``score_mod(scale * q . k) + bias`` of every edge, or of the chosen ones as in :meth:`weights`."""
        positions = self._positions(edges)
        scores = self.call.scores(self.call.graph.edges_on(positions.device)[:, positions])
        bias = self.call.bias
        return scores if bias is None else scores + bias.to(scores.dtype).index_select(2, positions)

    def weight_matrix(self, rows: tuple[int, int] | None = None) -> Float[Tensor, "batch heads dst src"]:
        """All weights before dropout, 0 at non-edges, also of a graph that differs by head or sample.

        Memory is tokens x tokens for each head, or that of the receivers ``start .. stop - 1`` given as
        ``rows``.
        """
        lse = self.lse if rows is None else self.lse[:, :, slice(*rows)]
        return (self.logit_matrix(rows) - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()

    def logit_matrix(self, rows: tuple[int, int] | None = None) -> Float[Tensor, "batch heads dst src"]:
        """:meth:`logits` of all pairs, -inf at non-edges; ``rows`` as in :meth:`weight_matrix`."""
        call, device = self.call, self.call.q.device
        graph = call.graph if rows is None else call.graph.rows(*rows)
        start, stop = rows or (0, graph.num_dst)
        wide = edge_softmax.accumulation_dtype(call.q.dtype)
        k = edge_softmax.per_query_head(call.k, call.q.shape[1]).to(wide)
        score = call.q[:, :, start:stop].to(wide) @ k.mT * call.scale
        dst = torch.arange(start, stop, device=device).unsqueeze(-1)
        score = call.apply_score_mod(score, dst, torch.arange(graph.num_src, device=device))
        if call.bias is not None or graph.has_parallel_edges:
            receivers = call.graph.edges_on(device)[1]
            bias = score.new_zeros(1, 1, len(receivers)) if call.bias is None else call.bias.to(wide)
            score = score + dense.scatter_bias(bias[..., (receivers >= start) & (receivers < stop)], graph)
        # exp of the score of a non-edge may be inf, and its gradient NaN.
        return score.masked_fill(~graph.mask(device), -torch.inf)

    def _positions(self, edges: Tensor | None) -> Tensor:
        device = self.call.q.device
        count = self.call.graph.edges_on(device).shape[1]
        if edges is None:
            return torch.arange(count, device=device)
        if not isinstance(edges, Tensor) or edges.dim() != 1:
            return self.call.graph.positions_of(edges).to(device)
        if edges.is_floating_point() or edges.dtype == torch.bool:
            raise TypeError(
                f"edges must be integers, positions [K] or pairs [2, K], got {edges.dtype}; of a bool mask "
                "use nonzero()"
            )
        # A compiler has no values to look at.
        if not torch.compiler.is_compiling() and ((edges < 0) | (edges >= count)).any():
            got = f"{int(edges.min())} .. {int(edges.max())}"
            raise IndexError(f"edges must be positions in 0 .. {count - 1}, got {got}")
        return edges.long().to(device)


def list_backends() -> dict[str, str]:
    """The names of the backends on this machine, with what each supports.

    >>> sorted(list_backends())
    ['dense', 'flex', 'message_passing', 'mixed', 'reference', 'rows', 'tiles', 'varlen']
    """
    return {
        name: f"{backend.supports}; {backend.capabilities.limits()}" for name, backend in BACKENDS.items()
    }


def checked_backend(backend: str | Backend) -> str | Backend:
    """``backend`` if it is a name of :func:`list_backends`, "auto" or a :class:`Backend`."""
    if isinstance(backend, str):
        return checks.choice("backend", backend, ["auto", *BACKENDS])
    if not isinstance(backend, Backend):
        expected = "a name or a gnn_attention.backends.Backend"
        raise TypeError(f"backend must be {expected}, got {type(backend).__name__}")
    return backend
