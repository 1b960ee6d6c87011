"""Influence, resistance, curvature and the gap of weights: closed forms, theorems, other libraries."""

import math

import networkx
import pytest
import torch
from support.bounds import assert_exact
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv, Sequential
from torch_geometric.utils import total_influence
from torch_geometric.utils.influence import jacobian_l1

from gnn_attention import TokenGraph, analyse, convert, patterns


def cycle(tokens, loops=False):
    src = torch.arange(tokens)
    edges = torch.stack([src, (src + 1) % tokens])
    edges = torch.cat([edges, torch.stack([src, src])], 1) if loops else edges
    return TokenGraph.from_edges(edges, tokens)


def test_influence_along_a_window_of_two_is_binomial():
    """Each layer moves one back with half of the attention's share."""
    tokens, layers, own = 12, 7, 0.3
    row = analyse.influence(patterns.window(tokens, 2), layers, own, receivers=[11])[0]
    p = (1 - own) / 2
    wanted = [math.comb(layers, k) * p**k * (1 - p) ** (layers - k) for k in range(12)]
    assert_exact(row.flip(0), torch.tensor(wanted, dtype=torch.float64))


def test_influence_around_a_cycle_is_binomial_wrapped():
    """Columns, rows and the whole agree."""
    tokens, layers, own = 5, 8, 0.25
    graph = cycle(tokens)
    wanted = torch.zeros(tokens, dtype=torch.float64)
    for k in range(layers + 1):
        wanted[k % tokens] += math.comb(layers, k) * (1 - own) ** k * own ** (layers - k)
    whole = analyse.influence(graph, layers, own)
    assert_exact(whole[:, 0], wanted)
    assert_exact(analyse.influence(graph, layers, own, senders=[0])[:, 0], wanted)
    assert_exact(analyse.influence(graph, layers, own, receivers=[3, 1], senders=[0]), whole[[3, 1], :1])


def test_influence_of_a_list_of_layers_is_the_product():
    """Weights, shares and graphs of each layer, first layer first."""
    graphs = [patterns.window(6, 3), patterns.causal(6)]
    weights = [torch.rand(graph.num_edges, dtype=torch.float64) for graph in graphs]
    wanted = torch.eye(6, dtype=torch.float64)
    for graph, weight, own in zip(graphs, weights, (0.1, 0.6), strict=True):
        matrix = torch.zeros(6, 6, dtype=torch.float64)
        matrix[graph.edge_index[1], graph.edge_index[0]] = weight
        wanted = (own * torch.eye(6, dtype=torch.float64) + (1 - own) * matrix) @ wanted
    assert_exact(analyse.influence(graphs, 2, [0.1, 0.6], weights), wanted)


def test_horizon_is_the_farthest_share_above_eps():
    """Down a path all of the attention's share moves on: share C(3, k) / 8 at distance k."""
    graph = patterns.window(9, 2) - patterns.self_loops(9)
    assert [analyse.horizon(graph, 3, eps) for eps in (0.3, 0.2, 0.125, 0.1)] == [2, 2, 3, 3]
    assert analyse.horizon(graph, 3, 0.5) == 0


@pytest.mark.parametrize(
    "wrong", [{"residual": 1.5}, {"weights": torch.ones(2)}, {"weights": -torch.ones(7)}]
)
def test_influence_refuses_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        analyse.influence(patterns.window(4, 2), 1, **wrong)


def test_measured_influence_is_that_of_torch_geometric():
    """On its own layers: every norm in float64, and the totals by hop, which it sums in float32."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 6, 4]])
    model = Sequential(
        "x, e", [(SAGEConv(3, 4), "x, e -> x"), torch.nn.Tanh(), (SAGEConv(4, 2), "x, e -> x")]
    )
    data = Data(x=torch.randn(7, 3), edge_index=edges)
    wanted, breadth = total_influence(model, data, 4, normalize=False)
    model, data.x = model.double(), data.x.double()
    norms = analyse.jacobian_norms(lambda x: model(x, edges), data.x)
    assert_exact(norms, torch.stack([jacobian_l1(model, data, 4, node, "cpu") for node in range(7)]))
    found = analyse.by_hop(norms, TokenGraph.from_edges(edges, 7))
    total = found.total.mean(0)[:5]
    # some 50 roundings of sums of positive numbers
    assert bool(((total - wanted[: len(total)]).abs() <= 50 * 2**-24 * float(wanted.max())).all())
    assert abs(float(found.range.mean()) - breadth) <= 50 * 2**-24 * 4


@pytest.mark.slow
def test_projections_estimate_the_frobenius_norm():
    """The mean of 4000 squares of a sum of 6 squares: relative error 1 / sqrt(2000), five of them allowed."""
    matrix = torch.randn(3, 3, dtype=torch.float64)
    found = analyse.jacobian_norms(lambda x: matrix @ x, torch.randn(3, 6).double(), projections=4000)
    wanted = matrix.abs() * 6**0.5
    assert bool(((found - wanted).abs() <= 5 / 2000**0.5 * wanted).all())


@pytest.mark.parametrize("graph", [patterns.window(9, 3), patterns.documents([4, 5]), patterns.causal(7)])
def test_resistances_of_edges_sum_as_foster_says(graph):
    """Tokens less components."""
    parts = int(analyse.components(graph).max()) + 1
    total = analyse.effective_resistance(graph).sum()
    assert_exact(total, torch.tensor(float(graph.num_dst - parts), dtype=torch.float64))


def test_resistance_on_paths_cycles_and_by_spanning_trees():
    """|i - j|; k (n - k) / n; by determinants; inf between components."""
    pairs = torch.tensor([[0, 0, 1], [1, 4, 6]])
    exact = lambda *v: torch.tensor(v, dtype=torch.float64)  # noqa: E731
    assert_exact(analyse.effective_resistance(patterns.window(7, 2), pairs), exact(1, 4, 5))
    assert_exact(analyse.effective_resistance(cycle(7), pairs), exact(6 / 7, 12 / 7, 10 / 7))
    graph = patterns.window(7, 3)
    # Kirchhoff: spanning forests that part i from j, over spanning trees
    joined = (graph | graph.T).mask().double().fill_diagonal_(0.0)
    laplacian = joined.sum(1).diag() - joined
    less = lambda *out: torch.det(laplacian[(k := [t for t in range(7) if t not in out])][:, k])  # noqa: E731
    wanted = torch.stack([less(i, j) / less(i) for i, j in pairs.T.tolist()])
    assert_exact(analyse.effective_resistance(graph, pairs), wanted)
    apart = analyse.effective_resistance(patterns.documents([2, 2]), torch.tensor([[0], [3]]))
    assert apart.tolist() == [math.inf]


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [(cycle(3), 1.5), (cycle(4), 1.0), (cycle(5), 0.0), (cycle(9), 0.0), (patterns.no_self(6), 6 / 5)],
)
def test_curvature_of_cycles_and_complete_graphs(graph, wanted):
    """The table of arXiv 2111.14522: 3/2, 1, 0, n / (n - 1)."""
    values = analyse.curvature(graph)
    assert_exact(values, torch.full_like(values, wanted))


def test_curvature_of_a_tree_and_of_a_grid():
    """4 / (r + 1) - 2 inside a tree of r children; 0 inside a grid."""
    tree = convert.from_networkx(networkx.balanced_tree(3, 3))
    inside = torch.tensor([[1], [4]])
    assert_exact(analyse.curvature(tree, inside)[0], torch.tensor(4 / 4 - 2, dtype=torch.float64))
    grid = convert.from_networkx(networkx.convert_node_labels_to_integers(networkx.grid_2d_graph(6, 6)))
    middle = torch.tensor([[14], [15]])
    assert_exact(analyse.curvature(grid, middle)[0], torch.tensor(0.0, dtype=torch.float64))
    with pytest.raises(ValueError, match="edges"):
        analyse.curvature(grid, torch.tensor([[0], [35]]))


def test_gap_of_weights_on_a_cycle():
    """Half stays, half moves on: eigenvalues (1 + w) / 2, of size cos(pi k / n)."""
    graph = cycle(8, loops=True)
    gap = analyse.spectral_gap(graph, weights=torch.full((16,), 0.5))
    assert abs(gap - (1 - math.cos(math.pi / 8))) < 1e-12
