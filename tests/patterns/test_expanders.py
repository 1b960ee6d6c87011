"""Random graphs follow their seeds; expanders, de Bruijn graphs and tori have the properties of theory."""

from __future__ import annotations

import random

import networkx
import pytest
import torch

from gnn_attention import convert, patterns

SEEDED_BUILDERS = {
    "random_senders": lambda seed: patterns.random_senders(40, 3, seed=seed),
    "random_senders, all": lambda seed: patterns.random_senders(40, 3, seed=seed, causal=False),
    "expander": lambda seed: patterns.expander(40, 2, seed=seed),
    "watts_strogatz": lambda seed: patterns.watts_strogatz(40, 4, 0.3, seed=seed),
    "erdos_renyi": lambda seed: patterns.erdos_renyi(40, 0.2, seed=seed),
}
each_builder = pytest.mark.parametrize("build", SEEDED_BUILDERS.values(), ids=SEEDED_BUILDERS)


class TestSeeds:
    @each_builder
    def test_a_seed_determines_the_graph(self, build):
        assert torch.equal(build(3).edge_index, build(3).edge_index)
        assert len({tuple(build(seed).edge_index.flatten().tolist()) for seed in range(5)}) == 5

    @each_builder
    def test_global_random_states_do_not_change(self, build):
        states = torch.get_rng_state(), random.getstate()
        graph = build(3)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        torch.manual_seed(99)
        random.seed(99)
        assert build(3) == graph


def test_the_spectral_gap_of_an_expander():
    """The second eigenvalue of the union of d cycles is nearly ``2 sqrt(2 d - 1)``."""
    for seed in range(5):
        mask = patterns.expander(300, 3, seed=seed, causal=False).mask().double()
        assert torch.linalg.eigvalsh(mask)[-2] < 2 * 5**0.5 + 0.2


class TestDeBruijn:
    @pytest.mark.parametrize(("k", "length"), [(2, 1), (2, 5), (3, 3), (5, 2), (1, 3)])
    def test_one_walk_of_full_length_between_any_two_words(self, k, length):
        steps = patterns.de_bruijn(k, length).mask().long()
        assert torch.linalg.matrix_power(steps, length).unique().tolist() == [1]


class TestTorus:
    @pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 3), (2, 2, 2), (3, 2, 4)])
    def test_periodic_grids_of_networkx(self, sizes):
        grid = networkx.grid_graph(tuple(reversed(sizes)), periodic=True)
        assert patterns.torus(*sizes) == convert.from_networkx(grid, order=sorted(grid.nodes))
