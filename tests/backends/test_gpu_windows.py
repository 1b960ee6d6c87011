"""Row windows read back: their edges are the graph's, each once and in order, with its transpose, within the
memory stated.
"""

import bisect

import pytest
import torch
from support.plans import PLAIN

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.gpu.row_windows import SIZES, heaviest_first, numbers_of, windows_of

CPU = torch.device("cpu")
LISTS = {
    "no edges": ga.convert.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 20, 30),
    "nobody": ga.convert.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 0, 0),
    "last bits": ga.convert.from_edge_index(torch.tensor([[0, 3, 3, 2], [63, 31, 15, 64]]), 65, 4),
}
SOME = (
    "global tokens",
    "dilated",
    "tree",
    "cross",
    "one column",
    "the last alone",
    "rows of a window",
    "no ranges",
)
SOME += ("no receivers", "no senders", "random 0.01", "random 0.1", "random, in no order")
GRAPHS = {name: PLAIN[name] for name in SOME} | LISTS


def pairs(ptr, other, words, size):
    """``[own, other]`` of every bit, own token by own token, as the kernels number them."""
    found = [torch.zeros(0, 2, dtype=torch.int64)]
    for window, (start, stop) in enumerate(zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)):
        bits = (words[start:stop].long() >> torch.arange(size)[:, None]) & 1
        row, entry = bits.nonzero(as_tuple=True)
        found.append(torch.stack([window * size + row, other[start:stop].long()[entry]], 1))
    return torch.cat(found).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GRAPHS)
def test_windows_hold_the_edges_in_order(name, size):
    """Receiver by receiver, senders ascending; the transpose sender by sender."""
    graph = GRAPHS[name]
    src, dst = graph.edge_index.tolist()
    form = windows_of(graph, CPU, size)
    assert pairs(form.ptr, form.src, form.words, size) == sorted(map(list, zip(dst, src, strict=True)))
    assert pairs(form.out_ptr, form.dst, form.out_words, size) == sorted(
        map(list, zip(src, dst, strict=True))
    )
    assert len(form.ptr) - 1 == len(form.order) == -(-graph.num_dst // size)
    assert len(form.out_ptr) - 1 == len(form.out_order) == -(-graph.num_src // size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GRAPHS)
def test_memory_is_four_bytes_and_a_bit_for_each_receiver(name, size):
    """For each sender of a window, which is there once and hears of somebody."""
    form = windows_of(GRAPHS[name], CPU, size)
    assert form.src.element_size() + form.words.element_size() == 4 + size // 8
    assert (form.words != 0).all()
    bounds = list(zip(form.ptr[:-1].tolist(), form.ptr[1:].tolist(), strict=True))
    assert all((form.src[start:stop].diff() > 0).all() for start, stop in bounds)


@pytest.mark.parametrize("name", GRAPHS)
def test_numbers_of_edges(name):
    """Where the edges of each token begin, and the place by receiver of every edge by sender."""
    graph = GRAPHS[name]
    src, dst = graph.edge_index.tolist()
    by_dst = sorted(zip(dst, src, strict=True))
    first, out_first, position = (part.tolist() for part in numbers_of(graph, CPU))
    receivers, senders = [i for i, _ in by_dst], sorted(j for _, j in by_dst)
    assert first == [bisect.bisect_left(receivers, token) for token in range(graph.num_dst + 1)]
    assert out_first == [bisect.bisect_left(senders, token) for token in range(graph.num_src + 1)]
    assert [by_dst[place] for place in position] == sorted(by_dst, key=lambda pair: pair[::-1])


def test_numbers_are_there_only_where_they_are_asked_for():
    """A graph without a bias does not pay for them."""
    graph = patterns.window(40, 5)
    plain, asked = (windows_of(graph, CPU, 16, with_numbers) for with_numbers in (False, True))
    assert plain.first.numel() == plain.out_first.numel() == plain.position.numel() == 0
    assert len(asked.position) == graph.num_edges
    assert asked.src is plain.src


def test_an_order_by_work():
    """Every window once, of twice the work of a later one never after it, equals in their own order."""
    work = torch.randint(0, 5000, (300,), generator=torch.Generator().manual_seed(0))
    order = heaviest_first(work).long()
    assert torch.equal(order.sort().values, torch.arange(300))
    placed = work[order]
    assert all((placed[place:] <= 2 * placed[place] + 1).all() for place in range(300))
    assert torch.equal(heaviest_first(torch.full((50,), 7)), torch.arange(50).int())


def test_worked_out_once():
    graph = patterns.window(40, 5)
    assert windows_of(graph, CPU, 16).src is windows_of(graph, CPU, 16).src
    assert windows_of(graph, CPU, 16).size == 16


@pytest.mark.parametrize(
    ("size", "error"), [(48, ValueError), (0, ValueError), (16.0, TypeError), (True, TypeError)]
)
def test_other_sizes_are_refused(size, error):
    with pytest.raises(error, match="size must be"):
        windows_of(patterns.window(40, 5), CPU, size)


def test_a_graph_that_differs_by_head_is_refused():
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, 5, heads=2)
    with pytest.raises(ValueError, match="differs by head"):
        windows_of(graph, CPU, 16)
