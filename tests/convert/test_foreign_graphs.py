"""Each kind of graph is read with its sizes, direction, weights and order; other objects are refused."""

from __future__ import annotations

from functools import partial

import igraph
import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse import csgraph
from support.bounds import assert_exact
from support.refusals import assert_refusals
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch_geometric.data import Batch, Data, HeteroData

import gnn_attention as ga
from gnn_attention import TokenGraph, convert, patterns

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of (nested tensors|MaskedTensors) is in prototype"),
    pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs"),
]

# Token 5 of 6 has no edge at all, and only the loop is its own reverse.
WEIGHTS = {(3, 1): 0.5, (0, 1): 2.0, (1, 2): 3.0, (2, 2): 4.0, (4, 0): 0.25}
N = 6
PAIRS, NUMBERS = torch.tensor(list(WEIGHTS)).t(), torch.tensor(list(WEIGHTS.values()), dtype=torch.float64)
# This matrix is A[src, dst].
ADJACENCY = np.zeros((N, N))
ADJACENCY[tuple(PAIRS.numpy())] = NUMBERS.numpy()
LAYOUTS = {"coo": {}, "csr": {}, "csc": {}, "bsr": {"blocksize": (2, 3)}, "bsc": {"blocksize": (2, 3)}}


def triples(graph, weights):
    return {
        (src, dst): w for (src, dst), w in zip(graph.edge_index.t().tolist(), weights.tolist(), strict=True)
    }


def adj_t(layout):
    return torch.tensor(ADJACENCY).t().to_sparse(layout=getattr(torch, f"sparse_{layout}"), **LAYOUTS[layout])


def to_nx():
    result = nx.DiGraph()
    result.add_nodes_from(range(N))
    result.add_weighted_edges_from([(*pair, w) for pair, w in WEIGHTS.items()])
    return result


def to_igraph():
    return igraph.Graph(N, list(WEIGHTS), directed=True, edge_attrs={"weight": list(WEIGHTS.values())})


def data(**attributes):
    return Data(edge_index=PAIRS, edge_weight=NUMBERS, edge_attr=NUMBERS[:, None], **attributes)


def hetero():
    result = HeteroData()
    result["paper"].x = torch.zeros(N, 1)
    result["paper", "cites", "paper"].edge_index = PAIRS
    result["paper", "cites", "paper"].edge_weight = NUMBERS
    return result


# The object has a name, because a relation does not keep its HeteroData alive.
HETERO = hetero()


def load(read, *arguments, weight=True, **options):
    """Return a graph with its weights, and assert that it is the same without them."""
    graph, weights = read(*arguments, weight=weight, **options)
    assert read(*arguments, **options) == graph
    return graph, weights


KINDS = {
    **{
        f"scipy {make.__name__}, rows={rows}": lambda make=make, rows=rows: load(
            convert.from_scipy, make(ADJACENCY if rows == "src" else ADJACENCY.T), rows
        )
        for name in ("csr", "csc", "coo", "bsr", "dia", "dok", "lil")
        for make in (getattr(sp, f"{name}_array"), getattr(sp, f"{name}_matrix"))
        for rows in ("src", "dst")
    },
    "scipy, blocks of zeros": lambda: load(convert.from_scipy, sp.csr_array(ADJACENCY).tobsr((2, 3)), "src"),
    "numpy, rows=dst": lambda: load(convert.from_scipy, ADJACENCY.T, "dst"),
    "numpy, other bytes": lambda: load(convert.from_scipy, ADJACENCY.astype(">f8"), "src"),
    "numpy, long": lambda: load(convert.from_scipy, ADJACENCY.astype(np.longdouble), "src"),
    "networkx": lambda: load(convert.from_networkx, to_nx(), weight="weight"),
    "igraph": lambda: load(convert.from_networkx, to_igraph().to_networkx(), weight="weight"),
    "Data, edge_weight": lambda: load(convert.from_pyg, data(num_nodes=N), weight="edge_weight"),
    "Data, edge_attr": lambda: load(convert.from_pyg, data(x=torch.zeros(N, 2)), weight="edge_attr"),
    "Data, adj_t": lambda: load(convert.from_pyg, Data(adj_t=adj_t("csr"))),
    "relation": lambda: load(convert.from_pyg, HETERO["paper", "cites", "paper"], weight="edge_weight"),
    **{f"adj_t, {layout}": lambda layout=layout: load(convert.from_pyg, adj_t(layout)) for layout in LAYOUTS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_direction_and_weights(kind):
    """With q = 0 and bias = log w, the output is the mean sum w v / sum w over senders, as in NumPy."""
    graph, weights = KINDS[kind]()
    assert (graph.num_dst, graph.num_src) == (N, N)
    assert triples(graph, weights) == WEIGHTS
    v = torch.arange(2.0 * N, dtype=torch.float64).reshape(1, 1, N, 2)
    out = ga.attend(torch.zeros_like(v), torch.zeros_like(v), v, graph, bias=weights.double().log())
    total = ADJACENCY.sum(0)[:, None]
    mean = np.divide(ADJACENCY.T @ v[0, 0].numpy(), total, out=np.zeros((N, 2)), where=total > 0)
    assert_exact(out[0, 0], torch.tensor(mean))


def test_edges_are_in_the_order_of_the_object():
    columns = torch.tensor(sorted(WEIGHTS, key=lambda pair: pair[::-1])).t()
    cases = {
        "Data": (convert.from_pyg(data(num_nodes=N)), PAIRS),
        "coo": (
            convert.from_scipy(sp.coo_array((NUMBERS, tuple(PAIRS.numpy())), shape=(N, N)), "src"),
            PAIRS,
        ),
        "csc": (convert.from_scipy(sp.csc_array(ADJACENCY), "src"), columns),
        "numpy": (convert.from_scipy(ADJACENCY.T, "dst"), columns),
        "adj_t": (convert.from_pyg(adj_t("csr")), columns),
    }
    for kind, (graph, expected) in cases.items():
        assert torch.equal(graph.edge_index, expected), kind


def test_matrices_of_two_kinds_of_token():
    matrix = np.array([[0, 1, 0], [1, 0, 1]])
    for matrix_form in (sp.csr_array(matrix), sp.coo_matrix(matrix), matrix, matrix.astype(bool)):
        graph = convert.from_scipy(matrix_form, "dst")
        assert torch.equal(graph.mask(), torch.tensor(matrix).bool())
        assert convert.from_scipy(matrix_form, "src") == graph.T
    graph, weights = convert.from_scipy(matrix, "dst", weight=True)
    assert (weights.dtype, weights.tolist()) == (torch.float32, [1.0, 1.0, 1.0])
    assert convert.from_pyg(torch.tensor(matrix).to_sparse()) == graph


def test_a_relation_knows_the_sizes_of_both_its_kinds():
    hetero_data = HeteroData()
    hetero_data["author"].num_nodes, hetero_data["paper"].x = 3, torch.zeros(4, 1)
    hetero_data["author", "writes", "paper"].edge_index = torch.tensor([[2, 0], [1, 1]])
    hetero_data["venue", "prints", "paper"].edge_index = torch.tensor([[2, 0], [1, 1]])
    graph = convert.from_pyg(hetero_data["author", "writes", "paper"])
    assert (graph.num_src, graph.num_dst, graph.edge_index.tolist()) == (3, 4, [[2, 0], [1, 1]])
    with pytest.raises(ValueError, match="num_dst and num_src are needed"):
        convert.from_pyg(hetero_data["venue", "prints", "paper"])
    with pytest.raises(ValueError, match="num_dst=3 contradicts the object, which has 4"):
        convert.from_pyg(hetero_data["author", "writes", "paper"], 3)
    assert convert.from_pyg(hetero_data["venue", "prints", "paper"], num_src=5).num_src == 5
    # Reading a relation does not change the object.
    assert hetero_data.node_types == ["author", "paper"]
    relation = hetero_data["author", "writes", "paper"]
    del hetero_data
    with pytest.raises(ValueError, match="num_dst and num_src are needed"):
        convert.from_pyg(relation)


class TestSizes:
    edges = torch.tensor([[0], [1]])

    @pytest.mark.parametrize("key", ["x", "pos", "batch", "node_type", "n_id"])
    def test_a_row_for_each_node_says_how_many_there_are(self, key):
        rows = torch.zeros(3, 2) if key in ("x", "pos") else torch.zeros(3, dtype=torch.int64)
        assert convert.from_pyg(Data(edge_index=self.edges, **{key: rows})).num_dst == 3

    @pytest.mark.parametrize(
        "attributes", [{}, {"target_node": torch.tensor([1])}, {"x": [1.0, 2.0, 3.0]}], ids=str
    )
    def test_what_holds_none(self, attributes):
        """Data without sizes is refused; torch_geometric would guess from indices or keys with "node"."""
        with pytest.raises(ValueError, match="num_dst and num_src are needed"):
            convert.from_pyg(Data(edge_index=self.edges, **attributes))
        graph = convert.from_pyg(Data(edge_index=self.edges, **attributes), 3)
        assert (graph.num_dst, graph.num_src) == (3, 3)

    @pytest.mark.filterwarnings("ignore:Unable to accurately infer 'num_nodes'")
    def test_a_batch_of_graphs_without_sizes(self):
        """A batch is refused too, as the size of its vector ``batch`` is guessed from the largest index."""
        with pytest.raises(ValueError, match="num_dst and num_src are needed"):
            convert.from_pyg(Batch.from_data_list([Data(edge_index=self.edges)] * 2))


class TestWeights:
    def test_undirected_edges_weigh_the_same_both_ways(self):
        """An edge has its weight in both directions, a self loop once, as in the adjacency of networkx."""
        edges = [("a", "b", 2.0), ("b", "c", 0.5), ("b", "b", 3.0)]
        undirected = nx.Graph()
        undirected.add_weighted_edges_from(edges)
        order = ["c", "a", "b"]
        expected = nx.to_numpy_array(undirected, order)
        graph, weights = convert.from_networkx(undirected, order, weight="weight")
        assert np.array_equal(convert.to_scipy(graph, "src", weights).toarray(), expected)
        assert graph.num_edges == 5

    def test_every_edge_has_one(self):
        parallel = nx.MultiDiGraph([(0, 1, {"w": 1}), (0, 1, {"w": 2})])
        named = nx.DiGraph([(0, 1, {"w": "heavy"})])
        duplicates = sp.coo_array((np.ones(2), (np.array([0, 0]), np.array([1, 1]))), shape=(2, 2))
        features = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2, edge_attr=torch.zeros(1, 3))
        scipy, networkx, pyg = convert.from_scipy, convert.from_networkx, convert.from_pyg
        join_message = "one weight for each pair of tokens: join parallel edges first"
        missing_message = "names no weights in data, expected an attribute"
        cases = [
            (lambda: networkx(parallel, weight="w"), ValueError, join_message),
            (lambda: scipy(duplicates, "src", weight=True, coalesce=True), ValueError, join_message),
            (lambda: scipy(duplicates, "src"), ValueError, "1 duplicate edges"),
            (lambda: networkx(named, weight="w"), ValueError, "every edge, got 'heavy' at the edge 0 -> 1"),
            (lambda: networkx(named, weight=True), TypeError, "weight must be a str, got True"),
            (lambda: pyg(features, weight="edge_weight"), ValueError, f"'edge_weight' {missing_message}"),
            (lambda: pyg(features, weight="edge_attr"), ValueError, r"one number for each of 1 edges"),
            (lambda: pyg(features, weight=True), ValueError, f"weight=True {missing_message}"),
        ]
        assert_refusals(cases)
        assert scipy(duplicates, "src", coalesce=True).num_edges == 1

    @pytest.mark.parametrize("number", [np.nan, -np.inf], ids=str)
    def test_each_is_a_finite_number(self, number):
        matrix = sp.coo_array((np.array([1.0, number]), (np.array([0, 1]), np.array([2, 0]))), shape=(3, 3))
        network = nx.from_scipy_sparse_array(matrix, create_using=nx.DiGraph)
        match = f"must be finite numbers, got {number} at the edge 1 -> 0"
        with pytest.raises(ValueError, match=match):
            convert.from_scipy(matrix, "src", weight=True)
        with pytest.raises(ValueError, match=match):
            convert.from_networkx(network, weight="weight")

    def test_stored_zeros_are_edges_as_in_csgraph(self):
        matrix = sp.csr_array((np.array([0.0, 2.0, 0.0]), (np.array([0, 1, 3]), np.array([1, 2, 0]))), (4, 4))
        for matrix_form in (matrix, matrix.tocoo(), matrix.astype(bool)):
            expected = csgraph.shortest_path(matrix_form, unweighted=True) == 1
            assert np.array_equal(convert.from_scipy(matrix_form, "src").mask().T.numpy(), expected)
        assert triples(*convert.from_scipy(matrix, "src", weight=True)) == {(0, 1): 0, (1, 2): 2, (3, 0): 0}
        matrix.eliminate_zeros()
        assert convert.from_scipy(matrix, "src").num_edges == 1

    @pytest.mark.parametrize("rows", ["src", "dst"])
    def test_there_and_back(self, rows):
        for graph in (convert.from_pyg(data(num_nodes=N)), patterns.cross(2, 3), patterns.causal(0)):
            matrix = convert.to_scipy(graph, rows)
            assert matrix.dtype == bool
            result = convert.from_scipy(matrix, rows)
            assert result == graph
            assert torch.equal(result.edge_index, graph.edge_index)
            weights = torch.arange(graph.num_edges).add(0.5)
            result, numbers = convert.from_scipy(convert.to_scipy(graph, rows, weights), rows, weight=True)
            assert triples(result, numbers) == triples(graph, weights)

    def test_networkx_there_and_back(self):
        graph = convert.from_pyg(data(num_nodes=N))
        out = convert.to_networkx(graph, weights=NUMBERS)
        assert nx.utils.graphs_equal(nx.DiGraph(out.edges(data=True)), nx.DiGraph(to_nx().edges(data=True)))
        assert triples(*convert.from_networkx(out, weight="weight")) == WEIGHTS
        bipartite = convert.to_networkx(patterns.cross(1, 2), weights=torch.tensor([3.0, 4.0]))
        assert bipartite[("src", 1)][("dst", 0)]["weight"] == 4.0
        for wrong in (NUMBERS[:2], [1.0]):
            with pytest.raises(ValueError, match="weights must hold 5 numbers, one per edge"):
                convert.to_networkx(graph, weights=wrong)


# ---- Tensors whose stored elements are not those of the mask

GARBAGE = {"lower_right": causal_lower_right, "upper_left": causal_upper_left}


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3)], ids=str)
@pytest.mark.parametrize("align", GARBAGE)
def test_causal_biases_of_torch(sizes, align):
    """A causal bias is read as SDPA reads it, a ``tril`` aligned at the first or the last tokens."""
    mask = GARBAGE[align](*sizes)
    graph = convert.from_mask(mask)
    diagonal = sizes[1] - sizes[0] if align == "lower_right" else 0
    assert torch.equal(graph.mask(), torch.ones(sizes).tril(diagonal).bool())
    with pytest.raises(ValueError, match="meaning must be one of 'attend', got"):
        convert.from_mask(mask, "masked")
    with pytest.raises(ValueError, match="a copy of a CausalBias is empty"):
        convert.from_mask(mask.double())
    if sizes != (5, 3):
        q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (sizes[0], sizes[1], sizes[1]))
        expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert_exact(ga.attend(q, k, v, graph, backend="reference"), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_masks(layout):
    """True is an edge, and a stored False is not; a mask may vary by head."""
    mask = torch.tensor(ADJACENCY).t().bool()
    sparse = mask.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **LAYOUTS[layout])
    sparse.values()[0] = False
    dense = sparse.to_dense()
    assert convert.from_mask(sparse) == convert.from_mask(dense)
    assert convert.from_mask(sparse, "masked") == convert.from_mask(dense, "masked")
    stack = torch.stack([mask, mask.t()]).to_sparse()
    assert convert.from_mask(stack) == convert.from_mask(stack.to_dense())
    for numbers in (sparse.to(torch.float32), stack.float()):
        with pytest.raises(ValueError, match="does not say whether a missing entry is an edge: use"):
            convert.from_mask(numbers)


def test_sparse_tensors_have_two_sparse_axes():
    features = torch.sparse_coo_tensor(PAIRS.flip(0), torch.ones(5, 3), (N, N, 3), check_invariants=False)
    assert convert.from_pyg(features) == convert.from_pyg(data(num_nodes=N))
    one_axis, three_axes = torch.eye(3).bool().to_sparse(1), torch.eye(3)[None].to_sparse()
    cases = [
        (lambda: convert.from_pyg(three_axes), ValueError, r"got 3 of shape \[1, 3, 3\]"),
        (lambda: convert.from_mask(one_axis), ValueError, r"two sparse axes.*got 1 of"),
    ]
    assert_refusals(cases)


INDEX = PAIRS[:, 1:3]


def under_vmap(read):
    return lambda x: torch.vmap(lambda element: (read(element), element)[1])(x[None])


UNREADABLE = {
    "nested": (lambda read: lambda x: read(torch.nested.as_nested_tensor([x, x])), "to_padded_tensor"),
    "masked": (lambda read: lambda x: read(torch.masked.masked_tensor(x, x > 0)), r"x\.to_tensor\(value\)"),
    "vmap": (under_vmap, "make the graph outside of torch.vmap"),
    "meta": (lambda read: lambda x: read(x.to("meta")), "a tensor on the meta device has no values"),
}
READERS = {
    "mask": (convert.from_mask, torch.ones(3, 3, dtype=torch.bool)),
    "edge_index": (lambda x: convert.from_edge_index(x, 3), INDEX),
    "edge_index of positions_of": (patterns.full(3).positions_of, INDEX),
    "count": (lambda x: TokenGraph.from_indices(INDEX, 3, count=x), torch.tensor([1, 2])),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("reader", READERS)
def test_elements_that_cannot_be_read(reader, kind):
    """The error names the argument and the remedy, and is never an internal error of torch."""
    make, advice = UNREADABLE[kind]
    read, tensor = READERS[reader]
    with pytest.raises(ValueError, match=f"^{reader.split()[0]} must hold values, .*{advice}"):
        make(read)(tensor)


def test_tensors_of_other_classes_are_read():
    """Tensors are read inside transforms that do not map them, and if they are of a subclass of Tensor."""

    class Named(Tensor):
        pass

    for read, tensor in READERS.values():
        expected = read(tensor)
        result = torch.func.grad(lambda x, read=read, tensor=tensor: (read(tensor), x)[1])(torch.tensor(1.0))
        assert result == 1.0
        result = read(tensor.as_subclass(Named))
        assert torch.equal(result, expected) if isinstance(expected, Tensor) else result == expected
        assert type(result) is type(expected)


# ---- Objects that another function reads

WRONG = [sp.csr_array(ADJACENCY), to_nx(), to_igraph(), data(num_nodes=N), HETERO, torch.ones(2), "a.edges"]
FUNCTIONS = {
    "mask must be a bool or float tensor": (convert.from_mask, Tensor),
    "A must be a SciPy sparse array or a NumPy array": (
        partial(convert.from_scipy, rows="src"),
        sp.csr_array,
    ),
    "graph must be a networkx graph": (convert.from_networkx, nx.DiGraph),
    "edge_index must be a tensor of signed": (partial(convert.from_edge_index, num_dst=N), ()),
    r"expected a torch_geometric Data, EdgeIndex, data\[key\], adj_t or edge_index": (convert.from_pyg, Data),
}


@pytest.mark.parametrize("expected", FUNCTIONS)
def test_another_kind_of_object_is_told_all_functions(expected):
    read, accepted_type = FUNCTIONS[expected]
    match = f"{expected}.*, got .*; other kinds of graph: convert.from_scipy .*files.load"
    values = [value for value in WRONG if not isinstance(value, accepted_type)]
    assert_refusals([(partial(read, value), TypeError, match) for value in values])


def test_matrices_that_are_none():
    scipy = convert.from_scipy
    cases = [
        (lambda: scipy(ADJACENCY, "row"), ValueError, "rows must be one of 'src', 'dst', got 'row'"),
        (lambda: scipy(np.ones(3), "src"), ValueError, r"A must be a matrix of numbers, .* shape \[3\]"),
        (lambda: scipy(np.array([[-np.inf]]), "dst"), ValueError, "A has NaN or inf, which may or may not"),
    ]
    assert_refusals(cases)
