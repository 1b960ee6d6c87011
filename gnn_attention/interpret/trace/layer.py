"""One call of one attention layer, edge by edge: what it weighed, what it carried, under every name that is used for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gnn_attention import edges
from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.attend import AttentionInfo
from gnn_attention.backends.call import Call
from gnn_attention.graph import TokenGraph, edge_list
from gnn_attention.heads import StandardHeads
from gnn_attention.interpret.trace import pairs as trace_pairs
from gnn_attention.layer.glossary import GLOSSARY, VIEWS, Term

__all__ = ["LayerTrace"]


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One call of one attention layer: the tensors of that call, and what follows from them for any edge and head.

    ``q [B, Hq, dst, D]``, ``k [B, Hkv, src, D]``, ``v [B, Hkv, src, Dv]``, ``z [B, Hq, dst, Dv]`` and ``update [B, dst, width]``
    are those of the call itself. ``edges`` of the methods are positions ``[K]`` in :attr:`edge_index`, pairs (``[2, K]``, a list
    of ``(src, dst)``, one such pair), or None for all of :attr:`edge_index`; ``heads`` a number, numbers, or None for all.

    Weights are those before dropout. An edge that was muted has its weight and carried 0; a graph that differs by head or sample
    lists every edge that any of them has, and it has weight 0 where it is none.

    >>> from gnn_attention import StandardHeads, patterns, trace
    >>> from gnn_attention.layer import MessagePassingAttention
    >>> call = trace.record(MessagePassingAttention(StandardHeads(8, 2)), torch.zeros(3, 8), patterns.causal(3)).layers[0]
    >>> [round(weight, 4) for weight in call.weights(heads=1)[0, :, 0].tolist()]  # 0 -> 0, 0 -> 1, 1 -> 1, ...
    [1.0, 0.5, 0.5, 0.3333, 0.3333, 0.3333]
    >>> call.carried((0, 2)).shape, call.norms().shape, call["listening distribution"].data_ptr() == call["weights"].data_ptr()
    (torch.Size([1, 1, 2, 8]), torch.Size([1, 6, 2]), True)
    """

    number: int
    heads: Any
    update: Float[Tensor, "batch dst width"]
    z: Float[Tensor, "batch heads dst value_dim"]
    _call: Call
    _info: AttentionInfo
    _muted: tuple[TokenGraph, ...] = ()

    def __repr__(self) -> str:
        """Which one, and its sizes."""
        sizes = f"{self.graph.name}: {self.graph.num_src} src -> {self.graph.num_dst} dst"
        return f"LayerTrace(layer {self.number}, {sizes}, batch {self.q.shape[0]}, heads {self.q.shape[1]})"

    # -- the call itself ----------------------------------------------------------------------------------------------

    @property
    def graph(self) -> TokenGraph:
        """Who heard whom, after what was cut."""
        return self._call.graph

    @property
    def q(self) -> Float[Tensor, "batch heads dst dim"]:
        """Queries: receiving channels."""
        return self._call.q

    @property
    def k(self) -> Float[Tensor, "batch kv_heads src dim"]:
        """Keys: sending channels."""
        return self._call.k

    @property
    def v(self) -> Float[Tensor, "batch kv_heads src value_dim"]:
        """Values: outgoing messages, in the space of the head."""
        return self._call.v

    @property
    def lse(self) -> Float[Tensor, "batch heads dst"]:
        """``log sum e^logit`` of each receiver. NotImplementedError where the backend told none (flex on a CPU)."""
        return self._info.lse

    @property
    def edge_index(self) -> Int[Tensor, "2 edges"]:
        """Every edge, in the order of ``graph.edge_index``; of a graph that varies all edges of any head and sample."""
        return trace_pairs.listing(self.graph, self.q.device)

    def __getitem__(self, name: str) -> Tensor:
        """By its name here, its hook (``"attn.hook_q"``) or its word in any view (``"listening distribution"``).

        Hooks have TransformerLens' axes, ``[B, tokens, heads, dim]`` and ``[B, heads, edges]``. KeyError lists the names.
        """
        if name == "attn.hook_result":
            return self.results()
        for term in GLOSSARY:
            if name == term.hook:
                return _with_hook_axes(term.name, self._part(term.name))
            if name in (term.name, *_words(term)):
                return self._part(term.name)
        known = sorted({word for term in GLOSSARY for word in (term.name, term.hook, *_words(term))})
        raise KeyError(f"no part of attention is called {quoted(name)}: expected one of {', '.join(known)}")

    def told(self, view: str) -> dict[str, Tensor]:
        """The run in the words of one of :data:`VIEWS`, step by step: the same tensors under other names (seeds S4.1, S4.17).

        ValueError for another view.
        """
        word = checks.choice("view", view, VIEWS).replace(" ", "_")
        return {getattr(term, word): self._part(term.name) for term in GLOSSARY if getattr(term, word)}

    def _part(self, name: str) -> Tensor:
        part = getattr(self, name)
        result: Tensor = part() if callable(part) and not isinstance(part, Tensor) else part
        return result

    # -- numbers of edges ---------------------------------------------------------------------------------------------

    def logits(self, edges: Any = None, heads: int | Sequence[int] | None = None) -> Float[Tensor, "batch edges heads"]:
        """``score_mod(scale q . k) + bias`` (seed S2.3): how well the receiver's channel overlaps the sender's."""
        numbers = self._all_logits if edges is None else trace_pairs.logits(self._call, self._chosen(edges))
        return self._of_heads(numbers, heads).mT

    def weights(self, edges: Any = None, heads: int | Sequence[int] | None = None) -> Float[Tensor, "batch edges heads"]:
        """``e^(logit - lse)`` (seed S2.6): the share of its listening that the receiver gives to the edge."""
        numbers = self._all_weights if edges is None else self._weights(self._chosen(edges))
        return self._of_heads(numbers, heads).mT

    def norms(self, edges: Any = None, heads: int | Sequence[int] | None = None) -> Float[Tensor, "batch edges heads"]:
        """The length of what each edge carried, ``|weight * message|``."""
        return self._measured(lambda values, matrix: _product(values, matrix).norm(dim=-1), edges, heads)

    def along(
        self, direction: Float[Tensor, " width"], edges: Any = None, heads: int | Sequence[int] | None = None
    ) -> Float[Tensor, "batch edges heads"]:
        """What each edge carried, projected on a direction: ``(weight * message) . direction`` (of length 1 for a length).

        Take a row of the unembedding, and it is what the edge adds to that logit before the last norm. ValueError for another
        width.
        """
        width = self.update.shape[-1]
        if not isinstance(direction, Tensor) or tuple(direction.shape) != (width,):
            got = list(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
            raise ValueError(f"direction must be a tensor [{width}], as wide as a state, got {got}")

        def measure(values: Tensor, matrix: Tensor | None) -> Tensor:
            line = direction.to(values)
            return values @ (line if matrix is None else matrix @ line)

        return self._measured(measure, edges, heads)

    def overlap(self, pairs: Any = None) -> Float[Tensor, "..."]:
        """``score_mod(scale q . k)`` of any pairs, edges or not, ``[B, K, heads]`` (seed S4.17: the matrix before masking).

        Without ``pairs`` the whole matrix ``[B, heads, dst, src]``: of size tokens x tokens, as asked.
        """
        if pairs is not None:
            found = edge_list.checked(trace_pairs.as_pairs(pairs), self.graph.num_dst, self.graph.num_src)
            return trace_pairs.overlaps(self._call, found.to(self.q.device)).mT
        num_dst, num_src = self.graph.num_dst, self.graph.num_src
        grid = torch.cartesian_prod(torch.arange(num_dst), torch.arange(num_src)).mT.flip(0).to(self.q.device)
        numbers = trace_pairs.overlaps(self._call, grid)
        return numbers.view(*numbers.shape[:2], num_dst, num_src)

    def dense(self, numbers: Float[Tensor, "batch edges heads"], fill: float = 0.0) -> Float[Tensor, "batch heads dst src"]:
        """Numbers of all edges as matrices ``[B, heads, dst, src]``, with ``fill`` where there is no edge.

        Of size tokens x tokens, as asked. ValueError for other than one number for each edge of :attr:`edge_index`.
        """
        src, dst = self.edge_index
        if numbers.dim() != 3 or numbers.shape[1] != len(src):
            raise ValueError(f"numbers must be [B, {len(src)}, heads], one for each edge, got {list(numbers.shape)}")
        batch, _, heads = numbers.shape
        cells = numbers.new_full((batch, heads, self.graph.num_dst * self.graph.num_src), fill)
        filled = cells.index_copy(2, dst * self.graph.num_src + src, numbers.mT.contiguous())
        return filled.view(batch, heads, self.graph.num_dst, self.graph.num_src)

    # -- vectors, in the space of the states --------------------------------------------------------------------------

    def messages(self, edges: Any, heads: int | Sequence[int] | None = None) -> Float[Tensor, "batch edges heads width"]:
        """The message of each edge's sender, ``v W_O``, before the weight (seed S0.5). ValueError for heads without ``W_O``."""
        return self._messages(self._chosen(edges), self._numbers(heads))

    def carried(self, edges: Any, heads: int | Sequence[int] | None = None) -> Float[Tensor, "batch edges heads width"]:
        """What came along each edge: the weight times the message, 0 if it was muted.

        Over all in-edges and heads this sums to the receiver's update, less ``b_O``. ``edges`` must be given, as this makes
        edges x heads x width; for many edges take :meth:`each_carried`.
        """
        return self._carried(self._chosen(edges), self._numbers(heads))

    def each_carried(
        self, edges: Any = None, heads: int | Sequence[int] | None = None, at_once: int = 4096
    ) -> Iterator[tuple[Int[Tensor, "2 some"], Float[Tensor, "batch some heads width"]]]:
        """``(edges, carried)`` for ``at_once`` edges after the other."""
        pairs, numbers = self._chosen(edges), self._numbers(heads)
        parts = torch.split(pairs, checks.size("at_once", at_once, 1), dim=1)
        return ((part, self._carried(part, numbers)) for part in parts)

    def results(self, heads: int | Sequence[int] | None = None) -> Float[Tensor, "batch dst heads width"]:
        """Each head's part of the update (seed S1.2): their sum is the update less ``b_O``. The hook is ``attn.hook_result``."""
        z = self.z.to(edges.accumulation_dtype(self.z.dtype))
        parts = [_product(z[:, head], self._matrix(head)) for head in self._numbers(heads)]
        return torch.stack(parts, dim=2)

    # -- inside -------------------------------------------------------------------------------------------------------

    @cached_property
    def _all_logits(self) -> Tensor:
        return trace_pairs.logits(self._call, self.edge_index)

    @cached_property
    def _all_weights(self) -> Tensor:
        return edges.weights_from_lse(self._all_logits, self.edge_index[1], self.lse)

    def _weights(self, pairs: Tensor) -> Tensor:
        return edges.weights_from_lse(trace_pairs.logits(self._call, pairs), pairs[1], self.lse)

    def _messages(self, pairs: Tensor, numbers: list[int]) -> Tensor:
        values = self._values()[:, :, pairs[0]]
        return torch.stack([_product(values[:, head], self._matrix(head)) for head in numbers], dim=2)

    def _carried(self, pairs: Tensor, numbers: list[int]) -> Tensor:
        weights, silent = self._weights(pairs), self._silent(pairs)
        vectors = self._messages(pairs, numbers) * weights[:, numbers].mT.unsqueeze(-1)
        return vectors if silent is None else vectors.masked_fill(silent[:, numbers].mT.unsqueeze(-1), 0.0)

    def delivered(self) -> Tensor:
        """The weights ``[B, H, E]`` of all edges, 0 where nothing came along."""
        silent = self._silent(self.edge_index)
        return self._all_weights if silent is None else self._all_weights.masked_fill(silent, 0.0)

    def _silent(self, pairs: Tensor) -> Bool[Tensor, "batch heads edges"] | None:
        """Where a pair carried nothing: it was muted, or is no edge for that sample and head; None if all carried."""
        sizes = self.q.shape[:2]
        silent = [trace_pairs.present(graph, pairs, *sizes) for graph in self._muted]
        silent += [~trace_pairs.present(self.graph, pairs, *sizes)] if trace_pairs.varies(self.graph) else []
        return torch.stack(silent).any(0) if silent else None

    def _measured(self, measure: Any, edges: Any, heads: int | Sequence[int] | None) -> Tensor:
        """``weight * measure(message)``; each sender is measured once for each head."""
        pairs, numbers = self._chosen(edges), self._numbers(heads)
        values = self._values()
        told = torch.stack([measure(values[:, head], self._matrix(head)) for head in numbers], dim=1)[:, :, pairs[0]]
        weights, silent = (self._all_weights if edges is None else self._weights(pairs)), self._silent(pairs)
        product = told * weights[:, numbers]
        return (product if silent is None else product.masked_fill(silent[:, numbers], 0.0)).mT

    def _values(self) -> Float[Tensor, "batch heads src value_dim"]:
        return edges.per_query_head(self.v.to(edges.accumulation_dtype(self.v.dtype)), self.q.shape[1])

    def _matrix(self, head: int) -> Tensor | None:
        """From a value of a head to its message; None if values are messages already."""
        if isinstance(self.heads, StandardHeads) and self.heads.W_O is None:
            raise ValueError("heads without W_O have values but no messages")
        matrix: Tensor | None = None
        for name in ("W_UV", "W_O"):
            if hasattr(self.heads, name):
                factor: Tensor = getattr(self.heads, name)[head]
                factor = factor.to(edges.accumulation_dtype(factor.dtype))
                matrix = factor if matrix is None else matrix @ factor
        return matrix

    def _numbers(self, heads: int | Sequence[int] | None) -> list[int]:
        count = self.q.shape[1]
        if heads is None:
            return list(range(count))
        numbers = checks.sizes("heads", heads) if isinstance(heads, Iterable) else [checks.size("heads", heads)]
        if numbers and max(numbers) >= count:
            raise IndexError(f"heads must be in 0 .. {count - 1}, got {max(numbers)}")
        return numbers

    def _of_heads(self, numbers: Tensor, heads: int | Sequence[int] | None) -> Tensor:
        return numbers if heads is None else numbers[:, self._numbers(heads)]

    def _chosen(self, chosen: Any) -> Int[Tensor, "2 edges"]:
        """The edges asked for, as pairs; each must be an edge."""
        if chosen is None:
            return self.edge_index
        if isinstance(chosen, Tensor) and chosen.dim() == 1:
            return self.edge_index[:, trace_pairs.positions(chosen, self.edge_index.shape[1]).to(self.q.device)]
        pairs = trace_pairs.as_pairs(chosen)
        trace_pairs.check_edges(self.graph, pairs, self.q.shape[1], None, "nothing came along; overlap(pairs) takes any pair")
        return pairs.to(self.q.device)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _words(term: Term) -> list[str]:
    """The words of a term in all views."""
    return [word for view in VIEWS if (word := getattr(term, view.replace(" ", "_")))]


def _with_hook_axes(name: str, part: Tensor) -> Tensor:
    """The same tensor with TransformerLens' order of axes."""
    if name in ("logits", "weights"):
        return part.mT
    return part if name == "update" else part.transpose(1, 2)


def _product(values: Tensor, matrix: Tensor | None) -> Tensor:
    return values if matrix is None else values @ matrix
