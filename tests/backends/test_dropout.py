"""Dropout hashes edges by SplitMix64 as published; its masks are independent, and equal in all backends."""

import itertools

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import dropout
from gnn_attention.backends.dropout import FIRST_FACTOR, GOLDEN, SECOND_FACTOR, mask

CPU = torch.device("cpu")
NAMES = ["reference", "dense", "tiles", "rows"]


def mix_bits(z):
    z %= 2**64
    z = (z ^ (z >> 30)) * FIRST_FACTOR % 2**64
    z = (z ^ (z >> 27)) * SECOND_FACTOR % 2**64
    return z ^ (z >> 31)


def hash_of(seed, sample, head, dst, src):
    stream = mix_bits(seed + GOLDEN * ((sample << 32) + head + 1))
    return mix_bits(stream + GOLDEN * ((dst << 32) + src + 1))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
def test_the_mask_is_the_formula(seed, probability):
    numbers = list(itertools.product((0, 3), (0, 7), (0, 5, 2**31 - 1), (0, 6, 2**31 - 1)))
    expected = [(hash_of(seed, *n) >> 40) >= round(probability * 2**24) for n in numbers]
    assert mask(torch.tensor(seed), *torch.tensor(numbers).T, probability).tolist() == expected


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_the_share_is_even_and_edges_samples_and_heads_are_independent(probability):
    ends = torch.arange(600)
    b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(2).view(-1, 1, 1)
    keep = mask(torch.tensor(3), b, h, ends.view(-1, 1), ends, probability).double()
    sigma = (probability * (1 - probability) / 600**2) ** 0.5
    assert ((keep.mean((2, 3)) - (1 - probability)).abs() < 5 * sigma).all()
    assert ((keep.mean(-1) - (1 - probability)).abs() < 6 * sigma * 600**0.5).all()
    values = (keep.flatten(2).flatten(0, 1) - (1 - probability)) / sigma / 600
    # The first slice is compared with its transpose, and with itself one sender or one receiver further.
    shifted_masks = [values[0].view(600, 600).mT.flatten(), values[0].roll(1), values[0].roll(600)]
    for slice_values in [*values[1:], *shifted_masks]:
        assert abs(float((values[0] * slice_values).mean())) < 5 / 600


def test_the_seed_is_required_and_drawn_from_torchs_generator():
    with pytest.raises(ValueError, match=r"dropout 0\.5 needs a seed, got None"):
        dropout.drop_weights(torch.ones(1, 1, 2), None, 0.5, torch.arange(2), torch.arange(2))
    torch.manual_seed(5)
    first, second = dropout.draw_seed(CPU), dropout.draw_seed(CPU)
    torch.manual_seed(5)
    assert first != second
    assert first == dropout.draw_seed(CPU)


GRAPHS = [
    patterns.causal(40),
    patterns.window(200, 9) | patterns.sinks(200, 2),
    patterns.strict_causal(30).rows(10, 30),
    patterns.documents([5, 20, 13]),
    ga.TokenGraph.from_edges(torch.tensor([[4, 0, 2, 9, 9], [1, 0, 1, 3, 0]]), 5, 10),
    ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst - h, 12, heads=4, name="by head"),
]


def attend_with_dropout(graph, backend):
    torch.manual_seed(0)
    sizes = ((graph.num_dst, 4), (graph.num_src, 2), (graph.num_src, 2))
    q, k, v = (torch.randn(2, heads, n, 8, dtype=torch.float64, requires_grad=True) for n, heads in sizes)
    torch.manual_seed(1)
    out = ga.attend(q, k, v, graph, dropout=0.3, backend=backend)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda g: g.name)
@pytest.mark.parametrize("backend", NAMES[1:])
def test_every_backend_drops_the_same_edges(graph, backend):
    for out, truth in zip(*(attend_with_dropout(graph, x) for x in (backend, "reference")), strict=True):
        assert_exact(out, truth)


@pytest.mark.parametrize("backend", NAMES)
def test_dropout_acts_on_the_weights_of_the_formula(backend):
    graph = patterns.causal(9).rows(3, 9)
    q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.float64) for n in (6, 9, 9))
    torch.manual_seed(4)
    out = ga.attend(q, k, v, graph, dropout=0.4, backend=backend)
    torch.manual_seed(4)
    seed = int(dropout.draw_seed(CPU))
    weights = (q @ k.mT / 2).masked_fill(~graph.mask(), -torch.inf).softmax(-1)
    index = itertools.product(range(2), range(2), range(6), range(9))
    keep = torch.tensor([(hash_of(seed, b, h, i + 3, j) >> 40) >= round(0.4 * 2**24) for b, h, i, j in index])
    assert_exact(out, weights * keep.view(2, 2, 6, 9) / 0.6 @ v)
