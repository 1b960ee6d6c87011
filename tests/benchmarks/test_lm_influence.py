"""The kinds of edges over which ``benchmarks.lm_influence`` takes means."""

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs

needs("transformers")

from benchmarks import lm_influence as bench  # noqa: E402


@pytest.mark.parametrize("name", bench.GRAPHS)
def test_edges_of_a_kind_have_one_distance_or_one_sender(name):
    """Between two of the first tokens of a graph with sinks, both."""
    graph = bench.GRAPHS[name]
    (src, dst), kind = graph.edge_index, bench.kinds(graph)
    assert int(kind.max()) < bench.KINDS
    one = [torch.zeros(bench.KINDS, dtype=torch.bool) for _ in range(2)]
    for same, value in zip(one, (dst - src, src), strict=True):
        low, high = (
            torch.zeros(bench.KINDS, dtype=torch.long).scatter_reduce(0, kind, value, how, include_self=False)
            for how in ("amin", "amax")
        )
        same |= low == high
    assert bool((one[0] | one[1])[kind].all())
    if name == "sinks":
        assert not bool(((src < bench.SINKS) & (kind < bench.T)).any())


def test_rows_by_receiver_sum_to_those_of_edges():
    """Whatever the number of in-edges."""
    graph = bench.GRAPHS["sinks"]
    rows = torch.randn(graph.num_edges, 3, dtype=torch.float64)
    dst = graph.edge_index[1]
    wanted = torch.zeros(bench.T, 3, dtype=torch.float64).index_add_(0, dst, rows)
    assert_exact(bench._by_receiver(dst, rows).sum(1), wanted)
