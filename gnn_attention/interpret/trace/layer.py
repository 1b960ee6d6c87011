"""One call of one attention layer, edge by edge: its weights and what each edge carried."""

from __future__ import annotations

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
Numbers = Float[Tensor, "batch edges heads"]
TERMS: dict[str, Term] = {word: term for term in GLOSSARY for word in astuple(term) if word}


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One call of one attention layer: its tensors, and what follows from them for any edge and head.

    ``graph`` is without the edges that were cut; ``z`` are the results of heads, ``update`` what the layer
    returned. ``edges`` of the methods are pairs (``[2, K]``, a list of ``(src, dst)``, one such pair), or
    None for all; ``heads`` a number, numbers, or None for all. Numbers of edges are ``[B, edges, heads]``,
    with a batch of one for a single sequence.

    A pair counts each sample's own tokens, as in :func:`cut`: in a batch with padding on the left, token 0
    is the first that is no padding, in every tensor here; the padding lies behind the tokens. A pair that is
    an edge for some sample has weight 0 in a sample where it is none, such as a shorter one; one that is an
    edge for none is an error. Receivers of a step with a cache are numbered from the first of the call.

    Weights are those before dropout. An edge whose message was changed has its weight, and carried what came
    along it: 0 if it was muted. For a graph that differs by head or sample the edge list is the union, with
    weight 0 where a pair is no edge.

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
    # disjoint edges with the values that came along them instead of v
    _changed: Sequence[tuple[TokenGraph, Tensor]] = ()
    # slots of padding before a sample's first token
    _left: Tensor | None = None

    def __repr__(self) -> str:
        sizes = f"{self.graph.name}: {self.graph.num_src} src -> {self.graph.num_dst} dst"
        return f"LayerTrace(layer {self.number}, {sizes}, batch {self.q.shape[0]}, heads {self.q.shape[1]})"

    @property
    def lse(self) -> Float[Tensor, "batch heads dst"]:
        """``log sum e^logit`` of each receiver. NotImplementedError for a backend without (flex on a CPU)."""
        return AttentionInfo(self.call, self._lse).lse

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """Every edge, in the order of ``graph.edge_index``; the union over heads and samples."""
        return trace_pairs.union(self.graph, self.q.device)

    def only(self, edges: Any = None) -> LayerTrace:
        """The same call, where all edges stand for the chosen ones.

        ``edges``: pairs, or a :class:`TokenGraph` over the same tokens (its edges, as far as they are there).
        ValueError for a pair that is no edge.
        """
        if edges is None:
            return self
        if isinstance(edges, TokenGraph):
            graph = edges & self.graph
        else:
            pairs, sizes = trace_pairs.as_pairs(edges), (self.graph.num_dst, self.graph.num_src)
            trace_pairs.check_edges(self.graph, pairs, self.q.shape[1], None, "there is nothing to record")
            graph = TokenGraph.from_edges(pairs, *sizes, name="chosen edges")
            graph = replace(graph, dst_offset=self.graph.dst_offset, src_offset=self.graph.src_offset)
            graph = graph & self.graph if self.graph.varying_axes else graph
        bias = trace_pairs.bias_of(graph, self.graph, self.call.bias)
        return replace(self, graph=graph, call=replace(self.call, graph=graph, bias=bias))

    def __getitem__(self, name: str) -> Any:
        """By name, hook (``"attn.hook_q"``) or term of a view (``"listening distribution"``), else KeyError.

        Hooks have TransformerLens' axes, ``[B, tokens, heads, dim]`` and ``[B, heads, dst, src]``: these two
        are of size tokens x tokens, with 0 (scores: -inf) where there is no edge.
        """
        if name == "attn.hook_result":
            return self.results()
        if name not in TERMS:
            raise KeyError(f"no part of attention is called {quote(name)}: expected one of {sorted(TERMS)}")
        term, part = TERMS[name], self._part(TERMS[name].name)
        if name != term.hook or term.name == "update":
            return part
        if term.name in ("logits", "weights"):
            return self.dense(part, 0.0 if term.name == "weights" else -torch.inf)
        return part.transpose(1, 2)

    def terms(self, view: str) -> dict[str, Any]:
        """The same tensors by the terms of one of :data:`VIEWS` (seeds S4.1, S4.17); else ValueError.

        Transforms are :class:`FactoredMatrix`; what these heads do not have is left out.
        """
        word, found = checks.choice("view", view, VIEWS).replace(" ", "_"), dict[str, Any]()
        for term in GLOSSARY:
            # without W_O no message, with rotary or qk_norm no W_A, of other heads neither
            with suppress(TypeError, ValueError):
                found |= {name: self._part(term.name)} if (name := getattr(term, word)) else {}
        return found

    def _part(self, name: str) -> Any:
        part = getattr(self, name)
        return part() if callable(part) and not isinstance(part, Tensor) else part

    @cached_property
    def W_A(self) -> FactoredMatrix:
        """``W_Q W_K^T`` of each head (seed S4.13). TypeError for other heads than StandardHeads."""
        return checks.instance("heads", self.heads, StandardHeads).pattern_matrix()

    @cached_property
    def W_I(self) -> FactoredMatrix:
        """``W_V W_O`` of each head (seed S4.14). TypeError for other heads than StandardHeads."""
        return checks.instance("heads", self.heads, StandardHeads).message_matrix()

    @cached_property
    def u(self) -> Float[Tensor, "batch heads src width"]:
        """``u_j = x_j W_V W_O``: the message of every sender (seeds S4.10, S4.14)."""
        return self._to_messages(self._values(self.v), self._head_numbers(None))

    @cached_property
    def overlaps(self) -> Numbers:
        """``q . k`` of every edge, without scale (seeds S3.1, S4.17)."""
        return self.overlap(self.edge_index)

    def logits(self, edges: Any = None, heads: Heads = None) -> Numbers:
        """``score_mod(scale q . k) + bias`` (seed S2.3)."""
        return self._of_heads(self._logits(self._pairs(edges)), heads).mT

    def weights(self, edges: Any = None, heads: Heads = None) -> Numbers:
        """``e^(logit - lse)`` (seeds S2.6, S3.3): the share of the receiver's attention that the edge has."""
        return self._of_heads(self._weights(self._pairs(edges)), heads).mT

    def norms(self, edges: Any = None, heads: Heads = None) -> Numbers:
        """The length of what each edge carried, ``|weight * message|``."""
        pairs, numbers = self._pairs(edges), self._head_numbers(heads)

        def lengths(values: Tensor) -> Tensor:
            # A length for each sender and head, not for each edge: messages of one head at a time.
            each = [self._to_messages(values[:, [head]], [head]).norm(dim=-1) for head in numbers]
            return torch.cat(each, dim=1)[:, :, pairs[0]]

        return self._weigh_values(lengths, pairs, numbers)

    def overlap(self, pairs: Any = None) -> Float[Tensor, "..."]:
        """``q . k`` of any pairs, edges or not, ``[B, K, heads]``, without scale (seed S4.17).

        Without ``pairs`` the whole matrix ``[B, heads, dst, src]``, of size tokens x tokens.
        """
        return self._of_any(replace(self.call, scale=1.0, score_mod=None), pairs)

    def pair_logits(self, pairs: Any = None) -> Float[Tensor, "..."]:
        """``score_mod(scale q . k)`` of any pairs, as :meth:`overlap`: what an edge there would have."""
        return self._of_any(self.call, pairs)

    def _of_any(self, call: AttentionCall, pairs: Any) -> Tensor:
        num_dst, num_src = self.graph.num_dst, self.graph.num_src
        if pairs is None:
            grid = torch.cartesian_prod(torch.arange(num_dst), torch.arange(num_src)).mT.flip(0)
            numbers = self._of_any(call, grid).mT
            return numbers.reshape(*numbers.shape[:2], num_dst, num_src)
        chosen = edge_list.check_edge_index(trace_pairs.as_pairs(pairs), num_dst, num_src).to(self.q.device)
        return call.scores(chosen).mT

    def dense(self, numbers: Numbers, fill: float = 0.0) -> Float[Tensor, "batch heads dst src"]:
        """Numbers of all edges as matrices ``[B, heads, dst, src]``, with ``fill`` where there is no edge.

        Of size tokens x tokens. ValueError for other than one number for each edge of :attr:`edge_index`.
        """
        (src, dst), (num_dst, num_src) = self.edge_index, (self.graph.num_dst, self.graph.num_src)
        if numbers.dim() != 3 or numbers.shape[1] != len(src):
            raise ValueError(f"numbers must be [B, {len(src)}, heads], got {list(numbers.shape)}")
        cells = numbers.new_full((numbers.shape[0], numbers.shape[2], num_dst * num_src), fill)
        filled = cells.index_copy(2, dst * num_src + src, numbers.mT.contiguous())
        return filled.view(*filled.shape[:2], num_dst, num_src)

    def messages(self, edges: Any, heads: Heads = None) -> Float[Tensor, "batch edges heads width"]:
        """The message ``v W_O`` of each edge's sender (seed S0.5). ValueError without ``W_O``."""
        src, numbers = self._pairs(edges)[0], self._head_numbers(heads)
        return self._messages(self._values(self.v), src, numbers).transpose(1, 2)

    def carried(self, edges: Any, heads: Heads = None) -> Float[Tensor, "batch edges heads width"]:
        """What came along each edge: the weight times the message that it had.

        Over all in-edges and heads this sums to the receiver's update, less ``b_O``. ``edges`` must be given,
        as this makes edges x heads x width: of many edges take some at a time.
        """
        pairs, numbers = self._pairs(edges), self._head_numbers(heads)
        return self._weigh_values(lambda values: self._messages(values, pairs[0], numbers), pairs, numbers)

    def results(self, heads: Heads = None) -> Float[Tensor, "batch dst heads width"]:
        """Each head's part of the update (seeds S1.2, S3.5); their sum is the update less ``b_O``."""
        z = self.z.to(edge_softmax.accumulation_dtype(self.z.dtype))
        return self._to_messages(z[:, self._head_numbers(heads)], self._head_numbers(heads)).transpose(1, 2)

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

    def _weigh_values(
        self, of_values: Callable[[Tensor], Tensor], pairs: Tensor, numbers: list[int]
    ) -> Tensor:
        """``weight * of_values``, ``[B, edges, heads, ...]``: of the values that came along each edge."""
        found = of_values(self._values(self.v))
        more, batch = (...,) + (None,) * (found.dim() - 3), len(self.q)
        for graph, values in self._changed:
            there = trace_pairs.is_edge(graph, pairs, batch, numbers)[more]
            found = torch.where(there, of_values(self._values(values)), found)
        carried = found * self._weights(pairs)[:, numbers][more]
        if self.graph.varying_axes:
            there = trace_pairs.is_edge(self.graph, pairs, batch, numbers)[more]
            carried = torch.where(there, carried, 0.0)
        return carried.transpose(1, 2)

    def _messages(self, values: Tensor, src: Tensor, numbers: list[int]) -> Tensor:
        return self._to_messages(values[:, numbers][:, :, src], numbers)

    def _values(self, v: Tensor) -> Float[Tensor, "batch heads src value_dim"]:
        return edge_softmax.per_query_head(v.to(edge_softmax.accumulation_dtype(v.dtype)), self.q.shape[1])

    def _to_messages(self, values: Tensor, numbers: list[int]) -> Float[Tensor, "batch heads tokens width"]:
        """The messages of values of these heads, which are messages already for some forms."""
        if isinstance(self.heads, StandardHeads) and self.heads.W_O is None:
            raise ValueError("heads without W_O have values but no messages")
        for name in ("W_UV", "W_O"):
            if hasattr(self.heads, name):
                factor: Tensor = getattr(self.heads, name)[numbers]
                values = values @ factor.to(edge_softmax.accumulation_dtype(factor.dtype))
        return values

    def _head_numbers(self, heads: Heads) -> list[int]:
        count = self.q.shape[1]
        if heads is None:
            return list(range(count))
        numbers = checks.sizes("heads", heads if isinstance(heads, Iterable) else [heads])
        if numbers and max(numbers) >= count:
            raise IndexError(f"heads must be in 0 .. {count - 1}, got {max(numbers)}")
        return numbers

    def _of_heads(self, numbers: Tensor, heads: Heads) -> Tensor:
        # All heads are no copy, so that each name of a part is the same tensor.
        return numbers if heads is None else numbers[:, self._head_numbers(heads)]

    def _pairs(self, chosen: Any) -> Int[Tensor, "2 edges"]:
        if chosen is None or chosen is self.edge_index:
            return self.edge_index
        pairs, advice = trace_pairs.as_pairs(chosen), "nothing came along; overlap(pairs) takes any pair"
        trace_pairs.check_edges(self.graph, pairs, self.q.shape[1], None, advice)
        return pairs.to(self.q.device)
