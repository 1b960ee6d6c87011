"""Attention as torch_geometric message passing: tokens are nodes, the mask is the adjacency.

Read :class:`MessagePassingAttention` for the lesson. PyG calls, for the edges ``src -> dst`` of the graph,

* ``edge_update``: pattern scoring, ``logit = q_dst . k_src * scale``, then softmax over the in-edges of each
  receiver;
* ``message``: what travels along one edge, the weight (after dropout) times the sender's message;
* ``aggregate``: PyG's plain sum over the in-edges, for each head;
* ``update``: the sum over heads, in model space.
"""

from __future__ import annotations

from typing import Any

from gnn_attention import edge_softmax, score_mods
from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import AttentionInfo, run_attention
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.traced import TracedEdges
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.arrays import check_heads
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.layer import _torch_geometric as pyg
from gnn_attention.score_mods import RelativeBias, ScoreMod


class MessagePassingAttention(pyg.TwoPathLayer):
    """Multi-head attention as one round of message passing over a token graph.

    ``update_dst = sum_h sum_(src -> dst) w_h(src -> dst) message_h(src) + b_O``: for heads of any form equal
    to dense attention with that mask.

    Args:
        heads: the weights: :class:`StandardHeads`, :class:`FactoredHeads`, :class:`MergedHeads` or
            :class:`LatentHeads`. Where kinds of node have widths of their own (``to_hetero``), a
            ``torch_geometric.nn.Linear(-1, width)`` before the layer makes them one.
        score_mod: ``score_mod(score, b, h, dst, src) -> score``; a module is trained with the layer.
        dropout: probability with which a weight is dropped, in training only.
        backend: "auto" or a name goes through ``attend``, the fastest way. "message_passing" (None, which is
            deprecated) calls the four functions above for all edges. The layer also takes this path, whatever
            its backend, while an explainer of PyG masks the edges, while one of the four has a hook, is
            overridden by a subclass or replaced on the layer, and while ``torch.jit.trace`` records.
            :meth:`explain_path` says which path a call takes.

    Under ``torch.compile(fullgraph=True)`` and ``torch.export`` a :class:`TokenGraph` is a constant. An
    ``edge_index`` that is an input of the program takes the message-passing path: one program for any numbers
    of tokens and edges (for PyG's ``EdgeIndex`` one for each of its sizes: give its ``as_tensor()``).

    Sources: seeds S1.20, S4.16, S4.17; Gilmer et al. 2017 (arXiv 1704.01212), section 2.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> layer = MessagePassingAttention(StandardHeads(width=8, num_heads=2))
    >>> layer(torch.zeros(5, 8), patterns.causal(5)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        heads: StandardHeads | FactoredHeads | MergedHeads | LatentHeads,
        score_mod: ScoreMod | None = None,
        dropout: float = 0.0,
        backend: str | Backend | None = "auto",
    ) -> None:
        """TypeError for other heads, score_mod or backend; ValueError for an unknown name or dropout."""
        check_heads(heads)
        # The axis of nodes stands before that of heads: [..., N, H, D].
        super().__init__(node_dim=-3)
        self.heads: StandardHeads | FactoredHeads | MergedHeads | LatentHeads = heads
        self.score_mod = score_mods.check_score_mod(score_mod)
        self.dropout = checks.probability("dropout", dropout)
        self.backend = backend  # type: ignore[assignment]

    def reset_parameters(self) -> None:
        """Draw the heads' parameters anew."""
        self.heads.reset_parameters()
        if isinstance(self.score_mod, RelativeBias):
            self.score_mod.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
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
            bias: a number for each edge and head, broadcastable to ``[heads, E]``, or ``[B, heads, E]``.
            return_attention_weights: with any bool, as in PyG, the result is
                ``(update, (g's edges, weights))``: weights before dropout, ``[E, heads]`` for ``[N, d]`` and
                ``[B, E, heads]`` for ``[B, T, d]``.
            edge_index: PyG's name for g, for calls by keyword.
            size: ``(senders, receivers)``, as in PyG's bipartite calls; they are those of x, and needed for
                ``(x_src, None)`` with an ``edge_index`` that does not know them.

        Raises:
            ValueError, TypeError, IndexError: no graph or two; states, graph and size that do not fit.
            NotImplementedError: the message-passing path over a graph that differs by head or sample.
        """
        if (g is None) == (edge_index is None):
            got = "none" if g is None else "both g and edge_index"
            raise TypeError(f"the layer needs one graph, a TokenGraph or PyG's edge_index, got {got}")
        g = edge_index if g is None else g
        x_src, x_dst = pyg.read_states(x, g, size, self.heads.width)
        graph = self._read_graph(g, x_dst.shape[-2], x_src.shape[-2])
        batched, wants_weights = x_dst.dim() == 3, isinstance(return_attention_weights, bool)
        if not batched:
            x_src, x_dst = x_src.unsqueeze(0), x_dst.unsqueeze(0)
        call = self.make_call(x_src, x_dst, graph, bias, wants_weights)
        y, weights = self.run_call(call, batched, seen_once=not isinstance(g, TokenGraph))
        y = y if batched else y.view(y.shape[-2:])
        if not wants_weights:
            return y
        return y, pyg.with_edges(g, graph, weights if batched else weights.view(weights.shape[-2:]))

    def decode(self, x: Tensor, cache: Any, layer: int = 0) -> Tensor:
        """The updates of new tokens with states ``x [B, T, d]``, after those in a layer of a cache.

        NotImplementedError where a hook, an explainer or a step of one's own waits for messages.
        """
        if self.watcher() is not None:
            raise NotImplementedError(
                "decode makes no messages for a hook, an explainer or an overridden step: "
                "remove it, or call the layer on all tokens"
            )
        backend = "auto" if self.backend == "message_passing" else self.backend
        return cache.update(self.heads, x, layer, self.score_mod, backend=backend)

    def make_call(
        self, x_src: Tensor, x_dst: Tensor, graph: TokenGraph, bias: Tensor | None, wants_weights: bool
    ) -> AttentionCall:
        """Queries, keys and values of states ``[B, T, d]``, with the options of the layer, as one call.

        A subclass may change the call that it gets by ``super().make_call(...)``, as a layer of which each
        rank holds some of the heads does: it takes the path that any other call takes.
        """
        dst_positions, src_positions = None, None  # 0, 1, ...
        if type(graph) not in (TokenGraph, TracedEdges) or graph.dst_offset or graph.src_offset:
            dst_positions = graph.positions("dst", x_dst.shape[-2], x_dst.device)
            src_positions = graph.positions("src", x_src.shape[-2], x_src.device)
        q = self.heads.receive(x_dst, dst_positions)
        k, v = self.heads.send(x_src, src_positions)
        dropout = self.dropout if self.training else 0.0
        return AttentionCall.from_arguments(
            q, k, v, graph, self.heads.scale, self.score_mod, bias, None, dropout, wants_weights
        )

    def run_call(self, call: AttentionCall, batched: bool, seen_once: bool) -> tuple[Tensor, Any]:
        """The update, and the weights where the call wants them (``with_lse``): ``attend``, or messages.

        ``seen_once``: the graph was made for this call, so "auto" keeps nothing with it.
        """
        if self.takes_messages() or isinstance(call.graph, TracedEdges):
            return self._pass_messages(call, batched)
        z, lse = run_attention(call, self.backend, seen_once)
        return self.heads.collect(z), AttentionInfo(call, lse).weights().mT if call.with_lse else None

    def _pass_messages(self, call: AttentionCall, batched: bool) -> tuple[Tensor, Tensor]:
        """Edge by edge in float32 or better: nodes ``[N, H, D]``, edges ``[E, H]``, led by a batch if any."""
        if call.graph.heads is not None or call.graph.batch is not None:
            raise NotImplementedError(
                f"the message-passing path needs one edge list, but {call.graph!r} varies: use "
                "backend='auto' without hooks, explainers and overridden steps, which need this path"
            )
        q, k, v = [pyg.nodes(x, call, batched) for x in (call.q, call.k, call.v)]
        edge_index = call.graph.edges_on(q.device)
        size = (call.graph.num_src, call.graph.num_dst)
        alpha: Tensor = self.edge_updater(edge_index, size=size, q=q, k=k, call=call)
        weights = alpha
        if call.dropout:
            by_head = alpha.mT.reshape(*call.q.shape[:2], -1)  # [B, H, E]
            weights = call.apply_dropout(by_head, edge_index[1], edge_index[0]).mT.reshape(alpha.shape)
        return self.propagate(edge_index, size=size, v=v, alpha=weights), alpha

    def edge_update(
        self, q_i: Tensor, k_j: Tensor, index: Tensor, edge_index_j: Tensor, size_i: int, call: object
    ) -> Tensor:
        """Pattern scoring: every edge's logit, then the softmax over the in-edges of receiver ``index``."""
        # PyG renders signatures into modules of their own, where only builtins are known.
        assert isinstance(call, AttentionCall)
        logits = (q_i * k_j).sum(-1) * call.scale
        if call.score_mod is not None or call.bias is not None:
            # The logits are [..., E, H] here, but [B, H, E] for score_mod and bias.
            score = call.apply_score_mod(
                logits.mT.reshape(*call.q.shape[:2], len(index)), index, edge_index_j
            )
            score = score if call.bias is None else score + call.bias.to(score.dtype)
            logits = score.mT.reshape(logits.shape)
        return edge_softmax.softmax(logits.mT, index, size_i, check=False)[0].mT

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


MessagePassingAttention.own_steps = {
    name: getattr(MessagePassingAttention, name) for name in (*pyg.STEPS, *pyg.RENDERED, "forward")
}
