"""Influence equals closed forms and the influence that torch_geometric computes."""

import math

import pytest
import torch
from support.bounds import assert_exact
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv, Sequential
from torch_geometric.utils import total_influence
from torch_geometric.utils.influence import jacobian_l1

from gnn_attention import TokenGraph, analyse, patterns


def cycle(tokens):
    src = torch.arange(tokens)
    return TokenGraph.from_edges(torch.stack([src, (src + 1) % tokens]), tokens)


def test_influence_along_a_window_of_two_is_binomial():
    """In each layer, half of the share of attention comes from one token earlier."""
    tokens, layers, residual = 12, 7, 0.3
    row = analyse.influence(patterns.window(tokens, 2), layers, residual, receivers=[11])[0]
    p = (1 - residual) / 2
    expected = [math.comb(layers, k) * p**k * (1 - p) ** (layers - k) for k in range(12)]
    assert_exact(row.flip(0), torch.tensor(expected, dtype=torch.float64))


def test_influence_around_a_cycle_is_binomial_wrapped():
    """Selected columns and rows equal those of the whole matrix."""
    tokens, layers, residual = 5, 8, 0.25
    graph = cycle(tokens)
    expected = torch.zeros(tokens, dtype=torch.float64)
    for k in range(layers + 1):
        expected[k % tokens] += math.comb(layers, k) * (1 - residual) ** k * residual ** (layers - k)
    full = analyse.influence(graph, layers, residual)
    assert_exact(full[:, 0], expected)
    assert_exact(analyse.influence(graph, layers, residual, senders=[0])[:, 0], expected)
    assert_exact(analyse.influence(graph, layers, residual, receivers=[3, 1], senders=[0]), full[[3, 1], :1])


def test_influence_of_a_list_of_layers_is_the_product():
    """Each layer, beginning with the first, has its own graph, weights and residual share."""
    graphs = [patterns.window(6, 3), patterns.causal(6)]
    weights = [torch.rand(graph.num_edges, dtype=torch.float64) for graph in graphs]
    expected = torch.eye(6, dtype=torch.float64)
    for graph, weight, residual in zip(graphs, weights, (0.1, 0.6), strict=True):
        matrix = torch.zeros(6, 6, dtype=torch.float64)
        matrix[graph.edge_index[1], graph.edge_index[0]] = weight
        expected = (residual * torch.eye(6, dtype=torch.float64) + (1 - residual) * matrix) @ expected
    assert_exact(analyse.influence(graphs, 2, [0.1, 0.6], weights), expected)


@pytest.mark.parametrize(
    "options", [{"residual": 1.5}, {"weights": torch.ones(2)}, {"weights": -torch.ones(7)}]
)
def test_influence_refuses_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        analyse.influence(patterns.window(4, 2), 1, **options)


def test_measured_influence_is_that_of_torch_geometric():
    """In layers of torch_geometric, norms agree in float64, and totals by hop in float32."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 6, 4]])
    model = Sequential(
        "x, e", [(SAGEConv(3, 4), "x, e -> x"), torch.nn.Tanh(), (SAGEConv(4, 2), "x, e -> x")]
    )
    data = Data(x=torch.randn(7, 3), edge_index=edges)
    expected, breadth = total_influence(model, data, 4, normalize=False)
    model, data.x = model.double(), data.x.double()
    norms = analyse.jacobian_norms(lambda x: model(x, edges), data.x)
    assert_exact(norms, torch.stack([jacobian_l1(model, data, 4, node, "cpu") for node in range(7)]))
    hops = analyse.by_hop(norms, TokenGraph.from_edges(edges, 7))
    mean = hops.total.mean(0)[:5]
    # The sums of positive numbers have some 50 roundings.
    assert bool(((mean - expected[: len(mean)]).abs() <= 50 * 2**-24 * float(expected.max())).all())
    assert abs(float(hops.range.mean()) - breadth) <= 50 * 2**-24 * 4


@pytest.mark.slow
def test_projections_estimate_the_frobenius_norm():
    """A mean of 4000 squares has a relative standard error of 1 / sqrt(2000); five of them are allowed."""
    matrix = torch.randn(3, 3, dtype=torch.float64)
    norms = analyse.jacobian_norms(lambda x: matrix @ x, torch.randn(3, 6).double(), projections=4000)
    expected = matrix.abs() * 6**0.5
    assert bool(((norms - expected).abs() <= 5 / 2000**0.5 * expected).all())
