"""The lightning indexer of DeepSeek sparse attention: few small heads learn what attention will look at."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import AttentionInfo
from gnn_attention.backends.cpu import csr_ops
from gnn_attention.backends.plan.csr import edges_of, order_of
from gnn_attention.graph import TokenGraph
from gnn_attention.patterns._choice import row_blocks
from gnn_attention.rotary import Rotary
from gnn_attention.selectors import _choice

EDGES_AT_ONCE = 2**16
FEW = 1 / 16  # share of the pairs up to which a graph is walked edge by edge
Received = tuple[Float[Tensor, "batch heads dst dim"], Float[Tensor, "batch heads dst"]]


class Indexer(nn.Module):
    """Chooses each receiver's ``k`` senders of largest ``I = sum_h w_h(dst) relu(q_h(dst) . key(src))``.

    One graph for all heads of a layer, from the states of its tokens; ``key`` is shared by the indexer's
    heads and normed, queries and keys are turned by a ``rotary`` of their own (None: none), and ``w`` is
    learned too, over ``sqrt(heads head_dim)``. ``dtype`` (``torch.bfloat16``) is that of the products when
    choosing. It learns by :meth:`loss` alone, or through :meth:`edge_scores` as a bias of attention.

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
        """``source_width`` is that of the senders' states where it differs."""
        super().__init__()
        self.k, self.num_heads = checks.size("k", k), checks.size("num_heads", num_heads, 1)
        checks.instance("rotary", Rotary() if rotary is None else rotary, Rotary)
        checks.instance("dtype", torch.float32 if dtype is None else dtype, torch.dtype)
        self.rotary, self.dtype, self.scale = rotary, dtype, (num_heads * head_dim) ** -0.5
        self.queries = nn.Linear(width, num_heads * checks.size("head_dim", head_dim, 1), bias=False)
        self.keys = nn.Linear(width if source_width is None else source_width, head_dim, bias=False)
        self.key_norm = nn.LayerNorm(head_dim)
        self.weights = nn.Linear(width, num_heads, bias=False)

    def receive(self, x: Float[Tensor, "batch dst width"], positions: Int[Tensor, " dst"]) -> Received:
        """Queries and weights of the receivers with states ``x``."""
        queries = self.queries(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self._rotate(queries, positions), self.weights(x).mT * self.scale

    def send(
        self, x: Float[Tensor, "batch src width"], positions: Int[Tensor, " src"]
    ) -> Float[Tensor, "batch src dim"]:
        """Keys of the senders with states ``x``: what a decoding step caches of its past."""
        return self._rotate(self.key_norm(self.keys(x)), positions)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rotary is None else self.rotary.turn(x, positions)

    @torch.no_grad()
    def select(
        self,
        q: Float[Tensor, "batch dst width"],
        k: Float[Tensor, "batch src source_width"],
        graph: TokenGraph | None = None,
    ) -> TokenGraph:
        """The chosen edges of ``graph`` (None: causal) for states ``q`` of receivers and ``k`` of senders."""
        received, keys, graph = self._ends(q, k, graph)
        return self.choose(received, keys, graph)

    @torch.no_grad()
    def choose(
        self, received: Received, keys: Float[Tensor, "batch src dim"], graph: TokenGraph
    ) -> TokenGraph:
        """:meth:`select` from what :meth:`receive` and :meth:`send` returned."""
        queries, keys = (x.to(self.dtype or keys.dtype) for x in (received[0], keys))

        def scores(rows: tuple[int, int]) -> Tensor:
            found = _scores(queries, received[1], keys, rows).unsqueeze(1)
            return found.masked_fill_(~_choice.mask_rows(graph, rows, keys.device), -torch.inf)

        width = queries.shape[0] * self.num_heads * graph.num_src
        return _choice.choose(scores, graph, width, self.k, f"indexed {self.k}")

    def edge_scores(
        self,
        q: Float[Tensor, "batch dst width"],
        k: Float[Tensor, "batch src source_width"],
        graph: TokenGraph,
    ) -> Float[Tensor, "batch one edges"]:
        """``I`` of every edge, in the order of ``graph.edge_index``, with gradients.

        As ``bias`` of ``attend`` it lets the loss of the model reach the indexer: ``I - I.detach()`` changes
        nothing but the gradient (straight through), ``logsigmoid(I)`` is a gate.
        """
        received, keys, graph = self._ends(q, k, graph)
        order = order_of(graph, keys.device)
        return _of_edges(*received, keys, graph)[:, order.argsort()].unsqueeze(1)

    def loss(
        self,
        q: Float[Tensor, "batch dst width"],
        k: Float[Tensor, "batch src source_width"],
        info: AttentionInfo,
        rows: tuple[int, int] | None = None,
    ) -> Float[Tensor, ""]:
        """``KL(p || softmax of I)`` over the in-edges of a receiver, mean over receivers that have any.

        ``p`` is the sum over heads of the attention's weights, normalised; ``info`` is what
        ``attend(..., return_info=True)`` returned: along a causal graph in the dense warm-up, along the
        chosen graph in the sparse stage. States and attention are taken as constants, so that the gradient
        reaches the indexer alone. Weights come from lse in chunks, and are made again in the backward pass.
        ``rows``: only the receivers ``start .. stop - 1``. ValueError for a graph that differs by head.

        Source: arXiv 2512.02556, equations 3 and 4.
        """
        graph = checks.instance("info", info, AttentionInfo).call.graph
        if graph.heads is not None:
            raise ValueError(f"an indexer has one graph for all heads, but info is of {graph!r}")
        received, keys, _ = self._ends(q.detach(), k.detach(), graph, len(info.call.q))
        total, count = keys.new_zeros(()), (graph.in_degree() > 0)[..., slice(*rows or (None,))].sum()
        pairs = graph.num_dst * graph.num_src * (graph.batch or 1)
        if rows is None and graph.num_edges <= FEW * pairs:
            for sample, (part,) in enumerate(info.call.slices()):
                own = slice(None) if graph.batch is None else slice(sample, sample + 1)
                sampled = AttentionInfo(part, info.lse[own])
                total = total + _along_edges(sampled, *(x[own] for x in (*received, keys)))
        else:
            start, stop = rows or (0, graph.num_dst)
            width = info.call.q.shape[0] * info.call.q.shape[1] * graph.num_src
            for first, last in row_blocks(stop - start, width):
                chunk = partial(_in_rows, info, (start + first, start + last))
                total = total + recompute(chunk, *received, keys)
        return total / max(1, int(count) * (1 if graph.batch else len(keys)))

    def _ends(
        self, q: Tensor, k: Tensor, graph: TokenGraph | None, batch: int | None = None
    ) -> tuple[Received, Tensor, TokenGraph]:
        dtype = self.queries.weight.dtype
        for name, x, width in (("q", q, self.queries.in_features), ("k", k, self.keys.in_features)):
            fits = isinstance(x, Tensor) and x.dim() == 3 and x.shape[-1] == width
            fits = fits and len(x) == (batch or len(q))
            if not fits or (x.dtype != dtype and not torch.is_autocast_enabled(x.device.type)):
                form = f"states [batch, tokens, {width}] in {dtype}, of the same samples"
                raise ValueError(f"{name} must be {form}, got {checks.quote(x)}")
        graph = _choice.check_candidates(graph, q, k)
        received = self.receive(q, graph.positions("dst", graph.num_dst, q.device))
        return received, self.send(k, graph.positions("src", graph.num_src, k.device)), graph


def _scores(queries: Tensor, weights: Tensor, keys: Tensor, rows: tuple[int, int]) -> Tensor:
    """``I [batch, rows, src]``."""
    queries, weights = queries[:, :, slice(*rows)], weights[:, :, slice(*rows)]
    # one product for all heads, which reads the keys once; of halves torch multiplies batches slowly
    left = queries.flatten(1, 2)
    products = left @ keys.mT if len(left) > 1 else (left[0] @ keys[0].t()).unsqueeze(0)
    products = products.to(weights.dtype).relu_().view(*queries.shape[:3], keys.shape[1])
    return (weights.mT.unsqueeze(2) @ products.transpose(1, 2)).squeeze(2)


def _of_edges(
    queries: Tensor, weights: Tensor, keys: Tensor, graph: TokenGraph
) -> Float[Tensor, "batch edges"]:
    """``I`` by receiver, then sender."""
    wide, listed = edge_softmax.accumulation_dtype(keys.dtype), edges_of(graph, keys.device)
    products = csr_ops.products(queries.to(wide), keys.unsqueeze(1).to(wide), listed.tensors).relu()
    return (products * weights.to(wide).index_select(2, listed.dst)).sum(1)


def _in_rows(
    info: AttentionInfo, rows: tuple[int, int], queries: Tensor, weights: Tensor, keys: Tensor
) -> Float[Tensor, ""]:
    """The sum of the divergences of some receivers."""
    with torch.no_grad():
        p = info.weight_matrix(rows=rows).sum(1)
        p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        edge = _choice.mask_rows(info.call.graph, rows, p.device).flatten(0, 1)
    scores = _scores(queries, weights, keys, rows).to(p.dtype).masked_fill(~edge, -torch.inf)
    isolated = ~edge.any(-1, keepdim=True)
    likely = scores.masked_fill(isolated, 0.0).log_softmax(-1).masked_fill(~edge, 0.0)
    return (torch.xlogy(p, p) - p * likely).sum()


def _along_edges(info: AttentionInfo, queries: Tensor, weights: Tensor, keys: Tensor) -> Float[Tensor, ""]:
    """The sum of the divergences of all receivers of a plain graph."""
    graph, device = info.call.graph, keys.device
    dst = edges_of(graph, device).dst.long()
    with torch.no_grad():
        parts = torch.split(order_of(graph, device), EDGES_AT_ONCE)
        p = torch.cat([info.weights(part).sum(1) for part in parts], -1)
        total = p.new_zeros(len(p), graph.num_dst).index_add_(1, dst, p)
        p = p / total.clamp(min=torch.finfo(p.dtype).tiny)[:, dst]
    scores = _of_edges(queries, weights, keys, graph).to(p.dtype)
    lse = edge_softmax.softmax(scores, dst, graph.num_dst)[1]
    return (torch.xlogy(p, p) - p * (scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, dst])).sum()
