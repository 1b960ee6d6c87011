"""The weight of each edge in a call of an attention layer, and what it carried (seeds: docs/sources.md)."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import AttentionInfo
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph, edge_list
from gnn_attention.heads import StandardHeads
from gnn_attention.heads.factored_matrix import FactoredMatrix
from gnn_attention.interpret.trace import pairs as trace_pairs
from gnn_attention.layer.glossary import GLOSSARY, VIEWS, Term

Heads = int | Sequence[int] | None
EdgeValues = Float[Tensor, "batch edges heads"]
TERMS: dict[str, Term] = {name: term for term in GLOSSARY for name in astuple(term) if name}


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """The tensors of one call of an attention layer, with methods that compute values of its edges.

    ``graph`` lacks the edges that were cut. ``z`` holds each head's weighted sum of values, and
    ``update`` the output of the layer. In all methods, ``edges`` are pairs (``[2, K]``, a list of
    ``(src, dst)`` or one pair) or None for all edges, and ``heads`` is an index, a list of indices
    or None for all heads. Values of edges are ``[B, edges, heads]``; B is 1 for a single sequence.

    Tokens are numbered without padding on the left, as in :func:`intervene`: in every tensor here,
    this padding is behind the tokens. If the graph varies by head or sample, the union of its edges
    is listed. A listed edge then has weight 0 in the heads and samples that lack it; a pair that is
    not listed raises an error. In a decoding step with a cache, the first receiver has index 0.

    Weights are taken before dropout. An edge whose message was changed keeps its weight, and
    carried the changed message, which is 0 if it was muted.

    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer = MessagePassingAttention(StandardHeads(8, 2))
    >>> call = trace.record(layer, torch.zeros(3, 8), patterns.causal(3)).layers[0]
    >>> [round(weight, 4) for weight in call.weights(heads=1)[0, :, 0].tolist()]
    [1.0, 0.5, 0.5, 0.3333, 0.3333, 0.3333]
    >>> call.carried((0, 2)).shape, call.norms().shape
    (torch.Size([1, 1, 2, 8]), torch.Size([1, 6, 2]))
    >>> call["listening distribution"].data_ptr() == call["weights"].data_ptr()
    True
    """

    number: int
    heads: Any
    graph: TokenGraph
    q: Float[Tensor, "batch heads dst dim"]
    k: Float[Tensor, "batch kv_heads src dim"]
    v: Float[Tensor, "batch kv_heads src value_dim"]
    z: Float[Tensor, "batch heads dst value_dim"]
    update: Float[Tensor, "batch dst width"]
    call: AttentionCall
    _lse: Tensor | None
    # Disjoint graphs, each with the values that its edges carried instead of v.
    _changed_values: Sequence[tuple[TokenGraph, Tensor]] = ()
    # The number of padding slots on the left of each sample.
    _left_padding: Tensor | None = None

    @classmethod
    def of_call(cls, number: int, heads: Any, call: AttentionCall, z: Tensor, **fields: Any) -> "LayerTrace":
        return cls(number, heads, call.graph, call.q, call.k, call.v, z=z, call=call, **fields)

    def __repr__(self) -> str:
        sizes = f"{self.graph.name}: {self.graph.num_src} src -> {self.graph.num_dst} dst"
        return f"LayerTrace(layer {self.number}, {sizes}, batch {self.q.shape[0]}, heads {self.q.shape[1]})"

    @property
    def lse(self) -> Float[Tensor, "batch heads dst"]:
        """``log sum e^logit`` of each receiver. Raises NotImplementedError if flex ran on a CPU."""
        return AttentionInfo(self.call, self._lse).lse

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """The edges of all heads and samples together, in the order of ``graph.edge_index``."""
        return trace_pairs.compute_edge_union(self.graph, self.q.device)

    def only(self, edges: Any = None) -> "LayerTrace":
        """Return a trace of the same call that has only some of its edges.

        ``edges`` are pairs, or a :class:`TokenGraph` over the same tokens (edges that this call
        lacks are ignored). Raises ValueError for a pair that is not an edge.
        """
        if edges is None:
            return self
        if isinstance(edges, TokenGraph):
            graph = edges & self.graph
        else:
            pairs = trace_pairs.read_pairs(edges)
            trace_pairs.check_edges(self.graph, pairs, self.q.shape[1], None, "there is nothing to record")
            graph = TokenGraph.from_edges(pairs, self.graph.num_dst, self.graph.num_src, name="chosen edges")
            graph = replace(graph, dst_offset=self.graph.dst_offset, src_offset=self.graph.src_offset)
            graph = graph & self.graph if self.graph.varying_axes else graph
        bias = trace_pairs.restrict_bias(self.call.bias, self.graph, graph)
        return replace(self, graph=graph, call=replace(self.call, graph=graph, bias=bias))

    def __getitem__(self, name: str) -> Any:
        """Return a tensor by name, hook (``"attn.hook_q"``) or term (``"listening distribution"``).

        Hooks have TransformerLens' axes, ``[B, tokens, heads, dim]`` or ``[B, heads, dst, src]``.
        Where there is no edge, weights are 0 and scores are -inf. Raises KeyError for an unknown
        name.
        """
        if name == "attn.hook_result":
            return self.results()
        if name not in TERMS:
            raise KeyError(f"no part of attention is called {quote(name)}: expected one of {sorted(TERMS)}")
        term = TERMS[name]
        value = self._evaluate(term.name)
        if name != term.hook or term.name == "update":
            return value
        if term.name in ("logits", "weights"):
            return self.dense(value, 0.0 if term.name == "weights" else -torch.inf)
        return value.transpose(1, 2)

    def terms(self, view: str) -> dict[str, Any]:
        """Return the same tensors in a dict by the terms of one of :data:`VIEWS` (seeds S4.1, S4.17).

        Transforms are :class:`FactoredMatrix`. Terms that these heads do not have are left out.
        Raises ValueError for an unknown view.
        """
        view = checks.choice("view", view, VIEWS).replace(" ", "_")
        values = dict[str, Any]()
        for term in GLOSSARY:
            # Heads without W_O have no messages; rotary, qk_norm and other forms of heads have no W_A.
            with suppress(TypeError, ValueError):
                if name := getattr(term, view):
                    values[name] = self._evaluate(term.name)
        return values

    def _evaluate(self, name: str) -> Any:
        value = getattr(self, name)
        return value() if callable(value) and not isinstance(value, Tensor) else value

    @cached_property
    def W_A(self) -> FactoredMatrix:
        """``W_Q W_K^T`` of each head (seed S4.13). Raises TypeError unless heads are StandardHeads."""
        return checks.instance("heads", self.heads, StandardHeads).pattern_matrix()

    @cached_property
    def W_I(self) -> FactoredMatrix:
        """``W_V W_O`` of each head (seed S4.14). Raises TypeError unless heads are StandardHeads."""
        return checks.instance("heads", self.heads, StandardHeads).message_matrix()

    @cached_property
    def u(self) -> Float[Tensor, "batch heads src width"]:
        """``u_j = x_j W_V W_O``, the message of every sender (seeds S4.10, S4.14)."""
        return self._to_messages(self._expand_values(self.v), self._to_head_indices(None))

    @cached_property
    def overlaps(self) -> EdgeValues:
        """``q . k`` of every edge, without scale (seeds S3.1, S4.17)."""
        return self.overlap(self.edge_index)

    def logits(self, edges: Any = None, heads: Heads = None) -> EdgeValues:
        """Return ``score_mod(scale q . k) + bias`` (seed S2.3)."""
        return self._select_heads(self._logits(self._read_edges(edges)), heads).mT

    def weights(self, edges: Any = None, heads: Heads = None) -> EdgeValues:
        """Return ``e^(logit - lse)``, the edge's fraction of attention (seeds S2.6, S3.3)."""
        return self._select_heads(self._weights(self._read_edges(edges)), heads).mT

    def norms(self, edges: Any = None, heads: Heads = None) -> EdgeValues:
        """Return the norm of what each edge carried, ``|weight * message|``."""
        pairs, head_indices = self._read_edges(edges), self._to_head_indices(heads)

        def message_norms(values: Tensor) -> Tensor:
            # Norms of senders, one head at a time, take less memory than the messages of all edges.
            norms = [self._to_messages(values[:, [h]], [h]).norm(dim=-1) for h in head_indices]
            return torch.cat(norms, dim=1)[:, :, pairs[0]]

        return self._weigh(message_norms, pairs, head_indices)

    def overlap(self, pairs: Any = None) -> Float[Tensor, "..."]:
        """Return ``q . k`` of any pairs, ``[B, K, heads]``, without scale (seed S4.17).

        Without ``pairs``, return the whole matrix ``[B, heads, dst, src]``, of size tokens x
        tokens.
        """
        return self._scores(replace(self.call, scale=1.0, score_mod=None), pairs)

    def pair_logits(self, pairs: Any = None) -> Float[Tensor, "..."]:
        """Return ``score_mod(scale q . k)`` of any pairs, in the shape of :meth:`overlap`."""
        return self._scores(self.call, pairs)

    def _scores(self, call: AttentionCall, pairs: Any) -> Tensor:
        num_dst, num_src = self.graph.num_dst, self.graph.num_src
        if pairs is None:
            grid = torch.cartesian_prod(torch.arange(num_dst), torch.arange(num_src)).mT.flip(0)
            matrices = self._scores(call, grid).mT
            return matrices.reshape(*matrices.shape[:2], num_dst, num_src)
        pairs = edge_list.check_edge_index(trace_pairs.read_pairs(pairs), num_dst, num_src)
        return call.scores(pairs.to(self.q.device)).mT

    def dense(self, numbers: EdgeValues, fill: float = 0.0) -> Float[Tensor, "batch heads dst src"]:
        """Return values of all edges as matrices ``[B, heads, dst, src]``, with ``fill`` elsewhere.

        Raises ValueError unless there is one value for each edge of :attr:`edge_index`.
        """
        src, dst = self.edge_index
        num_dst, num_src = self.graph.num_dst, self.graph.num_src
        if numbers.dim() != 3 or numbers.shape[1] != len(src):
            raise ValueError(f"numbers must be [B, {len(src)}, heads], got {list(numbers.shape)}")
        matrices = numbers.new_full((numbers.shape[0], numbers.shape[2], num_dst * num_src), fill)
        matrices = matrices.index_copy(2, dst * num_src + src, numbers.mT.contiguous())
        return matrices.view(*matrices.shape[:2], num_dst, num_src)

    def messages(self, edges: Any, heads: Heads = None) -> Float[Tensor, "batch edges heads width"]:
        """Return the message ``v W_O`` of each edge (seed S0.5). Raises ValueError without ``W_O``."""
        src, head_indices = self._read_edges(edges)[0], self._to_head_indices(heads)
        return self._messages(self._expand_values(self.v), src, head_indices).transpose(1, 2)

    def carried(self, edges: Any, heads: Heads = None) -> Float[Tensor, "batch edges heads width"]:
        """Return what each edge carried: its weight times its message.

        The sum over all in-edges and heads is the receiver's update minus ``b_O``. The result has
        size edges x heads x width, so ``edges`` must be given: pass a few at a time.
        """
        pairs, head_indices = self._read_edges(edges), self._to_head_indices(heads)
        return self._weigh(lambda v: self._messages(v, pairs[0], head_indices), pairs, head_indices)

    def results(self, heads: Heads = None) -> Float[Tensor, "batch dst heads width"]:
        """Return each head's part of the update; their sum lacks only ``b_O`` (seeds S1.2, S3.5)."""
        head_indices = self._to_head_indices(heads)
        z = self.z.to(edge_softmax.accumulation_dtype(self.z.dtype))
        return self._to_messages(z[:, head_indices], head_indices).transpose(1, 2)

    @cached_property
    def _all_logits(self) -> Tensor:
        return trace_pairs.logits(self.call, self.edge_index)

    @cached_property
    def _all_weights(self) -> Tensor:
        return edge_softmax.weights_from_lse(self._all_logits, self.edge_index[1], self.lse)

    def _logits(self, pairs: Tensor) -> Float[Tensor, "batch heads edges"]:
        return self._all_logits if pairs is self.edge_index else trace_pairs.logits(self.call, pairs)

    def _weights(self, pairs: Tensor) -> Float[Tensor, "batch heads edges"]:
        if pairs is self.edge_index:
            return self._all_weights
        return edge_softmax.weights_from_lse(self._logits(pairs), pairs[1], self.lse)

    def _weigh(self, function: Callable[[Tensor], Tensor], pairs: Tensor, heads: list[int]) -> Tensor:
        """Return ``weight * function(values)`` for the values that edges carried."""
        result = function(self._expand_values(self.v))
        # Indexing with new_axes appends one axis for each axis that the function adds.
        new_axes = (...,) + (None,) * (result.dim() - 3)
        for graph, values in self._changed_values:
            is_changed = trace_pairs.is_edge(graph, pairs, len(self.q), heads)[new_axes]
            result = torch.where(is_changed, function(self._expand_values(values)), result)
        result = result * self._weights(pairs)[:, heads][new_axes]
        if self.graph.varying_axes:
            is_edge = trace_pairs.is_edge(self.graph, pairs, len(self.q), heads)[new_axes]
            result = torch.where(is_edge, result, 0.0)
        return result.transpose(1, 2)

    def _messages(self, values: Tensor, src: Tensor, heads: list[int]) -> Tensor:
        return self._to_messages(values[:, heads][:, :, src], heads)

    def _expand_values(self, v: Tensor) -> Float[Tensor, "batch heads src value_dim"]:
        return edge_softmax.per_query_head(v.to(edge_softmax.accumulation_dtype(v.dtype)), self.q.shape[1])

    def _to_messages(self, values: Tensor, heads: list[int]) -> Float[Tensor, "batch heads tokens width"]:
        if isinstance(self.heads, StandardHeads) and self.heads.W_O is None:
            raise ValueError("heads without W_O have values but no messages")
        # If heads have neither matrix, their values are the messages.
        for name in ("W_UV", "W_O"):
            if hasattr(self.heads, name):
                factor: Tensor = getattr(self.heads, name)[heads]
                values = values @ factor.to(edge_softmax.accumulation_dtype(factor.dtype))
        return values

    def _to_head_indices(self, heads: Heads) -> list[int]:
        num_heads = self.q.shape[1]
        if heads is None:
            return list(range(num_heads))
        indices = checks.sizes("heads", heads if isinstance(heads, Iterable) else [heads])
        if indices and max(indices) >= num_heads:
            raise IndexError(f"heads must be in 0 .. {num_heads - 1}, got {max(indices)}")
        return indices

    def _select_heads(self, values: Tensor, heads: Heads) -> Tensor:
        # Without a selection, nothing is copied: all names of a tensor return the same tensor.
        return values if heads is None else values[:, self._to_head_indices(heads)]

    def _read_edges(self, edges: Any) -> Int[Tensor, "2 edges"]:
        if edges is None or edges is self.edge_index:
            return self.edge_index
        pairs = trace_pairs.read_pairs(edges)
        advice = "it carried nothing; overlap(pairs) takes any pair"
        trace_pairs.check_edges(self.graph, pairs, self.q.shape[1], None, advice)
        return pairs.to(self.q.device)
