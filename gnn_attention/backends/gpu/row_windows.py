"""Row windows: a graph as groups of neighbouring receivers with the senders that any of them hears, and who
hears whom in bits.

A window of ``size`` receivers lists its senders once, each with a word whose bit r says that the r-th
receiver of the window hears it: 4 + size / 8 bytes for each sender of a window. Where neighbours hear much
the same senders (grids in Hilbert order, meshes), a kernel reads a sender once for all of them. The transpose
has windows of senders in the same way, for the gradients of k and v. The number of an edge is not stored: it
is where the row begins and the count of the row's bits before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph, memoized

WORDS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
SIZES = tuple(WORDS)  # receivers of a window
MOST = 2**31 - 2**16  # that int32 can number, also where the last step of a program runs over the last entry


class Windows(NamedTuple):
    """Window w lists the senders ``src[ptr[w] .. ptr[w + 1] - 1]``, ascending, with ``words`` beside them;
    ``order`` is by work.

    ``out_ptr``, ``out_words`` and ``out_order`` are those of the transpose, whose windows of senders list the
    receivers ``dst``. ``first`` (where the edges of each receiver begin), ``out_first`` (the same for
    senders) and ``position`` (where each edge, by sender, then receiver, stands by receiver) are empty unless
    edges are numbered.
    """

    ptr: Int[Tensor, " windows_and_one"]
    src: Int[Tensor, " senders"]
    words: Int[Tensor, " senders"]
    order: Int[Tensor, " windows"]
    out_ptr: Int[Tensor, " out_windows_and_one"]
    dst: Int[Tensor, " receivers"]
    out_words: Int[Tensor, " receivers"]
    out_order: Int[Tensor, " out_windows"]
    first: Int[Tensor, "..."]
    out_first: Int[Tensor, "..."]
    position: Int[Tensor, "..."]
    size: int


def windows_of(
    graph: TokenGraph, device: torch.device, size: int = 64, with_numbers: bool = False
) -> Windows:
    """The windows of a plain graph on a device, worked out once in ``O(E log E)``; never of the size dst x
    src.

    ``with_numbers`` adds what numbers the edges, where a call has a tensor with an entry for each. Raises
    TypeError or ValueError for a ``size`` that is none of 16, 32 and 64, ValueError for a graph that differs
    by head or sample.

    >>> graph = TokenGraph.from_edges(torch.tensor([[5, 0, 5, 9], [0, 1, 1, 16]]), 20)
    >>> found = windows_of(graph, torch.device("cpu"), 16)
    >>> found.ptr.tolist(), found.src.tolist(), found.words.tolist()
    ([0, 2, 3], [0, 5, 9], [2, 3, 1])
    """
    if checks.size("size", size) not in WORDS:
        raise ValueError(f"size must be one of {', '.join(map(str, SIZES))} receivers, got {size}")
    form: Windows = memoized(_lowered, graph, device, size)
    if not with_numbers:
        return form
    numbers = numbers_of(graph, device)
    return form._replace(first=numbers.first, out_first=numbers.out_first, position=numbers.position)


class Numbers(NamedTuple):
    """``first``, ``out_first`` and ``position`` of a form whose edges are numbered, as in
    :class:`Windows`.
    """

    first: Int[Tensor, " receivers_and_one"]
    out_first: Int[Tensor, " senders_and_one"]
    position: Int[Tensor, " edges"]


def numbers_of(graph: TokenGraph, device: torch.device) -> Numbers:
    """What numbers the edges of a plain graph on a device, worked out once.

    >>> graph = TokenGraph.from_edges(torch.tensor([[1, 0, 1], [0, 2, 2]]), 3)
    >>> [part.tolist() for part in numbers_of(graph, torch.device("cpu"))]
    [[0, 1, 1, 3], [0, 1, 3, 3], [1, 0, 2]]
    """
    found: Numbers = memoized(_numbers, graph, device)
    return found


def heaviest_first(work: Int[Tensor, " groups"]) -> Int[Tensor, " groups"]:
    """An order that begins with the groups of most work, so that none starts last and alone.

    Neighbours of like work stay together, since they hear the same senders.

    >>> heaviest_first(torch.tensor([4, 5, 900, 6])).tolist()
    [2, 0, 1, 3]
    """
    octave = (work + 1).double().log2().floor()
    return octave.argsort(descending=True, stable=True).int()


def _lowered(graph: TokenGraph, device: torch.device, size: int) -> Windows:
    src, dst = graph.edge_index.to(device)  # not edges_on, which would keep 16 bytes an edge there
    ahead = _side(dst, src, graph.num_dst, graph.num_src, size)
    back = _side(src, dst, graph.num_src, graph.num_dst, size)
    nothing = src.new_zeros(0, dtype=torch.int32)
    return Windows(*ahead, *back, nothing, nothing, nothing, size)


def _side(
    own: Tensor, other: Tensor, num_own: int, num_other: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Windows of ``own`` tokens: where the others of each begin, the others, their words, and the order of
    the windows.
    """
    many = max(num_other, 1)
    pairs, which = torch.unique(own // size * many + other, return_inverse=True)
    bit = torch.ones_like(own) << (own % size)
    words = torch.zeros_like(pairs).index_add_(0, which, bit)  # each bit once: the sum is their union
    count = torch.bincount(pairs // many, minlength=-(-num_own // size))
    return _begins(count), (pairs % many).int(), words.to(WORDS[size]), heaviest_first(count)


def _begins(count: Tensor) -> Tensor:
    """Where the entries of each group begin, and where the last ends."""
    ends = count.cumsum(0)
    return _narrow(torch.cat([ends.new_zeros(1), ends]), int(ends[-1]) if len(ends) else 0)


def _narrow(numbers: Tensor, largest: int) -> Tensor:
    return numbers.int() if largest <= MOST else numbers


def _numbers(graph: TokenGraph, device: torch.device) -> Numbers:
    src, dst = graph.edge_index.to(device)
    key = (dst * max(graph.num_src, 1) + src).sort().values
    src, dst = key % max(graph.num_src, 1), key // max(graph.num_src, 1)
    first = _begins(torch.bincount(dst, minlength=graph.num_dst))
    out_first = _begins(torch.bincount(src, minlength=graph.num_src))
    return Numbers(first, out_first, _narrow(src.sort(stable=True).indices, len(src)))
