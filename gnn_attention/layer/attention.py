"""Attention as torch_geometric message passing: tokens are nodes, the mask is the adjacency.

:class:`MessagePassingAttention` runs four steps over the edges ``src -> dst`` of a graph:

* ``edge_update`` scores every edge: ``logit = scale * q_dst . k_src``, then softmax over in-edges;
* ``message`` computes what travels along an edge: the weight (after dropout) times the value;
* ``aggregate`` sums the messages on the in-edges of each receiver, for each head;
* ``update`` sums over the heads, in model space.
"""

from __future__ import annotations

from typing import Any

from gnn_attention import score_mods
from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import AttentionInfo, run_attention
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.traced import TracedEdges
from gnn_attention.edge_ops.normalisers import Normaliser, check_normaliser
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.arrays import check_heads
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.layer import _torch_geometric as pyg
from gnn_attention.score_mods import RelativeBias, ScoreMod


class MessagePassingAttention(pyg.TwoPathLayer):
    """Multi-head attention as one round of message passing over a token graph.

    ``update_dst = sum_h sum_(src -> dst) w_h(src -> dst) message_h(src) + b_O``. This equals dense
    attention with the graph's mask, for heads of any form.

    Args:
        heads: :class:`StandardHeads`, :class:`FactoredHeads`, :class:`MergedHeads` or
            :class:`LatentHeads`. If node types have states of different widths (``to_hetero``),
            put a ``torch_geometric.nn.Linear(-1, width)`` before the layer.
        score_mod: ``score_mod(score, b, h, dst, src) -> score``; a module becomes a part of the layer.
        dropout: probability of dropping a weight, in training only.
        edge_dim: number of features of each edge: ``edge_attr`` then adds to keys and values, through the
            parameters ``edge_key`` and ``edge_value [kv_heads, edge_dim, dim]``.
        num_edge_types: number of types of edges, if each has its own ``edge_key`` and ``edge_value``;
            without ``edge_dim`` they map the sender's keys and values instead (as in HGT and R-GAT).
        normaliser: computes weights from logits, as in :func:`gnn_attention.attend`.
        backend: "auto" or another backend of ``attend``, or "message_passing" to run the four steps
            over all edges, which takes longer (None is its deprecated name).

    The layer runs the four steps, whatever its backend, while an explainer of torch_geometric masks
    the edges, while ``torch.jit.trace`` records, and while a step has a hook, is overridden by a
    subclass or is replaced on the layer. :meth:`explain_path` says which path a call takes.

    Under ``torch.compile(fullgraph=True)`` and ``torch.export``, a :class:`TokenGraph` is constant.
    An ``edge_index`` is an input and takes the message-passing path: one program serves any numbers
    of tokens and edges. Pass ``as_tensor()`` of PyG's ``EdgeIndex``, whose sizes would be constants.

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
        edge_dim: int | None = None,
        num_edge_types: int | None = None,
        normaliser: Normaliser = "softmax",
    ) -> None:
        check_heads(heads)
        # Nodes are axis -3, since PyG gets q, k and v as [..., N, H, D].
        super().__init__(node_dim=-3)
        self.heads: StandardHeads | FactoredHeads | MergedHeads | LatentHeads = heads
        self.score_mod = score_mods.check_score_mod(score_mod)
        self.dropout = checks.probability("dropout", dropout)
        self.backend = backend  # type: ignore[assignment]
        self.normaliser = check_normaliser(normaliser)
        pyg.add_edge_parameters(self, edge_dim, num_edge_types)
        self.reset_edge_parameters()

    def reset_parameters(self) -> None:
        """Initialize the heads again, and the score_mod if it is a :class:`RelativeBias`."""
        self.heads.reset_parameters()
        self.reset_edge_parameters()
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
        edge_attr: Tensor | None = None,
        edge_type: Tensor | None = None,
    ) -> Any:
        """Compute the update of every receiver, which a residual stream adds to its state.

        Args:
            x: states ``[N, d]`` or ``[B, T, d]``, or a pair ``(x_src, x_dst)`` (cross-attention). PyG's
                ``(x_src, None)`` is for receivers without features, whose states are then 0.
            g: a :class:`TokenGraph`, or PyG's ``edge_index``, ``EdgeIndex`` or sparse ``adj_t``.
            bias: a number for each edge and head, broadcastable to ``[heads, E]``; or ``[B, heads, E]``.
            return_attention_weights: any bool, as in PyG: return ``(update, (edges, weights))``. The
                edges have the form of g; the weights, before dropout, are ``[E, heads]`` for states
                ``[N, d]`` and ``[B, E, heads]`` for ``[B, T, d]``.
            edge_index: PyG's name for g, for calls by keyword.
            size: ``(senders, receivers)``, as in PyG's bipartite calls. ``(x_src, None)`` needs it
                with an ``edge_index``, which does not know the number of receivers.
            edge_attr: features of the edges ``[E, edge_dim]``, in the order of g.
            edge_type: types of the edges, int64 ``[E]``.

        Raises:
            ValueError, TypeError, IndexError: there is no graph or a second one, or x, g and size do not fit.
            NotImplementedError: the graph varies by head or sample on the message-passing path.
        """
        if (g is None) == (edge_index is None):
            raise TypeError(
                "pass either g (a TokenGraph or PyG's edge_index) or edge_index, "
                f"got {'neither' if g is None else 'both'}"
            )
        g = edge_index if g is None else g
        x_src, x_dst = pyg.read_states(x, g, size, self.heads.width)
        graph = self._graph_of_call(g, x_dst.shape[-2], x_src.shape[-2])
        batched = x_dst.dim() == 3
        wants_weights = isinstance(return_attention_weights, bool)
        if not batched:
            x_src, x_dst = x_src.unsqueeze(0), x_dst.unsqueeze(0)
        has_edges = self.edge_key is not None or edge_attr is not None or edge_type is not None
        edges = pyg.edge_arguments(self, edge_attr, edge_type) if has_edges else {}
        call = self.make_call(x_src, x_dst, graph, bias, wants_weights, **edges)
        y, weights = self.run_call(call, batched, graph_is_temporary=not isinstance(g, TokenGraph))
        y = y if batched else y.view(y.shape[-2:])
        if not wants_weights:
            return y
        return y, pyg.attach_weights(g, graph, weights if batched else weights.view(weights.shape[-2:]))

    def decode(self, x: Tensor, cache: Any, layer: int = 0) -> Tensor:
        """Compute the updates of new tokens ``x [B, T, d]``, which follow those in ``cache``.

        ``layer`` is the index of this layer among the layers of the cache.

        NotImplementedError for maps of edges and other normalisers, and if a hook, an explainer or
        an overridden step needs the messages.
        """
        if (
            self.reason_for_messages() is not None
            or self.edge_key is not None
            or self.normaliser != "softmax"
        ):
            raise NotImplementedError(
                "decode supports no hook, explainer, overridden step, map of edges or normaliser: "
                "remove it, or call the layer on all tokens"
            )
        backend = "auto" if self.backend == "message_passing" else self.backend
        return cache.update(self.heads, x, layer, self.score_mod, backend=backend)

    def make_call(
        self, x_src: Tensor, x_dst: Tensor, graph: TokenGraph, bias: Any, wants_weights: bool, **edges: Any
    ) -> AttentionCall:
        """Return the attention call of states ``[B, T, d]``: queries, keys, values and options.

        A subclass may change the call of ``super().make_call(...)``, as the shard of a layer does.
        """
        # Heads take None as the positions 0, 1, ...
        dst_positions, src_positions = None, None
        if type(graph) not in (TokenGraph, TracedEdges) or graph.dst_offset or graph.src_offset:
            dst_positions = graph.positions("dst", x_dst.shape[-2], x_dst.device)
            src_positions = graph.positions("src", x_src.shape[-2], x_src.device)
        q = self.heads.receive(x_dst, dst_positions)
        k, v = self.heads.send(x_src, src_positions)
        dropout = self.dropout if self.training else 0.0
        options = {"dropout": dropout, "with_lse": wants_weights, "normaliser": self.normaliser, **edges}
        return AttentionCall.from_arguments(q, k, v, graph, self.heads.scale, self.score_mod, bias, **options)

    def run_call(self, call: AttentionCall, batched: bool, graph_is_temporary: bool) -> tuple[Tensor, Any]:
        """Return the update, and the weights if ``call.with_lse``, from ``attend`` or the four steps.

        ``graph_is_temporary`` says that the graph was made for this call: "auto" remembers nothing.
        """
        if self.uses_message_passing() or isinstance(call.graph, TracedEdges):
            return self._pass_messages(call, batched)
        z, lse = run_attention(call, self.backend, graph_is_temporary)
        return self.heads.collect(z), AttentionInfo(call, lse).weights().mT if call.with_lse else None

    def _pass_messages(self, call: AttentionCall, batched: bool) -> tuple[Tensor, Tensor]:
        """Run the four steps: nodes are ``[N, H, D]``, edges ``[E, H]``, after any batch axis."""
        if call.graph.heads is not None or call.graph.batch is not None:
            raise NotImplementedError(
                f"the message-passing path needs one edge list, but {call.graph!r} varies by head or "
                "sample: use backend='auto' without hooks, explainers and overridden steps"
            )
        edge_index = edges = call.graph.edges_on(call.q.device)
        k, v = call.k, call.v
        if call.features is not None:
            edge_index, k, v = pyg.senders_of_edges(call, edges)
        q = pyg.arrange_by_node(call.q, call, batched)
        k, v = pyg.arrange_by_node(k, call, batched), pyg.arrange_by_node(v, call, batched)
        size = (k.shape[-3], call.graph.num_dst)
        alpha: Tensor = self.edge_updater(edge_index, size=size, q=q, k=k, call=call)
        weights = alpha
        if call.dropout:
            weights_by_head = alpha.mT.reshape(*call.q.shape[:2], -1)  # [B, H, E]
            weights = call.apply_dropout(weights_by_head, edges[1], edges[0]).mT
            weights = weights.reshape(alpha.shape)
        return self.propagate(edge_index, size=size, v=v, alpha=weights), alpha

    def edge_update(
        self, q_i: Tensor, k_j: Tensor, index: Tensor, edge_index_j: Tensor, size_i: int, call: object
    ) -> Tensor:
        """Score every edge: its logit, then the softmax over the in-edges of its receiver ``index``."""
        # PyG copies this signature into a module that knows builtins only, hence the type of call.
        assert isinstance(call, AttentionCall)
        logits = (q_i * k_j).sum(-1) * call.scale
        if call.score_mod is not None or call.bias is not None:
            # score_mod and bias are for [B, H, E], but the logits are [..., E, H].
            score = logits.mT.reshape(*call.q.shape[:2], len(index))
            # With features each edge is its own sender.
            src = edge_index_j if call.features is None else call.graph.edges_on(index.device)[0]
            score = call.apply_score_mod(score, index, src)
            score = score if call.bias is None else score + call.bias.to(score.dtype)
            logits = score.mT.reshape(logits.shape)
        return call.normalise(logits.mT, index, size_i)[0].mT

    def message(self, v_j: Tensor, alpha: Tensor) -> Tensor:
        """Compute what travels along every edge: the weight times the sender's value."""
        return alpha.unsqueeze(-1) * v_j

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        """Sum the messages on the in-edges of every receiver ``index``, for each head."""
        total = inputs.new_zeros(*inputs.shape[:-3], dim_size, *inputs.shape[-2:])
        return total.index_add_(-3, index, inputs)

    def update(self, inputs: Tensor) -> Tensor:
        """Sum over the heads, through W_O in the standard form: ``[..., N, H, D] -> [..., N, width]``."""
        return self.heads.collect(inputs.transpose(-3, -2))


MessagePassingAttention.original_steps = {
    name: getattr(MessagePassingAttention, name) for name in (*pyg.STEPS, *pyg.GENERATED, "forward")
}
