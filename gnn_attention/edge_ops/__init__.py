"""Primitives over the edges of a graph, with which a layer of attention takes eight lines.

``q`` and ``x`` have a row for each receiver, ``k`` and ``v`` one for each sender, as in
:func:`gnn_attention.attend`. Values of edges are ``[B, H, E]``, in the order of
``graph.edge_index`` and in float32 or better, as are all sums. Rows of a result have the dtype of
the rows of the arguments. The primitives need memory for the values of edges and rows of tokens,
never for a row at each edge. They have derivatives of every order, forward mode too, and run under
``torch.compile``, ``torch.export`` and ``torch.func``.

If a graph varies by head, its values of edges are ``[B, 1, E]``, for the edges of the first head, the
second head, and so on, each sorted by receiver, then sender. For samples they are ``[1, H, E]``.

>>> import torch
>>> from gnn_attention import attend, edge_ops, patterns
>>> graph = patterns.window(6, 3)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> weights = edge_ops.softmax(edge_ops.gather_products(q, k, graph) / 4**0.5, graph)
>>> torch.allclose(edge_ops.aggregate(weights, v, graph), attend(q, k, v, graph), atol=1e-6)
True
"""

from __future__ import annotations

from gnn_attention._support import checks, edge_checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edge_ops import normalisers, operators
from gnn_attention.edge_ops.edge_lists import edge_rows, merge_slices, split_slices
from gnn_attention.edge_softmax import accumulation_dtype, merge
from gnn_attention.graph import TokenGraph

__all__ = ["aggregate", "cumsum", "gather_products", "logsumexp", "maximum", "merge", "normalise"]
__all__ += ["scatter", "softmax"]

Values = Float[Tensor, "_ _ edges"]


def gather_products(
    q: Float[Tensor, "batch heads dst dim"], k: Float[Tensor, "#batch kv_heads src dim"], graph: TokenGraph
) -> Values:
    """Compute ``s_e = q_dst . k_src`` for each edge and head; groups of query heads may share a head of k.

    ValueError if q, k and the graph do not fit together.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> x = torch.arange(3.0).view(1, 1, 3, 1)
    >>> gather_products(x, x, patterns.causal(3)).tolist()
    [[[0.0, 0.0, 1.0, 0.0, 2.0, 4.0]]]
    """
    _check_rows("q", q, graph, "dst", graph.batch, graph.heads)
    _check_rows("k", k, graph, "src", q.shape[0], q.shape[1])
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same dim, got {list(q.shape)} and {list(k.shape)}")
    q, k = (x.to(accumulation_dtype(x.dtype)) for x in (q, k.expand(q.shape[0], -1, -1, -1)))
    edges = _edges(graph, q, k.shape[1], q.shape[1])
    products: Tensor = operators.products(merge_slices(q, graph), merge_slices(k, graph), edges, 1.0)
    return operators.restore_order(products, graph)


def aggregate(
    w: Values, v: Float[Tensor, "_ kv_heads src dim"], graph: TokenGraph
) -> Float[Tensor, "_ _ dst dim"]:
    """Compute ``y_dst = sum over the in-edges src -> dst of w_e v_src``, 0 without in-edges.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> v = torch.arange(3.0).view(1, 1, 3, 1)
    >>> aggregate(torch.ones(1, 1, 6), v, patterns.causal(3)).flatten().tolist()
    [0.0, 1.0, 3.0]
    """
    batch, heads = _check_values("w", w, graph)
    _check_rows("v", v, graph, "src", batch, heads)
    edges = _edges(graph, w, v.shape[1], heads)
    rows = merge_slices(v.expand(batch, -1, -1, -1).to(accumulation_dtype(v.dtype)), graph)
    sums = operators.incoming(_sort(w, graph).to(rows.dtype), rows, edges)
    return split_slices(sums, graph, batch, heads).to(v.dtype)


def scatter(
    w: Values,
    x: Float[Tensor, "_ heads dst dim"],
    graph: TokenGraph,
    num_kv_heads: int | None = None,
) -> Float[Tensor, "_ _ src dim"]:
    """Compute ``y_src = sum over the out-edges src -> dst of w_e x_dst``, the transpose of :func:`aggregate`.

    With ``num_kv_heads`` fewer heads than w has, the result is also summed over the heads of each group.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> x = torch.arange(3.0).view(1, 1, 3, 1)
    >>> scatter(torch.ones(1, 1, 6), x, patterns.causal(3)).flatten().tolist()
    [3.0, 3.0, 2.0]
    """
    batch, heads = _check_values("w", w, graph)
    _check_rows("x", x, graph, "dst", batch, heads)
    num_kv_heads = heads if num_kv_heads is None else checks.size("num_kv_heads", num_kv_heads, 1)
    if x.shape[1] != heads or heads % num_kv_heads:
        raise ValueError(
            f"x must have the {heads} heads of w, a multiple of num_kv_heads, "
            f"got {x.shape[1]} heads and num_kv_heads={num_kv_heads}"
        )
    edges = _edges(graph, w, num_kv_heads, heads)
    rows = merge_slices(x.expand(batch, -1, -1, -1).to(accumulation_dtype(x.dtype)), graph)
    kv_heads = 1 if graph.heads is not None else num_kv_heads
    sums = operators.outgoing(_sort(w, graph).to(rows.dtype), rows, edges, kv_heads)
    return split_slices(sums, graph, batch, num_kv_heads).to(x.dtype)


def softmax(s: Values, graph: TokenGraph) -> Values:
    """Compute ``w_e = exp(s_e) / sum of exp(s) over the in-edges of dst``; 0 if all these logits are -inf.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> softmax(torch.zeros(1, 1, 6), patterns.causal(3))[0, 0, :3].tolist()
    [1.0, 0.5, 0.5]
    """
    return normalise(s, graph, "softmax")


def logsumexp(s: Values, graph: TokenGraph) -> Float[Tensor, "_ _ dst"]:
    """Compute ``lse_dst = log(sum of exp(s_e) over the in-edges)``, -inf without in-edges; see :func:`merge`.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> logsumexp(torch.zeros(1, 1, 6), patterns.causal(3)).exp().round().flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    batch, heads = _check_values("s", s, graph)
    lse = operators.softmax(_sort(s, graph), _edges(graph, s))[1]
    return split_slices(lse.unsqueeze(-1), graph, batch, heads).squeeze(-1)


def normalise(s: Values, graph: TokenGraph, how: normalisers.Normaliser = "softmax") -> Values:
    """Compute the weight of each edge from its logit by a normaliser.

    ``how`` is "softmax", "sparsemax", "sigmoid", "silu", "gelu", "relu", "relu2" or "identity" (see
    :mod:`gnn_attention.edge_ops.normalisers` for formulas and papers), or a function of ``s [B, H, E]``
    that returns weights of that shape.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> logits = torch.tensor([[[0.0, 0.5, 1.0, -9.0, 0.0, 3.0]]])
    >>> normalise(logits, patterns.causal(3), "sparsemax").tolist()
    [[[1.0, 0.25, 0.75, 0.0, 0.0, 1.0]]]
    """
    how = normalisers.check_normaliser(how)
    _check_values("s", s, graph)
    s = s.to(accumulation_dtype(s.dtype))
    if how not in ("softmax", "sparsemax"):
        return normalisers.apply(how, s)
    weights, _ = normalisers.normalise(how, _sort(s, graph), _edges(graph, s), graph)
    return operators.restore_order(weights, graph)


def cumsum(s: Values, graph: TokenGraph, reverse: bool = False) -> Values:
    """Compute for each edge the sum of s over the in-edges of its receiver up to it, in the order of senders.

    With ``reverse`` the sum is from the edge on. No sum contains values of other receivers.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> cumsum(torch.ones(1, 1, 6), patterns.causal(3)).tolist()
    [[[1.0, 1.0, 2.0, 1.0, 2.0, 3.0]]]
    """
    _check_values("s", s, graph)
    reverse = checks.instance("reverse", reverse, bool)
    return operators.restore_order(operators.running_sums(_sort(s, graph), _edges(graph, s), reverse), graph)


def maximum(s: Values, graph: TokenGraph) -> Float[Tensor, "_ _ dst"]:
    """Return the largest value of the in-edges of each receiver, -inf without in-edges.

    Equal largest values share the gradient.

    >>> import torch
    >>> from gnn_attention import patterns
    >>> maximum(torch.arange(6.0).view(1, 1, 6), patterns.causal(3)).tolist()
    [[[0.0, 2.0, 5.0]]]
    """
    batch, heads = _check_values("s", s, graph)
    values, edges = _sort(s, graph), _edges(graph, s)
    largest = operators.largest(values, edges)
    return split_slices(largest.unsqueeze(-1), graph, batch, heads).squeeze(-1)


def _edges(graph: TokenGraph, x: Tensor, num_kv_heads: int = 1, num_heads: int = 1) -> list[Tensor]:
    group_size = 1 if graph.heads is None else num_heads // num_kv_heads
    return edge_rows(graph, x.device, group_size).tensors


def _sort(values: Tensor, graph: TokenGraph) -> Tensor:
    return operators.sort_values(values.to(accumulation_dtype(values.dtype)), graph)


def _check_rows(
    name: str, x: Tensor, graph: TokenGraph, side: str, batch: int | None, heads: int | None
) -> None:
    """Check rows of tokens for a call of ``batch`` samples and ``heads`` query heads, or any number."""
    _check_graph(graph)
    num_tokens = graph.num_dst if side == "dst" else graph.num_src
    edge_checks.floats(name, x, f"[B, H, {side}, D]")
    if x.dim() != 4 or x.shape[2] != num_tokens or not x.shape[1]:
        raise ValueError(f"{name} must be [B, H, {side}, D] with {side} = {num_tokens}, got {list(x.shape)}")
    if batch is not None and x.shape[0] not in (1, batch):
        raise ValueError(f"{name} must have 1 or {batch} samples, got {x.shape[0]}")
    if heads is not None and heads % x.shape[1]:
        raise ValueError(f"{name} must have a number of heads that divides {heads}, got {x.shape[1]}")


def _check_values(name: str, values: Tensor, graph: TokenGraph) -> tuple[int, int]:
    """Check values of edges, and return the numbers of samples and heads."""
    _check_graph(graph)
    edge_checks.floats(name, values, "[B, H, E]")
    shape = [graph.batch and 1, graph.heads and 1, edge_rows(graph, values.device).src.numel()]
    sizes = zip(values.shape, shape, strict=False)
    if values.dim() != 3 or any(expected not in (None, size) for size, expected in sizes):
        batch, heads = ("B" if graph.batch is None else 1), ("H" if graph.heads is None else 1)
        raise ValueError(f"{name} must be [{batch}, {heads}, {shape[2]}], got {list(values.shape)}")
    return graph.batch or values.shape[0], graph.heads or values.shape[1]


def _check_graph(graph: TokenGraph) -> None:
    checks.instance("graph", graph, TokenGraph)
    if type(graph) is not TokenGraph:
        raise NotImplementedError(
            f"edge_ops need a graph whose edges are all known, got a {type(graph).__name__}: make the graph "
            "outside of the compiled program, and use the whole graph on one rank"
        )
