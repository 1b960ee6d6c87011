"""What must travel, against the mask: a rank hears the senders of its rows, less those it owns."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_attention import patterns
from gnn_attention.convert import catalogue, expressions
from gnn_attention.distributed import halo_sets
from gnn_attention.distributed.halo_sets import edges_between, halo, halo_sizes
from gnn_attention.distributed.partition import Partition, contiguous, of_owners, zigzag
from gnn_attention.distributed.partitioners import by_edges, documents
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.diagonals import diagonals
from gnn_attention.graph.regions.quadtree import Boxes

ASYMMETRIC = TokenGraph.from_edges(torch.tensor([[0, 2, 1, 8, 3, 3], [1, 1, 2, 0, 7, 8]]), 9)


def scattered(graph: TokenGraph, world: int, seed: int = 0) -> Partition:
    """Every receiver and every sender on a random rank."""
    draw = torch.Generator().manual_seed(seed)
    return Partition(
        *(
            of_owners(torch.randint(0, world, (n,), generator=draw), world)
            for n in (graph.num_dst, graph.num_src)
        )
    )


def check(graph: TokenGraph, partition: Partition) -> None:
    """Halo, its sizes and the edges between ranks are those of the mask."""
    mask = graph.mask().reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst, graph.num_src)
    sizes, edges = halo_sizes(graph, partition), edges_between(graph, partition)
    for rank in range(partition.world_size):
        rows = mask[:, partition.dst.tokens(rank)]
        heard = rows.any(0).any(0)
        arriving = halo(graph, partition, rank)
        assert len(arriving) == partition.world_size
        for other in range(partition.world_size):
            own = partition.src.tokens(other)
            expected = own[heard[own]] if other != rank else own[:0]
            assert torch.equal(arriving[other], expected)
            assert int(sizes[rank, other]) == len(expected)
            assert int(edges[rank, other]) == int(rows[:, :, own].sum())


HANDFUL = [
    "window(64, 8)",
    "cross(24, 64)",
    "dilated(64, 8, 4)",
    "bigbird(64, 4)",
    "etc(64, 4, 4)",
    "documents([24, 8, 32])",
    "duo_attention(64, 4, [1], 8)",
    "shared_bucket(tensor([[0, 1, 0, 2, 1, 0, 2, 1]]))",
    "strict_causal(40).rows(7, 31)",
    "~(window(50, 5).T)",
]


@pytest.mark.parametrize("make", [contiguous, zigzag, scattered])
@pytest.mark.parametrize("expression", HANDFUL)
def test_a_handful_of_graphs(expression, make):
    graph = expressions.evaluate(expression)
    check(graph, make(graph, 3))


@pytest.mark.parametrize("world", [1, 2, 5, 20])
def test_a_list_of_edges(world):
    check(ASYMMETRIC, contiguous(ASYMMETRIC, world))
    check(ASYMMETRIC.T, scattered(ASYMMETRIC, world))


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.EXAMPLES)
def test_the_whole_zoo(name):
    graph = expressions.evaluate(catalogue.EXAMPLES[name])
    if not isinstance(graph, TokenGraph):
        pytest.skip("makes values for edges")
    for make, world in ((contiguous, 5), (zigzag, 4), (scattered, 3), (by_edges, 9)):
        check(graph, make(graph, world))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(0, 9),
    st.booleans(),
)
def test_random_mixtures(n, w, sinks, world, seed, turned):
    graph = (patterns.window(n, w) ^ patterns.sinks(n, sinks)) | patterns.strides(n, w)
    graph = graph.T if turned else graph
    check(graph, scattered(graph, world, seed))


@pytest.mark.parametrize(("boxes", "unmerged"), [(1, 1), (7, 2), (40, 2**22)])
@pytest.mark.parametrize("expression", HANDFUL)
def test_more_runs_than_are_asked_about_one_by_one(expression, boxes, unmerged, monkeypatch):
    """Senders in groups of runs, and stretches joined a few at a time: the same."""
    monkeypatch.setattr(halo_sets, "MAX_BOXES", boxes)
    monkeypatch.setattr(halo_sets, "MAX_UNMERGED", unmerged)
    monkeypatch.setattr(halo_sets, "COLUMNS_AT_ONCE", boxes)
    graph = expressions.evaluate(expression)
    check(graph, scattered(graph, 4))


@pytest.mark.parametrize(
    "graph",
    [patterns.causal(0), patterns.cross(0, 5), patterns.cross(5, 0), patterns.causal(4) - patterns.causal(4)],
)
def test_nobody_hears_anybody(graph):
    check(graph, contiguous(graph, 3))


class TestTheorems:
    @pytest.mark.parametrize(("n", "w", "world"), [(100, 7, 4), (100, 60, 7), (1_000_000, 4096, 64)])
    def test_a_window_hears_the_tokens_before_its_first(self, n, w, world):
        """The halo of a rank is min(w - 1, start) senders, whatever the number of tokens; at any scale."""
        graph = patterns.window(n, w)
        partition = contiguous(graph, world)
        starts = [partition.dst.ranges(rank)[0][0] for rank in range(world)]
        assert halo_sizes(graph, partition).sum(1).tolist() == [min(w - 1, start) for start in starts]
        last = torch.cat(halo(graph, partition, world - 1))
        assert torch.equal(last, torch.arange(starts[-1] - min(w - 1, starts[-1]), starts[-1]))

    def test_a_causal_graph_hears_everything_before(self):
        graph = patterns.causal(1003)
        partition = contiguous(graph, 5)
        for rank in range(5):
            assert torch.equal(
                torch.cat(halo(graph, partition, rank)), torch.arange(partition.dst.ranges(rank)[0][0])
            )

    def test_a_document_inside_a_rank_needs_nothing(self):
        graph = patterns.documents([500] * 40)
        for make, travels in ((documents, False), (contiguous, True)):
            assert bool(halo_sizes(graph, make(graph, 7)).any()) == travels

    @pytest.mark.parametrize("make", [contiguous, zigzag, by_edges])
    def test_no_edge_is_lost_or_counted_twice(self, make):
        for graph in (patterns.window(100_000, 999) | patterns.sinks(100_000, 4), patterns.causal(30_011)):
            assert int(edges_between(graph, make(graph, 16)).sum()) == graph.num_edges

    def test_bytes_of_a_window_do_not_grow_with_the_tokens(self):
        totals = {
            int(halo_sizes(graph, contiguous(graph, 8)).sum())
            for n in (4096, 65536, 524_288)
            for graph in [patterns.window(n, 100)]
        }
        assert totals == {7 * 99}


class TestDiagonals:
    @pytest.mark.parametrize(
        ("graph", "alone"),
        [
            (patterns.window(50, 7), True),
            (patterns.strides(50, 6).T, True),
            (patterns.cross(9, 14) & patterns.cross(9, 14), False),
            (patterns.documents([20, 30]), False),
            (ASYMMETRIC, False),
            (patterns.window(50, 7).rows(20, 30), True),
            (patterns.duo_attention(64, 4, [1], 8), False),
        ],
    )
    def test_which_graphs_depend_on_the_difference_alone(self, graph, alone):
        assert (diagonals(graph) is not None) == alone

    def test_any_box_and_its_columns(self):
        """Against the mask, for an asymmetric graph of 13 receivers and 20 senders."""
        graph = (patterns.dilated(33, 9, 2).rows(7, 20)).T.rows(3, 23).T
        boxes = torch.tensor([[0, 0, 13, 20], [2, 5, 4, 7], [12, 19, 1, 1], [3, 0, 1, 20], [0, 6, 13, 1]])
        table, mask, zero = diagonals(graph), graph.mask(), torch.zeros(5, dtype=torch.int64)
        found = Boxes(zero, zero, zero, boxes[:, 0], boxes[:, 1], boxes[:, 2], boxes[:, 3])
        parts = [mask[top : top + height, left : left + width] for top, left, height, width in boxes.tolist()]
        assert table.edges(found).tolist() == [int(part.sum()) for part in parts]
        assert table.columns(found)[0].tolist() == [bool(heard) for part in parts for heard in part.any(0)]


def test_worked_out_once():
    graph = patterns.window(64, 8)
    for count in (halo_sizes, edges_between):
        assert count(graph, contiguous(graph, 4)) is count(graph, contiguous(graph, 4))


@pytest.mark.parametrize(
    "count", [halo_sizes, edges_between, lambda graph, partition: halo(graph, partition, 0)]
)
def test_a_partition_of_other_tokens_is_refused(count):
    with pytest.raises(
        ValueError, match=r"partition is of 7 receivers and 7 senders, but .*window.* has 8 and 8"
    ):
        count(patterns.window(8, 2), contiguous(patterns.causal(7), 2))


def test_a_rank_that_is_none():
    graph = patterns.window(8, 2)
    with pytest.raises(IndexError, match=r"rank must be in 0 .. 1, got 2"):
        halo(graph, contiguous(graph, 2), 2)
