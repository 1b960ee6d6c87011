"""Asymmetric graphs are converted from and to masks, networkx, torch_geometric and FlexAttention."""

from __future__ import annotations

from itertools import product

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import assert_exact
from support.refusals import assert_refusals
from torch import Tensor
from torch.nn import functional
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

import gnn_attention as ga
from gnn_attention import TokenGraph, convert, patterns

fixed = settings(derandomize=True, deadline=None, max_examples=50)
INF = torch.inf

# There are 4 receivers and 5 senders; receiver 2 is isolated.
ASYMMETRIC = torch.tensor([[0, 0, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]]).bool()
SQUARE = torch.cat([ASYMMETRIC, torch.tensor([[False, False, False, True, True]])])


def pairs(graph: TokenGraph) -> list[tuple[int, int]]:
    return [(src, dst) for src, dst in graph.edge_index.t().tolist()]


def pairs_of_mask(mask: Tensor) -> set[tuple[int, int]]:
    """Return the edges of ``mask[dst, src]``, found by a loop."""
    return {(src, dst) for dst, src in product(*map(range, mask.shape)) if mask[dst, src]}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@st.composite
def tables(draw: st.DrawFn) -> Tensor:
    """Draw any bool mask [dst, src], which may have empty axes."""
    num_dst, num_src = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    cells = draw(st.lists(st.booleans(), min_size=num_dst * num_src, max_size=num_dst * num_src))
    return torch.tensor(cells, dtype=torch.bool).reshape(num_dst, num_src)


class TestMasks:
    @fixed
    @given(tables())
    def test_there_and_back(self, mask):
        graph = convert.from_mask(mask)
        assert (graph.num_dst, graph.num_src) == tuple(mask.shape)
        assert set(pairs(graph)) == pairs_of_mask(mask)
        assert torch.equal(graph.mask(), mask)
        assert torch.equal(convert.to_sdpa_mask(graph), mask)
        assert convert.from_mask(~mask, "masked") == graph
        assert convert.from_mask(convert.to_sdpa_mask(graph, torch.float32)) == graph
        assert convert.from_mask(mask.T) == graph.T

    @pytest.mark.parametrize("leading", [(3,), (1, 1), (2, 1), (2, 3)], ids=str)
    @pytest.mark.parametrize("meaning", ["attend", "masked", "additive"])
    def test_leading_axes_are_batch_and_heads(self, leading, meaning):
        """A mask is [heads, dst, src] or [batch, heads, dst, src]; an axis of size 1 broadcasts."""
        edges = draw(*leading, 4, 5) > 0
        additive = torch.zeros(edges.shape).masked_fill(~edges, -INF)
        graph = convert.from_mask({"attend": edges, "masked": ~edges, "additive": additive}[meaning], meaning)
        batch, heads = (1, *leading)[-2:]
        assert (graph.batch, graph.heads) == (batch if batch > 1 else None, heads if heads > 1 else None)
        assert torch.equal(graph.mask().reshape(edges.shape), edges)
        for b, h in product(range(batch), range(heads)):
            assert set(pairs(graph.select(b, h))) == pairs_of_mask(edges.reshape(batch, heads, 4, 5)[b, h])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_additive_non_edges(self, dtype):
        """-inf and the lowest number of the dtype are non-edges; 0.0 and -0.0 are edges."""
        lowest = torch.finfo(dtype).min
        mask = torch.tensor([[0.0, -INF, lowest], [-0.0, 0.0, -INF]], dtype=dtype)
        graph = convert.from_mask(mask)
        assert isinstance(graph, TokenGraph)
        assert pairs(graph) == [(0, 0), (0, 1), (1, 1)]
        graph, bias = convert.from_mask(torch.tensor([[0.5, lowest, -INF]], dtype=dtype))
        assert pairs(graph) == [(0, 0)]
        assert (bias.tolist(), bias.dtype) == ([0.5], dtype)

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
    def test_sdpa_mask(self, dtype):
        """SDPA with the mask equals attend with the graph; a float mask holds 0.0 and -inf."""
        graph = convert.from_mask(SQUARE)
        mask = convert.to_sdpa_mask(graph, dtype)
        assert mask.dtype == (dtype or torch.bool)
        if dtype is not None:
            assert torch.equal(mask == 0, SQUARE)
            assert torch.equal(mask == -INF, ~SQUARE)
        q, k, v = (draw(2, 2, 5, 4, seed=seed) for seed in range(3))
        mask = mask if dtype is None else mask.double()
        expected = functional.scaled_dot_product_attention(q, k, v, mask)
        assert_exact(ga.attend(q, k, v, graph, backend="reference"), expected)

    def test_wrong_masks(self):
        cases = [
            (torch.ones(2, 2), None, ValueError, r"ambiguous: .* mask != 0 .*meaning='additive'"),
            (torch.tensor([[0.0, torch.nan]]), None, ValueError, "this one holds NaN or .inf"),
            (torch.ones(2, 2, dtype=torch.int64), None, TypeError, r"bool or float tensor, got"),
            (torch.ones(2, dtype=torch.bool), None, ValueError, r"mask must be \[dst, src\], .*got \[2\]"),
            (torch.ones(2, 2, dtype=torch.bool), "additive", TypeError, "does not fit torch.bool"),
            (torch.ones(2, 2, dtype=torch.bool), "keep", ValueError, "meaning must be one of 'attend',"),
            (torch.ones(0, 2, 2, dtype=torch.bool), None, ValueError, r"heads.*at least 1|\[0, 2, 2\]"),
        ]
        for mask, meaning, error, match in cases:
            with pytest.raises(error, match=match):
                convert.from_mask(mask, meaning)


class TestMasksWithNumbers:
    @pytest.mark.parametrize("numbers", [[[0.0, 2.5], [1.0, 0.0]], [[0.0, 1.0], [-2.0, 1.0]]])
    def test_a_meaning_is_taken_at_its_word(self, numbers):
        """Additive numbers are biases; without a meaning, they may be an adjacency, and are refused."""
        graph, bias = convert.from_mask(torch.tensor(numbers), "additive")
        assert graph.is_full()
        assert bias.tolist() == [number for row in numbers for number in row]
        with pytest.raises(ValueError, match="a float mask with zeros and positive numbers is ambiguous"):
            convert.from_mask(torch.tensor(numbers))

    @pytest.mark.parametrize(
        ("leading", "expected"),
        [((), ()), ((3,), (3,)), ((1, 3), (3,)), ((2, 1), (2, 1)), ((2, 3), (2, 3)), ((1, 1), ())],
    )
    def test_shapes_of_the_bias(self, leading, expected):
        """The bias is [E], [heads, E] or [batch, heads, E]; attend with it equals SDPA with the mask."""
        mask = draw(*leading, 4, 5).masked_fill(~ASYMMETRIC, -INF)
        graph, bias = convert.from_mask(mask)
        assert graph == convert.from_mask(ASYMMETRIC)
        assert bias.shape == (*expected, int(ASYMMETRIC.sum()))
        q, k, v = draw(2, 3, 4, 4), draw(2, 3, 5, 4, seed=1), draw(2, 3, 5, 4, seed=2)
        output = ga.attend(q, k, v, graph, bias=bias, backend="reference")
        sdpa_output = functional.scaled_dot_product_attention(q, k, v, mask)
        assert_exact(output, sdpa_output)

    def test_numbers_need_one_edge_order(self):
        mask = torch.tensor([[[0.5, -INF]], [[0.5, 0.0]]])
        with pytest.raises(ValueError, match="holds a bias, and its edges vary by head or sample"):
            convert.from_mask(mask)


@pytest.mark.parametrize("form", [torch.clone, lambda edges: EdgeIndex(edges, sparse_size=(5, 4))])
def test_an_edge_index_in_its_order(form):
    edges = torch.tensor([[4, 0, 2, 0], [1, 3, 1, 0]])
    graph = convert.from_edge_index(form(edges), 4, 5)
    assert type(graph.edge_index) is Tensor
    assert torch.equal(graph.edge_index, edges)
    assert (graph.num_dst, graph.num_src) == (4, 5)


class TestNetworkx:
    @fixed
    @given(tables().filter(lambda mask: mask.shape[0] == mask.shape[1]))
    def test_there_and_back(self, mask):
        graph = convert.from_mask(mask)
        network = convert.to_networkx(graph)
        assert set(network.edges) == pairs_of_mask(mask)
        assert list(network.nodes) == list(range(graph.num_dst))
        assert network.name == graph.name
        assert convert.from_networkx(network) == graph

    def test_labels_need_an_order(self):
        network = nx.DiGraph([("the", "cat"), ("cat", "sat")])
        with pytest.raises(ValueError, match=r"order is needed: nodes are not labelled 0 \.\. 2"):
            convert.from_networkx(network)
        graph = convert.from_networkx(network, order=["sat", "the", "cat"])
        assert set(pairs(graph)) == {(1, 2), (2, 0)}

    def test_self_loops_and_parallel_edges_count_once(self):
        edges = [(0, 0), (0, 1), (0, 1), (1, 0), (2, 2), (2, 2)]
        for kind in (nx.MultiDiGraph, nx.MultiGraph):
            assert sorted(pairs(convert.from_networkx(kind(edges)))) == [(0, 0), (0, 1), (1, 0), (2, 2)]

    @pytest.mark.parametrize(
        ("order", "error", "match"),
        [
            (["a"], ValueError, "order must hold 2 names, one for each of the nodes, got 1"),
            (["a", "a"], ValueError, "order must hold every node once, .* 'b'"),
            (3, TypeError, "order must be a list of 2 labels"),
            (["a", ["b"]], TypeError, "order must hold nodes, which are hashable"),
        ],
    )
    def test_wrong_orders(self, order, error, match):
        with pytest.raises(error, match=match):
            convert.from_networkx(nx.DiGraph([("a", "b")]), order)

    def test_two_kinds_of_node(self):
        network = convert.to_networkx(convert.from_mask(ASYMMETRIC))
        assert set(network.edges) == {(("src", src), ("dst", dst)) for src, dst in pairs_of_mask(ASYMMETRIC)}
        sides = {("src", j): 0 for j in range(5)} | {("dst", i): 1 for i in range(4)}
        assert dict(network.nodes(data="bipartite")) == sides
        assert nx.is_bipartite(network)


def test_what_is_no_graph_is_refused():
    varied = TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, 3, heads=2)
    empty, causal, rectangle = Data(x=torch.zeros(2, 1)), patterns.causal(3), patterns.cross(2, 3)
    cases = [
        (lambda: convert.from_pyg(torch.eye(3), 3, 3), TypeError, "expected .*got a Tensor of torch.float32"),
        (lambda: convert.from_pyg(empty), ValueError, "neither an edge_index nor an"),
        (lambda: convert.to_pyg(causal, "csr"), ValueError, "kind must be one of 'data', 'edge_index',"),
        (lambda: convert.to_pyg(rectangle), ValueError, "a Data has one kind of node.*use kind='edge_index'"),
        (lambda: convert.to_pyg(varied, "adj_t"), ValueError, "varies by head"),
        (lambda: convert.to_networkx(varied), ValueError, "varies by head"),
    ]
    assert_refusals(cases)


class TestPyG:
    graph = TokenGraph.from_edges(torch.tensor([[4, 0, 2, 0], [1, 3, 1, 0]]), 4, 5)
    square = TokenGraph.from_edges(torch.tensor([[4, 0, 2, 0], [1, 3, 1, 0]]), 6)

    def test_data(self):
        data = convert.to_pyg(self.square)
        assert isinstance(data, Data)
        assert data.num_nodes == 6
        assert torch.equal(data.edge_index, self.square.edge_index)
        result = convert.from_pyg(data)
        assert result == self.square
        assert torch.equal(result.edge_index, self.square.edge_index)

    @pytest.mark.parametrize("layout", ["coo", "csr"])
    def test_adj_t(self, layout):
        """The rows of the sparse tensor are receivers, as in the mask."""
        adj_t = convert.to_pyg(self.graph, "adj_t")
        assert adj_t.shape == (4, 5)
        assert torch.equal(adj_t.to_dense().bool(), self.graph.mask())
        adj_t = adj_t if layout == "coo" else adj_t.to_sparse_csr()
        assert convert.from_pyg(adj_t) == self.graph
        assert convert.from_pyg(Data(adj_t=convert.to_pyg(self.square, "adj_t"), num_nodes=6)) == self.square

    def test_duplicates_inside_sparse_tensors_are_refused(self):
        """Duplicates are never summed into one value."""
        edges = torch.tensor([[0, 1, 1], [2, 0, 0]])
        coo = torch.sparse_coo_tensor(edges, torch.ones(3), (3, 3), check_invariants=False)
        with pytest.raises(ValueError, match=r"1 duplicate edges \(the edge 0 -> 1 is at 1 and 2\)"):
            convert.from_pyg(coo)
        assert pairs(convert.from_pyg(coo, coalesce=True)) == [(2, 0), (0, 1)]
