"""The lightning indexer of DeepSeek sparse attention, whose small heads learn to choose senders."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import AttentionInfo
from gnn_attention.edge_ops import operators
from gnn_attention.edge_ops.edge_lists import edge_order, edge_rows
from gnn_attention.graph import TokenGraph
from gnn_attention.patterns._choice import split_rows
from gnn_attention.rotary import Rotary
from gnn_attention.selectors import _choice

EDGES_PER_CHUNK = 2**16
# Up to this density the loss is computed edge by edge; above it, on rows of the mask.
MAX_SPARSE_DENSITY = 1 / 16
# The indexer projects states of receivers to queries and weights, and states of senders to keys.
DstStates = Float[Tensor, "batch dst width"]
SrcStates = Float[Tensor, "batch src source_width"]
QueriesAndWeights = tuple[Float[Tensor, "batch heads dst dim"], Float[Tensor, "batch heads dst"]]
Keys = Float[Tensor, "batch src dim"]


class Indexer(nn.Module):
    """Choose the ``k`` senders with the largest ``I = sum_h w_h(dst) relu(q_h(dst) . key(src))``.

    The indexer reads states ``[batch, tokens, width]`` and returns one graph for all heads of a
    layer. Its heads share the normalised ``key``; its own ``rotary``, if any, rotates queries and
    keys. The learned weights ``w`` are divided by ``sqrt(num_heads * head_dim)``. :meth:`select`
    computes products in ``dtype``. Train the indexer by :meth:`loss`, or by :meth:`edge_scores` as
    a bias.

    Source: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.

    >>> x = torch.randn(2, 10, 8)
    >>> Indexer(width=8, k=3).select(x, x).in_degree()[0, 0].tolist()
    [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    """

    def __init__(
        self,
        width: int,
        k: int,
        num_heads: int = 4,
        head_dim: int = 32,
        source_width: int | None = None,
        rotary: Rotary | None = Rotary(),  # noqa: B008 (frozen)
        dtype: torch.dtype | None = None,
    ) -> None:
        """``source_width`` is the width of the senders' states, by default ``width``."""
        super().__init__()
        self.k, self.num_heads = checks.size("k", k), checks.size("num_heads", num_heads, 1)
        checks.instance("rotary", Rotary() if rotary is None else rotary, Rotary)
        checks.instance("dtype", torch.float32 if dtype is None else dtype, torch.dtype)
        self.rotary, self.dtype = rotary, dtype
        self.scale = (num_heads * head_dim) ** -0.5
        self.queries = nn.Linear(width, num_heads * checks.size("head_dim", head_dim, 1), bias=False)
        self.keys = nn.Linear(width if source_width is None else source_width, head_dim, bias=False)
        self.key_norm = nn.LayerNorm(head_dim)
        self.weights = nn.Linear(width, num_heads, bias=False)

    def receive(self, x: DstStates, positions: Int[Tensor, " dst"]) -> QueriesAndWeights:
        """Return the queries and weights of receivers with states ``x``."""
        queries = self.queries(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self._rotate(queries, positions), self.weights(x).mT * self.scale

    def send(self, x: SrcStates, positions: Int[Tensor, " src"]) -> Keys:
        """Return the keys of senders with states ``x``; decoding can cache these keys."""
        return self._rotate(self.key_norm(self.keys(x)), positions)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rotary is None else self.rotary.turn(x, positions)

    @torch.no_grad()
    def select(self, q: DstStates, k: SrcStates, graph: TokenGraph | None = None) -> TokenGraph:
        """Return the chosen edges of ``graph``, by default causal, for states ``q`` and ``k``."""
        queries_and_weights, keys, graph = self._project(q, k, graph)
        return self.choose(queries_and_weights, keys, graph)

    @torch.no_grad()
    def choose(self, received: QueriesAndWeights, keys: Keys, graph: TokenGraph) -> TokenGraph:
        """Return the graph of :meth:`select` for results of :meth:`receive` and :meth:`send`."""
        queries, weights = received
        queries, keys = (x.to(self.dtype or keys.dtype) for x in (queries, keys))

        def compute_scores(rows: tuple[int, int]) -> Tensor:
            scores = _score_rows(queries, weights, keys, rows).unsqueeze(1)
            return scores.masked_fill_(~_choice.mask_rows(graph, rows, keys.device), -torch.inf)

        row_size = queries.shape[0] * self.num_heads * graph.num_src
        return _choice.choose(compute_scores, graph, row_size, self.k, f"indexed {self.k}")

    def edge_scores(self, q: DstStates, k: SrcStates, graph: TokenGraph) -> Float[Tensor, "batch one edges"]:
        """Return ``I`` of every edge with gradients, in the order of ``graph.edge_index``.

        With ``I`` as the ``bias`` of ``attend``, the model's loss trains the indexer. The bias
        ``I - I.detach()`` adds a gradient but changes no output; ``logsigmoid(I)`` is a gate.
        """
        (queries, weights), keys, graph = self._project(q, k, graph)
        order = edge_order(graph, keys.device)
        return _score_edges(queries, weights, keys, graph)[:, order.argsort()].unsqueeze(1)

    def loss(
        self, q: DstStates, k: SrcStates, info: AttentionInfo, rows: tuple[int, int] | None = None
    ) -> Float[Tensor, ""]:
        """Return the mean over receivers of ``KL(p || softmax of I)`` over their in-edges.

        Isolated receivers do not count. ``p`` is the normalised sum of the attention weights of all
        heads. ``info`` comes from ``attend(..., return_info=True)``, on a causal graph in the dense
        warm-up, on the chosen graph in the sparse stage. States and attention are treated as
        constants, so only the indexer has a gradient. Weights are computed from lse in chunks, and
        chunks of rows are computed again in the backward pass. ``rows`` restricts the loss to
        receivers ``start .. stop - 1``. Source: arXiv 2512.02556, equations 3 and 4. Raises
        ValueError if the graph varies by head.
        """
        graph = checks.instance("info", info, AttentionInfo).call.graph
        if graph.heads is not None:
            raise ValueError(f"info must come from one graph for all heads, got {graph!r}")
        (queries, weights), keys, _ = self._project(q.detach(), k.detach(), graph, len(info.call.q))
        start, stop = rows or (0, graph.num_dst)
        num_terms = int((graph.in_degree() > 0)[..., start:stop].sum()) * (1 if graph.batch else len(keys))
        num_pairs = graph.num_dst * graph.num_src * (graph.batch or 1)
        total = keys.new_zeros(())
        if rows is None and graph.num_edges <= MAX_SPARSE_DENSITY * num_pairs:
            for i, (call,) in enumerate(info.call.slices()):
                # If all samples share the graph, one call has all samples.
                sample = slice(None) if graph.batch is None else slice(i, i + 1)
                sample_info = AttentionInfo(call, info.lse[sample])
                total = total + _edge_divergence(sample_info, queries[sample], weights[sample], keys[sample])
        else:
            row_size = info.call.q.shape[0] * info.call.q.shape[1] * graph.num_src
            for begin, end in split_rows(stop - start, row_size):
                compute_divergence = partial(_row_divergence, info, (start + begin, start + end))
                total = total + recompute(compute_divergence, queries, weights, keys)
        return total / max(1, num_terms)

    def _project(
        self, q: Tensor, k: Tensor, graph: TokenGraph | None, batch: int | None = None
    ) -> tuple[QueriesAndWeights, Tensor, TokenGraph]:
        dtype = self.queries.weight.dtype
        for name, x, width in (("q", q, self.queries.in_features), ("k", k, self.keys.in_features)):
            has_shape = isinstance(x, Tensor) and x.dim() == 3 and x.shape[-1] == width
            has_shape = has_shape and len(x) == (batch or len(q))
            if not has_shape or (x.dtype != dtype and not torch.is_autocast_enabled(x.device.type)):
                raise ValueError(
                    f"{name} must be states [batch, tokens, {width}] in {dtype}, of the same samples, "
                    f"got {checks.quote(x)}"
                )
        graph = _choice.check_candidates(graph, q, k)
        queries_and_weights = self.receive(q, graph.positions("dst", graph.num_dst, q.device))
        return queries_and_weights, self.send(k, graph.positions("src", graph.num_src, k.device)), graph


def _score_rows(queries: Tensor, weights: Tensor, keys: Tensor, rows: tuple[int, int]) -> Tensor:
    """Return ``I [batch, rows, src]`` of the receivers ``rows``, which are ``(start, stop)``."""
    queries, weights = queries[:, :, slice(*rows)], weights[:, :, slice(*rows)]
    # One product for all heads reads the keys once. A single sample is multiplied as a matrix,
    # because torch multiplies batches of half-precision matrices slowly.
    flat_q = queries.flatten(1, 2)
    products = flat_q @ keys.mT if len(flat_q) > 1 else (flat_q[0] @ keys[0].t()).unsqueeze(0)
    products = products.to(weights.dtype).relu_().view(*queries.shape[:3], keys.shape[1])
    return (weights.mT.unsqueeze(2) @ products.transpose(1, 2)).squeeze(2)


def _score_edges(queries: Tensor, weights: Tensor, keys: Tensor, graph: TokenGraph) -> Tensor:
    """Return ``I [batch, edges]``, sorted by receiver, then sender."""
    dtype = edge_softmax.accumulation_dtype(keys.dtype)
    edges = edge_rows(graph, keys.device)
    products = operators.products(queries.to(dtype), keys.unsqueeze(1).to(dtype), edges.tensors, 1.0).relu()
    return (products * weights.to(dtype).index_select(2, edges.dst)).sum(1)


def _row_divergence(
    info: AttentionInfo, rows: tuple[int, int], queries: Tensor, weights: Tensor, keys: Tensor
) -> Float[Tensor, ""]:
    """Return the sum of ``KL(p || softmax of I)`` over the receivers ``rows``."""
    with torch.no_grad():
        p = info.weight_matrix(rows=rows).sum(1)
        p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        mask = _choice.mask_rows(info.call.graph, rows, p.device).flatten(0, 1)
    scores = _score_rows(queries, weights, keys, rows).to(p.dtype).masked_fill(~mask, -torch.inf)
    is_isolated = ~mask.any(-1, keepdim=True)
    log_prob = scores.masked_fill(is_isolated, 0.0).log_softmax(-1).masked_fill(~mask, 0.0)
    return (torch.xlogy(p, p) - p * log_prob).sum()


def _edge_divergence(info: AttentionInfo, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the sum of ``KL(p || softmax of I)`` if all heads and samples share the graph."""
    graph, device = info.call.graph, keys.device
    dst = edge_rows(graph, device).dst.long()
    with torch.no_grad():
        chunks = torch.split(edge_order(graph, device), EDGES_PER_CHUNK)
        p = torch.cat([info.weights(chunk).sum(1) for chunk in chunks], -1)
        row_sums = p.new_zeros(len(p), graph.num_dst).index_add_(1, dst, p)
        p = p / row_sums.clamp(min=torch.finfo(p.dtype).tiny)[:, dst]
    scores = _score_edges(queries, weights, keys, graph).to(p.dtype)
    lse = edge_softmax.softmax(scores, dst, graph.num_dst)[1]
    log_prob = scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, dst]
    return (torch.xlogy(p, p) - p * log_prob).sum()
