"""Attention as torch_geometric message passing: tokens are nodes, the mask is the adjacency.

Read :class:`MessagePassingAttention` for the lesson. PyG calls, for the edges ``src -> dst`` of the graph,

* ``edge_update``: pattern scoring, ``logit = q_dst . k_src * scale``, then softmax over the in-edges of each
  receiver;
* ``message``: what travels along one edge, the weight (after dropout) times the sender's message;
* ``aggregate``: PyG's plain sum over the in-edges, for each head;
* ``update``: the sum over heads, in model space.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch_geometric.utils import is_torch_sparse_tensor
from torch_geometric.utils.sparse import set_sparse_value

from gnn_attention import convert, edge_softmax, score_mods
from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import (
    AttentionInfo,
    Explanation,
    attend_once,
    attended,
    checked_backend,
    explain,
)
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import explain_by_size
from gnn_attention.graph import TokenGraph, edge_list, rules
from gnn_attention.graph.traced import TracedEdges, is_edge_list
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.arrays import check_heads
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.lazy import LazyHeads
from gnn_attention.layer._pyg_layer import Layer, check_size, known_receivers
from gnn_attention.score_mods import RelativeBias, ScoreMod

STEPS = {
    "edge_update": "logit of the pattern of dst with src, softmax over the in-edges of dst, for each head",
    "message": "the weight of the edge times the message of src, for each head",
    "aggregate": "the sum over the in-edges of dst, for each head",
    "update": "the sum over heads",
}


class MessagePassingAttention(Layer):
    """Multi-head attention as one round of message passing over a token graph.

    ``update_dst = sum_h sum_(src -> dst) w_h(src -> dst) message_h(src) + b_O``: for heads of any form equal
    to dense attention with that mask.

    Args:
        heads: the weights: :class:`StandardHeads`, :class:`FactoredHeads`, :class:`MergedHeads` or
            :class:`LatentHeads`. :class:`LazyHeads` become standard ones of the right widths at the first
            call, for ``to_hetero``.
        score_mod: ``score_mod(score, b, h, dst, src) -> score``; a module is trained with the layer.
        dropout: probability with which a weight is dropped, in training only.
        backend: "auto" or a name goes through ``attend``, the fastest way. "message_passing" calls
            ``edge_update``, ``message``, ``aggregate`` and ``update`` for all edges, the lesson. The layer
            takes this path whatever its backend while somebody looks on, as PyG's own layers leave their
            fused path then: while an explainer of PyG masks the edges, one of the four functions has a hook,
            a subclass overrides it or the layer has another in its place, or ``torch.jit.trace`` records.
            :meth:`explain_path` says which path a call takes. None means "message_passing", and is
            deprecated.

    Under ``torch.compile(fullgraph=True)`` and ``torch.export`` a :class:`TokenGraph` is a constant for every
    backend. An ``edge_index`` that is an input of the program takes the message-passing path: one program for
    any numbers of tokens and edges (for PyG's ``EdgeIndex`` one for each of its sizes: give its
    ``as_tensor()``).

    Sources: seeds S1.20, S4.16, S4.17; Gilmer et al. 2017 (arXiv 1704.01212), section 2.

    >>> from gnn_attention import patterns
    >>> layer = MessagePassingAttention(StandardHeads(width=8, num_heads=2))
    >>> layer(torch.zeros(5, 8), patterns.causal(5)).shape
    torch.Size([5, 8])
    """

    inputs: ClassVar[dict[str, tuple[str, ...]]] = {
        "edge_update": ("q_i", "k_j", "call", "q", "k", "q_j", "k_i"),
        **dict.fromkeys(("message", "aggregate", "update"), ("v_j", "alpha", "v", "v_i")),
    }

    def __init__(
        self,
        heads: StandardHeads | FactoredHeads | MergedHeads | LatentHeads,
        score_mod: ScoreMod | None = None,
        dropout: float = 0.0,
        backend: str | Backend | None = "auto",
    ) -> None:
        """TypeError for other heads, score_mod or backend; ValueError for an unknown name or dropout."""
        check_heads(heads)
        # nodes stand before heads: [..., N, H, D]
        super().__init__(node_dim=-3)
        self.heads: StandardHeads | FactoredHeads | MergedHeads | LatentHeads = heads
        self.score_mod = score_mods.checked(score_mod)
        self.dropout = checks.probability("dropout", dropout)
        self.backend = _without_none(backend)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "backend":  # it may be set at any time
            value = checked_backend(_without_none(value))
        super().__setattr__(name, value)

    @property
    def in_channels(self) -> int | tuple[int, int]:
        """The width of a state, or ``(sender's, receiver's)`` where they differ; -1 if not known yet."""
        if isinstance(self.heads, LazyHeads):
            return -1
        widths = self.heads.source_width, self.heads.width
        return widths if widths[0] != widths[1] else widths[0]

    @property
    def out_channels(self) -> int:
        """The width of an update; -1 if not known yet."""
        if isinstance(self.heads, StandardHeads) and self.heads.W_O is None:
            return self.heads.num_heads * self.heads.W_V.shape[-1]
        return -1 if isinstance(self.heads, LazyHeads) else self.heads.width

    def reset_parameters(self) -> None:
        """Draw the heads' parameters anew."""
        self.heads.reset_parameters()
        if isinstance(self.score_mod, RelativeBias):
            self.score_mod.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        g: Any = None,
        bias: Tensor | None = None,
        return_attention_weights: bool | None = None,
        edge_index: Any = None,
        *,
        size: tuple[int, int] | None = None,
    ) -> Any:
        """The update of every receiver (add it to its state for a residual stream).

        Args:
            x: states ``[N, d]`` or ``[B, T, d]``; a pair ``(x_src, x_dst)`` for two kinds of token
                (cross-attention). In PyG's ``(x_src, None)`` the receivers have no features: their states
                are 0, so that a query is its bias, and without one all senders count alike.
            g: a :class:`TokenGraph`, or PyG's ``edge_index``, ``EdgeIndex`` or sparse ``adj_t``.
            bias: a number for each edge and head, broadcastable to ``[heads, E]`` (``[B, heads, E]`` for a
                batch).
            return_attention_weights: with any bool, as in PyG, the result is
                ``(update, (g's edges, weights))``: weights before dropout, ``[E, heads]`` for ``[N, d]`` and
                ``[B, E, heads]`` for ``[B, T, d]``.
            edge_index: PyG's name for g, for calls by keyword.
            size: ``(senders, receivers)``, as in PyG's bipartite calls; they are those of x, and needed for
                ``(x_src, None)`` with an ``edge_index`` that does not know them.

        Raises:
            ValueError, TypeError, IndexError: no graph or two; states, graph and size that do not fit.
            NotImplementedError: the message-passing path over a graph that differs by head or sample; PyG's
                ``flow``, ``decomposed_layers`` or ``message_and_aggregate``.
        """
        if (g is None) == (edge_index is None):
            got = "none" if g is None else "both g and edge_index"
            raise TypeError(f"the layer needs one graph, a TokenGraph or PyG's edge_index, got {got}")
        g = edge_index if g is None else g
        self.check_settings(g)
        x_src, x_dst = state_pair(self._with_receivers(x, g, size) if isinstance(x, (tuple, list)) else x)
        sizes = x_src.shape[-2], x_dst.shape[-2]
        if size is not None:
            check_size(size, *sizes)
        read = fitting_graph if isinstance(g, TokenGraph) else self._as_graph
        graph = read(g, sizes[1], sizes[0])
        if isinstance(self.heads, LazyHeads):
            # they may be of another class by now, in threads
            LazyHeads.meet(self.heads, x_dst.shape[-1], x_src.shape[-1])
        batched = x_dst.dim() == 3
        if not batched:
            x_src, x_dst = x_src.unsqueeze(0), x_dst.unsqueeze(0)
        wants_weights = isinstance(return_attention_weights, bool)
        call = self._call(x_src, x_dst, graph, bias, wants_weights)
        y, weights = self._run(call, batched, isinstance(g, TokenGraph))
        y = y if batched else y.view(y.shape[-2:])
        if not wants_weights:
            return y
        return y, _with_edges(g, graph, weights if batched else weights.view(weights.shape[-2:]))

    def decode(self, x: Tensor, cache: Any, layer: int = 0) -> Tensor:
        """The updates of new tokens with states ``x [B, T, d]``, after those in a layer of a cache.

        NotImplementedError where a hook, an explainer or a step of one's own waits for messages.
        """
        if self._is_watched():
            raise NotImplementedError(
                "decode makes no messages for a hook, an explainer or an overridden step: "
                "remove it, or call the layer on all tokens"
            )
        backend = "auto" if self.backend == "message_passing" else self.backend
        return cache.update(self.heads, x, layer, self.score_mod, backend=backend)

    def _with_receivers(self, x: Any, g: Any, size: tuple[int, int] | None) -> Any:
        """x, with states of 0 in place of the None of PyG's ``(x_src, None)``."""
        if len(x) != 2 or x[1] is not None or not isinstance(x[0], Tensor):
            return x
        x_src, _ = state_pair(x[0])
        width = x_src.shape[-1] if isinstance(self.heads, LazyHeads) else self.heads.width
        num_dst = known_receivers(g) if size is None else check_size(size, x_src.shape[-2], None)
        return x_src, x_src.new_zeros(*x_src.shape[:-2], num_dst, width)

    def _call(
        self, x_src: Tensor, x_dst: Tensor, graph: TokenGraph, bias: Tensor | None, wants_weights: bool
    ) -> AttentionCall:
        at_dst, at_src = None, None  # the positions 0, 1, ...
        if type(graph) not in (TokenGraph, TracedEdges) or graph.dst_offset or graph.src_offset:
            at_dst = graph.positions("dst", x_dst.shape[-2], x_dst.device)
            at_src = graph.positions("src", x_src.shape[-2], x_src.device)
        q = self.heads.receive(x_dst, at_dst)
        k, v = self.heads.send(x_src, at_src)
        options = self.score_mod, bias, None, self.dropout if self.training else 0.0, wants_weights
        return AttentionCall.checked(q, k, v, graph, self.heads.scale, *options)

    def _run(self, call: AttentionCall, batched: bool, is_kept: bool) -> tuple[Tensor, Any]:
        """The update, and the weights where the call wants them (``with_lse``)."""
        if self._takes_messages() or isinstance(call.graph, TracedEdges):
            return self._walk(call, batched)
        once = self.backend == "auto" and not is_kept
        z, lse = attend_once(call) if once else attended(call, self.backend)
        return self.heads.collect(z), AttentionInfo(call, lse).weights().mT if call.with_lse else None

    def _walk(self, call: AttentionCall, batched: bool) -> tuple[Tensor, Tensor]:
        """Edge by edge in float32 or better: nodes ``[N, H, D]``, edges ``[E, H]``, led by a batch if any."""
        if call.graph.heads is not None or call.graph.batch is not None:
            raise NotImplementedError(
                f"the message-passing path needs one edge list, but {call.graph!r} varies: use "
                "backend='auto' without hooks, explainers and overridden steps, which need this path"
            )
        q, k, v = _nodes(call, batched)
        edge_index = call.graph.edges_on(q.device)
        size = (call.graph.num_src, call.graph.num_dst)
        if self._onlooker() is not None or torch.compiler.is_compiling():
            alpha = self.edge_updater(edge_index, size=size, q=q, k=k, call=call)
        else:  # the same, without what torch_geometric does for hooks
            src, dst = edge_index.unbind()
            q_i, k_j = q.index_select(-3, dst), k.index_select(-3, src)
            alpha = self.edge_update(q_i, k_j, dst, src, size[1], call)
        dropped = _dropped(alpha, edge_index, call) if call.dropout else alpha
        return self.propagate(edge_index, size=size, v=v, alpha=dropped), alpha

    def edge_update(
        self, q_i: Tensor, k_j: Tensor, index: Tensor, edge_index_j: Tensor, size_i: int, call: object
    ) -> Tensor:
        """Pattern scoring: every edge's logit, then the softmax over the in-edges of receiver ``index``."""
        # PyG renders signatures into modules of their own, where only builtins are known
        assert isinstance(call, AttentionCall)
        logits = (q_i * k_j).sum(-1) * call.scale
        if call.score_mod is not None or call.bias is not None:
            # ``[..., E, H]`` logits after score_mod and bias, whose axes are ``[B, H, E]``.
            score = call.modified(logits.mT.reshape(*call.q.shape[:2], len(index)), index, edge_index_j)
            score = score if call.bias is None else score + call.bias.to(score.dtype)
            logits = score.mT.reshape(logits.shape)
        return edge_softmax.weights_of(logits.mT, index, size_i).mT

    def message(self, v_j: Tensor, alpha: Tensor) -> Tensor:
        """What travels along an edge: the sender's message, weighted."""
        return alpha.unsqueeze(-1) * v_j

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        """The sum over the in-edges of every receiver ``index``, for each head."""
        total = inputs.new_zeros(*inputs.shape[:-3], dim_size, *inputs.shape[-2:])
        return total.index_add_(-3, index, inputs)

    def update(self, inputs: Tensor) -> Tensor:
        """The sum over heads, through W_O in the standard form: ``[..., N, H, D] -> [..., N, width]``."""
        return self.heads.collect(inputs.transpose(-3, -2))

    def explain_path(self, g: Any, num_dst: int | None = None, num_src: int | None = None) -> Explanation:
        """Which path a call along ``g`` takes, and why; for "auto" as :func:`gnn_attention.explain` says.

        ``g`` is what the layer takes; an ``edge_index`` does not know its sizes, which ``num_dst`` and
        ``num_src`` give. "message_passing" calls the four functions of PyG.

        >>> layer = MessagePassingAttention(StandardHeads(width=8, num_heads=2))
        >>> graph = TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3)
        >>> layer.explain_path(graph).choice
        'dense'
        >>> _ = layer.register_message_forward_hook(lambda module, inputs, messages: None)
        >>> layer.explain_path(graph).reason
        'somebody looks on: there is a hook on message'
        """
        graph = g if isinstance(g, TokenGraph) else convert.from_pyg(g, num_dst, num_src)
        onlooker = self._onlooker()
        if onlooker is not None:
            return Explanation(repr(graph), "message_passing", f"somebody looks on: {onlooker}")
        if self.backend != "auto":
            name = self.backend.name if isinstance(self.backend, Backend) else self.backend
            return Explanation(repr(graph), name, "it is the backend of the layer")
        explain_auto = explain if graph is g else explain_by_size
        return explain_auto(graph, self.heads.num_heads, self.heads.head_dim)

    def _takes_messages(self) -> bool:
        if self.backend == "message_passing" or self._onlooker() is not None:
            return True
        return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]

    def _as_graph(self, g: Any, num_dst: int, num_src: int) -> TokenGraph:
        for_messages, is_program = self._takes_messages(), torch.compiler.is_compiling()
        if is_program and is_edge_list(g) and (for_messages or self.backend == "auto"):
            return TracedEdges.of(g, num_dst, num_src)
        if type(g) is Tensor and g.dtype in edge_list.SIGNED and g.layout == torch.strided:
            read = _listed if for_messages else TokenGraph.from_edges
            return read(g, num_dst, num_src)
        return fitting_graph(g, num_dst, num_src)

    def mapping(self) -> str:
        """What each of torch_geometric's steps is here, in the order in which an edge meets them (S1.20)."""
        through = ", through W_O" if isinstance(self.heads, StandardHeads) else ""
        return "\n".join(f"{step}: {meaning}" for step, meaning in STEPS.items()) + through

    def __repr__(self) -> str:
        heads = self.heads
        form = type(heads).__name__.removesuffix("Heads").lower()
        sizes = f"{form}, heads={heads.num_heads}, head_dim={heads.head_dim}"
        return f"{type(self).__name__}({sizes}, backend={self.backend!r})"


def _without_none(backend: str | Backend | None) -> str | Backend:
    """The backend, "message_passing" for None, of which the caller's caller is warned."""
    if backend is not None:
        return backend
    message = "backend=None is deprecated: write backend='message_passing'"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return "message_passing"


def state_pair(x: Any) -> tuple[Tensor, Tensor]:
    """``(x_src, x_dst)`` of states, or of a pair of them; TypeError or ValueError for anything else."""
    pair = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
    x_src, x_dst = pair if len(pair) == 2 else (pair, pair)
    if not isinstance(x_src, Tensor) or not isinstance(x_dst, Tensor):
        got = ", ".join(type(states).__name__ for states in pair)
        raise TypeError(f"x must be a tensor [N, d] or [B, T, d], or a pair (x_src, x_dst), got {got}")
    if x_src.dim() not in (2, 3) or x_src.shape[:-2] != x_dst.shape[:-2] or x_src.dim() != x_dst.dim():
        shapes = f"{list(x_src.shape)} and {list(x_dst.shape)}"
        raise ValueError(f"x must be [N, d] or [B, T, d] (both of a pair alike), got {shapes}")
    return x_src, x_dst


def fitting_graph(g: Any, num_dst: int, num_src: int) -> TokenGraph:
    """``g``, or the graph of what torch_geometric has; ValueError where it does not fit the states."""
    graph = g if isinstance(g, TokenGraph) else convert.from_pyg(g, num_dst, num_src)
    if (graph.num_src, graph.num_dst) != (num_src, num_dst):
        raise ValueError(f"{graph!r} does not fit x with {num_src} senders and {num_dst} receivers")
    return graph


def _listed(edge_index: Tensor, num_dst: int, num_src: int) -> TracedEdges:
    """The edges alone, with the checks of ``TokenGraph.from_edges`` but without its rule and memo."""
    edges = edge_list.checked(edge_index, num_dst, num_src)
    key = edges[1] * num_src + edges[0]
    ordered = key.sort().values
    if (ordered[1:] == ordered[:-1]).any():
        raise ValueError(edge_list.duplicate_message(edges, key))
    return TracedEdges(rules.everyone, num_dst, num_src, name="edges", _listed=edges.to(edge_index.device))


def _nodes(call: AttentionCall, batched: bool) -> list[Tensor]:
    """q, k and v as ``[B, N, H, D]``, or without a batch ``[N, H, D]``, in the dtype of sums."""
    wide, num_heads = torch.promote_types(call.q.dtype, torch.float32), int(call.q.shape[1])
    nodes = []
    for x in (call.q, call.k, call.v):
        x = x if x.shape[1] == num_heads else edge_softmax.per_query_head(x, num_heads)
        x = (x if x.dtype == wide else x.to(wide)).transpose(1, 2)
        nodes.append(x if batched else x.squeeze(0))
    return nodes


def _dropped(alpha: Tensor, edge_index: Tensor, call: AttentionCall) -> Tensor:
    weights = call.dropped(alpha.mT.reshape(*call.q.shape[:2], -1), edge_index[1], edge_index[0])
    return weights.mT.reshape(alpha.shape)


def _with_edges(g: Any, graph: TokenGraph, weights: Tensor) -> tuple[Any, Tensor]:
    """The edges in the form they came in, and their weights: the values of a sparse adjacency, as in PyG."""
    if isinstance(g, TokenGraph):
        return graph.edges_on(weights.device), weights
    if not is_torch_sparse_tensor(g) or weights.dim() != 2:
        return g, weights
    if g.layout == torch.sparse_coo:  # as stored, which need not be sorted
        size = (*g.shape, weights.shape[1])
        return torch.sparse_coo_tensor(g._indices(), weights, size, is_coalesced=g.is_coalesced()), weights
    return set_sparse_value(g, weights), weights
