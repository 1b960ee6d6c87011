"""Convert graphs from and to edge lists, adjacency matrices and graphs of other libraries.

The direction is never guessed: an edge ``src -> dst`` is the entry ``mask[dst, src]``, the
column ``(src, dst)`` of an ``edge_index`` and the edge from src to dst in networkx.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, edge_list
from gnn_attention.graph.edges import Parallel

if TYPE_CHECKING:
    import networkx

CONVERTERS = (
    "convert.from_scipy (also for NumPy arrays), from_networkx (also for igraph's to_networkx()), "
    "from_pyg, from_mask, from_edge_index, from_block_mask; gnn_attention.convert.files.load for a path"
)
# These attributes of a torch_geometric object have one entry for each node.
NODE_ATTRIBUTES = ("x", "feat", "pos", "node_type", "n_id", "tf")


def kind_error(expectation: str, value: object) -> TypeError:
    return TypeError(f"{expectation}, got {checks.quote(value)}; other kinds of graph: {CONVERTERS}")


def from_edge_index(
    edge_index: Tensor,
    num_dst: int,
    num_src: int | None = None,
    coalesce: bool = False,
    parallel: Parallel = "error",
) -> TokenGraph:
    """Build a graph from an ``edge_index [2, E]`` or ``EdgeIndex``; see ``TokenGraph.from_edges``."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype not in edge_list.SIGNED_DTYPES:
        raise kind_error("edge_index must be a tensor of signed integers of shape [2, E]", edge_index)
    return TokenGraph.from_edges(edge_index, num_dst, num_src, coalesce, parallel=parallel)


def from_scipy(A: Any, rows: str, weight: bool = False, coalesce: bool = False) -> Any:
    """Build a graph from a SciPy sparse array or matrix of any format, or from a NumPy array.

    ``rows="src"`` reads ``A[src, dst]``, the adjacency of networkx and of
    ``scipy.sparse.csgraph``; ``rows="dst"`` reads ``A[dst, src]``, a mask. Every stored entry
    is an edge, even a zero, as in csgraph (``A.eliminate_zeros()`` drops zeros). But zeros are
    not edges in a NumPy array, nor in the formats BSR and DIA, which pad with zeros.
    Edges keep the order of ``A.tocoo()``; the edges of a NumPy array are sorted by row.

    ``weight=True`` returns ``(graph, weights)``, float ``[E]`` in ``graph.edge_index`` order. Raises
    TypeError for other objects, and ValueError for duplicate entries and for NaN or inf in a NumPy
    array or in weights. ``coalesce=True`` merges duplicates, but not with weights: none may be lost.

    >>> from_scipy(torch.tensor([[0, 3], [0, 0]]).numpy(), rows="src", weight=True)
    (TokenGraph(scipy: 2 src -> 2 dst), tensor([3.]))
    """
    if not (hasattr(A, "tocoo") or hasattr(A, "__array_interface__")):
        raise kind_error("A must be a SciPy sparse array or a NumPy array", A)
    checks.choice("rows", rows, ("src", "dst"))
    if A.ndim != 2 or A.dtype.kind not in "biuf":
        raise ValueError(f"A must be a matrix of numbers, got {checks.quote(A)}")
    if hasattr(A, "tocoo"):
        entries = A.tocoo()
        row, column, values = entries.row, entries.col, entries.data
        # BSR and DIA also store zeros that only pad their blocks and diagonals.
        is_edge = values != 0 if A.format in ("bsr", "dia") else slice(None)
        row, column, values = row[is_edge], column[is_edge], values[is_edge]
    else:
        row, column = A.nonzero()
        values = A.__array__()[row, column]
        if not (abs(values) < float("inf")).all():
            raise ValueError("A has NaN or inf, which may or may not be edges: pass np.isfinite(A) or A != 0")
    # torch lacks longdouble, most unsigned integers and foreign byte orders.
    dtype = {"f": f"f{min(values.itemsize, 8)}", "u": "f8"}.get(values.dtype.kind, "i8")
    weights = torch.from_numpy(values.astype(dtype)) if weight else None
    edges = torch.stack([torch.tensor(row), torch.tensor(column)])
    num_src, num_dst = A.shape
    if rows == "dst":
        edges, num_src, num_dst = edges.flip(0), num_dst, num_src
    return _build_graph(edges, weights, num_dst, num_src, "merge" if coalesce else "error", "scipy")


def to_scipy(graph: TokenGraph, rows: str, weights: Tensor | None = None) -> Any:
    """Return the edges as a ``coo_array``, ``A[src, dst]`` if ``rows="src"``, else ``A[dst, src]``.

    The entries are True, or ``weights [E]`` in the order of ``graph.edge_index``.

    >>> from gnn_attention import patterns
    >>> to_scipy(patterns.causal(3), rows="dst").toarray().astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    from scipy.sparse import coo_array

    checks.choice("rows", rows, ("src", "dst"))
    src, dst = checks.instance("graph", graph, TokenGraph).edge_index.numpy()
    values = torch.ones(len(src), dtype=torch.bool) if weights is None else _check_weights(graph, weights)
    matrix = coo_array((values.numpy(), (src, dst)), shape=(graph.num_src, graph.num_dst), copy=True)
    return matrix if rows == "src" else matrix.T


def from_networkx(
    graph: networkx.Graph, order: Sequence[Hashable] | None = None, weight: str | None = None
) -> Any:
    """Build a token graph from a networkx graph: an edge from u to v is a message from u to v.

    If the labels are exactly 0 .. n-1, they are positions; otherwise pass ``order``, a list of all
    nodes. An undirected edge is a message in both directions; self loops and parallel edges count once.
    With ``weight``, the name of an edge attribute, the result is ``(graph, weights)``, float ``[E]`` in
    ``graph.edge_index`` order. Convert an igraph graph with its ``to_networkx()``. Raises ValueError
    for a missing or wrong ``order``, and with ``weight`` for parallel edges or an edge without a number.

    >>> import networkx as nx
    >>> print(from_networkx(nx.DiGraph([("cat", "sat")]), order=["cat", "sat"]))
    networkx: mask[dst, src] and in-edges
    0 · ·   0 <- none
    1 ■ ·   1 <- 0
    """
    if isinstance(graph, type) or not all(hasattr(graph, x) for x in ("nodes", "edges", "is_directed")):
        raise kind_error("graph must be a networkx graph", graph)
    n = len(graph)
    if order is None and set(graph.nodes) != set(range(n)):
        labels = list(graph.nodes)[:3]
        raise ValueError(f"order is needed: nodes are not labelled 0 .. {n - 1}, but {labels} ...")
    nodes = range(n) if order is None else checks.labels("order", order, n, "nodes")
    try:
        mismatched_nodes = set(nodes).symmetric_difference(graph.nodes)
    except TypeError:
        raise TypeError(f"order must hold nodes, which are hashable, got {checks.quote(order)}") from None
    if mismatched_nodes:
        examples = ", ".join(sorted(map(repr, mismatched_nodes))[:3])
        raise ValueError(f"order must hold every node once, but it lacks or adds {examples}")
    positions = {node: position for position, node in enumerate(nodes)}
    triples = [(positions[u], positions[v], value) for u, v, value in graph.edges(data=weight)]
    return graph_from_triples(triples, graph.is_directed(), n, weight, "networkx")


def to_networkx(graph: TokenGraph, weights: Tensor | None = None) -> networkx.DiGraph:
    """Return a ``networkx.DiGraph`` with nodes 0 .. n-1 and an edge from src to dst for every message.

    ``weights [E]`` become the edge attribute "weight"; other lengths raise ValueError. If receivers and
    senders differ in number, nodes are ``("dst", i)`` with bipartite=1 and ``("src", j)`` with bipartite=0.

    >>> from gnn_attention import patterns
    >>> sorted(to_networkx(patterns.strict_causal(3)).edges)
    [(0, 1), (0, 2), (1, 2)]
    """
    import networkx as nx

    checks.instance("graph", graph, TokenGraph)
    network = nx.DiGraph(name=graph.name)
    edges = list(map(tuple, graph.edge_index.t().tolist()))
    if graph.num_dst == graph.num_src:
        network.add_nodes_from(range(graph.num_dst))
    else:
        network.add_nodes_from((("src", j) for j in range(graph.num_src)), bipartite=0)
        network.add_nodes_from((("dst", i) for i in range(graph.num_dst)), bipartite=1)
        edges = [(("src", j), ("dst", i)) for j, i in edges]
    network.add_edges_from(edges)
    if weights is not None:
        values = _check_weights(graph, weights).tolist()
        nx.set_edge_attributes(network, dict(zip(edges, values, strict=True)), "weight")
    return network


def from_pyg(
    data: Any,
    num_dst: int | None = None,
    num_src: int | None = None,
    coalesce: bool = False,
    weight: str | bool | None = None,
    parallel: Parallel = "error",
) -> Any:
    """Build a graph from a ``Data``, a relation of a ``HeteroData``, an edge list or an ``adj_t``.

    A ``Data``, or a relation ``hetero[src, name, dst]``, holds edges as ``edge_index`` or ``adj_t``.
    Its sizes are known if it, or each node type of the relation, has ``num_nodes`` or a tensor with a
    row for each node. An ``EdgeIndex`` may also have sizes. A sparse tensor is an ``adj_t``: rows are
    receivers, as in a mask, and stored entries are edges. Otherwise pass ``num_dst`` and ``num_src``,
    as the largest index is not used as a size. ``parallel`` is as in :meth:`TokenGraph.from_edges`.

    ``weight`` names an edge attribute, or is True for the (detached) values of a sparse tensor.
    With it the result is ``(graph, weights)``, with weights ``[E]`` in ``graph.edge_index`` order.
    Raises TypeError for other objects, and ValueError if a size or the weights are missing.

    >>> adj_t = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to_sparse()
    >>> from_pyg(adj_t).edge_index.tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    edges = data
    weights = None
    sizes = [(num_dst, num_src)]
    if hasattr(data, "keys") and (hasattr(data, "edge_index") or hasattr(data, "adj_t")):
        sizes.append(_look_up_sizes(data))
        edges = getattr(data, "edge_index", None)
        if isinstance(weight, str) and edges is not None and weight in data:
            weights = torch.as_tensor(data[weight])
        edges = getattr(data, "adj_t", None) if edges is None else edges
        if edges is None:
            raise ValueError("data holds neither an edge_index nor an adj_t")
    if hasattr(edges, "to_torch_sparse_coo_tensor"):
        edges = edges.to_torch_sparse_coo_tensor()
    if isinstance(edges, Tensor) and edges.layout in edge_list.SPARSE_LAYOUTS:
        sizes.append((edges.shape[0], edges.shape[1]))
        edges, values = read_sparse_entries("adj_t", edges)
        weights = values if weight is True else weights
    elif not isinstance(edges, Tensor) or edges.dtype == torch.bool or edges.is_floating_point():
        raise kind_error("expected a torch_geometric Data, EdgeIndex, data[key], adj_t or edge_index", edges)
    elif hasattr(edges, "sparse_size"):
        sizes.append(edges.sparse_size()[::-1])
    num_dst = _reconcile_sizes("num_dst", [size[0] for size in sizes])
    num_src = _reconcile_sizes("num_src", [size[1] for size in sizes])
    is_relation = isinstance(getattr(data, "_key", None), tuple)
    num_src = num_dst if num_src is None and not is_relation else num_src
    if num_dst is None or num_src is None:
        raise ValueError("num_dst and num_src are needed: edge_index does not state its number of nodes")
    if weight and weights is None:
        raise ValueError(
            f"weight={weight!r} names no weights in data, expected an attribute next to the edge_index "
            "of a Data, or True for a sparse tensor"
        )
    return _build_graph(edges, weights, num_dst, num_src, "merge" if coalesce else parallel, "pyg")


def to_pyg(graph: TokenGraph, kind: str = "data") -> Any:
    """Return a ``Data`` (``kind="data"``), ``EdgeIndex`` ("edge_index") or sparse tensor ("adj_t").

    Raises ValueError for a ``Data`` if senders and receivers differ in number.

    >>> from gnn_attention import patterns
    >>> to_pyg(patterns.causal(3), "adj_t").to_dense().int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    checks.choice("kind", kind, ("data", "edge_index", "adj_t"))
    edges = checks.instance("graph", graph, TokenGraph).edge_index
    if kind == "adj_t":
        ones = torch.ones(edges.shape[1], device=edges.device)
        size = (graph.num_dst, graph.num_src)
        return torch.sparse_coo_tensor(edges.flip(0), ones, size, check_invariants=False).coalesce()
    import torch_geometric

    if kind == "edge_index":
        return torch_geometric.EdgeIndex(edges.clone(), sparse_size=(graph.num_src, graph.num_dst))
    if graph.num_dst != graph.num_src:
        raise ValueError(f"a Data has one kind of node, {graph!r} two; use kind='edge_index' or 'adj_t'")
    return torch_geometric.data.Data(edge_index=edges.clone(), num_nodes=graph.num_dst)


def read_sparse_entries(argument: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges ``(src, dst)`` and the values of a sparse tensor ``[dst, src]``, in its order."""
    matrix = edge_list.unwrap_tensor(argument, matrix, edge_list.SPARSE_LAYOUTS)
    if matrix.dim() - matrix.dense_dim() != 2 or matrix.sparse_dim() != 2:
        raise ValueError(
            f"{argument} must have two sparse axes [dst, src], "
            f"got {matrix.sparse_dim()} of shape {list(matrix.shape)}"
        )
    # The public accessors need a coalesced tensor, in which duplicates are already summed.
    entries = matrix.detach().to_sparse(layout=torch.sparse_coo)
    edges, values = entries._indices().flip(0), entries._values()
    # Block layouts also store zeros that only pad their blocks.
    is_edge = values != 0 if matrix.layout in (torch.sparse_bsr, torch.sparse_bsc) else slice(None)
    return edges[:, is_edge], values[is_edge]


def _look_up_sizes(data: Any) -> tuple[int | None, int | None]:
    key = getattr(data, "_key", None)
    if not isinstance(key, tuple):
        return _count_nodes(data), _count_nodes(data)
    # A relation may join two node types, and the HeteroData that it belongs to may no longer exist.
    hetero = data._parent()
    node_types = () if hetero is None else hetero.node_types
    src, dst = (_count_nodes(hetero[kind]) if kind in node_types else None for kind in (key[0], key[-1]))
    return dst, src


def _count_nodes(store: Any) -> Any:
    # Without these attributes PyG guesses the largest index + 1. With `ptr`, `batch` may be a guess.
    attributes = NODE_ATTRIBUTES if "ptr" in store else (*NODE_ATTRIBUTES, "batch")
    arrays = (store[key] for key in attributes if key in store)
    is_sized = "num_nodes" in store or any(hasattr(x, "shape") or hasattr(x, "num_rows") for x in arrays)
    return store.num_nodes if is_sized else None


def _reconcile_sizes(name: str, sizes: Sequence[int | None]) -> int | None:
    sizes = [size for size in sizes if size is not None]
    if any(size != sizes[0] for size in sizes):
        raise ValueError(f"{name}={sizes[0]} contradicts the object, which has {sizes[-1]}: leave {name} out")
    return sizes[0] if sizes else None


def graph_from_triples(
    triples: list[tuple[int, int, Any]], is_directed: bool, num_tokens: int, weight: str | None, name: str
) -> Any:
    """Build a graph from triples ``(src, dst, value)``, in both directions if undirected."""
    if not is_directed:
        # A self loop is its own reverse and must not appear twice.
        triples = [triple for u, v, w in triples for triple in ((u, v, w), (v, u, w))[: 1 + (u != v)]]
    endpoints = [src for src, _, _ in triples], [dst for _, dst, _ in triples]
    edges = torch.tensor(endpoints, dtype=torch.int64, device="cpu")
    if weight is None:
        return _build_graph(edges, None, num_tokens, num_tokens, "merge", name)
    checks.instance("weight", weight, str)
    for src, dst, value in triples:
        if not isinstance(value, Real):
            raise ValueError(
                f"weight={weight!r} must name a number at every edge, "
                f"got {checks.quote(value)} at the edge {src} -> {dst}"
            )
    weights = torch.tensor([float(value) for *_, value in triples], device="cpu")
    return _build_graph(edges, weights, num_tokens, num_tokens, "merge", name)


def _build_graph(
    edges: Tensor, weights: Tensor | None, num_dst: int, num_src: int, parallel: Parallel, name: str
) -> Any:
    """Return the graph, or ``(graph, weights)``; ValueError if a weight is not finite or would be lost."""
    parallel = "merge" if weights is not None and parallel == "error" else parallel
    graph = TokenGraph.from_edges(edges, num_dst, num_src, name=name, parallel=parallel)
    if weights is None:
        return graph
    if graph.num_edges != edges.shape[1]:
        raise ValueError(
            "a graph holds one weight for each pair of tokens: join parallel edges first "
            "(A.sum_duplicates(), Data.coalesce(), networkx.Graph)"
        )
    if weights.is_complex() or weights.numel() != edges.shape[1]:
        raise ValueError(
            f"weight must be one number for each of {edges.shape[1]} edges, got {checks.quote(weights)}"
        )
    weights = weights.reshape(-1)
    if not (is_finite := weights.isfinite()).all():
        src, dst = edges[:, ~is_finite][:, 0].tolist()
        value = weights[~is_finite][0]
        raise ValueError(f"weights must be finite numbers, got {value} at the edge {src} -> {dst}")
    return graph, weights if weights.is_floating_point() else weights.to(torch.get_default_dtype())


def _check_weights(graph: TokenGraph, weights: Tensor) -> Tensor:
    if not isinstance(weights, Tensor) or weights.is_complex() or weights.shape != (graph.num_edges,):
        raise ValueError(
            f"weights must hold {graph.num_edges} numbers, one per edge, got {checks.quote(weights)}"
        )
    weights = weights.detach().cpu()
    # Of torch's floating point dtypes, SciPy supports only these two.
    needs_cast = weights.is_floating_point() and weights.dtype not in (torch.float32, torch.float64)
    return weights.float() if needs_cast else weights
