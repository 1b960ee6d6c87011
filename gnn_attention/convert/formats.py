"""Graphs in and out: edge lists, adjacency matrices, graphs of other libraries.

The direction is never guessed: an edge ``src -> dst`` is ``mask[dst, src]``, the column ``(src, dst)`` of an
``edge_index`` and the edge from src to dst of networkx.
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

OTHERS = (
    "convert.from_scipy (NumPy's arrays too), from_networkx (igraph's to_networkx() too), from_pyg, "
    "from_mask, from_edge_index, from_block_mask; of a path: gnn_attention.convert.files.load"
)
# the attributes of a torch_geometric object which have one entry for each node
NODE_KEYS = ("x", "feat", "pos", "node_type", "n_id", "tf")


def wrong_kind(expected: str, value: object) -> TypeError:
    """The error for an object of another kind, which names the functions of the others."""
    return TypeError(f"{expected}, got {checks.quote(value)}; other kinds of graph: {OTHERS}")


def from_edge_index(
    edge_index: Tensor,
    num_dst: int,
    num_src: int | None = None,
    coalesce: bool = False,
    parallel: Parallel = "error",
) -> TokenGraph:
    """The graph of an ``edge_index [2, E]`` or ``EdgeIndex``, in its order; see ``TokenGraph.from_edges``."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype not in edge_list.SIGNED_DTYPES:
        raise wrong_kind("edge_index must be a tensor of signed integers of shape [2, E]", edge_index)
    return TokenGraph.from_edges(edge_index, num_dst, num_src, coalesce, parallel=parallel)


def from_scipy(A: Any, rows: str, weight: bool = False, coalesce: bool = False) -> Any:
    """The graph of a SciPy sparse array or matrix of any format, or of a NumPy array.

    ``rows="src"``: ``A[src, dst]``, the adjacency of networkx and of ``scipy.sparse.csgraph``;
    ``rows="dst"``: ``A[dst, src]``, a mask. Every stored entry is an edge, a stored zero too, as in csgraph
    (``A.eliminate_zeros()`` drops them); the zeros of a NumPy array, and those which fill the blocks of BSR
    and the diagonals of DIA, are not. Edges are in the order of ``A.tocoo()``, of a NumPy array by row.

    ``weight=True`` returns ``(graph, weights)``: float ``[E]`` in the order of ``graph.edge_index``. Raises
    TypeError for another kind of object, ValueError for NaN and inf in a NumPy array, and for duplicate
    entries, unless ``coalesce=True`` keeps the first of each (without weights: none of them is dropped).

    >>> from_scipy(torch.tensor([[0, 3], [0, 0]]).numpy(), rows="src", weight=True)
    (TokenGraph(scipy: 2 src -> 2 dst), tensor([3.]))
    """
    if not (hasattr(A, "tocoo") or hasattr(A, "__array_interface__")):
        raise wrong_kind("A must be a SciPy sparse array or a NumPy array", A)
    checks.choice("rows", rows, ("src", "dst"))
    if A.ndim != 2 or A.dtype.kind not in "biuf":
        raise ValueError(f"A must be a matrix of numbers, got {checks.quote(A)}")
    if hasattr(A, "tocoo"):
        entries = A.tocoo()
        row, column, values = entries.row, entries.col, entries.data
        # other zeros fill a block or a diagonal
        is_edge = values != 0 if A.format in ("bsr", "dia") else slice(None)
        row, column, values = row[is_edge], column[is_edge], values[is_edge]
    else:
        row, column = A.nonzero()
        values = A.__array__()[row, column]
        if not (abs(values) < float("inf")).all():
            raise ValueError("A holds NaN or inf, which may be edges or not: use np.isfinite(A), or A != 0")
    # numbers that torch has, in the byte order of the machine
    kind = {"f": f"f{min(values.itemsize, 8)}", "u": "f8"}.get(values.dtype.kind, "i8")
    numbers = torch.from_numpy(values.astype(kind)) if weight else None
    edges = torch.stack([torch.tensor(row), torch.tensor(column)])
    edges, (num_src, num_dst) = (edges, A.shape) if rows == "src" else (edges.flip(0), A.shape[::-1])
    return _build(edges, numbers, num_dst, num_src, "merge" if coalesce else "error", "scipy")


def to_scipy(graph: TokenGraph, rows: str, weights: Tensor | None = None) -> Any:
    """The edges as a ``scipy.sparse.coo_array``, ``A[src, dst]`` for ``rows="src"`` or ``A[dst, src]``.

    The entries are True, or ``weights [E]``, in the order of ``graph.edge_index``.

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
    graph: networkx.Graph,
    order: Sequence[Hashable] | None = None,
    weight: str | None = None,
) -> Any:
    """The token graph of a networkx graph: an edge from u to v is a message from u to v.

    Nodes labelled exactly 0 .. n-1 are those positions; other labels need ``order``, every node once in a
    list. An undirected edge is a message in both directions; a self loop or a parallel edge counts once.
    ``weight`` names an attribute of the edges: the result is ``(graph, weights)``, float ``[E]`` in the
    order of ``graph.edge_index``. ValueError if ``order`` is missing or is not the nodes, if an edge has no
    such number, or several parallel ones. A graph of igraph comes from its ``to_networkx()``.

    >>> import networkx as nx
    >>> print(from_networkx(nx.DiGraph([("cat", "sat")]), order=["cat", "sat"]))
    networkx: mask[dst, src] and in-edges
    0 · ·   0 <- none
    1 ■ ·   1 <- 0
    """
    if isinstance(graph, type) or not all(hasattr(graph, name) for name in ("nodes", "edges", "is_directed")):
        raise wrong_kind("graph must be a networkx graph", graph)
    count = len(graph)
    if order is None and set(graph.nodes) != set(range(count)):
        shown = ", ".join(map(repr, list(graph.nodes)[:3]))
        raise ValueError(f"order is needed: nodes are not labelled 0 .. {count - 1}, got {shown}, ...")
    nodes = range(count) if order is None else checks.labels("order", order, count, f"{count} nodes")
    try:
        wrong = set(nodes).symmetric_difference(graph.nodes)
    except TypeError:
        got = checks.describe_type(order)
        raise TypeError(f"order must be a list of nodes, every one once, got {got}") from None
    if wrong:
        differing = sorted(map(repr, wrong))[:3]
        raise ValueError(f"order must hold every node once, but it lacks or adds {', '.join(differing)}")
    place = {node: position for position, node in enumerate(nodes)}
    # With weight=None networkx gives triples, too.
    triples = [(place[u], place[v], value) for u, v, value in graph.edges(data=weight)]
    return from_triples(triples, graph.is_directed(), count, weight, "networkx")


def to_networkx(graph: TokenGraph, weights: Tensor | None = None) -> networkx.DiGraph:
    """A ``networkx.DiGraph`` with an edge from src to dst for every message, nodes 0 .. n-1.

    ``weights [E]`` become the edge attribute "weight"; ValueError for another number of them. Where receivers
    and senders differ in number the nodes are ``("src", j)`` and ``("dst", i)``, with "bipartite" 0 and 1.

    >>> from gnn_attention import patterns
    >>> sorted(to_networkx(patterns.strict_causal(3)).edges)
    [(0, 1), (0, 2), (1, 2)]
    """
    import networkx as nx

    checks.instance("graph", graph, TokenGraph)
    result, edges = nx.DiGraph(name=graph.name), list(map(tuple, graph.edge_index.t().tolist()))
    if graph.num_dst == graph.num_src:
        result.add_nodes_from(range(graph.num_dst))
    else:
        result.add_nodes_from((("src", j) for j in range(graph.num_src)), bipartite=0)
        result.add_nodes_from((("dst", i) for i in range(graph.num_dst)), bipartite=1)
        edges = [(("src", j), ("dst", i)) for j, i in edges]
    result.add_edges_from(edges)
    if weights is not None:
        values = dict(zip(edges, _check_weights(graph, weights).tolist(), strict=True))
        nx.set_edge_attributes(result, values, "weight")
    return result


def from_pyg(
    data: Any,
    num_dst: int | None = None,
    num_src: int | None = None,
    coalesce: bool = False,
    weight: str | bool | None = None,
    parallel: Parallel = "error",
) -> Any:
    """The graph of torch_geometric's ``Data``, a relation of a ``HeteroData``, an edge list or an ``adj_t``.

    A ``Data``, or a relation ``hetero[src, name, dst]``, gives its ``edge_index`` or ``adj_t``; it knows its
    sizes if it (or the store of the kind of node) holds ``num_nodes`` or a tensor with a row for each node.
    An ``EdgeIndex`` may know them too. A sparse tensor of any layout is an ``adj_t``: its rows are receivers,
    exactly the attention mask, and what it stores are edges. Otherwise ``num_dst`` / ``num_src`` are needed:
    no size comes from the largest index. ``parallel`` is that of :meth:`TokenGraph.from_edges`.

    ``weight`` names an attribute of the edges, or is True for the values of a sparse tensor, which are
    detached: the result is ``(graph, weights)``, ``[E]`` in the order of ``graph.edge_index``. Raises
    TypeError for other kinds of object and ValueError where a size or the weights are missing.

    >>> adj_t = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to_sparse()
    >>> from_pyg(adj_t).edge_index.tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    edges, values, sizes = data, None, [(num_dst, num_src)]
    if hasattr(data, "keys") and (hasattr(data, "edge_index") or hasattr(data, "adj_t")):
        sizes.append(_look_up_sizes(data))
        edges = getattr(data, "edge_index", None)
        if isinstance(weight, str) and edges is not None and weight in data:
            values = torch.as_tensor(data[weight])
        edges = getattr(data, "adj_t", None) if edges is None else edges
        if edges is None:
            raise ValueError("data holds neither an edge_index nor an adj_t")
    if hasattr(edges, "to_torch_sparse_coo_tensor"):
        edges = edges.to_torch_sparse_coo_tensor()
    if isinstance(edges, Tensor) and edges.layout in edge_list.SPARSE_LAYOUTS:
        sizes.append((edges.shape[0], edges.shape[1]))
        edges, stored = sparse_entries("adj_t", edges)
        values = stored if weight is True else values
    elif not isinstance(edges, Tensor) or edges.dtype == torch.bool or edges.is_floating_point():
        kinds = "a relation of a HeteroData, an integer edge_index or a sparse adj_t"
        raise wrong_kind(f"expected a torch_geometric Data, EdgeIndex, {kinds}", edges)
    elif hasattr(edges, "sparse_size"):
        sizes.append(edges.sparse_size()[::-1])
    num_dst = _agree("num_dst", [size[0] for size in sizes])
    num_src = _agree("num_src", [size[1] for size in sizes])
    is_relation = isinstance(getattr(data, "_key", None), tuple)
    num_src = num_dst if num_src is None and not is_relation else num_src
    if num_dst is None or num_src is None:
        raise ValueError("num_dst and num_src are needed: this edge_index does not know its number of nodes")
    if weight and values is None:
        expected = "the name of an attribute beside the edge_index of a Data, or True of a sparse tensor"
        raise ValueError(f"data holds no weights of its edges at weight={weight!r}, expected {expected}")
    return _build(edges, values, num_dst, num_src, "merge" if coalesce else parallel, "pyg")


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
    import torch_geometric

    if kind == "edge_index":
        return torch_geometric.EdgeIndex(edges.clone(), sparse_size=(graph.num_src, graph.num_dst))
    if graph.num_dst != graph.num_src:
        raise ValueError(f"a Data has one kind of node, {graph!r} two; use kind='edge_index' or 'adj_t'")
    return torch_geometric.data.Data(edge_index=edges.clone(), num_nodes=graph.num_dst)


def sparse_entries(argument: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The edges ``(src, dst)`` that a sparse ``[dst, src]`` stores, in its order, and their values."""
    matrix = edge_list.unwrap_tensor(argument, matrix, edge_list.SPARSE_LAYOUTS)
    if matrix.dim() - matrix.dense_dim() != 2 or matrix.sparse_dim() != 2:
        got = f"{matrix.sparse_dim()} of shape {list(matrix.shape)}"
        raise ValueError(f"{argument} must have two sparse axes [dst, src], got {got}")
    # as stored: a duplicate must be seen, not summed
    entries = matrix.detach().to_sparse(layout=torch.sparse_coo)
    edges, values = entries._indices().flip(0), entries._values()
    # other zeros fill a block
    is_edge = values != 0 if matrix.layout in (torch.sparse_bsr, torch.sparse_bsc) else slice(None)
    return edges[:, is_edge], values[is_edge]


def _look_up_sizes(data: Any) -> tuple[int | None, int | None]:
    key = getattr(data, "_key", None)
    if not isinstance(key, tuple):
        return _count_nodes(data), _count_nodes(data)
    # a relation: its kinds of node may differ, and its HeteroData may be gone
    whole = data._parent()
    kinds = () if whole is None else whole.node_types
    src, dst = (_count_nodes(whole[kind]) if kind in kinds else None for kind in (key[0], key[-1]))
    return dst, src


def _count_nodes(store: Any) -> Any:
    # where no such key says it, `num_nodes` guesses the largest index + 1; so does `batch` beside `ptr`
    keys = NODE_KEYS if "ptr" in store else (*NODE_KEYS, "batch")
    arrays = (store[key] for key in keys if key in store)
    is_sized = "num_nodes" in store or any(hasattr(x, "shape") or hasattr(x, "num_rows") for x in arrays)
    return store.num_nodes if is_sized else None


def _agree(name: str, sizes: Sequence[int | None]) -> int | None:
    """The one size that the call and the object name, or None if neither does."""
    known = [size for size in sizes if size is not None]
    if any(size != known[0] for size in known):
        raise ValueError(f"{name}={known[0]} contradicts the object, which has {known[-1]}: leave {name} out")
    return known[0] if known else None


def from_triples(
    triples: list[tuple[int, int, Any]], is_directed: bool, count: int, weight: str | None, name: str
) -> Any:
    """The graph of ``(src, dst, value)``, both directions if undirected, a self loop once."""
    if not is_directed:
        triples = [triple for u, v, w in triples for triple in ((u, v, w), (v, u, w))[: 1 + (u != v)]]
    ends = [src for src, _, _ in triples], [dst for _, dst, _ in triples]
    edges = torch.tensor(ends, dtype=torch.int64, device="cpu")
    if weight is None:
        return _build(edges, None, count, count, "merge", name)
    checks.instance("weight", weight, str)
    for src, dst, value in triples:
        if not isinstance(value, Real):
            got = f"{checks.quote(value)} at the edge {src} -> {dst}"
            raise ValueError(f"weight={weight!r} must name a number of every edge, got {got}")
    values = torch.tensor([float(value) for *_, value in triples], device="cpu")
    return _build(edges, values, count, count, "merge", name)


def _build(
    edges: Tensor, values: Tensor | None, num_dst: int, num_src: int, parallel: Parallel, name: str
) -> Any:
    """The graph, or with values ``(graph, weights)``; ValueError where a weight is not finite or is lost."""
    parallel = "merge" if values is not None and parallel == "error" else parallel
    graph = TokenGraph.from_edges(edges, num_dst, num_src, name=name, parallel=parallel)
    if values is None:
        return graph
    if graph.num_edges != edges.shape[1]:
        ways = "A.sum_duplicates(), Data.coalesce(), networkx.Graph"
        raise ValueError(f"a graph takes one weight of parallel edges: join them first ({ways})")
    if values.is_complex() or values.numel() != edges.shape[1]:
        expected = f"one number for each of {edges.shape[1]} edges"
        raise ValueError(f"weight must be {expected}, got {checks.quote(values)}")
    values = values.reshape(-1)
    if not (is_number := values.isfinite()).all():
        src, dst = edges[:, ~is_number][:, 0].tolist()
        raise ValueError(
            f"a weight is a finite number, got {values[~is_number][0]} at the edge {src} -> {dst}"
        )
    return graph, values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _check_weights(graph: TokenGraph, weights: Tensor) -> Tensor:
    if not isinstance(weights, Tensor) or weights.is_complex() or weights.shape != (graph.num_edges,):
        got = checks.quote(weights)
        raise ValueError(f"weights must be a tensor of {graph.num_edges} numbers, one an edge, got {got}")
    weights = weights.detach().cpu()
    # SciPy has no other floating point numbers
    is_foreign = weights.is_floating_point() and weights.dtype not in (torch.float32, torch.float64)
    return weights.float() if is_foreign else weights
