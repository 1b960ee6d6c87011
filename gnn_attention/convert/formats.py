"""Graphs in and out: masks, edge lists, networkx, torch_geometric.

The direction is never guessed: an edge ``src -> dst`` is ``mask[dst, src]``, the column ``(src, dst)`` of an
``edge_index`` and networkx's edge from src to dst.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    import networkx


def from_mask(mask: Tensor, meaning: str | None = None) -> Any:
    """The graph of an attention mask ``[dst, src]``, ``[heads, dst, src]`` or ``[batch, heads, dst, src]``.

    ``meaning``: "attend" (True = edge, as in SDPA; the default for bool), "masked" (True = no edge, as in
    ``nn.MultiheadAttention``) or "additive" (the default for float: -inf and the lowest number of the dtype,
    or of a half dtype it was widened from, are non-edges). Returns a :class:`TokenGraph`, or ``(graph,
    bias)`` if an additive mask holds finite numbers other than 0: bias ``[E]``, ``[heads, E]`` or ``[batch,
    heads, E]`` in the order of ``graph.edge_index``. A leading axis of size 1 is the same for all.

    Raises TypeError (a dtype that does not fit the meaning) and ValueError (a float mask of 0/1, NaN or +inf,
    a wrong number of axes, a bias on a mask whose edges differ by head or sample).

    >>> from_mask(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])).edge_index.tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"mask must be a bool or float tensor, got {quoted(mask)}")
    if mask.is_meta:
        raise ValueError("mask must hold values, got a tensor on the meta device, which has shapes alone")
    if not 2 <= mask.dim() <= 4 or 0 in mask.shape[:-2]:
        expected = "[dst, src], [heads, dst, src] or [batch, heads, dst, src], heads and batch at least 1"
        raise ValueError(f"mask must be {expected}, got {list(mask.shape)}")
    natural = "attend" if mask.dtype == torch.bool else "additive"
    meaning = checks.choice("meaning", meaning or natural, ("attend", "masked", "additive"))
    if (meaning == "additive") != mask.is_floating_point():
        raise TypeError(
            f"meaning={meaning!r} does not fit a {mask.dtype} mask: only additive masks are float"
        )
    mask = mask[(None,) * (4 - mask.dim())]
    table = mask.detach().cpu()
    if meaning == "additive":
        _refuse_zeros_and_ones(table)
        return _from_additive(mask, additive_edges(table))
    return _from_table(table if meaning == "attend" else ~table)


def from_edge_index(
    edge_index: Tensor, num_dst: int, num_src: int | None = None, coalesce: bool = False
) -> TokenGraph:
    """The graph of an ``edge_index [2, E]`` or ``EdgeIndex``, in its order; see ``TokenGraph.from_edges``."""
    return TokenGraph.from_edges(edge_index, num_dst, num_src, coalesce)


def from_networkx(graph: networkx.Graph, order: Sequence[Hashable] | None = None) -> TokenGraph:
    """The token graph of a networkx graph: an edge from u to v is a message from u to v.

    Nodes labelled exactly 0 .. n-1 are those positions; other labels need ``order``, every node once. An
    undirected edge is a message in both directions; a self loop or a parallel edge counts once. ValueError if
    ``order`` is missing or is not the nodes.

    >>> import networkx as nx
    >>> print(from_networkx(nx.DiGraph([("cat", "sat")]), order=["cat", "sat"]))
    networkx: mask[dst, src] and in-edges
    0 · ·   0 <- none
    1 ■ ·   1 <- 0
    """
    if not all(hasattr(graph, name) for name in ("nodes", "edges", "is_directed")):
        raise TypeError(f"graph must be a networkx graph, got {type(graph).__name__}")
    if order is None:
        order = range(len(graph))
        if set(graph.nodes) != set(order):
            shown = ", ".join(map(repr, list(graph.nodes)[:3]))
            raise ValueError(
                f"order is needed: nodes are not labelled 0 .. {len(graph) - 1}, got {shown}, ..."
            )
    if not isinstance(order, Iterable):
        raise TypeError(f"order must be a list of nodes, every one once, got {quoted(order)}")
    order = list(order)
    position = {node: i for i, node in enumerate(order)}
    if len(position) != len(order) or set(position) != set(graph.nodes):
        wrong = [n for n in graph.nodes if n not in position] + [n for n in position if n not in graph]
        raise ValueError(f"order must hold every node once, got {wrong[:3] or 'a repeated node'}")
    pairs = [(position[u], position[v]) for u, v in graph.edges()]
    if not graph.is_directed():
        pairs = [pair for u, v in pairs for pair in ((u, v), (v, u))]
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    return TokenGraph.from_edges(edges, len(order), coalesce=True, name="networkx")


def to_networkx(graph: TokenGraph, labels: Sequence[str] | None = None) -> networkx.DiGraph:
    """A ``networkx.DiGraph`` with an edge from src to dst for every message, nodes 0 .. n-1.

    ``labels`` become the node attribute "label", else ValueError for another number of them. Where receivers
    and senders differ in number the nodes are ``("src", j)`` and ``("dst", i)``, with "bipartite" 0 and 1.

    >>> from gnn_attention import patterns
    >>> sorted(to_networkx(patterns.strict_causal(3)).edges)
    [(0, 1), (0, 2), (1, 2)]
    """
    import networkx as nx

    checks.instance("graph", graph, TokenGraph)
    result = nx.DiGraph(name=graph.name)
    pairs = graph.edge_index.t().tolist()
    if graph.num_dst != graph.num_src:
        if labels is not None:
            raise ValueError("labels name the nodes of a square graph; this one has two kinds, src and dst")
        result.add_nodes_from((("src", j) for j in range(graph.num_src)), bipartite=0)
        result.add_nodes_from((("dst", i) for i in range(graph.num_dst)), bipartite=1)
        result.add_edges_from((("src", j), ("dst", i)) for j, i in pairs)
        return result
    if labels is not None and len(labels) != graph.num_dst:
        raise ValueError(f"labels must name each of the {graph.num_dst} nodes, got {len(labels)}")
    result.add_nodes_from(range(graph.num_dst))
    nx.set_node_attributes(result, dict(enumerate(labels or ())), "label")
    result.add_edges_from(map(tuple, pairs))
    return result


def from_pyg(
    data: Any, num_dst: int | None = None, num_src: int | None = None, coalesce: bool = False
) -> TokenGraph:
    """The graph of a torch_geometric ``Data`` (its ``edge_index`` or ``adj_t``), ``EdgeIndex`` or ``adj_t``.

    A sparse tensor is an ``adj_t``: its rows are receivers, exactly the attention mask; values are not read.
    ``num_dst`` / ``num_src`` are needed where the object does not know its sizes. Raises TypeError for
    anything else and ValueError where a size is missing or a CSC layout swaps rows and columns.

    >>> adj_t = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to_sparse()
    >>> from_pyg(adj_t).edge_index.tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    if hasattr(data, "edge_index") or hasattr(data, "adj_t"):
        edge_index, adj_t = getattr(data, "edge_index", None), getattr(data, "adj_t", None)
        if edge_index is None and adj_t is None:
            raise ValueError("this Data holds neither an edge_index nor an adj_t")
        if edge_index is None:
            return from_pyg(adj_t, num_dst, num_src, coalesce)
        count = _known_nodes(data)
        return from_pyg(edge_index, *_agreed(num_dst, num_src, count, count), coalesce)
    if hasattr(data, "sparse_size") and hasattr(data, "as_tensor"):
        known_src, known_dst = data.sparse_size()
        return _with_sizes(data.as_tensor(), *_agreed(num_dst, num_src, known_dst, known_src), coalesce)
    if hasattr(data, "to_torch_sparse_coo_tensor"):
        data = data.to_torch_sparse_coo_tensor()
    if isinstance(data, Tensor) and data.layout != torch.strided:
        if data.layout not in (torch.sparse_csr, torch.sparse_coo):
            got = f"{data.layout}; use .to_sparse_csr()"
            raise ValueError(f"a sparse adj_t must be COO or CSR with receivers as rows, got {got}")
        # as stored: a duplicate must be seen, not summed
        edges = data.to_sparse(layout=torch.sparse_coo)._indices().flip(0)
        return _with_sizes(edges, *_agreed(num_dst, num_src, *data.shape), coalesce)
    if isinstance(data, Tensor) and not (data.dtype == torch.bool or data.is_floating_point()):
        return _with_sizes(data, num_dst, num_dst if num_src is None else num_src, coalesce)
    expected = "a torch_geometric Data, EdgeIndex, integer edge_index or sparse adj_t"
    raise TypeError(f"expected {expected}, got {quoted(data)}; for other graphs see from_mask, from_networkx")


def to_pyg(graph: TokenGraph, kind: str = "data") -> Any:
    """The graph as torch_geometric's ``Data`` (``kind="data"``), ``EdgeIndex`` ("edge_index") or "adj_t".

    ValueError for a ``Data``, which has one kind of node, if senders and receivers differ in number.

    >>> from gnn_attention import patterns
    >>> to_pyg(patterns.causal(3), "adj_t").to_dense().int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    checks.choice("kind", kind, ("data", "edge_index", "adj_t"))
    edges = checks.instance("graph", graph, TokenGraph).edge_index
    if kind == "adj_t":
        ones, size = torch.ones(edges.shape[1], device=edges.device), (graph.num_dst, graph.num_src)
        return torch.sparse_coo_tensor(edges.flip(0), ones, size, check_invariants=False).coalesce()
    if kind == "edge_index":
        from torch_geometric import EdgeIndex

        return EdgeIndex(edges.clone(), sparse_size=(graph.num_src, graph.num_dst))
    if graph.num_dst != graph.num_src:
        raise ValueError(f"a Data has one kind of node, {graph!r} two; use kind='edge_index' or 'adj_t'")
    from torch_geometric.data import Data

    return Data(edge_index=edges.clone(), num_nodes=graph.num_dst)


def additive_edges(mask: Tensor) -> Tensor:
    """Where an additive mask has edges: above the lowest number of its dtype, or of a narrower one."""
    if mask.isnan().any() or (mask == torch.inf).any():
        raise ValueError("an additive mask holds 0.0, finite numbers and -inf; this one holds NaN or +inf")
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    return (mask > lowest) & (mask != torch.finfo(torch.float16).min)


def _refuse_zeros_and_ones(mask: Tensor) -> None:
    if ((mask == 0) | (mask == 1)).all() and (mask == 1).any():
        reason = "is no additive mask (it would add 1 to logits): use mask.bool()"
        raise ValueError(f"a float mask of zeros and ones {reason}")


def _from_additive(mask: Tensor, edges: Tensor) -> TokenGraph | tuple[TokenGraph, Tensor]:
    if not (mask.detach().cpu().masked_select(edges) != 0).any():
        return _from_table(edges)
    if not (edges == edges[:1, :1]).all():
        reason = "holds numbers, and its edges differ by head or sample"
        raise ValueError(f"this additive mask {reason}: give a score_mod and a bool mask instead")
    graph = _from_table(edges[:1, :1])
    src, dst = graph.edges_on(mask.device)
    bias: Float[Tensor, "batch heads edges"] = mask[:, :, dst, src]
    bias = bias[0] if bias.shape[0] == 1 else bias
    return graph, bias[0] if bias.shape[:-1] == (1,) else bias


def _from_table(mask: Tensor) -> TokenGraph:
    batch, heads, num_dst, num_src = mask.shape
    if batch == heads == 1:
        dst, src = mask[0, 0].nonzero(as_tuple=True)
        return TokenGraph.from_edges(torch.stack([src, dst]), num_dst, num_src, name="mask")
    rule = partial(_in_table, mask.clone())
    varies = {"heads": heads if heads > 1 else None, "batch": batch if batch > 1 else None}
    return TokenGraph.from_rule(rule, num_dst, num_src, name="mask", **varies)


def _in_table(mask: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    # an axis of size 1 is the same for all
    by_batch, by_head = int(mask.shape[0] > 1), int(mask.shape[1] > 1)
    return mask.to(dst.device)[b * by_batch, h * by_head, dst, src]


def _known_nodes(data: Any) -> int | None:
    # where no key says it, `num_nodes` would guess the largest index + 1
    keys = ("num_nodes", "x", "feat", "pos", "batch")
    return data.num_nodes if any(key in keys or "node" in key for key in data.keys()) else None  # noqa: SIM118


def _agreed(
    num_dst: int | None, num_src: int | None, known_dst: int | None, known_src: int | None
) -> tuple[int | None, int | None]:
    for name, size, known in (("num_dst", num_dst, known_dst), ("num_src", num_src, known_src)):
        if None not in (size, known) and size != known:
            raise ValueError(f"{name}={size} contradicts the object, which has {known}: leave {name} out")
    return known_dst if num_dst is None else num_dst, known_src if num_src is None else num_src


def _with_sizes(edges: Tensor, num_dst: int | None, num_src: int | None, coalesce: bool) -> TokenGraph:
    if num_dst is None or num_src is None:
        raise ValueError("num_dst and num_src are needed: this edge_index does not know its number of nodes")
    return TokenGraph.from_edges(edges, num_dst, num_src, coalesce, name="pyg")
