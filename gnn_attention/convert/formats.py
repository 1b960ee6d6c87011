"""Graphs in and out: masks, edge lists, networkx, torch_geometric, and the forms that attention kernels take.

The direction is the same at every border and never guessed: an edge ``src -> dst`` stands at
``mask[dst, src]`` and in the column ``(src, dst)`` of an ``edge_index``; it is networkx's edge from src to
dst. networkx and torch_geometric are loaded when a function needs them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    import networkx

MEANINGS = ("attend", "masked", "additive")


def from_mask(mask: Tensor, meaning: str | None = None) -> Any:
    """The graph of an attention mask ``[dst, src]``, ``[heads, dst, src]`` or ``[batch, heads, dst, src]``.

    ``meaning`` says how to read it: "attend" (True = edge, SDPA; the default for bool), "masked" (True = no
    edge: ``nn.MultiheadAttention``) or "additive" (the default for float: -inf and the lowest number of the
    dtype, or of a half dtype it was widened from, are non-edges, 0.0 is an edge). Returns a
    :class:`TokenGraph`; if an additive mask holds other finite numbers, ``(graph, bias)`` with bias ``[E]``,
    ``[heads, E]`` or ``[batch, heads, E]`` in the order of ``graph.edge_index``. A leading axis of size 1 is
    the same for all.

    Raises TypeError (neither bool nor float, or a dtype that does not fit the meaning) and ValueError (a
    float mask of 0/1, NaN or +inf, a wrong number of axes, numbers on a mask whose edges differ by head or
    sample).

    >>> from_mask(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])).edge_index.tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = (
            f"a {mask.dtype} tensor; use mask.bool()"
            if isinstance(mask, Tensor)
            else f"{type(mask).__name__}; use torch.as_tensor"
        )
        raise TypeError(f"mask must be a bool or float tensor, got {got}")
    if mask.is_meta:
        raise ValueError("mask must hold values, got a tensor on the meta device, which has shapes alone")
    if not 2 <= mask.dim() <= 4:
        raise ValueError(
            f"mask must be [dst, src], [heads, dst, src] or [batch, heads, dst, src], got {list(mask.shape)}"
        )
    if 0 in mask.shape[:-2]:
        raise ValueError(f"the heads and batch of a mask must be at least 1, got shape {list(mask.shape)}")
    natural = "attend" if mask.dtype == torch.bool else "additive"
    meaning = checks.choice("meaning", meaning or natural, MEANINGS)
    if (meaning == "additive") != mask.is_floating_point():
        raise TypeError(
            f"meaning={quoted(meaning)} does not fit a {mask.dtype} mask: additive masks are float, the others bool"
        )
    wide = mask.detach().cpu()[(None,) * (4 - mask.dim())]
    if meaning == "additive":
        return _from_additive(mask[(None,) * (4 - mask.dim())], additive_edges(wide))
    return _from_table(wide if meaning == "attend" else ~wide)


def from_edge_index(
    edge_index: Tensor, num_dst: int, num_src: int | None = None, coalesce: bool = False
) -> TokenGraph:
    """The graph of an ``edge_index [2, E]`` or ``EdgeIndex``, in its order; see ``TokenGraph.from_edges``."""
    return TokenGraph.from_edges(edge_index, num_dst, num_src, coalesce)


def from_networkx(graph: networkx.Graph, order: Sequence[Hashable] | None = None) -> TokenGraph:
    """The token graph of a networkx graph: an edge from u to v is a message from u to v.

    Nodes labelled exactly 0 .. n-1 stand at those positions, whatever the order they were added in; other
    labels need ``order``, every node once. An undirected edge is a message in both directions; a self loop or
    a parallel edge counts once. ValueError if ``order`` is missing or is not the nodes.

    >>> import networkx as nx
    >>> print(from_networkx(nx.DiGraph([("cat", "sat")]), order=["cat", "sat"]))
    networkx: mask[dst, src] and in-edges
    0 · ·   0 <- none
    1 ■ ·   1 <- 0
    """
    if not all(hasattr(graph, name) for name in ("nodes", "edges", "is_directed")):
        raise TypeError(f"graph must be a networkx graph, got {type(graph).__name__}")
    if order is None:
        if set(graph.nodes) != set(range(len(graph))):
            shown = ", ".join(map(repr, list(graph.nodes)[:3]))
            raise ValueError(
                f"order is needed for nodes that are not labelled 0 .. {len(graph) - 1} (got {shown}, ...)"
            )
        order = range(len(graph))
    order = _node_list(order)
    position = {node: i for i, node in enumerate(order)}
    if len(position) != len(order) or set(position) != set(graph.nodes):
        wrong = [n for n in graph.nodes if n not in position] + [n for n in position if n not in graph]
        raise ValueError(
            f"order must hold every node once; missing, unknown or repeated: {wrong[:3] or 'a repeated node'}"
        )
    pairs = [(position[u], position[v]) for u, v in graph.edges()]
    if not graph.is_directed():
        pairs = [pair for u, v in pairs for pair in ((u, v), (v, u))]
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    return TokenGraph.from_edges(edges, len(order), coalesce=True, name="networkx")


def to_networkx(graph: TokenGraph, labels: Sequence[str] | None = None) -> networkx.DiGraph:
    """A ``networkx.DiGraph`` with an edge from src to dst for every message, nodes 0 .. n-1.

    ``labels`` become the node attribute "label". Where receivers and senders are different in number the
    nodes are ``("src", j)`` and ``("dst", i)``, with networkx's attribute "bipartite" 0 and 1. ValueError for
    labels of another length.

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
            raise ValueError(
                "labels name the nodes of a square graph; this one has two kinds of nodes, src and dst"
            )
        result.add_nodes_from((("src", j) for j in range(graph.num_src)), bipartite=0)
        result.add_nodes_from((("dst", i) for i in range(graph.num_dst)), bipartite=1)
        result.add_edges_from((("src", j), ("dst", i)) for j, i in pairs)
        return result
    if labels is not None and len(labels) != graph.num_dst:
        raise ValueError(f"labels must name each of the {graph.num_dst} nodes, got {len(labels)}")
    for node in range(graph.num_dst):
        result.add_node(node, **({} if labels is None else {"label": labels[node]}))
    result.add_edges_from(map(tuple, pairs))
    return result


def from_pyg(
    data: Any, num_dst: int | None = None, num_src: int | None = None, coalesce: bool = False
) -> TokenGraph:
    """The graph of a torch_geometric ``Data`` (its ``edge_index`` or ``adj_t``), an ``EdgeIndex``, or a
    sparse ``adj_t``.

    An adjacency that comes as a sparse tensor is ``adj_t``: rows are receivers, exactly the attention mask.
    Sizes come from the object; ``num_dst`` / ``num_src`` are needed where it does not know them. Values of a
    sparse tensor are not read. Raises TypeError for anything else and ValueError where a size is missing or a
    CSC layout turns rows and columns.

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
        num_dst, num_src = _agree("num_dst", num_dst, count), _agree("num_src", num_src, count)
        return from_pyg(edge_index, num_dst, num_src, coalesce)
    if hasattr(data, "sparse_size") and hasattr(data, "as_tensor"):
        known_src, known_dst = data.sparse_size()
        num_dst, num_src = _agree("num_dst", num_dst, known_dst), _agree("num_src", num_src, known_src)
        return _with_sizes(data.as_tensor(), num_dst, num_src, coalesce)
    if hasattr(data, "to_torch_sparse_coo_tensor"):
        data = data.to_torch_sparse_coo_tensor()
    if isinstance(data, Tensor) and data.layout != torch.strided:
        edges = _adjacency_edges(data)
        num_dst, num_src = (
            _agree("num_dst", num_dst, data.shape[0]),
            _agree("num_src", num_src, data.shape[1]),
        )
        return _with_sizes(edges, num_dst, num_src, coalesce)
    if isinstance(data, Tensor) and not (data.dtype == torch.bool or data.is_floating_point()):
        return _with_sizes(data, num_dst, num_dst if num_src is None else num_src, coalesce)
    got = f"a dense {data.dtype} tensor" if isinstance(data, Tensor) else type(data).__name__
    raise TypeError(
        f"expected a torch_geometric Data, EdgeIndex, integer edge_index or sparse adj_t, got {got}; "
        "for other graphs see convert.from_mask and convert.from_networkx, or give a TokenGraph"
    )


def to_pyg(graph: TokenGraph, kind: str = "data") -> Any:
    """The graph for torch_geometric: ``kind`` "data" (a ``Data``), "edge_index" (an ``EdgeIndex``) or "adj_t"
    (a sparse tensor).

    A ``Data`` has one kind of node: ValueError for a graph between different numbers of senders and
    receivers.

    >>> from gnn_attention import patterns
    >>> to_pyg(patterns.causal(3), "adj_t").to_dense().int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    checks.choice("kind", kind, ("data", "edge_index", "adj_t"))
    edges = checks.instance("graph", graph, TokenGraph).edge_index
    if kind == "adj_t":
        ones, size = torch.ones(edges.shape[1], device=edges.device), (graph.num_dst, graph.num_src)
        return torch.sparse_coo_tensor(
            edges.flip(0), ones, size, device=edges.device, check_invariants=False
        ).coalesce()
    if kind == "edge_index":
        from torch_geometric import EdgeIndex

        return EdgeIndex(edges.clone(), sparse_size=(graph.num_src, graph.num_dst))
    if graph.num_dst != graph.num_src:
        raise ValueError(
            f"a Data has one kind of node, but {graph!r} has two; use kind='edge_index' or 'adj_t'"
        )
    from torch_geometric.data import Data

    return Data(edge_index=edges.clone(), num_nodes=graph.num_dst)


def _node_list(order: Any) -> list[Hashable]:
    try:
        nodes = list(order)
        hash(tuple(nodes))
    except TypeError:
        raise TypeError(f"order must be a list of nodes, every one once, got {quoted(order)}") from None
    return nodes


def additive_edges(mask: Tensor) -> Tensor:
    """Where an additive mask has edges: above the lowest number of its dtype, or of a narrower one."""
    if mask.isnan().any() or (mask == torch.inf).any():
        raise ValueError("an additive mask holds 0.0, finite numbers and -inf; this one holds NaN or +inf")
    if mask.numel() and ((mask == 0) | (mask == 1)).all() and (mask == 1).any():
        raise ValueError(
            "a float mask of zeros and ones is no additive mask (it would add 1 to logits): use mask.bool()"
        )
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    return (mask > lowest) & (mask != torch.finfo(torch.float16).min)


def _from_additive(mask: Tensor, edges: Tensor) -> TokenGraph | tuple[TokenGraph, Tensor]:
    if not (mask.detach().cpu().masked_select(edges) != 0).any():
        return _from_table(edges)
    if not (edges == edges[:1, :1]).all():
        raise ValueError(
            "this additive mask holds numbers, and its edges differ by head or sample, so its bias has no single edge "
            "order: pass the numbers as a score_mod and the edges as a bool mask"
        )
    graph = _from_table(edges[:1, :1])
    src, dst = graph.edges_on(mask.device)
    bias: Float[Tensor, "batch heads edges"] = mask[:, :, dst, src]
    while bias.dim() > 1 and bias.shape[0] == 1:
        bias = bias[0]
    return graph, bias


def _from_table(mask: Tensor) -> TokenGraph:
    batch, heads, num_dst, num_src = mask.shape
    if batch == heads == 1:
        dst, src = mask[0, 0].nonzero(as_tuple=True)
        return TokenGraph.from_edges(torch.stack([src, dst]), num_dst, num_src, name="mask")
    rule = partial(_in_table, mask.clone(), int(batch > 1), int(heads > 1))
    varies = {"heads": heads if heads > 1 else None, "batch": batch if batch > 1 else None}
    return TokenGraph.from_rule(rule, num_dst, num_src, name="mask", **varies)


def _in_table(
    mask: Tensor, by_batch: int, by_head: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    return mask.to(dst.device)[b * by_batch, h * by_head, dst, src]


def _adjacency_edges(adjacency: Tensor) -> Tensor:
    if adjacency.layout == torch.sparse_csr:
        counts = adjacency.crow_indices().diff()
        dst = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        return torch.stack([adjacency.col_indices().to(torch.int64), dst])
    if adjacency.layout == torch.sparse_coo:
        return adjacency._indices().flip(0)  # as stored: a duplicate must be seen, not summed
    raise ValueError(
        f"a sparse adj_t must be COO or CSR with receivers as rows, got {adjacency.layout}; use .to_sparse_csr()"
    )


def _known_nodes(data: Any) -> int | None:
    """What a Data says for sure; its ``num_nodes`` would guess the largest index + 1 where nothing does."""
    said = [key for key in data.keys() if key in ("num_nodes", "x", "feat", "pos", "batch") or "node" in key]  # noqa: SIM118
    return data.num_nodes if said else None


def _agree(name: str, given: int | None, known: int | None) -> int | None:
    if given is not None and known is not None and given != known:
        raise ValueError(
            f"{name}={given} contradicts the object, which has {known}; leave {name} out or mend the object"
        )
    return known if given is None else given


def _with_sizes(edges: Tensor, num_dst: int | None, num_src: int | None, coalesce: bool) -> TokenGraph:
    if num_dst is None or num_src is None:
        raise ValueError(
            "num_dst and num_src are needed: this edge_index does not know how many nodes there are"
        )
    return TokenGraph.from_edges(edges, num_dst, num_src, coalesce, name="pyg")
